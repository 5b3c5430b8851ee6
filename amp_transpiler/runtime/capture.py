"""Steps captured as CUDA graphs: recorded in the first run of a signature, launched as one from then on.

A graph holds addresses. So nothing that it reads or writes ever moves: feeds are copied into buffers of its own, states
are written where they lie (or copied back there from a second buffer), and a value that somebody else has put into the
scope is copied to where the old one was.

onnxruntime 1.31 records a graph within one call, in which it runs the step twice and then launches what it has
recorded; it does so for each number of a graph, and for each thread anew. So the states that the step writes in place
are put back after that call, and the run itself is a launch that follows. A graph's temporaries lie in memory that
other graphs of the session use too: one of them runs at a time.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from amp_transpiler.errors import ExecutionError, PlaceError
from amp_transpiler.ir.control import nested_graphs
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.opdef import exchange_of, traits_of
from amp_transpiler.passes.lowering.lowered import Lowered, Port
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.binding import Bound, Step, needs_plain
from amp_transpiler.runtime.budget import watched
from amp_transpiler.runtime.failures import failure, half_done
from amp_transpiler.runtime.locks import DEVICES
from amp_transpiler.runtime.scope import Scope

#: The run option that numbers a graph.
GRAPH_ID = "gpu_graph_id"
_PLAIN = "Run it with Executor(place), without cuda_graph"


def check_capturable(lowered: Lowered, program: str) -> None:
    """PlaceError, with what stands in the way, where a lowered program cannot be captured as a CUDA graph."""
    if needs_plain(lowered):
        _refuse(program, "it feeds or fetches what is no tensor of numbers")
    if lowered.decided:
        _refuse(program, f"data decide the sizes of '{lowered.decided[0]}'")
    constants = {tensor.name: tensor for tensor in lowered.model.graph.initializer}
    for node in lowered.model.graph.node:
        if any(nested_graphs(node)):
            _refuse(program, f"{node.op_type} '{node.name}' decides in the run what runs")
        if exchange_of(node.op_type, node.domain) is not None:
            _refuse(program, "its gradients are exchanged between ranks")
        draws = traits_of(node.op_type, node.domain).random
        if draws or (node.op_type == "Dropout" and _drops(node, constants)):
            _refuse(program, f"{node.op_type} '{node.name}' draws from a generator that a replay does not advance")
    states = {port.variable for port in lowered.states}
    made = [*lowered.fetches, *(port for port in lowered.updates if port.variable not in states)]
    for port in made:
        if static(port.shape) is None:
            _refuse(program, f"the shape of '{port.variable}' is known only after the run")


def _drops(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    training = node.input[2] if len(node.input) > 2 else ""
    known = constants.get(training)
    return bool(training) and (known is None or bool(onnx.numpy_helper.to_array(known)))


def _refuse(program: str, why: str) -> None:
    raise PlaceError(f"program '{program}' cannot be captured as a CUDA graph: {why}", _PLAIN)


class CapturedStep(Step):
    """A compiled program that is captured for each scope and thread that runs it, and replayed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._turn = threading.RLock()
        self._own = threading.local()  # onnxruntime keeps the graphs of a thread apart
        self._numbers = itertools.count(1)

    def run(self, scope: Scope, feeds: Mapping[str, Any], return_numpy: bool) -> list[Any]:
        """As of :class:`Step`; the first time, the step is captured."""
        graphs: weakref.WeakKeyDictionary[Scope, _Graph]
        graphs = self._own.__dict__.setdefault("graphs", weakref.WeakKeyDictionary())
        with self._turn:
            graph = graphs.get(scope)
            if graph is None or not graph.serves(scope):
                graph = graphs[scope] = _Graph(self, next(self._numbers))
            try:
                return graph.run(scope, feeds, return_numpy)
            except ExecutionError:
                del graphs[scope]
                raise


