"""Element types and shapes of an operator's outputs, one operator at a time.

Own operators bring a rule; gradients take the shape of their forward variable; standard operators go
through ONNX's own inference, with the values of small integer inputs (shape arithmetic) supplied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.constant_data import SMALL, constant_array
from amp_transpiler.ir.contrib_types import DOMAIN, WITHDRAWN, settled_types
from amp_transpiler.ir.evaluation import fold
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import OWN, Operator, Shape, TensorType, Types, Variable
from amp_transpiler.ir.onnx_inference import ONNX_ERRORS, settle_scales, spell_out
from amp_transpiler.ir.opdef import lookup
from amp_transpiler.ir.rule_errors import rule_of
from amp_transpiler.ir.types import NAMES, ONNX_TYPES, RANK

#: What an operator reads: element type and shape, or the type as protobuf; and its content as protobuf, where known.
Read = tuple[TensorType | bytes, bytes | None]
_ARITHMETIC = frozenset({"int32", "int64", "bool", "float32"})  # what shapes are computed in
_SHORT = 4096  # bytes of attributes and contents up to which the types that come of them are kept


def type_proto(dtype: str | None, shape: Shape | None) -> onnx.TypeProto:
    """The ONNX type of a tensor variable."""
    proto = onnx.TypeProto()
    proto.tensor_type.elem_type = ONNX_TYPES[dtype] if dtype else 0
    if shape is not None:
        proto.tensor_type.shape.SetInParent()
        for size in shape:
            dim = proto.tensor_type.shape.dim.add()
            if isinstance(size, str):
                dim.dim_param = size
            elif size is not None:
                dim.dim_value = int(size)
    return proto


def from_type_proto(proto: onnx.TypeProto, name: str) -> TensorType:
    """Element type name and shape of an ONNX tensor type. GraphError: too many dimensions for an array.

    ``name``: of the tensor, for the error.
    """
    tensor = proto.tensor_type
    dtype = NAMES.get(tensor.elem_type)
    if not tensor.HasField("shape"):
        return dtype, None
    if len(tensor.shape.dim) > RANK:
        count = len(tensor.shape.dim)
        raise GraphError(f"tensor '{name}' has {count} dimensions; numpy, through which arrays go, knows {RANK}")
    return dtype, tuple(_size(d) for d in tensor.shape.dim)


def _size(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    """A dimension; some exporters write -1 where they do not know it."""
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    return dim.dim_param or None


def static(shape: Shape | None) -> tuple[int, ...] | None:
    """A shape whose sizes are all known, else None."""
    if shape is None or not all(isinstance(d, (int, np.integer)) for d in shape):
        return None
    return tuple(int(d) for d in shape)  # type: ignore[arg-type]


def differ(one: Shape, other: Shape) -> bool:
    """Whether two shapes are known not to be one: they have other ranks, or an axis of other sizes."""
    sizes = zip(one, other, strict=False)
    return len(one) != len(other) or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes)


def one_element(shape: Shape | None) -> bool:
    """Whether a tensor of this shape is known to hold one number."""
    return shape is not None and all(size == 1 for size in shape)


class Shapes:
    """Concrete types of every variable of a program for given feed shapes: ``shapes[variable]``.

    ``values`` holds the arrays of small integer tensors that are known already (shape arithmetic). ``around``: the
    shapes of the program around a nested one. ``times``: the same with other numbers for sizes that data decide, and
    ``decided`` the variables whose sizes they decide (:mod:`~amp_transpiler.ir.decided_sizes`); here there are none.
    """

    times: Sequence[Shapes] = ()
    decided: Mapping[Variable, None] = MappingProxyType({})

    def __init__(
        self, program: Graph, feed_shapes: Mapping[str, tuple[int, ...]] | None = None, around: Shapes | None = None
    ) -> None:
        self.program = program
        self.types: dict[int, TensorType] = {}
        self.values: dict[int, np.ndarray] = {}
        feed_shapes = feed_shapes or {}
        for variable in program.variables:
            if variable.outer is not None and around is not None:
                self.types[variable.key] = around[variable.outer]
                known = around.value(variable.outer)
                if known is not None:
                    self.values[variable.key] = known
            elif variable.producer is None:
                self.types[variable.key] = (variable.dtype, feed_shapes.get(variable.name, variable.shape))
        self._done: set[Operator] = set()
        for op in program.operators:
            self._infer(op)

    def within(self, nested: Graph) -> Shapes | None:
        """The same of a nested graph; None where it does not fit these, as a branch that is not taken for them may."""
        try:
            return Shapes(nested, around=self)
        except GraphError:
            return None

    def _infer(self, op: Operator) -> None:
        """Put the types of what the operator makes into ``types``, once.

        A gradient has the shape of its variable, which an inlined branch may compute after it.
        """
        pending = {op: None}
        while pending:
            last = next(reversed(pending))
            variables = [v.grad_of for v in last.outputs if v is not None and v.grad_of is not None]
            if last is not op:
                variables += [v for v in last.inputs if v is not None]
            makers = [v.producer for v in variables if v.producer is not None and v.program is self.program]
            missing = {maker: None for maker in makers if maker not in self._done and maker not in pending}
            if missing and last not in self._done:
                pending |= missing
                continue
            del pending[last]
            if last not in self._done:
                self._done.add(last)
                self.settle(last)

    def settle(self, op: Operator) -> None:
        """Put the types of what the operator makes into ``types``: those of what it reads are there."""
        infer_operator(op, self)

    def __getitem__(self, variable: Variable) -> TensorType:
        return self.types.get(variable.key, (variable.dtype, variable.shape))

    def value(self, variable: Variable) -> np.ndarray | None:
        """The array of a small tensor known before the run."""
        if variable.key not in self.values:
            found = constant_array(variable)
            if found is None:
                return None
            self.values[variable.key] = found
        return self.values[variable.key]

    def told(self, op: Operator, slot: int, variable: Variable) -> np.ndarray | None:
        """The array of an operator's input, where the types of its results may go by it."""
        return self.value(variable)

    def ruled(self, variable: Variable) -> np.ndarray | None:
        """The array of a small tensor, where operators' rules may go by it."""
        return self.value(variable)

    def hangs(self, size: int) -> bool:
        """Whether a size hangs on data."""
        return False

    def shape(self, variable: Variable) -> tuple[int, ...]:
        """The concrete shape; GraphError naming the variable where it is not fixed."""
        shape = static(self[variable][1])
        if shape is None:
            made = f" (made by '{variable.producer.label}')" if variable.producer else ""
            raise GraphError(
                f"the shape of '{variable.name}'{made} is not known before the run: {self[variable][1]}. Training "
                "programs need fixed shapes; give the shapes of all feeds, the values of inputs that sizes hang on, "
                "such as edges of a graph (values= of prepare_training), or take the operator off the training path"
            )
        return shape


