"""Carry out the decisions of a precision pass: element types, and casts where they meet.

One cast per tensor and element type in the whole program, named ``<variable>.cast_fp16`` (``cast_bf16``,
``cast_fp32``), in the graph that owns the tensor: nested graphs capture the result, so that a loop does
not repeat it. A constant is converted here and now instead; it becomes two only where both precisions
read it, and where one of these gathers rows of a large one, they are cast. No cast is stacked on a widening one:
16 bit to fp32 and back is the tensor itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import onnx

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import FORWARD, Operator, Variable, origin
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import FLOATS, HALF, ONNX_TYPES, SHORT, numpy_dtype
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.precision.rules import Decision, constant_reason
from amp_transpiler.passes.precision.table_rows import move_rows, shares_table
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.names import source
from amp_transpiler.passes.view.typing import follow_outer_types, kept_slots, programs, signature_of

Decisions = dict[Operator, Decision]
#: What may stand between a constant and its readers: what makes it, and casts that were put in.
_CONSTANT = frozenset({"Constant", "Cast"})


def apply(
    program: Graph,
    decisions: Decisions,
    lists: AutoMixedPrecisionLists,
    *,
    narrow_parameters: bool,
    fetchable: bool = True,
    magnitudes: Mapping[Variable, float] | None = None,
    given: Mapping[Variable, Operator] | None = None,
    stored: Mapping[str, str | None] | None = None,
) -> set[str]:
    """Give operators and variables the decided types and insert the casts.

    ``narrow_parameters``: a persistable variable that 16-bit operators read becomes 16 bit itself, unless
    the schema or the norm rule keeps it fp32; otherwise it is cast at its readers. The names that enter the 16-bit part
    are returned then, else none. ``fetchable``: what nothing
    reads may be fetched, and keeps its type; otherwise only the outputs that the program names are asked for.
    ``magnitudes``: the largest numbers of constants, of those that are known and hold finite ones alone.
    ``given``: constants that nested graphs of these operators give on in 16 bit.
    ``stored``: element types, by name, of parameters that another program has in the same scope: they become what they
    are there, however this one reads them.
    """
    dtype = lists.dtype
    uses = _uses(program, decisions, dtype, constants_alone=not narrow_parameters)
    narrow = {v: use for v, use in uses.items() if use.narrows(narrow_parameters, lists, stored or {})}
    rounded = {
        v: use.reader
        for v, use in uses.items()
        if use.reader is not None
        and v.dtype == "float32"
        and (use.constant or (v in narrow and constants.has_content(v)))
    }
    given = given or {}
    contents = constants.all_converted({**rounded, **given}, dtype, magnitudes or {})  # first of all, for it can fail
    move_rows(decisions, narrow, dtype)
    data = {v: use for v, use in uses.items() if use.half and not use.constant}
    entering = {v.name for v, use in data.items() if use.enters(dtype, decisions)}
    for variable in (*narrow, *given):
        if variable in contents:
            constants.replace(variable, contents[variable])
        retype(variable, dtype)
        if variable.producer is not None:
            _constant_decision(decisions[variable.producer], dtype)
    inserter = _Inserter(program, contents)
    protected = _protected(program, lists)
    if fetchable:
        every = ((op, slot, v) for op in decisions for slot, v in enumerate(op.outputs) if v is not None)
        protected |= {v for op, slot, v in every if _only_fetched(op, slot, v)}
    _retype(program, decisions, inserter, protected)
    return entering


def _retype(program: Graph, decisions: Decisions, inserter: _Inserter, protected: set[Variable]) -> None:
    """Put precision, reason and types on operators and what they write, then cast what they read."""
    for op, decision in decisions.items():
        op.precision, op.why = decision.precision, decision.why
        _write_outputs(op, decision, inserter, protected)
    follow_outer_types(program)
    for op, decision in decisions.items():
        for slot, wanted in enumerate(decision.slots.inputs):
            read = op.inputs[slot]
            if read is not None and wanted is not None and read.dtype != wanted:
                op.set_input(slot, inserter.cast(read, wanted))
    inserter.finish(protected)


class _Use:
    """How the whole program, nested graphs included, reads one floating-point variable."""

    __slots__ = ("constant", "fetched", "half", "other", "pinned", "reader", "variable")

    def __init__(self, variable: Variable) -> None:
        self.variable = variable
        self.constant = constants.is_constant(variable)
        self.reader: Operator | None = None  # the first that reads it in 16 bit
        self.half = False  # and as data
        self.pinned = False  # it is scale, bias or statistics of a normalisation
        self.other = False  # an operator reads it in its declared type
        self.fetched = False

    def narrows(self, parameters: bool, lists: AutoMixedPrecisionLists, stored: Mapping[str, str | None]) -> bool:
        """Whether the variable itself becomes 16 bit."""
        v = self.variable
        if v.dtype != "float32" or self.fetched or v.is_input or v.name in lists.black_varnames:
            return False
        if self.constant:
            return self.reader is not None and not self.other
        if not (parameters and v.persistable and v.producer is None):
            return False
        return stored[v.name] in HALF if v.name in stored else self.half and not self.pinned

    def enters(self, dtype: str, decisions: Decisions) -> bool:
        """Whether data enter the 16-bit part from outside in it."""
        v = self.variable
        if v.producer is None:
            return v.dtype == "float32" or (v.persistable and v.dtype == dtype)
        return v.dtype == decisions[v.producer].slots.outputs[v.producer_slot] == "float32"


def _uses(program: Graph, decisions: Decisions, dtype: str, constants_alone: bool) -> dict[Variable, _Use]:
    """The floating-point variables that operators read, or at least the constants among them, each with what is read of
    it, in the order of reading."""
    uses: dict[Variable, _Use] = {}
    for op, decision in decisions.items():
        for slot, variable in enumerate(op.inputs):
            if variable is None or variable.dtype not in FLOATS:
                continue
            maker = variable.producer
            if constants_alone and maker is not None and maker.type not in _CONSTANT and variable.data is None:
                continue
            kept, wanted = kept_slots(op)[0], decision.slots.inputs[slot]
            found = source(variable) if wanted in HALF else origin(variable)
            use = uses.get(found)
            if use is None:
                use = uses[found] = _Use(found)
            if wanted == dtype and use.reader is None:
                use.reader = op
            if kept and slot in kept:
                use.pinned = True
                use.other |= wanted != dtype
            elif wanted == dtype:
                use.half = True
            elif slot == 0 and shares_table(op, decision):
                pass  # it reads what the others have
            else:
                use.other |= wanted is not None or op.full_type in ("Cast", "CastLike")
    for each in programs(program):
        for held in (*each.outputs, *each.updates, *each.updates.values()):
            if origin(held) in uses:
                uses[origin(held)].fetched = True
    return uses


def _constant_decision(decision: Decision, dtype: str) -> None:
    """Let a Constant make its number in 16 bit."""
    decision.slots.outputs[0], decision.precision = dtype, dtype
    decision.why = constant_reason(dtype)


def _protected(program: Graph, lists: AutoMixedPrecisionLists) -> set[Variable]:
    """Variables that keep their declared type: outputs, state updates, ``custom_black_varnames``."""
    found: set[Variable] = set()
    for each in programs(program):
        found.update(each.outputs, each.updates, each.updates.values())
        if lists.black_varnames:
            found.update(v for v in each.variables if v.name in lists.black_varnames)
    return found


def _write_outputs(op: Operator, decision: Decision, inserter: _Inserter, protected: set[Variable]) -> None:
    """Retype what the operator writes; where the variable has to keep its type, write another one and cast it."""
    casts = op.full_type == "Cast"
    for slot, (variable, made) in enumerate(zip(op.outputs, decision.slots.outputs, strict=True)):
        if variable is None or made is None:
            continue
        if casts and op.attrs.get("to") != cast_target(op.program, made):
            op.attrs["to"] = cast_target(op.program, made)
        if variable.dtype == made:
            continue
        if variable in protected or slot in kept_slots(op)[1]:
            inserter.cast_output(op, slot, variable, made)
        else:
            retype(variable, made)


def retype(variable: Variable, dtype: str) -> None:
    """Let a variable be held in another element type; a fetch still gives it in the declared one."""
    declared = variable.declared or variable.dtype
    variable.declared, variable.dtype = None if declared == dtype else declared, dtype


def _only_fetched(op: Operator, slot: int, variable: Variable) -> bool:
    """Whether nothing but a fetch can be the use of the variable: nothing reads it, and it was not optional."""
    if op.program.parent is not None or variable.readers:
        return False
    sig = signature_of(op)
    return sig is None or slot not in sig.optional_outputs


class _Inserter:
    """Inserts casts and remembers them."""

    def __init__(self, program: Graph, contents: Mapping[Variable, Any]) -> None:
        self.program = program
        self.contents = contents
        self.made: dict[tuple[Variable, str], Variable] = {}
        #: Variables that a reader was taken from.
        self.left: dict[Variable, None] = {}
        every = list(programs(program))
        nested = [each for each in every if each.parent is not None]
        self.stand_ins = {(each, v.outer): v for each in nested for v in each.variables if v.outer is not None}
        #: Results of nested graphs that are variables of an enclosing one, with their declared type.
        self.results = [(each, i, v.dtype) for each in every for i, v in enumerate(each.outputs) if v.outer is not None]

    def cast(self, variable: Variable, dtype: str) -> Variable:
        """The variable in another element type, in its program."""
        self.left[variable] = None
        if (variable, dtype) not in self.made:
            self.made[variable, dtype] = self._found(variable, dtype) or self._new(variable, dtype)
        return self.made[variable, dtype]

    def _found(self, variable: Variable, dtype: str) -> Variable | None:
        """What needs no new cast: the source of a widening, a cast of the program's own, a capture of an outer one."""
        if variable.outer is not None:
            return self._stand_in(variable.program, self.cast(variable.outer, dtype))
        producer = variable.producer
        if producer is not None and producer.full_type == "Cast" and variable.dtype == "float32" and dtype in HALF:
            narrow = producer.inputs[0]
            if narrow is not None and narrow.dtype == dtype:
                return narrow
        existing = [
            op.outputs[0]
            for op, slot in variable.readers
            if slot == 0 and op.full_type == "Cast" and op.outputs[0] is not None and op.outputs[0].dtype == dtype
        ]
        return min((v for v in existing if v is not None), key=lambda v: v.name, default=None)

    def _new(self, variable: Variable, dtype: str) -> Variable:
        name = self._name(f"{variable.name}.cast_{SHORT[dtype]}")
        if constants.is_constant(variable):
            array = self.contents[variable] if dtype in HALF else constants.converted(variable, dtype, "")
            return variable.program.add_variable(name, dtype, variable.shape, data=array)
        new = variable.program.add_variable(name, dtype, variable.shape)
        new.stop_gradient = variable.stop_gradient
        if not _fill_instead(variable, new):
            add_cast(variable, new)
        return new

    def cast_output(self, op: Operator, slot: int, variable: Variable, made: str) -> None:
        """Let ``op`` write a new variable of type ``made``, and cast that into ``variable``."""
        raw = op.program.add_variable(self._name(f"{variable.name}.{SHORT[made]}"), made, variable.shape)
        raw.stop_gradient = variable.stop_gradient
        op.set_output(slot, raw)
        if variable.dtype in HALF:  # a reader of the fp32 value keeps it
            op.program.replace_uses(variable, raw)
        # runtimes call an operator without a name after its output: that is none of another operator
        add_cast(raw, variable, _unused(f"{variable.name}_cast", self.labels) if variable.name in self.labels else "")

    def _stand_in(self, program: Graph, outer: Variable) -> Variable:
        """The variable of a nested program that stands for ``outer`` of the enclosing one."""
        if (program, outer) not in self.stand_ins:
            self.stand_ins[program, outer] = capture(program, outer)
        return self.stand_ins[program, outer]

    @cached_property
    def names(self) -> set[str]:
        """The names of variables of all graphs."""
        return {name for each in programs(self.program) for name in each.names}

    @cached_property
    def labels(self) -> set[str]:
        """The names of operators of all graphs."""
        return {op.name for op in self.program.walk()}

    def _name(self, name: str) -> str:
        """``name``, numbered where any graph of the program has it: nested graphs may not shadow names."""
        return _unused(name, self.names)

    def finish(self, protected: set[Variable]) -> None:
        """Give nested graphs' captured results their types back, and take out what is read no more."""
        for program, slot, dtype in self.results:
            variable = program.outputs[slot]
            if variable.dtype != dtype and dtype is not None:
                program.outputs[slot] = self.cast(variable, dtype)
                protected.add(program.outputs[slot])
                protected.discard(variable)
        while self.left:
            variable, _ = self.left.popitem()
            if not variable.program.has_var(variable.name) or variable.readers or variable in protected:
                continue
            if variable.outer is not None:
                self._drop_stand_in(variable, variable.outer)
            elif _bypassed(variable):
                self._drop_maker(variable)

    def _drop_stand_in(self, variable: Variable, outer: Variable) -> None:
        program = variable.program
        program.remove_variable(variable)
        del self.stand_ins[program, outer]
        parent = program.parent
        if parent is not None and not any((each, outer) in self.stand_ins for each in parent.attrs.programs):
            parent.remove_capture(outer)
            self.left[outer] = None

    def _drop_maker(self, variable: Variable) -> None:
        maker = variable.producer
        assert maker is not None
        self.left.update((v, None) for v in maker.inputs if v is not None)
        variable.program.remove_operator(maker)
        variable.program.remove_variable(variable)


