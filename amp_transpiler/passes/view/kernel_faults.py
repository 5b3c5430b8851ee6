"""Which operator has no kernel on a place, and which meets one that does not compute what it should.

The tables are ``lists/kernels.json`` and ``lists/faults.toml``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx

from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import lookup
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import FLOATS, HALF, LIMITS
from amp_transpiler.lists import Fault, faults, has_kernel, kernel_types, place_traits, unsupported_reason
from amp_transpiler.ops.einsum import terms_of
from amp_transpiler.ops.norm_parts import EPSILON
from amp_transpiler.ops.window import window_by
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.second_activations import MadeBy, behind_activation
from amp_transpiler.passes.view.typing import Slots, declared, float_type, widened

#: What is loaded and not run, and what is run as its graph, which is looked into.
_NOT_RUN = frozenset({"Constant", "SequenceMap"})
#: As many channels do kernels read at once.
_VECTOR = 4
#: As many keys does the smallest subgroup compute attention of in one pass.
_PASS = 8
#: Of fewer channels, and fewer products, another kernel adds up.
_FEW = 8
#: Of a variance of nothing and this epsilon, what a norm multiplies by is the largest number of float16.
_EPSILON = 1 / LIMITS["float16"].largest ** 2


@dataclass(frozen=True)
class Call:
    """What a kernel on a place of this kind is given: attributes, element types and shapes of its inputs, where they
    are known, how many results are wanted, the integers in an input where these are fixed, whether an operator made its
    first input that is not read after it, its inputs by any name, and the full type of what makes one of that name and
    the names that it reads, None for none."""

    kind: str
    attrs: Mapping[str, Any]
    dtypes: Sequence[str | None]
    shapes: Sequence[tuple[int, ...] | None]
    results: int
    integers: Callable[[int], Sequence[int] | None] = lambda slot: None
    read_last: Callable[[], bool] = lambda: False
    inputs: Sequence[Any] = (None,)
    made_by: MadeBy = lambda name: None

    @property
    def groups(self) -> int:
        """Of a convolution."""
        return int(self.attrs.get("group") or 1)

    @property
    def rank(self) -> int:
        """Of a convolution; 0 where nobody knows."""
        return len(self.shapes[0] or self.shapes[1] or ())


def fault_of(full_type: str, call: Call) -> Fault | None:
    """The fault of the kernel that runs an operator; None for none."""
    return next(iter(_faults_of(full_type, call)), None)


def _faults_of(full_type: str, call: Call) -> list[Fault]:
    return [fault for fault in faults(call.kind).get(full_type, ()) if _HOLDS[fault.where](call)]


def fault_at(kind: str, op: Operator) -> Fault | None:
    """The same of an operator of a program, as it stands, on a place of this kind."""
    return next(iter(_faults_at(kind, op, declared)), None)


def fault_in_fp32(kind: str, op: Operator) -> Fault | None:
    """The same of an operator with the types with which it runs in fp32."""
    return next(iter(_faults_at(kind, op, widened)), None)


def fault_of_16_bit(kind: str, op: Operator, slots: Slots) -> Fault | None:
    """The same of an operator with these types in 16 bit, where it does not have the fault in fp32."""
    found = _faults_at(kind, op, lambda op: slots)
    wide = _faults_at(kind, op, widened) if found else []
    return next((fault for fault in found if fault not in wide), None)


def _faults_at(kind: str, op: Operator, types: Callable[[Operator], Slots]) -> list[Fault]:
    name = op.full_type
    if name not in faults(kind):
        return []
    shapes = [None if v is None else static(v.shape) for v in op.inputs]
    wanted = sum(v is not None for v in op.outputs)

    def integers(slot: int) -> list[int] | None:
        variable = op.input(slot)
        data = None if variable is None else constants.content(variable)
        return None if data is None else [int(number) for number in as_array(data).reshape(-1)]

    read_last = partial(_read_last, op)
    call = Call(kind, op.attrs, types(op).inputs, shapes, wanted, integers, read_last, op.inputs, _made_by)
    return _faults_of(name, call)


def _made_by(read: Variable | None) -> tuple[str, Sequence[Variable | None]] | None:
    return None if read is None or read.producer is None else (read.producer.full_type, read.producer.inputs)


def _read_last(op: Operator) -> bool:
    """Whether no reader of its first input, which an operator made, follows an operator."""
    read = op.input(0)
    if read is None or read.producer is None or read in op.program.outputs:
        return False
    readers = {reader for reader, _ in read.readers}
    return next((each for each in reversed(op.program.operators) if each in readers), None) is op


def leaves(op: Operator, kind: str) -> str:
    """Why onnxruntime would not run the operator on a place of this kind at its opset; "" where it would."""
    at, opset = place_traits(kind), op.program.opset(op.domain)
    dtype = float_type(op)
    if op.type in _NOT_RUN:
        return ""
    if dtype == "float16" and at.emulates:
        dtype = "float32"  # onnxruntime puts casts around it there
    if dtype in HALF:
        return unsupported_reason(op.full_type, dtype, opset, kind) or ""
    if kernel_types(at.provider, op.type, opset, op.domain) is None:
        runs = unsupported_reason(op.full_type, "float32", opset, kind) is None  # by its function body
        return "" if runs else "no kernel"
    if dtype and not has_kernel(at.provider, op.type, dtype, opset, op.domain):
        return f"no kernel for {dtype} at opset {opset}"
    return ""


def is_foreign(op: Operator) -> bool:
    """Whether nobody here knows the operator: neither onnx nor onnxruntime defines it, and nothing lowers it."""
    defined, found = op.domain == "com.microsoft" or onnx.defs.has(op.type, op.domain), lookup(op)
    return not defined and (found is None or found.lowering is None)


def _by_threes(call: Call) -> bool:
    """Of a Conv: more than three channels, a multiple of three and not of four, to a multiple of four channels."""
    w = call.shapes[1]
    if w is None or len(w) not in (3, 4) or call.groups != 1:
        return False
    outputs, channels, *kernel = w
    steps, pads = call.attrs.get("strides") or [1], call.attrs.get("pads") or [0]
    plain = set(kernel) == set(steps) == {1} and not any(pads)  # a matrix product, which another kernel computes
    return not plain and channels > 3 and channels % 3 == 0 and channels % _VECTOR != 0 and outputs % _VECTOR == 0


def _behind(call: Call) -> list[int] | None:
    """Of a Conv that its kernel takes for a matrix product, of each pixel or of the whole image: the padding behind, at
    which it does not look; None of another."""
    x, w = call.shapes[:2]
    if w is None or len(w) not in (3, 4) or call.groups != 1:
        return None
    kernel, rank = w[2:], len(w) - 2
    steps = call.attrs.get("strides") or [1] * rank
    pads, auto = call.attrs.get("pads") or [0] * 2 * rank, call.attrs.get("auto_pad", "NOTSET")
    whole = x is not None and x[2:] == kernel
    if not whole and not set(kernel) == set(steps) == {1}:
        return None
    if auto.startswith("SAME"):
        made = [-(-k // s) for k, s in zip(kernel, steps, strict=True)]
        pads = window_by(call.attrs, kernel, kernel, made).pads
    return None if any(pads[:rank]) else list(pads[rank:])


def _bias_to_six(call: Call) -> bool:
    w = call.shapes[1]
    biased = len(call.dtypes) > 2 and bool(call.dtypes[2])
    return biased and w is not None and w[0] == 6 and math.prod(w[1:]) < _FEW and _behind(call) is not None


def _padded_behind(call: Call) -> bool:
    return any(_behind(call) or ())


def _between_vectors(call: Call) -> bool:
    """Of a Conv: the kernel writes vectors that divide all channels, and not those of a group."""
    w = call.shapes[1]
    if w is None or call.groups == 1:
        return False
    of_group = w[0] // call.groups
    return of_group >= _VECTOR and of_group % math.gcd(w[0], _VECTOR) != 0


def _fractions(call: Call) -> bool:
    """Of a Gemm."""
    factors = [call.attrs.get("alpha", 1.0), call.attrs.get("beta", 1.0) if len(call.dtypes) > 2 else 1.0]
    return call.dtypes[0] not in FLOATS and any(not float(factor).is_integer() for factor in factors)


def _backwards_from_within(call: Call) -> bool:
    """Of a Slice: an axis is read backwards, and not from its end."""
    starts, axes, steps = (call.integers(slot) for slot in (1, 3, 4))
    if starts is None or steps is None:
        return False
    sizes = [math.inf if call.shapes[0] is None else call.shapes[0][axis] for axis in axes or range(len(starts))]
    at_end = (start == -1 or start >= size - 1 for start, size in zip(starts, sizes, strict=True))
    return any(step < 0 and not end for step, end in zip(steps, at_end, strict=True))


def _other_statistics(call: Call) -> bool:
    return call.dtypes[0] in HALF and any(dtype != call.dtypes[0] for dtype in call.dtypes[1:])


def _small_epsilon(call: Call, default: float = EPSILON) -> bool:
    """Of a norm."""
    return call.dtypes[0] in HALF and float(call.attrs.get("epsilon", default)) < _EPSILON


def _scalar_added(call: Call) -> bool:
    added = call.shapes[2] if len(call.shapes) > 2 else None
    return added is not None and math.prod(added) == 1 and len(added) < 2


def _too_many_pieces(call: Call) -> bool:
    most = place_traits(call.kind).most_pieces
    return call.results > (most or call.results)


def _near_zero(call: Call) -> bool:
    """Of a norm: its first input is a tensor less a slice of it, cast or not."""
    made = call.made_by(call.inputs[0])
    while made is not None and made[0] == "Cast":
        made = call.made_by(made[1][0])
    if made is None or made[0] != "Sub":
        return False
    whole, some = made[1]
    taken = call.made_by(some)
    return taken is not None and taken[0] == "Slice" and taken[1][0] == whole


def _second_activation(call: Call) -> bool:
    return call.dtypes[0] in FLOATS and behind_activation(call.inputs[0], call.made_by)


def _vector(call: Call) -> bool:
    return any(shape is not None and len(shape) == 1 for shape in call.shapes)


def _column_beside_rows(call: Call) -> bool:
    """Of a Pow: one operand has one number where the other has rows of fours; a number by itself is well."""
    shapes = [shape for shape in call.shapes if shape is not None and len(shape) > 1]
    other = [shape[-1] for shape in call.shapes if shape]
    return any(shape[-1] == 1 for shape in shapes) and max(other) > 1 and max(other) % _VECTOR == 0


def _no_axes(call: Call) -> bool:
    """Of a reduction that then reduces nothing."""
    listed = call.integers(1) if len(call.dtypes) > 1 and call.dtypes[1] else []
    return bool(call.attrs.get("noop_with_empty_axes", 0)) and listed == []


def _nothing_summed(call: Call) -> bool:
    return (call.shapes[0] or (1,))[-1] == 0


def _dots_beside_letters(call: Call) -> bool:
    """Of an Einsum: from the first operand with dots on its kernel takes them to be before every letter that is not
    behind dots."""
    left, _, result = str(call.attrs["equation"]).replace(" ", "").partition("->")
    terms, dotted, shifted = left.split(","), False, False
    for term in (*terms, result):
        before, dots, _ = term.partition("...")
        shifted, dotted = shifted or (dotted and before != ""), dotted or dots != ""
    hidden = {len(shape or ()) - len(term) + 3 for term, shape in zip(terms, call.shapes, strict=True) if "..." in term}
    return shifted and (None in call.shapes or hidden != {1})


def _repeated(call: Call) -> bool:
    """Of an Einsum: an operand has one element on an axis where another has more."""
    shapes = [shape for shape in call.shapes if shape is not None]
    if len(shapes) < len(call.shapes):
        return False
    terms, _, sizes = terms_of(call.attrs, shapes)
    return any([sizes[label] for label in term] != list(shape) for term, shape in zip(terms, shapes, strict=True))


def _passes_over_keys(call: Call) -> bool:
    """Of attention: several queries meet more keys than one pass takes, or nobody knows how many."""
    q, k = call.shapes[0], call.shapes[1] if len(call.shapes) > 1 else None
    if len(call.dtypes) < 2 or not call.dtypes[1] or (q is not None and q[1] == 1):
        return False
    return k is None or k[-2] > _PASS


def _passes_over_rows(call: Call) -> bool:
    """The same where the queries are the keys."""
    return call.shapes[0] is None or call.shapes[0][1] > _PASS


def _even_groups_to_one(call: Call) -> bool:
    """Of a ConvTranspose."""
    w = call.shapes[1]
    return w is not None and call.groups > 1 and w[1] == 1 and w[0] // call.groups % 2 == 0


_HOLDS: Mapping[str, Callable[[Call], bool]] = {
    "channels by threes": _by_threes,
    "few products, a bias to six channels": _bias_to_six,
    "a matrix product, padded behind alone": _padded_behind,
    "groups between the vectors of all channels": _between_vectors,
    "integers times a fraction": _fractions,
    "backwards from within": _backwards_from_within,
    "a bias left out by an empty name": lambda call: len(call.dtypes) > 2 and not call.dtypes[2],
    "16-bit image, fp32 statistics": _other_statistics,
    "scalar added": _scalar_added,
    "a column beside rows of fours": _column_beside_rows,
    "a vector": _vector,
    "no axes": _no_axes,
    "nothing to add up": _nothing_summed,
    "dots beside letters": _dots_beside_letters,
    "an axis repeated": _repeated,
    "several passes over the keys": _passes_over_keys,
    "several passes over the rows": _passes_over_rows,
    "a mask of keys": lambda call: len(call.dtypes) > 4 and bool(call.dtypes[4]),
    "groups of an even number of channels to one": _even_groups_to_one,
    "16-bit numbers combined": lambda call: call.dtypes[0] in HALF and call.attrs.get("reduction", "none") != "none",
    "16-bit numbers": lambda call: call.dtypes[0] in HALF,
    "16-bit numbers, a small epsilon": _small_epsilon,
    "16-bit numbers, a small epsilon or none": lambda call: _small_epsilon(call, 1e-12),
    "cubic, of other numbers than fp32": lambda call: call.attrs.get("mode") == "cubic" and call.dtypes[0] != "float32",
    "more pieces than a kernel makes": _too_many_pieces,
    "an input that nobody reads after it": lambda call: call.read_last(),
    "indices wanted": lambda call: call.results > 1,
    "floating-point numbers": lambda call: call.dtypes[0] in FLOATS,
    "numbers far from zero": lambda call: call.dtypes[0] in FLOATS and not _near_zero(call),
    "another activation of a convolution": _second_activation,
    "truth values chosen": lambda call: call.dtypes[1] == "bool",
    "two axes": lambda call: call.rank == 2,
    "three axes": lambda call: call.rank > 4,
    "three axes, in groups": lambda call: call.rank > 4 and call.groups > 1,
}
