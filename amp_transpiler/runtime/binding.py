"""One compiled program bound to its state: what one run does between the feeds and the fetches.

States are bound from the scope without copies. An update is bound in place, to the very buffer of its state, where
:mod:`.in_place` proves that safe; otherwise two buffers take turns, and the scope changes only when the run is over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from amp_transpiler.errors import ExecutionError, ScopeError
from amp_transpiler.ir.types import HALF, numpy_dtype
from amp_transpiler.passes.lowering.in_place import inputs_within, refusals
from amp_transpiler.passes.lowering.lowered import Lowered, Port, static
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.budget import watched
from amp_transpiler.runtime.flat_values import FlatValue, empty_flat, flat_from, flat_of, flat_over
from amp_transpiler.runtime.scope import Scope
from amp_transpiler.runtime.session import plain_message

_NEVER = object()


class _State:
    """A state input: the value bound now, and the one last found to fit."""

    def __init__(self, port: Port) -> None:
        self.port, self.name, self.tensor = port, port.variable, port.tensor
        self.bound: Any = _NEVER
        self.checked: Any = _NEVER
        self.parts = [_State(Port(s.variable, port.tensor, port.dtype, s.shape)) for s in port.segments]
        self.flat: FlatValue | None = None


class _States:
    """The states of one program on one place."""

    def __init__(self, ports: Sequence[Port], place: Place, program: str, startup: str) -> None:
        self.place, self.program, self.startup = place, program, startup
        states = [_State(port) for port in ports]
        self.flat = [state for state in states if state.parts]
        self.all = [state for state in states if not state.parts]

    def bind(self, scope: Scope, binding: Any) -> None:
        """Bind every state whose value is another than the one bound."""
        values = scope.ort_values
        for state in self.flat:  # first: the variables in them have inputs of their own too
            whole = self.gather(scope, state).whole
            if whole is not state.bound:
                binding.bind_ortvalue_input(state.tensor, whole)
                state.bound = whole
        for state in self.all:
            value = values.get(state.name)
            if value is not state.bound:
                if value is not state.checked:
                    value = self.admit(scope, state)
                binding.bind_ortvalue_input(state.tensor, value)
                state.bound = state.checked = value

    def gather(self, scope: Scope, state: _State) -> FlatValue:
        """The value of a flat state, of which the scope holds the views; ScopeError where a variable does not fit."""
        if state.flat is None or not state.flat.is_in(scope.ort_values):
            values = [self.admit(scope, part) for part in state.parts]
            state.flat = flat_of(state.port, values, self.place)
            if state.flat is None:
                state.flat = flat_from(state.port, values, self.place)
                scope.hold(state.flat.held())
        return state.flat

    def admit(self, scope: Scope, state: _State) -> Any:
        """The state's value on this place, found to fit; ScopeError where it is missing or does not."""
        value = scope.ort_values.get(state.name)
        if value is None:
            raise ScopeError(self._missing(scope, state))
        found, wanted = device_tensors.dtype_of(value), state.port.dtype
        if found != wanted:
            raise ScopeError(type_message(state.name, self.program, found, wanted))
        shape = state.port.shape
        if shape is not None and not fits(value.shape(), shape):
            raise ScopeError(
                f"variable '{state.name}' has shape {list(value.shape())} in the scope; program '{self.program}' "
                f"declares {list(shape)}. Programs that share a scope must give different variables different names"
            )
        return scope.ort_value_on(self.place, state.name)

    def _missing(self, scope: Scope, state: _State) -> str:
        names = {s.name for each in (*self.all, *self.flat) for s in each.parts or (each,)}
        count = len(names - scope.ort_values.keys())
        more = f" (and {count - 1} more of its variables)" if count > 1 else ""
        startup = f"startup program '{self.startup}'" if self.startup else "startup program"
        return (
            f"variable '{state.name}'{more} of program '{self.program}' is not in the scope; run its {startup} first, "
            "into this scope"
        )


