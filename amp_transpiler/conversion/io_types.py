"""Let inputs and outputs of a converted program be 16 bit themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from amp_transpiler.conversion.conversion_options import OPTIONS, ConversionOptions
from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import CAPTURE, Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.passes.canonicalize.simplify import release
from amp_transpiler.passes.pipeline import Context, Pass, Property
from amp_transpiler.passes.precision.casts import add_cast, capture
from amp_transpiler.passes.view.typing import follow_outer_types


def io_to_narrow(program: Graph, options: ConversionOptions, dtypes: Collection[str] = ("float32",)) -> frozenset[str]:
    """Names of the inputs and outputs of these types that need not keep theirs, and become of the type asked for.

    ArgumentError where ``keep_io`` names another.
    """
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
    return frozenset(n for n, v in every.items() if n not in set(kept) and v.dtype in dtypes)


def narrow_io(program: Graph, names: Iterable[str], dtype: str) -> None:
    """Turn these float32 inputs and outputs of ``program`` to ``dtype``, under their names, in place.

    A cast that the conversion put behind an input or before an output is then not needed; where fp32
    operators use it as well, it turns round.
    """
    wanted = set(names)
    for variable in [v for v in program.inputs if v.name in wanted and v.dtype == "float32"]:
        _narrow_input(program, variable, dtype)
    for variable in dict.fromkeys(v for v in program.outputs if v.name in wanted and v.dtype == "float32"):
        _narrow_output(program, variable, dtype)
    follow_outer_types(program)


def _narrow_input(program: Graph, variable: Variable, dtype: str) -> None:
    cast = _cast_of(variable, dtype)
    variable.dtype = dtype
    full = None
    if any(op is not cast for op, _ in variable.readers) or variable in program.outputs:
        full = program.fresh_variable(f"{variable.name}.cast_fp32", "float32", variable.shape)
        program.replace_uses(variable, full, lambda op: op is not cast)
        add_cast(variable, full)
    if cast is not None:
        narrow = cast.outputs[0]
        assert narrow is not None
        program.remove_operator(cast)
        program.replace_uses(narrow, variable)
        program.remove_variable(narrow)
    if full is not None:
        _read_narrow(full, variable)
        if not full.readers:
            _remove_cast(full)


def _narrow_output(program: Graph, variable: Variable, dtype: str) -> None:
    """The output's name goes to the 16-bit tensor; fp32 readers go on with the fp32 one."""
    producer, name = variable.producer, variable.name
    if producer is None:
        return  # an input that is an output at once: it was narrowed as an input, or is fp32 for its readers
    program.rename_variable(variable, program.unique(f"{name}.fp32"))
    narrow = producer.inputs[0] if producer.inserted else None
    if narrow is not None and narrow.dtype == dtype and narrow not in program.outputs and narrow.producer is not None:
        program.rename_variable(narrow, name)
        _read_narrow(variable, narrow)
    else:
        existing = _cast_of(variable, dtype)
        narrow = existing.outputs[0] if existing is not None else None
        if narrow is None:
            narrow = program.add_variable(name, dtype, variable.shape)
            add_cast(variable, narrow)
        else:
            program.rename_variable(narrow, name)
    program.outputs[:] = [narrow if output is variable else output for output in program.outputs]
    if producer.inserted and not variable.readers:
        _remove_cast(variable)


def _read_narrow(full: Variable, narrow: Variable) -> None:
    """Let what reads ``full``, which widens ``narrow``, and takes any type read ``narrow``, in nested graphs too: a
    cache of keys is not widened for its shape."""
    for op, slot in list(full.readers):
        if slot != CAPTURE:
            if traits_of(op).shape_only or (op.full_type == "Cast" and not op.inserted):
                op.set_input(int(slot), narrow)
            continue
        for nested in op.attrs.programs:
            for inner in [v for v in nested.variables if v.outer is full]:
                inside = next((v for v in nested.variables if v.outer is narrow), None)
                _read_narrow(inner, inside or capture(nested, narrow))
            release(op, nested)


def _remove_cast(made: Variable) -> None:
    """Take out a cast that nothing reads, with what it makes."""
    assert made.producer is not None
    made.program.remove_operator(made.producer)
    made.program.remove_variable(made)


def _cast_of(variable: Variable, dtype: str) -> Operator | None:
    for op, _ in variable.readers:
        made = op.output(0)
        if op.inserted and made is not None and made.dtype == dtype:
            return op
    return None


class NarrowIo(Pass):
    """float32 inputs and outputs that need not keep their type become 16 bit, under their names."""

    name = "narrow-io"
    needs = (Property.PRECISION, OPTIONS)

    def run(self, graph: Graph, context: Context) -> bool:
        names = io_to_narrow(graph, context[OPTIONS])
        narrow_io(graph, names, context[OPTIONS].dtype)
        return bool(names)
