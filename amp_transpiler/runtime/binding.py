"""One compiled program bound to its state: what one run does between the feeds and the fetches.

States are bound from the scope without copies. An update is bound in place, to the very buffer of its state, where
:mod:`.in_place` proves that safe; otherwise two buffers take turns, and the scope changes only when the run is over.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from ..errors import ExecutionError, ScopeError
from ..ir.types import HALF, numpy_dtype
from ..passes.lowered import Lowered, Port, static
from . import tensors
from .in_place import refusals
from .place import Place
from .scope import Scope, on_place
from .session import plain_message

_NEVER = object()


class _State:
    """A state input: the value bound now, and the one last found to fit."""

    def __init__(self, port: Port) -> None:
        self.port, self.name, self.tensor = port, port.variable, port.tensor
        self.bound: Any = _NEVER
        self.checked: Any = _NEVER


class _States:
    """The states of one program on one place."""

    def __init__(self, ports: Sequence[Port], place: Place, program: str, startup: str) -> None:
        self.place, self.program, self.startup = place, program, startup
        self.all = [_State(port) for port in ports]

    def bind(self, scope: Scope, binding: Any) -> None:
        """Bind every state whose value is another than the one bound."""
        values = scope._values
        for state in self.all:
            value = values.get(state.name)
            if value is not state.bound:
                if value is not state.checked:
                    value = self.admit(scope, state)
                binding.bind_ortvalue_input(state.tensor, value)
                state.bound = state.checked = value

    def admit(self, scope: Scope, state: _State) -> Any:
        """The state's value on this place, found to fit; ScopeError where it is missing or does not."""
        value = scope._values.get(state.name)
        if value is None:
            raise ScopeError(self._missing(scope, state))
        found, wanted = tensors.dtype_of(value), state.port.dtype
        if found != wanted:
            raise ScopeError(type_message(state.name, self.program, found, wanted))
        shape = state.port.shape
        if shape is not None and not fits(value.shape(), shape):
            raise ScopeError(
                f"variable '{state.name}' has shape {list(value.shape())} in the scope; program '{self.program}' "
                f"declares {list(shape)}. Programs that share a scope must give different variables different names"
            )
        return on_place(scope, state.name, self.place)

    def _missing(self, scope: Scope, state: _State) -> str:
        count = sum(s.name not in scope._values for s in self.all)
        more = f" (and {count - 1} more of its variables)" if count > 1 else ""
        startup = f"startup program '{self.startup}'" if self.startup else "startup program"
        return (
            f"variable '{state.name}'{more} of program '{self.program}' is not in the scope; run its {startup} first, "
            "into this scope"
        )


class _Update:
    """An update output. ``refusal`` says why it is not in place ("" where it is); ``spare`` is the second buffer."""

    def __init__(self, port: Port, state: _State | None) -> None:
        self.port, self.name, self.tensor, self.state = port, port.variable, port.tensor, state
        self.refusal = "" if state is not None else "the program does not read it"
        self.bound: Any = None
        self.spare: Any = None
        self.target: Any = None


