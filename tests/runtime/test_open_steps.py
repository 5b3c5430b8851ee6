"""Sessions that serve several sizes: how many are made, and the same bits as with one for each."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ExecutionError
from amp_transpiler.nn import functional as F
from amp_transpiler.runtime import executor, open_steps
from amp_transpiler.runtime.plan import SHAPES, drop_oldest
from tests.tools.sizes_run import attention


def built(mode: str) -> tuple[Any, Any, Any, Any]:
    """Attention over sequences of any number and length, with dropout."""
    main, startup = amp.Program("net"), amp.Program("startup")
    main.random_seed = startup.random_seed = 5
    with amp.program_guard(main, startup), amp.unique_name.guard():
        loss = attention()
        optimizer: Any = amp.optimizer.Adam(0.01, multi_precision=mode == "pure")
        if mode != "fp32":
            optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure")
        optimizer.minimize(loss, startup)
    return main, startup, loss, optimizer


def fed(batch: int, length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(batch * 100 + length)
    return {"ids": rng.integers(0, 50, (batch, length)), "label": rng.integers(0, 5, (batch, 1))}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the programs that sessions are made for."""
    names: list[str] = []
    plain = executor.create_session
    monkeypatch.setattr(executor, "create_session", lambda *a, **k: names.append(a[3]) or plain(*a, **k))
    return names


def trained(
    mode: str, shapes: list[tuple[int, int]], max_sessions: int = 32
) -> tuple[list[bytes], dict[str, bytes], Any]:
    """The losses, the state after the last step, and what was kept in place."""
    main, startup, loss, optimizer = built(mode)
    exe, scope = amp.Executor(threads=1, max_sessions=max_sessions), amp.Scope()
    exe.run(startup, scope=scope)
    if mode != "fp32":
        optimizer.amp_init(exe.place, scope)
    losses = [exe.run(main, fed(*shape), [loss], scope)[0].tobytes() for shape in shapes]
    state = {name: scope.find_var(name).tobytes() for name in scope.var_names()}
    return losses, state, exe.memory_report(main)


