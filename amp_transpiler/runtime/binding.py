"""One compiled program bound to its state: what one run does between the feeds and the fetches.

States are bound from the scope without copies. An update is bound in place, to the very buffer of its state, where
:mod:`.in_place` proves that safe; otherwise two buffers take turns, and the scope changes only when the run is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from amp_transpiler.errors import DistributedError, ExecutionError, FeedError
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.lists import place_traits
from amp_transpiler.ops.training.remaining import REMAINING
from amp_transpiler.passes.lowering.exchanges import has_exchanges
from amp_transpiler.passes.lowering.in_place import inputs_within, refusals
from amp_transpiler.passes.lowering.lowered import Lowered, Port
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.budget import watched
from amp_transpiler.runtime.chain import Chain
from amp_transpiler.runtime.collective.current import engine_on, own_rank, several
from amp_transpiler.runtime.failures import by_data, failure, half_done
from amp_transpiler.runtime.flat_values import empty_flat, flat_over
from amp_transpiler.runtime.held import as_declared, as_held
from amp_transpiler.runtime.providers import alone, in_turn, on_device
from amp_transpiler.runtime.scope import Scope
from amp_transpiler.runtime.shards import Sent
from amp_transpiler.runtime.states import NEVER, State, States

#: Element types of what onnxruntime binds to no memory; "" of what is no tensor.
UNBOUND = frozenset({"", "string", "complex64", "complex128"})


@dataclass
class Update:
    """An update output. ``refusal`` says why it is not in place ("" where it is)."""

    port: Port
    refusal: str

    @property
    def names(self) -> tuple[str, ...]:
        """The variables that it updates."""
        return tuple(segment.variable for segment in self.port.segments) or (self.port.variable,)


class Step:
    """A compiled program. ``run`` is one run; results come in the order of ``lowered.fetches``.

    A session runs in several threads at once; what is bound for a run does not. So each run takes a set of bindings
    that nobody uses, and leaves it to the next; there are as many as runs that went on at the same time, of this step
    or of one for other sizes.
    """

    def __init__(
        self, session: Any, graph: onnx.GraphProto | None, lowered: Lowered, place: Place, program: str, startup: str
    ) -> None:
        self.session, self.place, self.program, self.startup = session, place, program, startup
        # Ports alone: the rest of ``lowered`` would keep the program alive.
        self.feeds, self.states, self.fetches = lowered.feeds, lowered.states, lowered.fetches
        self.scalars, self.decided = lowered.scalars, tuple(lowered.decided[:1])
        #: What other ranks update, and send here.
        self.sent: Sent | None = None
        self.sizes: Mapping[str, Any] = {}  # what inputs of a session hold that serves several sizes
        self.updates: list[Update] = []
        self.copies: list[tuple[str, str]] = []  # states that take the value of another state's update, and its tensor
        by_tensor: set[str] = set()
        for port in lowered.updates:
            if port.tensor in by_tensor:
                self.copies.append((port.variable, port.tensor))
            else:
                by_tensor.add(port.tensor)
                self.updates.append(Update(port, "the program does not read it"))
        self._prove(graph)
        self.idle: list[_Bindings] = []

    def _prove(self, graph: onnx.GraphProto | None) -> None:
        states = {port.variable: port.tensor for port in self.states}
        read = [update for update in self.updates if update.port.variable in states]
        if not place_traits(self.place.kind).in_place:
            found = [f"a kernel on {self.place!r} cannot write the buffer that it reads"] * len(read)
        elif graph is None:
            found = ["the graph that the session runs could not be read"] * len(read)
        else:
            pairs = [(states[update.port.variable], update.port.tensor) for update in read]
            ends = self.session.ends if isinstance(self.session, Chain) else ()
            found = refusals(graph, pairs, inputs_within(self.states), ends)
        for update, refusal in zip(read, found, strict=True):
            update.refusal = refusal

    def resized(self, lowered: Lowered, sizes: Mapping[str, np.ndarray]) -> Step:
        """The step for what was lowered for other sizes, with the same session; ``sizes`` are fed to it besides.

        Both use the same bindings, so that a step for one more size takes little memory.
        """
        ports = {port.tensor: port for port in reversed(lowered.updates)}  # the first of a tensor, as above
        twin = copy(self)
        twin.feeds, twin.fetches = lowered.feeds, lowered.fetches
        twin.sizes = {name: device_tensors.from_array(array, self.place) for name, array in sizes.items()}
        if any(update.port != ports[update.port.tensor] for update in self.updates):
            twin.updates = [replace(update, port=ports[update.port.tensor]) for update in self.updates]
        return twin

    def run(self, scope: Scope, feeds: Mapping[str, Any], return_numpy: bool) -> list[Any]:
        """Run once. ScopeError where the scope lacks a state or holds another type or shape; then nothing has run.

        The caller sees to it that nobody writes to the scope meanwhile and, for a program with updates, that nobody
        reads it.
        """
        with alone(self.place):  # binding copies as well
            try:
                bindings = self.idle.pop()
            except IndexError:
                bindings = _Bindings(self)
            try:
                bindings.serve(self)
                return bindings.run(scope, feeds, return_numpy)
            finally:
                self.idle.append(bindings)


class _Target:
    """Where an update goes. ``spare`` is the second buffer of one that is not in place."""

    def __init__(self, update: Update, state: State | None) -> None:
        self.port, self.names, self.state = update.port, update.names, state
        self.in_place = not update.refusal
        self.bound: Any = None
        self.spare: Any = None
        self.value: Any = None


class Bound:
    """What is bound to the session of a step: its states, where its updates go, and what it fetches."""

    def __init__(self, step: Step) -> None:
        # Before the session, so that it dies first: what it holds on a device is the session's to free.
        self.binding = step.session.io_binding()
        # Not the step itself: a circle would keep a session that was dropped until the collector comes.
        self.session, self.place, self.program = step.session, step.place, step.program
        self.states = States(step.states, step.place, step.program, step.startup)
        by_name = {state.name: state for state in (*self.states.flat, *self.states.all)}
        self.targets = [_Target(update, by_name.get(update.port.variable)) for update in step.updates]
        self.of_tensor = {target.port.tensor: target for target in self.targets}
        self.copies = [(name, self.of_tensor[tensor]) for name, tensor in step.copies]
        self.sizes: Mapping[str, Any] | None = None
        self.serve(step)

    def serve(self, step: Step) -> None:
        """Take from one of the steps that share a session what is its own."""
        if step.sizes is self.sizes:
            return
        self.feeds = step.feeds
        self.fetches = [(port, self.of_tensor.get(port.tensor)) for port in step.fetches]
        for target, update in zip(self.targets, step.updates, strict=True):
            target.port = update.port
        for name, value in step.sizes.items():
            self.binding.bind_ortvalue_input(name, value)
        self.sizes = step.sizes

    def buffer(self, target: _Target) -> Any:
        """A buffer for the new value; None where its shape is known only after the run."""
        if target.port.segments:
            return empty_flat(target.port, self.place)
        shape = static(target.port.shape) if target.state is None else target.state.bound.shape()
        return None if shape is None else device_tensors.empty(shape, target.port.dtype, self.place)


class _Bindings(Bound):
    """What one run at a time binds to the session of a step."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.memory, self.on_device = place_traits(step.place.kind).memory, on_device(step.place)
        self.sent, self.decided = step.sent, step.decided
        self.order: dict[str, int] = {}  # outputs as bound first, which is the order onnxruntime gives them in
        for name, array in scalar_values(step.scalars, step.place).items():
            self.binding.bind_ortvalue_input(name, device_tensors.from_array(array, self.place))

    def run(self, scope: Scope, feeds: Mapping[str, Any], return_numpy: bool) -> list[Any]:
        self.states.bind(scope, self.binding)
        fed = [as_held(port, feeds[port.variable], self.place, self.program) for port in self.feeds]
        for port, value in zip(self.feeds, fed, strict=True):
            if isinstance(value, np.ndarray):
                value = device_tensors.alias(value, port.dtype)  # whose memory ``fed`` keeps
            elif not self.on_device and value.device_name() != "cpu":  # no session of the host copies from there
                value = device_tensors.copy_to(value, self.place)
            self.binding.bind_ortvalue_input(port.tensor, value)
        self._bind_targets()
        results = [
            None if target is not None else self._bind_fetch(port, return_numpy) for port, target in self.fetches
        ]
        self._execute()
        self._commit(scope)
        self._exchange(scope)
        return self._results(results, return_numpy)

    def _execute(self) -> None:
        with watched(f"program '{self.program}'") as options:
            try:
                if self.on_device:
                    with in_turn(self.place):
                        self.binding.synchronize_inputs()
                        self.session.run_with_iobinding(self.binding, options)
                        self.binding.synchronize_outputs()
                else:
                    self.session.run_with_iobinding(self.binding, options)
            except (DistributedError, FeedError):  # found before anything was updated
                self._forget()
                raise
            except Exception as error:  # onnxruntime's errors have no common base class
                self._forget()
                names = [name for target in self.targets if target.in_place for name in target.names]
                raise ExecutionError(
                    f"onnxruntime failed while it ran program '{self.program}': {failure(error)}{by_data(self.decided)}"
                    f"{half_done(names)}"
                ) from None

    def _forget(self) -> None:
        for state in (*self.states.flat, *self.states.all):
            state.bound = NEVER
        for target in self.targets:
            target.bound = None

    def _exchange(self, scope: Scope) -> None:
        """Take the parameters that other ranks have updated. What the step exchanged is known then."""
        rank = several()
        journal = self.binding.journal if isinstance(self.session, Chain) else None
        if rank is None or journal is None:
            return
        if self.sent is not None:
            self.sent.exchange(rank.on(self.place), scope, journal)
        journal.close(rank)

    # -- updates --------------------------------------------------------------------------------------
    def _bind_targets(self) -> None:
        for target in self.targets:
            if target.in_place and target.state is not None:
                target.value = target.state.bound
                if target.value is not target.bound:
                    self._bind_output(target.port.tensor, target.value)
                    target.bound = target.value
                continue
            if target.spare is None:
                target.spare = self.buffer(target)
            target.value = target.spare
            value = target.value.whole if target.port.segments else target.value
            self._bind_output(target.port.tensor, value)

    def _commit(self, scope: Scope) -> None:
        """The step is done: let the scope hold the new values."""
        made = None
        new: dict[str, Any] = {}
        for target in self.targets:
            if target.in_place:
                continue
            if target.value is None:
                made = made or self.binding.get_outputs()
                target.value = device_tensors.copy_to(made[self.order[target.port.tensor]], self.place)
            target.spare = None
            if target.port.segments and target.state is not None:
                target.spare, target.state.flat = target.state.flat, target.value
                new |= target.value.held()
                continue
            if target.state is not None:
                target.spare, target.state.checked = target.state.bound, target.value
            new[target.port.variable] = target.value
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
            self.binding.bind_output(tensor, self.memory, self.place.device_id)

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
            final.append(as_declared(port, result, self.place, return_numpy))
        return final