class Step:
    """A session with its bindings. ``run`` is one run; results come in the order of ``lowered.fetches``."""

    def __init__(self, session: Any, graph: onnx.GraphProto | None, lowered: Lowered, place: Place, program: str,
                 startup: str) -> None:  # fmt: skip
        self.session, self.place, self.program = session, place, program
        self.binding = session.io_binding()
        self.lock = threading.RLock()  # Ctrl-C may come just before it is released: the thread must not wait for itself
        self.feeds = lowered.feeds
        self.states = _States(lowered.states, place, program, startup)
        by_name = {state.name: state for state in self.states.all}
        self.updates: list[_Update] = []
        self.copies: list[tuple[str, _Update]] = []  # states that take the value of another state's update
        by_tensor: dict[str, _Update] = {}
        for port in lowered.updates:
            if port.tensor in by_tensor:
                self.copies.append((port.variable, by_tensor[port.tensor]))
            else:
                by_tensor[port.tensor] = _Update(port, by_name.get(port.variable))
                self.updates.append(by_tensor[port.tensor])
        self.fetches = [(port, by_tensor.get(port.tensor)) for port in lowered.fetches]
        self.order: dict[str, int] = {}  # outputs as bound first, which is the order onnxruntime gives them in
        self._prove(graph)
        for name in lowered.scalars:
            self.binding.bind_ortvalue_input(name, tensors.from_array(np.zeros((), np.float32), place))

    def _prove(self, graph: onnx.GraphProto | None) -> None:
        pairs = [u for u in self.updates if u.state is not None]
        if graph is None:
            for update in pairs:
                update.refusal = "the graph that the session runs could not be read"
            return
        found = refusals(graph, [(u.state.tensor, u.tensor) for u in pairs if u.state is not None])
        for update, refusal in zip(pairs, found, strict=True):
            update.refusal = refusal

    # -- one run --------------------------------------------------------------------------------------
    def run(self, scope: Scope, feeds: Mapping[str, Any], return_numpy: bool) -> list[Any]:
        """Run once. ScopeError where the scope lacks a state or holds another type or shape; then nothing has run."""
        with self.lock:
            self.states.bind(scope, self.binding)
            for port in self.feeds:
                value = feeds[port.variable]
                if isinstance(value, np.ndarray):
                    value = tensors.alias(value, port.dtype)
                self.binding.bind_ortvalue_input(port.tensor, value)
            self._bind_updates(scope)
            results = [
                None if update is not None else self._bind_fetch(port, return_numpy) for port, update in self.fetches
            ]
            if self.updates:
                with _Uninterrupted():
                    self._execute()
                    self._commit(scope)
            else:
                self._execute()
            return self._results(results, return_numpy)

    def _execute(self) -> None:
        try:
            if self.place.kind == "cuda":
                self.binding.synchronize_inputs()
            self.session.run_with_iobinding(self.binding)
            if self.place.kind == "cuda":
                self.binding.synchronize_outputs()
        except Exception as error:  # onnxruntime's errors have no common base class
            self._forget_bindings()
            raise ExecutionError(
                f"onnxruntime failed while it ran program '{self.program}': {_failure(error)}{self._half_done()}"
            ) from None

    def _half_done(self) -> str:
        names = [update.name for update in self.updates if not update.refusal]
        if not names:
            return ""
        some = ", ".join(f"'{name}'" for name in names[:3]) + (" …" if len(names) > 3 else "")
        return f". Variables that are updated in place may have been updated before it failed: {some}"

    def _forget_bindings(self) -> None:
        for state in self.states.all:
            state.bound = _NEVER
        for update in self.updates:
            update.bound = None

    # -- updates --------------------------------------------------------------------------------------
    def _bind_updates(self, scope: Scope) -> None:
        for update in self.updates:
            if not update.refusal and update.state is not None:
                update.target = update.state.bound
                if update.target is not update.bound:
                    self._bind_output(update.tensor, update.target)
                    update.bound = update.target
                continue
            if update.spare is None:
                update.spare = self._buffer(update)
            update.target = update.spare
            self._bind_output(update.tensor, update.target)

    def _buffer(self, update: _Update) -> Any:
        """A buffer for the new value; None where its shape is known only after the run."""
        if update.state is not None:
            return tensors.empty(update.state.bound.shape(), update.port.dtype, self.place)
        shape = static(update.port.shape)
        return None if shape is None else tensors.empty(shape, update.port.dtype, self.place)

    def _commit(self, scope: Scope) -> None:
        """The step is done: let the scope hold the new values."""
        made = None
        for update in self.updates:
            if not update.refusal:
                continue
            if update.target is None:
                made = made or self.binding.get_outputs()
                update.target = tensors.copy_to(made[self.order[update.tensor]], self.place)
            update.spare = None
            if update.state is not None:
                update.spare, update.state.checked = update.state.bound, update.target
            scope._values[update.name] = update.target
        for name, update in self.copies:
            scope._values[name] = tensors.copy_to(update.target, self.place)

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
        shape = static(port.shape) if self.updates else None
        if shape is not None and return_numpy:
            result = np.empty(shape, numpy_dtype(port.dtype))
            value = tensors.alias(result, port.dtype)
        elif shape is not None:
            result = value = tensors.empty(shape, port.dtype, self.place)
        self._bind_output(port.tensor, value, on_cpu=return_numpy)
        return result

    def _results(self, results: Sequence[Any], return_numpy: bool) -> list[Any]:
        made = None
        final = []
        for (port, update), result in zip(self.fetches, results, strict=True):
            if result is None:
                if update is not None:
                    value = update.target
                else:
                    made = made or self.binding.get_outputs()
                    value = made[self.order[port.tensor]]
                result = tensors.to_array(value) if return_numpy else tensors.copy_to(value, self.place)
            final.append(result)
        return final


