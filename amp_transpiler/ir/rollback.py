"""All or nothing: a change of programs that fails in the middle leaves them, unique names and optimizers as they were.

A snapshot copies the short lists and dictionaries of a program, not its contents, and no graph: edges follow from
the slots of the operators, and are built anew where a change has to be taken back. Variables and operators keep
their identity, so that what the caller holds stays valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from amp_transpiler.ir import unique_name
from amp_transpiler.ir.attributes import Attributes
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.model_info import ModelInfo
from amp_transpiler.ir.nodes import CAPTURE, Operator, Variable


@contextmanager
def unchanged_on_error(*changed: object) -> Iterator[None]:
    """Take back what the block does to programs (nested ones included) and objects where it raises, Ctrl-C included.

    Of other objects than programs the attributes are put back; of their values, lists and dictionaries alone are
    copied. None is passed over.
    """
    given = list({id(each): each for each in changed if each is not None}.values())
    snapshots = [_Snapshot(each) for each in given if isinstance(each, Graph)]
    tables: list[dict[str, Any]] = [
        unique_name.counters(),
        *(vars(each) for each in given if not isinstance(each, Graph)),
    ]
    # Copied first: threads that build without a guard share their counters, which may grow meanwhile.
    before = [{name: _copied(value) for name, value in table.copy().items()} for table in tables]

    def restore() -> None:
        for snapshot in snapshots:
            snapshot.restore()
        for table, values in zip(tables, before, strict=True):
            table.clear()
            table.update(values)

    try:
        yield
    except BaseException:
        try:
            restore()
        except BaseException:
            restore()  # where Ctrl-C came in the middle of the first
            raise
        raise


@contextmanager
def without_leftovers(program: Graph) -> Iterator[None]:
    """Take out what the block adds to ``program`` where it raises: operators, and variables but feeds and parameters.

    It costs nothing where nothing raises, so that each call that adds an operator can have it.
    """
    first = program.next_key
    try:
        yield
    except BaseException:
        for op in reversed(program.added_since(first)):
            program.remove_operator(op)
        for v in [v for v in program.variables if v.key >= first][::-1]:
            if not (v.is_input or v.persistable or v.readers):
                program.remove_variable(v)
        raise


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict)) else value


def _slots(item: Variable | Operator | Attributes) -> dict[str, Any]:
    named = (name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ()))
    return {name: _copied(getattr(item, name)) for name in named}


def _info(info: ModelInfo) -> ModelInfo:
    return replace(info, **{name: _copied(value) for name, value in vars(info).items()})


class _Snapshot:
    """One program as it is now. Attribute protobufs and tensor contents are shared: passes replace, never edit them."""

    def __init__(self, program: Graph) -> None:
        self.program = program
        self.fields = {name: _copied(value) for name, value in vars(program).items() if name != "graph"}
        self.fields["info"] = _info(program.info)
        self.variables = [(variable, _slots(variable)) for variable in program.variables]
        self.operators = [
            (op, _slots(op), _slots(op.attrs), op.captures if op.attrs.graphs else []) for op in program.added
        ]
        self.nested = [_Snapshot(inner) for op, *_ in self.operators for inner in op.attrs.programs]

    def restore(self) -> None:
        for variable, slots in self.variables:
            _set(variable, slots)
        for op, slots, attrs, _ in self.operators:
            _set(op, slots)
            _set(op.attrs, attrs)
        vars(self.program).update(self.fields)
        self._connect()
        for inner in self.nested:
            inner.restore()

    def _connect(self) -> None:
        graph = self.program.graph
        graph.clear()
        items: list[Variable | Operator] = [*(v for v, _ in self.variables), *(op for op, *_ in self.operators)]
        for item in sorted(items, key=lambda item: item.key):
            graph.add_node(item.key, item=item)
        for op, _, _, captures in self.operators:
            for slot, variable in enumerate(op.inputs):
                if variable is not None:
                    graph.add_edge(variable.key, op.key, key=slot)
            for variable in captures:
                graph.add_edge(variable.key, op.key, key=CAPTURE)
            for slot, variable in enumerate(op.outputs):
                if variable is not None:
                    graph.add_edge(op.key, variable.key, key=slot)


def _set(item: Variable | Operator | Attributes, slots: dict[str, Any]) -> None:
    for name, value in slots.items():
        setattr(item, name, value)
