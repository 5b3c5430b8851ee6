"""The emitter: rules write standard ONNX operators through it, for any element type and place.

A place that emulates 16 bit carries a 16-bit variable as an fp32 tensor that holds 16-bit values; ``"reference"``, the
reference evaluator's, takes any element type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import numpy as np
import onnx

from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.flat import Rows
from amp_transpiler.ir.node_protos import emitted_node
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.operator_call import OperatorCall
from amp_transpiler.ir.result_shape import result_shape
from amp_transpiler.ir.signature import result_type, signature
from amp_transpiler.ir.types import HALF, ONNX_TYPES, dtype_name, numpy_dtype
from amp_transpiler.lists import TARGET_OPSET, full_name, place_traits

#: Elements from which on it matters how a kernel walks over them.
_MANY = 64
#: Operators whose result has the shape that an input says.
_SHAPED = frozenset({"Expand", "Reshape"})
#: Operators that read a single number beside a tensor as they read a tensor full of it.
_READ_ONE = frozenset({"Add", "Div", "Mul", "Sub", "Where"})


@dataclass(frozen=True)
class Maker:
    """The elementwise operator, view or lookup of ai.onnx, or the product, that made a tensor."""

    type: str
    inputs: tuple[Value | None, ...]
    attrs: Mapping[str, Any]


@dataclass(frozen=True)
class Value:
    """A tensor of the emitted graph: its name, its real element type there, its shape where known."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None = None


def _is_one(value: Value) -> bool:
    return value.shape is not None and math.prod(value.shape) == 1


