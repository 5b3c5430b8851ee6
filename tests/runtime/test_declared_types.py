"""What is written from outside counts, and what is fetched has its declared type, in every mode."""

from __future__ import annotations

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentTypeError, PlaceError, PrecisionError
from amp_transpiler.runtime.missing import cuda_missing
from tests.helpers.programs import Net, build

MODES = ["fp32", "amp", "pure-fp16"]
PARAMETER, MASTER = "fc_0.w_0", "fc_0.w_0_fp32_master_0"


def started(mode: str, name: str = "mlp", **options: object) -> tuple[Net, amp.Executor, amp.Scope]:
    net = build(name, mode, optimizer=amp.optimizer.SGD(2.0**-10, multi_precision=mode == "pure-fp16"), **options)
    exe, scope = amp.Executor(threads=1), amp.Scope()
    exe.run(net.startup, scope=scope)
    if mode != "fp32":
        net.optimizer.amp_init(amp.CPUPlace(), scope)  # type: ignore[attr-defined]
    return net, exe, scope


# -- fetches --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("return_numpy", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_variable_declared_float32_is_fetched_as_float32(mode: str, return_numpy: bool) -> None:
    net, exe, scope = started(mode)
    fetches = [net.loss, net.output, "fc_0.tmp_1", PARAMETER]
    for program in (net.main, net.main.clone(for_test=True)):
        found = exe.run(program, net.feeds, fetches, scope, return_numpy)
        assert [v.dtype if return_numpy else v.data_type() for v in found] == [
            np.float32 if return_numpy else "tensor(float)"
        ] * 4
    hidden = found[2] if return_numpy else found[2].numpy()
    if mode != "fp32":  # the values are those of 16 bit
        assert np.array_equal(hidden, hidden.astype(np.float16).astype(np.float32))
    kept = scope.find_var(PARAMETER)
    assert kept.dtype == (np.float16 if mode == "pure-fp16" else np.float32)
    assert np.array_equal(kept.astype(np.float32), found[3] if return_numpy else found[3].numpy())


def test_bfloat16_too() -> None:
    net, exe, scope = started("pure-fp16", dtype="bfloat16")
    output, parameter = exe.run(net.main, net.feeds, [net.output, PARAMETER], scope)
    assert output.dtype == parameter.dtype == np.float32


def test_what_was_made_in_16_bit_is_fetched_in_16_bit() -> None:
    """A gradient has the type in which it is computed, and a user's own cast the type that it asks for."""
    net, exe, scope = started("pure-fp16")
    (gradient,) = exe.run(net.main, net.feeds, [f"{PARAMETER}@GRAD"], scope)
    assert gradient.dtype == np.float16
    main = amp.Program()
    with amp.program_guard(main, amp.Program()), amp.unique_name.guard():
        half = amp.nn.functional.cast(amp.data("x", [2], "float32"), "float16")
    assert exe.run(main, {"x": np.ones(2, np.float32)}, [half])[0].dtype == np.float16


def test_a_fetch_costs_no_rounding_of_what_others_read() -> None:
    """The same steps with and without the fetch give the same weights, bit for bit."""
    weights = []
    for fetches in ([], ["fc_0.tmp_1", "fc_0.tmp_2", "fc_1.tmp_0"]):
        net, exe, scope = started("pure-fp16")
        for _ in range(3):
            exe.run(net.main, net.feeds, fetches, scope)
        weights.append(scope.find_var(MASTER).tobytes())
    assert weights[0] == weights[1]


# -- values set from outside ------------------------------------------------------------------------------------
def values(scale: float = 1.0) -> np.ndarray:
    """Weights that 16 bit cannot hold exactly."""
    return (np.random.default_rng(3).standard_normal((784, 512)) * 0.05 * scale).astype(np.float32)


