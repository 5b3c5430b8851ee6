"""What PyTorch's exporter says of a tensor: a parameter, or a buffer, which no optimizer of the model's changes."""

from __future__ import annotations

import re
from functools import lru_cache

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Variable

PARAMETER, BUFFER = "PARAMETER", "BUFFER"
#: Metadata entry of a tensor: its kind; of one that was computed when the model was exported: what of.
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
#: Metadata entry of the graph that has a line for each tensor, with its kind and name.
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_LINE = re.compile(r"^\w+: (\w+) target='([^'\n]*)'", re.MULTILINE)
_NAME = re.compile(r"'([^'\n]*)'")


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
