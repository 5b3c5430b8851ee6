"""Checks of a program: its edges, its names, who gives what is read, its element types, attributes and updates.

Each check yields findings as text; :func:`verify` raises with the first ten. All of them are linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

import onnx

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.adjacency import predecessors, successors
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import CAPTURE, OWN, Operator, Variable, origin
from amp_transpiler.ir.types import NAMES, ONNX_TYPES
from amp_transpiler.ir.updates import update_fault

_SHOWN = 10
_VARIADIC = onnx.defs.OpSchema.FormalParameterOption.Variadic
#: ONNX's spelling of element types in schemas, where it is not ours.
_SPELLING = {"float32": "float", "float64": "double"}


def verify(program: Graph) -> None:
    """Raise GraphError with what is wrong with the program; see ``Program.verify``."""
    findings = list(islice(_findings(program), _SHOWN + 1))
    if findings:
        more = "\n- … and more" if len(findings) > _SHOWN else ""
        listed = "\n- ".join(findings[:_SHOWN])
        raise GraphError(f"program '{program.name}' is malformed:\n- {listed}{more}")


def untyped(program: Graph) -> list[str]:
    """Names of the variables, nested programs included, that have no element type and are no sequence or the like."""
    return [v.name for one in programs_of(program) for v in one.variables if v.dtype is None and not _spelled(v)]


def programs_of(program: Graph) -> Iterator[Graph]:
    """The program and every program nested in it, without sorting them (so that a cycle does no harm)."""
    yield program
    for op in program.added:
        for nested in op.attrs.programs:
            yield from programs_of(nested)


def _findings(program: Graph) -> Iterator[str]:
    for one in programs_of(program):
        for op in one.added:
            yield from _edges(one, op)
        for name, variable in zip(one.names, one.variables, strict=True):
            yield from _variable(one, name, variable)
        yield from _ports(one)
        yield from _captures(one)
        try:
            order = one.operators
        except GraphError as error:
            yield str(error)
            order = []
        for op in order:
            yield from operator_clashes(op)
            yield from _attributes(op)
        yield from _updates(one)


# -- structure -----------------------------------------------------------------------------------
def _edges(program: Graph, op: Operator) -> Iterator[str]:
    listed = {(v.key, slot) for slot, v in enumerate(op.inputs) if v is not None}
    read = predecessors(program.graph)[op.key]
    drawn = {(key, slot) for key, slots in read.items() for slot in slots if slot != CAPTURE}
    if listed != drawn:
        yield f"the input slots of operator '{op.label}' and its edges differ: {op!r}"
    written = {(v.key, slot) for slot, v in enumerate(op.outputs) if v is not None}
    if written != {(key, slot) for key, slots in successors(program.graph)[op.key].items() for slot in slots}:
        yield f"the output slots of operator '{op.label}' and its edges differ: {op!r}"
    for slot, v in enumerate(op.outputs):
        if v is not None and (v.producer is not op or v.producer_slot != slot):
            by = "nothing" if v.producer is None else f"'{v.producer.label}'"
            yield f"operator '{op.label}' writes '{v.name}', which says that {by} writes it"


def _variable(program: Graph, name: str, variable: Variable) -> Iterator[str]:
    if variable.name != name or variable.program is not program:
        yield f"variable '{variable.name}' is filed as '{name}' in program '{program.name}'"
    producers = predecessors(program.graph)[variable.key]
    if len(producers) > 1 or sum(len(slots) for slots in producers.values()) > 1:
        yield f"variable '{name}' has more than one producer"
    if variable.producer is not None and variable.producer.key not in producers:
        yield f"variable '{name}' says that '{variable.producer.label}' writes it, but no edge does"
    given = (
        variable.producer is not None
        or variable.is_input
        or variable.persistable
        or variable.data is not None
        or variable.outer is not None
    )
    needed = bool(successors(program.graph)[variable.key]) or any(variable is v for v in program.outputs if not given)
    if needed and not given:
        readers = variable.readers
        who = f"operator '{readers[0][0].label}' reads" if readers else "the program gives"
        yield f"{who} '{name}', which is not written, fed, constant, persistable or captured"
    if variable.dtype is None and not _spelled(variable):
        yield f"variable '{name}' of program '{program.name}' has no element type; set its dtype"
    if variable.dtype is not None and variable.dtype not in ONNX_TYPES:
        yield f"variable '{name}' has the unknown element type {variable.dtype!r}"


def _ports(program: Graph) -> Iterator[str]:
    for what, variables in (("input", program.inputs), ("output", program.outputs)):
        for v in variables:
            if not program.has_var(v.name) or program.var(v.name) is not v:
                yield f"{what} '{v.name}' of program '{program.name}' is no variable of it"
    for v in program.inputs:
        if v.producer is not None:
            yield f"input '{v.name}' of program '{program.name}' is written by operator '{v.producer.label}'"


def _captures(program: Graph) -> Iterator[str]:
    """Nested programs reach outwards through one capture edge per level, and shadow nothing that they capture."""
    for op in program.added:
        inner = [v for nested in op.attrs.programs for v in nested.variables if v.outer is not None]
        drawn = {key for key, slots in predecessors(program.graph)[op.key].items() if CAPTURE in slots}
        captured: set[int] = set()
        for v in inner:
            assert v.outer is not None
            if v.outer.program is not program:
                yield (
                    f"variable '{v.name}' in a nested graph of '{op.label}' stands for '{v.outer.name}' of another "
                    "program"
                )
                continue
            captured.add(v.outer.key)
            if v.outer.key not in drawn:
                yield f"a nested graph of operator '{op.label}' reads '{v.outer.name}', but no capture edge says so"
            name = origin(v).name
            if v.program.has_var(name) and v.program.var(name) is not v:
                yield (
                    f"variable '{name}' in a nested graph of '{op.label}' hides the captured variable of the same name"
                )
            if (v.dtype, v.type_proto is None) != (v.outer.dtype, v.outer.type_proto is None):
                yield (
                    f"variable '{v.name}' in a nested graph of '{op.label}' is {v.dtype}, but stands for "
                    f"'{v.outer.name}', which is {v.outer.dtype}"
                )
        for key in drawn - captured:
            name = program.graph.nodes[key]["item"].name
            yield f"a capture edge says that a nested graph of operator '{op.label}' reads '{name}', but none does"
        for nested in op.attrs.programs:
            if nested.parent is not op:
                yield f"nested program '{nested.name}' of operator '{op.label}' does not know its operator"


def _updates(program: Graph) -> Iterator[str]:
    for state, new in program.updates.items():
        if not state.persistable or new.program is not program or not program.has_var(state.name):
            yield f"the update of '{state.name}' does not go from a variable of the program to a persistable one"
        elif fault := update_fault(state, new):
            yield fault


# -- element types -------------------------------------------------------------------------------
@lru_cache(maxsize=4096)
def schema_of(type: str, opset: int, domain: str) -> onnx.defs.OpSchema | None:
    """ONNX's schema of an operator, None where it has none."""
    try:
        return onnx.defs.get_schema(type, opset, domain)
    except onnx.defs.SchemaError:
        return None


