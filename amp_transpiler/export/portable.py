"""A lowered model that gives the same bits under every build of onnxruntime: on x86 with AVX, in wasm, …

Products of 16-bit numbers are exact in fp32, and every build adds them in the same order; what an update computes
element by element is what IEEE 754 says. What differs are kernels that each instruction set has of its own: those of
functions such as exp, of sums along contiguous elements, by as many at once as a register holds, and of products of
other numbers, added with one rounding or two. Their last bits decide now and then which 16-bit number a result is
rounded to, and the training that goes on from there is another one. Computed in double and rounded to fp32, they differ
once in some hundred million results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from amp_transpiler.export.sixteen_bits import SixteenBits
from amp_transpiler.ir.attributes import attributes_of
from amp_transpiler.ir.control import CONTROL
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.lists._kernels import has_kernel
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.tensor_types import Type, inferred, types_in

_CPU = "CPUExecutionProvider"
#: What is the same everywhere, beside what moves elements or chooses among them.
_IEEE = frozenset({"Add", "Cast", "Ceil", "Div", "Floor", "Mul", "Round", "Sign", "Sqrt", "Sub", "Sum"})
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
#: Sums that may be begun along the first axis, where each kernel adds one row to another.
_BY_ROWS = frozenset({"ReduceSum", "ReduceMean"})
#: What onnxruntime has a kernel of double for that computes nothing.
_UNFINISHED = frozenset({"LSTM", "GRU", "RNN"})
#: Of what onnx has no schema of: an operator whose inputs and outputs have the same types.
_TYPED_AS = {"SimplifiedLayerNormalization": "LayerNormalization"}
#: A line between two bounds, whose kernels round once or twice: its slope and height, where attributes do not say.
_HARD = {"HardSigmoid": (0.2, 0.5), "HardSwish": (1 / 6, 0.5)}


def portable(lowered: Lowered, left: set[str]) -> Lowered:
    """The same computation, with double where kernels of builds differ. For the CPU lowering.

    ``left`` gets the types of the operators that have no kernel of double, and stay as they are.
    """
    model = onnx.ModelProto()
    model.CopyFrom(lowered.model)
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    known = inferred(lowered)
    types = types_in(known)
    _Graph(model.graph, types, known, opset, SixteenBits(model.graph, types), left).rewrite()
    return replace(lowered, model=model)


class _Graph:
    """A graph that is rewritten, nested ones too. ``known`` is the same graph with inferred types."""

    def __init__(
        self,
        graph: onnx.GraphProto,
        types: dict[str, Type],
        known: onnx.GraphProto,
        opset: int,
        bits: SixteenBits,
        left: set[str],
    ) -> None:
        self.graph, self.types, self.known, self.opset, self.bits = graph, types, known, opset, bits
        self.left = left
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.nodes: list[onnx.NodeProto] = []

    def rewrite(self) -> None:
        for node, seen in zip(self.graph.node, self.known.node, strict=True):
            for attribute, other in zip(node.attribute, seen.attribute, strict=True):
                if attribute.type == onnx.AttributeProto.GRAPH:
                    types = {**self.types, **types_in(other.g)}
                    bits = SixteenBits(attribute.g, types, self.bits, node)
                    _Graph(attribute.g, types, other.g, self.opset, bits, self.left).rewrite()
            self._add(node)
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)

    def _add(self, node: onnx.NodeProto) -> None:
        if self._same(node):
            self.nodes.append(node)
        elif node.op_type in _BY_ROWS and self._begins_with_rows(node):
            self._by_rows(node)
        elif node.op_type == "GlobalAveragePool" and (shape := self.types[node.input[0]][1]) is not None:
            axes_of = self._constant(f"{node.output[0]}/axes", range(2, len(shape)))
            self._widen(helper.make_node("ReduceMean", [node.input[0], axes_of], node.output, node.name))
        elif node.op_type == "Conv" and self._holds_sixteen_bits(node) and self._covers(node):
            self._multiply(node)
        elif node.op_type == "Conv" and self._holds_sixteen_bits(node) and self._has_positions(node):
            self._double_filters(node)
        elif node.op_type in _HARD and not node.domain:
            self._hard(node)
        elif node.op_type == "RotaryEmbedding" and self._turns_heads(node):
            self._turn(node)
        elif node.op_type not in _UNFINISHED and has_kernel(_CPU, node.op_type, "float64", self.opset, node.domain):
            self._widen(node)
        else:
            self.left.add(node.op_type)
            self.nodes.append(node)

    def _same(self, node: onnx.NodeProto) -> bool:
        """Whether every build gives the same bits."""
        if node.op_type in CONTROL or not any(self._is_float(name) for name in node.output):
            return True
        if node.op_type in _PRODUCTS:
            return self._is_plain_product(node)
        traits = traits_of(node.op_type, node.domain)
        return node.op_type in _IEEE or traits.exact or traits.moves != ()

    def _is_plain_product(self, node: onnx.NodeProto) -> bool:
        """Whether it multiplies 16-bit numbers, and no build has a kernel of its own for its shapes."""
        held = attributes_of(node)
        scales = [held.get("alpha", 1.0), held.get("beta", 1.0) if len(node.input) > 2 else 1.0]
        if node.op_type in ("MatMul", "Gemm"):
            shape = self.types[node.output[0]][1]
            own = shape is None or len(shape) < 2 or 1 in shape[-2:]
        else:
            own = self._has_single_filters(node) or not self._has_positions(node)
        powers = all(math.frexp(scale)[0] == 0.5 for scale in scales)
        return not own and powers and self._holds_sixteen_bits(node)

    def _holds_sixteen_bits(self, node: onnx.NodeProto) -> bool:
        return all(self.bits.holds(name) for name in node.input[:2])

    # -- convolutions ------------------------------------------------------------------------------------
    def _has_single_filters(self, node: onnx.NodeProto) -> bool:
        """Whether it is a convolution with one filter for a group, as a depthwise one, whose sums go other ways."""
        weight = self._shape(node.input[1])
        return node.op_type == "Conv" and (weight is None or weight[0] == attributes_of(node).get("group", 1))

    def _has_positions(self, node: onnx.NodeProto) -> bool:
        """Whether filters are applied at several places: sums of one alone are those of a product with a vector."""
        shape = self._shape(node.output[0] if node.op_type == "Conv" else node.input[0])
        return shape is not None and self._shape(node.input[1]) is not None and math.prod(shape[2:]) > 1

    def _covers(self, node: onnx.NodeProto) -> bool:
        """Whether each filter is as large as an image."""
        held, image, weight = attributes_of(node), self._shape(node.input[0]), self._shape(node.input[1])
        padded = any(held.get("pads", ())) or held.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
        if image is None or weight is None or padded or held.get("group", 1) != 1:
            return False
        return image[1:] == weight[1:]

    def _multiply(self, node: onnx.NodeProto) -> None:
        """Add the convolution as a product of images and filters, which are rows."""
        result, images, filters = node.output[0], *(self._shape(name) or () for name in node.input[:2])
        rows = self._constant(f"{result}/rows", [-1, math.prod(filters[1:])])
        operands = [f"{result}/images", f"{result}/filters", *node.input[2:]]
        for given, made in zip(node.input[:2], operands, strict=False):
            self._emit("Reshape", [given, rows], made)
        product = f"{result}/product"
        self.types |= dict.fromkeys([*operands[:2], product], ("float32", None))
        gemm = helper.make_node("Gemm", operands, [product], product, transB=1)
        if 1 in (images[0], filters[0]):
            self._widen(gemm)
        else:
            self.nodes.append(gemm)
        shape = self._constant(f"{result}/shape", [images[0], filters[0], *[1] * len(images[2:])])
        self._emit("Reshape", [product, shape], result)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        return self.types.get(name, ("", None))[1]

    def _double_filters(self, node: onnx.NodeProto) -> None:
        """Add the convolution with each filter twice, and take every second result."""
        made, result = onnx.NodeProto(), node.output[0]
        made.CopyFrom(node)
        for slot in range(1, len(node.input)):
            shape = self._shape(node.input[slot]) or ()
            name = f"{result}/filters_{slot}"
            sizes = self._constant(f"{name}/sizes", [shape[0], 1, *shape[1:]])
            twice = self._constant(f"{name}/twice", [2 * shape[0], *shape[1:]])
            self._emit("Reshape", [node.input[slot], sizes], f"{name}/one")
            self._emit("Concat", [f"{name}/one", f"{name}/one"], f"{name}/two", axis=1)
            self._emit("Reshape", [f"{name}/two", twice], name)
            made.input[slot] = name
        made.output[0] = f"{result}/both"
        self.nodes.append(made)
        bounds = {"first": 0, "last": np.iinfo(np.int64).max, "axis": 1, "step": 2}
        self._emit(
            "Slice", [made.output[0], *(self._constant(f"{result}/{k}", [v]) for k, v in bounds.items())], result
        )

    def _emit(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> None:
        self.nodes.append(helper.make_node(op_type, inputs, [output], output, **attributes))

    def _is_float(self, name: str) -> bool:
        return self.types.get(name, ("", None))[0] == "float32"

    # -- functions of parts that are the same everywhere -------------------------------------------------
    def _hard(self, node: onnx.NodeProto) -> None:
        """Add the line of its product and its sum, each rounded, and its bounds."""
        held, operand, result = attributes_of(node), node.input[0], node.output[0]
        slope, height = _HARD[node.op_type]
        swish = node.op_type == "HardSwish"
        numbers = {"slope": held.get("alpha", slope), "height": held.get("beta", height), "first": 0.0, "last": 1.0}
        name = {key: self._constant(f"{result}/{key}", value, np.float32) for key, value in numbers.items()}
        self._emit("Mul", [operand, name["slope"]], f"{result}/product")
        self._emit("Add", [f"{result}/product", name["height"]], f"{result}/line")
        bounded = f"{result}/bounded" if swish else result
        self._emit("Clip", [f"{result}/line", name["first"], name["last"]], bounded)
        if swish:
            self._emit("Mul", [operand, bounded], result)

    def _turns_heads(self, node: onnx.NodeProto) -> bool:
        """Whether it is onnxruntime's, turns whole heads, and the sizes and the positions are known."""
        held, shape = attributes_of(node), self._shape(node.input[0])
        unusual = [held.get(name) for name in ("rotary_embedding_dim", "is_packed_batching")]
        usual = not any(unusual) and held.get("scale", 1.0) == 1
        counted = shape is not None and (len(shape) == 4 or held.get("num_heads", 0) > 0)
        return bool(node.domain) and usual and counted and node.input[1] in self.constants

    def _turn(self, node: onnx.NodeProto) -> None:
        """Add the products with cosines and sines, and their sums, each rounded."""
        result, x, shape = node.output[0], node.input[0], self._shape(node.input[0]) or ()
        places, size = (
            (shape[2], shape[3]) if len(shape) == 4 else (shape[1], shape[2] // attributes_of(node)["num_heads"])
        )
        at = onnx.numpy_helper.to_array(self.constants[node.input[1]])
        at = at if at.ndim == 2 else (at + np.arange(places))[None]
        heads, axis = (f"{result}/x", 2) if len(shape) == 3 else (x, 1)
        if heads != x:
            self._emit("Reshape", [x, self._constant(f"{result}/apart", [0, 0, -1, size])], heads)
        rows = self._constant(f"{result}/places", at.tolist())
        for table, name in zip(node.input[2:], "cs", strict=True):
            self._emit("Gather", [table, rows], f"{result}/{name}0")
            self._emit(
                "Unsqueeze", [f"{result}/{name}0", self._constant(f"{result}/{name}1", [axis])], f"{result}/{name}"
            )
        pairs = bool(attributes_of(node).get("interleaved"))
        self._take_apart(result, heads, size, pairs)
        for half, table in itertools.product("ab", "cs"):
            self._emit("Mul", [f"{result}/{half}", f"{result}/{table}"], f"{result}/{half}{table}")
        self._emit("Sub", [f"{result}/ac", f"{result}/bs"], f"{result}/first")
        self._emit("Add", [f"{result}/as", f"{result}/bc"], f"{result}/second")
        turned = f"{result}/turned" if len(shape) == 3 else result
        self._put_together(result, turned, size, pairs)
        if turned != result:
            self._emit("Reshape", [turned, self._constant(f"{result}/together", [0, 0, -1])], result)

    def _take_apart(self, result: str, heads: str, size: int, pairs: bool) -> None:
        """Add the cut of heads into halves, or into even and odd numbers."""
        if not pairs:
            sizes, halves = self._constant(f"{result}/sizes", [size // 2] * 2), [f"{result}/a", f"{result}/b"]
            self.nodes.append(helper.make_node("Split", [heads, sizes], halves, f"{result}/halves", axis=-1))
            return
        self._emit("Reshape", [heads, self._constant(f"{result}/paired", [0, 0, 0, -1, 2])], f"{result}/pairs")
        for column, part in enumerate("ab"):
            at = self._constant(f"{result}/column{column}", column)
            self._emit("Gather", [f"{result}/pairs", at], f"{result}/{part}", axis=4)

    def _put_together(self, result: str, turned: str, size: int, pairs: bool) -> None:
        """Add the way back."""
        if not pairs:
            self._emit("Concat", [f"{result}/first", f"{result}/second"], turned, axis=-1)
            return
        last = self._constant(f"{result}/last", [-1])
        for part in ("first", "second"):
            self._emit("Unsqueeze", [f"{result}/{part}", last], f"{result}/{part}_of_two")
        self._emit("Concat", [f"{result}/first_of_two", f"{result}/second_of_two"], f"{result}/two", axis=-1)
        self._emit("Reshape", [f"{result}/two", self._constant(f"{result}/whole", [0, 0, 0, size])], turned)

    # -- sums --------------------------------------------------------------------------------------------
    def _begins_with_rows(self, node: onnx.NodeProto) -> bool:
        """Whether it is a sum along the first axis and others."""
        shape = self.types[node.input[0]][1]
        if shape is None or len(shape) < 2 or shape[0] < 2:
            return False
        given = node.input[1] if len(node.input) > 1 else ""
        if given and given not in self.constants:
            return False
        axes = onnx.numpy_helper.to_array(self.constants[given]).tolist() if given else []
        axes = sorted(axis % len(shape) for axis in axes) or list(range(len(shape)))
        rest = math.prod(shape[axis] for axis in axes[1:])
        return bool(axes[0] == 0 and rest > 1)

    def _by_rows(self, node: onnx.NodeProto) -> None:
        """Sum along the first axis in fp32, row by row, and what is left, which is small, in double."""
        name = node.output[0]
        rows = f"{name}/rows"
        self.types[rows] = ("float32", None)
        first = self._constant(f"{name}/first", [0])
        self.nodes.append(helper.make_node(node.op_type, [node.input[0], first], [rows], rows, keepdims=1))
        last = onnx.NodeProto()
        last.CopyFrom(node)
        last.input[0] = rows
        self._widen(last)

    # -- double ------------------------------------------------------------------------------------------
    def _widen(self, node: onnx.NodeProto) -> None:
        """Add the node with each fp32 operand and result, where its schema lets it, as double."""
        schema = onnx.defs.get_schema(_TYPED_AS.get(node.op_type, node.op_type), self.opset, node.domain)
        double = {each.type_param_str for each in schema.type_constraints if "tensor(double)" in each.allowed_type_strs}
        made = onnx.NodeProto()
        made.CopyFrom(node)
        name = node.output[0]
        for slot, operand in enumerate(node.input):
            if self._is_float(operand) and schema.inputs[slot].type_str in double:
                made.input[slot] = wide = f"{name}/wide_{slot}"
                self.nodes.append(helper.make_node("Cast", [operand], [wide], wide, to=TensorProto.DOUBLE))
        self.nodes.append(made)
        for slot, result in enumerate(node.output):
            if result and schema.outputs[slot].type_str in double:
                made.output[slot] = wide = f"{result}/wide"
                self.nodes.append(helper.make_node("Cast", [wide], [result], wide, to=TensorProto.FLOAT))

    def _constant(self, name: str, values: Sequence[Any] | float, dtype: type = np.int64) -> str:
        array: np.ndarray = np.array(values, dtype)
        self.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        return name
