"""ONNX in: a model file or ModelProto becomes a Graph that loses nothing of it.

First every variable of a graph is made, then its operators, so that the order of the nodes in the file does
not matter; nested graphs are read when their operator is. Element types are found at the end (``annotate``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import onnx

from amp_transpiler.errors import GraphError, ModelFileError
from amp_transpiler.ir.annotate import annotate
from amp_transpiler.ir.attributes import Attributes
from amp_transpiler.ir.gc_pause import collector_paused
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import from_type_proto
from amp_transpiler.ir.kinds import typed_by_kind
from amp_transpiler.ir.metadata import INITIALIZER, read_marks, read_state
from amp_transpiler.ir.model_file import DataFiles, ModelFile, copy_without, read_model, without_weights
from amp_transpiler.ir.model_info import ModelInfo
from amp_transpiler.ir.node_fields import NodeFields, fields_of
from amp_transpiler.ir.nodes import FORWARD, OWN, Shape, Variable
from amp_transpiler.ir.oldest_forms import OLDEST, type_oldest
from amp_transpiler.ir.proto_residue import Entry, Source, leftover, set_source, source_of
from amp_transpiler.ir.tensors import HeldTensor, is_small, stripped, tensor_type
from amp_transpiler.ir.torch_marks import derived_scope
from amp_transpiler.ir.verify import all_clashes
from amp_transpiler.ir.weights import STATISTICS, not_a_weight
from amp_transpiler.ir.wellformed import node_label
from amp_transpiler.lists import plain_domain

G = TypeVar("G", bound=Graph)

#: Fields of GraphProto that have a place of their own in a Graph.
_GRAPH_LISTS = ("node", "initializer", "sparse_initializer", "input", "output", "value_info")


def load(
    model_or_path: Any,
    made: Callable[[str], G],
    *,
    name: str | None = None,
    external_data_dir: str | os.PathLike[str] | None = None,
    weights: bool = True,
) -> G:
    """A program, and its startup program, from a model file or ModelProto; see ``Program.from_onnx``.

    ``made`` makes an empty one from its name, for each graph of the model. Without ``weights`` nobody asks which of the
    constants are trainable.
    """
    with collector_paused():
        read = read_model(model_or_path, external_data_dir)
        try:
            return program_of(read, made, name, weights)
        except GraphError as error:
            raise GraphError(f"{read.label}: {error}") from None


def program_of(read: ModelFile, made: Callable[[str], G], name: str | None = None, weights: bool = True) -> G:
    """The program of a model that was read."""
    model = read.model
    reader = _Reader(DataFiles(read.label, read.folder, read.path), made)
    program = reader.graph(model.graph, read.nodes, read.initializers, None, name).program
    program.numeric_guards = True
    if read.path is not None and not name:  # exporters call every graph the same
        program.call(read.path.stem, program.graph_name)
    info = program.info
    info.ir_version, info.model_version = model.ir_version, model.model_version
    info.producer_name, info.producer_version, info.domain = model.producer_name, model.producer_version, model.domain
    info.doc = model.doc_string
    info.opsets = {plain_domain(opset.domain): opset.version for opset in model.opset_import}
    info.metadata = _entries(model.metadata_props)
    info.functions = [reader.files.embedded(function) for function in model.functions]
    source = source_of(program)
    assert source is not None
    source.path, source.external = read.path, reader.files.tensors
    source.model = reader.files.embedded(copy_without(model, ("graph", "functions")))
    _check_domain(program, read.label)
    _mark_parameters(program, weights)
    kinds = None if read.model.graph.sparse_initializer else typed_by_kind(program, read.nodes)
    if kinds is None:
        annotate(program, _as_read(program, read))
    if info.opsets.get("", OLDEST) < OLDEST:
        type_oldest(program)
    clashes = all_clashes(program, kinds)
    if clashes:
        raise GraphError("; ".join(clashes[:3]))
    _settle(program)
    return program


def _as_read(program: Graph, read: ModelFile) -> onnx.ModelProto | None:
    """The model without its weights, for type inference; None where its nodes are not in order."""
    keys = [op.key for op in program.operators]
    if keys != sorted(keys):
        return None
    held = [v for v in program.variables if v.data is not None and v.producer is None]
    if read.path is not None and all(is_small(v.data) or isinstance(v.data, HeldTensor) for v in held):
        return read.model  # as it is: it has no weights
    copy = without_weights(read.model)
    copy.graph.initializer.extend(
        stripped(v.data, v.name) for v in held if not isinstance(v.data, onnx.SparseTensorProto)
    )
    return copy


def _check_domain(program: Graph, label: str) -> None:
    """Operators of ai.onnx mean nothing without the version of their set; a cut file may have lost it."""
    if "" in program.info.opsets or program.info.ir_version < 3:
        return
    for op in program.walk():
        if not op.domain:
            raise ModelFileError(
                f"{label} says no version of the operator set ai.onnx (opset_import), but operator "
                f"'{op.label}' ({op.type}) is of it"
            )


def _mark_parameters(program: Graph, weights: bool) -> None:
    """Find the persistable variables, and make the startup program that sets them.

    A program that was written by this package says which they are. In any other file weights are (trainable ones)
    and running statistics; other float initializers are constants.
    """
    if not read_state(program) and weights:
        for variable in program.variables:
            data = variable.data
            if data is not None and not isinstance(data, onnx.SparseTensorProto) and variable.producer is None:
                why_not = not_a_weight(variable)
                variable.persistable, variable.trainable = why_not in ("", STATISTICS), not why_not
    contents = [
        (v.name, v.dtype, v.shape, v.data)
        for v in program.variables
        if v.persistable and v.producer is None and v.data is not None
    ]
    program.defer_startup(partial(_startup, type(program), f"{program.name}_startup", contents))


def _startup(kind: type[G], name: str, contents: list[tuple[str, str | None, Shape | None, Any]]) -> G:
    """A program that sets each variable to the content that it carried (shared, not copied)."""
    startup = kind(name)
    for variable, dtype, shape, data in contents:
        out = startup.add_variable(variable, dtype, shape, persistable=True, data=data)
        startup.add_operator(INITIALIZER, [], [out], domain=OWN, role=FORWARD)
    return startup


def _settle(program: Graph) -> None:
    source = source_of(program)
    if source is not None:
        source.settle()
    for op in program.nesting:
        for nested in op.attrs.programs:
            _settle(nested)


def _entries(props: Iterable[onnx.StringStringEntryProto]) -> dict[str, str]:
    return {entry.key: entry.value for entry in props}


class _Frame(Generic[G]):
    """A graph being read: its program, the graph around it, and what it reads from there, in order."""

    def __init__(self, program: G, outer: _Frame[G] | None) -> None:
        self.program = program
        self.outer = outer
        self.captured: dict[Variable, None] = {}

    def find(self, name: str) -> Variable | None:
        """The variable called ``name`` here or, captured at every level in between, around here."""
        found = self.program.find(name)
        if found is not None:
            return found
        around = None if self.outer is None else self.outer.find(name)
        if around is None:
            return None
        inner = self.program.add_variable(name)
        inner.outer = around
        self.captured[around] = None
        return inner


class _Reader(Generic[G]):
    def __init__(self, files: DataFiles, made: Callable[[str], G]) -> None:
        self.files = files
        self.made = made

    def graph(
        self,
        graph: onnx.GraphProto,
        nodes: Sequence[NodeFields],
        initializers: Iterable[onnx.TensorProto | HeldTensor],
        outer: _Frame[G] | None,
        name: str | None = None,
    ) -> _Frame[G]:
        """Read one graph. ``outer`` is the frame of the graph around a nested one."""
        program = self.made(name or graph.name)
        program.info = ModelInfo(opsets={}, graph_doc=graph.doc_string, graph_metadata=_entries(graph.metadata_props))
        source = Source(copy_without(graph, _GRAPH_LISTS), program.graph_name)
        set_source(program, source)
        frame = _Frame(program, outer)
        self._initializers(program, source, initializers, graph.sparse_initializer)
        self._inputs(program, source, graph.input)
        made = iter(self._declare_outputs(program, nodes))
        for node in nodes:
            self._operator(frame, node, [next(made) if output else None for output in node.outputs])
        for info in graph.output:
            variable = frame.find(info.name)
            if variable is None:
                raise GraphError(f"graph '{program.name}' gives the output '{info.name}', which nothing produces")
            program.outputs.append(variable)
            source.outputs.append(_entry(variable, info))
        for info in graph.value_info:
            variable = program.find(info.name)
            if variable is None or not _outdated(variable, info):
                source.value_info.append(_entry(variable, info))
        return frame

    def _initializers(
        self,
        program: Graph,
        source: Source,
        dense: Iterable[onnx.TensorProto | HeldTensor],
        sparse: Iterable[onnx.SparseTensorProto],
    ) -> None:
        contents: dict[str, Any] = {}
        held = [(tensor.name, self.files.content(tensor)) for tensor in dense]
        for name, data in (*held, *((item.values.name, item) for item in sparse)):
            if name in contents:
                raise GraphError(f"graph '{program.name}' has two initializers called '{name}'")
            contents[name] = data
        source.initializers = program.declare(contents)
        for variable in source.initializers:
            variable.data = data = contents[variable.name]
            variable.dtype, variable.shape = tensor_type(data)

    def _inputs(self, program: Graph, source: Source, inputs: Iterable[onnx.ValueInfoProto]) -> None:
        seen: set[str] = set()
        for info in inputs:
            if info.name in seen:
                raise GraphError(f"graph '{program.name}' has two inputs called '{info.name}'")
            seen.add(info.name)
            if not program.has_var(info.name):  # else an initializer that is an input as well: fed by nobody
                program.add_input(info.name, None, None)
            source.inputs.append(_entry(program.var(info.name), info))

    def _declare_outputs(self, program: Graph, nodes: Iterable[NodeFields]) -> list[Variable]:
        """What nodes make, in order, less what they leave out."""
        made = [output for node in nodes for output in node.outputs if output]
        known = set(program.names)
        if len(set(made)) < len(made) or not known.isdisjoint(made):
            self._refuse_names(program, nodes, known)
        return program.declare(made)

    def _refuse_names(self, program: Graph, nodes: Iterable[NodeFields], known: set[str]) -> None:
        """GraphError for the first of the nodes that writes what is there already."""
        for node in nodes:
            for output in node.outputs:
                if output in known:
                    raise GraphError(
                        f"node {node_label(node.proto)} of graph '{program.name}' writes '{output}', which another "
                        "node, an input or an initializer gives already; a name is written once"
                    )
                if output:
                    known.add(output)

    def _operator(self, frame: _Frame[G], node: NodeFields, outputs: list[Variable | None]) -> None:
        program, proto = frame.program, node.proto
        attributes = Attributes()
        captured: dict[Variable, None] = {}
        for attribute in node.attributes:
            if node.numbers is None:
                self._attribute(attributes, attribute, frame, captured)
            else:
                attributes.keep(attribute)
        inputs = program.find_all(node.inputs)
        if None in inputs:
            pairs = zip(inputs, node.inputs, strict=True)
            inputs = [self._read(frame, node, name) if v is None else v for v, name in pairs]
        op = program.add_read(node.type, inputs, outputs, attributes, node.domain)
        op.name = node.name
        if not node.plain:
            op.overload, op.doc = proto.overload, proto.doc_string
            read_marks(op, _entries(proto.metadata_props) if proto.metadata_props else {})
            op.source = leftover(proto)
        else:
            if node.name.startswith("/"):
                op.scope = derived_scope(op)
            if node.domain or not node.name:
                op.source = leftover(proto)
        if op.domain == OWN and op.type == INITIALIZER and outputs[0] is not None and "value" in attributes:
            outputs[0].data, outputs[0].persistable = attributes.pop("value"), True
        for variable in captured:
            op.add_capture(variable)

    def _read(self, frame: _Frame[G], node: NodeFields, name: str) -> Variable | None:
        if not name:
            return None
        variable = frame.find(name)
        if variable is None:
            raise GraphError(
                f"node {node_label(node.proto)} of graph '{frame.program.name}' reads '{name}', which nothing produces"
            )
        return variable

    def _attribute(
        self, attributes: Attributes, attribute: onnx.AttributeProto, frame: _Frame[G], captured: dict[Variable, None]
    ) -> None:
        if not attribute.HasField("g") and not attribute.graphs:
            attributes.keep(self.files.embedded(attribute))
            return
        programs: list[Graph] = []
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            inner = self.graph(graph, fields_of(graph.node), graph.initializer, frame)
            captured.update(inner.captured)
            programs.append(inner.program)
        header = copy_without(attribute, ("g", "graphs"))
        attributes.set_graph(header, programs[0] if attribute.HasField("g") else programs)


def _outdated(variable: Variable, info: onnx.ValueInfoProto) -> bool:
    """Whether it gives an input, an output or an initializer another element type than these say themselves: converters
    leave such entries behind, and onnxruntime passes over them."""
    known = variable.dtype is not None and info.type.HasField("tensor_type")
    return known and from_type_proto(info.type, info.name)[0] not in (None, variable.dtype)


def _entry(variable: Variable | None, info: onnx.ValueInfoProto) -> Entry:
    """Remember an entry of the file, and put what it says on the variable."""
    if variable is not None:
        if info.type.HasField("tensor_type"):
            dtype, shape = from_type_proto(info.type, info.name)
            if variable.dtype is not None and dtype not in (None, variable.dtype):
                raise GraphError(f"'{info.name}' is declared as {dtype}, but elsewhere it is {variable.dtype}")
            variable.dtype = variable.dtype or dtype
            variable.shape = shape if variable.shape is None else variable.shape
        elif info.type.WhichOneof("value") and variable.dtype is None:
            variable.type_proto = info.type
        variable.doc = variable.doc or info.doc_string
        variable.metadata = variable.metadata or _entries(info.metadata_props)
    return Entry(variable, info)
