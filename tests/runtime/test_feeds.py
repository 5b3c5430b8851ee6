"""What goes into an executor is checked, and so is what a scope holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, FeedError, FeedTypeError, GraphError, ScopeError
from amp_transpiler.program import Program
from amp_transpiler.runtime import Executor, Scope, global_scope, scope_guard
from tests.helpers.places import change_place
from tests.helpers.running import FEED, ROW, W, X, linear, program_of, started

# -- feeds ----------------------------------------------------------------------------------------------
BAD_FEEDS: dict[str, tuple[Any, type[Exception], str]] = {
    "missing": ({"x": X}, FeedError, "needs the input 'row'; given were 'x'"),
    "nothing": ({}, FeedError, "needs the inputs 'x', 'row'; nothing was fed"),
    "misnamed": ({"X": X, "row": ROW}, FeedError, "no input 'X'; did you mean 'x'"),
    "state": ({**FEED, "w": W}, FeedError, r"persistable variable: set it with scope\.set_var"),
    "computed": ({**FEED, "y": X}, FeedError, "computed by the program"),
    "rank": ({"x": X[0], "row": ROW}, FeedError, r"shape \[2\]; it is declared with 2 dimensions: \[N, 2\]"),
    "size": ({"x": X[:, :1], "row": ROW}, FeedError, r"shape \[4, 1\]; dimension 1 is declared as 2"),
    "sizes of one name": ({"x": X, "row": ROW[:2]}, FeedError, "'row' .* size 2 where feed 'x' has 4; .* as 'N'"),
    "float64": ({"x": X.astype(np.float64), "row": ROW}, FeedTypeError, r"'x' .* float64; .* x.astype\('float32'\)"),
    "float16": ({"x": X.astype(np.float16), "row": ROW}, FeedTypeError, "float16; it is declared as float32"),
    "int32": ({"x": X, "row": ROW.astype(np.int32)}, FeedTypeError, r"int32; .* int64: feed row.astype\('int64'\)"),
    "numpy scalar": ({"x": X, "row": np.int32(1)}, FeedTypeError, "int32; it is declared as int64"),
    "list of arrays": ({"x": list(X.astype(np.float64)), "row": ROW}, FeedTypeError, "float64; it is declared"),
    "fraction": ({"x": X, "row": [0, 1, 2, 0.5]}, FeedTypeError, "does not fit int64"),
    "too large": ({"x": X + 0, "row": [0, 1, 2, 2**63]}, FeedTypeError, "does not fit int64"),
    "ragged": ({"x": [[1, 2], [3]], "row": ROW}, FeedTypeError, "do not form an array"),
    "text": ({"x": "abc", "row": ROW}, FeedTypeError, "'x' .* is string; it is declared as float32"),
    "none": ({"x": None, "row": ROW}, FeedTypeError, "'x' .* is not an array of numbers: NoneType"),
    "object": ({"x": object(), "row": ROW}, FeedTypeError, "'x' .* is not an array of numbers: object"),
    "no dictionary": ([X, ROW], ArgumentTypeError, "feed is a dictionary"),
    "key": ({0: X, "row": ROW}, ArgumentTypeError, "the keys of feed"),
}


def test_a_constant_that_the_file_lists_as_an_input_is_named(exe: Executor) -> None:
    program = program_of("""<ir_version: 10, opset_import: ["" : 21]>
    f (int64[2] x, int64[2] c) => (int64[2] y) <int64[2] c = {1, 2}> { y = Add(x, c) }""")
    with pytest.raises(FeedError, match="feed 'c' is no input of program 'f' but a constant: leave it out"):
        exe.run(program, {"x": np.zeros(2, np.int64), "c": np.zeros(2, np.int64)}, ["y"])


def test_a_size_that_is_declared_as_0_is_asked_for(exe: Executor) -> None:
    program = program_of(
        """<ir_version: 10, opset_import: ["" : 21]> f (float[0, 2] x) => (float[0, 2] y) { y = Neg(x) }"""
    )
    assert exe.run(program, {"x": np.zeros((0, 2), np.float32)}, ["y"])[0].shape == (0, 2)
    with pytest.raises(FeedError, match="dimension 0 is declared as 0"):
        exe.run(program, {"x": np.zeros((1, 2), np.float32)}, ["y"])


@pytest.mark.parametrize("case", BAD_FEEDS)
def test_bad_feeds_are_named_before_anything_runs(exe: Executor, scope: Scope, case: str) -> None:
    feed, kind, message = BAD_FEEDS[case]
    program = started(exe, scope)
    for _ in range(2):  # before and after the program was compiled
        before = scope.find_var("w")
        with pytest.raises(kind, match=message):
            exe.run(program, feed, ["picked"], scope)
        np.testing.assert_array_equal(scope.find_var("w"), before)
        exe.run(program, FEED, ["picked"], scope)


GOOD_FEEDS: dict[str, Callable[[Program], Any]] = {
    "variables as keys": lambda p: {p.var("x"): X, p.var("row"): ROW},
    "lists": lambda p: {"x": X.tolist(), "row": [0, 1, 2, 3]},
    "list of arrays": lambda p: {"x": list(X), "row": tuple(ROW)},
    "transposed": lambda p: {"x": np.asfortranarray(X), "row": ROW},
    "strided": lambda p: {"x": np.repeat(X, 2, 0)[::2], "row": ROW[::-1][::-1]},
    "other byte order": lambda p: {"x": X.astype(">f4"), "row": ROW.astype(">i8")},
    "read-only": lambda p: {"x": np.frombuffer(X.tobytes(), np.float32).reshape(4, 2), "row": ROW},
}


@pytest.mark.parametrize("case", GOOD_FEEDS)
def test_good_feeds(exe: Executor, scope: Scope, case: str) -> None:
    program = started(exe, scope)
    np.testing.assert_array_equal(exe.run(program, GOOD_FEEDS[case](program), ["picked"], scope)[0], X @ W)


def test_empty_and_scalar_feeds(exe: Executor) -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]> f (float[N, 2] x, float k) => (float[N, 2] y) { y = Mul(x, k) }'
    program = program_of(text)
    assert exe.run(program, {"x": np.zeros((0, 2), np.float32), "k": 2}, ["y"])[0].shape == (0, 2)
    assert exe.run(program, {"x": [[1, 2]], "k": np.float32(3)}, ["y"])[0].tolist() == [[3, 6]]
    with pytest.raises(FeedTypeError, match="does not fit float32"):
        exe.run(program, {"x": [[1, 2]], "k": 1e39}, ["y"])


@pytest.mark.parametrize(
    "fetches, kind, message",
    [
        (["yy"], GraphError, "fetch_list: program 'linear' has no variable 'yy'; did you mean 'y'"),
        ("y", ArgumentTypeError, r"write \['y'\]"),
        ([3], ArgumentTypeError, "variables or names, got 3"),
    ],
)
def test_bad_fetches(exe: Executor, scope: Scope, fetches: Any, kind: type[Exception], message: str) -> None:
    program = started(exe, scope)
    with pytest.raises(kind, match=message):
        exe.run(program, FEED, fetches, scope)


# -- scopes ---------------------------------------------------------------------------------------------
def test_a_program_whose_startup_never_ran(exe: Executor, scope: Scope) -> None:
    program = linear()
    with pytest.raises(ScopeError, match=r"'w' \(and 1 more .*'linear' is not in the scope; run .* 'linear_startup'"):
        exe.run(program, FEED, ["y"], scope)
    with pytest.raises(ScopeError, match="fetched variable 'w'"):
        exe.run(program.clone(for_test=True), fetch_list=["w"], scope=scope)
    assert scope.var_names() == []


def test_a_scope_of_another_type_or_shape(exe: Executor, scope: Scope) -> None:
    program = started(exe, scope)
    scope.set_var("w", W.astype(np.float16))
    with pytest.raises(ScopeError, match="'w' is float16 .* declares float32; amp_init .*test_program"):
        exe.run(program, FEED, ["y"], scope)
    scope.set_var("w", W[:, :2])
    with pytest.raises(ScopeError, match=r"'w' has shape \[2, 2\] .* declares \[2, 3\]"):
        exe.run(program, FEED, ["y"], scope)
    scope.set_var("w", W)
    half = Program("half")
    half.add_operator(
        "Cast",
        [half.add_variable("w", "float16", [2, 3], persistable=True)],
        [half.add_variable("y", "float32", [2, 3])],
        attrs={"to": 1},
    )
    with pytest.raises(ScopeError, match="'w' is float32 .* 'half' declares float16; call the optimizer's amp_init"):
        exe.run(half, {}, ["y"], scope)


def test_scope_values(scope: Scope) -> None:
    scope.set_var("a", np.arange(3, dtype=np.int32))
    scope.set_var("b", onnx.numpy_helper.from_array(np.float32(2.5)))
    scope.set_var("a", [7, 8])  # Python numbers take the type that is there
    assert scope.find_var("a").dtype == np.int32 and scope.find_var("b").shape == ()
    assert scope.var_names() == ["a", "b"]
    with pytest.raises(ArgumentError, match="variable 'a': .* does not fit int32"):
        scope.set_var("a", 0.5)
    with pytest.raises(ScopeError, match="no variable 'bb' .* did you mean 'b'"):
        scope.find_var("bb")
    with pytest.raises(ScopeError):
        scope.drop("a", "nothing")
    scope.drop("a")
    assert scope.has_var("b") and not scope.has_var("a")
    source = np.ones(4, np.float32)
    scope.set_var("c", source)
    source[:] = 5
    assert scope.find_var("c").tolist() == [1] * 4
    assert isinstance(ScopeError("x"), LookupError)


@pytest.mark.parametrize(
    "kind", ["float16", "float64", "bool", "uint8", "int4", "uint2", "float8_e4m3fn", "float8_e5m2", "bfloat16"]
)
def test_every_element_type_survives_the_scope(kind: str, scope: Scope) -> None:
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    ones = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    for array in (ones, ones[0, 1].reshape(()), ones[:0]):
        scope.set_var("v", array)
        found = scope.find_var("v")
        assert found.dtype == dtype and found.shape == array.shape and found.tobytes() == array.tobytes()


def test_scope_guards_nest() -> None:
    outer, inner = Scope(), Scope()
    process = global_scope()
    with scope_guard(outer):
        with pytest.raises(RuntimeError), scope_guard(inner):
            assert global_scope() is inner
            raise RuntimeError
        assert global_scope() is outer
    assert global_scope() is process
    with pytest.raises(ArgumentTypeError), scope_guard({}):  # type: ignore[arg-type]
        pass


def test_wide_integers_are_narrowed_for_a_place_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    change_place(monkeypatch, "cpu", wide_integers=False, bodies=True)
    program = Program("main")
    with amp.program_guard(program):
        x = amp.data("x", [2], "int64")
        y = x + x
    exe = Executor(amp.CPUPlace())
    doubled, same = exe.run(program, {"x": np.array([5, -7])}, [y, x])
    assert doubled.tolist() == [10, -14] and same.tolist() == [5, -7]
    assert doubled.dtype == same.dtype == np.int64
    (value,) = exe.run(program, exe.stage({"x": np.array([5, -7])}), [y], return_numpy=False)
    assert value.element_type() == onnx.TensorProto.INT64 and value.numpy().tolist() == [10, -14]
    for beyond in (2**31, -(2**31) - 1):
        with pytest.raises(FeedError, match=f"'x'.*{beyond}.*int32 holds -2147483648 to 2147483647"):
            exe.run(program, {"x": np.array([5, beyond])}, [y])
