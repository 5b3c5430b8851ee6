"""The executor: what comes out is right, and state lives in the scope."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from amp_transpiler import nn
from amp_transpiler.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutionError,
    FeedTypeError,
    OrderError,
    PlaceError,
)
from amp_transpiler.ir import unique_name
from amp_transpiler.lists import place_traits
from amp_transpiler.program import Program, program_guard
from amp_transpiler.runtime import (
    CPUPlace,
    CUDAPlace,
    Executor,
    Scope,
    global_scope,
    scope_guard,
)
from amp_transpiler.runtime.startup_run import startup_parts
from tests.helpers.on_places import needs
from tests.helpers.running import FEED, ROW, W, X, program_of, started


# -- running -------------------------------------------------------------------------------------------
def test_steps_update_the_scope(exe: Executor, scope: Scope) -> None:
    program = started(exe, scope)
    w, total = W, np.zeros_like(W)
    for _ in range(4):
        y, picked = exe.run(program, FEED, [program.var("y"), "picked"], scope)
        np.testing.assert_array_equal(y, X @ w)
        np.testing.assert_array_equal(picked, (X @ w)[ROW])
        w, total = w - w * np.float32(0.5), total + w + w
        np.testing.assert_array_equal(scope.find_var("w"), w)
        np.testing.assert_array_equal(scope.find_var("total"), total)


def test_without_fetches_the_step_still_happens(exe: Executor, scope: Scope) -> None:
    program = started(exe, scope)
    assert exe.run(program, scope=scope) == []  # nothing that the updates need is fed
    np.testing.assert_array_equal(scope.find_var("w"), W / 2)


def test_fetched_state_has_its_value_after_the_step(exe: Executor, scope: Scope) -> None:
    program = started(exe, scope)
    w, new, y, w_again = exe.run(program, FEED, ["w", "w_new", "y", program.var("w")], scope)
    np.testing.assert_array_equal(w, W / 2)
    np.testing.assert_array_equal(new, W / 2)
    np.testing.assert_array_equal(y, X @ W)
    np.testing.assert_array_equal(w_again, W / 2)


def test_results_belong_to_the_caller(exe: Executor, scope: Scope) -> None:
    program = started(exe, scope)
    for numpy in (True, False):
        kept = exe.run(program, FEED, ["y", "w", "w_new"], scope, return_numpy=numpy)
        before = [np.array(value if numpy else value.numpy()) for value in kept]
        for _ in range(3):
            exe.run(program, FEED, ["y", "w", "w_new"], scope, return_numpy=numpy)
        for value, old in zip(kept, before, strict=True):
            np.testing.assert_array_equal(value if numpy else value.numpy(), old)
    found = scope.find_var("w")
    found[:] = 7
    assert not np.array_equal(scope.find_var("w"), found)


def test_ort_values_go_back_in(exe: Executor, scope: Scope) -> None:
    program = started(exe, scope)
    (y,) = exe.run(program, FEED, ["y"], scope, return_numpy=False)
    follow = program_of('<ir_version: 10, opset_import: ["" : 21]> f (float[N, 3] y) => (float[N, 3] z) { z = Neg(y) }')
    np.testing.assert_array_equal(exe.run(follow, {"y": y}, ["z"])[0], -(X @ W))
    with pytest.raises(FeedTypeError, match="'x' of program 'linear' is int64"):
        (row,) = exe.run(program, FEED, ["row"], scope, return_numpy=False)
        exe.run(program, {"x": row, "row": ROW}, ["y"], scope)


def test_train_and_test_programs_share_the_scope(exe: Executor, scope: Scope) -> None:
    program = started(exe, scope)
    test = program.clone(for_test=True)
    for _ in range(3):
        exe.run(program, FEED, ["y"], scope)
        np.testing.assert_array_equal(exe.run(test, {"x": X}, ["y"], scope)[0], X @ scope.find_var("w"))
    scope.set_var("w", W)
    np.testing.assert_array_equal(exe.run(test, {"x": X}, ["y"], scope)[0], X @ W)


def test_only_the_needed_feeds_are_asked_for(exe: Executor, scope: Scope) -> None:
    program = started(exe, scope)
    np.testing.assert_array_equal(exe.run(program, {"x": X}, ["y"], scope)[0], X @ W)
    exe.run(program, FEED, ["y"], scope)  # and what is not needed may be fed


def test_layers_start_up_reproducibly(exe: Executor) -> None:
    def run(seed: int, extra: bool) -> np.ndarray:
        main, startup = Program(), Program("startup")
        startup.seed = main.seed = seed
        with program_guard(main, startup), unique_name.guard():
            x = nn.data("x", [None, 4], "float32")
            if extra:
                nn.fc(x, 5)
            y = nn.fc(x, 3, param_attr="weight", bias_attr="bias")
        with scope_guard(Scope()) as scope:
            exe.run(startup)
            (out,) = exe.run(main, {"x": np.eye(4, dtype=np.float32)}, [y])
            np.testing.assert_allclose(out, scope.find_var("weight") + scope.find_var("bias"), rtol=1e-6)
            return scope.find_var("weight")

    assert np.array_equal(run(1, False), run(1, True)) and not np.array_equal(run(1, False), run(2, False))
    assert not global_scope().has_var("weight")


def test_a_shape_known_only_after_the_run(cpu: Executor, scope: Scope) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    f (float[N] x) => (int64[r, M] where, float[2] w_new) <float[2] w = {1, 2}> {
        where = NonZero(x)
        count = Shape(where)
        wide = Cast <to = 1> (count)
        w_new = Add(w, wide)
    }"""
    program = program_of(text, w="w_new")
    assert program.startup is not None
    cpu.run(program.startup, scope=scope)
    for x in ([1, 0, 2], [0, 0, 0], [1, 1, 1]):
        (where,) = cpu.run(program, {"x": x}, ["where"], scope)
        np.testing.assert_array_equal(where[0], np.nonzero(x)[0])
    np.testing.assert_array_equal(scope.find_var("w"), [1 + 3, 2 + 2 + 0 + 3])


