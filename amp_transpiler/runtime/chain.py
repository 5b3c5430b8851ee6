"""Sessions of the parts of a model, one after the other, that are used as the one session of the whole.

Parts that are equal have one session, which runs several times in a step, each time with bindings of its own.

A tensor that a part gives to later ones has memory of its own for good where it is small: handing it on takes more time
than computing it. A large one is freed when the last part that reads it has run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from amp_transpiler.ir.infer import static, type_proto
from amp_transpiler.ir.types import NAMES
from amp_transpiler.passes.lowering.exchanges import Exchanged
from amp_transpiler.passes.lowering.parts import Parts, named_alike
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.buckets import Buckets
from amp_transpiler.runtime.collective.engine import Engine
from amp_transpiler.runtime.collective.journal import Journal
from amp_transpiler.runtime.collective.thread import Work
from amp_transpiler.runtime.providers import lies_on

#: Elements up to which a tensor keeps its memory between runs.
SMALL = 16384
#: The run option that leaves a run on the stream that its session was given.
_GOES_ON = ("disable_synchronize_execution_providers", "1")

#: What was sent and is not known to be there, by bucket, with its name.
Travelling = dict[int, list[tuple[str, Work[Any]]]]

#: Element type and sizes (None: not fixed) of a tensor.
Type = tuple[str, tuple[int | None, ...] | None]


#: Makes a session of a part, and gives the graph that it really runs (None: unknown).
Make = Callable[[onnx.ModelProto], tuple[Any, onnx.GraphProto | None]]


def chained(
    parts: Parts, make: Make, place: Place, exchanged: Sequence[Exchanged] = (), engine: Engine | None = None
) -> tuple[Chain | None, list[onnx.GraphProto | None]]:
    """The parts as one session, and the graph of each; None where a part gives another what is no tensor.

    Parts that are equal but for names have one session, made by ``make``: those of layers that are alike.
    ``exchanged``: what ranks exchange between parts, in the order in which it leaves; ``engine``: on whose stream the
    sessions compute.
    """
    types: dict[str, Type] = {}
    made: dict[bytes, tuple[Any, onnx.GraphProto | None]] = {}
    sessions, graphs, names = [], list[onnx.GraphProto | None](), list[dict[str, str]]()
    for number, inputs in enumerate(parts.inputs):
        part = parts.part(number, {name: type_proto(*types[name]) for name in inputs if name in types})
        names.append(named_alike(part))
        key = hashlib.sha256(part.SerializeToString(deterministic=True)).digest()
        if key not in made:
            made[key] = make(part)
        session, graph = made[key]
        sessions.append(session)
        graphs.append(graph)
        found = {output.name: output for output in session.get_outputs()}
        for name in parts.outputs[number]:
            output = found[names[-1][name]]
            if not output.type.startswith("tensor("):
                return None, graphs
            types[name] = _type(output, graph)
    return Chain(parts, sessions, names, types, place, exchanged, engine), graphs


def _type(output: Any, graph: onnx.GraphProto | None) -> Type:
    """The type that onnxruntime found for a session's output.

    It gives no sizes for a scalar and for what it knows no rank of: the graph that it runs tells these apart.
    """
    element = onnx.TensorProto.DataType.Value(output.type[len("tensor(") : -1].upper())
    sizes = tuple(d if isinstance(d, int) else None for d in output.shape)
    infos = () if graph is None else graph.output
    ranked = sizes or any(info.name == output.name and info.type.tensor_type.HasField("shape") for info in infos)
    return NAMES[element], sizes if ranked else None


class Chain:
    """Sessions of parts, with what of onnxruntime's InferenceSession a step asks for.

    ``ends``: the last node but one of each part in the one graph that they run together, where that is known.
    """

    ends: Sequence[int] = ()

    def __init__(
        self,
        parts: Parts,
        sessions: Sequence[Any],
        names: Sequence[Mapping[str, str]],
        types: Mapping[str, Type],
        place: Place,
        exchanged: Sequence[Exchanged],
        engine: Engine | None,
    ) -> None:
        self.sessions, self.exchanged, self.place = sessions, exchanged, place
        #: That on whose stream the sessions compute, where there is such a stream.
        self.engine = engine if engine is not None and engine.stream else None
        travel = {tensor.name for each in exchanged for tensor in (*each.sent, *each.received)}
        #: What the session of each part calls tensors.
        self.names = names
        self.inputs, self.outputs, self.last = parts.inputs, parts.outputs, parts.last
        results = {info.name for info in parts.model.graph.output}
        self.small = {
            name: (dtype, known)
            for name, (dtype, shape) in types.items()
            if name in self.last and name not in results and name not in travel
            if (known := static(shape)) is not None and math.prod(known) <= SMALL
        }

    def io_binding(self) -> Binding:
        """What is bound for one run at a time."""
        return Binding(self)

    def run_with_iobinding(self, binding: Binding, options: Any = None) -> None:
        """Run every part."""
        binding.run(options)


class Binding:
    """Inputs and outputs of a chain, with what of onnxruntime's IOBinding a step asks for."""

    def __init__(self, chain: Chain) -> None:
        self.sessions, self.names, self.last = chain.sessions, chain.names, chain.last
        self.place, self.engine = chain.place, chain.engine
        self.nothing = device_tensors.from_array(np.zeros((), np.float32), chain.place)
        self.parts = [session.io_binding() for session in chain.sessions]
        self.made_by = {name: part for part, names in enumerate(chain.outputs) for name in names}
        self.readers: dict[str, list[int]] = {}
        for part, names in enumerate(chain.inputs):
            for name in names:
                self.readers.setdefault(name, []).append(part)
        self.order: list[dict[str, int]] = [{} for _ in self.parts]  # outputs of a part as bound first
        self.bound: dict[str, Any] = {}  # outputs of the whole as bound first: the value, None for one still to be made
        self.results: dict[str, Any] = {}
        self.late: dict[str, tuple[Any, Any]] = {}  # outputs on the device, and the memory on the host that they go to
        for name, (dtype, shape) in chain.small.items():
            value = device_tensors.empty(shape, dtype, chain.place)
            self._bind_in_part(name, value)
            self.bind_ortvalue_input(name, value)
        #: That of the run before, where something travelled; whoever asked for the run closes it.
        self.journal: Journal | None = None
        self.buckets = Buckets(chain.exchanged, chain.place, chain.engine)
        for name, value in self.buckets.views.items():
            if name in self.made_by:
                self._bind_in_part(name, value)
            self.bind_ortvalue_input(name, value)
        #: The sends for which a part waits: those that it is the first one to read of.
        self.waits: list[list[int]] = [[] for _ in self.parts]
        first: dict[int, int] = {}
        for each in chain.exchanged:
            readers = [part for tensor in each.received for part in self.readers.get(tensor.name, ())]
            first[each.bucket] = min([first.get(each.bucket, len(self.parts) - 1), *readers])
        for bucket, part in first.items():
            self.waits[part].append(bucket)
        large = chain.last.keys() - chain.small.keys() - self.buckets.views.keys()
        self.given = [[name for name in names if name in large] for names in chain.inputs]
        self.passed = [[name for name in names if name in large] for names in chain.outputs]
        for name in large:
            self._bind_in_part(name, None)

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        """Bind an input of the whole. What several parts read is copied to the device once."""
        if len(self.readers.get(name, ())) > 1 and not lies_on(value, self.place):
            value = device_tensors.copy_to(value, self.place)
        for part in self.readers.get(name, ()):
            self.parts[part].bind_ortvalue_input(self.names[part][name], value)

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        """Bind the memory of an output of the whole.

        What goes to the host from a stream that goes on is copied at the end: a copy there would wait for the stream.
        """
        self.bound[name] = value
        kept, _ = self.late.pop(name, (None, None))
        if self.engine is not None and not lies_on(value, self.place):
            if kept is None or kept.shape() != value.shape():
                kept = device_tensors.empty(value.shape(), device_tensors.dtype_of(value), self.place)
            self.late[name] = kept, value
            value = kept
        self._bind_in_part(name, value)

    def bind_output(self, name: str, device_type: str, device_id: int) -> None:
        """Ask for an output of the whole whose memory onnxruntime takes."""
        self.bound[name] = None
        self.late.pop(name, None)
        self._bind_in_part(name, None, (device_type, device_id))

    def _bind_in_part(self, name: str, value: Any, device: tuple[str, int] | None = None) -> None:
        part = self.made_by[name]
        self.order[part].setdefault(name, len(self.order[part]))
        if value is None:
            self.parts[part].bind_output(self.names[part][name], *(device or (self.place.kind, self.place.device_id)))
        else:
            self.parts[part].bind_ortvalue_output(self.names[part][name], value)

    def get_outputs(self) -> list[Any]:
        """The values of the outputs of the whole, in the order in which they were bound first."""
        return list(self.results.values())

    def synchronize_inputs(self) -> None:
        """Wait for what copies inputs to the device."""
        for part in self.parts:
            part.synchronize_inputs()

    def synchronize_outputs(self) -> None:
        """Wait for what copies outputs from the device."""
        for part in self.parts:
            part.synchronize_outputs()

    def run(self, options: Any) -> None:
        """Run the parts in turn. What is sent after a part travels until the first one that reads of it.

        On a stream of the engine, parts are given to the device one behind the other, and one that reads what has come
        when it is there: a fault before that leaves every state as it was.
        """
        if self.engine is None:
            self._run(options)
            return
        options = options or ort.RunOptions()
        options.add_run_config_entry(*_GOES_ON)
        try:
            self._run(options)
        finally:
            self.engine.finish()
        for made, value in self.late.values():
            value.update_inplace(made)

    def _run(self, options: Any) -> None:
        self.results = dict(self.bound)
        values: dict[str, Any] = {}
        travelling: Travelling = {}
        journal, self.journal = Journal(), None
        for number, (session, part) in enumerate(zip(self.sessions, self.parts, strict=True)):
            _wait(travelling, self.waits[number], journal)
            within = self.names[number]
            for name in self.given[number]:
                part.bind_ortvalue_input(within[name], values[name])
            with journal.timed(journal.sessions, f"part {number} of {len(self.parts)}"):
                session.run_with_iobinding(part, options)
            self._take(number, values)
            for name in self.given[number]:
                part.bind_ortvalue_input(within[name], self.nothing)
                if self.last[name] == number:
                    del values[name]
            for bucket, name, work in self.buckets.start(number, journal):
                travelling.setdefault(bucket, []).append((name, work))
                self.journal = journal
        _wait(travelling, [*travelling], journal)  # that which only other ranks read

    def _take(self, number: int, values: dict[str, Any]) -> None:
        """Take what a part has made, and let the part hold nothing of it that is for other parts alone."""
        order, passed = self.order[number], self.passed[number]
        asked = [name for name in order if name in self.bound and self.bound[name] is None]
        if not passed and not asked:
            return
        made = self.parts[number].get_outputs_as_ortvaluevector()  # with one object for all of them
        for name in passed:
            values[name] = ort.OrtValue(made[order[name]])
            if name not in self.bound:
                self._bind_in_part(name, None)
        for name in asked:
            self.results[name] = ort.OrtValue(made[order[name]])


def _wait(travelling: Travelling, buckets: Sequence[int], journal: Journal) -> None:
    """Wait until these buckets are there."""
    for name, work in (each for bucket in buckets for each in travelling.pop(bucket, ())):
        with journal.timed(journal.waits, f"wait for {name}"):
            work.wait()