@lru_cache(maxsize=4096)
def _slots(type: str, opset: int, domain: str) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """(type variable or None, allowed types, whether it repeats) of each input and each output."""
    schema = schema_of(type, opset, domain)
    if schema is None:
        return None
    allowed = {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints}

    def rules(formals: Any) -> tuple[Any, ...]:
        return tuple(
            (
                f.type_str if f.type_str in allowed and f.is_homogeneous else None,
                allowed.get(f.type_str) or frozenset(f.types),
                f.option == _VARIADIC,
            )
            for f in formals
        )

    return rules(schema.inputs), rules(schema.outputs)


def all_clashes(program: Graph, kinds: Iterable[Operator] | None) -> list[str]:
    """:func:`operator_clashes` of every operator; each kind of operator on each row of types is looked at once.

    ``kinds``: an operator of each kind, where they are known.
    """
    if kinds is not None and not any(any(operator_clashes(op)) for op in kinds):
        return []
    found: list[str] = []
    fit: set[tuple[Any, ...]] = set()
    for op in program.walk():
        kind = (
            op.type,
            op.domain,
            *[None if v is None else v.dtype for v in op.inputs],
            "->",
            *[None if v is None else v.dtype for v in op.outputs],
        )
        if kind in fit:
            continue
        clashes = list(operator_clashes(op))
        found += clashes
        named = all(v is None or v.dtype is not None for v in (*op.inputs, *op.outputs))
        if not clashes and named and op.type != "Cast":  # a type may be none of a tensor, and a cast has one of its own
            fit.add(kind)
    return found