@pytest.mark.parametrize("when", ["before amp_init", "after amp_init", "after a step"])
def test_a_parameter_that_is_set_is_trained_on(when: str) -> None:
    """One step of SGD from the values that were set, not from those of a master of before."""
    net = build("mlp", "pure-fp16", optimizer=amp.optimizer.SGD(2.0**-10, multi_precision=True))
    exe, scope, new = amp.Executor(threads=1), amp.Scope(), values()
    exe.run(net.startup, scope=scope)
    if when == "before amp_init":
        scope.set_var(PARAMETER, new)
    net.optimizer.amp_init(amp.CPUPlace(), scope)  # type: ignore[attr-defined]
    if when == "after a step":
        exe.run(net.main, net.feeds, scope=scope)
    if when != "before amp_init":
        scope.set_var(PARAMETER, new)
    assert scope.find_var(MASTER).tobytes() == new.tobytes()
    assert scope.find_var(PARAMETER).tobytes() == new.astype(np.float16).tobytes()
    (gradient,) = exe.run(net.main, net.feeds, [f"{PARAMETER}@GRAD"], scope)
    expected = new - np.float32(2.0**-10) * (gradient.astype(np.float32) / np.float32(128))
    np.testing.assert_allclose(scope.find_var(MASTER), expected, rtol=0, atol=1e-7)
    assert scope.find_var(PARAMETER).tobytes() == scope.find_var(MASTER).astype(np.float16).tobytes()


def test_a_master_that_is_set_rounds_into_its_parameter() -> None:
    _, _, scope = started("pure-fp16")
    scope.set_var(MASTER, values())
    assert scope.find_var(MASTER).tobytes() == values().tobytes()
    assert scope.find_var(PARAMETER).tobytes() == values().astype(np.float16).tobytes()


def test_numbers_of_16_bit_that_are_there_already_leave_the_master_alone() -> None:
    """State that is written back variable by variable, in any order, is what it was."""
    net, exe, scope = started("pure-fp16")
    exe.run(net.main, net.feeds, scope=scope)
    saved = {name: scope.find_var(name) for name in scope.var_names()}
    for names in (sorted(saved), sorted(saved, reverse=True)):
        exe.run(net.main, net.feeds, scope=scope)
        for name in names:
            scope.set_var(name, saved[name])
        assert {name: scope.find_var(name).tobytes() for name in saved} == {n: v.tobytes() for n, v in saved.items()}


def test_a_value_beyond_16_bit_is_named_and_nothing_changes() -> None:
    _, _, scope = started("pure-fp16")
    before = {name: scope.find_var(name).tobytes() for name in (PARAMETER, MASTER)}
    for name in before:
        with pytest.raises(PrecisionError, match=f"'{PARAMETER}' does not fit float16: its largest value is 1e"):
            scope.set_var(name, np.full((784, 512), 1e6, np.float32))
    assert {name: scope.find_var(name).tobytes() for name in before} == before


def test_python_numbers_and_other_variables() -> None:
    net = build("mlp", "pure-fp16", optimizer=amp.optimizer.SGD(0.5, multi_precision=True))
    exe, scope = amp.Executor(threads=1), amp.Scope()
    exe.run(net.startup, scope=scope)
    net.optimizer.amp_init(amp.CPUPlace(), scope)  # type: ignore[attr-defined]
    scope.set_var("fc_2.b_0", [0.1] * 10)
    assert scope.find_var("fc_2.b_0_fp32_master_0").tobytes() == np.full(10, 0.1, np.float32).tobytes()
    assert scope.find_var("fc_2.b_0").tobytes() == np.full(10, 0.1, np.float16).tobytes()
    scope.set_var("another", np.ones(2, np.float16))  # no master: as it is given
    scope.set_var("another", np.ones(2, np.float32))
    assert scope.find_var("another").dtype == np.float32


# -- places ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [None, "x", np.ones(3, np.longdouble), np.zeros(3, "M8[s]")])
def test_what_is_no_array_of_numbers_is_refused_by_name(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match="variable 'w' is given"):
        amp.Scope().set_var("w", value)


def test_amp_init_for_a_device_that_is_not_there() -> None:
    if cuda_missing(0) is None:
        pytest.skip("there is a CUDA device")
    net = build("mlp", "pure-fp16")
    scope, test = amp.Scope(), net.main.clone(for_test=True)
    amp.Executor(threads=1).run(net.startup, scope=scope)
    for call in (
        lambda: net.optimizer.amp_init(amp.CUDAPlace(0), scope, test),  # type: ignore[attr-defined]
        lambda: amp.cast_parameters_to_fp16(amp.CUDAPlace(0), net.main, scope),
    ):
        with pytest.raises(PlaceError, match=r"CUDAPlace\(0\) cannot be used: .*(driver|CUDA|device).*CPUPlace\(\)"):
            call()
    assert scope.find_var(PARAMETER).dtype == np.float32
