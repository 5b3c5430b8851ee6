"""One model for feeds of several sizes, made of models that were lowered for some of them.

Most programs are lowered to the same nodes whatever the sizes of their feeds: sizes stand in constants (the shape that
a Reshape makes) and in declared shapes alone. In an open model the constants that differ are inputs, and the sizes that
differ have names: one name where they were equal each time. It serves every model of the same nodes in which what was
equal is equal again, so that onnxruntime optimises one model instead of one for each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np
import onnx

from amp_transpiler.ir.control import nested_graphs
from amp_transpiler.ir.emitter import Value
from amp_transpiler.ir.infer import type_proto
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.passes.lowering.lowered import used_tensors

_FLOATS = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16})
#: Bytes of a constant up to which they are kept for comparison, and not a hash of them.
_SHORT = 4096

#: Element type, sizes and numbers of a constant.
Content = tuple[int, tuple[int, ...], bytes]
Slot = tuple[onnx.NodeProto, int]


class Sized:
    """A lowered model taken apart: its nodes without sizes, and what these are, in one order.

    ``like``: one that may have the same nodes to the byte; then what they are is known.
    """

    def __init__(self, model: onnx.ModelProto, given: Mapping[str, Value], like: Sized | None = None) -> None:
        graph = model.graph
        self.model, self.given = model, given
        self.tensors: dict[str, onnx.TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
        kinds = {name: _kind(tensor) for name, tensor in self.tensors.items()}
        self.written = kinds, [node.SerializeToString(deterministic=True) for node in graph.node]
        slots: list[Slot] = []
        known = like is not None and like.written == self.written
        self.nodes: list[Hashable] = like.nodes if like and known else list(_rows(graph, kinds, slots))
        #: Of each slot that reads a constant, which one.
        self.names: list[str] = like.names if like and known else [node.input[slot] for node, slot in slots]
        contents = {name: content(self.tensors[name]) for name in dict.fromkeys(self.names)}
        #: Of each of these slots what it reads.
        self.constants = [contents[name] for name in self.names]
        self.types = _types(graph)
        #: The sizes that types declare, of one tensor after the other.
        self.declared = [size for info in _infos(graph) for size in _sizes(info)]

    def alike(self, other: Sized) -> bool:
        """Whether both have the same nodes, and tensors of the same types but for sizes."""
        return self.types == other.types and (self.nodes is other.nodes or self.nodes == other.nodes)

    def rank(self, tensor: str) -> int | None:
        """Of what a node makes whose inputs say its shape."""
        found = self.given.get(tensor)
        return None if found is None or found.shape is None or not found.dtype else len(found.shape)

    def read(self, slot: int) -> onnx.TensorProto:
        """What the slot of this number reads."""
        return self.tensors[self.names[slot]]


def content(tensor: onnx.TensorProto) -> Content:
    """A constant without its name."""
    raw = tensor.raw_data
    if not raw:
        bare = onnx.TensorProto()
        bare.CopyFrom(tensor)
        bare.ClearField("name")
        raw = bare.SerializeToString(deterministic=True)
    return tensor.data_type, tuple(tensor.dims), raw if len(raw) <= _SHORT else hashlib.sha256(raw).digest()


def _rows(
    graph: onnx.GraphProto, constants: Mapping[str, tuple[int, int]], slots: list[Slot]
) -> Iterator[tuple[Hashable, ...]]:
    """What nodes are, those of nested graphs too, but for what is in constants; ``slots`` takes where they read one."""
    for node in graph.node:
        inputs: list[Hashable] = list(node.input)
        for slot, name in enumerate(node.input):
            if name in constants:
                slots.append((node, slot))
                inputs[slot] = constants[name]
        # Its remark may say how many threads it takes.
        yield (node.op_type, node.domain, node.doc_string, *inputs, ":", *node.output, *settings(node))
        for nested in nested_graphs(node):
            yield from _rows(nested, constants, slots)
            yield from _types(nested)


def _types(graph: onnx.GraphProto) -> list[tuple[Hashable, ...]]:
    """What tensors are whose types a graph declares, but for their sizes."""
    infos = (*graph.input, *graph.output, *graph.value_info)
    return [(i.name, i.type.WhichOneof("value"), i.type.tensor_type.elem_type, len(_sizes(i))) for i in infos]


def _kind(tensor: onnx.TensorProto) -> tuple[int, int]:
    """Element type and rank of a constant."""
    return tensor.data_type, len(tensor.dims)


def settings(node: onnx.NodeProto) -> list[bytes]:
    """The attributes of a node that hold no graphs."""
    return [a.SerializeToString(deterministic=True) for a in node.attribute if not (a.HasField("g") or a.graphs)]


def _infos(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """The tensors whose types a graph and those nested in it declare."""
    yield from (*graph.input, *graph.output, *graph.value_info)
    for node in graph.node:
        for nested in nested_graphs(node):
            yield from _infos(nested)


def _sizes(info: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param for d in info.type.tensor_type.shape.dim)


class _Classes:
    """Which of the values that several samples have in one order are equal in every sample."""

    def __init__(self, samples: Sequence[Sequence[Hashable]]) -> None:
        numbers: dict[tuple[Hashable, ...], int] = {}
        self.of = [numbers.setdefault(column, len(numbers)) for column in zip(*samples, strict=True)]
        self.fixed = {number: column[0] for column, number in numbers.items() if len(set(column)) == 1}

    def hold(self, sample: Sequence[Hashable]) -> bool:
        """Whether the values of another sample are equal where those were."""
        found = dict(self.fixed)
        return len(sample) == len(self.of) and all(
            found.setdefault(number, value) == value for number, value in zip(self.of, sample, strict=True)
        )


class OpenModel:
    """What serves all ``samples``, which are alike. ``model`` is None where what differs must be known beforehand.

    ``in_run``: it may compute the constants that differ; their names are told from those of an open model of such.
    """

    def __init__(self, samples: Sequence[Sized], in_run: bool = False) -> None:
        self.in_run, self.label = in_run, "data size" if in_run else "size"
        self.constants = _Classes([sample.constants for sample in samples])
        #: Of each class of constants that is an input: a slot that reads it.
        self.open: dict[int, int] = {}
        for slot, number in enumerate(self.constants.of):
            if number not in self.constants.fixed:
                self.open.setdefault(number, slot)
        #: What these inputs are called, by class, in the order in which they are read.
        self.inputs_of = {number: f"@{self.label}/{place}" for place, number in enumerate(self.open)}
        self.names = set(self.inputs_of.values())
        self.shaped: list[str] = []
        self.model: onnx.ModelProto | None = onnx.ModelProto()
        self.model.CopyFrom(samples[0].model)
        if not self._take_out(samples):
            self.model = None
            return
        self.sizes = _Classes([self._sizes(sample) for sample in samples])
        self._name_sizes(samples[0])

    def inputs(self, sample: Sized) -> dict[str, np.ndarray] | None:
        """What to feed besides for a model that is like the samples; None where it is not served."""
        if self.model is None or not self.constants.hold(sample.constants) or not self.sizes.hold(self._sizes(sample)):
            return None
        return {name: onnx.numpy_helper.to_array(tensor) for name, tensor in self.known(sample).items()}

    def known(self, sample: Sized) -> dict[str, onnx.TensorProto]:
        """The constants of a sample that are inputs of the open model, by the inputs' names."""
        return {self.inputs_of[number]: sample.read(slot) for number, slot in self.open.items()}

    def _sizes(self, sample: Sized) -> list[Hashable]:
        """All sizes of a sample: what it declares, and those of open constants and of what is made with them; ranks."""
        shapes = [sample.constants[slot][1] for slot in self.open.values()]
        shapes += [sample.given[name].shape or () if sample.rank(name) is not None else () for name in self.shaped]
        return [*sample.declared, *(size for shape in shapes for size in shape), tuple(map(len, shapes))]

    def _take_out(self, samples: Sequence[Sized]) -> bool:
        """Let the nodes read inputs instead of the constants that differ; False where one must not."""
        assert self.model is not None
        graph, slots, first = self.model.graph, list[Slot](), samples[0]
        for _ in _rows(graph, first.written[0], slots):
            pass
        for (node, place), number, found in zip(slots, self.constants.of, first.constants, strict=True):
            if number not in self.open:
                continue
            if found[0] in _FLOATS and not self.in_run and not _is_read_as_it_is(node, place):
                return False
            node.input[place] = self.inputs_of[number]
        for node in graph.node:
            if not self.names.isdisjoint(node.input):
                ranks = {sample.rank(node.output[0]) for sample in samples}
                self.shaped += [node.output[0]] if len(ranks) == 1 and None not in ranks else []
        used = used_tensors(graph.node)
        kept = [tensor for tensor in graph.initializer if tensor.name in used]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        return True

    def _name_sizes(self, first: Sized) -> None:
        """Declare the sizes by name that differ."""
        assert self.model is not None
        graph = self.model.graph
        dims = [dim for info in _infos(graph) for dim in info.type.tensor_type.shape.dim]
        for number, slot in self.open.items():
            kind, shape, _ = first.constants[slot]
            graph.input.append(onnx.helper.make_tensor_value_info(self.inputs_of[number], kind, shape))
            dims += graph.input[-1].type.tensor_type.shape.dim
        outputs = {info.name for info in graph.output}
        for tensor in self.shaped:
            value = first.given[tensor]
            info = onnx.ValueInfoProto(name=tensor, type=type_proto(value.dtype, value.shape))
            if tensor not in outputs:
                info = graph.value_info.add(name=tensor, type=info.type)
            dims += info.type.tensor_type.shape.dim
        named: dict[int, str] = {}
        for dim, number in zip(dims, self.sizes.of[:-1], strict=True):
            if number not in self.sizes.fixed:
                dim.dim_param = named.setdefault(number, f"{self.label} {len(named)}")


def _is_read_as_it_is(node: onnx.NodeProto, slot: int) -> bool:
    """Whether a kernel computes the same of numbers that it knows beforehand: it may lay out weights anew."""
    traits = traits_of(node.op_type, node.domain)
    return traits.elementwise or traits.moves is None or slot in traits.moves or (traits.product and slot == 0)