class PlainStep:
    """A program whose feeds or fetches onnxruntime can bind to no memory (strings, sequences): every run copies."""

    def __init__(self, session: Any, lowered: Lowered, place: Place, program: str, startup: str) -> None:
        if has_exchanges(lowered.model):
            raise ExecutionError(
                f"program '{program}' is trained by several ranks, and feeds or fetches what is no tensor of numbers; "
                "leave that out of the training program"
            )
        given = (port.variable for port in (*lowered.fetches, *lowered.updates) if port.dtype == "bfloat16")
        if (rounded := next(given, None)) is not None:
            raise ExecutionError(
                f"program '{program}': '{rounded}' is bfloat16, which onnxruntime does not hand out beside feeds and "
                "fetches that are sequences, strings or complex numbers; fetch it without them, or cast it to float32"
            )
        self.session, self.place, self.program = session, place, program
        self.feeds, self.fetches, self.scalars = lowered.feeds, lowered.fetches, lowered.scalars
        self.states = States(lowered.states, place, program, startup)
        why = "the program feeds or fetches what is no tensor of numbers"
        self.updates = [Update(port, why) for port in lowered.updates]

    def run(self, scope: Scope, feeds: Mapping[str, Any], return_numpy: bool) -> list[Any]:
        """Run once; results are arrays and Python objects, also without ``return_numpy``."""
        held = ((p, as_held(p, feeds[p.variable], self.place, self.program)) for p in self.feeds)
        inputs = {p.tensor: device_tensors.fed(value) for p, value in held}
        inputs |= {s.tensor: self.states.gather(scope, s).whole for s in self.states.flat}
        inputs |= {s.tensor: self.states.admit(scope, s) for s in self.states.all}
        inputs |= scalar_values(self.scalars, self.place)
        names = [port.tensor for port in (*self.fetches, *(update.port for update in self.updates))]
        with watched(f"program '{self.program}'") as options:
            try:
                with in_turn(self.place):
                    results = self.session.run(names, inputs, options)
            except Exception as error:
                raise ExecutionError(
                    f"onnxruntime failed while it ran program '{self.program}': {failure(error)}"
                ) from None
        count = len(self.fetches)
        for update, array in zip(self.updates, results[count:], strict=True):
            port, value = update.port, device_tensors.from_array(array, self.place)
            scope.hold(flat_over(port, value).held() if port.segments else {port.variable: value})
        fetched = zip(self.fetches, results[:count], strict=True)
        return [as_declared(port, result, self.place, True) for port, result in fetched]


def scalar_values(names: Sequence[str], place: Place) -> dict[str, np.ndarray]:
    """What run-time scalars of these names hold in this process."""
    return {name: np.array(_scalar_value(name.removeprefix("@"), place), np.float32) for name in names}


def _scalar_value(what: str, place: Place) -> float:
    if what.startswith(REMAINING):
        engine = engine_on(place)
        return 1.0 if engine is None else engine.remaining_factor("float16", what.removeprefix(REMAINING))
    return own_rank() if what == "rank" else 0.0


def needs_plain(lowered: Lowered) -> bool:
    """Whether a feed or fetch is no tensor that onnxruntime can bind to memory."""
    return any(port.dtype in UNBOUND for port in (*lowered.feeds, *lowered.fetches))
