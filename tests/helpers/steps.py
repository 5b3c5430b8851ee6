"""Runs a program step by step with plain onnxruntime sessions; state lies in a dict of numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.program import Program
from tests.helpers.ports import fed, taken
from tests.helpers.sessions import session

Array = np.ndarray[Any, Any]


class Steps:
    """``Steps(program)(feeds, fetches)`` runs one step on CPU and carries ``self.state`` on."""

    def __init__(self, program: Program, startup: Program | None = None, level: str = "BASIC") -> None:
        self.program = program
        self.level = level
        self.state: dict[str, Array] = {}
        self._sessions: dict[tuple[str, ...], Any] = {}
        if startup is not None:
            first = Steps(startup, level=level)
            first({}, [])
            self.state = first.state

    def __call__(self, feeds: dict[str, Array], fetches: list[Variable]) -> list[Array]:
        key = tuple(v.name for v in fetches)
        if key not in self._sessions:
            lowered = lower(self.program, "cpu", {n: a.shape for n, a in feeds.items()}, fetches)
            self._sessions[key] = (lowered, session(lowered.model, self.level_name))
        lowered, running = self._sessions[key]
        values = {p.tensor: feeds[p.variable] for p in lowered.feeds}
        held = fed(lowered.states, self.state.__getitem__)
        values |= {p.tensor: held[p.tensor].astype(numpy_dtype(p.dtype), copy=False) for p in lowered.states}
        values |= {name: np.zeros((), np.float32) for name in lowered.scalars}
        names = [p.tensor for p in [*lowered.fetches, *lowered.updates]]
        results = dict(zip(names, running.run(names, values), strict=True))
        self.state |= taken(lowered.updates, results)
        fetched = {p.variable: results[p.tensor] for p in lowered.fetches}
        return [fetched[v.name] for v in fetches]

    @property
    def level_name(self) -> str:
        return {"OFF": "DISABLE_ALL", "BASIC": "ENABLE_BASIC", "ALL": "ENABLE_ALL"}[self.level]


def feed(program: Program, name: str, dtype: str, shape: tuple[int, ...]) -> Variable:
    """A variable that the test feeds."""
    return program.add_input(name, dtype, shape)


def state(program: Program, name: str, dtype: str, shape: tuple[int, ...]) -> Variable:
    """A persistable variable."""
    return program.add_variable(name, dtype, shape, persistable=True)
