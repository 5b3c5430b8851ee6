"""Threads that share executors and scopes: nothing is lost, nothing torn, and what may run side by side does."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.ir import context, unique_name
from amp_transpiler.nn import building
from amp_transpiler.runtime import binding, executor, open_steps
from amp_transpiler.runtime.locks import StepLock
from tests.helpers.running import program_of
from tests.tools.threads_run import Counting, counting, ones, together, train

UPDATES, THREADS = 1600, 8


def executors(shared: bool) -> list[amp.Executor]:
    one = amp.Executor(threads=1)
    return [one if shared else amp.Executor(threads=1) for _ in range(THREADS)]


# -- nothing is lost --------------------------------------------------------------------------------------
@pytest.mark.parametrize("shared", [True, False], ids=["one executor", "eight executors"])
@pytest.mark.parametrize("mode", ["fp32", "pure-fp16"])
def test_no_update_is_lost(shared: bool, mode: str) -> None:
    """Every step takes exactly 1 from each weight; the scale doubles at step 1500, and 100 good steps follow."""
    net = counting(mode)
    scope = net.started()
    train(net, executors(shared), scope, UPDATES, batches=(2, 4, 8))
    master = "w_fp32_master_0" if mode == "pure-fp16" else "w"
    assert scope.find_var(master).ravel().tolist() == [-UPDATES] * 4
    if mode == "pure-fp16":
        assert scope.find_var("w").dtype == np.float16 and scope.find_var("w").ravel().tolist() == [-UPDATES] * 4
        state = net.optimizer.get_loss_scale_state(scope)  # type: ignore[attr-defined]
        assert (state.scale, state.good, state.bad) == (32.0, 100, 0)


def test_adam_takes_as_many_steps_as_in_one_thread() -> None:
    """Its moments and powers of beta after n equal steps are those of one thread, bit for bit."""
    found = []
    for count in (1, THREADS):
        net = counting(rule=amp.optimizer.Adam)
        scope = net.started()
        one = amp.Executor(threads=1)
        train(net, [one] * count, scope, 400)
        found.append({name: scope.find_var(name).tobytes() for name in scope.var_names()})
    assert found[0] == found[1] and any("beta1_pow" in name for name in found[0])


@pytest.mark.parametrize("shared", [True, False], ids=["one executor", "eight executors"])
def test_windows_of_accumulation_are_whole(shared: bool) -> None:
    """Four micro-batches are one step, whichever threads run them."""
    net = counting("pure-fp16", runs=4)
    scope = net.started()
    train(net, executors(shared), scope, 200)
    assert scope.find_var("w_fp32_master_0").ravel().tolist() == [-200] * 4
    assert int(scope.find_var(net.main.accumulation.counter.name)) == 0


def test_watched_steps_and_reports_are_counted_once() -> None:
    """The first steps overflow in fp16, and two of them halve the scale; reports are numbered as they came."""
    net = counting("pure-fp16")
    scope = net.started()
    state = net.optimizer.get_loss_scale_state(scope)  # type: ignore[attr-defined]
    reports, seen = amp.StepReports(net.main), list[Any]()
    watch = amp.watch(amp.Executor(threads=1), on_bad=lambda _: None, limit=2)

    def task() -> None:
        for _ in range(25):
            seen.extend(watch.run(net.main, ones(4), [reports], scope))

    net.optimizer.set_loss_scale_state(type(state)(2.0**30, 0, 0), scope)  # type: ignore[attr-defined]
    together([task] * 4)
    bad = [report for report in seen if report.skipped]
    assert sorted(report.step for report in seen) == list(range(100))
    assert watch.bad_steps == len(bad) > 2 and len(watch.culprits) == 2
    assert scope.find_var("w_fp32_master_0").ravel().tolist() == [len(bad) - 100] * 4
    in_order = sorted(seen, key=lambda report: report.step)
    assert [r.next_loss_scaling for r in in_order[:-1]] == [r.loss_scaling for r in in_order[1:]]


# -- nothing is torn ---------------------------------------------------------------------------------------
def test_evaluation_values_and_checkpoints_are_of_one_step(tmp_path: Path) -> None:
    """A million equal weights are updated where they lie; whoever looks meanwhile finds all of them equal."""
    net = counting("pure-fp16", width=1 << 20)
    scope, exe = net.started(), amp.Executor(threads=1)
    w, masters = net.main.var("w"), "w_fp32_master_0"
    look = program_of("""<ir_version: 10, opset_import: ["" : 21]>
    look (float[1048576, 1] w_fp32_master_0) => (float low, float high) {
        low = ReduceMin <keepdims = 0> (w_fp32_master_0)
        high = ReduceMax <keepdims = 0> (w_fp32_master_0)
    }""")
    look.var(masters).persistable = True
    look.inputs = []
    feed, done = ones(1, 1 << 20), threading.Event()

    def steps() -> None:
        for _ in range(40):
            exe.run(net.main, feed, scope=scope)
        done.set()

    def until_done(check: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            while not done.is_set():
                check()

        return run

    def values() -> None:
        found = scope.find_var(masters)
        assert found.min() == found.max()

    def evaluation() -> None:
        low, high = exe.run(look, fetch_list=["low", "high"], scope=scope)
        assert low == high

    def both() -> None:
        with scope.reading():
            assert scope.find_var(masters)[0] == scope.find_var("w")[0]

    def checkpoint() -> None:
        copy = amp.Scope()
        amp.save_checkpoint(tmp_path / "checkpoint", net.main, scope)
        amp.load_checkpoint(tmp_path / "checkpoint", net.main, copy)
        found = copy.find_var(masters)
        assert found.min() == found.max() == copy.find_var("w").astype(np.float32).min()

    assert w.dtype == "float16"
    together([steps, *map(until_done, (values, evaluation, evaluation, both, checkpoint))])
    assert set(scope.find_var(masters).ravel().tolist()) == {-40.0}


def test_a_value_that_is_set_between_steps_is_not_lost() -> None:
    net = counting()
    scope, exe = net.started(), amp.Executor(threads=1)
    seen: list[float] = []

    def steps() -> None:
        for _ in range(500):
            exe.run(net.main, ones(4), scope=scope)

    def sets() -> None:
        for _ in range(100):
            with scope.writing():
                seen.append(float(scope.find_var("w")[0, 0]))
                scope.set_var("w", np.zeros((4, 1), np.float32))

    together([steps, sets])
    assert scope.find_var("w")[0, 0] + sum(seen) == -500


# -- one session, side by side --------------------------------------------------------------------------------
def counted(monkeypatch: pytest.MonkeyPatch, around: Callable[[Callable[[], Any]], Any]) -> list[str]:
    """The names of programs that sessions are made for; ``around`` is called with the making."""
    made: list[str] = []
    plain = executor.create_session

    def create(*arguments: Any, **options: Any) -> Any:
        made.append(arguments[3])
        return around(lambda: plain(*arguments, **options))

    monkeypatch.setattr(executor, "create_session", create)
    return made


def test_a_cold_executor_makes_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(make: Callable[[], Any]) -> Any:
        time.sleep(0.05)
        return make()

    net = counting()
    scope = net.started()
    made = counted(monkeypatch, slowly)
    train(net, executors(shared=True), scope, 8)
    assert made == ["counting"]


def test_sessions_of_two_shapes_are_made_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    net = counting()
    scope, exe = net.started(), amp.Executor(threads=1)
    both = threading.Barrier(2)

    def meeting(make: Callable[[], Any]) -> Any:
        both.wait(20)  # BrokenBarrierError where one waits for the other
        return make()

    made = counted(monkeypatch, meeting)
    together([lambda batch=batch: exe.run(net.main, ones(batch), scope=scope) for batch in (2, 4)])
    assert len(made) == 2 and scope.find_var("w")[0, 0] == -2


@pytest.mark.parametrize("what", ["evaluation in one scope", "training in two scopes"])
def test_what_may_run_side_by_side_does(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs through one executor meet inside; each has its own feed and result."""
    net = counting()
    exe, scope = amp.Executor(threads=1), net.started()
    program = net.main.clone(for_test=True) if what.startswith("evaluation") else net.main
    scopes = [scope, scope if what.startswith("evaluation") else net.started()]
    scope.set_var("w", np.full((4, 1), 2, np.float32))
    scopes[1].set_var("w", np.full((4, 1), 2, np.float32))
    exe.run(net.main.clone(for_test=True), ones(2), [net.loss.name], scope)  # type: ignore[attr-defined]
    both = threading.Barrier(2)
    plain = binding._Bindings._execute
    monkeypatch.setattr(binding._Bindings, "_execute", lambda self: (both.wait(20), plain(self)))
    found: dict[int, float] = {}

    def run(number: int) -> None:
        feed = {"x": np.full((2, 4), number + 1, np.float32)}
        (loss,) = exe.run(program, feed, [net.loss.name], scopes[number])  # type: ignore[attr-defined]
        found[number] = float(loss)

    together([lambda: run(0), lambda: run(1)])
    assert found == {0: 8.0, 1: 16.0}


