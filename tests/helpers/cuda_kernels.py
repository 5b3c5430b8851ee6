"""Which nodes of a model have no kernel on a place, by the recorded kernel registries, or one that is slow."""

from __future__ import annotations

import functools
import json
from typing import Any

import onnx

from tests.helpers.where import ROOT

_FILE = ROOT / "lists" / "kernels.json"
_SPELLING = {"float32": "float", "float64": "double"}


@functools.cache
def _registry() -> dict[str, Any]:
    return json.loads(_FILE.read_text())


def _covers(versions: str, since: int) -> bool:
    """Whether a kernel for a range of versions serves an operator of this since_version ("12+" means 12 alone)."""
    first, _, last = versions.rstrip("+").partition("-")
    return int(first) == since if versions.endswith("+") or not last else int(first) <= since <= int(last)


def _allows(kernel: dict[str, int], types: dict[str, str]) -> bool:
    sets = _registry()["type_sets"]
    return all(types[parameter] in sets[index] for parameter, index in kernel.items() if parameter in types)


def without_cuda_kernel(model: onnx.ModelProto) -> list[str]:
    """``Type(type parameters)`` of each node that CUDA has no kernel for; all tensors must be typed."""
    return without_kernel(model, "CUDAExecutionProvider")


def with_tables(model: onnx.ModelProto, most: int = 32) -> list[str]:
    """The nodes for which CUDA's kernel makes a table as long as an axis, on the host and in every step."""
    sizes = {tensor.name: onnx.numpy_helper.to_array(tensor).tolist() for tensor in model.graph.initializer}
    found = []
    for node in model.graph.node:
        if node.op_type == "Concat" and len(node.input) > most:
            found.append(node.name)
        elif node.op_type == "Split":
            uneven = len(node.input) > 1 and len(set(sizes[node.input[1]])) > 1
            found += [node.name] if uneven or len(node.output) > most else []
    return found


#: A domain for operators of onnxruntime in ai.onnx.
_RUNTIME = "ai.onnxruntime"


def without_kernel(model: onnx.ModelProto, provider: str) -> list[str]:
    """``Type(type parameters)`` of each node that a provider has no kernel for; all tensors must be typed."""
    from amp_transpiler.ir.types import NAMES

    graph = onnx.shape_inference.infer_shapes(_checkable(model), check_type=True, strict_mode=True).graph
    kinds = {t.name: t.data_type for t in graph.initializer}
    for info in [*graph.input, *graph.output, *graph.value_info]:
        kinds[info.name] = info.type.tensor_type.elem_type
    opset = next(o.version for o in model.opset_import if o.domain == "")
    missing = []
    for node in graph.node:
        if node.domain:
            missing += _missing_foreign(node, kinds, provider)  # of those that ``_checkable`` moved too
            continue
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
        types: dict[str, str] = {}
        for names, formals in ((node.input, schema.inputs), (node.output, schema.outputs)):
            for slot, name in enumerate(names):
                if name:
                    kind = NAMES[kinds[name]]
                    types[formals[min(slot, len(formals) - 1)].type_str] = _SPELLING.get(kind, kind)
        kernels = _registry()["kernels"][provider]["ai.onnx"].get(node.op_type, {})
        if not any(_covers(versions, schema.since_version) and _allows(k, types) for versions, k in kernels.items()):
            missing.append(f"{node.op_type}({', '.join(f'{k}={v}' for k, v in types.items())})")
    return missing


def _checkable(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the operators that onnxruntime has in ai.onnx, and onnx knows nothing of, in a domain of theirs."""
    own = [index for index, n in enumerate(model.graph.node) if not n.domain and not onnx.defs.has(n.op_type)]
    if not own:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.opset_import.add(domain=_RUNTIME, version=1)
    for index in own:
        copy.graph.node[index].domain = _RUNTIME
    return copy


def _missing_foreign(node: onnx.NodeProto, kinds: dict[str, int], provider: str) -> list[str]:
    """The same for an operator that onnx has no schema of; the kernels have one version, and T is what they work on."""
    from amp_transpiler.ir.types import NAMES

    domain = "ai.onnx" if node.domain == _RUNTIME else node.domain
    kernels = _registry()["kernels"][provider].get(domain, {}).get(node.op_type, {})
    kind = NAMES[kinds[node.output[0]]]
    types = {"T": _SPELLING.get(kind, kind)}
    return [] if any(_allows(k, types) for k in kernels.values()) else [f"{node.op_type}({kind})"]