class Emitter:
    """Collects nodes and initializers of one graph. ``e.Mul(a, b)`` emits a Mul and gives its value."""

    def __init__(self, place: str = "reference", opset: int = TARGET_OPSET) -> None:
        self.at = place_traits(place)
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.prefix = ""
        self.wanted: Sequence[bool] = ()
        #: In a gradient rule: the concrete shape of each forward input whose gradient is wanted.
        self.output_shapes: Sequence[tuple[int, ...] | None] = ()
        #: In the gradient of a product: what the gradient of the first input is added to; set by the lowering.
        self.summand: Value | None = None
        #: Content of variables known before the run, by variable key; set by the lowering.
        self.known_values: Callable[[Variable], np.ndarray | None] = constant_array
        #: Supplies run-time scalars ("zero", "rank", "seed", "step") as graph inputs; set by the lowering.
        self.runtime_scalar: Callable[[str], Value] | None = None
        self._constants: dict[tuple[Any, ...], Value] = {}
        self._widened: dict[str, Value] = {}
        #: Of tensors that were expanded from a single number: that number, which is read in their place.
        self.filled: dict[str, Value] = {}
        #: On CPU: the 16-bit tensor behind each rounded fp32 tensor.
        self.narrow: dict[str, Value] = {}
        #: Whether 16-bit values are fp32 tensors that are rounded wherever a place with 16-bit arithmetic would store.
        self.emulates = False
        #: fp32 tensors that hold values of a 16-bit type, beside those of ``narrow``.
        self._holds: dict[str, str] = {}
        #: Of operators of the training step, by key: rows that are worked on together; set by the lowering.
        self.rows: Mapping[int, Sequence[Rows]] = {}
        #: Operators that one of them emits for all, by the key of each; set by the lowering.
        self.together: Mapping[int, list[Operator]] = {}
        #: Whether each of several ranks runs this for examples of its own; set by the lowering.
        self.ranked = False
        #: Emits what the place's kernels do not compute as it stands (None: everything does); set by the lowering.
        self.kernels: Callable[..., tuple[Value, ...] | None] | None = None
        #: Whether a size hangs on data, and so must not say how many nodes there are; set by the lowering.
        self.hangs: Callable[[int], bool] = lambda size: False
        #: Values that several rules share, under a key of their maker's choice.
        self.shared: dict[str, tuple[Value, ...]] = {}
        #: What made the results of elementwise operators, views, lookups and products, by tensor.
        self.makers: dict[str, Maker] = {}
        #: Tensors that were joined by what they were made of: the tensor of all of them, and what each was made of.
        self.joined_through: dict[str, tuple[str, tuple[str, ...]]] = {}
        #: Results of operators of which ONNX's inference knows nothing, as those of other domains, and these domains.
        self.foreign, self.domains = list[Value](), set[str]()
        #: Results that have the shape which an input says, by name.
        self.given: dict[str, Value] = {}
        #: Element types of the tensors of one element, by name.
        self.scalars: dict[str, str] = {}
        self._names, self._serial = set[str](), 0

    # -- names -----------------------------------------------------------------------------------
    def reserve(self, names: Iterable[str]) -> None:
        """Keep these tensor names free for the caller."""
        self._names.update(names)

    def own(self, name: str) -> str:
        """This tensor name where it is free, else a fresh one."""
        if name in self._names:
            return self.name(name)
        self._names.add(name)
        return name

    def name(self, hint: str) -> str:
        """A fresh tensor name."""
        while True:
            name = f"{self.prefix}/{hint}_{self._serial}" if self.prefix else f"{hint}_{self._serial}"
            self._serial += 1
            if name not in self._names:
                self._names.add(name)
                return name

    def _constant_name(self) -> str:
        """A fresh name for a constant. Other names do not count them: sizes decide how many are equal."""
        name = f"{self.prefix}/const_{len(self._constants)}" if self.prefix else f"const_{len(self._constants)}"
        if name in self._names:
            return self.name("const")
        self._names.add(name)
        return name

    # -- emitting --------------------------------------------------------------------------------
    def __getattr__(self, type_: str) -> OperatorCall[Value | None, Value]:
        if not type_[:1].isupper():
            raise AttributeError(type_)
        return partial(self.op, type_)  # type: ignore[return-value]  # of the overloads mypy keeps one

    @overload
    def op(
        self,
        type_: str,
        *inputs: Value | None,
        outputs: int,
        domain: str = "",
        dtype: str | Sequence[str] | None = None,
        shape: Sequence[int] | None = None,
        **attrs: Any,
    ) -> tuple[Value, ...]: ...
    @overload
    def op(
        self,
        type_: str,
        *inputs: Value | None,
        outputs: None = None,
        domain: str = "",
        dtype: str | Sequence[str] | None = None,
        shape: Sequence[int] | None = None,
        **attrs: Any,
    ) -> Value: ...
    def op(
        self,
        type_: str,
        *inputs: Value | None,
        outputs: int | None = None,
        domain: str = "",
        dtype: str | Sequence[str] | None = None,
        shape: Sequence[int] | None = None,
        **attrs: Any,
    ) -> Value | tuple[Value, ...]:
        """Emit one node; its value, or a tuple of as many as ``outputs`` says.

        ``dtype`` overrides the usual rule: one for all outputs, or one for each.
        """
        traits = traits_of(type_, domain)
        if traits.elementwise and not traits.settings and len(inputs) > 1:
            inputs = tuple(self._levelled(self._unexpanded(type_, inputs)))
        kind = dtype or result_type(type_, self.opset, domain, [None if v is None else v.dtype for v in inputs])
        kinds = [kind] * (1 if outputs is None else outputs) if isinstance(kind, str) else kind
        if shape is None:
            shape = result_shape(type_, traits, [v.shape for v in inputs if v is not None])
        if self.kernels is not None:
            made = self.kernels(self, full_name(type_, domain), inputs, kinds, shape, attrs)
            if made is not None:
                return made[0] if outputs is None else made
        names = [self.name(type_) for _ in kinds]
        self.nodes.append(emitted_node(type_, ["" if v is None else v.name for v in inputs], names, domain, attrs))
        values = tuple(Value(n, k, None if shape is None else tuple(shape)) for n, k in zip(names, kinds, strict=True))
        if traits.product or (not domain and (traits.elementwise or traits.view or traits.lookup)):
            self.makers[names[0]] = Maker(type_, tuple(inputs), attrs)
        if _is_one(values[0]):
            self.scalars |= {v.name: self.tensor_type(v) for v in values}
        elif type_ == "Expand" and inputs[0] is not None and _is_one(inputs[0]):
            self.filled[names[0]] = inputs[0]
        if shape is not None and type_ in _SHAPED:
            self.given[names[0]] = Value(names[0], self.tensor_type(values[0]), values[0].shape)
        if domain or signature(type_, self.opset, domain) is None:
            self.foreign += (Value(v.name, self.tensor_type(v), v.shape) for v in values)
        self.domains |= {domain} - {""}
        if self.emulates:
            values = tuple(self._emulated(v, traits.exact) for v in values)
        return values[0] if outputs is None else values

    def _emulated(self, value: Value, exact: bool) -> Value:
        """A new value where 16 bit is emulated: its tensor is fp32, and rounded unless the operator cannot round."""
        if value.dtype not in HALF:
            return value
        if not exact:
            return self._rounded(Value(value.name, "float32", value.shape), value.dtype)
        self._holds[value.name] = value.dtype
        return value

    def _rounded(self, value: Value, dtype: str) -> Value:
        """An fp32 tensor rounded to a 16-bit type, as an fp32 tensor that stands for a value of this type."""
        narrow, wide = (self.name("Cast") for _ in range(2))
        for source, target, to in ((value.name, narrow, dtype), (narrow, wide, "float32")):
            self.nodes.append(emitted_node("Cast", [source], [target], attrs={"to": ONNX_TYPES[to]}))
        self.narrow[wide] = Value(narrow, dtype, value.shape)
        return Value(wide, dtype, value.shape)

    def _is_held(self, value: Value, dtype: str) -> bool:
        """Whether this fp32 tensor holds values of a 16-bit type."""
        narrow = self.narrow.get(value.name)
        return self._holds.get(value.name) == dtype or (narrow is not None and narrow.dtype == dtype)

    @contextmanager
    def emulation(self, on: bool = True) -> Iterator[None]:
        """Inside the block, 16-bit values are fp32 tensors, rounded after each operator that can make a new value."""
        before, self.emulates = self.emulates, on
        try:
            yield
        finally:
            self.emulates = before

    def _unexpanded(self, type_: str, inputs: Sequence[Value | None]) -> Sequence[Value | None]:
        """Single numbers in place of tensors full of them, beside one of their shape."""
        if type_ not in _READ_ONE or not self.filled:
            return inputs
        whole = {v.shape for v in inputs if v is not None and v.name not in self.filled}
        found = [None if v is None or v.shape not in whole else self.filled.get(v.name) for v in inputs]
        return [replace(one, dtype=v.dtype) if v and one else v for v, one in zip(inputs, found, strict=True)]

    def _levelled(self, inputs: Sequence[Value | None]) -> Sequence[Value | None]:
        """Single numbers in the rank of a tensor of which the last dimension is 1 (a filter of size 1, a column).

        onnxruntime's CPU kernels take such a tensor element by element otherwise: 100 times slower, measured.
        """
        shapes = [v.shape for v in inputs if v is not None and v.shape is not None]
        top = max(shapes, key=len, default=())
        if len(top) < 2 or top[-1] != 1 or max(math.prod(s) for s in shapes) < _MANY:
            return inputs
        return [v if v is None else self._ranked(v, len(top)) for v in inputs]

    def _ranked(self, value: Value, rank: int) -> Value:
        if value.shape is None or not _is_one(value) or len(value.shape) >= rank:
            return value
        key = f"{value.name} in rank {rank}"
        if key not in self.shared:
            self.shared[key] = (self.reshape(value, [1] * rank),)
        return self.shared[key][0]

    def cast(self, value: Value, dtype: str) -> Value:
        """``value`` as a tensor of this element type; nothing where it is one already."""
        if value.dtype == dtype:
            return value
        if self.emulates and dtype in HALF:
            return Value(value.name, dtype, value.shape) if self._is_held(value, dtype) else self._rounded(value, dtype)
        if self.emulates and value.dtype in HALF and dtype == "float32":
            return Value(value.name, dtype, value.shape)
        return self.op("Cast", value, dtype=dtype, shape=value.shape, to=ONNX_TYPES[dtype])

    def f32(self, value: Value) -> Value:
        """A 16-bit value widened to fp32 (one cast per tensor); others as they are."""
        if value.dtype not in HALF:
            return value
        if value.name not in self._widened:
            self._widened[value.name] = self.cast(value, "float32")
        return self._widened[value.name]

    def stored(self, value: Value, dtype: str) -> Value:
        """``value`` as a variable of type ``dtype`` is held at this place: rounded to 16 bit where that is 16 bit."""
        if self.at.emulates and dtype in HALF:
            if self._is_held(value, dtype):
                return Value(value.name, "float32", value.shape)  # a rule passed its input on
            rounded = self._rounded(value, dtype)
            return Value(rounded.name, "float32", value.shape)
        return self.cast(value, dtype)

    def const(self, array: Any, dtype: str | None = None) -> Value:
        """A constant; equal ones are shared."""
        array = np.asarray(array)
        if dtype is not None:
            array = array.astype(numpy_dtype(dtype))
        kind = dtype_name(array.dtype)
        if self.emulates and kind in HALF:
            wide = self.const(array, "float32")
            self._holds[wide.name] = kind
            return Value(wide.name, kind, wide.shape)
        key = (kind, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._constant_name()
            self.initializers[name] = onnx.numpy_helper.from_array(
                np.ascontiguousarray(array).reshape(array.shape), name
            )
            self._constants[key] = Value(name, kind, array.shape)
        return self._constants[key]

    def ints(self, *values: int) -> Value:
        """A 1-D int64 constant."""
        return self.const(np.array(values, np.int64))

    def content(self, constant: Value) -> np.ndarray:
        """What a constant holds."""
        return onnx.numpy_helper.to_array(self.initializers[constant.name])

    def like(self, number: float, value: Value) -> Value:
        """A scalar constant of the element type of ``value``."""
        return self.const(number, value.dtype)

    def wants(self, index: int) -> bool:
        """In a gradient rule: whether the gradient of forward input ``index`` is asked for."""
        return index < len(self.wanted) and self.wanted[index]

    def known(self, variable: Variable | None) -> np.ndarray | None:
        """The content of a small variable (axes, pads, sizes) where it is known before the run."""
        return None if variable is None else self.known_values(variable)

    def scalar(self, what: str) -> Value:
        """A run-time scalar ("zero", "rank", "remaining mean" float32, "seed", "step" uint32) that is never folded."""
        if self.runtime_scalar is not None:
            return self.runtime_scalar(what)
        known = np.float32(what != "zero") if what == "zero" or what.startswith("remaining") else np.uint32(0)
        return self.const(np.array(known))

    def graph(
        self, name: str, inputs: Sequence[Value], write: Callable[..., Sequence[Value]]
    ) -> tuple[onnx.GraphProto, list[Value]]:
        """A nested graph and its outputs: ``write(*inputs)`` emits its nodes; it may read values from outside."""
        with self.nested():
            within = [Value(self.name(f"{name}_in"), v.dtype, v.shape) for v in inputs]
            written = write(*within)
            free = {made: True for node in self.nodes for made in node.output}  # an output has a name of its own
            results = [v if free.pop(v.name, 0) else self.Identity(v, dtype=v.dtype, shape=v.shape) for v in written]
            inputs_of, outputs_of = (
                [onnx.helper.make_tensor_value_info(v.name, ONNX_TYPES[self.tensor_type(v)], v.shape) for v in values]
                for values in (within, results)
            )
            return onnx.helper.make_graph(self.nodes, name, inputs_of, outputs_of), results

    def tensor_type(self, value: Value) -> str:
        """The element type of the tensor that holds a value."""
        return "float32" if self.emulates and value.dtype in HALF else value.dtype

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Inside the block ``nodes`` are those of a nested graph; what is made there is not known outside."""
        saved = self.nodes, dict(self._widened), dict(self.narrow), dict(self.shared)
        self.nodes = []
        try:
            yield
        finally:
            self.nodes, self._widened, self.narrow, self.shared = saved

    # -- pieces that several rules share ----------------------------------------------------------
    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Reshape to a fixed shape, in which 0 is no size of the value's but 0."""
        if value.shape == tuple(shape):
            return value
        if value.name in self.initializers and _is_one(value):
            return self.const(self.content(value).reshape(shape), value.dtype)
        return self.op("Reshape", value, self.ints(*shape), shape=shape, allowzero=1 if 0 in shape else None)

    def transpose(self, value: Value, perm: Sequence[int]) -> Value:
        """Transpose; nothing where ``perm`` is the identity."""
        if list(perm) == list(range(len(perm))):
            return value
        shape = None if value.shape is None else [value.shape[p] for p in perm]
        return self.op("Transpose", value, perm=list(perm), shape=shape)

    def reduce_sum(self, value: Value, axes: Sequence[int] | None = None, keepdims: bool = False) -> Value:
        """Sum over ``axes`` (all where None), in fp32 for 16-bit values."""
        value = self.f32(value)
        if axes is not None and not list(axes):
            return value
        return self.op("ReduceSum", value, *([] if axes is None else [self.ints(*axes)]), keepdims=int(keepdims))

    def zeros(self, shape: Sequence[int], dtype: str) -> Value:
        """Zeros that cost no memory in the session: a run-time scalar, expanded."""
        return self.op("Expand", self.cast(self.scalar("zero"), dtype), self.ints(*shape), shape=shape)
