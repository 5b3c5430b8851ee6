"""One model of those that were lowered with other numbers for sizes that data decide: it computes these in the run.

The models have the same nodes, and differ in constants and declared shapes alone. A constant that differs is a sum, a
multiple or a product of sizes, which the run has: of what NonZero finds, and of what is made with it. Which one, the
models tell together: each is right for its own numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations_with_replacement, permutations, product

import numpy as np
import onnx

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.control import every_node
from amp_transpiler.ir.decided_sizes import Numbers
from amp_transpiler.ir.emitter import Value
from amp_transpiler.ir.node_protos import emitted_node
from amp_transpiler.ir.nodes import Operator, Shape
from amp_transpiler.ir.types import NAMES, ONNX_TYPES
from amp_transpiler.passes.lowering.lowered import Lowered, Port, Row, row
from amp_transpiler.passes.lowering.open_sizes import OpenModel, Sized
from amp_transpiler.passes.view.reached import reached

#: Powers of a size that a number may be a multiple of: a mean divides by it, a scaled product by its root.
_POWERS = (-1.0, 1.0, -0.5, 0.5)
#: How far two multiples may be from each other, by element type.
_OFF = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6, "float64": 1e-14}
#: How far from a multiple of a size a number may be: more would fit by chance.
_NEAR = 16
#: How many numbers of a constant may hang on sizes.
_FEW = 64


def with_computed_sizes(times: Sequence[Lowered]) -> Lowered | None:
    """One model for all sizes; None where models have other operators. GraphError: what differs is not known."""
    samples = [Sized(lowered.model, lowered.given) for lowered in times]
    return _Joining(times, samples).run() if all(map(samples[0].alike, samples[1:])) else None


def decided_error(lowered: Lowered, why: str) -> GraphError:
    """What to raise where sizes that data decide are too much for a program."""
    return GraphError(
        f"data decide the sizes of '{lowered.decided[0]}', and {why}. Pad what is chosen to a fixed size, or give the "
        "values of the inputs that decide (values= of prepare_training)"
    )


@dataclass(frozen=True)
class _Source:
    """A size of a tensor that node number ``place`` makes."""

    numbers: Numbers
    tensor: str
    axis: int
    place: int


class _Joining:
    def __init__(self, times: Sequence[Lowered], samples: Sequence[Sized]) -> None:
        self.times, self.samples, self.first = times, samples, times[0]
        self.opened = OpenModel(self.samples, in_run=True)
        assert self.opened.model is not None
        self.graph = self.opened.model.graph
        padded = [*self.first.origins, *[None] * (len(self.graph.node) - len(self.first.origins))]
        self.rows = _decided_first(list(map(row, self.graph.node, padded)), self.first.decided)
        self.sources = list(self._sources())
        #: The nodes to put before the node of a number.
        self.before: dict[int, list[onnx.NodeProto]] = {}
        self.place = 0
        self.made: dict[tuple[object, ...], str] = {}
        self.count = 0

    def run(self) -> Lowered:
        places: dict[str, int] = {}
        for place, each in enumerate(self.rows):
            for name in self.opened.names.intersection(each.reads):
                places.setdefault(name, place)
        reshapes = dict[str, list[onnx.NodeProto]]()
        for node in every_node(each.node for each in self.rows):  # in which a size may be 0 in the run
            if node.op_type == "Reshape" and not node.domain:
                reshapes.setdefault(node.input[1], []).append(node)
        constants = {self.opened.inputs_of[number]: slot for number, slot in self.opened.open.items()}
        for name, self.place in sorted(places.items(), key=lambda each: (each[1], each[0])):
            arrays = [onnx.numpy_helper.to_array(sample.read(constants[name])) for sample in self.samples]
            self._add("Identity", [self._computed(arrays)], name=name)
            for node in reshapes.get(name, ()) if arrays[0].min(initial=1) > 0 else ():
                kept = [each for each in node.attribute if each.name != "allowzero"]
                del node.attribute[:]
                node.attribute.extend([*kept, onnx.helper.make_attribute("allowzero", 1)])
        return self._joined()

    def _joined(self) -> Lowered:
        assert self.opened.model is not None
        nodes, origins = list[onnx.NodeProto](), list[Operator | None]()
        for place, each in enumerate(self.rows):
            added = self.before.get(place, [])
            nodes += [*added, each.node]
            origins += [*[None] * len(added), each.origin]
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del self.graph.node[:]
        self.graph.node.extend(nodes)
        inputs = [info for info in self.graph.input if info.name not in self.opened.names]
        del self.graph.input[:]
        self.graph.input.extend(inputs)

        def open_port(*ports: Port) -> Port:
            return replace(ports[0], shape=_open([port.shape for port in ports]))

        def open_value(*values: Value) -> Value:
            shape = _open([value.shape for value in values])
            known = None if shape is None or None in shape else values[0].shape
            return replace(values[0], shape=known)

        def of_all(name: str, opened: Callable[..., Value]) -> dict[str, Value]:
            held = [getattr(lowered, name) for lowered in self.times]
            return {key: opened(*(each[key] for each in held)) for key in held[0] if all(key in each for each in held)}

        fetches = list(map(open_port, *(lowered.fetches for lowered in self.times)))
        return replace(
            self.first,
            model=self.opened.model,
            origins=origins,
            fetches=fetches,
            tensors=of_all("tensors", open_value),
            given=of_all("given", open_value),
            sized=self.first,
        )

    def _error(self, why: str) -> GraphError:
        return decided_error(self.first, why)

    # -- what the run knows ----------------------------------------------------------------------------
    def _sources(self) -> Iterator[_Source]:
        """The sizes that data decide, those decided first hand first."""
        places = {name: place for place, each in enumerate(self.rows) for name in each.makes}
        tensors: dict[str, list[Shape | None]] = {}
        for name, value in self.first.tensors.items():
            others = [lowered.tensors.get(name) for lowered in self.times[1:]]
            if value.name in places and all(other is not None and other.name == value.name for other in others):
                tensors[value.name] = [value.shape, *(other.shape for other in others if other is not None)]
        decided = set(self.first.decided)
        seen: set[Numbers] = set()
        for tensor in sorted(tensors, key=lambda name: (name not in decided, places[name])):
            shapes = tensors[tensor]
            if any(shape is None or len(shape) != len(shapes[0] or ()) for shape in shapes):
                continue
            for axis, numbers in enumerate(zip(*shapes, strict=True)):
                if len(set(numbers)) > 1 and numbers not in seen:
                    seen.add(numbers)
                    yield _Source(numbers, tensor, axis, places[tensor])

    # -- what is computed ------------------------------------------------------------------------------
    def _computed(self, arrays: Sequence[np.ndarray]) -> str:
        """The tensor that holds one of these arrays, by the sizes of the run."""
        first, whole = arrays[0], np.issubdtype(arrays[0].dtype, np.integer)
        kind = NAMES[onnx.helper.np_dtype_to_tensor_dtype(first.dtype)]
        if len({array.shape for array in arrays}) > 1:
            return self._long(arrays, kind)
        if len({array.tobytes() for array in arrays}) == 1:
            return self._const(first)
        columns = list(zip(*(array.reshape(-1).tolist() for array in arrays), strict=True))
        found = list(dict.fromkeys(columns))
        if len(found) > _FEW:
            raise self._error("many numbers of a tensor hang on them")
        parts = [self._whole(column) if whole else self._real(column, kind) for column in found]
        held = self._add("Concat", parts, axis=0) if len(parts) > 1 else parts[0]
        if kind not in ("int64", "float32"):
            held = self._add("Cast", [held], to=ONNX_TYPES[kind])
        if 1 < len(found) < len(columns):
            places = [found.index(column) for column in columns]
            return self._add("Gather", [held, self._const(np.array(places, np.int64).reshape(first.shape))], axis=0)
        if first.shape == (len(found),):
            return held
        return self._add("Expand" if first.size > 1 == len(found) else "Reshape", [held, self._shape(first.shape)])

    def _long(self, arrays: Sequence[np.ndarray], kind: str) -> str:
        """An array whose shape hangs on sizes: one number everywhere, or numbers that count up."""
        shapes = [np.array(array.shape, np.int64) for array in arrays]
        if len({len(shape) for shape in shapes}) == 1:
            if len({number for array in arrays for number in np.unique(array).tolist()}) == 1:
                return self._add("Expand", [self._const(arrays[0].reshape(-1)[:1]), self._computed(shapes)])
            begin, step = arrays[0].flat[0], arrays[0].flat[1] - arrays[0].flat[0]
            if all(np.array_equal(array.ravel(), begin + step * np.arange(array.size)) for array in arrays):
                ends = [np.array(begin + step * array.size, array.dtype) for array in arrays]
                typed = [np.array(number, arrays[0].dtype) for number in (begin, step)]
                row = self._add("Range", [self._const(typed[0]), self._computed(ends), self._const(typed[1])])
                return row if arrays[0].ndim == 1 else self._add("Reshape", [row, self._computed(shapes)], allowzero=1)
        raise self._error(f"so they do the shape of a constant ({kind})")

    def _whole(self, numbers: Sequence[int]) -> str:
        """A whole number, as a tensor of one int64."""
        numbers = tuple(numbers)
        if len(set(numbers)) == 1:
            return self._const(np.array(numbers[:1], np.int64))
        known = [source for source in self.sources if source.place < self.place]
        for source in known:
            if source.numbers == numbers:
                return self._size(source)
        for source in known:
            factor = _factor(numbers, source.numbers)
            if factor is not None:
                return self._times(self._size(source), factor)
        for one, other in combinations_with_replacement(known, 2):
            factor = _factor(numbers, [a * b for a, b in zip(one.numbers, other.numbers, strict=True)])
            if factor is not None:
                return self._times(self._add("Mul", [self._size(one), self._size(other)]), factor)
        for source in known:
            slope = _slope(numbers, source.numbers)
            if slope is not None:
                return self._plus(self._times(self._size(source), slope[0]), slope[1])
        return self._sum(numbers, known)

    def _sum(self, numbers: Numbers, known: Sequence[_Source]) -> str:
        """A sum of neighbours among the sizes, as the pieces of a Split are, or of two, or the difference of two."""
        sums = np.cumsum([(0,) * len(numbers), *(source.numbers for source in known)], axis=0)
        found = []
        for begin in range(len(known)):
            rest = numbers - (sums[begin + 1 :] - sums[begin])
            lengths = np.flatnonzero((rest == rest[:, :1]).all(axis=1))
            found += [(abs(int(rest[n, 0])), int(rest[n, 0]), begin, begin + int(n) + 1) for n in lengths]
        if found:
            _, summand, begin, end = min(found)
            run = map(self._size, known[begin:end])
            return self._plus(reduce(lambda a, b: self._add("Add", [a, b]), run), summand)
        for (one, other), sign in product(permutations(known, 2), (1, -1)):
            rest = np.array(numbers) - one.numbers - sign * np.array(other.numbers)
            if (rest == rest[0]).all():
                part = self._add("Add" if sign > 0 else "Sub", [self._size(one), self._size(other)])
                return self._plus(part, int(rest[0]))
        raise self._error(
            f"what follows from them ({', '.join(map(str, numbers))}) is no sum, multiple or product of sizes that the "
            "run has by then"
        )

    def _real(self, numbers: Sequence[float], kind: str) -> str:
        """A number that hangs on a size, as a tensor of one float32."""
        if len(set(numbers)) == 1:
            return self._const(np.array(numbers[:1], np.float32))
        for power, source in product(_POWERS, [source for source in self.sources if source.place < self.place]):
            factors = np.array(numbers) / np.array(source.numbers, float) ** power
            if np.ptp(factors) <= _OFF[kind] * abs(factors[0]):
                size = self._add("Cast", [self._size(source)], to=ONNX_TYPES["float32"])
                root = self._add("Sqrt", [size]) if abs(power) < 1 else size
                factor = self._const(np.array([factors[0]], np.float32))
                return self._add("Mul" if power > 0 else "Div", [factor, root])
        for inverse in (False, True):
            wholes = [1 / number if inverse else number for number in numbers]
            if all(abs(number - round(number)) <= _OFF[kind] * abs(number) for number in wholes):
                found = self._add("Cast", [self._whole([round(n) for n in wholes])], to=ONNX_TYPES["float32"])
                return self._add("Reciprocal", [found]) if inverse else found
        raise self._error("a number that follows from them is no multiple or power of a size")

    def _size(self, source: _Source) -> str:
        return self._add("Shape", [source.tensor], start=source.axis, end=source.axis + 1)

    def _times(self, name: str, factor: int) -> str:
        return name if factor == 1 else self._add("Mul", [name, self._const(np.array([factor], np.int64))])

    def _plus(self, name: str, number: int) -> str:
        return name if number == 0 else self._add("Add", [name, self._const(np.array([number], np.int64))])

    def _shape(self, sizes: Sequence[int]) -> str:
        return self._const(np.array(sizes, np.int64))

    def _const(self, array: np.ndarray) -> str:
        key = ("", array.dtype.str, array.shape, array.tobytes())
        if key not in self.made:
            self.made[key] = self._name()
            self.graph.initializer.append(onnx.numpy_helper.from_array(array, self.made[key]))
        return self.made[key]

    def _add(self, type_: str, inputs: Sequence[str], name: str = "", **attrs: int) -> str:
        """What a node makes; equal ones are made once."""
        key = (type_, *inputs, name, *attrs.items())
        if key not in self.made:
            self.made[key] = name or self._name()
            node = emitted_node(type_, list(inputs), [self.made[key]], attrs=attrs)
            self.before.setdefault(self.place, []).append(node)
        return self.made[key]

    def _name(self) -> str:
        self.count += 1
        return f"@data size {self.count}"


def _decided_first(rows: Sequence[Row], decided: Sequence[str]) -> list[Row]:
    """The rows in an order in which the sizes that data decide are known as early as can be, one after the other."""
    maker = {name: place for place, each in enumerate(rows) for name in each.makes}
    first: dict[int, None] = {}
    for tensor in decided:
        needed = reached([maker[tensor]], lambda place: (maker.get(name) for name in rows[place].reads))
        first |= dict.fromkeys(sorted(set(needed)))
    return [rows[place] for place in (*first, *(place for place in range(len(rows)) if place not in first))]


def _factor(numbers: Sequence[int], sizes: Sequence[int]) -> int | None:
    """The whole number that these sizes are to be multiplied with; None where there is none."""
    factor, rest = divmod(numbers[0], sizes[0])
    return factor if not rest and all(n == factor * size for n, size in zip(numbers, sizes, strict=True)) else None


def _slope(numbers: Sequence[int], sizes: Sequence[int]) -> tuple[int, int] | None:
    """The factor and the summand that make these numbers of the sizes; None where there are none."""
    if sizes[0] == sizes[1]:
        return None
    factor, rest = divmod(numbers[1] - numbers[0], sizes[1] - sizes[0])
    offset = numbers[0] - factor * sizes[0]
    fits = not rest and all(n == factor * size + offset for n, size in zip(numbers, sizes, strict=True))
    fits &= abs(factor) == 1 or abs(offset) <= _NEAR
    return (factor, offset) if fits else None


def _open(shapes: Sequence[Shape | None]) -> Shape | None:
    """A shape of those of each time, None for sizes that differ."""
    if any(shape is None or len(shape) != len(shapes[0] or ()) for shape in shapes):
        return None
    columns = zip(*shapes, strict=True)
    return tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in columns)
