"""What PyTorch's exporters write beside a model: modules of operators, kinds of tensors, what was read before."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable

#: Kinds of tensors; no optimizer of the model's changes a buffer, nor what was computed of none of its tensors, nor
#: those that its code made, which the exporter has a word of its own for.
PARAMETER, BUFFER, COMPUTED, _MADE = "PARAMETER", "BUFFER", "COMPUTED", "CONSTANT_TENSOR"
#: Metadata entry of a tensor: its kind; of one that was computed when the model was exported: what of.
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
#: Operations that leave an exponential, its sign aside, and what the exporter calls the axes that they take.
_EXPONENTIAL = frozenset({"exp", "neg", "unsqueeze", "_to_copy", "val"})
#: Operations that only move numbers, or whose name does not tell what they do.
_MOVES = frozenset(
    {
        "_to_copy",
        "_unsafe_view",
        "alias",
        "cat",
        "chunk",
        "clone",
        "contiguous",
        "detach",
        "expand",
        "flatten",
        "getitem",
    }
    | {"index_select", "narrow", "numpy_T", "permute", "repeat", "reshape", "select", "slice", "split", "unflatten"}
    | {"split_with_sizes", "squeeze", "stack", "t", "transpose", "unbind", "unsqueeze", "val", "view"}
)
#: What the exporter calls the result of an operation.
_OPERATION = re.compile(r"[a-z_]+(_\d+)?", re.IGNORECASE)
#: Metadata entry of the graph that has a line for each tensor, with its kind and name.
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_LINE = re.compile(r"^(\w+): (\w+) target='([^'\n]*)'", re.MULTILINE)
_NAME = re.compile(r"'([^'\n]*)'")
#: Metadata entries of an operator: the modules it is in, and the operation it was written of, which names what it read.
_SCOPES = "pkg.torch.onnx.name_scopes"
_NODE = "pkg.torch.onnx.fx_node"
_WEIGHT = re.compile(r"%([pb]_\w+)")
#: An operation that may add a bias, and what it reads before any list: the weight, then the bias, or that first.
_LAYER = re.compile(r"torch\.ops\.aten\.(addmm|linear|conv\w*)\.\w+\]\(args = \(([^()\[\]]*)")


def exported_kind(variable: Variable) -> str:
    """``PARAMETER``, ``BUFFER``, ``COMPUTED`` or another kind; "" where the file says none, or it was computed of some
    of several kinds, and a parameter is among them."""
    if _FOLDED not in variable.metadata:
        kind = variable.metadata.get(_KIND, "")
        return COMPUTED if kind == _MADE else kind
    kinds = {kind for kind, _ in exported_from(variable)}
    if kinds <= {_MADE} and _signature(variable.program):
        return COMPUTED
    if len(kinds) > 1 and PARAMETER not in kinds:
        return BUFFER
    return kinds.pop() if len(kinds) == 1 else ""


def exported_from(variable: Variable) -> list[tuple[str, str]]:
    """The tensors of the exported model that a tensor was computed of in the export: kinds and names."""
    known = {name: kind for kind, name in _signature(variable.program).values()}
    sources = _NAME.findall(variable.metadata.get(_FOLDED, ""))  # other names are of what was computed on the way
    return [(known[name], name) for name in sources if name in known]


def is_computed(variable: Variable) -> bool:
    """Whether more than moving was done with what a tensor was computed of in the export."""
    done = {*_NAME.findall(variable.metadata.get(_FOLDED, "")), variable.name} - {
        name for _, name in exported_from(variable)
    }
    return any(_OPERATION.fullmatch(name) and _numbered(name) not in _MOVES for name in done)


def _numbered(name: str) -> str:
    """The operation of which the exporter called a result so."""
    return re.sub(r"_\d+$", "", name)


def logarithm_of(variable: Variable) -> str:
    """The name of the parameter whose exponential a tensor is, perhaps negated and with axes of 1, as the exporter
    computed it; "" where that is not said."""
    done = [*_NAME.findall(variable.metadata.get(_FOLDED, "")), variable.name]
    of = exported_from(variable)
    kinds = [_numbered(name) for name in done if name not in {name for _, name in of}]
    one = len(of) == 1 and of[0][0] == PARAMETER and kinds.count("exp") == 1
    return of[0][1] if one and _EXPONENTIAL.issuperset(kinds) else ""


def _signature(program: Graph) -> dict[str, tuple[str, str]]:
    """The kind and name of each tensor of the exported model, by what operations call it."""
    while program.parent is not None:
        program = program.parent.program
    return _tensors(program.info.graph_metadata.get(_SIGNATURE, ""))


@lru_cache(maxsize=8)
def _tensors(signature: str) -> dict[str, tuple[str, str]]:
    return {called: (kind, name) for called, kind, name in _LINE.findall(signature)}


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


def torch_name(called: str, program: Graph) -> str:
    """The name in the exported model of what :func:`torch_weights` calls so; "" where the file has no list of them."""
    return _signature(program).get(called, ("", ""))[1]


def torch_layer(op: Operator) -> tuple[str, str]:
    """The names of the weight and of the bias that an operation read of which PyTorch's dynamo exporter wrote an
    operator: that of a linear layer or a convolution, with underscores for dots where the file has no list of names; ""
    each where it read none, or that is not said."""
    found = _LAYER.search(op.metadata.get(_NODE, ""))
    if found is None:
        return "", ""
    read = [*found[2].split(", "), ""]
    pair = (read[2], read[0]) if found[1] == "addmm" else (read[1], read[2])
    weight, bias = (torch_name(name[1:], op.program) or name[3:] if name.startswith("%p_") else "" for name in pair)
    return weight, bias


def torch_bias_left_out(op: Operator) -> str:
    """The name of the bias that an operator lacks, being zero, of those that PyTorch's dynamo exporter writes; "" where
    that is not said, or another operator is to add it."""
    mark = op.metadata.get(_NODE)
    readers = [reader for out in op.outputs if out is not None for reader, _ in out.readers]
    return "" if any(reader.metadata.get(_NODE) == mark for reader in readers) else torch_layer(op)[1]