@dataclass
class Update:
    """An update output. ``refusal`` says why it is not in place ("" where it is)."""

    port: Port
    name: str
    tensor: str
    refusal: str

    @property
    def names(self) -> tuple[str, ...]:
        """The variables that it updates."""
        return tuple(segment.variable for segment in self.port.segments) or (self.name,)


class Step:
    """A compiled program. ``run`` is one run; results come in the order of ``lowered.fetches``.

    A session runs in several threads at once; what is bound for a run does not. So each run takes a set of bindings
    that nobody uses, and leaves it to the next; there are as many as runs that went on at the same time.
    """

    def __init__(
        self, session: Any, graph: onnx.GraphProto | None, lowered: Lowered, place: Place, program: str, startup: str
    ) -> None:
        self.session, self.place, self.program, self.startup = session, place, program, startup
        # Ports alone: the rest of ``lowered`` would keep the program alive.
        self.feeds, self.states, self.fetches = lowered.feeds, lowered.states, lowered.fetches
        self.scalars = lowered.scalars
        self.updates: list[Update] = []
        self.copies: list[tuple[str, str]] = []  # states that take the value of another state's update, and its tensor
        by_tensor: set[str] = set()
        for port in lowered.updates:
            if port.tensor in by_tensor:
                self.copies.append((port.variable, port.tensor))
            else:
                by_tensor.add(port.tensor)
                self.updates.append(Update(port, port.variable, port.tensor, "the program does not read it"))
        self._prove(graph)
        self._idle: list[_Bindings] = []

    def _prove(self, graph: onnx.GraphProto | None) -> None:
        states = {port.variable: port.tensor for port in self.states}
        read = [update for update in self.updates if update.name in states]
        if graph is None:
            found = ["the graph that the session runs could not be read"] * len(read)
        else:
            pairs = [(states[update.name], update.tensor) for update in read]
            found = refusals(graph, pairs, inputs_within(self.states))
        for update, refusal in zip(read, found, strict=True):
            update.refusal = refusal

    def run(self, scope: Scope, feeds: Mapping[str, Any], return_numpy: bool) -> list[Any]:
        """Run once. ScopeError where the scope lacks a state or holds another type or shape; then nothing has run.

        The caller sees to it that nobody writes to the scope meanwhile and, for a program with updates, that nobody
        reads it.
        """
        try:
            bindings = self._idle.pop()
        except IndexError:
            bindings = _Bindings(self)
        try:
            return bindings.run(scope, feeds, return_numpy)
        finally:
            self._idle.append(bindings)


class _Target:
    """Where an update goes. ``spare`` is the second buffer of one that is not in place."""

    def __init__(self, update: Update, state: _State | None) -> None:
        self.port, self.name, self.tensor, self.state = update.port, update.name, update.tensor, state
        self.names = update.names
        self.in_place = not update.refusal
        self.bound: Any = None
        self.spare: Any = None
        self.value: Any = None


