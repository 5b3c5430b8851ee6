"""Where tensors go in a program as it was written: past inserted casts, into nested graphs and out of them.

Also what every such question needs: which numbers constants hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from amp_transpiler.ir.control import crossings
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.tensors import as_array, tensor_type
from amp_transpiler.ir.traits import Traits
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.names import source
from amp_transpiler.passes.view.reached import reached
from amp_transpiler.passes.view.typing import is_float

#: How far a constant is followed back through operators that move it.
_HOPS = 8

Step = tuple[Operator, str, list[Variable | None]]


class Flow:
    """Every floating-point operand of a program, nested graphs included, and who reads it.

    ``steps``: operators in program order, without inserted casts, each with its name and its operands. ``kinds``: their
    traits by name. ``inputs``:
    operands by slot as they were written (None for what is no floating-point tensor). ``uses``: their readers.
    ``results``: what the result of a nested graph becomes outside; ``entries``: what an operand of a Loop or Scan
    becomes inside; ``loops``: what a state becomes in the next iteration; ``borders``: these three. ``fetched``:
    outputs and state updates of the whole program.
    """

    def __init__(self, program: Graph) -> None:
        self.steps: list[Step] = []
        self.inputs: dict[Operator, list[Variable | None]] = {}
        self.uses: dict[Variable, list[tuple[Operator, int]]] = {}
        self.results: dict[Variable, list[Variable]] = {}
        self.entries: dict[Variable, list[Variable]] = {}
        self.loops: dict[Variable, list[Variable]] = {}
        self.borders = self.results, self.entries, self.loops
        self.kinds: dict[str, Traits] = {}
        self.fetched = {source(v) for v in (*program.outputs, *program.updates.values())}
        self._numbers: dict[Variable, float | None] = {}
        for op in program.walk():
            if op.inserted:
                continue
            self.inputs[op] = read = [source(v) if v is not None and v.dtype in FLOATS else None for v in op.inputs]
            name = op.full_type
            self.steps.append((op, name, read))
            if name not in self.kinds:
                self.kinds[name] = traits_of(op)
            for slot, variable in enumerate(read):
                if variable is not None:
                    if variable in self.uses:
                        self.uses[variable].append((op, slot))
                    else:
                        self.uses[variable] = [(op, slot)]
            if op.attrs.programs:
                into = crossings(op)
                _join(self.entries, into.entries)
                _join(self.results, into.results)
                _join(self.loops, into.turns)

    def number(self, variable: Variable | None) -> float | None:
        """The number that a constant of one element holds, moved about or not; None for anything else."""
        if variable is None:
            return None
        variable = source(variable)
        if variable not in self._numbers:
            self._numbers[variable] = self._read(variable)
        return self._numbers[variable]

    def of(self, *names: str, having: Callable[[Traits], bool] = lambda kind: False) -> list[Step]:
        """The steps of operators of these types, and of those that have such traits."""
        wanted = {name for name, kind in self.kinds.items() if name in names or having(kind)}
        return [step for step in self.steps if step[1] in wanted] if wanted else []

    def readers(self, variables: Iterable[Variable]) -> list[Operator]:
        """The operators that read these tensors, once for each slot."""
        return [op for variable in variables for op, _ in self.uses.get(variable, ())]

    def before(self, ends: Iterable[Variable | None], passes: Callable[[Operator, int], bool]) -> frozenset[Variable]:
        """These tensors, and those of which operators make them, as their first result, in slots that ``passes``."""

        def made_of(made: Variable) -> Iterable[Variable | None]:
            op = made.producer
            read = self.inputs.get(op, ()) if op is not None and op.output(0) is made else ()
            return [v for slot, v in enumerate(read) if op is not None and passes(op, slot)]

        return frozenset(reached((v for v in ends if v is not None), made_of))

    def beyond(self, variable: Variable) -> list[Variable]:
        """What the tensor becomes outside of a nested graph, and inside of others."""
        return [*self.results.get(variable, ()), *self.entries.get(variable, ())]

    def integers(self, variable: Variable | None) -> list[int] | None:
        """The content of a constant of a few integers; None for anything else."""
        data = None if variable is None else constants.constant_content(source(variable))
        if data is None:
            return None
        dtype, shape = tensor_type(data)
        return as_array(data).reshape(-1).tolist() if dtype in ("int32", "int64") and math.prod(shape) < 64 else None

    def _read(self, variable: Variable) -> float | None:
        for _ in range(_HOPS):
            data = constants.constant_content(variable)
            if data is not None:
                dtype, shape = tensor_type(data)
                return float(as_array(data).reshape(-1)[0]) if math.prod(shape) == 1 and dtype != "string" else None
            op = variable.producer
            if op is None or traits_of(op).moves != (0,) or op.inputs[0] is None:
                return None
            variable = source(op.inputs[0])
        return None


def _join(edges: dict[Variable, list[Variable]], pairs: Iterable[tuple[Variable | None, Variable | None]]) -> None:
    for end, start in pairs:
        if end is not None and start is not None and is_float(start):
            edges.setdefault(source(end), []).append(start)