def test_a_step_and_a_look_at_its_scope_do_not_overlap() -> None:
    """Readers share, a writer is alone; a thread may take again what it has; nobody waits for ever."""
    lock, inside, most = StepLock(), {"read": 0, "write": 0}, dict[str, int]()
    guard = threading.Lock()

    def visit(kind: str) -> None:
        with guard:
            inside[kind] += 1
            most[kind] = max(most.get(kind, 0), inside[kind])
            assert inside["write"] <= 1 and not (inside["write"] and inside["read"])
        time.sleep(0.0005)
        with guard:
            inside[kind] -= 1

    def read() -> None:
        for _ in range(40):
            with lock.reading(), lock.reading():
                visit("read")

    def write() -> None:
        for _ in range(40):
            with lock.writing(), lock.reading(), lock.writing():
                visit("write")

    together([read, write, read, write, read, read])
    assert most["write"] == 1 and most["read"] > 1 and not lock._readers


def test_readers_do_not_starve_a_step() -> None:
    lock, done = StepLock(), threading.Event()

    def read() -> None:
        while not done.is_set():
            with lock.reading():
                time.sleep(0.001)

    def write() -> None:
        for _ in range(20):
            with lock.writing():
                pass
        done.set()

    together([read, read, read, write], timeout=20)


