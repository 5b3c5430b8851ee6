"""Networks over the edges of a graph: their softmax over a node's edges is scattered, and edges decide on sizes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

#: A layer of graph attention as PyTorch Geometric exports it: loops are taken out of the edges, one for each node is
#: put in, and each node weighs its neighbours by a softmax whose maximum and sum are scattered.
GAT = """<ir_version: 8, opset_import: ["" : 18]>
gat ({real}[5,3] x, int64[2,7] edges) => ({real}[5,4] y)
  <{real}[3,4] w = {{{w}}}, {real}[4] here = {{0.5, -0.4, 0.3, 0.8}}, {real}[4] there = {{-0.6, 0.2, 0.7, 0.1}},
   {real} slope = {{0.2}}, int64[1] first = {{0}}, int64[1] second = {{1}}, int64[2,5] loops = {{0, 1, 2, 3, 4, 0, 1, 2, 3, 4}},
   {real}[5] least = {{-1e30, -1e30, -1e30, -1e30, -1e30}}, {real}[5] none = {{0, 0, 0, 0, 0}},
   {real}[5,4] empty = {{{zeros}}}, int64[1] line = {{-1}}>
{{
  h = MatMul(x, w)
  from1 = Gather <axis = 0> (edges, first)  to1 = Gather <axis = 0> (edges, second)  same = Equal(from1, to1)
  other = Not(same)  row = Reshape(other, line)  at = NonZero(row)  kept = Squeeze(at, first)
  apart = Gather <axis = 1> (edges, kept)  all = Concat <axis = 1> (apart, loops)
  j1 = Gather <axis = 0> (all, first)  j = Reshape(j1, line)  i1 = Gather <axis = 0> (all, second)  i = Reshape(i1, line)
  hh = Mul(h, here)  a = ReduceSum <keepdims = 0> (hh, second)  ht = Mul(h, there)  b = ReduceSum <keepdims = 0> (ht, second)
  aj = Gather(a, j)  bi = Gather(b, i)  s = Add(aj, bi)  n = Mul(s, slope)  e = Max(s, n)
  m = ScatterElements <reduction = "max"> (least, i, e)  mi = Gather(m, i)  d = Sub(e, mi)  p = Exp(d)
  t = ScatterElements <reduction = "add"> (none, i, p)  ti = Gather(t, i)  q = Div(p, ti)  q1 = Unsqueeze(q, second)
  hj = Gather(h, j)  hq = Mul(hj, q1)  iw = Unsqueeze(i, second)
  like = Shape(hq)  places = Expand(iw, like)
  y = ScatterElements <reduction = "add"> (empty, places, hq)
}}"""
#: Two layers that take each node's row to its neighbours and add up there what came.
SUMS = """<ir_version: 8, opset_import: ["" : 18]>
sums (float[4,64] x, int64[12] there, int64[12,1] here) => (float[4,64] y) {
  a = MatMul(x, w)  a1 = Gather <axis = 0> (a, there)  b = ScatterND <reduction = "add"> (none, here, a1)
  c = MatMul(b, v)  c1 = Gather <axis = 0> (c, there)  y = ScatterND <reduction = "add"> (none, here, c1)
}"""
RNG = np.random.default_rng(0)
W = RNG.normal(size=(3, 4))
X = RNG.normal(size=(5, 3))
EDGES = np.array([[0, 1, 2, 3, 3, 4, 1], [1, 2, 0, 3, 1, 2, 4]])


def gat(real: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(GAT.format(real=real, w=", ".join(map(str, W.ravel())), zeros=", ".join(["0"] * 20)))


def weighed(w: np.ndarray) -> float:
    """The sum of squares of what float64 makes of the weights."""
    model = gat("double")
    held = next(each for each in model.graph.initializer if each.name == "w")
    held.CopyFrom(onnx.numpy_helper.from_array(w, "w"))
    (y,) = ReferenceEvaluator(model).run(None, {"x": X, "edges": EDGES})
    return float((y * y).sum())


@pytest.mark.parametrize("mode", ["fp32", "pure"])
def test_it_trains_where_the_edges_are_known(mode: str) -> None:
    program = amp.Program.from_onnx(gat("float"))
    amp.prepare_training(program, values={"edges": EDGES})
    assert "NonZero" not in {op.type for op in program.operators}
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.sum(F.cast(program.outputs[0], "float32") ** 2)
        optimizer = amp.optimizer.SGD(0.0, multi_precision=mode == "pure")
        if mode == "pure":
            optimizer = amp.decorate(optimizer, init_loss_scaling=1.0, use_pure_fp16=True, use_fp16_guard=False)
        _, pairs = optimizer.minimize(loss)
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(program.startup, scope=scope)
    if mode == "pure":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
    gradient = next(g for weight, g in pairs if weight.name.startswith("w"))
    feed = {"x": X.astype(np.float32)}
    found = np.asarray(executor.run(program, feed=feed, fetch_list=[gradient], scope=scope)[0], np.float64)
    step, wanted = 1e-6, np.zeros_like(W)
    for place in np.ndindex(W.shape):
        change = np.zeros_like(W)
        change[place] = step
        wanted[place] = (weighed(W + change) - weighed(W - change)) / (2 * step)
    assert np.linalg.norm(found - wanted) < (1e-5 if mode == "fp32" else 1e-2) * np.linalg.norm(wanted)


def test_it_trains_with_edges_that_are_fed() -> None:
    """How many edges are left without loops, the run finds; the gradients are those of known edges, to the bit."""
    program = amp.Program.from_onnx(gat("float"))
    amp.prepare_training(program)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mean(program.outputs[0] * program.outputs[0])
        _, pairs = amp.optimizer.SGD(0.0).minimize(loss)
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(program.startup, scope=scope)
    feed = {"x": X.astype(np.float32)}
    kept = set[int]()
    for edges in (EDGES, EDGES[::-1], np.minimum(EDGES, 2), np.zeros_like(EDGES)):
        known = amp.Program.from_onnx(gat("float"))
        amp.prepare_training(known, values={"edges": edges})
        with amp.program_guard(known, known.startup), amp.unique_name.guard():
            _, wanted = amp.optimizer.SGD(0.0).minimize(F.mean(known.outputs[0] * known.outputs[0]))
        apart = amp.Scope()
        executor.run(known.startup, scope=apart)
        found = executor.run(program, {**feed, "edges": edges}, [g for _, g in pairs], scope=scope)
        for one, other in zip(found, executor.run(known, feed, [g for _, g in wanted], scope=apart), strict=True):
            np.testing.assert_array_equal(one, other)
        kept.add(int((edges[0] != edges[1]).sum()))
    assert kept == {6, 5, 0}


def test_edges_have_nothing_in_fp32_but_what_is_added_up() -> None:
    """What comes back along edges is rounded in the nodes that it is looked up in, and layers share places of edges."""
    model = onnx.parser.parse_model(SUMS)
    weights = {"w": RNG.normal(size=(64, 64)), "v": RNG.normal(size=(64, 64)), "none": np.zeros((4, 64))}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items())
    program = amp.Program.from_onnx(model)
    amp.prepare_training(program)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        optimizer = amp.decorate(amp.optimizer.SGD(0.1, multi_precision=True), use_pure_fp16=True, use_fp16_guard=False)
        optimizer.minimize(F.mean(F.square(F.cast(program.outputs[0], "float32"))))
    graph = onnx.shape_inference.infer_shapes(program.lower(amp.CUDAPlace(0)).model, data_prop=True).graph
    tensors = {v.name: v.type.tensor_type for v in graph.value_info}
    made = [(node.op_type, tensors[name]) for node in graph.node for name in node.output if name in tensors]
    of_edges = [(op, t.elem_type) for op, t in made if [d.dim_value for d in t.shape.dim] == [12, 64]]
    kinds = {"fp32": onnx.TensorProto.FLOAT, "int32": onnx.TensorProto.INT32}
    found = {name: [op for op, kind in of_edges if kind == wanted] for name, wanted in kinds.items()}
    # To both sums, and back to both; and to where rows are added, and where they come back to.
    assert found == {"fp32": ["Cast"] * 4, "int32": ["Expand"] * 2}
