"""Operators of startup programs: each writes one persistable variable.

``SeedInitializer() -> seed``; ``UniformInitializer(seed)`` with attributes ``low``, ``high``;
``NormalInitializer(seed)`` and ``TruncatedNormalInitializer(seed)`` with ``mean``, ``std``;
``ConstantInitializer()`` with a scalar tensor ``value``; ``ArrayInitializer()``, whose content lies on its output
variable's ``data``. Random ones draw from the stream of their variable's name, so no other parameter and no order
changes what they give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache

import numpy as np
import onnx

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import OWN, Operator
from amp_transpiler.ir.opdef import lowering_rule, own
from amp_transpiler.ir.types import FLOATS, HALF, numpy_dtype
from amp_transpiler.ops.common import pieces, size_of
from amp_transpiler.ops.training.chunks import by_chunks
from amp_transpiler.ops.training.hashed_words import Part, Streams, ahead_of, normal, stream_of, uniform

CONSTANT = "ConstantInitializer"
#: Those that draw random numbers.
DRAWN = frozenset({"UniformInitializer", "NormalInitializer", "TruncatedNormalInitializer"})

#: The step that initial values are drawn at; masks count from 0.
_STEP = 0xFFFFFFFF

#: Elements of a variable from which on it is drawn in chunks, and of a chunk.
_LARGE, _CHUNK = 1 << 22, 1 << 18
#: Elements of a variable up to which it is drawn together with others like it, and of all these together.
_SMALL, _TOGETHER = 1 << 14, 1 << 20
#: Rows of a chunk are a multiple of this, so that kernels compute all of it in whole vectors.
_PACKED = 16

#: Giles' polynomial, the highest power of w - 2.5 first.
_ERFINV = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)


def _target(op: Operator) -> tuple[str, str, tuple[int, ...]]:
    """Name, element type and fixed shape of the variable that is initialised."""
    variable = op.outputs[0]
    assert variable is not None and variable.dtype is not None
    shape = static(variable.shape)
    if shape is None:
        raise GraphError(f"'{variable.name}' cannot be initialised: its shape {variable.shape} is not fixed")
    return variable.name, variable.dtype, shape


def drawn_together(order: Iterable[Operator]) -> dict[int, list[Operator]]:
    """The operators, by key, that draw small variables of one shape in one way, each from its own stream: all at once.

    They give the same numbers as one by one: of what kernels compute in vectors, all of it lies in whole vectors.
    """
    alike: dict[Hashable, list[Operator]] = {}
    for op in order:
        if op.type in DRAWN and op.domain == OWN and "ranks" not in op.attrs:
            shape = _target(op)[2]
            size = math.prod(shape)
            if 0 < size <= _SMALL and (op.type == "UniformInitializer" or size % _PACKED == 0):
                settings = tuple(sorted((name, op.attrs[name]) for name in op.attrs))
                alike.setdefault((op.type, op.inputs[0], shape, settings), []).append(op)
    found: dict[int, list[Operator]] = {}
    for ops in alike.values():
        most = _TOGETHER // math.prod(_target(ops[0])[2])
        for row in (ops[start : start + most] for start in range(0, len(ops), most)):
            found |= {op.key: row for op in row if len(row) > 1}
    return found


def takes_one_thread(operators: Iterable[Operator]) -> bool:
    """Whether what operators draw on the host depends on the number of threads: the last few elements of those that a
    thread is given, which fill no vector, have logarithms and cosines of their own."""
    return any(op.type in DRAWN and op.type != "UniformInitializer" and op.domain == OWN for op in operators)


def _drawn(e: Emitter, op: Operator, draw: Callable[[tuple[int, ...], Streams, Part | None], Value]) -> list[Value]:
    """What ``draw`` makes of a shape, of streams, and of a part of the stream (None: its first elements).

    Of a large variable on the host it makes a chunk at a time, which takes memory once. ``ranks``, of the operator: the
    variable is what a rank keeps of as many, with rows of its own; what is behind them is any number.
    """
    (name, _, shape), ranks = _target(op), op.attrs.get("ranks")
    stream, total = stream_of(name), math.prod(shape)
    together = e.together.get(op.key)
    if together is not None:
        if _drawn_of(op) not in e.shared:
            whole = draw(shape, [stream_of(_target(each)[0]) for each in together], None)
            parts = pieces(e, whole, 0, [1] * len(together))
            e.shared |= {_drawn_of(each): (part,) for each, part in zip(together, parts, strict=True)}
        return [e.reshape(e.shared[_drawn_of(op)][0], shape)]
    if ranks is not None:
        width = total // shape[0]
        rows = max(1, min(_CHUNK // max(1, width), shape[0]) // _PACKED) * _PACKED
        size, apart = (rows, *shape[1:]), ranks * width
        before = e.Mul(e.cast(e.scalar("rank"), "uint32"), e.const(ahead_of(width)))
        if not e.at.branches:
            return [draw(shape, stream, Part(before, apart))]
        ahead = e.Add(e.const(ahead_of(np.arange(0, shape[0], rows) * apart)), before)
    elif total >= _LARGE and e.at.host:
        chunk = next((size for size in range(_CHUNK, _CHUNK // 16, -1) if total % size == 0), _CHUNK)
        size, apart, ahead = (chunk,), None, e.const(ahead_of(np.arange(0, total, chunk)))
    else:
        return [draw(shape, stream, None)]
    (whole,) = by_chunks(e, [ahead], lambda before: [draw(size, stream, Part(before, apart))])
    if math.prod(size_of(whole)) != total:
        whole = e.Slice(e.reshape(whole, (-1,)), e.ints(0), e.ints(total))
    return [e.reshape(Value(whole.name, whole.dtype), shape)]


def _drawn_of(op: Operator) -> str:
    return f"drawn of {op.key}"


@lowering_rule(own("SeedInitializer"))
def seed_initializer(e: Emitter, op: Operator) -> list[Value]:
    """The program's seed, as a value that constant folding does not see."""
    return [e.Add(e.const(op.program.seed, "uint32"), e.cast(e.scalar("zero"), "uint32"))]


