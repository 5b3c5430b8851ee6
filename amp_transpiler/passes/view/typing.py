"""Which element types the slots of an operator may hold, from its ONNX schema.

A schema names the type of each slot by a type variable (``T``) or pins it (``tensor(float)``). Slots of one
variable hold one type, so precision is decided per variable and never per slot: LayerNormalization must read
its scale in 16 bit because it shares ``T`` with the data, BatchNormalization need not.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.contrib_types import pinned_slots
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import Declared, infer_operator, node_types
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.onnx_inference import ONNX_ERRORS
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.signature import Signature, signature
from amp_transpiler.ir.types import FLOATS, HALF, NAMES
from amp_transpiler.ir.verify import schema_of
from amp_transpiler.lists import first_opset, kept_fp32

#: The type variable of every slot of an operator without a schema.
_ANY = "T"


@dataclass
class Slots:
    """The element type that each slot of an operator has to hold; None: whatever comes, or no tensor."""

    inputs: list[str | None]
    outputs: list[str | None]


@dataclass(frozen=True)
class Obstacle:
    """Why an operator cannot run in 16 bit. ``fixed``: its type is no matter of precision at all."""

    why: Reason
    fixed: bool = False


def signature_of(op: Operator) -> Signature | None:
    """The signature of ``op`` at its program's opset."""
    return signature(op.type, op.program.opset(op.domain), op.domain)


def kept_slots(op: Operator) -> tuple[frozenset[int], frozenset[int]]:
    """Inputs and outputs of ``op`` that stay fp32 where its schema lets them."""
    return kept_fp32(op.type, op.domain)


def is_float(variable: Variable | None) -> bool:
    """Whether the variable is a tensor of a floating type."""
    return variable is not None and variable.dtype in FLOATS


def has_float(op: Operator) -> bool:
    """Whether the operator reads or writes a floating-point tensor."""
    return any(is_float(v) for v in (*op.inputs, *op.outputs))


def float_type(op: Operator, default: str = "") -> str:
    """The floating type that an operator computes in as it stands; ``default`` where it handles none."""
    return next((str(v.dtype) for v in (*op.outputs, *op.inputs) if v is not None and is_float(v)), default)


def declared(op: Operator) -> Slots:
    """The types as they stand in the program."""
    return Slots(
        [None if v is None else v.dtype for v in op.inputs], [None if v is None else v.dtype for v in op.outputs]
    )


@dataclass
class _Group:
    """The slots of one type variable."""

    inputs: list[int]
    outputs: list[int]
    dtypes: set[str | None]
    kept: bool = True  # every slot of it is kept fp32


Dtypes = tuple[str | None, ...]


class _Typed(NamedTuple):
    """An operator as its typing sees it: what it is and the element types that its slots hold."""

    type: str
    domain: str
    opset: int  # of its domain
    inputs: Dtypes
    outputs: Dtypes

    def signature(self) -> Signature | None:
        return signature(self.type, self.opset, self.domain)

    def groups(self) -> dict[str, _Group]:
        """Type variables of the floating-point slots, the one of the first output (else input) first."""
        kept_in, kept_out = kept_fp32(self.type, self.domain)
        sig = self.signature()
        pinned_in, pinned_out = pinned_slots(self.type, self.domain)
        groups: dict[str, _Group] = {}
        for slot, dtype in enumerate(self.outputs):
            if dtype in FLOATS and slot not in pinned_out:
                group = groups.setdefault(sig.output(slot) if sig else _ANY, _Group([], [], set()))
                group.outputs.append(slot)
                group.dtypes.add(dtype)
                group.kept &= slot in kept_out
        for slot, dtype in enumerate(self.inputs):
            if dtype in FLOATS and slot not in pinned_in:
                group = groups.setdefault(sig.input(slot) if sig else _ANY, _Group([], [], set()))
                group.inputs.append(slot)
                group.dtypes.add(dtype)
                group.kept &= slot in kept_in
        return groups

    def moved(self, groups: list[_Group], dtype: str, moves: Set[str | None]) -> tuple[Dtypes, Dtypes]:
        """The element types with the slots of these groups, where they hold one of ``moves``, at ``dtype``."""
        inputs, outputs = list(self.inputs), list(self.outputs)
        for group in groups:
            for slot in group.inputs:
                inputs[slot] = dtype if inputs[slot] in moves else inputs[slot]
            for slot in group.outputs:
                outputs[slot] = dtype if outputs[slot] in moves else outputs[slot]
        return tuple(inputs), tuple(outputs)


def _typed(op: Operator) -> _Typed:
    return _Typed(
        op.type,
        op.domain,
        op.program.opset(op.domain),
        tuple([None if v is None else v.dtype for v in op.inputs]),
        tuple([None if v is None else v.dtype for v in op.outputs]),
    )


#: Element types of the inputs and of the outputs, and the outputs whose type variable no given input has.
_Plan = tuple[Dtypes, Dtypes, tuple[int, ...]]


@lru_cache(maxsize=65536)  # a program has few kinds of operators, and thousands of each
def _narrow_plan(typed: _Typed, dtype: str) -> _Plan | Obstacle:
    groups = typed.groups()
    obstacles = {name: _obstacle(typed, name, group, dtype) for name, group in groups.items()}
    main = obstacles[next(iter(groups))]
    if main is not None:
        return main
    follows = [group for name, group in groups.items() if obstacles[name] is None]
    return (*typed.moved(follows, dtype, {"float32", dtype}), _unbound_slots(groups))