class _Bindings:
    """What one run at a time binds to the session of a step."""

    def __init__(self, step: Step) -> None:
        # Not the step itself: a circle would keep a session that was dropped until the collector comes.
        self.session, self.place, self.program = step.session, step.place, step.program
        self.binding = step.session.io_binding()
        self.feeds = step.feeds
        self.states = _States(step.states, step.place, step.program, step.startup)
        by_name = {state.name: state for state in (*self.states.flat, *self.states.all)}
        self.targets = [_Target(update, by_name.get(update.name)) for update in step.updates]
        by_tensor = {target.tensor: target for target in self.targets}
        self.copies = [(name, by_tensor[tensor]) for name, tensor in step.copies]
        self.fetches = [(port, by_tensor.get(port.tensor)) for port in step.fetches]
        self.order: dict[str, int] = {}  # outputs as bound first, which is the order onnxruntime gives them in
        for name in step.scalars:
            self.binding.bind_ortvalue_input(name, device_tensors.from_array(np.zeros((), np.float32), self.place))

    def run(self, scope: Scope, feeds: Mapping[str, Any], return_numpy: bool) -> list[Any]:
        self.states.bind(scope, self.binding)
        for port in self.feeds:
            value = feeds[port.variable]
            if isinstance(value, np.ndarray):
                value = device_tensors.alias(value, port.dtype)
            self.binding.bind_ortvalue_input(port.tensor, value)
        self._bind_targets()
        results = [
            None if target is not None else self._bind_fetch(port, return_numpy) for port, target in self.fetches
        ]
        self._execute()
        self._commit(scope)
        return self._results(results, return_numpy)

    def _execute(self) -> None:
        with watched(f"program '{self.program}'") as options:
            self._execute_within(options)

    def _execute_within(self, options: Any) -> None:
        try:
            if self.place.kind == "cuda":
                self.binding.synchronize_inputs()
            self.session.run_with_iobinding(self.binding, options)
            if self.place.kind == "cuda":
                self.binding.synchronize_outputs()
        except Exception as error:  # onnxruntime's errors have no common base class
            self._forget()
            raise ExecutionError(
                f"onnxruntime failed while it ran program '{self.program}': {_failure(error)}{self._half_done()}"
            ) from None

    def _half_done(self) -> str:
        names = [name for target in self.targets if target.in_place for name in target.names]
        if not names:
            return ""
        some = ", ".join(f"'{name}'" for name in names[:3]) + (" …" if len(names) > 3 else "")
        return f". Variables that are updated in place may have been updated before it failed: {some}"

    def _forget(self) -> None:
        for state in (*self.states.flat, *self.states.all):
            state.bound = _NEVER
        for target in self.targets:
            target.bound = None

    # -- updates --------------------------------------------------------------------------------------
    def _bind_targets(self) -> None:
        for target in self.targets:
            if target.in_place and target.state is not None:
                target.value = target.state.bound
                if target.value is not target.bound:
                    self._bind_output(target.tensor, target.value)
                    target.bound = target.value
                continue
            if target.spare is None:
                target.spare = self._buffer(target)
            target.value = target.spare
            value = target.value.whole if target.port.segments else target.value
            self._bind_output(target.tensor, value)

    def _buffer(self, target: _Target) -> Any:
        """A buffer for the new value; None where its shape is known only after the run."""
        if target.port.segments:
            return empty_flat(target.port, self.place)
        if target.state is not None:
            return device_tensors.empty(target.state.bound.shape(), target.port.dtype, self.place)
        shape = static(target.port.shape)
        return None if shape is None else device_tensors.empty(shape, target.port.dtype, self.place)

    def _commit(self, scope: Scope) -> None:
        """The step is done: let the scope hold the new values."""
        made = None
        new: dict[str, Any] = {}
        for target in self.targets:
            if target.in_place:
                continue
            if target.value is None:
                made = made or self.binding.get_outputs()
                target.value = device_tensors.copy_to(made[self.order[target.tensor]], self.place)
            target.spare = None
            if target.port.segments and target.state is not None:
                target.spare, target.state.flat = target.state.flat, target.value
                new |= target.value.held()
                continue
            if target.state is not None:
                target.spare, target.state.checked = target.state.bound, target.value
            new[target.name] = target.value
        new |= {name: device_tensors.copy_to(target.value, self.place) for name, target in self.copies}
        if new:  # a run that writes nothing must not wait for others that write nothing
            scope.hold(new)

    # -- fetches --------------------------------------------------------------------------------------
    def _bind_output(self, tensor: str, value: Any, on_cpu: bool = False) -> None:
        self.order.setdefault(tensor, len(self.order))
        if value is not None:
            self.binding.bind_ortvalue_output(tensor, value)
        elif on_cpu:
            self.binding.bind_output(tensor, "cpu", 0)
        else:
            self.binding.bind_output(tensor, self.place.kind, self.place.device_id)

    def _bind_fetch(self, port: Port, return_numpy: bool) -> Any:
        """Bind an output; its memory where the shape is known and asking for all outputs would be slow, else None."""
        result: Any = None
        value: Any = None
        shape = static(port.shape) if self.targets else None
        if shape is not None and return_numpy:
            result = np.empty(shape, numpy_dtype(port.dtype))
            value = device_tensors.alias(result, port.dtype)
        elif shape is not None:
            result = value = device_tensors.empty(shape, port.dtype, self.place)
        self._bind_output(port.tensor, value, on_cpu=return_numpy)
        return result

    def _results(self, results: Sequence[Any], return_numpy: bool) -> list[Any]:
        made = None
        final = []
        for (port, target), result in zip(self.fetches, results, strict=True):
            if result is None:
                if target is not None:
                    value = target.value
                else:
                    made = made or self.binding.get_outputs()
                    value = made[self.order[port.tensor]]
                result = device_tensors.to_array(value) if return_numpy else device_tensors.copy_to(value, self.place)
            final.append(result)
        return final


