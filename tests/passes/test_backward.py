"""The backward pass: what it appends, what it leaves out, what it refuses, and whole programs against differences."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import GradientError
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.warn import AmpWarning
from tests.helpers.programs import LAYERS, feeds_of
from tests.helpers.sessions import session


def types(program: amp.Program) -> list[str]:
    return [op.type for op in program.operators if op.role == "backward"]


@pytest.fixture
def program():
    main = amp.Program()
    with amp.program_guard(main, amp.Program("startup")), amp.unique_name.guard():
        yield main


def parameter(name: str, *shape: int) -> amp.Variable:
    return amp.create_parameter(list(shape), "float32", name=name)


def test_gradients_that_fan_in_are_summed_once(program: amp.Program) -> None:
    w = parameter("w", 3)
    pairs = amp.append_backward(F.sum(w * w + F.exp(w)))
    assert types(program).count("GradSum") == 1
    ((_, gradient),) = pairs
    assert gradient.name == "w@GRAD" and gradient.producer.type == "GradSum" and len(gradient.producer.inputs) == 3
    assert gradient.shape == w.shape and gradient.dtype == "float32" and gradient.grad_of is w


def test_only_what_is_wanted_is_computed(program: amp.Program) -> None:
    x = amp.data("x", [2, 3])
    frozen = parameter("frozen", 3, 4)
    frozen.trainable = False
    w = parameter("w", 4, 5)
    parameter("unused", 7)
    loss = F.mean((x @ frozen) @ w)
    pairs = amp.append_backward(loss)
    assert [p.name for p, _ in pairs] == ["w"]
    products = [op for op in program.operators if op.type == "MatMulGrad"]
    assert len(products) == 1 and products[0].outputs[0] is None, "neither dX of the first product nor dfrozen"


def test_a_parameter_is_frozen_by_either_attribute_until_the_step_is_built(program: amp.Program) -> None:
    frozen, stopped, w = (parameter(name, 3) for name in ("frozen", "stopped", "w"))
    frozen.trainable, stopped.stop_gradient = False, True
    amp.optimizer.SGD(0.1).minimize(F.sum(F.exp(frozen) * F.exp(stopped) * w))
    assert list(program.updates) == [w]
    with pytest.warns(AmpWarning, match="trainable of 'w' is set after minimize: .* updates it all the same"):
        w.trainable = False
    w.trainable = True
    with pytest.warns(AmpWarning, match="stop_gradient of 'w' is set after minimize"):
        w.stop_gradient = True
    with pytest.warns(AmpWarning, match="trainable of 'frozen' is set after minimize: .* does not update it"):
        frozen.trainable = True
    again = amp.Program.from_onnx(program.to_onnx())
    assert [v.name for v in again.parameters] == ["frozen"]


def test_no_grad_set_and_stop_gradient_end_the_path(program: amp.Program) -> None:
    a, b = parameter("a", 3), parameter("b", 3)
    middle = F.exp(a)
    loss = F.sum(middle * b)
    assert [p.name for p, _ in amp.append_backward(loss, no_grad_set=[middle])] == ["b"]
    other = F.exp(a)
    other.stop_gradient = True
    assert [p.name for p, _ in amp.append_backward(F.sum(other * b), no_grad_set=[])] == ["b"]


def test_a_missing_rule_is_named_before_anything_is_appended(program: amp.Program) -> None:
    w = parameter("w", 1, 1, 3, 3)
    d = program.add_variable("d", "float32", [1, 1, 1, 1])
    regions = program.add_input("regions", "float32", [1, 5])
    program.add_operator("CropAndResize", [w, regions], [d], domain="com.microsoft", name="pool")
    before = program.version
    with pytest.raises(
        GradientError, match=r"'pool' \(com.microsoft::CropAndResize\).*'w'.*register_gradient\('com.microsoft::CropA"
    ):
        amp.append_backward(d)
    assert program.version == before


def test_integer_and_comparison_paths_carry_no_gradient(program: amp.Program) -> None:
    w = parameter("w", 3)
    loss = F.sum(F.where(w > 0.0, w, 0.0 * w))
    amp.append_backward(loss)
    assert "GreaterGrad" not in types(program)


def test_a_number_of_the_type_of_another_takes_its_type_alone() -> None:
    text = """<ir_version: 9, opset_import: ["" : 20]> net (float[2,3] x) => (float[2,3] y) <float[3] w = {1.0, 2.0, 3.0}>
    { h = Mul (x, w) two = Constant <value_int = 2> () number = CastLike (two, h) y = Mul (h, number) }"""
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    with amp.program_guard(program, program.startup):
        ((_, gradient),) = amp.append_backward(F.sum(program.outputs[0]))
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_allclose(
        exe.run(program, feed={"x": x}, fetch_list=[gradient], scope=scope)[0], 2 * x.sum(0), rtol=1e-6
    )


@pytest.mark.parametrize("name", LAYERS)
def test_whole_programs_against_central_differences(name: str) -> None:
    """d loss along the gradient equals the gradient's square norm, for every parameter together and one by one."""
    main, startup = amp.Program(), amp.Program("startup")
    startup.seed = 3
    with amp.program_guard(main, startup), amp.unique_name.guard():
        _, loss, _ = LAYERS[name]()
        pairs = amp.append_backward(loss)
    scope = amp.Scope()
    amp.Executor().run(startup, scope=scope)
    feeds = feeds_of(name)
    lowered = lower(main, "cpu", {k: v.shape for k, v in feeds.items()}, [loss, *(g for _, g in pairs)], updates=False)
    values = {p.tensor: scope.find_var(p.variable) for p in lowered.states} | {
        p.tensor: feeds[p.variable] for p in lowered.feeds
    }
    values |= {s: np.zeros((), np.float32) for s in lowered.scalars}
    running = session(lowered.model)
    _, *gradients = running.run([p.tensor for p in lowered.fetches], values)

    def at(step: float, chosen: list[int]) -> float:
        moved = dict(values)
        for i in chosen:
            moved[pairs[i][0].name] = values[pairs[i][0].name] + np.float32(step) * gradients[i]
        return float(running.run([lowered.fetches[0].tensor], moved)[0].astype(np.float64))

    squares = [float((g.astype(np.float64) ** 2).sum()) for g in gradients]
    everything = list(range(len(pairs)))
    for chosen in [everything, *([i] for i in everything)]:
        square = sum(squares[i] for i in chosen)
        if square < 1e-5 * sum(squares):
            continue  # too small a slope to see in fp32
        step = 1e-2 / np.sqrt(square)
        slope = (at(step, chosen) - at(-step, chosen)) / (2 * step)
        assert slope == pytest.approx(square, rel=0.05), [pairs[i][0].name for i in chosen]
