"""Which float tensors of a model file are weights, and which are only numbers that it computes with.

A file says of an initializer neither that it was trained nor that it is a running statistic, an attention mask or
the frequencies of rotary positions. What reads it does. PyTorch's exporter says which are buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from amp_transpiler.ir.angles import turns
from amp_transpiler.ir.control import carried_slots
from amp_transpiler.ir.copies import original, readers_past_copies
from amp_transpiler.ir.counted import places
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import combined, moves, traits_of
from amp_transpiler.ir.parameter_names import made_up, not_learned
from amp_transpiler.ir.spectra import spectral
from amp_transpiler.ir.stencils import is_stencil
from amp_transpiler.ir.tensors import LOOKED_THROUGH, as_array, tensor_type
from amp_transpiler.ir.torch_marks import BUFFER, COMPUTED, PARAMETER, exported_kind
from amp_transpiler.ir.types import FLOATS

#: What :func:`not_a_weight` says of a running mean or variance: no weight, but it changes in training.
STATISTICS = "statistics"
ONE_NUMBER, A_BUFFER = "one number", "a buffer of the exported model"
PLACES, FREQUENCIES = "places", "the frequencies of an angle"
STENCIL, SCHEDULE = "a stencil", "the table of a schedule"
#: Where an attention mask meets the scores, perhaps combined with another before.
_MASKED = frozenset({"Add", "Sub", "Where", "Min", "Max", "Mul", "Attention", "MultiHeadAttention"})
#: A number that no trained weight has, and every mask has: what a masked score gets is at least this far below 0.
_MASK = -1e4
#: What writes into a tensor of one number, or makes a mask of it.
_FILLED = frozenset({"Scatter", "ScatterElements", "ScatterND", "TensorScatter", "Trilu", "Pad"})
#: Elements that are looked at first; numbers of which hardly any learned ones are in order.
_FIRST, _STEPS = 64, 16
_HOPS = 6


def not_a_weight(variable: Variable) -> str:
    """Why a float tensor with content is no trainable weight: "statistics", "a mask", …; "" where it is one."""
    data = variable.data
    if data is None or isinstance(data, onnx.SparseTensorProto):
        return "without dense content"
    dtype, shape = tensor_type(data)
    if dtype not in FLOATS:
        return f"of type {dtype}"
    kind = exported_kind(variable)
    if not_learned(variable.name) or kind == COMPUTED:
        return "what the model's code makes"
    uses = _uses(variable, _HOPS)
    if math.prod(shape) <= 1 and kind != PARAMETER and not _is_of_layers(uses, shape):
        return ONE_NUMBER
    if uses and all(_is_number(op, slot) for op, slot in uses):
        reader, slot = uses[0]
        statistics = slot in traits_of(reader).statistics
        return STATISTICS if statistics else f"a number of {reader.type}"
    if uses and all(traits_of(op).compares for op, _ in uses):
        return "only compared with"
    if _feeds_angles(uses):
        return FREQUENCIES
    if turns(variable):
        return "cosines and sines of angles"
    if not (_are_rates(uses) or any(_is_of_channels(op, slot) for op, slot in uses)) and places(variable):
        return PLACES
    if _is_canvas(variable, shape):
        return "what others are written into"
    if len(shape) > 1 and uses and all(traits_of(op).elementwise for op, _ in uses) and _is_choice(variable):
        return "a mask of zeros and ones"
    if variable.readers and all(_counts(op, slot) for op, slot in variable.readers) and _is_all(variable, 1.0):
        return "what is counted"
    if kind != PARAMETER and _is_start(variable, shape):
        return "what the examples of a batch begin with"
    if uses and all(_is_of_groups(op) and _is_all(variable, float(slot == 1)) for op, slot in uses):
        return "what leaves a normalisation of groups as it is"
    if uses and all(op.type in _MASKED for op, _ in uses):
        if _is_mask(variable, shape, combined=all(op.type != "Mul" for op, _ in uses)):
            return "a mask"
        joins = all(_joins_scores(op) and not _is_bias(op, slot, shape) for op, slot in uses)
        if len(shape) > 2 and joins and _is_all(variable, 0.0):
            return "a mask of nothing"
    if kind not in (PARAMETER, BUFFER) and uses and all(is_stencil(op, slot, variable) for op, slot in uses):
        return STENCIL
    if kind not in (PARAMETER, BUFFER) and _is_schedule(variable, uses, shape):
        return SCHEDULE
    return spectral(variable, uses) or (A_BUFFER if kind == BUFFER else "")


def _is_of_layers(uses: Sequence[tuple[Operator, int]], shape: tuple[int, ...]) -> bool:
    return bool(uses) and all(_is_layer(op, slot, len(shape)) for op, slot in uses)


def _is_layer(op: Operator, slot: int, axes: int) -> bool:
    """Whether an operator reads its weight or bias in this slot, however small: that of a layer with one output. What
    has no axis is no bias, but may be a slope."""
    traits = traits_of(op)
    if slot in traits.weights:
        return axes > 0 or slot not in traits.biases
    other = op.inputs[1 - slot] if op.type == "Add" and slot < 2 and axes else None
    return other is not None and other.producer is not None and other.producer.type == "MatMul"


def _is_bias(op: Operator, slot: int, shape: tuple[int, ...]) -> bool:
    """Whether it adds one number a channel to what a layer makes with weights that are known."""
    other = op.inputs[1 - slot] if op.type == "Add" and sum(size != 1 for size in shape) <= 1 else None
    made = None if other is None else original(other).producer
    if made is None or not traits_of(made).product:
        return False
    return any(v is not None and v.data is not None and p in traits_of(made).weights for p, v in enumerate(made.inputs))


def _is_of_channels(op: Operator, slot: int) -> bool:
    """Whether an operator reads its bias or scale in this slot, one number a channel."""
    read = op.inputs[slot]
    axes = 0 if read is None else len(read.shape or ())
    return axes == 1 and not traits_of(op).lookup and _is_layer(op, slot, axes)


def _is_number(op: Operator, slot: int) -> bool:
    """Whether the operator reads no weight in this slot, but a statistic, a bound, a size, a fill value."""
    traits = traits_of(op)
    return slot in traits.settings or slot in traits.statistics


def become_constants(program: Graph) -> bool:
    """Let what carries its content be a constant, no parameter: nobody trains the program. Whether there is any."""
    kept = [v for v in program.variables if v.persistable and v.data is not None and v not in program.updates]
    for variable in kept:
        variable.persistable = variable.trainable = False
    return bool(kept)


def _uses(variable: Variable, hops: int) -> list[tuple[Operator, int]]:
    """The operators that compute with the tensor, past those that only move it."""
    found: list[tuple[Operator, int]] = []
    for op, slot in variable.readers:
        if isinstance(slot, str):
            found += [
                use
                for nested in op.attrs.programs
                for inner in nested.variables
                if inner.outer is variable
                for use in _uses(inner, hops)
            ]
        elif hops and _passes_on(op, slot) and (made := [v for v in op.outputs if v is not None]):
            found += [use for out in made if out.dtype == made[0].dtype for use in _uses(out, hops - 1)]
        else:
            found.append((op, slot))
    return found


def _passes_on(op: Operator, slot: int) -> bool:
    """Whether it only moves the tensor. A lookup in a table is what a layer does with its weights, and Where what
    attention does with a mask."""
    if _is_number(op, slot) or op.type in _MASKED:
        return False
    return moves(op, slot) and not traits_of(op).lookup


def _feeds_angles(uses: list[tuple[Operator, int]]) -> bool:
    """Whether all that is made of the tensor is sines and cosines, of itself or of its product with something. A layer
    with a bias has a sine for its activation."""
    if uses and all(traits_of(op).periodic for op, _ in uses):
        return True
    if not uses or any(op.type not in ("Mul", "MatMul", "Einsum", "Gemm", "Div") or _biased(op) for op, _ in uses):
        return False
    made = [use for op, _ in uses for out in op.outputs[:1] if out is not None for use in _uses(out, _HOPS)]
    return bool(made) and all(traits_of(op).periodic for op, _ in made)


def _biased(op: Operator) -> bool:
    """Whether the operator adds a bias to its product."""
    return any(op.input(slot) is not None for slot in traits_of(op).biases)


def _are_rates(uses: list[tuple[Operator, int]]) -> bool:
    """Whether they are multiplied with times and become exponents: a state-space layer begins with 1, 2, 3, … there,
    or with their logarithms, which become exponents first."""
    if uses and all(op.type == "Exp" for op, _ in uses):
        return True
    made = [op.output(0) for op, _ in uses if op.type == "Mul"]
    return len(made) == len(uses) > 0 and any(
        reader.type == "Exp" for v in made if v is not None for reader, _ in v.readers
    )


def _is_canvas(variable: Variable, shape: tuple[int, ...]) -> bool:
    """Whether it is one number everywhere, and only written over, bordered or cut to a triangle: a sum to begin with, a
    mask of ones. No layer does that with its weights, and one that has just been made may be one number everywhere."""
    if math.prod(shape) > LOOKED_THROUGH or not _is_filled(variable.readers, _HOPS):
        return False
    return _is_all(variable, as_array(variable.data).reshape(-1)[0])


def _is_all(variable: Variable, number: float) -> bool:
    """Whether each element is this number."""
    return bool((as_array(variable.data) == number).all())


def _joins_scores(op: Operator) -> bool:
    """Whether it adds to what a softmax takes."""
    return op.type == "Add" and any(reader.type == "Softmax" for reader, _ in readers_past_copies(op.output(0)))


def _is_choice(variable: Variable) -> bool:
    """Whether it holds zeros and ones, of both some, and nothing else."""
    array = as_array(variable.data)
    if array.size > LOOKED_THROUGH or not np.isin(array.reshape(-1)[:_FIRST], (0, 1)).all():
        return False
    ones = array == 1
    return bool(ones.any() and not ones.all() and (ones | (array == 0)).all())


def _is_schedule(variable: Variable, uses: Sequence[tuple[Operator, int]], shape: tuple[int, ...]) -> bool:
    """Whether it is only looked up, one number at a time, and rises or falls all along: the noise of a diffusion's
    steps. What is learned of each of many things has no order."""
    if len(shape) != 1 or not _STEPS <= shape[0] <= LOOKED_THROUGH or not uses:
        return False
    if not all(traits_of(op).lookup and slot == 0 for op, slot in uses):
        return False
    steps = np.diff(np.asarray(as_array(variable.data), np.float32))
    return bool((steps > 0).all() or (steps < 0).all())


def _is_of_groups(op: Operator) -> bool:
    """Whether exporters wrote a group normalisation with it: of channels put together, which it scales afterwards."""
    made = op.output(0)
    if op.type != "InstanceNormalization" or made is None:
        return False
    readers = made.readers
    if len(readers) == 1 and readers[0][0].type == "Reshape" and (made := readers[0][0].output(0)) is not None:
        readers = made.readers
    scaled = [op.input(1 - slot) for op, slot in readers if op.type == "Mul" and isinstance(slot, int)]
    return len(scaled) == len(readers) > 0 and all(v is not None and v.data is not None for v in scaled)


def _is_start(variable: Variable, shape: tuple[int, ...]) -> bool:
    """Whether it is one number for every example of a batch, as a state of zeros is before the first step."""
    uses = variable.readers
    if len(shape) < 2 or math.prod(shape) > LOOKED_THROUGH or not uses:
        return False
    if all(slot in traits_of(op).starts for op, slot in uses):
        for_each = made_up(variable.name) or shape[1] > 1
    else:
        several = shape[0] > 1 and math.prod(shape[1:]) > 1
        ahead = [_begins(op, slot, shape) for op, slot in uses if not _is_filled([(op, slot)], _HOPS)]
        for_each = several and bool(ahead) and (all(ahead) or (made_up(variable.name) and _is_carried(uses, shape)))
    return for_each and _is_all(variable, as_array(variable.data).reshape(-1)[0])


def _is_carried(uses: Sequence[tuple[Operator, int | str]], shape: tuple[int, ...]) -> bool:
    """Whether cells that exporters wrote out read a matrix: beside computed states of its shape, and times weights."""
    beside = [traits_of(op).elementwise and _computed(op).count(shape) > 0 for op, _ in uses]
    return any(beside) and all(
        known or (op.type in ("MatMul", "Gemm") and slot == 0) for known, (op, slot) in zip(beside, uses, strict=True)
    )


def _begins(op: Operator, slot: int | str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape in this slot is that of each example: no layer has its weights there, nor, the
    fewer the axes, anything of that shape."""
    if not isinstance(slot, int):
        return False
    if slot in carried_slots(op):
        return True
    computed = _computed(op)
    if op.type == "Where":
        return slot > 0 and computed[3 - slot] == shape
    if op.type == "MatMul":
        other = computed[1 - slot]
        return len(shape) > 3 and other is not None and other[:-2] == shape[:-2]
    by_place = traits_of(op).elementwise or op.type == "Concat"
    return by_place and len(shape) > 2 and any(v and len(v) == len(shape) and v[0] == shape[0] for v in computed)


