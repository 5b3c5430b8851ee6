"""Steps captured as CUDA graphs, over sessions that record and replay on CPU: the results of plain steps, bit for bit."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from onnx import parser

import amp_transpiler as amp
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.runtime.capture import check_capturable
from tests.helpers.cuda_graphs import capturing
from tests.helpers.places import change_place
from tests.helpers.programs import build
from tests.helpers.running import FEED, X, linear

State = dict[str, bytes]


@pytest.fixture(autouse=True)
def branchless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates are written as on CUDA, without branches and of whole buffers."""
    change_place(monkeypatch, "cpu", branches=False, chunks=[])


@pytest.fixture
def plain() -> amp.Executor:
    return amp.Executor(amp.CPUPlace(), threads=1)


@pytest.fixture(params=[False, True], ids=["single", "flat"])
def flat(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Parameters lie apart, or in one buffer as on CUDA."""
    change_place(monkeypatch, "cpu", flat_fewest=2 if request.param else 0, flat_largest=0)
    return bool(request.param)


def started(net: Any) -> amp.Scope:
    scope = amp.Scope()
    amp.Executor(threads=1).run(net.startup, scope=scope)
    net.optimizer.amp_init(amp.CPUPlace(), scope=scope)
    return scope


def state(scope: amp.Scope) -> State:
    return {name: scope.find_var(name).tobytes() for name in scope.var_names()}


def other(feeds: dict[str, np.ndarray], seed: int, batch: int | None = None) -> dict[str, np.ndarray]:
    """Other feeds of the same shapes, but for the batch."""
    rng = np.random.default_rng(seed)
    size = batch or len(feeds["image"])
    image = rng.standard_normal((size, *feeds["image"].shape[1:])).astype(np.float32)
    return {"image": image, "label": rng.integers(0, 10, (size, 1))}


def in_turn(net: Any, exe: amp.Executor) -> tuple[list[Any], State]:
    """Steps on two batch sizes, a bad one, states set and loaded in between, evaluation, two scopes."""
    test = net.main.clone(for_test=True)
    scope, second = started(net), started(net)
    name = next(v.name for v in net.main.parameters)
    found: list[Any] = []

    def step(feeds: dict[str, np.ndarray], where: amp.Scope = scope) -> None:
        found.append(exe.run(net.main, feeds, [net.loss, name], where))

    for seed in range(3):
        step(other(net.feeds, seed))
    step(net.feeds | {"image": np.full_like(net.feeds["image"], np.inf)})
    step(other(net.feeds, 3), second)
    step(other(net.feeds, 4, batch=2))
    step(other(net.feeds, 5))
    found.append(exe.run(test, net.feeds, [net.loss.name], scope))
    scope.set_var(name, scope.find_var(name) * 2)
    found.append(exe.run(test, net.feeds, [net.loss.name], scope))
    step(other(net.feeds, 6))
    amp.Executor(threads=1).run(net.main, net.feeds, scope=scope)  # its buffers take turns
    step(other(net.feeds, 7))
    step(other(net.feeds, 8), second)
    found.append(exe.run(test, net.feeds, [net.loss.name], scope))
    return found, state(scope) | {f"second {n}": content for n, content in state(second).items()}


def test_captured_steps_are_the_steps(flat: bool, plain: amp.Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    net = build("use_case", "pure-fp16")
    expected, final = in_turn(net, plain)
    exe, calls = capturing(monkeypatch)
    found, held = in_turn(net, exe)
    for one, two in zip(found, expected, strict=True):
        assert [a.tobytes() for a in one] == [b.tobytes() for b in two]
    assert held == final
    # Two scopes, two shapes of feeds in the first; each evaluation, since the values have moved before it.
    assert (calls.kinds().count("record"), calls.kinds().count("launch")) == (3 + 3, len(found))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlp", "use_case"])
def test_on_cuda_captured_steps_are_the_steps(name: str) -> None:
    net = build(name, "pure-fp16")
    expected, final = in_turn(net, amp.Executor(amp.CUDAPlace(0)))
    found, held = in_turn(net, amp.Executor(amp.CUDAPlace(0), cuda_graph=True))
    for one, two in zip(found, expected, strict=True):
        assert [a.tobytes() for a in one] == [b.tobytes() for b in two]
    assert held == final


def test_two_buffers_are_copied_back(plain: amp.Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for exe in (plain, capturing(monkeypatch)[0]):
        program, scope = linear(), amp.Scope()
        amp.Executor(threads=1).run(program.startup, scope=scope)
        fetched = [exe.run(program, FEED | {"x": X + n}, ["y", "w", "total"], scope) for n in range(4)]
        assert exe.memory_report(program).two_buffers.keys() == {"w", "total"}
        results.append(([array.tobytes() for step in fetched for array in step], state(scope)))
    assert results[0] == results[1]


def test_what_is_fetched_belongs_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    exe, _ = capturing(monkeypatch)
    program, scope = linear(), amp.Scope()
    amp.Executor(threads=1).run(program.startup, scope=scope)
    for return_numpy in (True, False):
        (first,) = exe.run(program, FEED, ["y"], scope, return_numpy)
        before = np.array(first if return_numpy else first.numpy())
        exe.run(program, FEED | {"x": X * 7}, ["y"], scope, return_numpy)
        np.testing.assert_array_equal(first if return_numpy else first.numpy(), before)


def test_each_thread_and_scope_has_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    exe, calls = capturing(monkeypatch)
    program = linear()
    scopes = [amp.Scope(), amp.Scope()]
    for scope in scopes:
        amp.Executor(threads=1).run(program.startup, scope=scope)

    def work() -> None:
        for scope in scopes:
            for _ in range(3):
                exe.run(program, FEED, ["y"], scope)

    for _ in range(3):  # one after the other: a later thread may get the name of one that is gone
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert calls.kinds() == ["record", "launch", "launch", "launch"] * 6
    assert len({number for _, _, number in calls.made}) == 6
    assert state(scopes[0]) == state(scopes[1])
    np.testing.assert_array_equal(scopes[0].find_var("w"), np.arange(1, 7).reshape(2, 3) / 2**9)


def test_threads_that_share_a_session_take_turns(plain: amp.Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    net = build("use_case", "pure-fp16")
    exe, _ = capturing(monkeypatch)
    scopes = [started(net) for _ in range(3)]
    together = threading.Barrier(2)

    def work(scope: amp.Scope) -> None:
        together.wait(20)
        for seed in range(4):
            exe.run(net.main, other(net.feeds, seed), scope=scope)

    threads = [threading.Thread(target=work, args=(scope,)) for scope in scopes[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        plain.run(net.main, other(net.feeds, seed), scope=scopes[2])
    assert state(scopes[0]) == state(scopes[1]) == state(scopes[2])


@pytest.mark.parametrize("at", ["record", "launch"])
def test_a_step_that_fails(at: str, flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net = build("mlp", "pure-fp16")
    exe, calls = capturing(monkeypatch)
    scope = started(net)
    if at == "launch":
        exe.run(net.main, net.feeds, scope=scope)
    before = state(scope)
    calls.fails = RuntimeError("CUDA failure 900: operation not permitted when stream is capturing")
    said = "was to be captured as a CUDA graph; nothing has changed" if at == "record" else "may have been updated"
    with pytest.raises(amp.AmpError, match=f"program '.*'.*not permitted.*{said}"):
        exe.run(net.main, net.feeds, scope=scope)
    assert at == "launch" or state(scope) == before
    calls.fails = None
    del calls.made[:]
    exe.run(net.main, net.feeds, scope=scope)
    assert calls.kinds() == ["record", "launch"]


def test_a_state_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    exe, _ = capturing(monkeypatch)
    program, scope = linear(), amp.Scope()
    amp.Executor(threads=1).run(program.startup, scope=scope)
    exe.run(program, FEED, ["y"], scope)
    good = scope.find_var("w")
    for wrong, error in ((good.astype(np.float64), "float64"), (np.ones((5, 5), np.float32), "has shape")):
        scope.set_var("w", wrong)
        with pytest.raises(amp.AmpError, match=error):
            exe.run(program, FEED, ["y"], scope)
    scope.set_var("w", good)
    exe.run(program, FEED, ["y"], scope)
    np.testing.assert_array_equal(scope.find_var("w"), good / 2)


# -- what cannot be captured ---------------------------------------------------------------------------------------
HEADER = '<ir_version: 10, opset_import: ["" : 21]>'
REFUSED = {
    "If": (
        "(float[2] x, bool c) => (float[2] y) { y = If (c) <then_branch = t () => (float[2] p) { p = Neg(x) }, "
        "else_branch = e () => (float[2] q) { q = Abs(x) }> }",
        "If '.*' decides in the run",
    ),
    "random": (
        "(float[2] x) => (float[2] y) { y = RandomNormalLike(x) }",
        "RandomNormalLike '.*' draws from a generator",
    ),
    "dropout": (
        "(float[2] x, bool t) => (float[2] y) { r = Constant<value_float = 0.5>() y = Dropout(x, r, t) }",
        "Dropout '.*' draws from a generator",
    ),
    "shape": ("(float[2] x) => (int64[1, K] y) { y = NonZero(x) }", "the shape of 'y' is known only after the run"),
    "string": ("(string[2] x) => (string[2] y) { y = Identity(x) }", "no tensor of numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_captured_is_refused_with_the_reason(case: str) -> None:
    body, message = REFUSED[case]
    program = amp.Program.from_onnx(parser.parse_model(f"{HEADER} net {body}"))
    lowered = lower(program, "cuda", {v.name: tuple(v.shape) for v in program.inputs}, list(program.outputs))
    with pytest.raises(amp.AmpError, match=f"cannot be captured as a CUDA graph: .*{message}.*without cuda_graph"):
        check_capturable(lowered, program.name)


def test_a_dropout_that_drops_nothing_is_captured() -> None:
    text = "(float[2] x) => (float[2] y) <bool t = {0}> { r = Constant<value_float = 0.5>() y = Dropout(x, r, t) }"
    program = amp.Program.from_onnx(parser.parse_model(f"{HEADER} net {text}"))
    check_capturable(lower(program, "cuda", {"x": (2,)}, list(program.outputs)), program.name)


def test_the_option_is_for_cuda_alone() -> None:
    with pytest.raises(amp.AmpError, match=r"cuda_graph=True .*the place is CPUPlace\(\)"):
        amp.Executor(amp.CPUPlace(), cuda_graph=True)
    with pytest.raises(amp.AmpError, match=r"cuda_graph=True .*allow_cpu_fallback"):
        amp.Executor(amp.CUDAPlace(0), cuda_graph=True, allow_cpu_fallback=True)
