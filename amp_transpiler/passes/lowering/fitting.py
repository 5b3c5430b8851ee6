"""A lowered model made to fit a place that lacks kernels: bodies for operators, 32 bits for 64-bit integers.

Graphs of If, Loop and Scan are made to fit too: a place may run them where it has no kernel for the node around them.

Which kernels a place has is data (``lists/kernels.json``); what stands for the others are the bodies of
``ops/place_bodies.py``. What has neither stays as it is.

Where a place computes with no 64-bit integers, tensors of them that are fed or computed hold 32 bits. Who feeds narrows
them, and who fetches widens. What says sizes and axes alone is on the host, and stays.
"""

from __future__ import annotations

from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import onnx

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.attributes import attributes_of
from amp_transpiler.ir.constant_data import constant_tensor
from amp_transpiler.ir.control import every_node, nested_graphs
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.node_protos import emitted_node
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.signature import Signature, signature
from amp_transpiler.ir.tensors import renamed
from amp_transpiler.ir.types import FLOATS, HALF, NAMES, ONNX_TYPES
from amp_transpiler.lists import Fault, faults, full_name, kernel_types, place_traits
from amp_transpiler.ops.place_bodies import Asked, body_of, integers_in
from amp_transpiler.passes.lowering.lowered import Lowered, Port, rename_tensors, used_tensors
from amp_transpiler.passes.lowering.tensor_types import Type, inferred, types_within
from amp_transpiler.passes.view.kernel_faults import Call, fault_of

#: onnxruntime's names of element types that are other than ours.
_SPELLED = {"float32": "float", "float64": "double"}
_WIDE, _NARROW = "int64", "int32"
_LEAST, _MOST = -(2**31), 2**31 - 1
#: What makes indices into an axis, with its number where none is given.
_INDEXES = {"ArgMax": 0, "ArgMin": 0, "TopK": -1}


def fitted(lowered: Lowered) -> Lowered:
    """The model in ``lowered``, and its ports, changed so that its place has kernels for what it computes."""
    return _Fitting(lowered).run()


class _Sizing(Emitter):
    """An emitter that keeps the shapes of what it makes."""

    def __init__(self, place: str, opset: int) -> None:
        super().__init__(place, opset)
        self.sizes: dict[str, tuple[int, ...] | None] = {}

    def op(self, type_: str, *inputs: Value | None, **settings: Any) -> Any:
        """As :meth:`Emitter.op`."""
        made = super().op(type_, *inputs, **settings)
        self.sizes |= {value.name: value.shape for value in (made if isinstance(made, tuple) else (made,))}
        return made


