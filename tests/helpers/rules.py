"""Turns the rule of one operator into a model, as the lowering does, and runs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.infer import type_proto
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import group_inputs
from amp_transpiler.ir.types import HALF, NAMES, ONNX_TYPES
from amp_transpiler.lists import place_traits
from amp_transpiler.passes.lowering.fitting import fitted
from amp_transpiler.passes.lowering.lowered import Lowered, Port
from tests.helpers.reference_ops import CORRECTED
from tests.helpers.sessions import run

Array = np.ndarray[Any, Any]
OPSET = 21


def tensor_info(name: str, dtype: str, shape: Sequence[int | str | None]) -> onnx.ValueInfoProto:
    """A typed graph input or output."""
    info = onnx.ValueInfoProto(name=name)
    info.type.CopyFrom(type_proto(dtype, tuple(shape)))
    return info


def as_model(graph: onnx.GraphProto) -> onnx.ModelProto:
    """A model of this one graph, in the operator set that lowering uses."""
    return onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", OPSET)])


def emit(
    op: Operator, rule: Any, place: str, shapes: dict[str, tuple[int, ...]], constants: dict[str, Array]
) -> onnx.ModelProto:
    """One operator's rule as a model; graph inputs are the operator's inputs, outputs its wanted outputs."""
    e = Emitter(place, OPSET)
    emulates = place == "cpu" and rule.native
    e.wanted = [v is not None for v in op.outputs]
    e.output_shapes = [
        None if v is None or v.grad_of is None else tuple(int(str(d)) for d in v.grad_of.shape or ())
        for v in op.outputs
    ]
    e.reserve([v.name for v in op.inputs if v is not None] + [v.name for v in op.outputs if v is not None])
    infos: dict[str, onnx.ValueInfoProto] = {}
    values: list[Value | None] = []
    for v in op.inputs:
        if v is None:
            values.append(None)
            continue
        assert v.dtype is not None
        kind = "float32" if place == "cpu" and v.dtype in HALF else v.dtype
        if v.name in constants:
            e.initializers[v.name] = onnx.numpy_helper.from_array(constants[v.name], v.name)
        else:
            infos[v.name] = tensor_info(v.name, kind, shapes[v.name])
        value = Value(v.name, kind, tuple(shapes[v.name]))
        if emulates and v.dtype in HALF:
            value = Value(v.name, v.dtype, value.shape)
        values.append(value if rule.native else e.f32(value))
    with e.emulation() if emulates else nullcontext():
        results = list(rule.lowering(e, op, *group_inputs(op, values)))
    outputs = []
    for variable, result in zip(op.outputs, results, strict=False):
        if variable is None:
            continue
        assert result is not None, f"{op.type} gave nothing for {variable.name}"
        assert variable.dtype is not None
        if emulates and result.dtype in HALF:
            result = Value(result.name, "float32", result.shape)
        if place == "cpu" and variable.dtype in HALF:
            result = result if rule.exact else e.stored(result, variable.dtype)
        else:
            result = e.cast(result, variable.dtype)
        e.nodes.append(onnx.helper.make_node("Identity", [result.name], [variable.name]))
        shape = variable.grad_of.shape if variable.grad_of is not None else variable.shape
        info = onnx.ValueInfoProto(name=variable.name)
        info.type.CopyFrom(type_proto(result.dtype, shape))
        outputs.append(info)
    graph = onnx.helper.make_graph(e.nodes, op.type, list(infos.values()), outputs, list(e.initializers.values()))
    model = as_model(graph)
    graph = model.graph
    made = [onnx.helper.make_tensor_value_info(v.name, ONNX_TYPES[v.dtype], v.shape) for v in e.foreign]
    graph.value_info.extend(made)
    model.opset_import.extend(onnx.helper.make_opsetid(domain, 1) for domain in sorted(e.domains))
    return _fit(model, place) if place_traits(place).bodies else model


def _fit(model: onnx.ModelProto, place: str) -> onnx.ModelProto:
    """The model with what its place has kernels for, as the lowering leaves it."""
    graph = model.graph
    feeds, fetches = ([_port(info) for info in infos] for infos in (graph.input, graph.output))
    return fitted(Lowered(model, place, feeds=feeds, fetches=fetches)).model


def _port(info: onnx.ValueInfoProto) -> Port:
    tensor = info.type.tensor_type
    return Port(info.name, info.name, NAMES[tensor.elem_type], tuple(d.dim_value for d in tensor.shape.dim))


def typed_feeds(model: onnx.ModelProto, values: dict[str, Array]) -> dict[str, Array]:
    """The values of the model's graph inputs, in the types that it declares."""
    return {
        info.name: values[info.name].astype(onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type))
        for info in model.graph.input
    }


class Reference:
    """A model in ONNX's reference evaluator, to run many times."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self._evaluator = model, ReferenceEvaluator(model, new_ops=CORRECTED)

    def run(self, feeds: dict[str, Array]) -> list[Array]:
        """Every output."""
        return [np.asarray(y) for y in self._evaluator.run(None, feeds)]


def run_reference(model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    """Every output, by ONNX's reference evaluator."""
    return Reference(model).run(feeds)


def run_cpu(model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    """Every output, by onnxruntime on CPU with one thread."""
    return run(model, feeds)