class _Graph(Bound):
    """What one captured graph is bound to, for one scope and one thread."""

    def __init__(self, step: CapturedStep, number: int) -> None:
        super().__init__(step)
        self.number, self.captured = number, False
        self.fed: dict[str, Any] = {}
        self.fetched: dict[str, Any] = {}
        for name in step.scalars:
            self.binding.bind_ortvalue_input(name, device_tensors.from_array(np.zeros((), np.float32), self.place))

    def serves(self, scope: Scope) -> bool:
        """Whether the scope's values are those of the graph, or can be copied there.

        A program that only reads is captured anew instead: others may be reading the old values, and it must not
        write to the scope.
        """
        values = scope.ort_values
        changed = [s for s in self.states.all if values.get(s.name) is not s.bound]
        if not self.targets:
            return not changed or not self.captured
        found = [(values.get(state.name), state.bound) for state in changed]
        return not self.captured or all(new is None or new.shape() == old.shape() for new, old in found)

    def run(self, scope: Scope, feeds: Mapping[str, Any], return_numpy: bool) -> list[Any]:
        """One run, wholly or not at all: states in place change only when the graph is launched."""
        if self.captured:
            self._take_in(scope)
        else:
            self.states.bind(scope, self.binding)
        for port in self.feeds:
            self._feed(port, feeds[port.variable])
        if not self.captured:
            self._bind_outputs()
            self._capture()
        with DEVICES.reading():
            self._execute(half_done([name for target in self.targets if target.in_place for name in target.names]))
        self._commit(scope)
        return self._results(return_numpy)

    def _take_in(self, scope: Scope) -> None:
        """Copy what others have put into the scope to where the graph reads it, and let the scope hold it there."""
        values, new = scope.ort_values, dict[str, Any]()
        for state in self.states.flat:
            flat = state.flat
            assert flat is not None
            if not flat.is_in(values):
                for part, view in zip(state.parts, flat.views, strict=True):
                    value = self.states.fitting(scope, part)
                    if value is not view:
                        device_tensors.write(view, value)
                new |= flat.held()
        for state in self.states.all:
            if values.get(state.name) is not state.bound:
                device_tensors.write(state.bound, self.states.fitting(scope, state))
                new[state.name] = state.bound
        if new:
            scope.hold(new)

    def _feed(self, port: Port, value: Any) -> None:
        if port.variable in self.fed:
            device_tensors.write(self.fed[port.variable], value)
            return
        array = isinstance(value, np.ndarray)
        held = device_tensors.from_array(value, self.place) if array else device_tensors.copy_to(value, self.place)
        self.fed[port.variable] = held
        self.binding.bind_ortvalue_input(port.tensor, held)

    def _bind_outputs(self) -> None:
        for target in self.targets:
            if target.in_place and target.state is not None:
                target.value = target.state.bound
            else:
                target.spare = self.buffer(target)  # of a known shape, as check_capturable found
                target.value = target.spare.whole if target.port.segments else target.spare
            self.binding.bind_ortvalue_output(target.port.tensor, target.value)
        for port, made in self.fetches:
            if made is None:
                shape = static(port.shape)
                assert shape is not None
                self.fetched[port.tensor] = device_tensors.empty(shape, port.dtype, self.place)
                self.binding.bind_ortvalue_output(port.tensor, self.fetched[port.tensor])

    def _capture(self) -> None:
        kept = [(t.value, device_tensors.to_array(t.value)) for t in self.targets if t.in_place]
        try:
            with DEVICES.writing():  # CUDA gives up what it records where another thread asks it for memory meanwhile
                self._execute(f". It was to be captured as a CUDA graph; nothing has changed. {_PLAIN}")
        finally:
            for value, array in kept:
                device_tensors.write(value, array)
        self.captured = True

    def _execute(self, then: str) -> None:
        with watched(f"program '{self.program}'") as options:
            options = options or ort.RunOptions()
            options.add_run_config_entry(GRAPH_ID, str(self.number))
            try:
                self.session.run_with_iobinding(self.binding, options)
            except Exception as error:  # onnxruntime's errors have no common base class
                what = f"onnxruntime failed while it ran program '{self.program}'"
                raise ExecutionError(f"{what}: {failure(error)}{then}") from None

    def _commit(self, scope: Scope) -> None:
        """Bring new values to where the graph reads them, or to the scope."""
        new: dict[str, Any] = {}
        for target in self.targets:
            if target.state is None:
                new |= target.spare.held() if target.port.segments else {target.port.variable: target.value}
            elif not target.in_place:
                target.state.bound.update_inplace(target.value)
        new |= {name: device_tensors.copy_to(target.value, self.place) for name, target in self.copies}
        if any(scope.ort_values.get(name) is not value for name, value in new.items()):
            scope.hold(new)

    def _results(self, return_numpy: bool) -> list[Any]:
        made = [self.fetched[port.tensor] if target is None else target.value for port, target in self.fetches]
        if return_numpy:
            return [device_tensors.to_array(value) for value in made]
        return [device_tensors.copy_to(value, self.place) for value in made]
