"""What stays as it is in a program that is trained, and what of a run is not repeated: in words, for its user."""

from __future__ import annotations

import re
from collections.abc import Sequence

from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.parameter_names import made_up
from amp_transpiler.ir.torch_marks import PARAMETER, exported_from, is_computed
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.ir.weights import A_BUFFER, FREQUENCIES, ONE_NUMBER, PLACES, SCHEDULE, STENCIL, not_a_weight
from amp_transpiler.ops.fake_quantize import stored_quantised
from amp_transpiler.ops.training.random import MASK_ID
from amp_transpiler.option_checks import listed
from amp_transpiler.program import Program

#: Where a learned scale or temperature is read, or its logarithm.
_SCALED = frozenset({("Div", 1), ("Exp", 0), ("Mul", 0), ("Mul", 1)})
#: A name as models give them; of TensorFlow, not that of a number in its code (x, y, Const), or what was made of those.
_OWN_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*|(?!ConstantFolding/)[\w./-]+/(?!Const)\w{2,}:\d+")
#: What PyTorch's exporter calls the result of an operator, here one that was computed in the export.
_OF_AN_OPERATOR = re.compile(r"[a-z_]+_\d+")


def named_numbers(program: Program) -> list[str]:
    """The single numbers with names of the model's own that are constants: a learned scale is one of those."""
    return [
        v.name
        for v in program.variables
        if v.is_constant
        and v.producer is None
        and v.dtype in FLOATS
        and _OWN_NAME.fullmatch(v.name)
        and not made_up(v.name)
        and any((op.full_type, slot) in _SCALED for op, slot in v.readers)
        and not_a_weight(v) == ONE_NUMBER
    ]


def numbers_left(program: Program, gone: Sequence[str]) -> list[str]:
    """Say which of them stay constants; ``gone``: those that changed nothing, being 1, and are no longer read."""
    left = [*gone, *named_numbers(program)]
    if not left:
        return []
    return [f"{listed(left)}: single numbers, not trained; name in trainable what the model learns of them"]


def counted_left(program: Program) -> list[str]:
    """Say which vectors with names of the model's own stay constants because they begin as numbers that are counted."""
    left = [
        v.name
        for v in program.variables
        if v.is_constant and v.producer is None and v.dtype in FLOATS and _OWN_NAME.fullmatch(v.name)
        if v.readers
        and not (made_up(v.name) or _OF_AN_OPERATOR.fullmatch(v.name))
        and not_a_weight(v) in (PLACES, FREQUENCIES)
    ]
    if not left:
        return []
    said = "counted numbers, as places and frequencies are, not trained; name in trainable what is learned"
    return [f"{listed(left)}: {said}"]


def buffers_left(program: Program) -> list[str]:
    """Say which tensors the exporter calls buffers, where nothing else tells that they are not trained, and which look
    like stencils and schedules."""
    constants = [v for v in program.variables if v.is_constant and v.producer is None and v.dtype in FLOATS]
    reasons = {v.name: not_a_weight(v) for v in constants if v.readers}
    said = {
        A_BUFFER: "buffers of the exported model",
        STENCIL: "rows that add up to nothing, as stencils have",
        SCHEDULE: "tables that rise or fall all along, as schedules do",
    }
    return [
        f"{listed(left)}: {what}, not trained; name in trainable what is learned"
        for kind, what in said.items()
        if (left := [name for name, reason in reasons.items() if reason == kind])
    ]


def computed_of_several(program: Program) -> list[str]:
    """Say which parameters the exporter computed of several, but for recurrent layers, which have them side by side:
    those of a layer that only constants go through, a normalised weight. And which it computed of one that is trained
    beside them, or in another of them: an exponential and the sum that a normalising flow adds up."""
    sources = {v: [name for kind, name in exported_from(v) if kind == PARAMETER] for v in program.parameters}
    said = [
        f"'{v.name}' was computed of {listed(names)} in the export, and is trained in their place: export with "
        "optimize=False to train those"
        for v, names in sources.items()
        if len(names) > 1 and not any(traits_of(op).starts for op, _ in v.readers)
    ]
    made: dict[str, list[Variable]] = {v.name: [v] for v, names in sources.items() if not names}
    for v, names in sources.items():
        if len(names) == 1:
            made.setdefault(names[0], []).append(v)
    for name, parts in made.items():
        computed = [v.name for v in parts if sources[v] and is_computed(v)]
        if computed and len(parts) > 1:
            said.append(
                f"{listed(computed)}: computed of '{name}' in the export, and trained apart from what else is or was "
                "that: export with optimize=False to train it alone"
            )
    return said


def integers_left(program: Program) -> list[str]:
    """Say which weights are stored as integers, and so are not trained."""
    return [said for said in [stored_quantised(program)] if said]


def drawn_by_runtime(program: Program) -> list[str]:
    """Say what draws numbers from onnxruntime."""
    drawn = [
        op for op in program.walk() if traits_of(op).random and op.type != "Dropout" and MASK_ID not in op.metadata
    ]
    return [
        f"'{op.label}' ({op.type}) draws from onnxruntime, which begins anew in every process: runs do not repeat, nor "
        "do resumed ones; feed the numbers where they are to"
        for op in drawn[:1]
    ]