def operator_clashes(op: Operator) -> Iterator[str]:
    """Where an operator's variables break its schema: a type it does not take, two types for one type variable."""
    if op.domain == OWN:
        return
    slots = _slots(op.type, op.program.opset(op.domain), op.domain)
    if slots is None:
        return
    bound: dict[str, tuple[str, str]] = {}
    for what, rules, variables in (("input", slots[0], op.inputs), ("output", slots[1], op.outputs)):
        for slot, variable in enumerate(variables):
            if slot >= len(rules) and not (rules and rules[-1][2]):
                yield f"operator '{op.label}' ({op.full_type}) has {len(variables)} {what}s; it takes {len(rules)}"
                break
            spelled = None if variable is None else _spelled(variable)
            if variable is None or spelled is None:
                continue
            parameter, allowed, _ = rules[min(slot, len(rules) - 1)]
            if spelled not in allowed:
                yield (
                    f"operator '{op.label}' ({op.full_type}): {what} '{variable.name}' is {_short(spelled)}, which "
                    "the operator does not take"
                )
            elif parameter is not None:
                first = bound.setdefault(parameter, (spelled, variable.name))
                if first[0] != spelled:
                    yield (
                        f"operator '{op.label}' ({op.full_type}): '{first[1]}' is {_short(first[0])} and "
                        f"'{variable.name}' is {_short(spelled)}; both must have one type"
                    )
    yield from _cast_clash(op)


def _attributes(op: Operator) -> Iterator[str]:
    """Where an operator's attributes are not those of its schema."""
    schema = None if op.domain == OWN else schema_of(op.type, op.program.opset(op.domain), op.domain)
    if schema is None:
        return
    known, called = schema.attributes, f"operator '{op.label}' ({op.full_type})"
    for name in op.attrs:
        if name not in known:
            yield f"{called} has the attribute '{name}', and takes {', '.join(known) or 'none'}"
            continue
        found = onnx.AttributeProto.AttributeType.Name(op.attrs.kind(name))
        expected = str(known[name].type).rpartition(".")[2]
        if found != expected:
            yield f"{called}: attribute '{name}' is of the type {found}; the operator takes {expected}"
    for name, attribute in known.items():
        if attribute.required and name not in op.attrs:
            yield f"{called} lacks the attribute '{name}'"


def _cast_clash(op: Operator) -> Iterator[str]:
    out = op.output(0)
    number = op.attrs.get("to") if op.full_type == "Cast" else None
    if isinstance(number, int) and out is not None and out.dtype is not None:  # until opset 6 it is a name
        to = NAMES.get(number)
        if to != out.dtype:
            yield f"operator '{op.label}' (Cast) casts to {to}, but its output '{out.name}' is {out.dtype}"


def _short(spelled: str) -> str:
    inner = spelled.removeprefix("tensor(").removesuffix(")") if spelled.startswith("tensor(") else spelled
    return {"float": "float32", "double": "float64"}.get(inner, inner)


def _spelled(variable: Variable) -> str | None:
    """The type of a variable as schemas spell it ("tensor(float)"), None while it is not known."""
    if variable.dtype is not None:
        return f"tensor({_SPELLING.get(variable.dtype, variable.dtype)})"
    return None if variable.type_proto is None else _spelled_proto(variable.type_proto)


def _spelled_proto(proto: onnx.TypeProto) -> str | None:
    kind = proto.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        name = NAMES.get(getattr(proto, kind).elem_type)
        prefix = "tensor" if kind == "tensor_type" else "sparse_tensor"
        return None if name is None else f"{prefix}({_SPELLING.get(name, name)})"
    if kind in ("sequence_type", "optional_type"):
        inner = _spelled_proto(getattr(proto, kind).elem_type)
        return None if inner is None else f"{'seq' if kind == 'sequence_type' else 'optional'}({inner})"
    if kind == "map_type":
        inner = _spelled_proto(proto.map_type.value_type)
        key = NAMES.get(proto.map_type.key_type)
        if inner is None or key is None:
            return None
        # Schemas spell the value of a map without the word tensor.
        return f"map({_SPELLING.get(key, key)}, {inner.removeprefix('tensor(').removesuffix(')')})"
    return None
