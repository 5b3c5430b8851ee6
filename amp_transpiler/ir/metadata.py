"""What only a Graph knows, in a model file: the marks of an operator in the node's metadata_props (role, guard,
scope, precision, reason), the state of a training program in those of the graph (persistables, updates, gradients)."""

from __future__ import annotations

import json

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.accumulation_window import AccumulationWindow
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import FORWARD, ROLES, Operator
from amp_transpiler.ir.reasons import Kind, Reason, unpack, written
from amp_transpiler.ir.torch_marks import derived_scope
from amp_transpiler.ir.types import SHORT
from amp_transpiler.ir.weights import not_a_weight

PREFIX = "amp_transpiler."
#: Metadata entry: why an operator runs in fp32 whatever the lists say. A part of an operator that does so inside.
FULL = PREFIX + "fp32"
#: Metadata entry of an operator that only looks at what it reads: nothing is computed otherwise for it.
PROBE = PREFIX + "probe"
#: Metadata entry of a norm that stands for a written-out one: its squares are summed in fp32 inside.
NORM = PREFIX + "norm"
#: Metadata entry of a Sqrt, and of its gradient: what is under it is of squares, as of a length, a distance or a
#: standard deviation; where that is 0, its slope is 0.
LENGTH = PREFIX + "length"
#: Metadata entry of a Div, and of its gradient: it divides by a length that is a tiny number at least, over which no
#: slope fits 16 bit; there, at vectors of zeros, it passes slopes on as a division by 1 does.
FLOORED = PREFIX + "floored"
#: Metadata entry of an operator that stands for several in training: their types. What is saved for inference has them
#: again, and an operator list that keeps one of them in fp32 keeps this one.
FUSED = PREFIX + "fused"
#: Metadata entry of a BatchNormalization, and of its gradient: that it takes its statistics over the batches of all
#: ranks: ``ASKED`` before the program is trained by several ranks, ``BY_RANKS`` from then on.
SYNCHRONIZED, ASKED, BY_RANKS = PREFIX + "synchronized", "asked", "ranks"
#: Operator, of the own domain, that sets a variable to the content that it carries.
INITIALIZER = "ArrayInitializer"
_WHY = PREFIX + "why"
_RUNS = {short: dtype for dtype, short in SHORT.items()}
_STATE = PREFIX + "state"


def only_looks(op: Operator) -> bool:
    """Whether an operator is a probe, for which nothing is computed otherwise."""
    return PROBE in op.metadata


def read_marks(op: Operator, metadata: dict[str, str]) -> None:
    """Take the marks out of a node's metadata and put them on the operator; the rest becomes ``op.metadata``."""
    if not metadata:
        op.metadata, op.scope = metadata, derived_scope(op)
        return
    rest = dict(metadata)
    if rest.get(PREFIX + "role") in ROLES:
        op.role = rest.pop(PREFIX + "role")
    if rest.get(PREFIX + "guard") == "1":
        op.guard = bool(rest.pop(PREFIX + "guard"))
    op.why = unpack(rest.pop(PREFIX + "reason", ""), rest.pop(_WHY, ""))
    op.precision = rest.pop(PREFIX + "precision", _said(op.why))
    op.inserted = op.type == "Cast" and op.why is not None and op.why.kind is Kind.CAST
    scope = rest.pop(PREFIX + "scope", None)
    op.metadata = rest
    op.scope = derived_scope(op) if scope is None else scope


def written_marks(op: Operator) -> dict[str, str]:
    """The metadata entries that say what :func:`read_marks` would not find out without them."""
    marks: dict[str, str] = {}
    if op.role != FORWARD:
        marks[PREFIX + "role"] = op.role
    if op.guard:
        marks[PREFIX + "guard"] = "1"
    if (op.scope or op.metadata or op.name.startswith("/")) and op.scope != derived_scope(op):
        marks[PREFIX + "scope"] = op.scope
    if op.precision != _said(op.why):
        marks[PREFIX + "precision"] = op.precision
    if op.why is not None:
        marks[PREFIX + "reason"], packed = written(op.why)
        if packed:
            marks[_WHY] = packed
    return marks