class Declared:
    """The types that variables already carry; what :func:`infer_operator` uses while a program is built."""

    def __init__(self) -> None:
        self.types: dict[int, TensorType] = {}
        self.values: dict[int, np.ndarray] = {}

    def __getitem__(self, variable: Variable) -> TensorType:
        return variable.dtype, variable.shape

    def value(self, variable: Variable) -> np.ndarray | None:
        """The array of a small constant."""
        return constant_array(variable)


def infer_operator(op: Operator, env: Any) -> None:
    """Put the types of the operator's outputs into ``env``."""
    found = lookup(op)
    of_runtime = op.domain == DOMAIN or (op.type in WITHDRAWN and not op.domain)
    rule = (None if found is None else found.infer) or (settled_types if of_runtime else None)
    results: Types
    if rule is not None:
        with rule_of(op):
            results = list(rule(op) if not isinstance(env, Shapes) else _with_env(rule, op, env))
    elif op.domain == OWN or any(v is not None and v.grad_of is not None for v in op.outputs):
        results = [None if v is None else _like(v, env) for v in op.outputs]
    else:
        results = _standard(op, env)
    for variable, result in zip(op.outputs, results, strict=False):
        if variable is not None and result is not None:
            env.types[variable.key] = result


def declare_outputs(op: Operator) -> None:
    """Give what a new operator makes the element types and shapes that its inputs say."""
    env = Declared()
    infer_operator(op, env)
    for variable in op.outputs:
        if variable is not None and variable.key in env.types:
            variable.dtype, variable.shape = env.types[variable.key]


