"""Graph: operators and variables on one networkx MultiDiGraph.

Operators and variables are nodes (integer keys, so that nothing hangs on addresses); an edge carries
its slot as its key: ``variable -> operator`` the input slot, ``operator -> variable`` the output slot,
``variable -> operator`` with key ``"capture"`` a variable that a nested graph of the operator reads.
Every change goes through the methods of this module, which keep edges and ordered slots in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence, ValuesView
from itertools import count, takewhile
from typing import Any, Self

import networkx as nx

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GraphError
from amp_transpiler.ir import context, unique_name
from amp_transpiler.ir.accumulation_window import AccumulationWindow
from amp_transpiler.ir.adjacency import add_nodes, add_operator, predecessors, remove_node, successors
from amp_transpiler.ir.attributes import Attributes
from amp_transpiler.ir.model_info import ModelInfo
from amp_transpiler.ir.nodes import CAPTURE, Operator, Variable, check_operator, not_held, not_owned, role_after
from amp_transpiler.ir.order import topological_order, walked
from amp_transpiler.ir.patterns import matching
from amp_transpiler.ir.seeded import Seeded
from amp_transpiler.ir.startup import HasStartup
from amp_transpiler.ir.types import check_declared, element_type
from amp_transpiler.ir.updates import check_update
from amp_transpiler.option_checks import shown
from amp_transpiler.spelling import near_names

Slots = Sequence[Variable | None]
_numbers = count()


class Graph(HasStartup, Seeded):
    """A static program's structure: operators and variables, ordered inputs and outputs, and state updates.

    ``name`` is what messages call it: that of its file, or ``program_<n>`` where none is given.
    ``updates`` maps a persistable variable to the variable whose value it takes when a step ends.
    ``startup`` is the program that initialises the persistable variables (None for a startup program).
    Graphs nested in operators, startup programs and copies are of one class with the graph that they belong to.
    """

    def __init__(self, name: str | None = None, startup: Self | None = None) -> None:
        self.graph: nx.MultiDiGraph = nx.MultiDiGraph()
        self.call(name or f"program_{next(_numbers)}", name or "main")
        self.info = ModelInfo()
        self.inputs: list[Variable] = []
        self.outputs: list[Variable] = []
        self.updates: dict[Variable, Variable] = {}
        #: Where a step is spread over several runs (gradient accumulation): what all but the last of them update.
        self.accumulation: AccumulationWindow | None = None
        HasStartup.__init__(self, startup)
        Seeded.__init__(self)
        #: The operator that holds this program as an attribute, for a nested graph.
        self.parent: Operator | None = None
        self._variables: dict[str, Variable] = {}
        self._operators: dict[int, Operator] = {}
        self._next_key = 0
        #: Whether passes for training keep fp32 what is known to leave 16 bit, as a conversion does: a program from a
        #: file, whose author had fp32 in mind. A built one is taken literally.
        self.numeric_guards = False
        #: What ``amp.recompute`` asked for; ``append_backward`` obeys it.
        self.recompute: object = None
        self._version = 0
        #: The version of which the order is known, the operators in it, and those that hold nested programs.
        self._order: tuple[int, list[Operator], list[Operator]] = (-1, [], [])

    def ensure_startup(self) -> Self:
        """The startup program, an empty one where there was none."""
        if self.startup is None:
            self.startup = type(self)(f"{self.name}_startup")
        return self.startup

    # -- names ---------------------------------------------------------------------------------
    def call(self, name: str, graph_name: str) -> None:
        """Call the program ``name``, and its graph in a file ``graph_name`` as long as the program is called so."""
        self.name, self._called = name, (name, graph_name)

    @property
    def graph_name(self) -> str:
        """What the graph is called in a file."""
        name, graph_name = self._called
        return graph_name if self.name == name else self.name

    # -- looking -------------------------------------------------------------------------------
    def opset(self, domain: str = "") -> int:
        """The operator set version that this program's operators of ``domain`` are written in."""
        program = self
        while program.parent is not None:
            program = program.parent.program
        return program.info.opsets.get(domain, 1)

    @property
    def version(self) -> int:
        """Grows with every change of structure; equal versions of one program are the same program."""
        return self._version

    @property
    def variables(self) -> Iterable[Variable]:
        """Every variable, in the order in which they were added."""
        return self._variables.values()

    @property
    def names(self) -> KeysView[str]:
        """The names of the variables, in the order in which these were added."""
        return self._variables.keys()

    @property
    def parameters(self) -> list[Variable]:
        """Trainable persistable variables."""
        return [v for v in self._variables.values() if v.is_parameter]

    def var(self, name: str) -> Variable:
        """The variable called ``name``; GraphError with near names where there is none."""
        found = self._variables.get(name) if isinstance(name, str) else None
        if found is None:
            hint = near_names(name, self._variables, "; ")
            raise GraphError(f"program '{self.name}' has no variable '{name}'{hint}")
        return found

    def find(self, name: str) -> Variable | None:
        """The variable called ``name``; None where there is none."""
        return self._variables.get(name)

    def find_all(self, names: Iterable[str]) -> list[Variable | None]:
        """The variables called so; None where there is none."""
        return [*map(self._variables.get, names)]

    def has_var(self, name: str) -> bool:
        """Whether a variable of this name exists."""
        return name in self._variables

    @property
    def operators(self) -> list[Operator]:
        """Operators in stable topological order: as added, each after its producers. GraphError on a cycle."""
        return list(self._ordered()[1])

    @property
    def added(self) -> ValuesView[Operator]:
        """Operators as they were added, not sorted, so that a cycle does no harm."""
        return self._operators.values()

    @property
    def next_key(self) -> int:
        """The key of the next variable or operator that is added."""
        return self._next_key

    def added_since(self, key: int) -> list[Operator]:
        """The operators from this key on, as they were added."""
        return list(takewhile(lambda op: op.key >= key, reversed(self._operators.values())))[::-1]

    @property
    def nesting(self) -> list[Operator]:
        """The operators that hold nested programs, in order."""
        if self._order[0] != self._version and not any([op.attrs.programs for op in self._operators.values()]):
            return []
        return self._ordered()[2]

    def _ordered(self) -> tuple[int, list[Operator], list[Operator]]:
        if self._order[0] != self._version:
            order = topological_order(self._operators, self.name)
            self._order = (self._version, order, [op for op in order if op.attrs.programs])
        return self._order

    def walk(self) -> Iterator[Operator]:
        """Every operator, nested programs included, each before those inside it."""
        _, order, nesting = self._ordered()
        return walked(order) if nesting else iter(order)

    # -- changing ------------------------------------------------------------------------------
    def touch(self, variables_alone: bool = False) -> None:
        """Say that the structure has changed, here and so in the graphs around: the order, or ``variables_alone``."""
        ordered = variables_alone and self._order[0] == self._version
        self._version += 1
        if ordered:
            self._order = (self._version, *self._order[1:])
        if self.parent is not None:
            self.parent.program.touch()

    def must_own(self, variable: Variable) -> None:
        """GraphError where the variable is another program's."""
        if getattr(variable, "program", None) is not self:
            raise not_owned(variable, self)

    def unique(self, name: str) -> str:
        """``name``, or ``name_1``, ``name_2``, … where it is taken in this program or in one around it."""
        if not self.takes(name):
            return name
        number = 1
        while self.takes(f"{name}_{number}"):
            number += 1
        return f"{name}_{number}"

    def takes(self, name: str) -> bool:
        """Whether a variable of this program or of one around it is called so."""
        return name in self._variables or (self.parent is not None and self.parent.program.takes(name))

    def add_variable(
        self,
        name: str,
        dtype: Any = None,
        shape: Iterable[Any] | None = None,
        *,
        persistable: bool = False,
        trainable: bool = False,
        data: Any = None,
    ) -> Variable:
        """A new variable; GraphError where the name is taken."""
        check_declared(name, shape)
        if name in self._variables:
            raise GraphError(f"program '{self.name}' already has a variable '{name}'")
        key = self._next_key
        self._next_key += 1
        variable = Variable(
            self, key, name, None if dtype is None else element_type(dtype), None if shape is None else tuple(shape)
        )
        variable.persistable, variable.trainable, variable.data = persistable, trainable, data
        self._variables[name] = variable
        add_nodes(self.graph, (variable,))
        self.touch(variables_alone=True)
        return variable

    def fresh_variable(self, name: str, dtype: Any = None, shape: Iterable[Any] | None = None, **more: Any) -> Variable:
        """As :meth:`add_variable`, under ``unique(name)``: what passes make has names that the program decides."""
        return self.add_variable(self.unique(name), dtype, shape, **more)

    def declare(self, names: Iterable[str]) -> list[Variable]:
        """New variables, of which the name alone is known; the names are new as well."""
        made = [Variable(self, key, name, None, None) for key, name in enumerate(names, self._next_key)]
        self._next_key += len(made)
        self._variables |= {variable.name: variable for variable in made}
        add_nodes(self.graph, made)
        self.touch(variables_alone=True)
        return made

    def add_input(self, name: str, dtype: Any, shape: Iterable[Any] | None) -> Variable:
        """A new variable that the user feeds."""
        variable = self.add_variable(name, dtype, shape)
        variable.is_input = True
        self.inputs.append(variable)
        return variable

    def add_constant(self, name: str, array: Any) -> Variable:
        """A new variable with fixed content (a numpy array)."""
        try:
            dtype, shape = array.dtype, array.shape
        except AttributeError:
            raise ArgumentTypeError(
                f"add_constant: content of '{name}' is {shown(array)}; expected an array, as of np.asarray(...)"
            ) from None
        return self.fresh_variable(name, dtype, shape, data=array)

    def add_operator(
        self,
        type: str,
        inputs: Slots,
        outputs: Slots,
        *,
        attrs: dict[str, Any] | Attributes | None = None,
        domain: str = "",
        name: str = "",
        role: str | None = None,
        like: Operator | None = None,
    ) -> Operator:
        """A new operator that reads ``inputs`` and writes ``outputs``; marks and scope come from the context.

        ``role``: that of the context where it is left out, but what reads a part of the training step is of that part.
        ``like``: role, guard and scope are those of another operator, which may have been removed.
        """
        made = attrs if isinstance(attrs, Attributes) else Attributes(attrs)
        check_operator(self, type, inputs, outputs, role)
        op = self.add_read(type, list(inputs), list(outputs), made, domain)
        op.name = name
        if like is not None:
            op.role, op.guard, op.scope = like.role, like.guard, like.scope
            return op
        op.role = role or role_after(context.role(), inputs)
        op.guard = context.in_fp16_guard()
        op.scope = context.scope_name()
        return op

    def add_read(self, type: str, inputs: Slots, outputs: Slots, attrs: Attributes, domain: str) -> Operator:
        """:meth:`add_operator` of a file: the slots are new lists of variables of this program, made by nobody else."""
        op = Operator(self, self._next_key, type, domain, attrs)
        op.inputs, op.outputs = inputs, outputs
        self._next_key += 1
        add_operator(self.graph, op)
        self._operators[op.key] = op
        for nested in attrs.programs:
            nested.parent = op
        self.touch()
        return op

    def remove_operator(self, op: Operator) -> None:
        """Take the operator out; its outputs stay, without a producer. GraphError where it is not in this program."""
        if getattr(op, "program", None) is not self or op.key not in self._operators:
            raise not_held(op, self)
        for variable in op.outputs:
            if variable is not None:
                variable.producer, variable.producer_slot = None, -1
        del self._operators[op.key]
        remove_node(self.graph, op.key)
        self.touch()

    def remove_variable(self, variable: Variable) -> None:
        """Take out a variable that nothing reads or writes."""
        self.must_own(variable)
        if successors(self.graph)[variable.key] or predecessors(self.graph)[variable.key]:
            raise GraphError(f"variable '{variable.name}' is still in use and cannot be removed")
        del self._variables[variable.name]
        remove_node(self.graph, variable.key)
        self.inputs = [v for v in self.inputs if v is not variable]
        self.updates.pop(variable, None)
        self.touch(variables_alone=True)

    def rename_variable(self, variable: Variable, name: str) -> None:
        """Give a variable another, unused, name; its place in the order of variables stays."""
        self.must_own(variable)
        if name in self._variables:
            raise GraphError(f"program '{self.name}' already has a variable '{name}'")
        self._variables = {(name if v is variable else old): v for old, v in self._variables.items()}
        variable.name = name
        self.touch()

    def replace_uses(self, old: Variable, new: Variable, where: Callable[[Operator], bool] | None = None) -> None:
        """Let every reader of ``old`` (for which ``where`` holds) read ``new`` instead, nested graphs included."""
        self.must_own(old)
        self.must_own(new)
        for op, slot in old.readers:
            if where is not None and not where(op):
                continue
            if slot == CAPTURE:
                for nested in op.attrs.programs:
                    there = next((v for v in nested.variables if v.outer is new), None)
                    for inner in [v for v in nested.variables if v.outer is old]:
                        inner.outer, inner.dtype = new, new.dtype
                        if there is not None and inner not in nested.outputs:  # one stands for it
                            nested.replace_uses(inner, there)
                            nested.remove_variable(inner)
                self.graph.remove_edge(old.key, op.key, key=CAPTURE)
                op.add_capture(new)
            else:
                op.set_input(int(slot), new)

    def exchange(self, other: Graph) -> None:
        """Let each graph hold what the other held, and keep its name, its startup program and how it is treated."""
        self.graph, other.graph = other.graph, self.graph
        self.info, other.info = other.info, self.info
        self.inputs, other.inputs = other.inputs, self.inputs
        self.outputs, other.outputs = other.outputs, self.outputs
        self.updates, other.updates = other.updates, self.updates
        self.accumulation, other.accumulation = other.accumulation, self.accumulation
        self._variables, other._variables = other._variables, self._variables
        self._operators, other._operators = other._operators, self._operators
        self._next_key, other._next_key = other._next_key, self._next_key
        for graph in (self, other):
            for variable in graph.variables:
                variable.program = graph
            for op in graph.added:
                op.program = graph
            graph.touch()

    def set_update(self, state: Variable, new: Variable) -> None:
        """Let persistable ``state`` take the value of ``new`` when a step ends (a later call wins).

        What reads ``state`` has its value of before; ``updates[state]`` is the new one.
        """
        self.must_own(state)
        self.must_own(new)
        check_update(state, new)
        self.updates[state] = new
        self.touch()

    def mark_fp16(self, *patterns: str) -> int:
        """Mark operators whose name or scope matches a glob pattern (or, after ``re:``, a regular expression), as
        ``fp16_guard`` does for built programs.

        Returns their number; ArgumentError for no pattern, or one that matches nothing: then none is marked.
        """
        if not patterns:
            raise ArgumentError(f"mark_fp16 of program '{self.name}' takes at least one pattern, such as 'encoder/*'")
        marked = matching(self.walk(), patterns, "mark_fp16")
        for op in marked:
            op.guard = True
        self.touch()
        return len(marked)

    def new_variable(self, prefix: str, dtype: Any = None, shape: Iterable[Any] | None = None) -> Variable:
        """A temporary variable with a fresh name ``<prefix>.tmp_<n>``."""
        while True:
            name = unique_name.generate(f"{prefix}.tmp")
            if name not in self._variables:
                return self.add_variable(name, dtype, shape)

    def __repr__(self) -> str:
        held = f"{len(self._operators)} operators, {len(self._variables)} variables"
        return f"<{type(self).__name__} {self.name}: {held}>"
