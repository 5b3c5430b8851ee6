"""ONNX out: a program as a ModelProto. The same program gives the same bytes, an unchanged one its file's content."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from amp_transpiler.errors import ArgumentTypeError, GraphError, ScopeError
from amp_transpiler.files import Group
from amp_transpiler.ir.external import Layout
from amp_transpiler.ir.gc_pause import collector_paused
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import told_by_inputs
from amp_transpiler.ir.metadata import INITIALIZER, written_marks, written_state
from amp_transpiler.ir.model_info import FREE_INITIALIZERS
from amp_transpiler.ir.nodes import FORWARD, OWN, Operator, Variable, origin
from amp_transpiler.ir.proto_residue import source_of, value_info
from amp_transpiler.ir.tensors import Tensor, embedded, stripped, tensor_type
from amp_transpiler.ir.updates import same_shape
from amp_transpiler.lists import plain_domain

#: The TensorProto of a variable with content, from the variable and that content.
Content = Callable[[Variable, Any], Tensor]


def model_of(
    program: Graph, content: Content | None = None, values: dict[Variable, Any] | None = None, results: bool = False
) -> onnx.ModelProto:
    """The program as a ModelProto; with ``results``, what :func:`results_of` names are its outputs.

    ``content`` makes the TensorProtos (default: with everything inside). ``values`` replaces the content that
    variables carry; a persistable variable without any is a graph input. GraphError where a variable is read
    that nothing gives.
    """
    outputs = results_of(program) if results else program.outputs
    return _Writer(content or embedded, values or {}, outputs).model(program)


def results_of(program: Graph) -> list[Variable]:
    """The declared outputs; of a built program without any, all that its last operators compute.

    Those are the operators none of whose results another one reads; their optional results do not count. No outputs for
    a program with a training step, whose results are fetched by name, and for a startup program, whose results are
    state.
    """
    if program.outputs or any(op.role != FORWARD for op in program.operators):
        return program.outputs
    last = [op for op in program.operators if not any(v is not None and v.readers for v in op.outputs)]
    return [
        v
        for op in last
        for slot, v in enumerate(op.outputs)
        if v is not None and not v.persistable and not _optional(op, slot)
    ]


def _optional(op: Operator, slot: int) -> bool:
    """Whether the operator can do without this output, which nobody has asked for then."""
    if op.domain or not onnx.defs.has(op.type):
        return False
    outputs = onnx.defs.get_schema(op.type, op.program.opset()).outputs
    return slot < len(outputs) and outputs[slot].option == onnx.defs.OpSchema.FormalParameterOption.Optional


def weightless(program: Graph) -> onnx.ModelProto:
    """The program as a ModelProto without the content of its large tensors: for onnx's type inference and inliner."""

    def content(variable: Variable, data: Any) -> Tensor:
        return data if isinstance(data, onnx.SparseTensorProto) else stripped(data, variable.name)

    return model_of(program, content)


def save(
    program: Graph,
    path: str | os.PathLike[str] | None = None,
    *,
    scope: Any = None,
    external_data: bool | str | None = None,
    group: Group | None = None,
) -> onnx.ModelProto:
    """The program as a ModelProto, written to ``path`` where one is given; see ``Program.to_onnx``.

    With ``group`` the files become part of it, and appear with the others.
    """
    if path is not None and not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError(f"to_onnx: path is {path!r:.80}; expected the path of a file")
    if scope is not None and not hasattr(scope, "find_var"):
        raise ArgumentTypeError(f"to_onnx: scope is {scope!r:.80}; expected an amp.Scope()")
    target = None if path is None else Path(path)
    with collector_paused():
        with getattr(scope, "reading", nullcontext)():  # all of them as one step left them
            values = {} if scope is None else _scope_values(program, scope)
        layout = Layout(program, values, target, external_data)
        model = model_of(program, layout.content, values, results=True)
        if group is not None:
            layout.add_to(group, model)
        elif target is not None:
            with Group() as own:
                layout.add_to(own, model)
                own.commit()
    return model


def _scope_values(program: Graph, scope: Any) -> dict[Variable, Any]:
    """What the scope holds of the program's persistable variables, checked against what they declare."""
    values: dict[Variable, Any] = {}
    for variable in program.variables:
        if not variable.persistable or variable.producer is not None:
            continue
        try:
            found = scope.find_var(variable.name)
        except ScopeError:
            if variable.name in getattr(scope, "elsewhere", ()):
                raise
            found = None
        if found is None:
            continue
        if variable.name in getattr(scope, "dealt", ()):
            raise ScopeError(
                f"the rows of '{variable.name}' are dealt out among the ranks, so this one cannot write program "
                f"'{program.name}' with it; load a checkpoint of all ranks on one, and write that"
            )
        array = np.asarray(found)
        dtype, shape = tensor_type(array)
        declared = variable.shape
        if dtype != variable.dtype or (declared is not None and not same_shape(declared, shape)):
            wanted = f"{variable.dtype}{'' if declared is None else list(declared)}"
            raise GraphError(
                f"the scope holds '{variable.name}' as {dtype}{list(shape)}, program '{program.name}' wants {wanted}; "
                "run the startup program first, and where parameters are 16 bit, amp_init(place, scope, "
                "test_program=...) for a program that is tested, or cast_parameters_to_fp16"
            )
        values[variable] = array
    return values


