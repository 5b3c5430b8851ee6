"""Models for serving: what is written is what the program computes, and bare onnxruntime loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

import amp_transpiler.ops  # noqa: F401 -- fills the operator table
from amp_transpiler import nn
from amp_transpiler.errors import AmpError, ArgumentError, ArgumentTypeError, GraphError, ScopeError
from amp_transpiler.ir import unique_name
from amp_transpiler.nn import functional as F
from amp_transpiler.optimizer import SGD, decorate
from amp_transpiler.program import Program, program_guard
from amp_transpiler.runtime import (
    CPUPlace,
    Executor,
    Scope,
    cast_parameters_to_fp16,
    load_inference_model,
    save_inference_model,
    scope_guard,
)

TEXT = """
<ir_version: 10, opset_import: ["" : 21]>
net (float[N, 2] x, float[N, 3] target) => (float[N, 3] y, float loss, float[2, 3] w_new)
<float[2, 3] w = {1, 2, 3, 4, 5, 6}, float[3] unused = {1, 2, 3}>
{
    h = MatMul(x, w)
    y = Relu(h)
    error = Sub(y, target)
    other = Add(error, unused)
    loss = ReduceMean <keepdims = 0> (other)
    w_new = Mul(w, w)
}
"""
X = np.array([[1, -2], [3, 4]], np.float32)


@pytest.fixture
def exe() -> Executor:
    return Executor(CPUPlace(), threads=1)


def net(exe: Executor, scope: Scope) -> Program:
    program = Program.from_onnx(parser.parse_model(TEXT))
    program.set_update(program.var("w"), program.var("w_new"))
    exe.run(program.startup, scope=scope)
    return program


def bare(path: Path) -> Any:
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def test_pruned_to_what_the_fetches_need(exe: Executor, tmp_path: Path) -> None:
    scope = Scope()
    program = net(exe, scope)
    exe.run(program, scope=scope)  # the saved parameters are those after the step
    before = repr(program)
    path = tmp_path / "net.onnx"
    save_inference_model(path, ["x"], [program.var("y")], exe, scope=scope)
    assert repr(program) == before and program.updates
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["MatMul", "Relu"]
    assert [t.name for t in model.graph.initializer] == ["w"]
    session = bare(path)
    assert [i.name for i in session.get_inputs()] == ["x"] and [o.name for o in session.get_outputs()] == ["y"]
    expected = np.maximum(X @ scope.find_var("w"), 0)
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], expected)
    for count in (1, 5):  # the batch stays free
        assert session.run(None, {"x": np.ones((count, 2), np.float32)})[0].shape == (count, 3)


def test_back_again(exe: Executor, tmp_path: Path) -> None:
    scope, fresh = Scope(), Scope()
    program = net(exe, scope)
    path = tmp_path / "net.onnx"
    save_inference_model(path, [program.var("x"), "target"], ["loss", "y"], exe, program, scope=scope)
    with scope_guard(fresh):
        loaded, feeds, fetches = load_inference_model(path, exe)
        assert set(feeds) == {"x", "target"} and [v.name for v in fetches] == ["loss", "y"]
        target = np.ones((2, 3), np.float32)
        got = exe.run(loaded, {"x": X, "target": target}, fetches)
    want = exe.run(program.clone(for_test=True), {"x": X, "target": target}, ["loss", "y"], scope)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert set(fresh.var_names()) == {"w", "unused"}


def test_training_forms_are_turned(exe: Executor, tmp_path: Path) -> None:
    main, startup = Program(), Program("startup")
    with program_guard(main, startup), unique_name.guard():
        x = nn.data("x", [None, 1, 8, 8], "float32")
        h = nn.batch_norm(nn.conv2d(x, 2, 3), act="relu")
        y = F.softmax(nn.fc(F.dropout(h, 0.5), 4))
    scope = Scope()
    exe.run(startup, scope=scope)
    images = np.random.default_rng(0).standard_normal((3, 1, 8, 8)).astype(np.float32)
    for _ in range(2):
        exe.run(main, {"x": images}, [y], scope)  # moves the statistics
    path = tmp_path / "net.onnx"
    save_inference_model(path, [x], [y], exe, scope=scope)
    assert {node.domain for node in onnx.load(path).graph.node} == {""}
    (served,) = bare(path).run(None, {"x": images})
    (again,) = exe.run(main.clone(for_test=True), {"x": images}, [y.name], scope)
    np.testing.assert_allclose(served, again, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(served.sum(1), 1, rtol=1e-5)


def test_sixteen_bit_operators_are_real(exe: Executor, tmp_path: Path) -> None:
    program = Program.from_onnx(
        parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        net (float[N, 2] x) => (float[N, 3] y) <float16[2, 3] w = {1, 2, 3, 4, 5, 6}> {
            half = Cast <to = 10> (x)
            product = MatMul(half, w)
            y = Cast <to = 1> (product)
        }""")
    )
    scope = Scope()
    scope.set_var("w", np.full((2, 3), 1.00048828125, np.float32))
    path = tmp_path / "half.onnx"
    with pytest.raises(GraphError, match="'w' as float32.* float16"):
        save_inference_model(path, ["x"], ["y"], exe, program, scope=scope)
    assert not list(tmp_path.iterdir())  # nothing half written
    cast_parameters_to_fp16(CPUPlace(), program, scope)
    save_inference_model(path, ["x"], ["y"], exe, program, scope=scope)
    model = onnx.load(path)
    assert [n.op_type for n in model.graph.node] == ["Cast", "MatMul", "Cast"]
    assert model.graph.initializer[0].data_type == onnx.TensorProto.FLOAT16
    fresh = Scope()
    loaded, feeds, fetches = load_inference_model(path, exe, scope=fresh)
    (faithful,) = exe.run(loaded, {feeds[0]: X}, fetches, fresh)
    exact = (X.astype(np.float16).astype(np.float32) @ scope.find_var("w").astype(np.float32)).astype(np.float16)
    np.testing.assert_array_equal(faithful, exact)
    np.testing.assert_allclose(bare(path).run(None, {"x": X})[0], exact, rtol=1e-3)


