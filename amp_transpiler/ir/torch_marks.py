"""What PyTorch's exporters write beside a model: modules of operators, kinds of tensors, what was read before."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable

#: Kinds of tensors; no optimizer of the model's changes a buffer.
PARAMETER, BUFFER = "PARAMETER", "BUFFER"
#: Metadata entry of a tensor: its kind; of one that was computed when the model was exported: what of.
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
#: Metadata entry of the graph that has a line for each tensor, with its kind and name.
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_LINE = re.compile(r"^\w+: (\w+) target='([^'\n]*)'", re.MULTILINE)
_NAME = re.compile(r"'([^'\n]*)'")
#: Metadata entries of an operator: the modules it is in, and the operation it was written of, which names what it read.
_SCOPES = "pkg.torch.onnx.name_scopes"
_NODE = "pkg.torch.onnx.fx_node"
_WEIGHT = re.compile(r"%([pb]_\w+)")


def exported_kind(variable: Variable) -> str:
    """``PARAMETER``, ``BUFFER`` or another kind; "" where the file says none, or the tensor was computed of several."""
    sources = _NAME.findall(variable.metadata.get(_FOLDED, ""))
    if not sources:
        return variable.metadata.get(_KIND, "")
    program: Graph = variable.program
    while program.parent is not None:
        program = program.parent.program
    known = _kinds(program.info.graph_metadata.get(_SIGNATURE, ""))
    found = {known[name] for name in sources if name in known}  # other names are of what was computed on the way
    return found.pop() if len(found) == 1 else ""


@lru_cache(maxsize=8)
def _kinds(signature: str) -> dict[str, str]:
    return {name: kind for kind, name in _LINE.findall(signature)}


def derived_scope(op: Operator) -> str:
    """The scope that an exporter's own marks give an operator: ``encoder/layer.0/attention``; "" where there are none.

    PyTorch's dynamo exporter lists the enclosing modules, outermost first and each with its full dotted name,
    and the node itself last; its TorchScript exporter names a node ``/encoder/layer.0/attention/MatMul``.
    """
    listed = op.metadata.get(_SCOPES)
    if listed is not None:
        return _joined(listed)
    if op.name.startswith("/"):
        return op.name[1:].rpartition("/")[0]
    return ""


def _joined(listed: str) -> str:
    scopes = listed[2:-2].split("', '")
    if repr(scopes) != listed:  # as hardly ever: names with quotes, or what is no list of names
        scopes = _names(listed)
    parts: list[str] = []
    outer = ""
    for scope in scopes[:-1]:
        part = scope.removeprefix(outer + ".") if outer else scope
        if part and scope != outer:
            parts.append(part)
        outer = scope
    return "/".join(parts)


def _names(listed: str) -> list[str]:
    try:
        found = ast.literal_eval(listed)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    return found if isinstance(found, list) and all(isinstance(name, str) for name in found) else []


def torch_weights(op: Operator) -> list[str]:
    """The parameters and buffers that the operation read of which PyTorch's dynamo exporter wrote an operator.

    One that several modules share has one name there; those that the exporter merged, being equal, have their own.
    """
    return _WEIGHT.findall(op.metadata.get(_NODE, ""))
