"""The weights of an exported model as they were before the export, in place.

Exporters and optimisers keep weights in Constant operators and nested graphs, merge tensors of equal content, copy a
tied one transposed, and write weights transposed under names of their own. Each function here undoes one of these,
and returns what it did, in words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import onnx

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.metadata import inserted
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.tensors import as_array, tensor_type
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.ir.weights import STATISTICS, not_a_weight
from amp_transpiler.passes.view.constants import content
from amp_transpiler.program import Program

#: Names that exporters make up.
_ANONYMOUS = re.compile(
    r"(onnx::\w+_\d+|val_\d+|_?to_copy_\d*|[tv]?\d+|(const|constant|expand|tensor|initializer)[_.]?\d*|Constant_\d+"
    r"(_output_0)?|.*/Constant(_\d+)?(_output_0)?)",
    re.IGNORECASE,
)
#: What the slots of weights are called, by operator.
_SLOTS = {
    "LSTM": (None, "W", "R", "B"),
    "GRU": (None, "W", "R", "B"),
    "RNN": (None, "W", "R", "B"),
    "Gather": ("weight",),
    "PRelu": (None, "weight"),
    "MatMul": ("weight", "weight"),
    "Add": ("bias", "bias"),
    "Mul": ("weight", "weight"),
    "Concat": ("token",) * 8,
}
_MODULE = (None, "weight", "bias")  # Conv, Gemm and the normalisations
_ELEMENTS = 64  # of a tensor: enough to tell most apart before they are compared
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


def retie(program: Program) -> list[str]:
    """Let a parameter that is a copy of another, perhaps transposed, be that other one.

    Only for matrices: a language model's output layer and its embedding, say. Both have the same content, which no
    training leaves by chance. Layers that were copied when the model was made, as PyTorch's transformers are, have it
    until they are trained: what belongs to modules whose names differ in numbers alone stays apart.
    """
    notes: list[str] = []
    kept: dict[bytes, list[Variable]] = {}
    for variable in sorted(program.parameters, key=lambda v: bool(_ANONYMOUS.fullmatch(v.name))):
        if variable.data is None or variable.shape is None or len(variable.shape) != 2 or uniform(variable):
            continue
        array = np.asarray(as_array(variable.data))
        for other in kept.get(_digest(array), []):
            held = np.asarray(as_array(other.data))
            transposed = held.shape != array.shape or not np.array_equal(held, array)
            if transposed and not (held.shape == array.shape[::-1] and np.array_equal(held.T, array)):
                continue
            if len(_siblings((_owner_of(variable), _owner_of(other)))) > 1:
                continue
            _share(variable, other, transposed)
            notes.append(f"'{variable.name}' is '{other.name}'{' transposed' * transposed}: tied again")
            break
        else:
            kept.setdefault(_digest(array), []).append(variable)
    return notes


def shared_by_layers(program: Program) -> list[str]:
    """Say which parameters layers read whose names differ in numbers alone: exporters merge those that are equal."""
    shared = [v.name for v in program.parameters if len(_siblings(_module(op) for op, _ in v.readers)) > 1]
    if not shared:
        return []
    named = ", ".join(f"'{name}'" for name in shared[:3]) + ", …" * (len(shared) > 3)
    return [
        f"read by several layers, as the model has it, and trained as one parameter: {named} ({len(shared)} in all). "
        "Where that is not meant, export weights that differ"
    ]


def _owner_of(variable: Variable) -> str:
    """The module that a parameter belongs to: that of its name; where exporters made that up, that of its reader."""
    if not _ANONYMOUS.fullmatch(variable.name):
        return variable.name.rpartition(".")[0]
    return next((_module(op) for op, _ in variable.readers), "")


def _siblings(modules: Iterable[str]) -> list[str]:
    """Modules, each once, if their names differ in numbers alone."""
    names = list(dict.fromkeys(modules))
    return names if len({re.sub(r"\d+", "#", name) for name in names}) == 1 else []


def _digest(array: np.ndarray) -> bytes:
    """Equal for a matrix and its transpose."""
    small = np.concatenate([np.diag(array)[:_ELEMENTS], [array.size]]).astype(np.float64)
    return small.tobytes()


def _share(variable: Variable, other: Variable, transposed: bool) -> None:
    program, source = variable.program, other
    if transposed:
        source = program.add_variable(program.unique(f"{other.name}.T"), variable.dtype, variable.shape)
        program.add_operator("Transpose", [other], [source], attrs={"perm": [1, 0]})
    program.replace_uses(variable, source)
    program.outputs = [source if v is variable else v for v in program.outputs]
    program.remove_variable(variable)


def uniform(variable: Variable) -> bool:
    """Whether all elements are alike: what a parameter is before it was trained."""
    array = np.asarray(as_array(variable.data)).reshape(-1)
    return bool(array.size) and bool((array[:_ELEMENTS] == array[0]).all()) and bool((array == array[0]).all())


def untie(program: Program, keep: Collection[Variable] = ()) -> list[str]:
    """Give each reader of a vector that exporters merged its own copy.

    Those are vectors of which all elements are alike: biases, scales and running statistics that were not trained
    yet. Matrices, and vectors with a content of their own, stay tied, and so does what ``keep`` holds. The vector
    itself stays with the reader that it is named after.
    """
    copies, sources = 0, 0
    for variable in [v for v in program.variables if v.persistable and v.data is not None]:
        _without_identities(variable)
        uses = variable.readers
        if len(uses) < 2 or variable in keep or not _vector(variable) or not uniform(variable):
            continue
        if any(isinstance(slot, str) for _, slot in uses):
            continue  # a nested graph reads it: one parameter for all its iterations
        sources += 1
        owner = _owner(variable)
        for op, slot in uses:
            if (op, slot) == owner:
                continue
            first = next(v.name for v in op.outputs if v is not None)
            name = _name(op, int(slot)) or f"{variable.name}.{first}"
            new = program.add_variable(
                program.unique(name),
                variable.dtype,
                variable.shape,
                persistable=True,
                trainable=variable.trainable,
                data=variable.data,
            )
            op.set_input(int(slot), new)
            copies += 1
    if not copies:
        return []
    return [f"{sources} untrained vectors that the exporter merged got {copies} copies, one for each layer"]


def _owner(variable: Variable) -> tuple[Operator, int | str]:
    """The reader, and its slot, that a variable is named after; else the first of the module in its name, or of all."""
    uses, module = variable.readers, variable.name.rpartition(".")[0]
    named = [use for use in uses if _name(use[0], int(use[1])) == variable.name]
    inside = [use for use in uses if module and _module(use[0]) == module]
    return (named or inside or uses)[0]


def _without_identities(variable: Variable) -> None:
    """Let readers behind an Identity, which exporters write where they merge, read the variable itself."""
    program = variable.program
    for op, slot in variable.readers:
        out = op.output(0)
        if slot == 0 and op.type == "Identity" and not op.domain and out is not None and out not in program.outputs:
            program.replace_uses(out, variable)
            program.remove_operator(op)
            program.remove_variable(out)


def _vector(variable: Variable) -> bool:
    return sum(size != 1 for size in variable.shape or ()) <= 1


def restore_names(program: Program) -> list[str]:
    """Name anonymous parameters after the module that reads them, and give linear layers their own layout back.

    ``onnx::MatMul_308``, read by ``/encoder/layer.0/query/MatMul``, becomes ``encoder.layer.0.query.weight`` of shape
    [out, in] behind a Transpose, as PyTorch has it, so that checkpoints and patterns fit.
    """
    renamed, turned = 0, 0
    for variable in program.parameters:
        if not _ANONYMOUS.fullmatch(variable.name) or not variable.readers:
            continue
        op, slot = variable.readers[0]
        name = _name(op, int(slot)) if not isinstance(slot, str) else ""
        if not name or program.has_var(name):
            continue
        program.rename_variable(variable, name)
        renamed += 1
        if op.type == "MatMul" and slot == 1 and len(variable.readers) == 1 and len(variable.shape or ()) == 2:
            _transpose(variable, op)
            turned += 1
    if not renamed:
        return []
    return [f"{renamed} anonymous parameters are named after their layers, {turned} of them transposed back"]


def _transpose(variable: Variable, op: Operator) -> None:
    program, shape = variable.program, variable.shape or ()
    folded = program.add_variable(program.unique(f"{variable.name}.T"), variable.dtype, shape)
    variable.data = onnx.numpy_helper.from_array(np.ascontiguousarray(as_array(variable.data).T), variable.name)
    variable.shape = shape[::-1]
    turn = program.add_operator("Transpose", [variable], [folded], attrs={"perm": [1, 0]})
    turn.scope, turn.guard = op.scope, op.guard
    op.set_input(1, folded)


def _name(op: Operator, slot: int) -> str:
    """``<module>.<parameter>`` for what an operator reads in a slot; "" where the operator has no module."""
    module, slots = _module(op), _SLOTS.get(op.type, _MODULE)
    return f"{module}.{slots[slot]}" if module and slot < len(slots) and slots[slot] else ""


def _module(op: Operator) -> str:
    """The path of the module that an operator belongs to; "" where it has none."""
    if inserted(op):
        return ""
    parts: list[str] = []
    for part in op.scope.split("/"):
        if parts and part.startswith(parts[-1] + "."):
            parts.pop()  # 'layer1/layer1.0' is module layer1.0
        parts.append(part)
    return ".".join(parts)