BAD: dict[str, tuple[list[str], list[str], str]] = {
    "feed missing": (["x"], ["loss"], "needs the input 'target'"),
    "feed not needed": (["x", "target"], ["y"], "'target' is not needed"),
    "feed unknown": (["xx"], ["y"], "no variable 'xx'; did you mean 'x'"),
    "feed computed": (["h"], ["y"], "'h' is no input"),
    "fetch unknown": (["x"], ["yy"], "no variable 'yy'"),
    "fetch of a parameter": (["x"], ["w"], "'w' is a parameter"),
    "fetch of an input": (["x"], ["x"], "'x' is an input"),
    "no fetch": (["x"], [], "fetch_vars is empty"),
    "twice": (["x", "x"], ["y"], "names 'x' twice"),
}


def test_what_is_loaded_where_training_goes_on_reaches_the_masters(exe: Executor, tmp_path: Path) -> None:
    main, startup = Program(), Program("startup")
    with program_guard(main, startup), unique_name.guard():
        x = nn.data("x", [2, 3], "float32")
        y = nn.fc(x, 2)
        test = main.clone(for_test=True)
        optimizer = decorate(SGD(0.5, multi_precision=True), use_pure_fp16=True, use_fp16_guard=False)
        optimizer.minimize(F.mean(F.cast(y * y, "float32")), startup)
    scope, feed = Scope(), {"x": np.ones((2, 3), np.float32)}
    exe.run(startup, scope=scope)
    optimizer.amp_init(CPUPlace(), scope, test_program=test)
    save_inference_model(tmp_path / "m.onnx", ["x"], [y.name], exe, test, scope=scope)
    before = scope.find_var("fc_0.w_0")
    for _ in range(3):
        exe.run(main, feed, scope=scope)
    load_inference_model(tmp_path / "m.onnx", exe, scope=scope)
    np.testing.assert_array_equal(scope.find_var("fc_0.w_0"), before)
    np.testing.assert_array_equal(scope.find_var("fc_0.w_0_fp32_master_0"), before.astype(np.float32))


@pytest.mark.parametrize("case", BAD)
def test_bad_feeds_and_fetches(exe: Executor, tmp_path: Path, case: str) -> None:
    feeds, fetches, message = BAD[case]
    scope = Scope()
    program = net(exe, scope)
    with pytest.raises(ArgumentError, match=message):
        save_inference_model(tmp_path / "m.onnx", feeds, fetches, exe, program, scope=scope)
    assert not list(tmp_path.iterdir())


def test_other_misuse(exe: Executor, tmp_path: Path) -> None:
    program = net(exe, Scope())
    path = tmp_path / "m.onnx"
    with pytest.raises(ScopeError, match="'w' of program 'net' is not in the scope"):
        save_inference_model(path, ["x"], ["y"], exe, program, scope=Scope())
    with pytest.raises(ArgumentTypeError, match="an Executor as fourth"):
        save_inference_model(path, ["x"], ["y"], program)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"feed_vars is a list .* write \['x'\]"):
        save_inference_model(path, "x", ["y"], exe, program)
    with pytest.raises(ArgumentTypeError, match="an Executor as second"):
        load_inference_model(path, None)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError) as caught:
        load_inference_model(path, exe)
    assert isinstance(caught.value, AmpError)
    scope = Scope()
    program = net(exe, scope)
    (tmp_path / "file").touch()
    with pytest.raises(AmpError, match="cannot be written"):
        save_inference_model(tmp_path / "file" / "m.onnx", ["x"], ["y"], exe, program, scope=scope)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