class PlainStep:
    """A program whose feeds or fetches onnxruntime can bind to no memory (strings, sequences): every run copies."""

    def __init__(self, session: Any, lowered: Lowered, place: Place, program: str, startup: str) -> None:
        self.session, self.lowered, self.place, self.program = session, lowered, place, program
        self.states = _States(lowered.states, place, program, startup)
        self.updates: list[_Update] = [_Update(port, None) for port in lowered.updates]
        for update in self.updates:
            update.refusal = "the program feeds or fetches what is no tensor of numbers"

    def run(self, scope: Scope, feeds: Mapping[str, Any], return_numpy: bool) -> list[Any]:
        """Run once; results are arrays and Python objects, also without ``return_numpy``."""
        inputs = {p.tensor: feeds[p.variable] for p in self.lowered.feeds}
        inputs |= {s.tensor: tensors.to_array(self.states.admit(scope, s)) for s in self.states.all}
        inputs |= {name: np.zeros((), np.float32) for name in self.lowered.scalars}
        names = [port.tensor for port in (*self.lowered.fetches, *self.lowered.updates)]
        try:
            results = self.session.run(names, inputs)
        except Exception as error:
            raise ExecutionError(
                f"onnxruntime failed while it ran program '{self.program}': {_failure(error)}"
            ) from None
        count = len(self.lowered.fetches)
        for port, array in zip(self.lowered.updates, results[count:], strict=True):
            scope._values[port.variable] = tensors.from_array(array, self.place)
        return list(results[:count])


def needs_plain(lowered: Lowered) -> bool:
    """Whether a feed or fetch is no tensor that onnxruntime can bind to memory."""
    return any(port.dtype in ("", "string", "complex64", "complex128") for port in (*lowered.feeds, *lowered.fetches))


class _Uninterrupted:
    """Lets Ctrl-C take effect after the block, so that a step happens wholly or not at all.

    Python delivers the signal right after the session returns, that is, before the scope has the new values.
    """

    def __enter__(self) -> None:
        self.pending: tuple[Any, ...] | None = None
        self.handler: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self.handler = handler
                signal.signal(signal.SIGINT, self._later)

    def _later(self, *arguments: Any) -> None:
        self.pending = arguments

    def __exit__(self, *_: object) -> None:
        if self.handler is not None:
            signal.signal(signal.SIGINT, self.handler)
            if self.pending is not None:
                self.handler(*self.pending)


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
        return (f"{head}; call the optimizer's amp_init(place, scope) after the startup program, or "
                "cast_parameters_to_fp16(place, program)")  # fmt: skip
    if found in HALF:
        return (f"{head}; amp_init has cast it for a 16-bit program. Give this program to amp_init(place, scope, "
                "test_program=...), or run its startup program into a scope of its own")  # fmt: skip
    return f"{head}; set it with an array of that type, or run the startup program again"


def fits(shape: Sequence[int], declared: Sequence[Any]) -> bool:
    """Whether a shape agrees with a declared one, whose unknown sizes are names, None or -1."""
    return len(shape) == len(declared) and all(
        not isinstance(d, int) or d < 0 or d == s for s, d in zip(shape, declared, strict=True)
    )
