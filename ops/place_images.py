"""What moves, spreads and merges pixels in other operators, where a place has no kernel of it in 16 bit.

Sizes of images may be open: then those of what is written are computed from them. :mod:`.place_gaps` says what is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.decompose import Parts
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ops.common import Maybe

#: Behind every end, as Slice takes it.
_END = 2**63 - 1
#: More numbers than any kernel of a convolution has.
_WEIGHTS = 1 << 30


def depth_to_space(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    """Blocks of channels, moved behind rows and columns."""
    d.rank(x)
    block, depth = d.whole("blocksize", 1), d.size(x, 1)
    if depth is None:
        raise d.error(f"the channels of '{x.name}' are open")
    return [_spread(d, x, depth // block**2, [block, block], op.attrs.get("mode", "DCR") == "DCR")]


def _spread(d: Parts, x: Variable, depth: int, blocks: list[int], blocks_first: bool) -> Variable:
    """Numbers that lie in the channels of a pixel, ``depth`` of each place in its block, as pixels side by side."""
    rank = len(blocks)
    within, order = ([*blocks, depth], [0, rank + 1]) if blocks_first else ([depth, *blocks], [0, 1])
    for axis in range(rank):
        order += [rank + 2 + axis, axis + (1 if blocks_first else 2)]
    apart = d.Reshape(x, _joined(d, [0, *within], _sizes(d, x)))
    return _enlarged(d, d.Transpose(apart, perm=order), x, blocks)


def _sizes(d: Parts, x: Variable) -> Variable | list[int]:
    """The sizes of images besides those of batch and channels: numbers, or a variable where they are open."""
    known = static(x.shape[2:] if x.shape else None)
    return d.Slice(d.Shape(x), [2], [d.rank(x)], [0]) if known is None else list(known)


def _joined(d: Parts, first: list[int], sizes: Variable | list[int]) -> Variable | list[int]:
    """A shape of these sizes behind the first ones."""
    return [*first, *sizes] if isinstance(sizes, list) else d.Concat(d.const(np.array(first)), sizes, axis=0)


def _enlarged(d: Parts, y: Variable, x: Variable, factors: list[int]) -> Variable:
    """(N, C, H, f, W, g) of images (N, C, H, W) as (N, C, H f, W g)."""
    sizes = _sizes(d, x)
    if isinstance(sizes, list):
        return d.Reshape(y, [0, 0, *(size * factor for size, factor in zip(sizes, factors, strict=True))])
    return d.Reshape(y, _joined(d, [0, 0], d.Mul(sizes, factors)))


def space_to_depth(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    """Blocks of pixels, moved before the channels."""
    block = [d.whole("blocksize", 1)] * (d.rank(x) - 2)
    sizes, rank = _sizes(d, x), len(block)
    if isinstance(sizes, list):
        counts: Variable | list[int] = [size // n for size, n in zip(sizes, block, strict=True)]
        within: Variable | list[int] = [n for pair in zip(counts, block, strict=True) for n in pair]
    else:
        counts = d.Div(sizes, block)
        pairs = d.Concat(d.Unsqueeze(counts, [1]), d.const(np.array(block)[:, None]), axis=1)
        within = d.Reshape(pairs, [-1])
    apart = d.Reshape(x, _joined(d, [0, 0], within))
    order = [0, *(3 + 2 * axis for axis in range(rank)), 1, *(2 + 2 * axis for axis in range(rank))]
    return [d.Reshape(d.Transpose(apart, perm=order), _joined(d, [0, -1], counts))]


def nearest_resize(
    d: Parts, op: Operator, x: Variable, roi: Maybe = None, scales: Maybe = None, sizes: Maybe = None
) -> list[Variable]:
    """Rows and columns repeated a whole number of times."""
    if d.rank(x) < 3:
        raise d.error("its input has no axes besides batch and channels")
    mode, rounding = op.attrs.get("coordinate_transformation_mode", "half_pixel"), op.attrs.get("nearest_mode")
    middle = mode == "half_pixel" and rounding not in ("ceil", "floor")
    repeats = middle or (mode == "asymmetric" and rounding == "floor")
    if op.attrs.get("mode", "nearest") != "nearest" or not repeats:
        raise d.error("it does not repeat rows and columns")
    factors = _repeats(d, op, x, scales)
    rank = len(factors)
    apart = d.Unsqueeze(x, [3 + 2 * axis for axis in range(rank)])
    repeated = d.Expand(apart, [1, 1, *(size for factor in factors for size in (1, factor))])
    return [_enlarged(d, repeated, x, factors)]


def _repeats(d: Parts, op: Operator, x: Variable, scales: Maybe) -> list[int]:
    """How often each row and column is repeated, by the sizes or, where those are open, by the scales."""
    made, known = op.output(0), constant_array(scales)
    source, target = (static(v.shape[1:] if v is not None and v.shape else None) for v in (x, made))
    if source is not None and target is not None:
        factors = [to / size if size else 0.0 for to, size in zip(target, source, strict=True)]
    elif known is not None and known.size == d.rank(x) and known[0] == 1 and not op.attrs.get("axes"):
        factors = [float(factor) for factor in known[1:]]
    else:
        raise d.error(f"its scales or the sizes of '{x.name}' are open")
    if factors[0] != 1 or any(factor < 1 or factor % 1 for factor in factors):
        raise d.error(f"it makes images of {' x '.join(f'{factor:g}' for factor in factors)} times the size")
    return [int(factor) for factor in factors[1:]]


def pad(
    d: Parts, op: Operator, x: Variable, pads: Maybe = None, value: Maybe = None, axes: Maybe = None
) -> list[Variable]:
    """What stands around is joined to each axis; zeros around images that only convolutions read are theirs."""
    around, mode = _around(d, x, pads, axes), op.attrs.get("mode", "constant")
    if mode == "constant" and _is_zero(value) and _handed_on(op, around):
        return [x]
    for axis, counts in around.items():
        before, behind = (_beside(d, x, mode, axis, count, last, value) for last, count in enumerate(counts))
        x = d.Concat(*before, x, *behind, axis=axis)
    return [x]


def _around(d: Parts, x: Variable, pads: Maybe, axes: Maybe) -> dict[int, tuple[int, int]]:
    """How much stands before and behind each axis that has any."""
    count, rank = constant_array(pads), d.rank(x)
    padded = np.arange(rank) if axes is None else constant_array(axes)
    if count is None or padded is None or (count < 0).any():
        raise d.error("how much it adds is computed, or less than nothing")
    pairs = zip(padded, count.reshape(2, -1).T, strict=True)
    return {int(axis) % rank: (int(before), int(behind)) for axis, (before, behind) in pairs if before or behind}


def _is_zero(value: Maybe) -> bool:
    held = np.zeros(1) if value is None else constant_array(value)
    return held is not None and not held.any()


def _handed_on(op: Operator, around: dict[int, tuple[int, int]]) -> bool:
    """Whether the convolutions that read its result now pad by themselves: nothing else reads it."""
    made = op.outputs[0]
    readers = [] if made is None or made in op.program.outputs else made.readers
    padding = [_own_padding(reader) if slot == 0 else None for reader, slot in readers]
    if not readers or None in padding or min(around, default=2) < 2:
        return False
    for (reader, _), own in zip(readers, padding, strict=True):
        assert own is not None
        rank = len(own) // 2
        for axis, counts in around.items():
            for last, count in enumerate(counts):
                own[axis - 2 + last * rank] += count
        reader.attrs["pads"] = own
    return True


def _own_padding(op: Operator) -> list[int] | None:
    """How much a convolution pads; None of one that pads by sizes, and of other operators."""
    kernel = op.inputs[1] if op.full_type == "Conv" else None
    if kernel is None or kernel.shape is None or str(op.attrs.get("auto_pad", "NOTSET")) != "NOTSET":
        return None
    return [int(n) for n in op.attrs.get("pads") or [0] * 2 * (len(kernel.shape) - 2)]


def _beside(d: Parts, x: Variable, mode: str, axis: int, count: int, last: int, value: Maybe) -> list[Variable]:
    """What stands before an axis of x, or behind its ``last`` element."""
    if not count:
        return []
    if mode == "edge":
        return [d.Slice(x, [-1], [_END], [axis]) if last else d.Slice(x, [0], [1], [axis])] * count
    if mode == "reflect":
        start, end = (-2, -2 - count) if last else (count, 0)
        return [d.Slice(x, [start], [end], [axis], [-1])]
    if mode == "wrap":
        return [d.Slice(x, [0], [count], [axis]) if last else d.Slice(x, [-count], [_END], [axis])]
    sizes: list[int | str | None] = list(x.shape or ())
    sizes[axis] = count
    return [d.Expand(d.const(0.0, x.dtype) if value is None else value, _shape(d, x, sizes))]


def _shape(d: Parts, x: Variable, sizes: list[int | str | None]) -> Variable | list[int]:
    """A shape of these sizes, those that are open as of x."""
    known = static(tuple(sizes))
    if known is not None:
        return list(known)
    shape = d.Shape(x)
    parts = [
        d.const(np.array([size])) if isinstance(size, int) else d.Slice(shape, [axis], [axis + 1], [0])
        for axis, size in enumerate(sizes)
    ]
    return d.Concat(*parts, axis=0)


def conv_transpose(d: Parts, op: Operator, x: Variable, w: Variable, bias: Maybe = None) -> list[Variable]:
    """A convolution that computes all pixels of a block in the channels of one, which are spread then: the same sums.

    Behind strides ``s`` the element ``q s + r`` is the sum over ``j`` of ``x[q - j] w[j s + r]``. GraphError where that
    takes more weights: the kernel is no multiple of the strides, or has gaps.
    """
    held, added = (constant_array(v, _WEIGHTS) for v in (w, bias))
    if held is None or (added is None and bias is not None):
        raise d.error("its weights are computed")
    if len(w.readers) != 1:
        raise d.error("others read its weights")
    kernel = list(held.shape[2:])
    rank, group, take = len(kernel), d.whole("group", 1), partial(_numbers, op, len(kernel))
    strides, dilations, more = take("strides", 1), take("dilations", 1), take("output_padding", 0)
    if any(size % stride for size, stride in zip(kernel, strides, strict=True)) or any(n != 1 for n in dilations):
        raise d.error("its kernel is no multiple of its strides, or has gaps")
    if op.attrs.get("output_shape") or str(op.attrs.get("auto_pad", "NOTSET")) != "NOTSET":
        raise d.error("its padding goes by sizes")
    pads = [int(n) for n in op.attrs.get("pads") or [0] * 2 * rank]
    begin, end = pads[:rank], [after - beyond for after, beyond in zip(pads[rank:], more, strict=True)]
    if min(*begin, *end) < 0:
        raise d.error("it makes more than its windows reach")
    outputs, steps = held.shape[1], [size // stride for size, stride in zip(kernel, strides, strict=True)]
    y = d.Conv(
        x,
        d.const(_by_place(held, group, strides, steps)),
        None if added is None else d.const(np.repeat(added, np.prod(strides))),
        kernel_shape=steps,
        group=group,
        pads=[n - 1 for n in steps] * 2,
    )
    y = _spread(d, y, group * outputs, strides, blocks_first=False)
    if any((*begin, *end)):
        ends = [-after if after else _END for after in end]
        y = d.Slice(y, begin, d.const(np.array(ends)), list(range(2, 2 + rank)))
    return [y]


def _numbers(op: Operator, rank: int, name: str, usual: int) -> list[int]:
    return [int(n) for n in op.attrs.get(name) or [usual] * rank]


def _by_place(weights: np.ndarray, group: int, strides: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """Weights (inputs, outputs of a group, *kernel) as those of a convolution that makes, for each output, the pixels
    of a block: (outputs, block) x inputs of a group x steps, turned around."""
    inputs, outputs = weights.shape[:2]
    rank = len(steps)
    sizes = [size for pair in zip(steps, strides, strict=True) for size in pair]
    split = weights.reshape(group, inputs // group, outputs, *sizes)
    places, taps = [4 + 2 * axis for axis in range(rank)], [3 + 2 * axis for axis in range(rank)]
    ordered = split.transpose(0, 2, *places, 1, *taps)
    made = ordered.reshape(-1, inputs // group, *steps)
    return np.ascontiguousarray(np.flip(made, tuple(range(2, 2 + rank))))