def _said(why: Reason | None) -> str:
    """The precision that a reason tells; "" where it tells none."""
    return "" if why is None else _RUNS.get(why.runs, "")


def written_state(program: Graph) -> dict[str, str]:
    """The metadata entry that says which variables are persistable and trainable, and the updates.

    None is needed, and none written, where importing would find the same: all weights are trainable, nothing is
    updated or a gradient.
    """
    kept = [v for v in program.variables if v.persistable]
    gradients = {v.name: v.grad_of.name for v in program.variables if v.grad_of is not None}
    sparse = [v.name for v in kept if v.sparse]
    imported = all(v.data is not None and v.is_parameter == (not not_a_weight(v)) for v in kept)
    if not program.updates and not gradients and not sparse and imported:
        return {}
    state = {
        "trainable": [v.name for v in kept if v.is_parameter],
        "persistable": [v.name for v in kept if not v.is_parameter],
        "updates": {state.name: new.name for state, new in program.updates.items()},
        "gradients": gradients,
    }
    rows = {v.name: v.rows.name for v in program.variables if v.rows is not None}
    owners = {v.name: v.owner for v in kept if v.owner is not None}
    dealt = {v.name: v.dealt for v in kept if v.dealt is not None}
    more = (("rows", rows), ("sparse", sparse), ("owners", owners), ("dealt", dealt))
    state |= {key: found for key, found in more if found}
    if program.accumulation is not None:
        window = program.accumulation
        spread = {state.name: new.name for state, new in window.updates.items()}
        state["window"] = {"steps": window.steps, "counter": window.counter.name, "updates": spread}
    return {_STATE: json.dumps(state)}


def read_state(program: Graph) -> bool:
    """Take the state entry out of the graph's metadata and obey it; whether there was one."""
    text = program.info.graph_metadata.pop(_STATE, None)
    if text is None:
        return False
    try:
        state = json.loads(text)
        kept = [(name, True) for name in state["trainable"]] + [(name, False) for name in state["persistable"]]
        updates = dict(state["updates"])
        gradients = dict(state.get("gradients", {}))
        rows, sparse = dict(state.get("rows", {})), list(state.get("sparse", []))
        owners = {name: int(rank) for name, rank in dict(state.get("owners", {})).items()}
        dealt = {name: int(ranks) for name, ranks in dict(state.get("dealt", {})).items()}
        window = dict(state.get("window", {}))
        spread = dict(window.get("updates", {}))
        steps, counter = int(window.get("steps", 0)), window.get("counter", "")
        named = [*(name for name, _ in kept), *updates.values(), *gradients.values(), *spread.values(), counter]
        named += [*rows.values(), *sparse, *owners, *dealt]
        if not all(isinstance(name, str) for name in named):
            raise TypeError("a name that is no text")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        raise GraphError(
            f"the metadata entry '{_STATE}' of graph '{program.name}' is not as this package writes it"
        ) from None
    for name, trainable in kept:
        variable = program.var(name)
        variable.persistable, variable.trainable, variable.is_input = True, trainable, False
    program.inputs = [v for v in program.inputs if not v.persistable]
    for name, new in updates.items():
        program.set_update(program.var(name), program.var(new))
    for name, variable in gradients.items():
        program.var(name).grad_of = program.var(variable)
    for name, variable in rows.items():
        program.var(name).rows = program.var(variable)
    for name in sparse:
        program.var(name).sparse = True
    for name, rank in owners.items():
        program.var(name).owner = rank
    for name, ranks in dealt.items():
        program.var(name).dealt = ranks
    if window:
        written = {program.var(name): program.var(new) for name, new in spread.items()}
        program.accumulation = AccumulationWindow(steps, program.var(counter), written)
    return True
