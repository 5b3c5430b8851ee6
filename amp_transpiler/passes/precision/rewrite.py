"""Black/white/gray: matrix products and convolutions in 16 bit, everything delicate in fp32.

A white operator runs in 16 bit, a black one in fp32. A gray one follows the operators that made its
floating-point inputs: fp32 where one of them is black, else 16 bit where one is white, else it is left
unchanged. The colour depends on the graph alone, never on the order in which operators were added.
Parameters stay fp32 and are cast where 16-bit operators read them. Constants that only mask (-3.4e38 before a
softmax) are brought into the range of the type. With ``numeric_guards``, what is known to leave it stays fp32 too.
"""

from __future__ import annotations

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.rollback import unchanged_on_error
from amp_transpiler.ir.types import HALF
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.canonicalize.roots import mark_floored
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.known import training_constraints
from amp_transpiler.passes.numerics.mask_constants import restore_full, saturate_masks
from amp_transpiler.passes.precision.casts import apply
from amp_transpiler.passes.precision.rules import BLACK, WHITE, Decision, Rules, check_program
from amp_transpiler.passes.view.names import label, source
from amp_transpiler.passes.view.typing import programs


def rewrite_program(
    program: Graph,
    amp_lists: AutoMixedPrecisionLists | None = None,
    *,
    names_must_exist: bool = True,
    numeric_guards: bool = False,
    like: Graph | None = None,
) -> None:
    """Insert the casts of black/white/gray mixed precision into ``program``, nested graphs included, in place.

    Every operator gets ``precision`` and ``reason``. Feeds, fetches and state updates keep their
    declared element types, as do the user's own casts. The ``fp16_guard`` plays no part. Call it on the
    forward program, before ``append_backward``; a second call changes nothing.

    Args:
        program: the program to change.
        amp_lists: the operator lists and the 16-bit type; the defaults at float16 where None.
        names_must_exist: refuse ``custom_black_varnames`` that the program does not have (a test
            program need not have them all).
        numeric_guards: keep fp32 what is known to leave the type, or to sink in it, as ``amp.convert`` does (constants
            that it does not hold, sums of squares, integers held as floats, what ranges do not bound); ``op.reason``
            says why. False takes the lists literally. ``amp.decorate`` asks for it where the program is imported.
        like: with ``numeric_guards``, a training program that was rewritten already: what both have runs alike.

    Raises:
        GraphError: a variable has no element type.
        ArgumentError: ``custom_black_varnames`` names a variable that does not exist.
        OrderError: the program has backward operators already.
        PrecisionError: a constant that a 16-bit operator reads lies beyond the range of the type.

    Source: the first mixed precision pass of PaddlePaddle (``rewrite_program``, 2021).
    """
    lists = AutoMixedPrecisionLists() if amp_lists is None else amp_lists
    check_program(program, lists, "rewrite_program", names_must_exist)
    with unchanged_on_error(program):
        masks = saturate_masks(program, lists.dtype)
        for each in programs(program):
            mark_floored(each, lists.dtype)
        constraints = training_constraints(program, lists.dtype, like) if numeric_guards else Constraints()
        colours = _Colours(program, lists, constraints)
        decided = colours.decide_all(colours.decide)
        restore_full(program, lists.dtype, masks, {op: choice.slots for op, choice in decided.items()})
        apply(program, decided, lists, narrow_parameters=False)


class _Colours(Rules):
    def __init__(self, program: Graph, lists: AutoMixedPrecisionLists, constraints: Constraints) -> None:
        super().__init__(program, lists)
        self.constraints = constraints

    def decide(self, op: Operator) -> Decision:
        name = op.full_type
        if name in self.lists.black_list:
            return self.full(op, Reason(Kind.BLACK_LIST))
        table = self.trainable_table(op)
        if table:
            return self.full(op, table)
        constraint = self.constraints.on(op, self.lists)
        if constraint:
            return self.constrained(op, constraint)
        if name in self.lists.white_list:
            return self.half(op, Reason(Kind.WHITE_LIST))
        if name in self.lists.gray_list:
            return self._gray(op)
        unlisted = self.as_it_is(op, Reason(Kind.NO_LIST), colour=BLACK)
        if unlisted.precision in HALF:  # its author chose 16 bit, and nobody knows whether it takes fp32
            unlisted.colour = WHITE
        return unlisted

    def _gray(self, op: Operator) -> Decision:
        followed: dict[str, Reason] = {}
        for variable in self.data_inputs(op):
            producer = source(variable).producer
            colour = self.decisions[producer].colour if producer is not None else None
            if producer is not None and colour is not None:
                followed.setdefault(colour, Reason(Kind.FOLLOWS, label(producer)))
        if BLACK in followed:
            return self.full(op, followed[BLACK])
        if WHITE in followed:
            return self.half(op, followed[WHITE])
        return self.as_it_is(op, Reason(Kind.NO_PRODUCER))
