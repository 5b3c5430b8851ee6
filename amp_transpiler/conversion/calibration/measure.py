"""What 16 bit does to a model on given data: every tensor in fp32 beside the same tensor in faithful 16 bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from amp_transpiler.conversion.calibration.draws import seed_draws
from amp_transpiler.conversion.calibration.statistics import Difference, TensorStats
from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.opdef import lowering_rule_of, traits_of
from amp_transpiler.ir.tensors import as_array, byte_size, tensor_type
from amp_transpiler.ir.types import FLOATS, HALF, numpy_dtype
from amp_transpiler.passes.lowering.arithmetic import Arithmetic
from amp_transpiler.passes.lowering.lowered import Lowered, needed
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.passes.lowering.place import CPUPlace
from amp_transpiler.passes.view.computed_by import computed_by
from amp_transpiler.program import Program
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.binding import PlainStep, Step, needs_plain
from amp_transpiler.runtime.budget import watched
from amp_transpiler.runtime.feeds import Feeds
from amp_transpiler.runtime.scope import Scope, global_scope
from amp_transpiler.runtime.session import Settings, create_session

#: Bytes of activations that one run of the fp32 program hands out; a model with more is run a part at a time.
GROUP = 1 << 28
#: Tensors in the first part, where the sizes of all are not known.
_FIRST = 32
#: Bytes of constants, 16-bit ones as the fp32 that carries them, that a session's model may hold. Making a session
#: copies them four times, and protobuf ends at 2 GB; where they are more, the large ones are bound to it from where
#: they lie. The runtime then adds the terms of a sum in another order, and the last bits of fp32 may differ.
EMBEDDED = 1 << 28
#: A constant is bound from this size on; operators want small ones to be known when a session is made.
_LARGE = 1 << 20

#: The L2 norm that probabilities of their own count as at least: where all of them together are less, a detector has
#: found nothing, and what is left of a logit of -16 says as little of a conversion as the rounding of the logit.
_CHANCE = 0.5

_CPU = CPUPlace()
# above "basic" onnxruntime may rearrange fp32 arithmetic between two roundings
_SETTINGS = Settings(optimization_level="basic")

Batch = Mapping[str, np.ndarray]


@dataclass
class Measurement:
    """``tensors``: statistics by the tensor's name in the fp32 program, in its order. ``outputs``: of each output its
    relative L2 error, of probabilities of their own (a Sigmoid's) of a norm of at least 0.5; for integers, booleans and
    strings the share of elements that differ."""

    tensors: dict[str, TensorStats] = field(default_factory=dict)
    outputs: dict[str, float] = field(default_factory=dict)


def outputs_of(program: Program, batches: Sequence[Batch]) -> list[list[Any]]:
    """The outputs of ``program`` on each batch, computed on CPU (16-bit operators faithfully).

    Raises: FeedError, FeedTypeError for feeds that the program does not take, GraphError where it cannot be lowered,
    PlaceError, ExecutionError from onnxruntime.
    """
    runner = Runner(program, [v.name for v in program.outputs])
    return [runner.run(batch) for batch in batches]


def measure(
    reference: Program,
    converted: Program,
    batches: Sequence[Batch],
    dtype: str,
    *,
    expected: Sequence[Sequence[Any]] | None = None,
    outputs: Mapping[str, float] | None = None,
    tensors: bool = True,
) -> Measurement:
    """Run both programs on the batches and compare.

    Args:
        reference: the program in fp32.
        converted: its conversion; 16-bit operators round as they would on a GPU.
        batches: feeds by input name, with the element types of ``reference``.
        dtype: the 16-bit type.
        expected: what the outputs should be, where that is not what ``reference`` gives.
        outputs: their errors, where an earlier measurement of the same has them.
        tensors: whether to compare inner tensors as well; those of nested graphs are never seen.

    Raises: ArgumentError for another type than float16 or bfloat16; what :func:`outputs_of` raises.
    """
    if dtype not in HALF:
        raise ArgumentError(f"measure: dtype is one of {', '.join(sorted(HALF))}, got {dtype!r}")
    if outputs is None:
        wanted = outputs_of(reference, batches) if expected is None else expected
        outputs = _outputs(converted, reference, batches, wanted)
    found = Measurement(outputs=dict(outputs))
    variables = _comparable(reference, converted) if tensors and batches else []
    names = [v.name for v in variables]
    count = len(names) if all(static(v.shape) is not None for v in variables) and _bytes(variables) <= GROUP else _FIRST
    while names:  # as many at a time as the last part's sizes let expect
        part, names = names[:count], names[count:]
        held = _compare(reference, converted, batches, part, dtype, found)
        count = max(1, min(count * GROUP // max(held, 1), 16 * count))
    return found


def floors(program: Program) -> dict[str, float]:
    """The least L2 norm that each output of a program counts as."""
    return {v.name: _CHANCE if _is_chance(v) else 0.0 for v in program.outputs}


def _is_chance(output: Variable) -> bool:
    """Whether each of its numbers is a probability of its own, as a Sigmoid makes them."""
    kinds = [traits_of(op) for op in computed_by(output) or ()]
    return bool(kinds) and all(kind.elementwise and kind.bounded == (0.0, 1.0) for kind in kinds)


def _outputs(
    converted: Program, reference: Program, batches: Sequence[Batch], expected: Sequence[Sequence[Any]]
) -> dict[str, float]:
    """The error of each output."""
    found = {name: Difference(floor) for name, floor in floors(reference).items()}
    runner = Runner(converted, list(found))
    for exact, batch in zip(expected, batches, strict=True):
        for difference, one, other in zip(found.values(), exact, runner.run(batch), strict=True):
            difference.add(one, other)
    return {name: difference.error for name, difference in found.items()}


def _compare(
    reference: Program, converted: Program, batches: Sequence[Batch], names: list[str], dtype: str, found: Measurement
) -> int:
    """Take these tensors in; the bytes that the largest batch of them took."""
    one, other = Runner(reference, names), Runner(converted, names)
    held = 0
    for batch in batches:
        values = one.run(batch)
        held = max(held, sum(value.nbytes for value in values))
        for name, exact, rounded in zip(names, values, other.run(batch), strict=True):
            found.tensors.setdefault(name, TensorStats()).add(exact, rounded, dtype)
    return held


def _comparable(reference: Program, converted: Program) -> list[Variable]:
    """Floating-point tensors that outputs depend on and both programs have, in the order of the reference. Sparse
    constants do not count: onnxruntime gives them as no array."""
    operators = needed(reference, reference.outputs)
    made = {v.key for op in operators for v in op.outputs if v is not None and "sparse_value" not in op.attrs}
    read = {v.key for op in operators for v in (*op.inputs, *op.captures) if v is not None}
    made |= {v.key for v in reference.inputs if v.key in read and v.data is None and not v.persistable}
    return [v for v in reference.variables if v.key in made and v.dtype in FLOATS and converted.has_var(v.name)]


def _bytes(variables: Iterable[Variable]) -> int:
    """What variables of fixed shapes hold."""
    return sum(byte_size(v.dtype or "", static(v.shape) or ()) for v in variables)


class Runner:
    """A program for one list of fetches, on CPU. One session serves feeds of every shape, unless the rules of
    operators depend on shapes; then one serves until the shapes change. ``arithmetic``: how kernels round inside."""

    def __init__(
        self,
        program: Program,
        fetches: Sequence[str],
        embedded: int | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        self.program, self.scope, self.weights = _bound_weights(program, embedded)
        self.fetches = [self.program.var(name) for name in fetches]
        self.feeds = Feeds(self.program, self.fetches)
        self.declared = {v.name: numpy_dtype(v.dtype) for v in self.program.inputs if v.dtype in FLOATS}
        self.arithmetic = arithmetic
        ruled = bool(program.info.functions) or any(map(lowering_rule_of, self.program.walk()))
        self.shaped = ruled or arithmetic is not None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.step: Step | PlainStep | None = None

    def run(self, batch: Batch) -> list[Any]:
        """The fetches as arrays (ml_dtypes for bfloat16), sequences and maps as onnxruntime gives them."""
        if not self.fetches:
            return []
        feeds = self.feeds.check({name: self._typed(name, value) for name, value in batch.items()})
        self.feeds.check_shapes(feeds)
        shapes = {n: np.shape(v) for n, v in feeds.items() if self.program.var(n).dtype} if self.shaped else {}
        if self.step is None or shapes != self.shapes:
            self.step, self.shapes = self._compiled(shapes), shapes
        return self.step.run(self.scope, feeds, True)

    def _typed(self, name: str, value: Any) -> Any:
        """The feed with the type that the program declares: an input may have become 16 bit."""
        with np.errstate(all="ignore"):
            return value.astype(self.declared[name], copy=False) if name in self.declared else value

    def _compiled(self, shapes: dict[str, tuple[int, ...]]) -> Step | PlainStep:
        lowered = self.lowered(shapes)
        with watched(f"making a session for program '{self.program.name}'"):
            session, graph = create_session(lowered.model, _CPU, _SETTINGS, self.program.name)
        if needs_plain(lowered):
            return PlainStep(session, lowered, _CPU, self.program.name, "")
        return Step(session, graph, lowered, _CPU, self.program.name, "")

    def lowered(self, shapes: dict[str, tuple[int, ...]]) -> Lowered:
        """The model for feeds of these shapes."""
        lowered = lower(self.program, "cpu", shapes, self.fetches, updates=False, arithmetic=self.arithmetic)
        seed_draws(lowered, self.program)
        return lowered


def _bound_weights(program: Program, embedded: int | None = None) -> tuple[Program, Scope, list[np.ndarray]]:
    """The program and its state. Where the constants exceed ``embedded`` (EMBEDDED), a copy of the program of
    which the large ones are state, and the arrays whose memory that is."""
    types = {v.name: tensor_type(v.data) for v in program.variables if v.is_constant}
    sizes = {name: byte_size("float32" if dtype in HALF else dtype, shape) for name, (dtype, shape) in types.items()}
    if sum(sizes.values()) <= (EMBEDDED if embedded is None else embedded):
        return program, global_scope(), []
    program, scope = program.clone(), Scope()
    scope.hold(global_scope().ort_values)
    weights = []
    for name, size in sizes.items():
        if size >= _LARGE:
            variable = program.var(name)
            weights.append(np.require(as_array(variable.data), requirements=["C", "A"]))
            scope.hold({name: device_tensors.alias(weights[-1], variable.dtype or "")})
            variable.data, variable.persistable = None, True
    return program, scope, weights
