"""Copies of a program: as it is, and for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import onnx

from amp_transpiler.ir.adjacency import successors
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import FORWARD, Operator, Variable
from amp_transpiler.ir.opdef import lookup
from amp_transpiler.ir.proto_residue import set_source, source_of

G = TypeVar("G", bound=Graph)


def clone(program: G, for_test: bool = False) -> G:
    """A copy; see ``Program.clone``."""
    new = _Cloner(for_test).program(program, {}, type(program))
    new.startup = program.startup
    return new


def clone_graph(nested: G) -> G:
    """A copy of a nested program that stands in the same place: it reads the same outer variables."""
    new = _Cloner(False).program(
        nested, {v.outer: v.outer for v in nested.variables if v.outer is not None}, type(nested)
    )
    new.parent = nested.parent
    return new


def insert_graph(
    nested: Graph, program: Graph, given: dict[Variable, Variable], prefix: str, taken: set[str]
) -> list[Variable]:
    """Copy the operators of a nested program into the program around it.

    ``given`` maps inputs of the nested program, and whatever else is to be shared, to variables of ``program``; what
    the nested one captures is read where it is. Copies keep their names where these are free, else they are called
    ``<prefix>/<name>``; ``taken`` holds the names of operators, and gets those of the copies. Returns what the nested
    program's outputs are there; operators stay with the marks that they have in the nested one.
    """
    cloner, copies = _Cloner(False), dict(given)
    for variable in nested.variables:
        if variable in copies:
            continue
        if variable.outer is not None:
            copies[variable] = variable.outer
        else:
            name = variable.name if not program.has_var(variable.name) else program.unique(f"{prefix}/{variable.name}")
            copies[variable] = cloner.variable(variable, program, {}, name)
            copies[variable].is_input = False
    for variable in nested.variables:
        if variable.grad_of is not None and variable.outer is None and variable not in given:
            copies[variable].grad_of = copies.get(variable.grad_of, variable.grad_of)
    for op in nested.operators:
        copy = cloner.operator(op, program, copies)
        if copy.name and copy.name in taken:
            copy.name = f"{prefix}/{copy.name}"
        taken.add(copy.name)
    return [copies[variable] for variable in nested.outputs]


class _Cloner:
    def __init__(self, for_test: bool) -> None:
        self.for_test = for_test

    def program(self, old: Graph, outer: dict[Variable, Variable], made: Callable[[str], G]) -> G:
        """Copy one program into one that ``made`` makes. ``outer`` maps the variables around a nested one to copies."""
        new = made(old.name)
        new.call(old.name, old.graph_name)
        new.seed, new.numeric_guards = old.seed, old.numeric_guards
        copies = {variable: self.variable(variable, new, outer, variable.name) for variable in old.variables}
        for variable, copy in copies.items():
            if variable.grad_of is not None:
                copy.grad_of = copies[variable.grad_of]
            if variable.rows is not None:
                copy.rows = copies[variable.rows]
        for op in old.added:
            if not self.for_test or op.role == FORWARD:
                self.operator(op, new, copies)
        new.inputs = [copies[v] for v in old.inputs]
        new.outputs = [copies[v] for v in old.outputs]
        if self.for_test:
            _evaluate(old, new, copies)
        else:
            new.updates = {copies[state]: copies[value] for state, value in old.updates.items()}
            if old.accumulation is not None:
                spread = {copies[state]: copies[value] for state, value in old.accumulation.updates.items()}
                new.accumulation = replace(old.accumulation, counter=copies[old.accumulation.counter], updates=spread)
            new.recompute = old.recompute
        _copy_info(old, new, copies)
        return new

    def variable(self, old: Variable, new: Graph, outer: dict[Variable, Variable], name: str) -> Variable:
        """A copy of one variable, without its producer."""
        made = new.add_variable(
            name, old.dtype, old.shape, persistable=old.persistable, trainable=old.trainable, data=old.data
        )
        made.stop_gradient, made.is_input, made.doc = old.stop_gradient, old.is_input, old.doc
        made.declared, made.sparse = old.declared, old.sparse
        made.owner, made.dealt, made.startup = old.owner, old.dealt, old.startup
        made.metadata = dict(old.metadata)
        if old.outer is not None:
            made.outer = outer[old.outer]
        if old.type_proto is not None:
            made.type_proto = onnx.TypeProto()
            made.type_proto.CopyFrom(old.type_proto)
        return made

    def operator(self, old: Operator, new: Graph, copies: dict[Variable, Variable]) -> Operator:
        """A copy of one operator, nested programs included."""
        attrs = old.attrs.copy_with(lambda nested: self.program(nested, copies, type(new)))
        op = new.add_operator(
            old.type,
            _mapped(old.inputs, copies),
            _mapped(old.outputs, copies),
            attrs=attrs,
            domain=old.domain,
            name=old.name,
            role=old.role,
        )
        op.guard, op.scope, op.precision = old.guard, old.scope, old.precision
        op.why, op.inserted = old.why, old.inserted
        op.overload, op.doc, op.metadata, op.source = old.overload, old.doc, dict(old.metadata), old.source
        read = {v.outer for nested in op.attrs.programs for v in nested.variables}
        for variable in old.captures:
            if copies[variable] in read:
                op.add_capture(copies[variable])
        return op


def _mapped(variables: Iterable[Variable | None], copies: dict[Variable, Variable]) -> list[Variable | None]:
    return [None if v is None else copies[v] for v in variables]


def _copy_info(old: Graph, new: Graph, copies: dict[Variable, Variable]) -> None:
    info = old.info
    new.info = replace(
        info,
        opsets=dict(info.opsets),
        metadata=dict(info.metadata),
        functions=list(info.functions),
        graph_metadata=dict(info.graph_metadata),
        extra=dict(info.extra),
    )
    source = source_of(old)
    if source is not None:
        alive = {before: after for before, after in copies.items() if new.has_var(after.name)}
        set_source(new, source.copy(alive))


# -- evaluation ------------------------------------------------------------------------------------
def _evaluate(old: Graph, new: Graph, copies: dict[Variable, Variable]) -> None:
    """Turn a copy without its training operators into a program for evaluation."""
    for op in new.operators:
        found = lookup(op)
        if found is not None and found.for_test is not None:
            found.for_test(op)
    _remove_dead(new, [copies[value] for value in old.updates.values()])
    used = set(new.inputs) | set(new.outputs)
    for before, after in copies.items():
        had_use = before.producer is not None or old.graph.degree(before.key) > 0
        if had_use and after not in used and not new.graph.degree(after.key):
            new.remove_variable(after)


def _remove_dead(program: Graph, targets: list[Variable]) -> None:
    """Remove operators that served only the updates: what they made is neither read nor an output.

    An operator whose result was never read (a loss, an accuracy) is no such operator: it may be fetched.
    """
    kept = set(program.outputs)
    unread: set[Variable] = set()
    stack = list(targets)
    while stack:
        variable = stack.pop()
        if variable in kept or successors(program.graph)[variable.key]:
            continue
        unread.add(variable)
        op = variable.producer
        if op is None or any(v is not None and v not in unread for v in op.outputs):
            continue
        sources = [v for v in (*op.inputs, *op.captures) if v is not None]
        program.remove_operator(op)
        stack.extend(dict.fromkeys(sources))
