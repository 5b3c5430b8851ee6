"""How a place holds a variable: on CPU, 16-bit ones as fp32 tensors with 16-bit values, rounded where they are made."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cached_property

import numpy as np
import onnx

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import Shapes, static
from amp_transpiler.ir.nodes import BACKWARD, OWN, Operator, Shape, Variable
from amp_transpiler.ir.opdef import lookup, lowering_rule_of, traits_of
from amp_transpiler.ir.tensors import as_array, tensor_type, to_proto
from amp_transpiler.ir.types import HALF
from amp_transpiler.passes.lowering.lowered import emulated_attribute


class EmulatedStorage:
    """The values of a program's variables in the graph that is emitted.

    ``keep_fp32`` names 16-bit variables that are held unrounded on CPU; see :func:`.lowering.lower`.
    """

    program: Graph

    def __init__(self, e: Emitter, keep_fp32: Container[str]) -> None:
        self.e = e
        self.cpu = e.at.emulates
        self.keep_fp32 = keep_fp32
        self.env: dict[int, Value] = {}
        self.named: dict[Variable, str] = {}  # tensors of nested graphs: a graph beside may have such variables too
        #: Variables kept fp32, rounded for the readers that do not run in fp32.
        self.rounded: dict[Variable, Value] = {}
        self.shapes: Shapes | None = None

    @cached_property
    def trains(self) -> bool:
        """Whether the program has gradients."""
        return any(op.role == BACKWARD for op in self.program.operators)

    @cached_property
    def transposed(self) -> set[Variable]:
        """What a Transpose makes, and all that is made of it without a product: where onnxruntime may move one to."""
        found: set[Variable] = set()
        for op in self.program.walk():
            moved = not traits_of(op).product and not found.isdisjoint(op.inputs)
            if moved or op.full_type == "Transpose":
                found.update(v for v in op.outputs if v is not None)
        return found

    def emulated(self, value: Value) -> Value:
        """A real tensor as this place stores it."""
        if not self.cpu or value.dtype not in HALF:
            return value
        emulated = self.e.cast(value, "float32")
        self.e.narrow[emulated.name] = value
        return emulated

    def constant(self, variable: Variable) -> Value:
        """Constant content as an initializer; on CPU 16-bit content as fp32."""
        dtype, shape = tensor_type(variable.data)
        data = as_array(variable.data) if isinstance(variable.data, onnx.SparseTensorProto) else variable.data
        if self.cpu and dtype in HALF:
            dtype, data = "float32", as_array(data).astype(np.float32)
        name = self.named.get(variable, variable.name)
        self.e.initializers[name] = to_proto(data, name)
        return Value(name, dtype, shape)

    def read(self, op: Operator, variable: Variable) -> Value:
        """A variable as ``op`` reads it: rounded where it is held in fp32 and the operator does not run so."""
        value = self.env[variable.key]
        if not self.cpu or variable.dtype not in HALF or variable.name not in self.keep_fp32:
            return value
        if any(v is not None and v.name in self.keep_fp32 for v in op.outputs):
            return value
        if variable not in self.rounded:
            self.rounded[variable] = self.e.stored(value, variable.dtype)
        return self.rounded[variable]

    def shaped(self, op: Operator, variable: Variable) -> Value:
        """The same, with its shape; GraphError where that is not fixed."""
        value = self.env[variable.key]
        if value.shape is None and self.shapes is not None:
            shape = self.fixed(variable)
            if shape is None:
                self.shapes.shape(variable)  # raises, naming the variable
            self.env[variable.key] = Value(value.name, value.dtype, shape)
        return self.read(op, variable)

    def unsized(self, op: Operator) -> bool:
        """Whether onnxruntime's own kernel runs an operator instead of its rule, which needs sizes that are not known.

        Such as those that data decide. CPUs have a kernel of every standard operator that always has a rule.
        """
        return not self.needs_sizes(op) and any(v is not None and self.fixed(v) is None for v in op.inputs)

    def needs_sizes(self, op: Operator) -> bool:
        """Whether an operator cannot run on sizes that are not known: it has a rule, and no kernel of the CPU's."""
        found = lookup(op)
        kernel = self.cpu and found is not None and found.when is None and op.domain != OWN
        return not kernel and lowering_rule_of(op, self.e.at) is not None

    def as_kernels(self, op: Operator, inputs: Sequence[Value | None], exact: bool) -> bool:
        """Emit an operator as the place's kernels compute it; False where they do as it stands."""
        kernels, first = self.e.kernels, op.outputs[0] if op.outputs else None
        if kernels is None or first is None or op.attrs.graphs or first.name in self.keep_fp32:
            return False
        given = [
            None if v is None or i is None else Value(i.name, (self.stands_for(v, i)).dtype, self.fixed(v))
            for v, i in zip(op.inputs, inputs, strict=True)
        ]
        kinds = ["" if v is None else v.dtype or "" for v in op.outputs]
        with self.e.emulation(self.cpu):
            made = kernels(self.e, op.full_type, given, kinds, self.fixed(first), op.attrs)
        for variable, value in zip(op.outputs, made or (), strict=False):
            if variable is not None:
                self.env[variable.key] = self.finished(variable, value, exact)
        return made is not None

    def attributes(self, op: Operator, real: bool) -> list[onnx.AttributeProto]:
        """The attributes of an operator as it is emitted."""
        protos, coarse = op.attrs.protos(), traits_of(op).coarse
        if not self.cpu:
            return protos
        if coarse in op.attrs:  # what its kernel would round beside, 16-bit storage does not
            exact = onnx.helper.make_attribute(coarse, 1)
            protos = [exact if proto.name == coarse else proto for proto in protos]
        return protos if real else [emulated_attribute(proto) for proto in protos]

    def decided(self) -> list[str]:
        """The tensors whose sizes data decide."""
        return [self.env[v.key].name for v in (self.shapes.decided if self.shapes else ()) if v.key in self.env]

    def fixed(self, variable: Variable) -> tuple[int, ...] | None:
        """The shape of a variable where it is fixed."""
        return static(self.shape(variable))

    def shape(self, variable: Variable) -> Shape | None:
        """The shape of a variable, as far as the sizes of feeds say it."""
        return variable.shape if self.shapes is None else self.shapes[variable][1]

    def stands_for(self, variable: Variable, value: Value) -> Value:
        """The fp32 tensor of a 16-bit variable as a value of its type."""
        return Value(value.name, variable.dtype, value.shape) if variable.dtype in HALF else value

    def added(self, op: Operator, variable: Variable | None) -> Value | None:
        """What the rule of ``op`` adds to its first result."""
        return None if variable is None else self.stands_for(variable, self.shaped(op, variable))

    def finished(self, variable: Variable, value: Value, exact: bool) -> Value:
        """A rule's or operator's raw result as the variable is held here, rounded where that is due."""
        if variable.dtype is None or value.dtype == "":
            return value
        if self.cpu and value.dtype in HALF:
            value = Value(value.name, "float32", value.shape)
        if self.cpu and variable.dtype in HALF:
            if exact or variable.name in self.keep_fp32:
                return value
            return self.e.stored(value, variable.dtype)
        return self.e.cast(value, variable.dtype)

    def _looks_up(self, op: Operator) -> bool:
        """Whether an operator reads some elements of a 16-bit tensor from outside, the rest of which is not widened."""
        v = op.input(0) if traits_of(op).lookup else None
        return v is not None and v.producer is None and v.dtype in HALF

    def real(self, variable: Variable, value: Value) -> Value:
        """The tensor of the variable's own type: of a 16-bit one that which an fp32 one stands for."""
        return self._held_as(value, variable.dtype or value.dtype)

    def _held_as(self, value: Value, dtype: str) -> Value:
        """A tensor that this place holds, in an element type."""
        if self.cpu and dtype in HALF:
            return self.e.narrow.get(value.name) or self.e.cast(value, dtype)
        return self.e.cast(value, dtype)

    def _output_value(self, variable: Variable, dtype: str | None) -> Value:
        """What holds the variable's value in an element type: its own, or the one that it was declared with."""
        value = self.env[variable.key]
        if dtype is None or (dtype == variable.dtype and not (self.cpu and dtype in HALF)):
            return value
        return self._held_as(value, dtype)
