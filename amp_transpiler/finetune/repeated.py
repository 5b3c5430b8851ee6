"""What an exporter repeated for every example of a fixed batch, or every place, one parameter for all of them again.

A class token, queries or positions that a model expands to its batch are folded into one tensor when the batch is
fixed: trained so, each place of the batch would get a token of its own.
"""

from __future__ import annotations

import numpy as np
import onnx

from amp_transpiler.finetune.layer_names import uniform
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.parameter_names import made_up
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.torch_marks import exported_from
from amp_transpiler.program import Program


def once_for_all(program: Program) -> list[str]:
    """Let parameters that hold the same for each example of the inputs' fixed batch hold it once, and those of them
    that hold the same all along another axis that an input has, as attention's sinks do for each place, once there too.

    Likewise what an exporter looked up for each place of a text, where all are of one kind.
    """
    batches = {v.shape[0] for v in program.inputs if v.shape and isinstance(v.shape[0], int) and v.shape[0] > 1}
    sizes = {size for v in program.inputs for size in v.shape or () if isinstance(size, int) and size > 1}
    names, places = [], []
    for variable in program.parameters:
        shape = variable.shape
        each = shape and len(shape) > 1 and shape[0] in batches and _per_example(variable)
        if shape and each and (_repeats(variable, 0) or _expanded(variable)):
            more = [axis for axis in range(1, len(shape)) if shape[axis] in sizes and _repeats(variable, axis)]
            _keep_one(variable, [0, *more])
            names.append(variable.name)
        if made_up(variable.name) and len(variable.shape or ()) > 1 and _per_place(variable):
            variable.data = onnx.numpy_helper.from_array(_of_one_place(variable), variable.name)
            variable.shape = tuple(variable.data.dims)
            places.append(variable.name)
    return [
        f"{', '.join(map(repr, found))}: one for all {what}, as before the export"
        for found, what in ((names, "examples"), (places, "places"))
        if found
    ]


def _per_place(variable: Variable) -> bool:
    """Whether it holds the same for each place, and all its readers are sums, which broadcast it."""
    shape, uses = variable.shape or (), variable.readers
    beside = [v.shape for op, _ in uses for v in op.inputs if v is not None and v is not variable and v.data is None]
    added = bool(uses) and all(op.full_type == "Add" for op, _ in uses)
    meets = len(beside) == len(uses) and all(other and other[-2:] == shape[-2:] for other in beside)
    return added and meets and variable not in variable.program.outputs and _repeats(variable, len(shape) - 2)


def _of_one_place(variable: Variable) -> np.ndarray:
    """Its content at the first place, and in the first of texts that are all alike, where what it is added to has as
    many."""
    array, shape = np.asarray(as_array(variable.data)), variable.shape or ()
    others = [v.shape for op, _ in variable.readers for v in op.inputs if v is not None and v is not variable]
    for axis in range(len(shape) - 2) if all(other == shape for other in others) else ():
        array = array[(slice(None),) * axis + (slice(1),)] if _repeats(variable, axis) else array
    return np.ascontiguousarray(array[..., :1, :])


def _per_example(variable: Variable) -> bool:
    """Whether every reader takes it beside the examples, or as examples, and none as the weight of a layer."""
    if variable in variable.program.outputs or not variable.readers:
        return False
    deep = len(variable.shape or ()) > 2  # a matrix may be that of a layer
    return all(
        isinstance(slot, int) and (_beside_examples(op, variable, [0]) or (deep and _are_examples(op, slot)))
        for op, slot in variable.readers
    )


def _beside_examples(op: Operator, variable: Variable, axes: list[int]) -> bool:
    """Whether it meets a computed tensor of as many axes, and of as many examples along these, element by element."""
    if not traits_of(op).elementwise or not (shape := variable.shape):
        return False
    others = [v.shape for v in op.inputs if v is not None and v is not variable and v.data is None]
    return any(
        other and len(other) == len(shape) and all(other[axis] == shape[axis] for axis in axes) for other in others
    )


def _are_examples(op: Operator, slot: int) -> bool:
    """Whether what it reads in this slot is data: a model may have a matrix for each expert, all alike at first."""
    traits = traits_of(op)
    if traits.product:
        return op.type == "MatMul" and slot == 0
    return slot not in traits.weights and not traits.lookup


def _repeats(variable: Variable, axis: int) -> bool:
    """Whether it holds the same all along an axis, and not one number everywhere."""
    array = np.moveaxis(np.asarray(as_array(variable.data)), axis, 0)
    alike = len(array) > 1 and bool((array[1] == array[0]).all()) and bool((array == array[:1]).all())
    return alike and not uniform(variable)


def _expanded(variable: Variable) -> bool:
    """Whether the exporter computed it of one parameter, and it holds one number everywhere, as zeros do."""
    return len(exported_from(variable)) == 1 and uniform(variable)


def _keep_one(variable: Variable, axes: list[int]) -> None:
    """Hold the first along these axes alone; readers that do not broadcast it get it expanded."""
    program, dtype, shape = variable.program, variable.dtype, variable.shape or ()
    rest = [(op, int(slot)) for op, slot in variable.readers if not _beside_examples(op, variable, axes)]
    first = tuple(slice(1) if axis in axes else slice(None) for axis in range(len(shape)))
    array = np.ascontiguousarray(np.asarray(as_array(variable.data))[first])
    variable.data, variable.shape = onnx.numpy_helper.from_array(array, variable.name), array.shape
    if not rest:
        return
    sizes = program.add_constant(f"{variable.name}.sizes", np.array(shape, np.int64))
    repeated = program.fresh_variable(f"{variable.name}.repeated", dtype, shape)
    expand = program.add_operator("Expand", [variable, sizes], [repeated])
    expand.scope, expand.guard = rest[0][0].scope, rest[0][0].guard
    for op, slot in rest:
        op.set_input(slot, repeated)
