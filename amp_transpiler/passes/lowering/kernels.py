"""The kernels of a lowered model, those of nested graphs as often as these run, and what each moves and computes."""

from __future__ import annotations

import math
from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from amp_transpiler.ir.attributes import attributes_of
from amp_transpiler.ir.constant_data import constant_tensor
from amp_transpiler.ir.control import nested_graphs
from amp_transpiler.ir.kernel_cost import launches, moved_bytes, tensor_bytes
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import flops_of, traits_of
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.lists.devices import busy_seconds
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.tensor_types import Type, types_in, unsized

Types = Mapping[str, Type]
CASTS = frozenset({"Cast", "CastLike"})

#: What kernels that are alike for a forecast have in common: the fields of its Work but their number.
Alike = tuple[int, int, str, bool, float]


@dataclass(frozen=True)
class Kernel:
    """A kernel of a lowered model.

    ``operator``: that of the program which it serves; None where it serves several. ``times``: how often it runs.
    ``bytes``: by element type, of all that it reads and writes, each operand whole. ``moved``: bytes without what a
    selection leaves unread. ``flops``: arithmetic of a sum of products, whose operands have the type ``dtype``.
    ``busy``: seconds of its instructions, as forecasts take them.
    ``node``: the number of the model's node that it, or the graph around it, belongs to.
    """

    type: str
    operator: Operator | None
    times: int
    bytes: Mapping[str, int]
    moved: int
    flops: int
    dtype: str
    busy: float = 0.0
    node: int = -1


def work_of(kernels: Iterable[Kernel]) -> Counter[Alike]:
    """How many kernels of each kind there are, each as often as it runs."""
    work = Counter[Alike]()
    for kernel in kernels:
        work[kernel.moved, kernel.flops, kernel.dtype, kernel.type in CASTS, kernel.busy] += kernel.times
    return work


def kernels_of(lowered: Lowered, graph: onnx.GraphProto, types: Types) -> tuple[list[Kernel], list[str]]:
    """Every kernel of a model whose inferred graph and its tensors' types these are.

    The second list names control flow that runs an unknown number of times, and nodes inside of it whose sizes are not
    known: such a graph is counted once, such a node as a kernel that moves nothing. GraphError names a tensor of the
    main graph whose shape is not known before the run.
    """
    walk = _Walk(lowered)
    padded = [*lowered.origins, *[None] * (len(graph.node) - len(lowered.origins))]
    found = [
        replace(kernel, node=number)
        for number, (node, origin) in enumerate(zip(graph.node, padded, strict=True))
        for kernel in walk.node(node, origin, types, nested=False)
    ]
    return found, walk.unknown


class _Walk:
    def __init__(self, lowered: Lowered) -> None:
        self.inner = lowered.inner
        graph = lowered.model.graph
        self.nodes = graph.node
        self.content = {tensor.name: tensor for tensor in graph.initializer}
        made = ((node.output[0], constant_tensor(node)) for node in graph.node if node.op_type == "Constant")
        self.content |= {name: tensor for name, tensor in made if tensor is not None}
        self.unknown: list[str] = []

    def node(self, node: onnx.NodeProto, origin: Operator | None, types: Types, nested: bool) -> list[Kernel]:
        """The kernels of one node: itself, or those of its graphs."""
        graphs = list(nested_graphs(node))
        if graphs:
            return self._control(node, origin, graphs, types)
        if not launches(node.op_type, node.domain):
            return []
        operands = [self._type(name, types) for name in node.input]
        results = [self._type(name, types) for name in node.output]
        used = [each for each in (*operands, *results) if each is not None]
        unknown = next((name for name in (*node.input, *node.output) if name and not _fixed(types.get(name))), None)
        if unknown is not None:
            if not nested:
                raise unsized(unknown, self.nodes, types)
            self.unknown.append(f"{node.op_type} '{node.name}'")
            return [Kernel(node.op_type, origin, 1, {}, 0, 0, "")]
        sizes: dict[str, int] = {}
        for each in used:
            sizes[each[0]] = sizes.get(each[0], 0) + tensor_bytes(each)
        read, written = ([tensor_bytes(each) if each else 0 for each in side] for side in (operands, results))
        part = traits_of(node.op_type, node.domain).part  # then what it reads a part of says nothing
        counted = [each for each in (results if part else used) if each is not None]
        rule = flops_of(node.op_type, node.domain)
        shapes = [[each[1] if each else None for each in side] for side in (operands, results)]
        attributes = attributes_of(node) if rule is not None else {}
        return [
            Kernel(
                node.op_type,
                origin,
                1,
                sizes,
                moved_bytes(node.op_type, node.domain, read, written),
                rule(attributes, *shapes) if rule is not None else 0,
                used[0][0] if rule is not None else next((each[0] for each in used if each[0] in FLOATS), ""),
                busy_seconds(node.op_type, max((math.prod(each[1]) for each in counted), default=0)),
            )
        ]

    def _type(self, name: str, types: Types) -> tuple[str, tuple[int, ...]] | None:
        found = types.get(name) if name else None
        return None if found is None or found[1] is None else (found[0], found[1])

    # -- nested graphs ---------------------------------------------------------------------------------
    def _control(
        self, node: onnx.NodeProto, origin: Operator | None, graphs: Sequence[onnx.GraphProto], types: Types
    ) -> list[Kernel]:
        """The dearest of the graphs (of an If one runs), as often as it runs."""
        bodies = [self._body(graph, origin, types) for graph in graphs]
        body = max(bodies, key=lambda kernels: (sum(k.times * k.moved for k in kernels), len(kernels)))
        times = 1 if node.op_type == "If" else self._times(node, types)
        if times is None:
            self.unknown.append(f"{node.op_type} '{node.name}'")
        return [replace(kernel, times=kernel.times * (1 if times is None else times)) for kernel in body]

    def _body(self, graph: onnx.GraphProto, around: Operator | None, types: Types) -> list[Kernel]:
        inside = ChainMap(types_in(graph), types)  # type: ignore[arg-type]  # read only
        found = []
        for node in graph.node:
            origin = next((self.inner[name] for name in node.output if name in self.inner), around)
            found += self.node(node, origin, inside, nested=True)
        return found

    def _times(self, node: onnx.NodeProto, types: Types) -> int | None:
        """How often the body of a Loop or Scan runs: the limit of a Loop, which may stop before; None: unknown."""
        if node.op_type == "Loop":
            limit = self.content.get(node.input[0])
            return None if limit is None else int(np.asarray(onnx.numpy_helper.to_array(limit)).item())
        if node.op_type != "Scan":
            return None
        attributes = attributes_of(node)
        scanned = attributes["num_scan_inputs"]
        found = self._type(node.input[len(node.input) - scanned], types)
        axis = (attributes.get("scan_input_axes") or [0])[0]
        return None if found is None else found[1][axis]


def _fixed(found: Type | None) -> bool:
    return found is not None and found[1] is not None