def declare_missing(op: Operator) -> None:
    """The same, where nothing is known of them."""
    env = Declared()
    infer_operator(op, env)
    for variable in op.outputs:
        if variable is not None and variable.key in env.types and variable.shape is None:
            dtype, variable.shape = env.types[variable.key]
            variable.dtype = variable.dtype or dtype


def _like(variable: Variable, env: Any) -> TensorType:
    if variable.grad_of is not None:
        return variable.dtype, env[variable.grad_of][1]
    return variable.dtype, variable.shape


def _with_env(rule: Any, op: Operator, env: Shapes) -> Any:
    """Run a rule that reads ``variable.shape`` against the concrete shapes."""
    variables = [v for v in op.inputs if v is not None]
    saved = [(v, v.dtype, v.shape) for v in variables]
    try:
        for v in variables:
            v.dtype, v.shape = env[v]
        return list(rule(op))
    finally:
        for v, dtype, shape in saved:
            v.dtype, v.shape = dtype, shape


def _standard(op: Operator, env: Any) -> Types:
    opset = op.program.opset(op.domain)
    if op.attrs.programs or not onnx.defs.has(op.type, opset, op.domain):
        declared = [(v.dtype, v.shape) if v is not None else None for v in op.outputs]
        return _of_branches(op, env, declared) if op.type == "If" and isinstance(env, Shapes) else declared
    told = partial(env.told, op) if isinstance(env, Shapes) else lambda _, v: env.value(v)
    values = [None if v is None else told(slot, v) for slot, v in enumerate(op.inputs)]
    read = tuple(None if v is None else _as_read(v, known, env) for v, known in zip(op.inputs, values, strict=True))
    try:
        inferred = node_types(op, read, tuple(v is not None for v in op.outputs))
    except ONNX_ERRORS as error:
        reason = str(error).strip()
        raise GraphError(f"operator '{op.label}' ({op.full_type}) does not fit its inputs: {reason}") from None
    if isinstance(env, Shapes):
        _propagate(op, values, inferred, env)
    results: Types = []
    for slot, v in enumerate(op.outputs):
        if v is None:
            results.append(None)
            continue
        proto = inferred.get(slot)
        if proto is not None and isinstance(env, Shapes) and v.key in env.values:  # as of NonZero
            results.append((NAMES[proto.tensor_type.elem_type], env.values[v.key].shape))
            continue
        if proto is None or not proto.HasField("tensor_type"):
            if proto is not None and v.type_proto is None:
                v.type_proto = onnx.TypeProto()
                v.type_proto.CopyFrom(proto)
            results.append((v.dtype, v.shape))
            continue
        dtype, shape = from_type_proto(proto, v.name)
        results.append((dtype or v.dtype, shape if shape is not None else v.shape))
    return results


def told_by_inputs(variable: Variable) -> bool:
    """Whether ONNX infers of what an operator reads the type that a result of it has."""
    op, env = variable.producer, Declared()
    if op is None or op.attrs.programs or not onnx.defs.has(op.type, op.program.opset(op.domain), op.domain):
        return False
    read = tuple(None if v is None else _as_read(v, env.value(v), env) for v in op.inputs)
    try:
        inferred = node_types(op, read, tuple(v is not None for v in op.outputs))
    except ONNX_ERRORS:
        return False
    proto = inferred.get(variable.producer_slot)
    return proto is not None and from_type_proto(proto, variable.name) == (variable.dtype, variable.shape)


def _as_read(variable: Variable, known: np.ndarray | None, env: Any) -> Read:
    dtype, shape = env[variable]
    type_: Any = dtype, None if shape is None else tuple(shape)
    if variable.type_proto is not None:
        type_ = variable.type_proto.SerializeToString(deterministic=True)
    return type_, None if known is None else onnx.numpy_helper.from_array(known).SerializeToString()


