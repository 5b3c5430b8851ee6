"""What ``decorate`` and the optimizer that it gives refuse."""

from __future__ import annotations

from typing import Any

import pytest

from amp_transpiler import nn, optimizer as optim
from amp_transpiler.errors import (
    ArgumentError,
    ArgumentTypeError,
    GradientError,
    PrecisionError,
)
from amp_transpiler.ir import unique_name
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.nn import functional as F
from amp_transpiler.optimizer import decorate
from amp_transpiler.optimizer.scaler import LossScaler
from amp_transpiler.program import Program, program_guard


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"init_loss_scaling": 0}, "init_loss_scaling"),
        ({"init_loss_scaling": -1.0}, "init_loss_scaling"),
        ({"init_loss_scaling": float("inf")}, "init_loss_scaling"),
        ({"init_loss_scaling": 1e39}, "init_loss_scaling"),
        ({"init_loss_scaling": 1e-46}, "init_loss_scaling is 1e-46, which fp32 does not hold"),
        ({"init_loss_scaling": 3.4028235677973366e38}, "which fp32 does not hold"),
        ({"incr_every_n_steps": 0}, "incr_every_n_steps"),
        ({"incr_every_n_steps": 1.5}, "incr_every_n_steps"),
        ({"decr_every_n_nan_or_inf": -2}, "decr_every_n_nan_or_inf"),
        ({"incr_ratio": 0.5}, "incr_ratio"),
        ({"decr_ratio": 1.5}, "decr_ratio"),
        ({"decr_ratio": 0}, "decr_ratio"),
        ({"dtype": "float32"}, "dtype"),
        ({"dtype": "int8"}, "dtype"),
        ({"amp_lists": AutoMixedPrecisionLists(dtype="bfloat16")}, "bfloat16"),
    ],
)
def test_values_out_of_range_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        decorate(optim.SGD(), **arguments)


def test_wrong_kinds_are_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="optimizer"):
        decorate(None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="amp_lists"):
        decorate(optim.SGD(), ["MatMul"])  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="use_pure_fp16"):
        decorate(optim.SGD(), use_pure_fp16="yes")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="decorated already"):
        decorate(decorate(optim.SGD()))  # type: ignore[arg-type]


def test_a_call_by_level_that_is_refused_changes_nothing() -> None:
    adam = optim.Adam()
    with pytest.raises(ArgumentError, match="init_loss_scaling is -1"):
        decorate(adam, level="O2", init_loss_scaling=-1)  # type: ignore[call-arg]
    assert not adam.multi_precision
    with pytest.raises(ArgumentTypeError, match="use_amp_guard is 3"):
        decorate(adam, level="O2", use_amp_guard=3)  # type: ignore[call-arg]
    with pytest.raises(ArgumentTypeError, match="use_bf16 is 'no'"):
        decorate(adam, use_bf16="no")  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match="use_bf16=True and dtype='float16'; give one of them"):
        decorate(adam, use_bf16=True, dtype="float16")  # type: ignore[call-arg]
    assert decorate(adam, level="O2", scaler=LossScaler.torch()).loss_scaler == LossScaler.torch()  # type: ignore[call-arg]
    assert adam.multi_precision


def test_a_loss_that_cannot_be_minimised_leaves_the_program_alone() -> None:
    main, startup = Program(), Program("startup")
    with program_guard(main, startup), unique_name.guard():
        x = nn.data("x", [5, 3], "float32")
        h = nn.fc(x, 2)
        unrelated = F.mean(x)
        count = len(main.operators), main.version
        for loss, message in ((h, "scalar"), (unrelated, "does not depend on any parameter")):
            with pytest.raises(GradientError, match=message):
                decorate(optim.SGD()).minimize(loss, startup)
        with pytest.raises(PrecisionError, match="mark_fp16"):
            decorate(optim.SGD(multi_precision=True), use_pure_fp16=True).minimize(F.mean(h), startup)
    assert len(main.operators) == count[0] + 1
    assert not any(op.type == "Cast" for op in main.operators)
