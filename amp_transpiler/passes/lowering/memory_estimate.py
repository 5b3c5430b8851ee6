"""How much memory a program takes on a place: a forecast from its lowered model. Nothing runs, no GPU is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from amp_transpiler.ir.decided_sizes import DecidedSizes
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.kernel_cost import tensor_bytes
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.lists import place_traits
from amp_transpiler.option_checks import whole
from amp_transpiler.passes.lowering.arena import resident
from amp_transpiler.passes.lowering.in_place import inputs_within, refusals
from amp_transpiler.passes.lowering.liveness import Buffer, Liveness, plan
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.passes.lowering.own_rows import fullest, own_updates
from amp_transpiler.passes.lowering.place import CPUPlace, Place, arithmetic_of, check_place, cores_of
from amp_transpiler.passes.view.feed_shapes import checked_fetches, given_shapes
from amp_transpiler.passes.view.training_step import TrainingStep, training_step

_MIB = 2**20
_NODE = 2**13  # bytes that a session keeps for each of its nodes, measured


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that is alive at the peak: the program's variable or the lowered model's tensor, and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class MemoryEstimate:
    """What :meth:`Program.memory_estimate` forecasts, in bytes.

    parameters, master_weights, moments, other_state: state in the scope, as it is stored: trainable parameters, their
        fp32 masters, the optimizer's accumulators, and the rest (statistics, loss scale, counters, frozen weights).
    second_buffers: updates that cannot be bound in place and alternate between two buffers.
    feeds, constants: fed arrays, and content of the model itself.
    activations: tensors computed before the backward pass starts that it still reads. On CPU a 16-bit tensor is
        carried as fp32, a 16-bit weight's fp32 copy included.
    gradients: the most that gradients of parameters (raw, unscaled and clipped ones) take at one time.
    gaps: on CPU, what the runtime's arena holds beside the tensors that live at the peak, its own table included.
    session: the runtime's copy of the program.
    peak: the most that all of it and every temporary take at one time, gaps included; at ``peak_node`` (a node of the
        lowered model), which belongs to the operator ``peak_operator`` of the program. ``largest`` are the five
        largest tensors that live there.
    """

    program: str
    place: str
    feed_shapes: dict[str, tuple[int, ...]]
    parameters: int
    master_weights: int
    moments: int
    other_state: int
    second_buffers: int
    feeds: int
    constants: int
    activations: int
    gradients: int
    gaps: int
    session: int
    peak: int
    peak_node: str
    peak_operator: str
    largest: tuple[LiveTensor, ...]

    def to_dict(self) -> dict[str, Any]:
        """The record as numbers, strings, lists and dictionaries, for JSON."""
        record = asdict(self)
        record["feed_shapes"] = {name: list(shape) for name, shape in self.feed_shapes.items()}
        record["largest"] = [{**item, "shape": list(item["shape"])} for item in record["largest"]]
        return record

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.feed_shapes.items())
        lines = [f"program '{self.program}' on {self.place}" + (f", {shapes}" if shapes else "")]
        for label, size in (
            ("parameters", self.parameters),
            ("master weights", self.master_weights),
            ("moments", self.moments),
            ("other state", self.other_state),
            ("second buffers", self.second_buffers),
            ("feeds", self.feeds),
            ("constants", self.constants),
            ("activations kept for backward", self.activations),
            ("gradients", self.gradients),
            ("gaps between tensors", self.gaps),
            ("session", self.session),
            ("peak", self.peak),
        ):
            lines.append(f"  {label:<30} {size / _MIB:10.2f} MiB")
        lines.append(f"  peak at {self.peak_node}" + (f" of {self.peak_operator}" if self.peak_operator else ""))
        for tensor in self.largest:
            what = f"{tensor.dtype}{list(tensor.shape)} {tensor.name}"
            lines.append(f"  {tensor.bytes / _MIB:12.2f} MiB  {what}")
        return "\n".join(lines)


def memory_estimate(
    program: Graph,
    feed_shapes: Mapping[str, Sequence[int]] | None = None,
    place: Place | str | None = None,
    fetch_list: Sequence[Variable | str] = (),
    rank: int | None = None,
) -> MemoryEstimate:
    """A forecast of what running ``program`` takes on ``place``; see ``Program.memory_estimate``."""
    place = CPUPlace() if place is None else check_place(place, "memory_estimate: place")
    if rank is not None:
        whole("memory_estimate: rank", rank, 0)
    lowered, shapes = lower_sized("memory_estimate", program, place, feed_shapes, fetch_list, rank)
    return estimate_memory(program, lowered, place, shapes, plan(lowered))


def lower_sized(
    call: str,
    program: Graph,
    place: Place,
    feed_shapes: Mapping[str, Sequence[int]] | None,
    fetch_list: Sequence[Variable | str],
    rank: int | None = None,
) -> tuple[Lowered, dict[str, tuple[int, ...]]]:
    """What a place runs for these feeds, with every shape that follows from theirs, and the shape of each feed.

    Sizes that data decide are about as large as they can be.

    ``call`` is the caller, for messages. ``rank``: where state is dealt out; by default the one that has most of it.
    """
    shapes = given_shapes(call, program, feed_shapes)
    fetches = checked_fetches(call, program, fetch_list)
    rank = fullest(program) if rank is None else rank
    updates, others = own_updates(program, lambda owner: owner in (None, rank))
    lowered = lower(
        program,
        place.kind,
        shapes,
        fetches,
        updates=updates,
        others=others,
        declared=True,
        arithmetic=arithmetic_of(place),
        cores=cores_of(place, None),
    )
    lowered = lowered.sized or lowered
    _complete(program, lowered, shapes)
    return lowered, shapes


def estimate_memory(
    program: Graph, lowered: Lowered, place: Place, shapes: dict[str, tuple[int, ...]], live: Liveness
) -> MemoryEstimate:
    """The forecast for a program that is lowered and planned."""
    return _Estimate(program, lowered, place, shapes, live).record()


def _complete(program: Graph, lowered: Lowered, shapes: dict[str, tuple[int, ...]]) -> None:
    """Give ``lowered.tensors`` the shapes that follow from the feeds; lowering does so only where a rule needs one."""
    if all(value.shape is not None for value in lowered.tensors.values()):
        return
    known = DecidedSizes(program, shapes)
    for name, value in lowered.tensors.items():
        if value.shape is None and program.has_var(name):
            lowered.tensors[name] = replace(value, shape=static(known[program.var(name)][1]))


class _Estimate:
    def __init__(
        self, program: Graph, lowered: Lowered, place: Place, shapes: dict[str, tuple[int, ...]], live: Liveness
    ) -> None:
        self.program, self.lowered, self.place, self.shapes = program, lowered, place, shapes
        self.live = live
        self.step: TrainingStep = training_step(program)
        self.tensors = {name: value.name for name, value in lowered.tensors.items()}
        self.steps = {node.index: step for step, node in enumerate(self.live.order)}
        self.variable = {tensor: name for name, tensor in reversed(self.tensors.items())}

    def record(self) -> MemoryEstimate:
        held = self._states()
        feeds = sum(self._size(port.tensor) for port in self.lowered.feeds)
        constants = sum(self._size(name) for name in self.live.constants)
        totals = self.live.totals() or [0]
        peak = max(totals)
        step = totals.index(peak)
        session = _NODE * len(self.live.order)
        gaps = max(0, resident(self.live) - peak) if place_traits(self.place.kind).host else 0
        node, operator, buffers = self._at(step)
        return MemoryEstimate(
            program=self.program.name,
            place=repr(self.place),
            feed_shapes=self.shapes,
            **held,
            feeds=feeds,
            constants=constants,
            activations=self._activations(),
            gradients=self._gradients(),
            gaps=gaps,
            session=session,
            peak=peak + gaps + session + sum(held.values()) + feeds + constants,
            peak_node=node,
            peak_operator=operator,
            largest=tuple(self._tensor(buffer, step) for buffer in buffers[:5]),
        )

    # -- state -----------------------------------------------------------------------------------------
    def _states(self) -> dict[str, int]:
        kinds = _kinds(self.step)
        held = dict.fromkeys(("parameters", "master_weights", "moments", "other_state", "second_buffers"), 0)
        within = inputs_within(self.lowered.states)
        flat = {tensor for tensors in within.values() for tensor in tensors}
        for port in self.lowered.states:
            if port.tensor in flat:
                continue
            variable = self.program.var(port.segments[0].variable if port.segments else port.variable)
            kind = "parameters" if variable.is_parameter else kinds.get(variable.key, "other_state")
            held[kind] += self._size(port.tensor)
        inputs = {port.variable: port.tensor for port in self.lowered.states}
        outputs = {port.tensor: inputs.get(port.variable) for port in reversed(self.lowered.updates)}
        pairs = [(state, output) for output, state in outputs.items() if state is not None]
        refused = {
            output
            for (_, output), why in zip(pairs, refusals(self.lowered.model.graph, pairs, within), strict=True)
            if why
        }
        if not place_traits(self.place.kind).in_place:
            refused = set(outputs)
        refused |= {output for output, state in outputs.items() if state is None}
        held["second_buffers"] = sum(self._size(output) for output in sorted(refused))
        return held

    def _size(self, tensor: str) -> int:
        return tensor_bytes(self.live.tensors[tensor]) if tensor in self.live.tensors else 0

    # -- over time -------------------------------------------------------------------------------------
    def _activations(self) -> int:
        """Buffers that a tensor made before the first gradient holds until a later step reads it."""
        gradients = (v for v in self.program.variables if v.grad_of is not None and v.name in self.tensors)
        # The gradient of a scalar loss is the loss scale, known before anything runs.
        start = min((self._made(v) for v in gradients if v.producer is not None and self._size_of(v) > 1), default=-1)
        kept = 0
        for buffer in self.live.buffers:
            spans = [self.live.spans[name] for name in buffer.tensors]
            first, last = min(s[0] for s in spans), max((s[1] for s in spans if s[0] < start), default=-1)
            kept += buffer.size if first < start <= last else 0
        return kept

    def _made(self, variable: Variable) -> int:
        tensor = self.tensors[variable.name]
        return self.live.spans.get(self.live.merged.get(tensor, tensor), (len(self.live.order),))[0]

    def _size_of(self, variable: Variable) -> int:
        tensor = self.tensors[variable.name]
        return math.prod(self.live.tensors.get(self.live.merged.get(tensor, tensor), ("", ()))[1])

    def _gradients(self) -> int:
        gradients = [v for v in self.program.variables if v.grad_of is not None and v.grad_of.is_parameter]
        processed = [
            v for part in (*self.step.checks, *self.step.clips) for v in part.operator.outputs if v is not None
        ]
        tensors = {self.tensors.get(v.name) for v in (*gradients, *processed)}
        for node in self.live.order:
            if traits_of(node.proto.op_type, node.proto.domain).view and node.inputs[0] in tensors:
                tensors.update(node.outputs)
        change = [0] * (len(self.live.order) + 1)
        for buffer in self.live.buffers:
            spans = [self.live.spans[name] for name in buffer.tensors if name in tensors]
            if spans:
                change[min(s[0] for s in spans)] += buffer.size
                change[max(s[1] for s in spans) + 1] -= buffer.size
        most = total = 0
        for step in change:
            total += step
            most = max(most, total)
        return most

    def _at(self, step: int) -> tuple[str, str, list[Buffer]]:
        if not self.live.order:
            return "nothing", "", []
        node = self.live.order[step]
        origins = self.lowered.origins
        operator = origins[node.index] if node.index < len(origins) else None
        return f"{node.proto.op_type} '{node.proto.name}'", operator.label if operator else "", self.live.live_at(step)

    def _tensor(self, buffer: Buffer, step: int) -> LiveTensor:
        alive = [name for name in buffer.tensors if self.live.spans[name][0] <= step <= self.live.spans[name][1]]
        tensor = (alive or buffer.tensors)[-1]
        return LiveTensor(self.variable.get(tensor, tensor), *self.live.tensors[tensor], buffer.size)


def _kinds(step: TrainingStep) -> dict[int, str]:
    """What the update operators keep beside parameters: variable key -> field of the estimate."""
    kinds: dict[int, str] = {}
    for update in step.updates:
        moments = [*update.scalars.values(), *(v for row in update.rows for v in row.accumulators.values())]
        kinds |= {v.key: "moments" for v in moments if v is not None}
        kinds |= {row.master.key: "master_weights" for row in update.rows if row.master is not None}
    return kinds
