"""Batch normalisation over the batches of all ranks: beside one rank that has the whole batch, and in float64."""

from __future__ import annotations

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import distributed
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.exchanges import taken_apart
from tests.helpers.normalised import Net, State, trained
from tests.helpers.places import change_place


def same(a: State, b: State) -> bool:
    return all(np.array_equal(b[name], array) for name, array in a.items())


@pytest.mark.parametrize("shares", [[0, 6], [0, 1, 8]], ids=["even", "uneven"])
@pytest.mark.parametrize("mode, close", [("fp32", 1e-6), ("mixed", 2e-3), ("pure", 5e-3)])
def test_ranks_learn_what_one_learns_of_the_whole_batch(mode: str, close: float, shares: list[int]) -> None:
    losses, state = trained(mode)()
    found = distributed.simulate(len(shares), trained(mode, shares))
    assert all(same(found[0][1], other) for _, other in found)  # running statistics too
    np.testing.assert_allclose(np.mean([each for each, _ in found], axis=0), losses, rtol=close)
    for name, array in state.items():
        if "velocity" not in name and "steps" not in name:
            far = np.abs(found[0][1][name].astype(np.float64) - array.astype(np.float64))
            assert far.max() < 5 * close * max(1.0, np.abs(array).max()), name
    if mode == "mixed":
        again = distributed.simulate(len(shares), trained(mode, shares))
        assert [each for each, _ in again] == [each for each, _ in found] and same(again[0][1], found[0][1])


def test_gradients_and_running_statistics_are_those_of_float64() -> None:
    """Of a norm behind a product, derived numerically in float64; 1, 2 and 9 examples on a rank."""
    rng = np.random.default_rng(5)
    x, w = rng.normal(3, 2, (12, 4)), rng.normal(size=(12, 4))
    start = {"p": rng.normal(size=4), "g": rng.normal(size=4), "b": rng.normal(size=4)}

    def loss(p: np.ndarray, g: np.ndarray, b: np.ndarray) -> float:
        h = x * p
        y = (h - h.mean(0)) / np.sqrt(h.var(0) + 1e-5) * g + b
        return float((np.tanh(y) * w).sum() / 3)  # the mean over three ranks

    def run() -> dict[str, np.ndarray]:
        main, startup = amp.Program(), amp.Program()
        mine = slice(*[0, 1, 3, 12][distributed.rank() :][:2])
        with amp.program_guard(main, startup), amp.unique_name.guard():
            values = {k: amp.nn.initializer.NumpyArrayInitializer(v.astype(np.float32)) for k, v in start.items()}
            given, weight = amp.data("x", [None, 4], "float32"), amp.data("w", [None, 4], "float32")
            h = given * amp.create_parameter([4], "float32", "p", values["p"])
            attr = [amp.nn.ParamAttr(name=name, initializer=values[name]) for name in "gb"]
            y = amp.nn.batch_norm(h, param_attr=attr[0], bias_attr=attr[1], synchronized=True, moving_mean_name="m")
            amp.optimizer.SGD(1.0).minimize(F.sum(F.tanh(y) * weight), startup)
        exe, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
        exe.run(startup, scope=scope)
        exe.run(main, {"x": x[mine].astype(np.float32), "w": w[mine].astype(np.float32)}, [], scope)
        return {name: np.array(scope.find_var(name)) for name in (*start, "m", "batch_norm_0.w_2")}

    for found in distributed.simulate(3, run):
        for name, value in start.items():
            for i in range(4):
                step = np.eye(4)[i] * 1e-6
                slope = (loss(**{**start, name: value + step}) - loss(**{**start, name: value - step})) / 2e-6
                assert abs(value[i] - found[name][i] - slope) < 2e-6 * max(1, abs(slope))
        h = x * start["p"].astype(np.float32)
        np.testing.assert_allclose(found["m"], 0.1 * h.mean(0), rtol=1e-6)
        np.testing.assert_allclose(found["batch_norm_0.w_2"], 0.9 + 0.1 * h.var(0), rtol=1e-6)


