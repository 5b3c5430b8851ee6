"""Nodes with inputs, to hold a provider's kernels to what the operators mean: the case itself, and values to feed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]

FLOATS = ("float", "float16")
DTYPES = {
    "float": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "double": np.dtype(np.float64),
    "int32": np.dtype(np.int32),
    "uint32": np.dtype(np.uint32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "bool": np.dtype(np.bool_),
}


@dataclass(frozen=True, eq=False)
class Case:
    """One node and what it is fed.

    ``pointwise``: each element of the result follows from those of the inputs at its place, which says what to expect of
    infinities, NaN and the like among random bits. Inputs whose numbers are in ``constants`` are initializers.
    """

    op_type: str
    element: str
    what: str
    inputs: tuple[Array | None, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[int, ...] = (0,)
    constants: frozenset[int] = frozenset()
    opset: int = 21
    pointwise: bool = False

    def __str__(self) -> str:
        return f"{self.op_type} {self.element} {self.what}"

    def model(self, widen: str = "") -> onnx.ModelProto:
        """A model of the node; ``widen``: with its 16- and 32-bit floats at this element type."""
        arrays = self.arrays(widen)
        names = ["" if a is None else f"x{i}" for i, a in enumerate(arrays)]
        kinds = {name: _number(a) for name, a in zip(names, arrays, strict=True) if a is not None}
        attributes = dict(self.attributes)
        if widen and self.op_type == "Cast" and attributes["to"] in (TensorProto.FLOAT, TensorProto.FLOAT16):
            attributes["to"] = helper.np_dtype_to_tensor_dtype(DTYPES[widen])
        results = [f"y{i}" if i in self.outputs else "" for i in range(max(self.outputs) + 1)]
        node = helper.make_node(self.op_type, names, results, **attributes)
        fed = [
            helper.make_tensor_value_info(names[i], kinds[names[i]], list(a.shape))
            for i, a in enumerate(arrays)
            if a is not None and i not in self.constants
        ]
        held = [
            numpy_helper.from_array(a, names[i]) for i, a in enumerate(arrays) if a is not None and i in self.constants
        ]
        outs = [onnx.ValueInfoProto(name=name) for name in results if name]
        graph = helper.make_graph([node], "case", fed, outs, held)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        inferred = onnx.shape_inference.infer_shapes(model)
        for made, told in zip(model.graph.output, inferred.graph.output, strict=True):
            made.type.tensor_type.elem_type = told.type.tensor_type.elem_type
        return model

    def arrays(self, widen: str = "") -> list[Array | None]:
        """The inputs, with their floats at element type ``widen``."""
        if not widen:
            return list(self.inputs)
        with np.errstate(invalid="ignore"):  # NaN of every bit pattern
            return [a.astype(DTYPES[widen]) if a is not None and a.dtype.kind == "f" else a for a in self.inputs]

    def feeds(self, widen: str = "") -> dict[str, Array]:
        return {f"x{i}": a for i, a in enumerate(self.arrays(widen)) if a is not None and i not in self.constants}


def _number(array: Array) -> int:
    return helper.np_dtype_to_tensor_dtype(array.dtype)


def rng(name: str) -> np.random.Generator:
    """Random numbers that follow from a name."""
    return np.random.default_rng(list(name.encode()))


def plain(element: str, shape: tuple[int, ...], name: str = "") -> Array:
    """Values as programs have them: of both signs, no two alike within a small tensor."""
    dtype, source = DTYPES[element], rng(f"{name}{shape}")
    if dtype.kind == "f":
        return np.asarray(source.normal(size=shape), dtype)
    if dtype.kind == "b":
        return np.asarray(source.random(shape) < 0.5)
    low = 0 if dtype.kind == "u" else -50
    return np.asarray(source.integers(low, 50, shape), dtype)


def positive(element: str, shape: tuple[int, ...]) -> Array:
    """Values from 0 to 1, whose sums do not cancel."""
    return rng(str(shape)).random(shape).astype(DTYPES[element])


SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, -2.5, 2.0, 3.0, -3.0, 7.0, 88.0, -88.0, np.inf, -np.inf, np.nan)


def edges(element: str) -> Array:
    """Numbers at the ends of an element type, with infinities, NaN, both zeros and some plain ones."""
    dtype = DTYPES[element]
    if dtype.kind == "f":
        info = np.finfo(dtype)
        ends = [info.max, info.tiny, info.smallest_subnormal, info.tiny / 2, info.max / 2]
        return np.array([*SPECIAL, *ends, *(-np.array(ends))], dtype)
    if dtype.kind == "b":
        return np.array([False, True])
    info_i = np.iinfo(dtype)
    low = [] if dtype.kind == "u" else [-1, -2, -3, -7, -50]
    return np.array([0, 1, 2, 3, 7, 50, info_i.max, info_i.max - 1, info_i.min, info_i.min + 1, *low], dtype)


def bits(element: str) -> Array:
    """Every number of float16; of other types 65536 random bit patterns, and half as many of everyday size."""
    dtype = DTYPES[element]
    if dtype == np.float16:
        return np.arange(65536, dtype=np.uint16).view(np.float16)
    if dtype.kind == "f":
        source = rng("bits")
        words = source.integers(0, 2**32, 65536, dtype=np.uint64).astype(np.uint32).view(np.float32)
        return np.concatenate([words, source.uniform(-20, 20, 32768).astype(dtype), edges(element)])
    if dtype.kind == "b":
        return plain(element, (64,))
    info = np.iinfo(dtype)
    words = rng("bits").integers(info.min, info.max, 65536, dtype=dtype, endpoint=True)
    return np.concatenate([words, np.arange(-512, 512).astype(dtype), edges(element)])


def pairs(element: str) -> tuple[Array, Array]:
    """Every pair of edges, and random pairs."""
    some, dtype = edges(element), DTYPES[element]
    a, b = (each.ravel() for each in np.meshgrid(some, some))
    source = rng("pairs")
    if dtype.kind == "f":
        size = 2.0 ** source.uniform(-8, 8, (2, 65536))
        x, y = (size * source.choice([-1.0, 1.0], size.shape)).astype(dtype)
    elif dtype.kind == "b":
        x, y = plain(element, (64,), "x"), plain(element, (64,), "y")
    else:
        x, y = (plain(element, (4096,), name) for name in "xy")
    return np.concatenate([a, x]), np.concatenate([b, y])


Cases = Callable[[str], Iterator[Case]]