class _Writer:
    def __init__(self, content: Content, values: dict[Variable, Any], results: list[Variable]) -> None:
        self.content = content
        self.values = values
        self.results = results
        self.headers: dict[tuple[str, str, str, int], onnx.NodeProto] = {}
        self.free = False  # whether an initializer of any graph is no input of it

    # -- model -----------------------------------------------------------------------------------
    def model(self, program: Graph) -> onnx.ModelProto:
        info, source = program.info, source_of(program)
        model = onnx.ModelProto()
        if source is not None and source.model is not None:
            model.CopyFrom(source.model)
        self.graph(program, model.graph)
        ir_version = info.ir_version
        if self.free:
            ir_version = max(ir_version, FREE_INITIALIZERS)
        for field, value in (
            ("ir_version", ir_version),
            ("producer_name", info.producer_name),
            ("domain", info.domain),
            ("producer_version", info.producer_version),
            ("model_version", info.model_version),
            ("doc_string", info.doc),
        ):
            if getattr(model, field) != value:
                setattr(model, field, value)
        _write_opsets(model, self._opsets(program))
        _write_metadata(model.metadata_props, info.metadata)
        model.functions.extend(info.functions)
        return model

    def _opsets(self, program: Graph) -> dict[str, int]:
        opsets = dict(program.info.opsets)
        if OWN not in opsets and any(op.domain == OWN for op in program.walk()):
            opsets[OWN] = 1
        return opsets

    # -- graph -----------------------------------------------------------------------------------
    def graph(self, program: Graph, graph: onnx.GraphProto) -> None:
        """Write the program into an empty GraphProto."""
        source = source_of(program)
        if source is not None:
            graph.CopyFrom(source.header)
        if source is None or program.graph_name != source.name:
            graph.name = program.graph_name
        if graph.doc_string != program.info.graph_doc:
            graph.doc_string = program.info.graph_doc
        _write_metadata(graph.metadata_props, program.info.graph_metadata | written_state(program))
        held = self._initializers(program, graph)
        self._inputs(program, graph, held)
        inputs = {info.name for info in graph.input}
        self.free = self.free or any(tensor.name not in inputs for tensor in graph.initializer)
        for op in program.operators:
            self.node(op, graph.node.add())
        self._outputs(program, graph)
        self._value_info(program, graph)

    def _data(self, variable: Variable) -> Any:
        return self.values.get(variable, variable.data)

    def _initializers(self, program: Graph, graph: onnx.GraphProto) -> set[Variable]:
        """Write every variable that has content and no producer; gives those variables."""
        source = source_of(program)
        free = [v for v in program.variables if v.producer is None and v.outer is None]
        held = [v for v in free if v.data is not None or v in self.values]
        found = set(held)
        order = [v for v in (source.initializers if source else []) if v in found]
        for variable in dict.fromkeys([*order, *held]):
            tensor = self.content(variable, self._data(variable))
            if isinstance(tensor, onnx.SparseTensorProto):
                graph.sparse_initializer.append(tensor)
            else:
                graph.initializer.add().CopyFrom(tensor)  # appending would write it out and read it again
        return found

    def _inputs(self, program: Graph, graph: onnx.GraphProto, held: set[Variable]) -> None:
        """Inputs in the file's order (initializers that are inputs as well among them), then new ones, then states."""
        source = source_of(program)
        fed = dict.fromkeys(program.inputs)
        for entry in source.inputs if source else []:
            if entry.alive and entry.variable is not None and (entry.variable in fed or entry.variable in held):
                graph.input.append(entry.written())
                fed.pop(entry.variable, None)
        graph.input.extend(value_info(variable) for variable in fed)
        known = held | set(program.inputs)
        for variable in program.variables:
            if variable.producer is not None or variable.outer is not None or variable in known:
                continue
            if variable.persistable:
                graph.input.append(value_info(variable))
            elif variable.readers:
                reader = variable.readers[0][0]
                raise GraphError(
                    f"operator '{reader.label}' of program '{program.name}' reads '{variable.name}', "
                    "which nothing writes, feeds or initialises"
                )

    def _outputs(self, program: Graph, graph: onnx.GraphProto) -> None:
        source = source_of(program)
        entries = {id(entry.variable): entry for entry in source.outputs} if source else {}
        for variable in self.results if program.parent is None else program.outputs:
            entry = entries.get(id(variable))
            written = value_info(variable) if entry is None else entry.written()
            graph.output.append(written)
            graph.output[-1].name = exported_name(variable)

    def _value_info(self, program: Graph, graph: onnx.GraphProto) -> None:
        """The file's entries; the outputs of own operators, whose types nobody else can infer; and what a cast was put
        behind to keep an output's type, where the file says of that output what nobody can infer either: but for the
        names of sizes, which a reader that is given the sizes may hold against them."""
        source = source_of(program)
        declared = {info.name for info in graph.output}
        for entry in source.value_info if source else []:
            if entry.alive:
                graph.value_info.append(entry.written())
                declared.add(graph.value_info[-1].name)
        outputs = {v.key for v in program.outputs}
        for op in program.operators:
            if op.domain == OWN:
                made = [value_info(v) for v in op.outputs if v is not None and v.dtype is not None]
            elif op.inserted and op.outputs[0] is not None and op.outputs[0].key in outputs:
                cast = [v for v in op.inputs if v is not None and v.producer is not None]
                made = [_without_names(value_info(v)) for v in cast if not told_by_inputs(v)]
            else:
                continue
            graph.value_info.extend(info for info in made if info.name not in declared)
            declared.update(info.name for info in made)

    # -- node ------------------------------------------------------------------------------------
    def node(self, op: Operator, node: onnx.NodeProto) -> None:
        """Write the operator into an empty NodeProto."""
        if op.metadata or op.scope or op.guard or op.role != FORWARD or op.name.startswith("/"):
            _write_header(op, node)
        else:
            node.CopyFrom(self._header(op))
        node.input.extend(["" if v is None else v.name if v.outer is None else exported_name(v) for v in op.inputs])
        node.output.extend(["" if v is None else v.name for v in op.outputs])
        if op.name:
            node.name = op.name
        if op.overload:
            node.overload = op.overload
        if op.doc:
            node.doc_string = op.doc
        if op.attrs.programs:
            self._attributes(op, node)
        elif protos := op.attrs.protos():
            node.attribute.extend(protos)
        if op.source is not None:
            self._leftover(op, node)
        if op.domain == OWN and op.type == INITIALIZER:
            self._initializer_value(op, node)

    def _header(self, op: Operator) -> onnx.NodeProto:
        """Type and marks of an operator that has nothing to say but its precision and why, as thousands have them."""
        key = op.type, op.domain, op.precision, id(op.why)
        if key not in self.headers:
            self.headers[key] = onnx.NodeProto()
            _write_header(op, self.headers[key])
        return self.headers[key]

    def _attributes(self, op: Operator, node: onnx.NodeProto) -> None:
        for name in op.attrs:
            nested = op.attrs.graphs.get(name)
            if nested is None:
                node.attribute.append(op.attrs.proto(name))
            else:
                self._graph_attribute(op, name, nested, node.attribute.add())

    def _initializer_value(self, op: Operator, node: onnx.NodeProto) -> None:
        """In a program the content lies on the variable, shared with the main program; in a file, in the operator."""
        variable = op.outputs[0]
        if variable is not None and variable.data is not None:
            tensor = self.content(variable, variable.data)
            node.attribute.append(onnx.helper.make_attribute("value", tensor))

    def _graph_attribute(self, op: Operator, name: str, nested: Any, attribute: onnx.AttributeProto) -> None:
        header = op.attrs.graph_header(name)
        if header is not None:
            attribute.CopyFrom(header)
        else:
            attribute.name = name
            attribute.type = attribute.GRAPHS if isinstance(nested, list) else attribute.GRAPH
        if isinstance(nested, list):
            for program in nested:
                self.graph(program, attribute.graphs.add())
        else:
            self.graph(nested, attribute.g)

    def _leftover(self, op: Operator, node: onnx.NodeProto) -> None:
        """Put back what the file's node had besides, where nothing has changed it."""
        for field, value in op.source.ListFields():
            name = field.name
            if name == "device_configurations":
                node.device_configurations.extend(value)
            elif name == "metadata_props":
                if {e.key: e.value for e in value} == {e.key: e.value for e in node.metadata_props}:
                    del node.metadata_props[:]
                    node.metadata_props.extend(value)
            elif not getattr(node, name):
                setattr(node, name, value)


