"""Pure 16 bit: every operator that can run in 16 bit does, and parameters are stored so.

What stays fp32: what follows a cast to float32 of the program's own, up to the next matrix product or other operator
of the white list; operators outside ``fp16_guard`` (where the guard is used), operators without a lowering
to the type, those on ``custom_black_list`` or at ``custom_black_varnames``, Gather on a trainable table,
and foreign operators. The default black list plays no part. Scale, bias and statistics of normalisations
stay fp32. Constants that only mask (-3.4e38 before a softmax) are brought into the range of the type. With
``numeric_guards``, what is known to leave the type stays fp32 too, and vectors are divided by lengths that one operator
computes, with the least number of float16 for a smaller floor.
"""

from __future__ import annotations

from amp_transpiler.errors import PrecisionError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import FORWARD, Operator
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.rollback import unchanged_on_error
from amp_transpiler.ir.types import HALF
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.passes.canonicalize.floored_sums import write_shares
from amp_transpiler.passes.canonicalize.roots import mark_floored
from amp_transpiler.passes.canonicalize.unit_vectors import write_unit_vectors
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.known import training_constraints
from amp_transpiler.passes.numerics.mask_constants import restore_full, saturate_masks
from amp_transpiler.passes.precision.casts import apply
from amp_transpiler.passes.precision.rules import BLACK, Decision, Rules, black_operators, check_program
from amp_transpiler.passes.view.names import label, source
from amp_transpiler.passes.view.typing import programs


@paddle_arguments("cast_model_to_fp16")
def cast_model_to_fp16(
    program: Graph,
    amp_lists: AutoMixedPrecisionLists | None = None,
    use_fp16_guard: bool = True,
    *,
    names_must_exist: bool = True,
    numeric_guards: bool = False,
    like: Graph | None = None,
) -> set[str]:
    """Turn ``program``, nested graphs included, to pure 16 bit in place.

    Every operator gets ``precision`` and ``reason``. Parameters that 16-bit operators read become 16-bit
    variables; their values in a scope are the business of ``cast_parameters_to_fp16``. Feeds, fetches and
    state updates keep their declared element types, as do the user's own casts. Call it on the forward
    program, before ``append_backward``; a second call changes nothing.

    Args:
        program: the program to change.
        amp_lists: the operator lists and the 16-bit type; the defaults at float16 where None.
        use_fp16_guard: only operators marked by ``fp16_guard`` or ``mark_fp16`` (or inside a marked
            control-flow operator) run in 16 bit.
        names_must_exist: refuse ``custom_black_varnames`` that the program does not have.
        numeric_guards: keep fp32 what is known to leave the type, or to sink in it, as ``amp.convert`` does (constants
            that it does not hold, sums of squares, integers held as floats, what ranges do not bound); ``op.reason``
            says why. False takes the lists literally. ``amp.decorate`` asks for it where the program is imported.
        like: a training program that was rewritten already: parameters that both have are stored alike, and with
            ``numeric_guards`` what both have runs alike.

    Returns:
        The names of the variables that enter the 16-bit part: its parameters, and feeds and results of
        fp32 operators that it reads through a cast. Called again, it returns the parameters.

    Raises:
        PrecisionError: the guard is used and no operator is marked; or a constant that a 16-bit operator
            reads lies beyond the range of the type.
        GraphError: a variable has no element type.
        ArgumentError: ``custom_black_varnames`` names a variable that does not exist.
        OrderError: the program has backward operators already.

    Source: PaddlePaddle's ``cast_model_to_fp16`` (2021).
    """
    lists = AutoMixedPrecisionLists() if amp_lists is None else amp_lists
    check_program(program, lists, "cast_model_to_fp16", names_must_exist)
    if use_fp16_guard and not any(op.guard for op in program.walk()):
        raise PrecisionError(
            f"cast_model_to_fp16: no operator of program '{program.name}' is marked to run in {lists.dtype}. Build "
            "them under fp16_guard(), mark the operators of an imported program with program.mark_fp16('encoder/*'), "
            "or pass use_fp16_guard=False to cast the whole program"
        )
    with unchanged_on_error(program):
        masks = saturate_masks(program, lists.dtype)
        if numeric_guards:
            _write_lengths(program, lists, use_fp16_guard)
        for each in programs(program):
            mark_floored(each, lists.dtype)
        constraints = training_constraints(program, lists.dtype, like) if numeric_guards else Constraints()
        pure = _Pure(program, lists, use_fp16_guard, constraints)
        decided = pure.decide_all(pure.decide)
        restore_full(program, lists.dtype, masks, {op: choice.slots for op, choice in decided.items()})
        stored = {} if like is None else {v.name: v.dtype for v in like.variables if v.persistable}
        return apply(program, decided, lists, narrow_parameters=True, stored=stored)


