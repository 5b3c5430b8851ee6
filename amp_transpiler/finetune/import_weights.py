"""The weights of an exported model as they were before the export, in place.

Exporters and optimisers keep weights in Constant operators and nested graphs: they become parameters, and what only
looks like one does not. Each function here returns what it did, in words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from typing import Any

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.parameter_names import made_up
from amp_transpiler.ir.tensors import tensor_type
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.ir.weights import ONE_NUMBER, STATISTICS, not_a_weight
from amp_transpiler.ops.fake_quantize import stored_quantised
from amp_transpiler.passes.view.constants import content
from amp_transpiler.program import Program

#: Where a learned scale or temperature is read, or its logarithm.
_SCALED = frozenset({("Div", 1), ("Exp", 0), ("Mul", 0), ("Mul", 1)})
#: A name as models give them.
_OWN_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_CHANNELS = 4  # of an image


def weights_from_constants(program: Program) -> list[str]:
    """Let float weights in Constant operators and nested graphs be persistable variables of the program.

    Where most weights are initializers, Constant operators hold none: such are states, anchors and filters then, which
    the model was not trained by.
    """
    count, initializers = 0, _elements(program.parameters)
    for op in list(program.operators):
        for nested in op.attrs.programs:
            count += _hoist(nested, op)
    loose = [v for v in program.variables if not (v.persistable or v.is_input or v.outer is not None)]
    found = [v for v in loose if _weight_in(v) is not None]
    if _elements(found) > initializers:
        count += sum([_adopt(v) for v in found])
    return [f"{count} weights were constants of operators or nested graphs"] if count else []


def _elements(variables: Iterable[Variable]) -> int:
    return sum(math.prod(size for size in v.shape or () if isinstance(size, int)) for v in variables)


def _weight_in(variable: Variable) -> tuple[Any, str] | None:
    """The content of a constant that is a weight ("") or a running statistic, and which of them."""
    data = content(variable)
    if data is None or tensor_type(data)[0] not in FLOATS:
        return None
    before, variable.data = variable.data, data
    reason = not_a_weight(variable)
    variable.data = before
    return (data, reason) if reason in ("", STATISTICS) else None


def _adopt(variable: Variable) -> bool:
    """Make a constant persistable where it is a weight or a running statistic."""
    found = _weight_in(variable)
    if found is None:
        return False
    data, reason = found
    _keep(variable, data, trainable=not reason)
    return True


def _keep(variable: Variable, data: Any, trainable: bool) -> None:
    """Make a constant with this content persistable."""
    if variable.producer is not None:
        variable.program.remove_operator(variable.producer)
    variable.data = data
    variable.dtype, variable.shape = tensor_type(data)
    variable.persistable, variable.trainable = True, trainable


def _hoist(nested: Graph, op: Operator) -> int:
    """Move weights out of a nested graph, and capture them there; what it gives as it is, is no weight, and would be
    given past it."""
    count, given = 0, set(nested.outputs)
    for inner in nested.operators:
        for deeper in inner.attrs.programs:
            count += _hoist(deeper, inner)
    for variable in list(nested.variables):
        if variable.outer is not None or variable.is_input or variable in given or not _adopt(variable):
            continue
        outer = op.program.add_variable(
            op.program.unique(variable.name),
            variable.dtype,
            variable.shape,
            persistable=True,
            trainable=variable.trainable,
            data=variable.data,
        )
        variable.outer, variable.data = outer, None
        variable.persistable = variable.trainable = False
        op.add_capture(outer)
        count += 1
    return count


def adopt_named(program: Program, names: Collection[str]) -> dict[str, Variable]:
    """Let float constants that a user calls by their very name be parameters, whatever they look like."""
    found = {}
    for variable in program.variables:
        if variable.name in names and not variable.persistable and variable.outer is None:
            data = content(variable)
            if data is not None and tensor_type(data)[0] in FLOATS:
                _keep(variable, data, trainable=True)
                found[variable.name] = variable
    return found


def numbers_left(program: Program) -> list[str]:
    """Say which single numbers with names of the model's own stay constants: a learned scale is one of those."""
    left = [
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
    if not left:
        return []
    named = ", ".join(map(repr, left[:3])) + ", …" * (len(left) > 3)
    return [f"{named}: single numbers, not trained; name in trainable what the model learns of them"]


def integers_left(program: Program) -> list[str]:
    """Say which weights are stored as integers, and so are not trained."""
    return [said for said in [stored_quantised(program)] if said]


def leave_input_scaling(program: Program) -> list[str]:
    """Let the numbers that bring an image's channels to zero mean and unit variance be constants again.

    They are few, and act elementwise on what comes from the inputs before any weight does.
    """
    weighted, fed = {v for v in program.variables if v.persistable}, set(program.inputs)
    left: list[Variable] = []
    for op in program.operators:
        read = [v for v in (*op.inputs, *op.captures) if v is not None]
        weights = [v for v in read if v in weighted]
        made = [v for v in op.outputs if v is not None]
        if len(weights) == 1 and any(v in fed for v in read if v not in weights) and _scales_image(op, weights[0]):
            left += weights
        elif weights:
            weighted.update(made)
        if any(v in fed for v in read):
            fed.update(made)
    for variable in dict.fromkeys(left):
        if all(op.type in ("Add", "Sub", "Mul", "Div") for op, _ in variable.readers):
            variable.persistable = variable.trainable = False
    names = [v.name for v in dict.fromkeys(left) if not v.persistable]
    return [f"{', '.join(map(repr, names))}: scaling of the input, not trained"] if names else []


def _scales_image(op: Operator, variable: Variable) -> bool:
    """Whether the operator combines an image with one number a channel."""
    made = op.output(0)
    return (
        op.type in ("Add", "Sub", "Mul", "Div")
        and not op.domain
        and variable.is_parameter
        and math.prod(d for d in variable.shape or () if isinstance(d, int)) <= _CHANNELS
        and made is not None
        and made.shape is not None
        and len(made.shape) >= 3
    )
