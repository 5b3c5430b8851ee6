"""One model for feeds of several sizes: it serves what is like its samples, and computes what theirs do."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.lowering.computations import computations
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.passes.lowering.open_sizes import OpenModel, Sized
from amp_transpiler.runtime.session import Settings, create_session
from tests.helpers.benchmark_programs import MODES, training
from tests.helpers.sessions import run

#: Of each program the sizes of two samples, and of two models that are like them.
SIZES: dict[str, list[dict[str, int]]] = {
    "mlp": [{"batch": 4}, {"batch": 6}, {"batch": 9}, {"batch": 5}],
    "cnn": [{"batch": 2}, {"batch": 3}, {"batch": 5}, {"batch": 7}],
    "resnet": [{"batch": 2, "size": 32}, {"batch": 3, "size": 32}, {"batch": 5, "size": 32}],
    "lstm": [{"length": 8}, {"length": 10}, {"length": 13}, {"length": 9}],
    "ctc": [{"batch": 2, "length": 16}, {"batch": 2, "length": 20}, {"batch": 2, "length": 28}],
    "bert": [{"batch": batch, "length": 16, "width": 64} for batch in (4, 5, 7)],
}


def sized(name: str, mode: str, sizes: dict[str, int]) -> Sized:
    main, _, loss, _ = training(name, mode, **sizes)
    lowered = lower(main, "cpu", {}, [loss], declared=True)
    return Sized(lowered.model, lowered.given)


def optimised(model: onnx.ModelProto) -> onnx.GraphProto:
    """The graph that onnxruntime runs."""
    _, graph = create_session(model, amp.CPUPlace(), Settings(threads=1), "sized", keep_graph=True)
    assert graph is not None
    return graph


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SIZES)
def test_it_computes_what_each_model_does(name: str, mode: str) -> None:
    """The same kernels read the same, and only as many sizes are open as differ."""
    samples = [sized(name, mode, sizes) for sizes in SIZES[name]]
    opened = OpenModel(samples[:2])
    assert opened.model is not None
    graph = optimised(opened.model)
    assert opened.inputs(samples[0]) is not None
    for sample in samples[1:]:
        assert sample.alike(samples[0])
        inputs = opened.inputs(sample)
        assert inputs is not None and len(inputs) == len(opened.open)
        own = optimised(sample.model)
        assert computations(graph, opened.known(sample)) == computations(own, {})


def net(body: str, feeds: str = "float[n, 4] x") -> amp.Program:
    """A program with state, so that every shape is lowered by itself."""
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({feeds}) => (float[] loss) <float[4, 4] w = {{{W}}}> {{ {body} }}'
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    amp.prepare_training(program, restore=False)
    with amp.program_guard(program, program.startup):
        amp.optimizer.SGD(0.1).minimize(program.outputs[0])
    return program


W = ", ".join(str(float(i % 5 - 2)) for i in range(16))
LOSS = "h = MatMul(x, w)  loss = ReduceMean <keepdims = 0> (h)"


def samples_of(program: amp.Program, *shapes: dict[str, tuple[int, ...]]) -> list[Sized]:
    found = [lower(program, "cpu", shape, program.outputs) for shape in shapes]
    return [Sized(lowered.model, lowered.given) for lowered in found]


def test_what_was_equal_must_be_equal_again() -> None:
    """Two feeds that had one size each time lie under one name: a model in which they differ is not served."""
    program = net(
        "h = MatMul(x, w)  k = MatMul(z, w)  a = ReduceSum <keepdims = 0> (h)  b = ReduceSum <keepdims = 0> (k) "
        "loss = Add(a, b)",
        "float[n, 4] x, float[m, 4] z",
    )
    shapes = [{"x": (a, 4), "z": (b, 4)} for a, b in [(2, 2), (3, 3), (5, 5), (2, 7)]]
    first, second, third, other = samples_of(program, *shapes)
    opened = OpenModel([first, second])
    assert opened.inputs(third) is not None and opened.inputs(other) is None
    wider = OpenModel([first, second, other])
    assert all(wider.inputs(sample) is not None for sample in (first, second, third, other))
    (x,) = {info.type.tensor_type.shape.dim[0].dim_param for info in wider.model.graph.input if info.name == "x"}  # type: ignore[union-attr]
    (z,) = {info.type.tensor_type.shape.dim[0].dim_param for info in wider.model.graph.input if info.name == "z"}  # type: ignore[union-attr]
    assert x and z and x != z


def test_other_nodes_are_not_alike() -> None:
    program = net(LOSS)
    first, second = samples_of(program, {"x": (2, 4)}, {"x": (3, 4)})
    other = samples_of(net(f"{LOSS.replace('MatMul(x, w)', 'Tanh(p)')}  p = MatMul(x, w)"), {"x": (2, 4)})[0]
    assert first.alike(second) and not first.alike(other)


def test_a_model_is_taken_apart_as_one_that_is_like_it() -> None:
    """With the nodes that both have to the byte; with its own where equal constants bear one name in it."""
    first, *others = (sized("mlp", "pure", {"batch": batch}) for batch in (4, 6, 9, 512))
    for plain in others:
        quick = Sized(plain.model, plain.given, first)
        assert (quick.nodes is first.nodes) is (plain is not others[-1])
        for part in ("nodes", "names", "constants", "types", "declared"):
            assert getattr(quick, part) == getattr(plain, part)


def model(shape: list[int], factors: list[float], kind: str) -> onnx.ModelProto:
    """A product with a constant, or a multiple of the input."""
    constant = onnx.numpy_helper.from_array(np.array(factors, np.float32).reshape(shape), "c")
    node = onnx.helper.make_node(kind, ["x", "c"], ["y"])
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([node], "g", [value("x", 1, [2, 2])], [value("y", 1, [2, 2])], [constant])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def test_weights_are_known_beforehand() -> None:
    """Kernels lay out a constant weight as they like; a factor is what it is."""
    for kind, shape, numbers, opens in (("MatMul", [2, 2], 4, False), ("Mul", [2, 2], 4, True)):
        first, second = (Sized(model(shape, [float(i + k) for i in range(numbers)], kind), {}) for k in (0, 1))
        assert first.alike(second)
        opened = OpenModel([first, second])
        assert (opened.model is not None) is opens
        if opened.model is not None:
            x = np.arange(4, dtype=np.float32).reshape(2, 2)
            for sample in (first, second):
                inputs = opened.inputs(sample)
                assert inputs is not None
                np.testing.assert_array_equal(run(opened.model, {"x": x, **inputs}), run(sample.model, {"x": x}))
        assert (opened.inputs(second) is None) is not opens


def test_computations_tell_kernels_apart() -> None:
    """Views and the order of axes count for nothing, and what is repeated is one number; all else counts."""

    def graph(body: str, inits: str = "float[1] c = {2}") -> onnx.GraphProto:
        text = f'<ir_version: 10, opset_import: ["" : 21]> g (float[2, 3] x) => (float[2, 3] y) <{inits}> {{ {body} }}'
        return onnx.parser.parse_model(text).graph

    plain = computations(graph("y = Mul(x, c)"), {})
    repeated = graph("y = Mul(x, c)", "float[2, 3] c = {2, 2, 2, 2, 2, 2}")
    views = graph(
        "t = Transpose(x)  s = Transpose(t)  v = Reshape(s, r)  p = Mul(v, c)  y = Reshape(p, q)",
        "float[1] c = {2}, int64[1] r = {6}, int64[2] q = {2, 3}",
    )
    assert plain == computations(repeated, {}) == computations(views, {})
    given = graph("y = Mul(x, c)", "float[1] unread = {2}")
    assert plain == computations(given, {"c": onnx.numpy_helper.from_array(np.full((1, 1), 2, np.float32))})
    for body in ("y = Mul(c, x)", "y = Add(x, c)", "p = Mul(x, c)  y = Mul(p, c)", "p = Mul(x, c)  y = Identity(x)"):
        assert plain != computations(graph(body), {})
    assert plain != computations(graph("y = Mul(x, c)", "float[1] c = {3}"), {})
