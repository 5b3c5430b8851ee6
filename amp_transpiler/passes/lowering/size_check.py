"""Whether the sizes of a model fit together, told from the few nodes of it that differ in what they do with sizes.

onnxruntime finds that while it loads a model: it infers every shape anew, from node to node. Of models that are alike

- most nodes read tensors of one shape each time, as the update of a parameter does, and so make what they made. What
  was found of these holds again if the others make what they made;
- many others are the same operator and read tensors whose shapes were equal each time, as those of layers do. One of
  them is enough, if what they make has equal shapes again.

So one node of each kind is loaded, with the sizes of the new model, and the shapes that come out are compared.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import onnx

from amp_transpiler.ir.control import nested_graphs
from amp_transpiler.passes.lowering.lowered import used_tensors
from amp_transpiler.passes.lowering.open_sizes import OpenModel, Sized, settings

_WHOLE = frozenset({onnx.TensorProto.INT32, onnx.TensorProto.INT64})

#: Element type and sizes of a tensor, as onnxruntime infers them; a size that it cannot tell is no number.
Inferred = tuple[int, tuple[int | str | None, ...]]
_UNKNOWN: Inferred = 0, ()


def watched(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with everything that its nodes make as an output, so that loading it tells their shapes."""
    found = _without_graph(model)
    found.graph.node.extend(_plain(model.graph))
    found.graph.initializer.extend(_constants(model.graph))
    found.graph.input.extend(model.graph.input)
    _watch(found, model)
    return found


