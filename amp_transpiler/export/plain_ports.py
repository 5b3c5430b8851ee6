"""A lowered model whose inputs and outputs any runtime can hold: a tensor for each variable, in a type it has.

What lies in a flat buffer here is joined and taken apart inside the model. What is bfloat16, which few bindings of
onnxruntime can hand over, goes in and out as fp32, and 64-bit integers stay such where a place holds them in 32 bits.
Nothing is computed in another way: the bits stay what they are, and what is fed is the same for every place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from amp_transpiler.errors import PrecisionError
from amp_transpiler.ir.infer import type_proto
from amp_transpiler.ir.types import ONNX_TYPES, numpy_dtype
from amp_transpiler.passes.lowering.lowered import Lowered, Port

#: The type that stands in for one that runtimes cannot hand over; every value of it is one of the other.
CARRIED = {"bfloat16": "float32"}
#: What numpy, JavaScript's typed arrays, C++, C# and Java all have; float16 as its bits.
_PLAIN = frozenset({"float32", "float64", "float16", "bool"}) | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


@dataclass(frozen=True)
class PlainModel:
    """A model with plain ports: ``states`` are inputs and ``updates`` outputs, one each; ``zeros`` are fed 0."""

    model: onnx.ModelProto
    feeds: list[Port]
    states: list[Port]
    fetches: list[Port]
    updates: list[Port]
    zeros: list[str]


def plain(lowered: Lowered, program: str) -> PlainModel:
    """``lowered`` with plain ports. PrecisionError names an input or output whose type other runtimes do not have."""
    return _Plain(lowered, program).result()


def check_held(variable: str, dtype: str, program: str) -> str:
    """The type in which runtimes hold a variable; PrecisionError where it is none that they have."""
    kind = CARRIED.get(dtype, dtype)
    if kind not in _PLAIN:
        raise PrecisionError(
            f"'{variable}' of program '{program}' is {dtype or 'no tensor'}, which other runtimes cannot hand over; "
            "leave it out of the exported programs, or cast it inside of them"
        )
    return kind


def counted(model: PlainModel, counter: str, steps: int) -> PlainModel:
    """``model``, which also counts the runs of a window of accumulation, as the executor does for a program."""
    made = _Plain(Lowered(model.model, ""), "")
    port = Port(counter, counter, "int32", ())
    inside = made.part(port)
    one, size = (
        made.constant(f"{counter}/{name}", np.array(v, np.int32)) for name, v in (("one", 1), ("steps", steps))
    )
    raised, new = made.fresh(f"{counter}@RAISED"), made.fresh(f"{counter}@NEW")
    made.after.append(onnx.helper.make_node("Add", [inside.tensor, one], [raised], raised))
    made.after.append(onnx.helper.make_node("Mod", [raised, size], [new], new))
    made.outputs[new] = onnx.ValueInfoProto(name=new, type=type_proto("int32", ()))
    made.write()
    return replace(
        model,
        model=made.model,
        states=[*model.states, inside],
        updates=[*model.updates, replace(port, tensor=new)],
    )


class _Plain:
    def __init__(self, lowered: Lowered, program: str) -> None:
        self.lowered, self.program = lowered, program
        self.model = onnx.ModelProto()
        self.model.CopyFrom(lowered.model)
        graph = self.model.graph
        self.before: list[onnx.NodeProto] = []
        self.after: list[onnx.NodeProto] = []
        self.inputs = {info.name: info for info in graph.input}
        self.outputs = {info.name: info for info in graph.output}
        self.taken = self.inputs.keys() | {name for node in graph.node for name in node.output}
        self.taken |= {tensor.name for tensor in graph.initializer}

    def result(self) -> PlainModel:
        lowered = self.lowered
        states = [port for port in lowered.states if not port.segments]
        joined = [port for port in lowered.states if port.segments]
        known = {port.variable for port in states}
        for flat in joined:
            for segment in flat.segments:
                if segment.variable not in known:
                    states.append(self.part(Port(segment.variable, segment.variable, flat.dtype, segment.shape)))
        by_name = {port.variable: port.tensor for port in states}
        for flat in joined:
            self._join(flat, by_name)
        updates = [port for flat in lowered.updates for port in (self._split(flat) if flat.segments else [flat])]
        given = self._carried_out([*lowered.fetches, *updates])
        found = PlainModel(
            self.model,
            [self._carried_in(port) for port in lowered.feeds],
            [self._carried_in(port) for port in states],
            given[: len(lowered.fetches)],
            given[len(lowered.fetches) :],
            list(lowered.scalars),
        )
        self.write()
        return found

    def write(self) -> None:
        """Put what was made into the model."""
        graph = self.model.graph
        nodes = [*self.before, *graph.node, *self.after]
        del graph.node[:], graph.input[:], graph.output[:]
        graph.node.extend(nodes)
        graph.input.extend(self.inputs.values())
        graph.output.extend(self.outputs.values())

    # -- flat buffers ----------------------------------------------------------------------------------
    def part(self, port: Port) -> Port:
        """A variable of a flat state as an input of its own."""
        name = self.fresh(port.variable)
        self.inputs[name] = onnx.ValueInfoProto(name=name, type=type_proto(port.dtype, port.shape))
        return replace(port, tensor=name)

    def _join(self, flat: Port, inputs: dict[str, str]) -> None:
        """Make the flat tensor of its variables, with zeros between them."""
        rows, columns = _sizes(flat)
        del self.inputs[flat.tensor]
        parts, end = [], 0
        for segment in flat.segments:
            if segment.offset > end:
                parts.append(self.constant(f"{flat.tensor}/gap", _zeros(segment.offset - end, flat.dtype)))
            size = math.prod(segment.shape)
            shape = (rows, columns) if rows > 1 else (1, size)
            parts.append(self._reshape(self.before, inputs[segment.variable], shape))
            end = segment.offset + size
        self.before.append(onnx.helper.make_node("Concat", parts, [flat.tensor], flat.tensor, axis=1))

    def _split(self, flat: Port) -> list[Port]:
        """The outputs of its variables in the place of a flat one."""
        rows, _ = _sizes(flat)
        del self.outputs[flat.tensor]
        found = []
        for segment in flat.segments:
            source, size = flat.tensor, math.prod(segment.shape)
            if rows == 1:
                source = self.fresh(f"{segment.variable}@FLAT")
                bounds = [segment.offset], [segment.offset + size], [1]
                names = [self.constant(f"{source}/at", np.array(bound, np.int64)) for bound in bounds]
                self.after.append(onnx.helper.make_node("Slice", [flat.tensor, *names], [source], source))
            name = self._reshape(self.after, source, segment.shape, f"{segment.variable}@NEW")
            self.outputs[name] = onnx.ValueInfoProto(name=name, type=type_proto(flat.dtype, segment.shape))
            found.append(Port(segment.variable, name, flat.dtype, segment.shape))
        return found

    def _reshape(self, nodes: list[onnx.NodeProto], source: str, shape: Sequence[int], name: str = "") -> str:
        made = self.fresh(name or f"{source}@ROW")
        sizes = self.constant(f"{made}/shape", np.array(shape, np.int64))
        nodes.append(onnx.helper.make_node("Reshape", [source, sizes], [made], made))
        return made

    # -- types -----------------------------------------------------------------------------------------
    def _carried_in(self, port: Port) -> Port:
        kind = self._carried(port)
        if kind == port.dtype:
            return port
        name = self.fresh(f"{port.tensor}@{kind.upper()}")
        info = self.inputs.pop(port.tensor)
        self._retype(info, name, kind)
        self.inputs[name] = info
        made: list[onnx.NodeProto] = []
        source, to = self._limited(made, name, port) if port.holds else name, ONNX_TYPES[port.dtype]
        made.append(onnx.helper.make_node("Cast", [source], [port.tensor], f"{name}/carried", to=to))
        self.before[:0] = made
        return replace(port, tensor=name, dtype=kind, holds="")

    def _limited(self, nodes: list[onnx.NodeProto], name: str, port: Port) -> str:
        """What fits into the type of ``port``: the number next to one that does not, which is no index either."""
        limits = np.iinfo(numpy_dtype(port.dtype))
        bounds = [
            self.constant(f"{name}/{bound}", np.array(value, numpy_dtype(port.holds)))
            for bound, value in (("least", limits.min), ("most", limits.max))
        ]
        nodes.append(onnx.helper.make_node("Clip", [name, *bounds], [found := self.fresh(f"{name}/limited")], found))
        return found

    def _carried(self, port: Port) -> str:
        """The type in which runtimes hand over a port."""
        integers = port.holds in _PLAIN and numpy_dtype(port.holds).kind in "iu"
        return check_held(port.variable, port.holds if integers else port.dtype, self.program)

    def _carried_out(self, ports: Sequence[Port]) -> list[Port]:
        """Outputs of the types that runtimes have; a tensor may be two variables, of two types."""
        kinds = [self._carried(port) for port in ports]
        plain = {port.tensor for port, kind in zip(ports, kinds, strict=True) if kind == port.dtype}
        made: dict[str, str] = {}
        found = []
        for port, kind in zip(ports, kinds, strict=True):
            if kind != port.dtype and port.tensor not in made:
                name = made[port.tensor] = self.fresh(f"{port.tensor}@{kind.upper()}")
                info = onnx.ValueInfoProto()
                info.CopyFrom(self.outputs[port.tensor])
                self._retype(info, name, kind)
                self.outputs[name] = info
                to = ONNX_TYPES[kind]
                self.after.append(onnx.helper.make_node("Cast", [port.tensor], [name], f"{name}/carried", to=to))
            tensor = port.tensor if kind == port.dtype else made[port.tensor]
            found.append(replace(port, tensor=tensor, dtype=kind, holds=""))
        for tensor in made.keys() - plain:
            del self.outputs[tensor]
        return found

    @staticmethod
    def _retype(info: onnx.ValueInfoProto, name: str, kind: str) -> None:
        info.name = name
        info.type.tensor_type.elem_type = ONNX_TYPES[kind]

    # -- names -----------------------------------------------------------------------------------------
    def constant(self, name: str, array: np.ndarray) -> str:
        """The name of a new constant."""
        name = self.fresh(name)
        self.model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        return name

    def fresh(self, name: str) -> str:
        """``name``, or one like it, that no tensor has."""
        found = next(n for n in (name, *(f"{name}_{i}" for i in range(1, len(self.taken) + 2))) if n not in self.taken)
        self.taken.add(found)
        return found


def _sizes(flat: Port) -> tuple[int, int]:
    assert flat.shape is not None and len(flat.shape) == 2
    rows, columns = flat.shape
    assert isinstance(rows, int) and isinstance(columns, int)
    return rows, columns


def _zeros(size: int, dtype: str) -> np.ndarray:
    return np.zeros((1, size), numpy_dtype(dtype))