@lru_cache(maxsize=65536)
def _wide_plan(typed: _Typed) -> _Plan:
    sig = typed.signature()
    if sig is None or sig.typed_by_attribute:
        return typed.inputs, typed.outputs, ()
    groups = typed.groups()
    bound = [g for name, g in groups.items() if g.inputs and "float32" in sig.admits[name]]
    return (*typed.moved(bound, "float32", HALF | {"float32"}), _unbound_slots(groups))


def _unbound_slots(groups: dict[str, _Group]) -> tuple[int, ...]:
    return tuple(slot for group in groups.values() if not group.inputs for slot in group.outputs)


def narrowed(op: Operator, dtype: str) -> Slots | Obstacle:
    """The types with which ``op`` runs in ``dtype``, or why it cannot.

    Every type variable that its inputs bind follows, save those of slots that stay fp32 alone and those
    that do not admit ``dtype``; the one of the data must follow.
    """
    opset = op.program.opset()
    cast = signature("Cast", opset, "")
    if cast is None or dtype not in cast.admits[cast.outputs[0]]:
        return Obstacle(Reason(Kind.NO_CAST, detail=(dtype, str(opset))))
    plan = _narrow_plan(_typed(op), dtype)
    return plan if isinstance(plan, Obstacle) else _slots(op, plan)


def _obstacle(typed: _Typed, name: str, group: _Group, dtype: str) -> Obstacle | None:
    sig = typed.signature()
    if sig is not None and sig.typed_by_attribute:
        return Obstacle(Reason(Kind.BY_ATTRIBUTE), fixed=True)
    if not group.inputs:
        return Obstacle(Reason(Kind.NO_INPUT), fixed=True)
    other = sorted(str(d) for d in group.dtypes - {"float32", dtype})
    if other:
        return Obstacle(Reason(Kind.OTHER_TYPE, detail=(other[0],)), fixed=True)
    if sig is not None and dtype not in sig.admits[name]:
        return Obstacle(Reason(Kind.NOT_TAKEN, detail=(typed.type, dtype, str(typed.opset))))
    return Obstacle(Reason(Kind.KEPT_SLOTS)) if group.kept else None


def widened(op: Operator) -> Slots:
    """The types with which ``op`` runs in fp32: 16-bit slots go up where the schema binds them to an input."""
    return _slots(op, _wide_plan(_typed(op)))


def by_shapes(op: Operator) -> bool:
    """Whether more than the element types of its slots tells those with which ``op`` runs in fp32 or 16 bit."""
    return bool(_wide_plan(_typed(op))[2])


def _slots(op: Operator, plan: _Plan) -> Slots:
    inputs, outputs, unbound = plan
    slots = Slots(list(inputs), list(outputs))
    return _unbound(op, unbound, slots) if unbound else slots


def _unbound(op: Operator, outputs: tuple[int, ...], slots: Slots) -> Slots:
    """Let ONNX's inference say the type of outputs whose type variable no given input has (a state's first value)."""
    if slots.inputs == declared(op).inputs:
        return slots
    read = tuple(
        ((kind, v.shape), None) if v is not None and kind else None
        for v, kind in zip(op.inputs, slots.inputs, strict=True)
    )
    try:
        inferred = node_types(op, read, tuple(map(bool, slots.outputs)))
    except ONNX_ERRORS as error:
        reason = str(error).strip()
        raise GraphError(f"operator '{op.label}' ({op.full_type}) does not fit its inputs: {reason}") from None
    for slot in outputs:
        found = inferred.get(slot)
        if found is not None and found.HasField("tensor_type"):
            slots.outputs[slot] = NAMES.get(found.tensor_type.elem_type, slots.outputs[slot])
    return slots


def programs(program: Graph) -> Iterator[Graph]:
    """The program and every nested one, each before those inside it."""
    yield program
    for op in program.nesting:
        for nested in op.attrs.programs:
            yield from programs(nested)


def follow_outer_types(program: Graph) -> None:
    """Let variables of nested graphs that stand for outer ones have their types."""
    for each in programs(program):
        for variable in each.variables if each.parent is not None else ():
            if variable.outer is not None:
                variable.dtype = variable.outer.dtype


def require_typed(program: Graph) -> None:
    """GraphError naming the first variable without a type, or an operator of a later opset than the model declares;
    precision cannot be decided without."""
    for each in programs(program):
        for op in {op.full_type: op for op in each.operators if not op.domain}.values():
            first = first_opset(op.type, op.domain) if schema_of(op.type, each.opset(), op.domain) is None else None
            if first is not None and first > each.opset():
                raise GraphError(
                    f"operator '{op.label}' ({op.type}) came with opset {first}, and the model declares opset "
                    f"{each.opset()}; export it at {first} or later, where its other operators are of that opset too"
                )
        for variable in each.variables:
            if variable.dtype is None and variable.type_proto is None:
                raise _untyped(variable)


def _untyped(variable: Variable) -> GraphError:
    """What is said of a variable without a type; raises what ONNX says of a producer that does not fit its inputs."""
    producer = variable.producer
    if producer is not None:
        infer_operator(producer, Declared())
        if not producer.domain and first_opset(producer.type, "") is None:
            return GraphError(
                f"operator '{producer.label}' ({producer.type}) is none of ai.onnx: its exporter left it as it was, "
                "and no runtime loads the model; export what it computes in other operators"
            )
    made = f", made by '{producer.label}' ({producer.full_type})" if producer is not None else ""
    return GraphError(
        f"program '{variable.program.name}': variable '{variable.name}'{made} has no element type, so that its "
        "precision cannot be decided; declare it in the model (graph.value_info), or set its dtype"
    )