@lowering_rule(own("UniformInitializer"))
def uniform_initializer(e: Emitter, op: Operator, seed: Value) -> list[Value]:
    """low + (high - low) * u, u uniform in [0, 1)."""
    low, high = op.attrs["low"], op.attrs["high"]

    def draw(size: tuple[int, ...], streams: Streams, part: Part | None) -> Value:
        u = uniform(e, size, seed, e.const(_STEP, "uint32"), streams, part)
        return e.Add(e.Mul(u, e.like(high - low, u)), e.like(low, u))

    return _drawn(e, op, draw)


@lowering_rule(own("NormalInitializer"))
def normal_initializer(e: Emitter, op: Operator, seed: Value) -> list[Value]:
    """mean + std * z, z standard normal."""

    def draw(size: tuple[int, ...], streams: Streams, part: Part | None) -> Value:
        z = normal(e, size, seed, e.const(_STEP, "uint32"), streams, part)
        return e.Add(e.Mul(z, e.like(op.attrs["std"], z)), e.like(op.attrs["mean"], z))

    return _drawn(e, op, draw)


@lowering_rule(own("TruncatedNormalInitializer"))
def truncated_normal_initializer(e: Emitter, op: Operator, seed: Value) -> list[Value]:
    """mean + std * z, z standard normal within [-2, 2]: the inverse of its distribution, of a uniform number.

    The inverse error function is a polynomial in w = -log(1 - x * x) < 5 (Giles, "Approximating the erfinv
    function", 2010), which |x| <= erf(sqrt(2)) keeps below 2.5.
    """
    reach = math.erf(math.sqrt(2))

    def draw(size: tuple[int, ...], streams: Streams, part: Part | None) -> Value:
        u = uniform(e, size, seed, e.const(_STEP, "uint32"), streams, part)
        x = e.Add(e.Mul(u, e.like(2 * reach, u)), e.like(-reach, u))
        w = e.Add(e.Neg(e.Log(e.Sub(e.like(1, u), e.Mul(x, x)))), e.like(-2.5, u))
        series = e.like(_ERFINV[0], u)
        for coefficient in _ERFINV[1:]:
            series = e.Add(e.Mul(series, w), e.like(coefficient, u))
        z = e.Mul(e.Mul(series, x), e.like(math.sqrt(2) * op.attrs["std"], u))
        return e.Add(z, e.like(op.attrs["mean"], u))

    return _drawn(e, op, draw)


@lowering_rule(own(CONSTANT))
def constant_initializer(e: Emitter, op: Operator) -> list[Value]:
    """One value everywhere; no tensor of the full size is stored in the model."""
    _, dtype, shape = _target(op)
    computed = _computed(dtype)
    scalar = e.const(onnx.numpy_helper.to_array(op.attrs["value"]).reshape(()), computed)
    scalar = e.Add(scalar, e.cast(e.scalar("zero"), computed), shape=())
    scalar = e.cast(scalar, dtype) if dtype not in HALF else scalar
    return [scalar if not shape else e.Expand(scalar, e.ints(*shape), shape=shape)]


def constant_content(op: Operator) -> np.ndarray:
    """What a ``ConstantInitializer`` writes, as an array."""
    _, dtype, shape = _target(op)
    return np.broadcast_to(_content(op.attrs.proto("value").t.SerializeToString(deterministic=True), dtype), shape)


@lru_cache(maxsize=256)
def _content(tensor: bytes, dtype: str) -> np.ndarray:
    """The scalar of a serialized tensor as a constant of type ``dtype``; states of optimizers are few constants."""
    number = onnx.numpy_helper.to_array(onnx.TensorProto.FromString(tensor)).reshape(())
    number = number.astype(numpy_dtype(_computed(dtype)))
    return (number + np.zeros_like(number)).astype(numpy_dtype(dtype))


def _computed(dtype: str) -> str:
    """The type that a constant of type ``dtype`` is made in."""
    return dtype if dtype in FLOATS - HALF or "int" in dtype else "float32"


@lowering_rule(own("ArrayInitializer"))
def array_initializer(e: Emitter, op: Operator) -> list[Value]:
    """The array on the output variable."""
    name, _, _ = _target(op)
    data = op.outputs[0].data if op.outputs[0] is not None else None
    if data is None:
        raise GraphError(f"'{name}' cannot be initialised: its ArrayInitializer has no data")
    return [e.const(onnx.numpy_helper.to_array(data) if isinstance(data, onnx.TensorProto) else data)]