def _computed(op: Operator) -> list[tuple[Any, ...] | None]:
    """The shapes of what an operator reads and no constant or parameter holds."""
    return [None if v is None or v.data is not None else v.shape for v in op.inputs]


def _counts(op: Operator, slot: int | str) -> bool:
    """Whether it adds what it reads up, at places: ones, to count them."""
    return slot == 2 and combined(op) == "add"


def _is_filled(uses: Sequence[tuple[Operator, int | str]], hops: int) -> bool:
    """Whether every use, past what moves the tensor, fills it."""
    for op, slot in uses:
        if slot == 0 and op.full_type in _FILLED:
            continue
        made = op.output(0)
        if not hops or not isinstance(slot, int) or made is None or not _passes_on(op, slot):
            return False
        if not _is_filled(made.readers, hops - 1):
            return False
    return bool(uses)


def _is_mask(variable: Variable, shape: tuple[int, ...], combined: bool) -> bool:
    """Whether it holds the number of masked places, and elsewhere nothing, or what exporters ``combined`` with the
    mask before it is added: position biases, say, which then nobody trains either."""
    if len(shape) < 2 or math.prod(shape) > LOOKED_THROUGH:
        return False
    array = np.asarray(as_array(variable.data), np.float32)
    if combined:
        masked = (array <= _MASK / 2) | np.isnan(array)  # a bias was added to it; what cannot be is NaN
        return bool(masked.any()) and bool((masked | (np.abs(array) < -_MASK / 10)).all())
    return bool((array <= _MASK).any()) and bool(((array <= _MASK) | (array == 0)).all())
