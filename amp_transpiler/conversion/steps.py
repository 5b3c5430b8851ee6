"""The steps of a conversion: each takes a program and the options of the whole, and works in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from amp_transpiler.conversion.conversion_options import ConversionOptions
from amp_transpiler.conversion.raise_opset import raise_for
from amp_transpiler.errors import ArgumentError, GraphError
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.patterns import matching
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import FLOATS, LIMITS
from amp_transpiler.ir.weights import become_constants
from amp_transpiler.passes.canonicalize.inlining import inline_functions
from amp_transpiler.passes.canonicalize.opset import check_age
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.known import known_constraints
from amp_transpiler.passes.numerics.ranges import Ranges
from amp_transpiler.passes.partition.assign_precision import Assignment, assign
from amp_transpiler.passes.precision.rules import check_variables
from amp_transpiler.passes.view.names import written_name
from amp_transpiler.passes.view.typing import operator_name
from amp_transpiler.program import Program


def prepare(program: Program, options: ConversionOptions) -> list[str]:
    """Take functions and parameters out, and raise the opset to what the type needs; what there is to say of it."""
    check_age(program, oldest=6)  # the first that casts as the casts that are put in
    become_constants(program)  # and are stored in 16 bit
    notes = []
    try:
        inline_functions(program)
    except GraphError as error:
        notes.append(f"the model's functions stay as they are, in float32: {error}")
    notes.append(raise_for(program, options.dtype))
    check_variables(program, options.lists, "convert", options.called("black_varnames"))
    return [note for note in notes if note]


def io_to_narrow(program: Program, options: ConversionOptions) -> frozenset[str]:
    """Names of the inputs and outputs that become 16 bit. ArgumentError where ``keep_io`` names another."""
    every = {v.name: v for v in (*program.inputs, *program.outputs)}
    if isinstance(options.keep_io, bool):
        kept: Iterable[str] = every if options.keep_io else ()
    else:
        kept = options.keep_io
        unknown = sorted(set(kept) - set(every))
        if unknown:
            raise ArgumentError(
                f"{options.called('keep_io')} names '{unknown[0]}', which is no input or output of the model; "
                f"it has {', '.join(map(repr, every))}"
            )
    return frozenset(n for n, v in every.items() if n not in set(kept) and v.dtype == "float32")


def constraints_of(program: Program, options: ConversionOptions) -> Constraints | None:
    """What is known against 16 bit without running the program; None where mode and lists are taken literally."""
    ranges = Ranges(program, options.input_ranges)
    if not options.numeric_guards:
        return Constraints() if options.mode == "auto" else None
    constraints = known_constraints(program, options.dtype, ranges, options.tell)
    if options.mode == "auto" and not options.searches:
        _keep_unproved(program, ranges, constraints, options)
    return constraints


def _keep_unproved(program: Program, ranges: Ranges, constraints: Constraints, options: ConversionOptions) -> None:
    """Without data, an operator of the black list runs in 16 bit only where its range is proved."""
    limit = LIMITS[options.dtype].largest
    for op in program.walk():
        if operator_name(op) not in options.lists.black_list:
            continue
        tensors = [v for v in (*op.inputs, *op.outputs) if v is not None and v.dtype in FLOATS]
        unproved = next((v for v in tensors if not ranges.within(v, limit)), None)
        if unproved is not None:
            constraints.keep(op, Reason(Kind.UNPROVED, written_name(unproved), (options.dtype,)))


def assigned(program: Program, constraints: Constraints | None, options: ConversionOptions) -> Assignment:
    """Decide every operator and insert the casts."""
    options.tell("minimum cut and casts")
    outside, narrow = _outside(program, options), io_to_narrow(program, options)
    return assign(program, options.lists, options.mode, constraints, outside=outside, narrow_io=narrow)


def _outside(program: Program, options: ConversionOptions) -> Callable[[Operator], Reason | None]:
    """Why patterns keep an operator as it is."""
    ops = list(program.walk())
    only = matching(ops, list(options.only), options.called("only")) if options.only else None
    exclude = matching(ops, list(options.exclude), options.called("exclude")) if options.exclude else {}
    both = [op for op in exclude if only and op in only]
    if only is not None and len(both) == len(only):
        raise ArgumentError(
            f"convert: every operator that {list(options.only or ())} selects is excepted by "
            f"{list(options.exclude or ())}; nothing is left to convert"
        )

    def outside(op: Operator) -> Reason | None:
        inner: Operator | None = op
        chosen = only is None
        while inner is not None:
            if inner in exclude:
                return Reason(Kind.EXCEPTED, detail=(repr(exclude[inner]),))
            chosen = chosen or (only is not None and inner in only)
            inner = inner.program.parent
        return None if chosen else Reason(Kind.OUTSIDE_ONLY)

    return outside