# -- guards ----------------------------------------------------------------------------------------------------
def test_guards_are_their_threads_own() -> None:
    """Two threads build alike at the same time, each into its own program, with its own names and scope."""
    step = threading.Barrier(2)
    built: dict[int, tuple[amp.Program, list[str], list[bool]]] = {}

    def build(number: int) -> None:
        main, startup, scope = amp.Program(f"main_{number}"), amp.Program("startup"), amp.Scope()
        with amp.program_guard(main, startup), amp.unique_name.guard(), amp.scope_guard(scope):
            for _ in range(20):
                step.wait(20)
                with amp.name_scope(f"of_{number}"):
                    x = amp.data(amp.unique_name.generate("x"), [1, 4], "float32")
                    if number:
                        with amp.fp16_guard():
                            step.wait(20)
                            y = amp.nn.fc(x, 4)
                            step.wait(20)
                    else:
                        step.wait(20)
                        y = amp.nn.fc(x, 4)
                        step.wait(20)
                assert amp.default_main_program() is main and amp.global_scope() is scope and y.program is main
        ops = [op for op in main.operators if op.type in ("MatMul", "Gemm")]
        built[number] = (main, [op.scope for op in ops], [op.guard for op in ops])

    together([lambda: build(0), lambda: build(1)])
    assert [v.name for v in built[0][0].parameters] == [v.name for v in built[1][0].parameters]
    for number in (0, 1):
        assert set(built[number][1]) == {f"of_{number}"} and set(built[number][2]) == {bool(number)}


def test_a_thread_without_a_guard_has_the_programs_of_the_process() -> None:
    seen: list[Any] = []
    main = amp.Program()
    default, everywhere = amp.default_main_program(), amp.global_scope()
    with amp.program_guard(main), amp.scope_guard(amp.Scope()), amp.fp16_guard():
        together([lambda: seen.extend((amp.default_main_program(), amp.global_scope(), context.in_fp16_guard()))])
        assert amp.default_main_program() is main
    assert seen == [default, everywhere, False]


def test_the_name_of_a_call_is_its_threads_own() -> None:
    made: list[str] = []
    with amp.program_guard(amp.Program()), amp.unique_name.guard(), building.prefixed("fc_0"):
        together([lambda: made.append(building.fresh("relu"))])
        made.append(building.fresh("relu"))
    assert made[0].startswith("relu") and made[1] == "fc_0"


def test_names_are_given_once() -> None:
    found: list[str] = []
    together([lambda: found.extend([unique_name.generate("thread") for _ in range(500)])] * 4)
    assert len(set(found)) == 2000


# -- the cache of sessions ------------------------------------------------------------------------------------------
def test_a_cache_that_thrashes_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_steps, "WHOLE", 0)  # each shape has a session of its own
    net: Counting = counting()
    scope, exe = net.started(), amp.Executor(threads=1, max_sessions=2)
    for batch in (2, 4):
        exe.run(net.main, ones(batch), scope=scope)
    message = (
        r"program 'counting' has been fed 3 different shapes, the last 'x' \[8, 4\]\. Each is compiled, in "
        r"[\d.e-]+ s on average, and the executor keeps 2 sessions; .*Pad the feeds .*max_sessions=8"
    )
    with pytest.warns(UserWarning, match=message) as found:
        exe.run(net.main, ones(8), scope=scope)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exe.run(net.main, ones(2), scope=scope)


def test_evaluation_on_cpu_needs_one_session_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    net = counting()
    scope, exe = net.started(), amp.Executor(threads=1, max_sessions=1)
    scope.set_var("w", np.array([[1], [2], [3], [4]], np.float32))
    test = net.main.clone(for_test=True)
    made = counted(monkeypatch, lambda make: make())
    for batch in (1, 2, 5, 1):
        assert exe.run(test, ones(batch), [net.loss.name], scope)[0] == 10  # type: ignore[attr-defined]
    assert made == [test.name]
    with pytest.raises(amp.AmpError, match=r"feed 'x' of program '.*' has shape \[2, 5\]"):
        exe.run(test, ones(2, 5), [net.loss.name], scope)  # type: ignore[attr-defined]