def _write_lengths(program: Graph, lists: AutoMixedPrecisionLists, use_fp16_guard: bool) -> None:
    """Let vectors be divided by their lengths, and shares by their sums, by an operator that squares in fp32 inside, in
    place, where the lists and the guard put all of it in float16: written out, and with a least length of 1e-12, it is
    fp32 tensors between casts."""
    if lists.dtype != "float16":
        return
    kept = {op for op in program.walk() if op.full_type in lists.custom_black_list or (use_fp16_guard and not op.guard)}
    keep = frozenset(kept | black_operators(program, lists).keys())
    for each in list(programs(program)):
        write_unit_vectors(each, frozenset(lists.black_varnames), keep)
        write_shares(each, frozenset(lists.black_varnames), keep)


class _Pure(Rules):
    def __init__(
        self, program: Graph, lists: AutoMixedPrecisionLists, use_fp16_guard: bool, constraints: Constraints
    ) -> None:
        super().__init__(program, lists)
        self.use_fp16_guard, self.constraints = use_fp16_guard, constraints
        #: Operators that go on in fp32 from a cast of the program's own.
        self.widened: set[Operator] = set()

    def decide(self, op: Operator) -> Decision:
        name, lists = op.full_type, self.lists
        if name in lists.custom_black_list:
            return self.full(op, Reason(Kind.CUSTOM_BLACK_LIST))
        table = self.trainable_table(op)
        if table:
            return self.full(op, table)
        if name not in lists.white_list | lists.black_list | lists.gray_list:
            return self.as_it_is(op, Reason(Kind.NO_LIST), colour=BLACK)
        if self.use_fp16_guard and not _marked(op):
            return self.as_it_is(op, Reason(Kind.OUTSIDE_GUARD), colour=BLACK)
        constraint = self.constraints.on(op, lists)
        if constraint:
            return self.constrained(op, constraint)
        cast = self._after_own_cast(op) if name not in lists.white_list else None
        if cast is not None:
            self.widened.add(op)
            return self.full(op, Reason(Kind.FOLLOWS_WIDENING, label(cast)))
        return self.half(op, Reason(Kind.IN_GUARD if self.use_fp16_guard else Kind.PURE))

    def _after_own_cast(self, op: Operator) -> Operator | None:
        """The program's own cast to float32, or what follows one, that makes an operand."""
        for variable in self.data_inputs(op):
            maker = source(variable).producer
            if maker is not None and (maker in self.widened or _is_own_widening(maker)):
                return maker
        return None


def _is_own_widening(op: Operator) -> bool:
    read, made = op.input(0), op.output(0)
    return (
        op.full_type == "Cast"
        and read is not None
        and read.dtype in HALF | {"float32"}
        and made is not None
        and made.dtype == "float32"
        and op.role == FORWARD
    )


def _marked(op: Operator) -> bool:
    """Whether the operator or one that encloses it carries the guard mark."""
    inner: Operator | None = op
    while inner is not None:
        if inner.guard:
            return True
        inner = inner.program.parent
    return False
