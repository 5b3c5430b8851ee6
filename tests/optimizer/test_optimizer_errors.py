"""What optimizers refuse: numbers, kinds, losses, and a second use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from amp_transpiler import append_backward, optimizer as optim
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GradientError, GraphError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.nn import data, fc, functional as F
from amp_transpiler.nn.parameters import create_parameter
from amp_transpiler.program import Program, program_guard
from tests.helpers.steps import feed


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda: optim.Adam(beta1=1.0), "beta1"),
        (lambda: optim.Adam(beta2=-0.1), "beta2"),
        (lambda: optim.AdamW(epsilon=-1e-8), "epsilon"),
        (lambda: optim.SGD(-1.0), "learning_rate"),
        (lambda: optim.SGD(float("nan")), "learning_rate"),
        (lambda: optim.SGD("fast"), "learning_rate"),
        (lambda: optim.Momentum(momentum=-0.5), "momentum"),
        (lambda: optim.Adam(weight_decay=-1.0), "weight_decay"),
        (lambda: optim.Lamb(lamb_weight_decay=-1.0), "weight_decay"),
        (lambda: optim.ClipGradByNorm(0.0), "clip_norm"),
        (lambda: optim.ClipGradByValue(1.0, min=2.0), "min"),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        make()


def test_numpy_numbers_are_numbers() -> None:
    assert optim.Adam(np.float32(0.5), weight_decay=np.int64(2)).learning_rate == 0.5


def test_wrong_kinds_are_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="parameter_list"):
        optim.SGD(parameter_list="fc_0.w_0")
    with pytest.raises(ArgumentTypeError, match="grad_clip"):
        optim.SGD(grad_clip=1.0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="apply_decay_param_fun"):
        optim.AdamW(apply_decay_param_fun="bias")  # type: ignore[arg-type]


def small_program() -> tuple[Program, Variable, Variable]:
    main = Program(startup=Program("startup"))
    with program_guard(main):
        w = create_parameter([2], name="w", initializer=np.ones(2, np.float32))
        loss = main.add_variable("loss", "float32", ())
        main.add_operator("ReduceSum", [w], [loss], attrs={"keepdims": 0})
    return main, w, loss


def test_losses_that_cannot_be_minimised() -> None:
    main, w, _ = small_program()
    alone = main.add_input("alone", "float32", ())
    with pytest.raises(GradientError, match="scalar"):
        optim.SGD().minimize(w)
    with pytest.raises(GradientError, match="does not depend on any parameter"):
        optim.SGD().minimize(alone)
    with pytest.raises(ArgumentTypeError, match="Variable"):
        optim.SGD().minimize("loss")  # type: ignore[arg-type]
    assert len(main.operators) == 1 and not main.updates


def test_a_program_is_minimised_once_and_needs_its_startup_program() -> None:
    main, w, loss = small_program()
    ops, params_grads = optim.SGD().minimize(loss)
    assert [op.type for op in ops] == ["SGD"] and params_grads[0][0] is w
    with pytest.raises(GraphError, match="updated already"):
        optim.SGD().apply_gradients(params_grads)
    main, w, loss = small_program()
    with pytest.raises(GraphError, match="does not initialise"):
        optim.SGD().minimize(loss, Program("other"))
    main.startup = None
    with pytest.raises(ArgumentError, match="startup"):
        optim.SGD().minimize(loss)


def test_a_loss_of_gradients_is_named() -> None:
    main, startup = Program(), Program()
    with program_guard(main, startup):
        x = data("x", [2, 3])
        score = F.sum(fc(x, 1))
        ((_, gradient),) = append_backward(score, parameter_list=[x])
        with pytest.raises(
            GradientError,
            match="is computed of the gradient 'x@GRAD', and there are no gradients of.* feed it to another",
        ):
            optim.SGD().minimize(F.mean(F.square(gradient)) + score, startup)


def test_pairs_are_checked() -> None:
    main, w, _ = small_program()
    grad = feed(main, "g", "float32", (2,))
    with pytest.raises(ArgumentError, match="empty"):
        optim.SGD().apply_gradients([])
    with pytest.raises(ArgumentError, match="twice"):
        optim.SGD().apply_gradients([(w, grad), (w, grad)])
    with pytest.raises(ArgumentTypeError, match="params_grads"):
        optim.SGD().apply_gradients([w])  # type: ignore[list-item]
    for name, dtype, shape in (("one", "float32", (1,)), ("scalar", "float32", ()), ("whole", "int64", (2,))):
        with pytest.raises(ArgumentError, match=rf"gradient '{name}' \({dtype} .*\) does not fit parameter 'w' \("):
            optim.SGD().apply_gradients([(w, feed(main, name, dtype, shape))])
    with pytest.raises(GraphError, match="different programs"):
        optim.SGD().apply_gradients([(w, Program().add_input("g", "float32", (2,)))])