def _plain(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph, with those of its branches in place of each If: as sizes, both sides are computed.

    So of the update of all parameters, which is a branch, the nodes that read no new size are told apart.
    """
    for node in graph.node:
        if node.op_type != "If" or node.domain:
            yield node
            continue
        branches = list(nested_graphs(node))
        for branch in branches:
            yield from _plain(branch)
        for number, name in enumerate(node.output):
            yield onnx.helper.make_node("Identity", [branches[0].output[number].name], [name])


def _constants(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """What :func:`_plain`'s nodes read."""
    yield from graph.initializer
    for node in graph.node:
        if node.op_type == "If" and not node.domain:
            for branch in nested_graphs(node):
                yield from _constants(branch)


def _watch(model: onnx.ModelProto, declared: onnx.ModelProto) -> None:
    """Let a model give all that its nodes make, of the types that another one declares."""
    infos = {info.name: info for info in (*declared.graph.value_info, *declared.graph.output)}
    made = [name for node in model.graph.node for name in node.output if name]
    model.graph.output.extend(infos.get(name) or onnx.ValueInfoProto(name=name) for name in made)


class SizeCheck:
    """What to load of further models that ``opened`` serves.

    ``shapes`` are what onnxruntime inferred of models that it serves, each :func:`watched`.
    """

    def __init__(self, opened: OpenModel, shapes: Sequence[Mapping[str, Inferred]]) -> None:
        assert opened.model is not None
        graph, self.opened, self.shapes = opened.model.graph, opened, list(shapes)
        nodes = list(_plain(graph))
        given = {info.name: _declared(info) for info in graph.input if info.name not in opened.names}
        always = {name: (found,) * len(shapes) for name, found in given.items() if _is_known(found)}
        columns = always | {name: tuple(known.get(name, _UNKNOWN) for known in shapes) for name in shapes[0]}
        vary = {name for name, column in columns.items() if len(set(column)) > 1}
        vary |= opened.names | given.keys() - always.keys()
        first: dict[Hashable, str] = {}
        #: Of each tensor the first one whose shape was equal each time, and the shapes that were the same each time.
        self.same = {n: first.setdefault(n if _may_say_sizes(c[0]) else c, n) for n, c in columns.items()}
        self.fixed = {name: columns[name][0] for name in first.values() if name not in vary}
        kinds = self._kinds(node for node in nodes if not vary.isdisjoint((*used_tensors([node]), *node.output)))
        within = {name for node in kinds for name in node.output}
        self.head = _without_graph(opened.model)
        self.head.graph.node.extend(kinds)
        self.used = used_tensors(kinds)
        self.differ = self.used - self.fixed.keys() - within
        unseen = {name for node in nodes for name in node.output} - columns.keys()
        #: Whether the part tells, which it does where all shapes in it are known.
        self.serves = all(_is_known(found) for column in columns.values() for found in column)
        self.serves &= unseen.isdisjoint(self.used | within)
        self.head.graph.initializer.extend(each for each in _constants(graph) if each.name in self.used)
        self.head.graph.input.extend(
            onnx.helper.make_tensor_value_info(name, *self.fixed[name])
            for name in sorted(self.used & self.fixed.keys() - within)
        )

    def _kinds(self, nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """One of each kind of these nodes, which reads the first of the tensors of equal shapes.

        Graphs go on reading the tensors that they read: those are made of the first ones.
        """
        found: dict[Hashable, onnx.NodeProto] = {}
        made = set[str]()
        for node in nodes:
            read = [self.same.get(name, name) for name in node.input]
            makes = (self.same.get(name, name) for name in node.output)
            graphs = [graph.SerializeToString(deterministic=True) for graph in nested_graphs(node)]
            kind = (node.op_type, node.domain, *read, ":", *makes, *settings(node), *graphs)
            if kind in found:
                continue
            for name in sorted(used_tensors([node]) - set(node.input) - made) if graphs else ():
                if self.same.get(name, name) != name:
                    found[name] = onnx.helper.make_node("Identity", [self.same[name]], [name])
                    made.add(name)
            found[kind] = twin = onnx.NodeProto()
            twin.CopyFrom(node)
            twin.input[:] = read
            _forget_sizes(twin)
            made.update(node.output)
        return list(found.values())

    def part(self, sample: Sized) -> onnx.ModelProto:
        """A node of each kind that reads or makes what differs in size, with the sizes of this model."""
        model = onnx.ModelProto()
        model.CopyFrom(self.head)
        for name, tensor in self.opened.known(sample).items():
            if name in self.used:
                model.graph.initializer.add().CopyFrom(tensor)
                model.graph.initializer[-1].name = name
        model.graph.input.extend(info for info in sample.model.graph.input if info.name in self.differ)
        _watch(model, sample.model)
        return model

    def fits(self, shapes: Mapping[str, Inferred]) -> bool:
        """Whether these shapes of the part are as equal as they were each time."""
        found = dict(self.fixed)
        return all(
            _is_known(shape) and found.setdefault(self.same[name], shape) == shape for name, shape in shapes.items()
        )


def _forget_sizes(node: onnx.NodeProto) -> None:
    """Let the graphs of a node take sizes from what it reads: those with a name are of no model yet."""
    for graph in nested_graphs(node):
        for info in (*graph.input, *graph.output, *graph.value_info):
            for dim in info.type.tensor_type.shape.dim:
                dim.ClearField("dim_param")
        for inner in graph.node:
            _forget_sizes(inner)


def _without_graph(model: onnx.ModelProto) -> onnx.ModelProto:
    head = onnx.ModelProto(ir_version=model.ir_version)
    head.opset_import.extend(model.opset_import)
    head.functions.extend(model.functions)
    head.graph.name = model.graph.name
    return head


def _declared(info: onnx.ValueInfoProto) -> Inferred:
    kind = info.type.tensor_type
    sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim]
    return kind.elem_type, tuple(sizes) if kind.HasField("shape") else (None,)


def _may_say_sizes(found: Inferred) -> bool:
    """Whether onnxruntime may know the numbers of such a tensor, as it does those of a Shape: each one is its own."""
    return found[0] in _WHOLE and len(found[1]) <= 1


def _is_known(found: Inferred) -> bool:
    return found[0] != 0 and all(isinstance(size, int) for size in found[1])
