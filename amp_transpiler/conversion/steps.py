"""The steps of a conversion: each takes a program and the options of the whole, and works in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from amp_transpiler.conversion.conversion_options import OPTIONS, ConversionOptions
from amp_transpiler.conversion.dense_constants import keep_sparse
from amp_transpiler.conversion.io_types import io_to_narrow
from amp_transpiler.conversion.store_weights import store_weights
from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.patterns import matching
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import FLOATS, LIMITS
from amp_transpiler.ir.weights import become_constants
from amp_transpiler.lists import place_traits
from amp_transpiler.passes.lowering.cost_estimate import amount
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.inner_roundings import ROUNDED, keep_rounded
from amp_transpiler.passes.numerics.known import known_constraints
from amp_transpiler.passes.numerics.mixed_norms import write_mixed_norms
from amp_transpiler.passes.numerics.one_type_norms import keep_norms, store_norms
from amp_transpiler.passes.numerics.ranges import Ranges
from amp_transpiler.passes.partition.assign_precision import Assignment, assign
from amp_transpiler.passes.pipeline import Context, Pass, Property, Value
from amp_transpiler.passes.precision.rules import check_variables
from amp_transpiler.passes.view.counted_shapes import NOMINAL
from amp_transpiler.passes.view.names import written_name

#: What is known against 16 bit, None where mode and lists are taken literally.
CONSTRAINTS: Value[Constraints | None] = Value("constraints", Constraints)
#: What the minimum cut decided.
ASSIGNMENT: Value[Assignment] = Value("assignment", Assignment)


def constraints_of(program: Graph, options: ConversionOptions) -> Constraints | None:
    """What is known against 16 bit without running the program; None where mode and lists are taken literally."""
    ranges = Ranges(program, options.input_ranges)
    if not options.numeric_guards:
        return Constraints() if options.mode == "auto" else None
    constraints = known_constraints(program, options.dtype, ranges, options.tell)
    keep_sparse(program, constraints)
    keep_rounded(program, options.kind, options.dtype, constraints)
    keep_norms(program, options.dtype, constraints)
    if options.mode == "auto" and not options.searches:
        _keep_unproved(program, ranges, constraints, options)
    return constraints


def _keep_unproved(program: Graph, ranges: Ranges, constraints: Constraints, options: ConversionOptions) -> None:
    """Without data, an operator of the black list runs in 16 bit only where its range is proved."""
    limit = LIMITS[options.dtype].largest
    for op in program.walk():
        if op.full_type not in options.lists.black_list:
            continue
        tensors = [v for v in (*op.inputs, *op.outputs) if v is not None and v.dtype in FLOATS]
        unproved = next((v for v in tensors if not ranges.within(v, limit)), None)
        if unproved is not None:
            constraints.keep(op, Reason(Kind.UNPROVED, written_name(unproved), (options.dtype,)))


def assigned(program: Graph, constraints: Constraints | None, options: ConversionOptions) -> Assignment:
    """Decide every operator and insert the casts."""
    options.tell("minimum cut and casts")
    outside, narrow = _outside(program, options), io_to_narrow(program, options)
    made = assign(program, options.lists, options.mode, constraints, outside=outside, narrow_io=narrow)
    store_weights(program, constraints, options.dtype)
    store_norms(program)
    write_mixed_norms(program)
    return made


def _outside(program: Graph, options: ConversionOptions) -> Callable[[Operator], Reason | None] | None:
    """Why patterns keep an operator as it is; None where there are no patterns."""
    if not options.only and not options.exclude:
        return None
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


def check_names(program: Graph, options: ConversionOptions) -> None:
    """ArgumentError where ``black_varnames`` names what the program does not have."""
    check_variables(program, options.lists, "convert", options.called("black_varnames"))


def remarks(program: Graph, options: ConversionOptions, assignment: Assignment) -> list[str]:
    """What there is to say of an assignment: what cannot run in 16 bit, what that costs, and how much is proved."""
    title, dtype = place_traits(options.kind).title, options.dtype
    types = dict[str, Counter[str]]()
    for op in program.walk():
        because = op.why and _because(op.why, title, dtype, program.opset())
        if because:
            types.setdefault(because, Counter())[op.full_type] += 1
    found = []
    for because, counts in sorted(types.items()):
        found.append(f"{', '.join(f'{name} ({n})' for name, n in sorted(counts.items()))} stay float32: {because}")
    summed = sum(op.why is not None and op.why.kind in ROUNDED for op in program.walk())
    if summed:
        found.append(
            f"{title} adds up and computes in {options.dtype} at a loss: {summed} operators are float32 for it, "
            f"with weights stored in {options.dtype}"
        )
    if assignment.saved < 0:
        found.append(
            f"casts around what stays float32 cost more than {dtype} saves: about {amount(-assignment.saved)} are "
            f"moved beyond those of float32 throughout (open sizes of inputs taken as {NOMINAL}); other lists, or "
            f"{options.said('mode', 'pure')}, move fewer"
        )
    if options.mode == "auto" and options.calibration is None:
        proved, tensors = Ranges(program, options.input_ranges).proved(options.dtype)
        found.append(
            f"static ranges prove that {proved} of {tensors} tensors fit {options.dtype}; of the others only "
            "calibration data would tell"
        )
    return found


def _because(why: Reason, title: str, dtype: str, opset: int) -> str:
    """Why nothing runs an operator in 16 bit, whatever the mode, without its name; "" where something does."""
    if why.kind in (Kind.NO_KERNEL, Kind.NO_KERNEL_THERE):
        return f"{title} has no {dtype} kernel for them"
    if why.kind in (Kind.NOT_TAKEN, Kind.NO_CAST):
        return f"they do not take {dtype} at opset {opset}"
    if why.kind is Kind.FAULT:
        where, what = why.detail
        return f"the {dtype} kernel of {title} is faulty for such operands ({where}): {what}"
    return ""


class FreezeWeights(Pass):
    """Weights and statistics that carry their content become constants: nobody trains the program."""

    name = "freeze-weights"
    guarantees = (Property.CONSTANTS,)

    def run(self, graph: Graph, context: Context) -> bool:
        return become_constants(graph)


class Constrain(Pass):
    """What is known against 16 bit is collected: constants, ranges, squares, integers as floats, places in images."""

    name = "constraints"
    needs = (Property.TYPED, Property.CONSTANTS, OPTIONS)
    guarantees = (CONSTRAINTS,)
    reads = True

    def run(self, graph: Graph, context: Context) -> bool:
        check_names(graph, context[OPTIONS])
        context[CONSTRAINTS] = constraints_of(graph, context[OPTIONS])
        return False


class Partition(Pass):
    """Operators that nothing binds run where the whole moves the fewest bytes, and casts are inserted."""

    name = "partition"
    needs = (Property.TYPED, Property.CONSTANTS, OPTIONS, CONSTRAINTS)
    guarantees = (Property.PRECISION, ASSIGNMENT)

    def run(self, graph: Graph, context: Context) -> None:
        context[ASSIGNMENT] = assigned(graph, context[CONSTRAINTS], context[OPTIONS])
        context.notes += remarks(graph, context[OPTIONS], context[ASSIGNMENT])