def _unused(name: str, taken: set[str]) -> str:
    """``name``, numbered where it is taken; it is from now on."""
    unique, number = name, 0
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    taken.add(unique)
    return unique


def _bypassed(variable: Variable) -> bool:
    """Whether it is a widening cast or a fill that nothing reads, in a program that names its outputs: it cannot be
    fetched."""
    producer = variable.producer
    return bool(variable.program.outputs) and producer is not None and producer.full_type in ("Cast", "ConstantOfShape")


def _fill_instead(source: Variable, target: Variable) -> bool:
    """Write another fill of what one writes, in the type of ``target``; whether ``source`` is one."""
    producer, element = source.producer, constants.fill(source.producer)
    sig = None if producer is None else signature_of(producer)
    if producer is None or element is None or sig is None or target.dtype not in sig.admits[sig.outputs[0]]:
        return False
    value = onnx.numpy_helper.from_array(element.astype(numpy_dtype(str(target.dtype))))
    fill = source.program.add_operator(producer.type, producer.inputs, [target], attrs={"value": value}, like=producer)
    fill.precision, fill.why = target.dtype, constant_reason(str(target.dtype))
    return True


def capture(program: Graph, outer: Variable) -> Variable:
    """A new variable of a nested program that stands for ``outer`` of the enclosing one."""
    name = program.unique(outer.name) if program.has_var(outer.name) else outer.name
    new = program.add_variable(name, outer.dtype, outer.shape)
    new.outer, new.stop_gradient = outer, outer.stop_gradient
    assert program.parent is not None
    program.parent.add_capture(outer)
    return new


def add_cast(source: Variable, target: Variable, name: str = "") -> None:
    """Append the cast of ``source`` that makes ``target``, in the program of ``source``."""
    program, dtype = source.program, str(target.dtype)
    to = cast_target(program, dtype)
    cast = program.add_operator("Cast", [source], [target], attrs={"to": to}, role=FORWARD, name=name)
    cast.guard, cast.scope = False, source.producer.scope if source.producer is not None else ""
    cast.precision, cast.inserted = dtype, True
    cast.why = Reason(Kind.CAST, source.name, (dtype,))


def cast_target(program: Graph, dtype: str) -> int | str:
    """The attribute ``to`` of a Cast; before opset 6 it is a string."""
    return ONNX_TYPES[dtype] if program.opset() >= 6 else onnx.TensorProto.DataType.Name(ONNX_TYPES[dtype])