def node_types(op: Operator, read: tuple[Read | None, ...], makes: tuple[bool, ...]) -> Mapping[int, onnx.TypeProto]:
    """The types of what an operator of ONNX's makes that reads this, by slot, as ONNX infers them; do not change them.

    Raises one of :data:`~.onnx_inference.ONNX_ERRORS` where it does not fit its inputs.
    """
    attrs = tuple(proto.SerializeToString(deterministic=True) for proto in op.attrs.protos())
    size = sum(map(len, attrs)) + sum(len(each[1]) for each in read if each is not None and each[1] is not None)
    infer = _known_node_types if size <= _SHORT else _node_types
    return infer(op.type, op.domain, op.program.opset(op.domain), attrs, read, makes)


def _node_types(
    type_: str,
    domain: str,
    opset: int,
    attrs: tuple[bytes, ...],
    read: tuple[Read | None, ...],
    makes: tuple[bool, ...],
) -> Mapping[int, onnx.TypeProto]:
    node = onnx.NodeProto(op_type=type_, domain=domain)
    node.input.extend("" if each is None else f"i{slot}" for slot, each in enumerate(read))
    node.output.extend(f"o{slot}" if made else "" for slot, made in enumerate(makes))
    node.attribute.extend(map(onnx.AttributeProto.FromString, attrs))
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for name, (type_of, content) in ((n, each) for n, each in zip(node.input, read, strict=True) if each is not None):
        types[name] = onnx.TypeProto.FromString(type_of) if isinstance(type_of, bytes) else type_proto(*type_of)
        if content is not None:
            data[name] = onnx.TensorProto.FromString(content)
    settle_scales(node, opset, types, data)
    spell_out(node)
    schema = onnx.defs.get_schema(type_, opset, domain)
    opsets = [onnx.helper.make_opsetid(domain, opset)]
    found = onnx.shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=opsets)
    return {slot: found[name] for slot, name in enumerate(node.output) if name in found}


_known_node_types = lru_cache(maxsize=4096)(_node_types)  # the layers of a net are alike


def _of_branches(op: Operator, env: Shapes, declared: Types) -> Types:
    """What both branches of an If give, or the one that is known to be taken, where its outputs do not say their
    sizes themselves."""
    if all(t is None or static(t[1]) is not None for t in declared):
        return declared
    condition = env.value(op.inputs[0]) if op.inputs[0] is not None else None
    branches = op.attrs.programs
    if condition is not None and condition.size == 1:
        branches = [op.attrs["then_branch" if condition.all() else "else_branch"]] * 2
    try:
        inner = [[Shapes(branch, around=env)[v] for v in branch.outputs] for branch in branches]
    except GraphError:  # a branch that is not taken need not fit
        return declared
    return [
        one if known is not None and one == other else known for known, one, other in zip(declared, *inner, strict=True)
    ]


def _propagate(op: Operator, values: list[np.ndarray | None], inferred: Any, env: Shapes) -> None:
    """Fold shape arithmetic: a small integer output whose inputs are all known."""
    out = op.output(0)
    if out is None or len([v for v in op.outputs if v is not None]) != 1:
        return
    if op.type == "Shape":
        source = op.inputs[0]
        shape = static(env[source][1]) if source is not None else None
        if shape is not None:
            start, end = op.attrs.get("start", 0), op.attrs.get("end", len(shape))
            env.values[out.key] = np.asarray(shape, np.int64)[start:end]
        return
    if not op.inputs or op.attrs.programs:
        return
    if any(v is not None and known is None for v, known in zip(op.inputs, values, strict=True)):
        return
    proto = inferred.get(op.outputs.index(out))
    if proto is None or NAMES.get(proto.tensor_type.elem_type) not in _ARITHMETIC:
        return
    if math.prod(d.dim_value or 1 for d in proto.tensor_type.shape.dim) > SMALL:  # it may be more than memory
        return
    result = fold(op, [known for known in values if known is not None])
    if result is not None and result.size <= SMALL:
        env.values[out.key] = result