class PlainStep:
    """A program whose feeds or fetches onnxruntime can bind to no memory (strings, sequences): every run copies."""

    def __init__(self, session: Any, lowered: Lowered, place: Place, program: str, startup: str) -> None:
        self.session, self.place, self.program = session, place, program
        self.feeds, self.fetches, self.scalars = lowered.feeds, lowered.fetches, lowered.scalars
        self.states = _States(lowered.states, place, program, startup)
        why = "the program feeds or fetches what is no tensor of numbers"
        self.updates = [Update(port, port.variable, port.tensor, why) for port in lowered.updates]

    def run(self, scope: Scope, feeds: Mapping[str, Any], return_numpy: bool) -> list[Any]:
        """Run once; results are arrays and Python objects, also without ``return_numpy``."""
        inputs = {p.tensor: feeds[p.variable] for p in self.feeds}
        inputs |= {s.tensor: device_tensors.to_array(self.states.gather(scope, s).whole) for s in self.states.flat}
        inputs |= {s.tensor: device_tensors.to_array(self.states.admit(scope, s)) for s in self.states.all}
        inputs |= {name: np.zeros((), np.float32) for name in self.scalars}
        names = [port.tensor for port in (*self.fetches, *(update.port for update in self.updates))]
        with watched(f"program '{self.program}'") as options:
            try:
                results = self.session.run(names, inputs, options)
            except Exception as error:
                raise ExecutionError(
                    f"onnxruntime failed while it ran program '{self.program}': {_failure(error)}"
                ) from None
        count = len(self.fetches)
        if self.updates:
            for update, array in zip(self.updates, results[count:], strict=True):
                value = device_tensors.from_array(array, self.place)
                scope.hold(flat_over(update.port, value).held() if update.port.segments else {update.name: value})
        return list(results[:count])


def needs_plain(lowered: Lowered) -> bool:
    """Whether a feed or fetch is no tensor that onnxruntime can bind to memory."""
    return any(port.dtype in ("", "string", "complex64", "complex128") for port in (*lowered.feeds, *lowered.fetches))


def _failure(error: Exception) -> str:
    """onnxruntime's message, with what usually is behind it."""
    text = plain_message(error)
    if re.search(r"out of (data )?bounds|out of range", text, re.IGNORECASE):
        text = f"{text.rstrip('.')}. Probably a fed label or index is below 0 or not below the number of classes"
    return text


def type_message(name: str, program: str, found: str, wanted: str) -> str:
    """What to say of a variable that the scope holds in another element type than the program declares."""
    head = f"variable '{name}' is {found} in the scope, and program '{program}' declares {wanted}"
    if wanted in HALF:
        return (
            f"{head}; call the optimizer's amp_init(place, scope) after the startup program, or "
            "cast_parameters_to_fp16(place, program)"
        )
    if found in HALF:
        return (
            f"{head}; amp_init has cast it for a 16-bit program. Give this program to amp_init(place, scope, "
            "test_program=...), or run its startup program into a scope of its own"
        )
    return f"{head}; set it with an array of that type, or run the startup program again"


def fits(shape: Sequence[int], declared: Sequence[Any]) -> bool:
    """Whether a shape agrees with a declared one, whose unknown sizes are names, None or -1."""
    return len(shape) == len(declared) and all(
        not isinstance(d, int) or d < 0 or d == s for s, d in zip(shape, declared, strict=True)
    )