def test_bfloat16_in_state_feeds_and_fetches(exe: Executor, scope: Scope) -> None:
    needs(exe.place, "bfloat16")
    program = Program("bf")
    x = program.add_input("x", "bfloat16", [2])
    w = program.add_variable("w", "bfloat16", [2], persistable=True)
    y, new = program.add_variable("y", "bfloat16", [2]), program.add_variable("w@NEW", "bfloat16", [2])
    program.add_operator("Mul", [x, w], [y])
    program.add_operator("Add", [y, w], [new])
    program.set_update(w, new)
    bf16 = ml_dtypes.bfloat16
    scope.set_var("w", np.array([1.0078125, 3], bf16))
    fed = np.array([1.0078125, 2.5], bf16)
    for numpy in (True, False):
        expected = fed * scope.find_var("w")
        (got,) = exe.run(program, {"x": fed}, ["y"], scope, return_numpy=numpy)
        if numpy:
            assert got.dtype == bf16 and got.tobytes() == expected.tobytes()
        else:
            copy = Scope()
            copy.set_var("y", got)
            assert copy.find_var("y").tobytes() == expected.tobytes()
    assert scope.find_var("w").dtype == bf16
    with pytest.raises(FeedTypeError, match=r"float32; .* bfloat16: feed x.astype\(ml_dtypes.bfloat16\)"):
        exe.run(program, {"x": np.ones(2, np.float32)}, ["y"], scope)