def _without_names(info: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """The entry without the names of sizes."""
    for size in info.type.tensor_type.shape.dim:
        size.ClearField("dim_param")
    return info


def exported_name(variable: Variable) -> str:
    """The name under which a variable is written: a captured one has that of the variable it stands for."""
    return origin(variable).name


def _write_header(op: Operator, node: onnx.NodeProto) -> None:
    """Write what an operator is, and what only a Graph knows of it."""
    node.op_type = op.type
    if op.domain:
        node.domain = op.domain
    node.metadata_props.extend([_entry(*item) for item in (op.metadata | written_marks(op)).items()])


@lru_cache(maxsize=4096)  # thousands of operators have few reasons
def _entry(key: str, value: str) -> onnx.StringStringEntryProto:
    return onnx.StringStringEntryProto(key=key, value=value)


def _write_metadata(props: Any, metadata: dict[str, str]) -> None:
    """Let ``props`` say ``metadata``; left alone where it does already."""
    if {entry.key: entry.value for entry in props} == metadata:
        return
    del props[:]
    for key, value in metadata.items():
        props.add(key=key, value=value)


def _write_opsets(model: onnx.ModelProto, opsets: dict[str, int]) -> None:
    if {plain_domain(opset.domain): opset.version for opset in model.opset_import} == opsets:
        return
    del model.opset_import[:]
    for domain, version in opsets.items():
        model.opset_import.add(domain=domain, version=version)
