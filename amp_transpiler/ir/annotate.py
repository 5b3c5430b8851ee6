"""Element types and shapes for every variable of an imported program.

ONNX's inference runs once over the program without its weights. Where it is silent (contrib operators, and
everything behind them) the operators are taken one by one, in order.
"""

from __future__ import annotations

import onnx

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.contrib_types import contrib_types
from amp_transpiler.ir.control import crossings
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import Declared, from_type_proto, infer_operator, static
from amp_transpiler.ir.nodes import Operator, Shape, TensorType, Variable
from amp_transpiler.ir.onnx_inference import INVENTED, inferred_types, size_of
from amp_transpiler.ir.onnx_out import weightless


def annotate(program: Graph, model: onnx.ModelProto | None = None) -> None:
    """Put the types that can be inferred on the variables of ``program`` and of its nested programs.

    ``model``: the program as a ModelProto without weights, nodes in the program's order, where there is one already.
    """
    inferred = inferred_types(model or weightless(program), bool(program.nesting))
    if inferred is not None:  # else it gave up on the model as a whole; operator by operator it may not
        _assign(program, inferred.graph, {})
    _complete(program)


#: What inference says of a tensor, by the bytes of its type: a program has few types, and thousands of tensors.
_Said = dict[bytes, TensorType]


def _assign(program: Graph, graph: onnx.GraphProto, said: _Said) -> None:
    for infos in (graph.input, graph.value_info, graph.output):
        for info, variable in zip(infos, program.find_all([info.name for info in infos]), strict=True):
            if variable is not None:
                _put(variable, info.type, said)
    for op, node in zip(program.operators, graph.node, strict=True) if program.nesting else ():
        for attribute in node.attribute if op.attrs.graphs else ():
            nested = op.attrs.graphs.get(attribute.name)
            if isinstance(nested, list):
                for one, inner in zip(nested, attribute.graphs, strict=True):
                    _assign(one, inner, said)
            elif nested is not None:
                _assign(nested, attribute.g, said)


def _put(variable: Variable, proto: onnx.TypeProto, said: _Said) -> None:
    """Fill in what the variable does not say itself."""
    key = proto.SerializeToString()
    known = said.get(key)
    if known is None and proto.HasField("tensor_type"):
        dtype, shape = from_type_proto(proto, variable.name)
        known = said[key] = dtype, _known_sizes(shape)
    if known is not None:
        if variable.dtype is None and variable.shape is None and variable.type_proto is None and variable.data is None:
            variable.dtype, variable.shape = known
        else:
            _fill(variable, *known)
    elif proto.WhichOneof("value") and variable.dtype is None and variable.type_proto is None:
        variable.type_proto = onnx.TypeProto()
        variable.type_proto.CopyFrom(proto)


def _fill(variable: Variable, dtype: str | None, shape: Shape | None) -> None:
    if variable.type_proto is not None or variable.data is not None:
        return
    variable.dtype = variable.dtype or dtype
    if dtype == variable.dtype:
        refine(variable, shape)


def refine(variable: Variable, shape: Shape | None) -> None:
    """Fill in the sizes that the variable does not say itself."""
    shape = _known_sizes(shape)
    if shape is None:
        return
    if variable.shape is None:
        variable.shape = shape
    elif len(shape) == len(variable.shape):
        variable.shape = tuple(
            new if old is None or (isinstance(new, int) and isinstance(old, str)) else old
            for old, new in zip(variable.shape, shape, strict=True)
        )


def _known_sizes(shape: Shape | None) -> Shape | None:
    """A shape without the names that inference makes up."""
    if shape is None or static(shape) is not None:
        return shape
    return tuple(None if isinstance(size, str) and size.startswith(INVENTED) else size_of(size) for size in shape)


def _typed(variable: Variable) -> bool:
    return variable.dtype is not None or variable.type_proto is not None


def _complete(program: Graph) -> None:
    """Operator by operator: captured variables, inputs of nested graphs, then outputs that are still untyped, and what
    comes of those, of which ONNX's inference may know the element type alone."""
    if not program.nesting and all([v.dtype is not None for v in program.variables]):
        return
    env, late = Declared(), set[Variable]()
    for op in program.operators:
        for nested in op.attrs.programs:
            for variable in nested.variables:
                if variable.outer is not None:
                    _like(variable, variable.outer)
            if op.full_type == "Loop":
                for variable, dtype in zip(nested.inputs[:2], ("int64", "bool"), strict=False):
                    _fill(variable, dtype, ())
            for outer, inner in crossings(op).entries:
                _type_as(inner, outer)
            _complete(nested)
        typed = all([v is None or _typed(v) for v in op.outputs])
        if typed and late.isdisjoint(op.inputs):
            continue
        before = [(v, v.dtype, v.shape) for v in op.outputs if v is not None]
        if op.attrs.programs:
            for inner, outer in crossings(op).results:
                _type_as(outer, inner)
        else:
            _one(op, env)
        late.update(v for v, dtype, shape in before if (v.dtype, v.shape) != (dtype, shape))


def _like(variable: Variable, model: Variable) -> None:
    variable.dtype, variable.shape, variable.type_proto = model.dtype, model.shape, model.type_proto


def _type_as(variable: Variable | None, model: Variable | None) -> None:
    """Let a variable without type have that of what it is elsewhere; shapes are the inference's business."""
    if variable is not None and model is not None and not _typed(variable):
        variable.dtype, variable.type_proto = model.dtype, model.type_proto


def _one(op: Operator, env: Declared) -> None:
    found = contrib_types(op)
    if found is None:
        try:
            infer_operator(op, env)
        except GraphError:
            return  # stays untyped, and is reported as that
        found = [(None, None) if v is None else env.types.get(v.key, (None, None)) for v in op.outputs]
    for variable, (dtype, shape) in zip(op.outputs, found, strict=True):
        if variable is not None:
            _fill(variable, dtype, shape)