def test_strings_and_sequences_pass_through(cpu: Executor, scope: Scope) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    f (string[N] s, float[2] x) => (string[N] t, seq(float[2]) q, float[2] w_new) <float[2] w = {1, 2}> {
        t = Identity(s)
        w_new = Add(w, x)
        q = SequenceConstruct(x, w)
    }"""
    program = program_of(text, w="w_new")
    assert program.startup is not None
    cpu.run(program.startup, scope=scope)
    t, q, w = cpu.run(program, {"s": ["a", "ü"], "x": [1, 2]}, ["t", "q", "w"], scope)
    assert list(t) == ["a", "ü"] and [a.tolist() for a in q] == [[1, 2], [1, 2]] and w.tolist() == [2, 4]
    joined = program_of("""<ir_version: 10, opset_import: ["" : 21]>
    f (seq(float[2]) q) => (float[N] y) { y = ConcatFromSequence <axis = 0> (q) }""")
    assert cpu.run(joined, {"q": q}, ["y"])[0].tolist() == [1, 2, 1, 2]


def test_bfloat16_beside_strings(cpu: Executor, scope: Scope) -> None:
    program = program_of("""<ir_version: 10, opset_import: ["" : 21]>
    f (string[N] s, bfloat16[2] x) => (string[N] t, float[2] y) <bfloat16[2] w = {0, 0}> {
        t = Identity(s)
        sum = Add(x, w)
        y = Cast<to = 1>(sum)
    }""")
    scope.set_var("w", np.array([1, 2], ml_dtypes.bfloat16))
    _, y = cpu.run(program, {"s": ["a"], "x": np.array([1, 0.5], ml_dtypes.bfloat16)}, ["t", "y"], scope)
    assert y.tolist() == [2, 2.5]


@pytest.mark.parametrize("type_", ["Sum", "Mean"])
@pytest.mark.parametrize("dtype", ["float16", "float"])
def test_sizes_that_data_decide_reach_an_operator_with_a_rule(cpu: Executor, type_: str, dtype: str) -> None:
    program = program_of(f"""<ir_version: 10, opset_import: ["" : 21]>
    f ({dtype}[4] x) => ({dtype}[K] y) {{
        kept = NonZero(x)
        at = Transpose<perm = [1, 0]>(kept)
        chosen = GatherND(x, at)
        y = {type_}(chosen, chosen, chosen)
    }}""")
    x = np.array([0, 1000.5, 0, 1.5], {"float": np.float32}.get(dtype, np.float16))
    (y,) = cpu.run(program, {"x": x}, ["y"])
    times = 3 if type_ == "Sum" else 1
    assert y.dtype == x.dtype and y.tolist() == (x[[1, 3]].astype(np.float64) * times).astype(x.dtype).tolist()


def test_sequences_in_16_bit_keep_their_type(cpu: Executor) -> None:
    program = program_of("""<ir_version: 10, opset_import: ["" : 21]>
    f (float16[2] x) => (seq(float16[2]) q) { y = Mul(x, x) q = SequenceConstruct(x, y) }""")
    ((x, y),) = cpu.run(program, {"x": np.array([1.5, 0.1], np.float16)}, ["q"])
    assert x.dtype == y.dtype == np.float16 and y.tolist() == [2.25, float(np.float16(0.1) * np.float16(0.1))]


def test_bfloat16_beside_a_sequence_is_named(cpu: Executor) -> None:
    program = program_of("""<ir_version: 10, opset_import: ["" : 21]>
    f (float[2] x) => (seq(float[2]) q, bfloat16[2] y) { y = Cast<to=16>(x) q = SequenceConstruct(x) }""")
    with pytest.raises(ExecutionError, match="'y' is bfloat16, .* beside feeds and fetches that are sequences"):
        cpu.run(program, {"x": np.ones(2, np.float32)}, ["q", "y"])
    assert cpu.run(program, {"x": np.ones(2, np.float32)}, ["y"])[0].tolist() == [1, 1]


# -- compiling ------------------------------------------------------------------------------------------
def test_one_session_for_each_signature(exe: Executor, scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    from amp_transpiler.runtime import executor

    made: list[str] = []
    plain = executor.create_session
    monkeypatch.setattr(executor, "create_session", lambda *a, **k: made.append(a[3]) or plain(*a, **k))
    program = started(exe, scope)
    for _ in range(3):
        for count in (2, 4):
            exe.run(program, {"x": X[:count], "row": ROW[:count]}, ["picked"], scope)
    assert made == ["linear", "linear"]
    exe.run(program, FEED, ["y"], scope)
    program.add_variable("another", "float32", ())
    exe.run(program, FEED, ["picked"], scope)
    assert len(made) == 4
    small = Executor(max_sessions=1, threads=1)
    with pytest.warns(UserWarning, match="has been fed 2 different shapes") as told:
        for count in (2, 4, 2):
            small.run(program, {"x": X[:count], "row": ROW[:count]}, ["picked"], scope)
    assert told[0].filename == __file__
    assert len(made) == 6, "the second shape's session serves the first one too"


def test_programs_are_freed(exe: Executor, scope: Scope) -> None:
    program = started(exe, scope)
    exe.run(program, FEED, [program.var("y")], scope)
    gone = weakref.ref(program)
    del program
    gc.collect()
    assert gone() is None and len(exe._tables.programs) == 0


def test_memory_report(exe: Executor, scope: Scope) -> None:
    program = started(exe, scope)
    with pytest.raises(OrderError, match="run it once first"):
        exe.memory_report(program)
    exe.run(program, FEED, ["y"], scope)
    report = exe.memory_report(program)
    assert not report.in_place and set(report.two_buffers) == {"w", "total"}
    if not place_traits(exe.place.kind).in_place:
        assert all("kernel" in why for why in report.two_buffers.values())
        return
    assert "may read it after the update" in report.two_buffers["w"]
    assert "Sum" in report.two_buffers["total"] and "not elementwise" in report.two_buffers["total"]

    gated = gated_program()
    exe.run(gated.startup, scope=scope)
    exe.run(gated, {"x": [1, 2]}, scope=scope)
    assert exe.memory_report(gated).in_place == ("w",) and not exe.memory_report(gated).two_buffers


def gated_program() -> Program:
    """w falls by x, unless x holds a NaN."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    gated (float[2] x, int64[N] row) => (float[2] w_new, float[N] late) <float[2] w = {5, 5}> {
        zero = Constant <value_float = 0.0> ()
        sum = ReduceSum <keepdims = 0> (x)
        nothing = Mul(sum, zero)
        ok = Equal(nothing, zero)
        lower = Sub(w, x)
        w_new = Where(ok, lower, w)
        late = Gather(w_new, row)
    }"""
    return program_of(text, w="w_new")


def test_a_gated_update_in_place(cpu: Executor, scope: Scope) -> None:
    program = gated_program()
    cpu.run(program.startup, scope=scope)
    pointer = scope.ort_values["w"].data_ptr()
    for x, expected in (([1, 2], [4, 3]), ([np.nan, 1], [4, 3]), ([1, 1], [3, 2])):
        assert cpu.run(program, {"x": x}, ["w"], scope)[0].tolist() == expected
    assert scope.ort_values["w"].data_ptr() == pointer
    with pytest.raises(ExecutionError, match="in place may have been updated before it failed: 'w'"):
        cpu.run(program, {"x": [1, 1], "row": [7]}, ["late"], scope)


# -- what goes wrong ------------------------------------------------------------------------------------
def test_a_failing_run_changes_nothing(cpu: Executor, scope: Scope) -> None:
    program = started(cpu, scope)
    cpu.run(program, FEED, ["picked"], scope)
    before = {name: scope.find_var(name) for name in scope.var_names()}
    with pytest.raises(ExecutionError, match="program 'linear': .*(out of (data )?bounds|out of range)"):
        cpu.run(program, {"x": X, "row": ROW + 100}, ["picked"], scope)
    for name, value in before.items():
        np.testing.assert_array_equal(scope.find_var(name), value)
    np.testing.assert_array_equal(cpu.run(program, FEED, ["picked"], scope)[0], X @ before["w"])


def test_a_failing_startup_changes_nothing(cpu: Executor, scope: Scope) -> None:
    startup = Program("startup")
    good = startup.add_variable("good", "float32", [2], persistable=True, data=np.ones(2, np.float32))
    startup.add_operator("ArrayInitializer", [], [good], domain="amp_transpiler")
    row = startup.add_constant("row", np.array([5]))
    startup.add_operator("Gather", [good, row], [startup.add_variable("bad", "float32", [1], persistable=True)])
    with pytest.raises(ExecutionError, match="'startup'"):
        cpu.run(startup, scope=scope)
    assert scope.var_names() == []


def test_startup_operators_read_what_others_initialised(exe: Executor, scope: Scope) -> None:
    startup = Program("startup")
    w = startup.add_variable("w", "float32", [2], persistable=True, data=np.array([1.5, 70000], np.float32))
    startup.add_operator("ArrayInitializer", [], [w], domain="amp_transpiler")
    master = startup.add_variable("w_fp32_master_0", "float32", [2], persistable=True)
    startup.add_operator("Identity", [w], [master])
    half = startup.add_variable("h", "float16", [2], persistable=True)
    startup.add_operator("Cast", [w], [half], attrs={"to": 10})
    (fetched,) = exe.run(startup, fetch_list=["h"], scope=scope)
    assert scope.find_var("w_fp32_master_0").tolist() == [1.5, 70000]
    assert fetched.dtype == np.float16 and scope.find_var("h").tolist() == [1.5, np.inf] == fetched.tolist()
    assert scope.ort_values["w"].data_ptr() != scope.ort_values["w_fp32_master_0"].data_ptr()


def test_copies_take_no_session(exe: Executor, scope: Scope) -> None:
    """But one that is read, or fetched, is made in it."""
    startup = Program("startup")
    w = startup.add_variable("w", "float32", [2], persistable=True, data=np.array([1.5, -0.0], np.float32))
    startup.add_operator("ArrayInitializer", [], [w], domain="amp_transpiler")
    for name in ("first", "second"):
        startup.add_operator("Identity", [w], [startup.add_variable(name, "float32", [2], persistable=True)])
    parts = startup_parts(startup)
    assert parts.rest is None and parts.copies == [("first", "w"), ("second", "w")]
    third = startup.add_variable("third", "float32", [2], persistable=True)
    startup.add_operator("Identity", [startup.var("second")], [third])
    parts = startup_parts(startup, ["first", 0])
    assert parts.copies == [("third", "second")] and parts.rest is not None and len(parts.rest.operators) == 2
    (fetched,) = exe.run(startup, fetch_list=["first"], scope=scope)
    for value in (fetched, *map(scope.find_var, ("first", "second", "third"))):
        assert value.tobytes() == np.array([1.5, -0.0], np.float32).tobytes()
    assert len({value.data_ptr() for value in scope.ort_values.values()}) == 4


@pytest.mark.parametrize(
    "make, kind, message",
    [
        (lambda: Executor("gpu"), ArgumentError, "Executor: place is 'gpu'; .* its kind: cpu, cuda, webgpu"),
        (lambda: Executor(CPUPlace), ArgumentTypeError, r"write CPUPlace\(\)"),  # type: ignore[arg-type]
        (lambda: Executor(optimization_level="most"), ArgumentError, "expected one of .*basic"),
        (lambda: Executor(threads=0), ArgumentError, "at least 1"),
        (lambda: Executor(max_sessions=0), ArgumentError, "at least 1"),
        (lambda: CUDAPlace(-1), ArgumentError, "number of a device"),
        (lambda: CUDAPlace("cuda:0"), ArgumentTypeError, "number of a device"),  # type: ignore[arg-type]
        (lambda: Executor().run("main"), ArgumentTypeError, "expected a Program"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments(make: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_cuda_asked_for_and_not_there(scope: Scope) -> None:
    from amp_transpiler.runtime.missing import cuda_missing

    if cuda_missing(0) is None:
        pytest.skip("there is a CUDA device")
    with pytest.raises(PlaceError, match=r"CUDAPlace\(0\) cannot be used: .*(driver|CUDA|device).*CPUPlace\(\)"):
        Executor(CUDAPlace(0))
    with pytest.warns(UserWarning, match=r"Running on CPUPlace\(\)"):
        exe = Executor(CUDAPlace(0), allow_cpu_fallback=True)
    assert exe.place == CPUPlace()
    np.testing.assert_array_equal(exe.run(started(exe, scope), FEED, ["y"], scope)[0], X @ W)


def test_an_operator_that_the_place_does_not_have(exe: Executor) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21, "foreign" : 1]>
    f (float[2] x) => (float[2] y) { y = foreign.Thing(x) }"""
    program = program_of(text)
    program.var("y").dtype, program.var("y").shape = "float32", (2,)
    with pytest.raises((PlaceError, ExecutionError), match="foreign"):
        exe.run(program, {"x": [1, 2]}, ["y"])
