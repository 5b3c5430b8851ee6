"""Names of parameters: those that patterns find them by, and those that exporters make up."""

from __future__ import annotations

import re

from amp_transpiler.ir.nodes import FORWARD, Operator, Variable
from amp_transpiler.ir.opdef import traits_of

_MADE_UP = re.compile(
    r"(onnx::\w+_\d+|val_\d+|_?to_copy_\d*|[tv]?\d+|(const|constant|expand|tensor|initializer)[_.]?\d*|Constant_\d+"
    r"(_output_0)?|.*/Constant(_\d+)?(_output_0)?|zeros|ones|full|embedding|linear)(_\d+)?",
    re.IGNORECASE,
)


def made_up(name: str) -> bool:
    """Whether an exporter made the name up: what it named after its model has another."""
    return _MADE_UP.fullmatch(name) is not None


#: What PyTorch's exporter calls tensors that the model's code makes, and the vectors of a spectral norm's iteration.
_NOT_LEARNED = re.compile(r"lifted_tensor_\d+|(.*\.)?parametrizations\.\w+\.\d+\._[uv]")


def not_learned(name: str) -> bool:
    """Whether a name says that no training changes what has it."""
    return _NOT_LEARNED.fullmatch(name) is not None


def names_of_parameter(variable: Variable) -> list[str]:
    """What a parameter is found by: its name, and names and scopes of the forward operators that read it."""
    readers = _forward_readers(variable)
    for op in list(readers):
        out = op.output(0)
        # What hands the whole parameter on; what takes parts of it, or joins it to others, is an operator of the layer.
        if out is not None and (op.type in ("Transpose", "Cast") or traits_of(op).view):
            readers += _forward_readers(out)
    return [variable.name, *(name for op in readers for name in (op.name, op.scope) if name)]


def _forward_readers(variable: Variable) -> list[Operator]:
    return [op for op, _ in variable.readers if op.role == FORWARD]
