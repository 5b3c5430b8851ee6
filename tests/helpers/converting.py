"""Converted models put to the proof: checked, loaded, run in faithful 16 bit, and free of needless casts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx

import amp_transpiler as amp
from tests.helpers.sessions import session

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
#: Split into more pieces than a shader has buffers for certain, joined in another order.
PIECES = (
    "m (float[4,18] x) => (float[4,18] y) { a = Neg(x) "
    + ", ".join(f"p{i}" for i in range(18))
    + " = Split<axis=1>(a) y = Concat<axis=1>("
    + ", ".join(f"p{17 - i}" for i in range(18))
    + ") }"
)
TYPES = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT}


def filled(text: str) -> onnx.ModelProto:
    """The model of a text, with weights of small numbers that nothing overflows with."""
    model = onnx.parser.parse_model(text if text.startswith("<") else HEAD + text)
    random = np.random.default_rng(0)
    for weight in model.graph.value_info:
        shape = [size.dim_value for size in weight.type.tensor_type.shape.dim]
        array = 0.1 * random.random(shape, dtype=np.float32) + np.float32(0.5)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, weight.name))
    del model.graph.value_info[:]
    return model


def behind_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, np.ndarray[Any, Any]]:
    """The model behind a product of its input "x" and weights of 2 and 4, and these: what it begins with reads what a
    layer makes. Fed with x over the weights, as "fed", it computes what it did."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    (fed,) = (value for value in found.graph.input if value.name == "x")
    fed.name = "fed"
    weights = np.resize(np.float32([2, 4]), fed.type.tensor_type.shape.dim[-1].dim_value)
    found.graph.initializer.append(onnx.numpy_helper.from_array(weights, "weights_of_x"))
    found.graph.node.insert(0, onnx.helper.make_node("Mul", ["fed", "weights_of_x"], ["x"]))
    return found, weights


def faithful(program: amp.Program, feed: dict[str, Any]) -> list[Any]:
    """The outputs of a converted program, rounded as a GPU rounds them."""
    names = [v.name for v in program.outputs]
    return amp.Executor(amp.CPUPlace(), threads=1).run(program, feed=feed, fetch_list=names)


def off(got: Any, wanted: Any) -> float:
    """How far an output is off: relative L2 error of floats, share of other elements that differ."""
    if wanted is None:
        return 0.0
    if isinstance(wanted, list):
        return (
            max([off(g, w) for g, w in zip(got, wanted, strict=True)], default=0.0) if len(got) == len(wanted) else 1.0
        )
    wanted, got = np.asarray(wanted), np.asarray(got)
    if wanted.shape != got.shape:
        return float("inf")
    if wanted.dtype.kind not in "fV":
        return float((wanted != got).mean()) if wanted.size else 0.0
    one, other = wanted.astype(np.float64), got.astype(np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        difference = float(np.linalg.norm((other - one)[~same]))
    return difference / (float(np.linalg.norm(one[np.isfinite(one)])) or 1.0) if difference else 0.0


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and those nested in it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for nested in [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs:
                yield from graphs(nested)


def inserted(node: onnx.NodeProto) -> bool:
    """Whether a conversion put this cast in."""
    reasons = {entry.key: entry.value for entry in node.metadata_props}
    return node.op_type == "Cast" and reasons.get("amp_transpiler.reason", "").startswith("cast: ")


def needless_casts(model: onnx.ModelProto) -> list[str]:
    """What is wrong with the casts that a conversion inserted, read from the file alone."""
    typed = onnx.shape_inference.infer_shapes(model, data_prop=False)
    found: list[str] = []
    kinds: dict[str, int] = {}
    constants: set[str] = set()
    for graph in graphs(typed.graph):
        kinds |= {i.name: i.type.tensor_type.elem_type for i in (*graph.input, *graph.value_info, *graph.output)}
        kinds |= {i.name: i.data_type for i in graph.initializer}
        fed = {i.name for i in graph.input}
        constants |= {i.name for i in graph.initializer if i.name not in fed}
        constants |= {n.output[0] for n in graph.node if n.op_type == "Constant"}
    read = {name for graph in graphs(model.graph) for node in graph.node for name in node.input}
    read |= {out.name for graph in graphs(model.graph) for out in graph.output}
    casts = [node for graph in graphs(model.graph) for node in graph.node if inserted(node)]
    made_of = {node.output[0]: node.input[0] for node in casts}
    seen: set[tuple[str, int]] = set()
    for node in casts:
        source, target, kind = node.input[0], node.output[0], node.attribute[0].i
        if (source, kind) in seen:
            found.append(f"'{source}' is cast to {kind} twice")
        seen.add((source, kind))
        if kinds.get(source) == kind:
            found.append(f"'{source}' has type {kind} already")
        if source in constants:
            found.append(f"constant '{source}' is cast at run time")
        if target not in read:
            found.append(f"nothing reads '{target}'")
        if source in made_of and kind != onnx.TensorProto.FLOAT and kinds.get(made_of[source]) == kind:
            found.append(f"'{made_of[source]}' is widened and narrowed again")
    return found


def well_formed(model: onnx.ModelProto, dtype: str, loads: bool = True) -> None:
    """Full check, sorted, unique names; and that onnxruntime loads float16 models."""
    onnx.checker.check_model(model, full_check=True)
    for graph in graphs(model.graph):
        names = [node.name for node in graph.node if node.name]
        assert len(names) == len(set(names))
    assert needless_casts(model) == []
    if loads and dtype == "float16":
        session(model)
