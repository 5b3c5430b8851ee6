"""Gradients that vanish in 16 bit: shares against a count by hand, scales against runs with them."""

from __future__ import annotations

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, OrderError, PrecisionError
from amp_transpiler.nn import functional as F
from tests.helpers import programs
from tests.tools.overflows import Ready, ready


def products(scale: float, sizes: list[float], mode: str = "amp") -> Ready:
    """The gradient of each weight is one of ``sizes``, times the loss scale, in fp16 on its way."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [1, len(sizes)], "float32")
        with amp.fp16_guard():
            loss = F.sum(x @ amp.create_parameter([len(sizes), 1], "float32", name="w"))
        opt = amp.optimizer.SGD(0.1, multi_precision=mode == "pure-fp16")
        opt = amp.decorate(opt, init_loss_scaling=scale, use_pure_fp16=mode == "pure-fp16")
        opt.minimize(loss, startup)
    return ready(programs.Net(main, startup, loss, {"x": np.array([sizes], np.float32)}, opt, loss), "products")


@pytest.mark.parametrize("mode", ["amp", "pure-fp16"])
def test_shares_and_scales_by_hand(mode: str) -> None:
    """fp16 holds 2^-24 and, ties to even, loses 2^-25. The inputs themselves are held in fp16, so none is below."""
    sizes = [2.0**-24] * 3 + [2.0**-20] * 5 + [1.0] * 191 + [0.0]
    step = products(2.0**-2, sizes, mode)
    found = amp.gradient_underflow(step.main, step.feeds, step.scope, executor=step.executor)
    assert found.lost == 3 / 200 and found.loss_scaling == 0.25
    (row,) = found.parameters
    assert (row.parameter, row.elements, row.lost, row.zero, row.absmax) == ("w", 200, 0.015, 0.005, 1.0)
    # 1.5 % lost at 1/2 and none from 1 on; 2^15 is the largest power of two in fp16
    assert (found.smallest, found.largest, found.suggested, found.headroom) == (1.0, 2.0**15, 2.0**14, 2.0**17)
    assert "1.50% of gradient elements are zero in 16 bit and not in fp32, at loss scale 0.25" in str(found)
    assert "w (200 elements, absmax 1)" in str(found)


def test_the_margin_and_the_target() -> None:
    step = products(8.0, [1.0, 2.0**-24])
    found = amp.gradient_underflow(step.main, step.feeds, step.scope, margin=8, target=0.5)
    assert (found.largest, found.suggested, found.smallest, found.lost) == (2.0**15, 2.0**12, 1.0, 0.0)


def test_values_before_a_step_that_is_over_are_given() -> None:
    """The gradient of w is v, of which 2^-24 times a scale of 1/4 is lost; by now the scope has 3 for all of v."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard(), amp.fp16_guard():
        v, w = (amp.create_parameter(s, "float32", name=n) for s, n in (([1, 4], "v"), ([4, 1], "w")))
        loss = F.sum(v @ w)
        opt = amp.decorate(amp.optimizer.SGD(0.1), init_loss_scaling=0.25)
        opt.minimize(loss, startup)
    step = ready(programs.Net(main, startup, loss, {}, opt, loss), "products")
    step.scope.set_var("v", np.full((1, 4), 3, np.float32))
    for before, lost, absmax in ((None, 0, 3), ({"v": np.array([[1, 1, 1, 2.0**-24]], np.float32)}, 0.25, 1)):
        found = amp.gradient_underflow(main, {}, step.scope, before=before)
        (row,) = (each for each in found.parameters if each.parameter == "w")
        assert (row.lost, row.absmax) == (lost, absmax)


def test_no_scale_beyond_what_is_enough_is_suggested() -> None:
    net = programs.build("mlp", "amp", dtype="bfloat16")
    step = ready(net, "mlp")
    found = amp.gradient_underflow(step.main, step.feeds, step.scope)
    assert (found.smallest, found.suggested) == (1.0, 2.0**24) and found.largest > 2.0**24


@pytest.mark.parametrize("name, mode", [("transformer", "amp"), ("use_case", "pure-fp16"), ("mlp", "amp")])
def test_scales_hold_when_the_program_runs_with_them(name: str, mode: str) -> None:
    step = ready(programs.build(name, mode), name)
    before = {v: step.scope.find_var(v).tobytes() for v in step.scope.var_names()}
    found = amp.gradient_underflow(step.main, step.feeds, step.scope, executor=step.executor)
    assert before == {v: step.scope.find_var(v).tobytes() for v in step.scope.var_names()}
    for scale, bad in ((found.largest, False), (2 * found.largest, True)):
        step.scope.set_var("loss_scaling_0", np.array([scale], np.float32))
        step_copy = step.values(step.main, [step.found_inf])[0]
        assert bool(step_copy) is bad


def test_what_is_lost_is_lost_by_rounding_alone() -> None:
    """Against the same model trained in fp32: where its gradients are zero too, nothing counts as lost."""
    step = ready(programs.build("mlp", "amp", init_loss_scaling=2.0**-14), "mlp")
    names = [f"{p.name}@GRAD" for p in step.main.parameters]
    half = step.values(step.main, names)
    plain = programs.build("mlp", "fp32")
    scope = amp.Scope()
    exe = amp.Executor()
    exe.run(plain.startup, scope=scope)
    full = exe.run(plain.main, plain.feeds, names, scope)
    found = {p.parameter: p for p in amp.gradient_underflow(step.main, step.feeds, step.scope).parameters}
    for parameter, low, high in zip(step.main.parameters, half, full, strict=True):
        row, lost = found[parameter.name], float(((low == 0) & (high != 0)).mean())
        assert row.lost == pytest.approx(lost, abs=2e-3) and row.zero == pytest.approx(
            float((high == 0).mean()), abs=2e-3
        )
        assert row.absmax == pytest.approx(float(np.abs(high).max()), rel=5e-3)
    assert found["fc_0.w_0"].lost > 0.04


def test_errors() -> None:
    step = products(8.0, [1.0])
    with pytest.raises(ArgumentError, match="target is 2"):
        amp.gradient_underflow(step.main, step.feeds, step.scope, target=2)
    with pytest.raises(ArgumentError, match=r"margin 0\.5, at least 1"):
        amp.gradient_underflow(step.main, step.feeds, step.scope, margin=0.5)
    with pytest.raises(ArgumentError, match="not finite in fp32 either"):
        amp.gradient_underflow(step.main, {"x": np.array([[np.nan]], np.float32)}, step.scope)
    net = programs.build("mlp", "fp32")
    with pytest.raises(PrecisionError, match=r"nothing in program 'program_\d+' is 16 bit"):
        amp.gradient_underflow(net.main, net.feeds, step.scope)
    with pytest.raises(OrderError, match="has no gradients"):
        amp.gradient_underflow(net.startup)