LENGTHS = [(4, length) for length in (9, 12, 10, 15, 9, 13)]


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_two_sessions_serve_all_lengths(mode: str, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = trained(mode, LENGTHS)
    assert made.count("net") == 2
    monkeypatch.setattr(open_steps, "WHOLE", 0)
    made.clear()
    own = trained(mode, LENGTHS)
    assert made.count("net") == 5
    assert found[:2] == own[:2] and found[2].in_place == own[2].in_place


def test_what_was_equal_before_is_opened_when_it_differs(made: list[str]) -> None:
    """Lengths, then batches, then both: three sessions, whatever follows."""
    trained("mixed", [(4, 9), (4, 12), (4, 14), (5, 12), (3, 13), (6, 10), (5, 9)])
    assert made.count("net") == 3


@pytest.mark.parametrize("mode", ["fp32", "pure"])
def test_shapes_that_share_a_session_are_compiled_once(
    mode: str, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many: what is limited is the number of sessions. They give the bits that sessions of their own give."""
    lowered: list[Any] = []
    plain = executor.lower
    monkeypatch.setattr(executor, "lower", lambda *a, **k: lowered.append(a[2]) or plain(*a, **k))
    shapes = [(4, length) for length in range(9, 15)] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(mode, shapes, max_sessions=2)
    assert made.count("net") == 2 and sum("ids" in each for each in lowered) == 6
    monkeypatch.setattr(open_steps, "WHOLE", 0)
    own = trained(mode, shapes)
    assert made.count("net") == 2 + 6 and found[:2] == own[:2]


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
@pytest.mark.parametrize("loss_of", [F.mse_loss, F.l1_loss, lambda x, y: -F.mean(F.log_softmax(x) * y)])
def test_a_mean_over_what_is_fed_is_no_constant(
    loss_of: Any, mode: str, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime fuses constants into products, as 1/N of a loss, in models of one size alone."""

    def losses() -> list[bytes]:
        main, startup = amp.Program("net"), amp.Program("startup")
        main.random_seed = startup.random_seed = 5
        with amp.program_guard(main, startup), amp.unique_name.guard():
            hidden = amp.nn.fc(amp.data("x", [None, 8], "float32"), 16, act="relu")
            loss = loss_of(amp.nn.fc(hidden, 4), amp.data("y", [None, 4], "float32"))
            optimizer: Any = amp.optimizer.Adam(0.01, multi_precision=mode == "pure")
            if mode != "fp32":
                optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure", use_fp16_guard=False)
            optimizer.minimize(loss, startup)
        exe, scope = amp.Executor(threads=1), amp.Scope()
        exe.run(startup, scope=scope)
        if mode != "fp32":
            optimizer.amp_init(exe.place, scope)
        rng = np.random.default_rng(0)
        rows = [rng.standard_normal((batch, 12)).astype(np.float32) for batch in (4, 5, 7, 4, 6)]
        return [exe.run(main, {"x": r[:, :8], "y": r[:, 8:]}, [loss], scope)[0].tobytes() for r in rows]

    found = losses()
    assert made.count("net") == 2
    monkeypatch.setattr(open_steps, "WHOLE", 0)  # each shape has a session of its own
    assert losses() == found and made.count("net") == 2 + 4


def test_what_was_used_longest_ago_goes_first() -> None:
    """Sessions with all their shapes, then shapes of sessions that stay."""
    kept = [SimpleNamespace(session=number) for number in range(3)]
    plan: Any = SimpleNamespace(sessions=OrderedDict())
    for shapes, step in [("a", 0), ("b", 1), ("c", 0), ("d", 2), ("e", 1), ("being made", None)]:
        plan.sessions[shapes] = SimpleNamespace(step=None if step is None else kept[step])
    assert drop_oldest(plan, 3) == 0
    assert drop_oldest(plan, 2) == 6 and [*plan.sessions] == ["b", "d", "e", "being made"]
    plan.sessions |= {number: SimpleNamespace(step=kept[1]) for number in range(2 * SHAPES - 2)}
    assert drop_oldest(plan, 2) == 2 * SHAPES + 2 and [*plan.sessions][:3] == ["e", "being made", 0]


def test_a_test_program_has_its_own(made: list[str]) -> None:
    main, startup, loss, _ = built("fp32")
    test = main.clone(for_test=True)
    exe, scope = amp.Executor(threads=1), amp.Scope()
    exe.run(startup, scope=scope)
    made.clear()
    shapes = [(4, 9), (4, 10), (3, 10), (2, 10), (1, 11), (4, 11)]
    together = [exe.run(test, fed(*shape), [loss.name], scope)[0] for shape in shapes]
    assert len(made) <= 4
    for shape, value in zip(shapes, together, strict=True):
        (alone,) = amp.Executor(threads=1).run(test, fed(*shape), [loss.name], scope)
        assert alone.tobytes() == value.tobytes()


@pytest.mark.parametrize("why", ["kernels", "refused", "large"])
def test_a_model_that_cannot_be_opened(why: str, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shape gets a session of its own, after one attempt."""
    if why == "kernels":
        monkeypatch.setattr(open_steps, "computations", lambda graph, known: object())
    elif why == "large":
        monkeypatch.setattr(open_steps, "LARGEST", 0)
    else:
        plain = executor.create_session

        def create(model: Any, *rest: Any, **more: Any) -> Any:
            if any(info.name.startswith("@size/") for info in model.graph.input):
                raise ExecutionError("not this one")
            return plain(model, *rest, **more)

        monkeypatch.setattr(executor, "create_session", create)
    losses, _, _ = trained("fp32", [(4, 9), (4, 12), (4, 10), (4, 9)])
    assert made.count("net") == {"kernels": 4, "refused": 3, "large": 3}[why]
    monkeypatch.undo()
    assert losses == trained("fp32", [(4, 9), (4, 12), (4, 10), (4, 9)])[0]


def test_fixed_feeds_are_not_opened() -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        loss = F.mean(amp.nn.fc(amp.data("x", [2, 4], "float32"), 3))
        amp.optimizer.SGD(0.1).minimize(loss, startup)
    exe, scope = amp.Executor(threads=1), amp.Scope()
    exe.run(startup, scope=scope)
    exe.run(main, {"x": np.ones((2, 4), np.float32)}, [loss], scope)
    assert exe._tables.programs[main].last.open is None  # type: ignore[union-attr]


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("mode", ["fp32", "pure"])
def test_sizes_that_do_not_fit_are_refused_before_the_step(mode: str, before: int) -> None:
    """As a session of their own would be, whatever was fed before; and training goes on."""
    main, startup, loss, optimizer = built(mode)
    exe, scope = amp.Executor(threads=1), amp.Scope()
    exe.run(startup, scope=scope)
    if mode == "pure":
        optimizer.amp_init(exe.place, scope)
    for batch in range(3, 3 + before):
        exe.run(main, fed(batch, 9), [loss], scope)
    state = {name: scope.find_var(name).tobytes() for name in scope.var_names()}
    for batch in (3, 6):
        with pytest.raises(ExecutionError, match=rf"refuses program 'net'.*'ids' \[{batch}, 9\], 'label' \[4, 1\]"):
            exe.run(main, fed(batch, 9) | {"label": fed(4, 9)["label"]}, [loss], scope)
    assert state == {name: scope.find_var(name).tobytes() for name in scope.var_names()}
    assert np.isfinite(exe.run(main, fed(6, 9), [loss], scope)[0])
