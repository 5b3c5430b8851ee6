"""Facts of operators, as passes ask them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from amp_transpiler.ir.intervals import Interval
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.reasons import Kind


@dataclass(frozen=True)
class Traits:
    """What an operator does with the elements of its operands, as passes ask it. Slots are those of inputs.

    Where elements go:

    ``moves``: the slots of the inputs whose elements the outputs hold, moved, repeated or left out, beside zeros; None
    for every slot, () where it computes. A cast moves too, though it rounds.
    ``view``: the output is the first input in another shape, element by element: a runtime moves nothing.
    ``lookup``: it takes entries of its first input, a table, that its second input names.
    ``part``: it reads of its first input no more than it writes.
    ``bits``: it reads or makes the bits of its elements, not their values.
    ``shape_only``: it reads of its inputs the shape alone, neither elements nor their type.
    ``type_only``: of these inputs it reads the type alone.
    ``exact``: its outputs hold only values of its inputs, so nothing is rounded after it on CPU.
    ``selects``: data decide how many elements it gives, no more than it reads, with a number for each axis at most.
    ``quantises``: the small integers that it makes stand for the numbers that it reads.
    ``random``: it draws from the runtime's own generators, other numbers each time that it runs.
    ``meets``: several ranks exchange something in it.

    What is computed of them:

    ``elementwise``: each element of the outputs depends on the elements in its place of the inputs, which broadcast
    (the slots in ``settings`` are single numbers).
    ``over``: each element depends on all along some axes of the first input: those of ``axes`` (an attribute or the
    second input; all where there is none), that of ``axis`` (the same, one), or the ``spatial`` ones behind batch and
    channels, perhaps in windows. "" where no one word says it.
    ``reduces``: it makes one number of all along these axes: their "sum" (one that grows with their number), "mean",
    "max", "min", "squares" (their sum), "norm" (its root), "powers", "product", "log-sum" or "index". "" where each
    element of the first input has one of its own.
    ``centres``: it computes with how far elements of its first input are from a number of their own: their mean, the
    largest.
    ``product``: it sums products of elements of two inputs, as matrix units compute them.
    ``weight_axes``: of a product: the axes of the weights in slot 1 over which it sums, by the operator and their rank.
    ``adds``: it adds elements, compares them or takes the larger or smaller ones: beside another, a number that
    vanishes is nothing.
    ``compares``: its output says how elements compare, or of what sort they are.
    ``ranks``: the output that says which elements come first in their order; None where none does.
    ``periodic``: its input is an angle.
    ``combines``: the attribute that says how elements that come to one place are combined; by "none" they are not.
    ``coarse``: the attribute that lets a processor's kernel round its operands; at 1 it takes them as they are.

    Ranges:

    ``bounded``: the interval in which its outputs lie whatever its inputs are.
    ``carries_large``: a number in the first input beyond the range of a format makes one beyond it in the output, other
    inputs being ordinary.
    ``shortens``: its output grows ever more slowly with its input, so that what is of any size makes ordinary numbers.
    ``ignores``: "low" where very low numbers of the first input count for nothing beside ordinary ones, "high" where
    very high ones do.
    ``lower``, ``upper``: the slots of numbers below which, above which, its output does not lie; None for every slot.
    ``poles``: numbers in the first input at which its output, or its slope, is infinite.
    ``nears``: it comes near the ends of ``bounded``, and reaches them by rounding alone.
    ``overflows``: why its results may leave float16 where its inputs do not; ``overflows_inside``: why numbers that it
    only computes with may.

    What slots hold:

    ``weights``: what a layer learns or keeps.
    ``statistics``: running means and variances, which change in training though nothing learns them.
    ``settings``: bounds, sizes, ratios, fill values, weights of classes: numbers that configure it.
    ``starts``: states that each example of a batch begins with.
    ``biases``: what is added to a sum of products, or to the variance of a norm.
    ``places``: where in an image it reads, in pixels or in parts of the image.
    """

    moves: tuple[int, ...] | None = ()
    view: bool = False
    lookup: bool = False
    part: bool = False
    bits: bool = False
    shape_only: bool = False
    type_only: tuple[int, ...] = ()
    exact: bool = False
    selects: bool = False
    quantises: bool = False
    random: bool = False
    meets: bool = False
    elementwise: bool = False
    over: str = ""
    reduces: str = ""
    centres: bool = False
    product: bool = False
    weight_axes: Callable[[Operator, int], tuple[int, ...]] | None = None
    adds: bool = False
    compares: bool = False
    ranks: int | None = None
    periodic: bool = False
    combines: str = ""
    coarse: str = ""
    bounded: Interval | None = None
    carries_large: bool = False
    shortens: bool = False
    ignores: str = ""
    lower: tuple[int, ...] | None = ()
    upper: tuple[int, ...] | None = ()
    poles: tuple[float, ...] = ()
    nears: bool = False
    overflows: Kind | None = None
    overflows_inside: Kind | None = None
    weights: tuple[int, ...] = ()
    statistics: tuple[int, ...] = ()
    settings: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    biases: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