@pytest.mark.parametrize("mode", ["mixed", "pure"])
def test_an_overflow_on_one_rank_leaves_the_statistics_of_all(mode: str) -> None:
    def run() -> tuple[State, State, State]:
        net, states = Net(mode), []
        for number, boost in enumerate((1.0, np.inf if distributed.rank() == 1 else 1.0, 1.0)):
            net.step(number, [0, 6], boost)
            states.append(net.state())
        distributed.check_equal(net.main, net.scope)
        return states[0], states[1], states[2]

    for first, bad, last in distributed.simulate(2, run):
        changed = {name.rstrip("_0123456789") for name in first if not np.array_equal(first[name], bad[name])}
        assert changed == {"loss_scaling", "num_good_steps"}
        assert not np.array_equal(bad["batch_norm_0.w_1"], last["batch_norm_0.w_1"])


def test_unequal_running_statistics_are_found() -> None:
    """Where each rank has its own they may differ; synchronised ones are state that all ranks share."""

    def run(synchronized: bool) -> str:
        net = Net(synchronized=synchronized)
        net.scope.set_var("batch_norm_1.w_1", np.full(4, distributed.rank(), np.float32))
        try:
            distributed.check_equal(net.main, net.scope)
        except amp.AmpError as error:
            return str(error)
        return ""

    assert distributed.simulate(2, lambda: run(False)) == ["", ""]
    assert all("'batch_norm_1.w_1' on rank 1" in said for said in distributed.simulate(2, lambda: run(True)))


def test_a_step_takes_one_session_more_for_each_exchange_that_others_wait_for() -> None:
    def run() -> tuple[int, bool, np.ndarray]:
        net = Net("mixed")
        shapes = {name: array.shape for name, array in net.feed(0, [0, 6]).items()}
        _, ends, exchanged = taken_apart(net.main.lower(amp.CPUPlace(), feed_shapes=shapes).model)
        assert {t.dtype for each in exchanged for t in each.sent} == {"float16", "float32", "float64"}
        net.step(0, [0, 6])
        feed = net.feed(1, [0, 6])
        test = net.exe.run(net.test, feed, [net.loss], net.scope)[0]
        lowered = net.test.lower(amp.CPUPlace(), feed_shapes=shapes)
        return len(ends), any(node.op_type == "AllReduce" for node in lowered.model.graph.node), test

    (parts, exchanges, first), (_, _, second) = distributed.simulate(2, run)
    assert parts == 3 + 3 + 2 and not exchanges  # three norms, forward and backward; gradients; what waits for them
    assert first != second  # each of its own examples


def test_norms_of_a_program_that_is_there_are_chosen_by_pattern() -> None:
    net = Net(synchronized=False)
    assert net.test.synchronize_batch_norm("batch_norm_1*") == 1 and net.test.synchronize_batch_norm() == 3
    again = amp.Program.from_onnx(net.test.to_onnx())
    marks = [op.metadata for op in again.operators if op.type == "BatchNormalization"]
    assert all(mark == {"amp_transpiler.synchronized": "asked"} for mark in marks) and len(marks) == 3
    for call, said in (
        (lambda: net.test.synchronize_batch_norm("conv*"), "pattern 'conv\\*' matches no operator name"),
        (lambda: net.main.synchronize_batch_norm(), "has gradients already; synchronise before minimize"),
        (lambda: amp.Program().synchronize_batch_norm(), "has no batch normalisation"),
    ):
        with pytest.raises(amp.AmpError, match=said):
            call()


def test_bodies_for_gpus_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, where their operators run on CPU too."""
    losses, state = trained("fp32")()
    change_place(monkeypatch, "cpu", fused=True)
    for _, found in (results := distributed.simulate(3, trained("fp32", [0, 1, 8]))):
        for name, array in state.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(np.mean([each for each, _ in results], axis=0), losses, rtol=1e-6)