class _Fitting:
    def __init__(self, lowered: Lowered) -> None:
        self.lowered, self.graph = lowered, lowered.model.graph
        self.at = place_traits(lowered.place)
        self.opset = next(each.version for each in lowered.model.opset_import if not each.domain)
        self.types: dict[str, Type] = types_within(inferred(lowered))
        self.e = _Sizing(lowered.place, self.opset)
        # A node is called as what it made before that became an output.
        self.e.reserve(set(self.types).union(*((n.name, *n.input, *n.output) for n in every_node(self.graph.node))))
        self.e.initializers = {tensor.name: tensor for tensor in self.graph.initializer}
        self.e.given = lowered.given
        #: Tensors of 64-bit integers that hold 32 bits.
        self.narrow: set[str] = set()
        #: Integers that the host computes from sizes.
        self.sizes: set[str] = set()
        #: Of 64-bit indices that a kernel makes: the number that they are below.
        self.below: dict[str, int] = {}
        self.casts: dict[tuple[str, str], str] = {}
        #: What makes each tensor.
        self.makers: dict[str, onnx.NodeProto] = {}

    def run(self) -> Lowered:
        lowered, graph = self.lowered, self.graph
        if not self.at.wide_integers:
            self._narrow_feeds()
        nodes: list[onnx.NodeProto] = []
        origins: list[Operator | None] = []
        for node, origin in zip_longest(list(graph.node), lowered.origins):
            made = list(self._run_as(node, origin))
            nodes += made
            origins += [origin] * len(made)
        nodes += self._outputs(nodes)
        used = used_tensors(nodes) | {info.name for info in graph.output}
        del graph.node[:], graph.initializer[:]
        graph.node.extend(nodes)
        graph.initializer.extend(tensor for name, tensor in self.e.initializers.items() if name in used)
        lowered.origins = origins
        for values in (lowered.tensors, lowered.given):
            held = {key: value for key, value in values.items() if value.name in self.narrow}
            values.update({key: replace(value, dtype=_NARROW) for key, value in held.items()})
        return lowered

    def _check(self, node: onnx.NodeProto, origin: Operator | None) -> None:
        """GraphError where a tensor has a float type that the place's tensors cannot have."""
        for name in (*node.input, *node.output):
            kind = self._dtype(name)
            if kind in FLOATS and kind not in self.at.dtypes:
                label, other = node.name if origin is None else origin.label, "float16" if kind in HALF else "float32"
                raise GraphError(
                    f"operator '{label}' computes with {kind} ('{name}'), and on {self.at.title} tensors are "
                    f"{' or '.join(self.at.dtypes)}. Build or rewrite the program with {other} there, or run it on "
                    "another place"
                )

    def _type(self, name: str) -> Type:
        if name not in self.types and name in self.e.initializers:  # a body's constant
            tensor = self.e.initializers[name]
            self.types[name] = (NAMES[tensor.data_type], tuple(tensor.dims))
        return self.types.get(name, ("", None))

    def _dtype(self, name: str) -> str:
        return self._type(name)[0]

    def _value(self, name: str) -> Value | None:
        return Value(name, *self._type(name)) if name else None

    # -- one node -------------------------------------------------------------------------------------
    def _run_as(self, node: onnx.NodeProto, origin: Operator | None) -> Iterator[onnx.NodeProto]:
        """What the place runs for a node: nothing for a constant."""
        if (constant := constant_tensor(node)) is not None:
            self.e.initializers[node.output[0]] = renamed(constant, node.output[0])
            return
        self._check(node, origin)
        graphs = list(nested_graphs(node))
        yield from self._fit_graphs(node, graphs, origin) if graphs else self._fit(node)

    def _fit_graphs(
        self, node: onnx.NodeProto, graphs: Sequence[onnx.GraphProto], origin: Operator | None
    ) -> Iterator[onnx.NodeProto]:
        """The node, whose graphs run on the place too, an If's by itself. What goes in and comes out keeps its width,
        but for what an If chooses."""
        for slot, name in enumerate(node.input):
            if name in self.narrow:
                node.input[slot] = yield from self._cast(name, _WIDE)
        for graph in graphs:
            made, casts = list[onnx.NodeProto](), dict(self.casts)
            with self.e.nested():
                for each in graph.node:
                    op = next((self.lowered.inner[n] for n in each.output if n in self.lowered.inner), origin)
                    new = list(self._run_as(each, op))
                    if op is not None:
                        self.lowered.inner.update((name, op) for one in new for name in one.output if name)
                    made += new
            self.casts = casts
            del graph.node[:]
            graph.node.extend(made)
        chosen = set[int]()
        for slot, name in enumerate(node.output if node.op_type == "If" and not node.domain else ()):
            outs = {graph.output[slot].name for graph in graphs}
            if name and outs & self.narrow and not outs & self.sizes:
                chosen.add(slot)
                self._hold(name)
        for graph in graphs:
            for slot, out in enumerate(graph.output):
                if slot in chosen or out.name in self.narrow:
                    graph.node.extend(self._put_out(out, _NARROW if slot in chosen else _WIDE))
        yield node

    def _put_out(self, out: onnx.ValueInfoProto, dtype: str) -> Iterator[onnx.NodeProto]:
        """Let the output of a nested graph have this width."""
        out.name = yield from self._cast(out.name, dtype)
        out.type.tensor_type.elem_type = ONNX_TYPES[dtype]

    def _fit(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """The node, or what stands for it."""
        self.makers.update(dict.fromkeys(node.output, node))
        while node.input and not node.input[-1]:  # of an input that is left out by name WebGPU's Conv kills the process
            del node.input[-1]
        slots = signature(node.op_type, self.opset, node.domain)
        kinds = kernel_types(self.at.provider, node.op_type, self.opset, node.domain)
        if slots is None:  # onnxruntime's own
            yield from (self._instead(node) if kinds is None or self._fault(node) else None) or [node]
            return
        if not self.at.wide_integers:
            yield from self._narrowed(node, slots, kinds)
        if self._lacks(node, slots, kinds):
            made = self._instead(node)
            if made is not None:
                yield from made
                return
            yield from self._widened(node, slots)
        yield node

    def _instead(self, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        """What stands for the node, fitted; None where nothing does, GraphError where its kernel fails as well."""
        fault, made = self._fault(node), self._body(node)
        if made is not None:
            found: list[onnx.NodeProto] = []
            for each in made:
                self._settle(each)
                found += self._fit(each)
            return found
        if fault is not None:
            raise GraphError(
                f"the kernel of {node.op_type} on {self.at.title} fails on what '{node.output[0]}' is made of "
                f"({fault.where}): {fault.what}. What stands for it wants fixed shapes, and has no form for every "
                "attribute: give the shapes of all feeds, or run on another place"
            )
        return None

    def _lacks(self, node: onnx.NodeProto, slots: Signature, kinds: Mapping[str, frozenset[str]] | None) -> bool:
        """Whether the place has no kernel for this node's tensors, or one that fails."""
        for at, names in ((slots.input, node.input), (slots.output, node.output)):
            for slot, name in enumerate(names):
                kind, variable = self._dtype(name), at(slot)
                if kind and (kind not in slots.admits[variable] or not _takes(kinds, variable, kind)):
                    return True
        return kinds is None or self._fault(node) is not None

    def _fault(self, node: onnx.NodeProto) -> Fault | None:
        """What is wrong with the kernel for such tensors, where a body stands for it."""
        full_type = full_name(node.op_type, node.domain)
        if full_type not in faults(self.lowered.place):
            return None
        types = [self._type(name) if name else ("", None) for name in node.input]
        dtypes, shapes = [kind for kind, _ in types], [shape for _, shape in types]

        def integers(slot: int) -> list[int] | None:
            return integers_in(self.e, self._value(node.input[slot])) if slot < len(node.input) else None

        results, attrs = sum(map(bool, node.output)), attributes_of(node)
        asked = {"inputs": node.input, "made_by": self._made_by}
        fault = fault_of(full_type, Call(self.lowered.place, attrs, dtypes, shapes, results, integers, **asked))
        return fault if fault is not None and fault.around == "body" else None

    def _made_by(self, name: str) -> tuple[str, Sequence[str]] | None:
        made = self.makers.get(name)
        return None if made is None else (full_name(made.op_type, made.domain), made.input)

    def _body(self, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        """What stands for the node; None where nothing does."""
        write = body_of(full_name(node.op_type, node.domain))
        if write is None:
            return None
        e, results = self.e, [value for name in node.output if (value := self._value(name)) is not None]
        e.nodes, e.prefix = [], node.output[0]
        values = write(e, Asked(attributes_of(node), results), *(self._value(name) for name in node.input))
        made, e.nodes = e.nodes, []
        if values is None:
            return None
        own = {name for each in made for name in each.output}
        for value, result in zip(values, results, strict=True):
            if value.name in own:
                rename_tensors(made, {value.name: result.name})
            else:
                made.append(emitted_node("Identity", [value.name], [result.name]))
            if (result.dtype, value.dtype) == (_WIDE, _NARROW):
                self._hold(result.name)
        return made

    def _settle(self, node: onnx.NodeProto) -> None:
        """Note the element types of what a body's node makes."""
        slots = signature(node.op_type, self.opset, node.domain)
        for slot, name in enumerate(node.output if slots is not None else ()):
            assert slots is not None
            variable = slots.output(slot)
            kinds = [self._dtype(read) for i, read in enumerate(node.input) if slots.input(i) == variable]
            if node.op_type == "Cast":
                kinds = [NAMES[node.attribute[0].i]]
            elif len(slots.admits[variable]) == 1:
                kinds = list(slots.admits[variable])
            if kinds and name not in self.types:
                self.types[name] = (kinds[0], self.e.sizes.get(name))

    # -- integers -------------------------------------------------------------------------------------
    def _hold(self, name: str) -> None:
        """From here on a tensor holds 32 bits."""
        self.narrow.add(name)
        self.types[name] = (_NARROW, self._type(name)[1])

    def _narrow_feeds(self) -> None:
        """Feeds of 64-bit integers hold 32 bits, but for those that say sizes and axes alone."""
        computed = set[str]()
        for node in every_node(self.graph.node):
            slots = signature(node.op_type, self.opset, node.domain)
            computed.update(
                name
                for slot, name in enumerate(node.input)
                if slots is None or _NARROW in slots.admits[slots.input(slot)] or body_of(node.op_type)
            )
        feeds = {port.tensor for port in self.lowered.feeds if port.dtype == _WIDE} & computed
        for info in self.graph.input:
            if info.name in feeds:
                info.type.tensor_type.elem_type = ONNX_TYPES[_NARROW]
                self._hold(info.name)
        self.lowered.feeds = [_held(port, feeds) for port in self.lowered.feeds]

    def _narrowed(
        self, node: onnx.NodeProto, slots: Signature, kinds: Mapping[str, frozenset[str]] | None
    ) -> Iterator[onnx.NodeProto]:
        """Casts that a node wants before it, whose 64-bit integers are to hold 32 bits."""
        given = {name for name in node.input if name and name not in self.e.initializers}
        if traits_of(node.op_type, node.domain).shape_only or (given and given <= self.sizes):
            self.sizes.update(node.output)  # onnxruntime computes on the host what is made of sizes
            return
        shape = self._type(node.input[0])[1] if node.op_type in _INDEXES else None
        if shape:
            axis = next((each.i for each in node.attribute if each.name == "axis"), _INDEXES[node.op_type])
            self.below[node.output[-1]] = shape[axis]
        for variable in dict.fromkeys((*slots.inputs, *slots.outputs)):
            if not {_WIDE, _NARROW} <= slots.admits[variable]:
                continue
            read = [i for i, name in enumerate(node.input) if name and slots.input(i) == variable]
            made = [name for i, name in enumerate(node.output) if name and slots.output(i) == variable]
            names = [*(node.input[i] for i in read), *made]
            if not any(self._dtype(name) == _WIDE or name in self.narrow for name in names):
                continue
            if not made and self.narrow.isdisjoint(names) and _takes(kinds, variable, _WIDE):
                continue
            for slot in read:
                node.input[slot] = yield from self._cast(node.input[slot], _NARROW)
            for name in made:
                self._hold(name)
            for attribute in node.attribute if made else ():
                _narrow_attribute(attribute)

    def _widened(self, node: onnx.NodeProto, slots: Signature) -> Iterator[onnx.NodeProto]:
        """Casts that a node wants before it which takes 64 bits alone."""
        for slot, name in enumerate(node.input):
            if name in self.narrow and _NARROW not in slots.admits[slots.input(slot)]:
                node.input[slot] = yield from self._cast(name, _WIDE)

    def _cast(self, name: str, dtype: str) -> Generator[onnx.NodeProto, None, str]:
        """The same integers in another width, and the node that makes them where one does."""
        if self._dtype(name) == dtype:
            return name
        if (name, dtype) not in self.casts:
            self.casts[name, dtype] = new = self.e.name("Cast")
            self.types[new] = (dtype, self._type(name)[1])
            if name in self.e.initializers:
                self.e.initializers[new] = self._constant(name, new)
            elif name in self.below:  # a place that casts no 64-bit integers takes them as indices
                every = self.e.const(np.arange(self.below[name], dtype=_NARROW))
                yield emitted_node("Gather", [every.name, name], [new])
            else:
                yield emitted_node("Cast", [name], [new], attrs={"to": ONNX_TYPES[dtype]})
        return self.casts[name, dtype]

    def _constant(self, name: str, new: str) -> onnx.TensorProto:
        """A constant in 32 bits. GraphError where it does not fit."""
        array = onnx.numpy_helper.to_array(self.e.initializers[name])
        if array.size and (int(array.min()) < _LEAST or int(array.max()) > _MOST):
            raise GraphError(
                f"constant '{name}' goes from {array.min()} to {array.max()}; {self.at.title} computes with no "
                f"64-bit integers, and 32 bits hold {_LEAST} to {_MOST}. Give it other content, or run on CPU"
            )
        return onnx.numpy_helper.from_array(array.astype(_NARROW), new)

    def _outputs(self, nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """Let what is fetched hold 32 bits; state keeps its type, by these nodes."""
        casts: list[onnx.NodeProto] = []
        for port in self.lowered.updates:
            if port.tensor in self.narrow:
                name = self.e.name(port.tensor)
                rename_tensors(nodes, {port.tensor: name})
                casts.append(emitted_node("Cast", [name], [port.tensor], attrs={"to": ONNX_TYPES[_WIDE]}))
                self.narrow.discard(port.tensor)
        for info in self.graph.output:
            if info.name in self.narrow:
                info.type.tensor_type.elem_type = ONNX_TYPES[_NARROW]
        self.lowered.fetches = [_held(port, self.narrow) for port in self.lowered.fetches]
        return casts


def _held(port: Port, narrow: Container[str]) -> Port:
    return replace(port, dtype=_NARROW, holds=port.dtype) if port.tensor in narrow else port


def _takes(kinds: Mapping[str, frozenset[str]] | None, variable: str, dtype: str) -> bool:
    """Whether a kernel takes an element type; of types that its registration does not speak of it takes any."""
    return kinds is not None and (variable not in kinds or _SPELLED.get(dtype, dtype) in kinds[variable])


def _narrow_attribute(attribute: onnx.AttributeProto) -> None:
    """Of an attribute that says the element type of a result, 32 bits for 64."""
    if attribute.name in ("to", "dtype") and attribute.i == ONNX_TYPES[_WIDE]:
        attribute.i = ONNX_TYPES[_NARROW]
    elif attribute.name == "value" and attribute.t.data_type == ONNX_TYPES[_WIDE]:
        array = onnx.numpy_helper.to_array(attribute.t).astype(_NARROW)
        attribute.t.CopyFrom(onnx.numpy_helper.from_array(array, attribute.t.name))
