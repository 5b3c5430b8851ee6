"""What would make a bad step good: a smaller loss scale, an operator in fp32; each tried by running the step again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import BACKWARD, FORWARD, OWN, Operator, Variable
from amp_transpiler.ir.opdef import gradient_type
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.ir.types import HALF
from amp_transpiler.monitor.rerun import Rerun
from amp_transpiler.passes.view.names import source, written_name
from amp_transpiler.passes.view.training_step import TrainingStep

#: The smallest scale that is tried, as a power of two: fp16 gradients below it are lost with any scale.
LEAST = -24


@dataclass(frozen=True)
class Cure:
    """A change that was tried by running the step again with it. ``works``: it makes the step good."""

    change: str
    works: bool

    def __str__(self) -> str:
        return f"{self.change}: {'makes the step good' if self.works else 'does not help'}"


def tried(op: Operator, scaling: float | None, parts: TrainingStep, rerun: Rerun) -> tuple[Cure, ...]:
    """Suggested fixes of a step that ``op`` makes bad at the loss scale ``scaling``, each tried."""
    fixes = []
    scale = parts.scale
    if scale is not None and scale.persistable and scaling is not None and scaling > 0:
        largest = largest_scale(parts, rerun, math.ceil(math.log2(scaling)) - 1)
        name = f"loss scale {2.0**largest:.10g}" if largest is not None else "any smaller loss scale"
        fixes.append(Cure(name, largest is not None))
    for entry, black in entries(op):
        keep_fp32 = in_fp32(parts.program, black)
        if keep_fp32:
            fixes.append(Cure(f"{entry} (fp32)", not rerun.is_bad(parts, keep_fp32)))
    return tuple(fixes)


def largest_scale(parts: TrainingStep, rerun: Rerun, high: int) -> int | None:
    """The largest power of two from ``LEAST`` to ``high`` with which the step is good, by bisection; None: none is.

    A step that is good at a scale is taken to be good at every smaller one.
    """
    scale = parts.scale
    assert scale is not None

    def good(exponent: int) -> bool:
        with_scale(rerun, scale.name, 2.0**exponent)
        return not rerun.is_bad(parts)

    before = rerun.run(parts.program, [scale.name])[0]
    try:
        return bisected(good, LEAST, high)
    finally:
        rerun.change({scale.name: before})


def bisected(good: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number from ``low`` to ``high`` that is good, where all below it are; None: not even ``low``."""
    if high < low or not good(low):
        return None
    if good(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def with_scale(rerun: Rerun, name: str, value: float) -> None:
    """Let the runs that follow use another loss scale."""
    rerun.change({name: np.full(1, value, np.float32)})


def entries(op: Operator) -> list[tuple[str, Callable[[Operator], bool]]]:
    """Entries of AutoMixedPrecisionLists that make the operator fp32, and which forward operators each turns black."""
    outputs = [v for v in op.outputs if v is not None and v.dtype in HALF]
    if not outputs:
        return []
    made = outputs[0].grad_of if outputs[0].grad_of is not None else outputs[0]
    name = written_name(made)

    def touches(other: Operator) -> bool:
        return any(
            v is not None and name in (v.name, source(v).name, written_name(v)) for v in (*other.inputs, *other.outputs)
        )

    found: list[tuple[str, Callable[[Operator], bool]]] = [(f"custom_black_varnames=[{name!r}]", touches)]
    forward = forward_of(op) if op.role == BACKWARD else op
    if forward is not None and forward.role == FORWARD and forward.type != "Cast":
        kind = forward.full_type
        found.append((f"custom_black_list=[{kind!r}]", lambda other: other.full_type == kind))
    return found


def in_fp32(program: Graph, black: Callable[[Operator], bool]) -> frozenset[str]:
    """The variables that keep fp32 values where forward operators for which ``black`` holds run in fp32.

    Those operators, the gray ones that would follow them, the casts around them and the gradients of all these; see
    ``keep_fp32`` of ``passes.lowering.lower``.
    """
    chosen: dict[Operator, None] = {}
    keep_fp32: set[str] = set()
    forward = [op for op in program.operators if op.role == FORWARD]
    for op in forward:
        if op.inserted:
            continue
        gray = op.why is not None and op.why.kind in (Kind.FOLLOWS, Kind.FOLLOWS_WIDENING)
        follows = gray and any(source(v).producer in chosen for v in op.inputs if v is not None)
        if black(op) or follows:
            chosen[op] = None
            keep_fp32 |= _halves(op.outputs)
    for op in forward:
        if op.inserted and _joins(op, chosen, keep_fp32):
            chosen[op] = None
            keep_fp32 |= {v.name for v in op.outputs if v is not None}
    for op in program.operators:
        if op.role == BACKWARD and op.domain == OWN:
            if op.type == "GradSum":
                total = op.outputs[0]
                if total is not None and total.grad_of is not None and total.grad_of.name in keep_fp32:
                    keep_fp32 |= _halves(op.outputs)
            elif forward_of(op) in chosen:
                keep_fp32 |= {v.name for v in op.outputs if v is not None}
    return frozenset(keep_fp32) if any(program.var(name).dtype in HALF for name in keep_fp32) else frozenset()


def _joins(cast: Operator, chosen: dict[Operator, None], keep_fp32: set[str]) -> bool:
    """Whether an inserted cast leads to, or from, an operator that runs in fp32."""
    made, read = cast.outputs[0], cast.inputs[0]
    return (made is not None and any(reader in chosen for reader, _ in made.readers)) or (
        read is not None and read.name in keep_fp32
    )


def forward_of(op: Operator) -> Operator | None:
    """The operator that a gradient operator differentiates; None where it cannot be told."""
    wanted = [(slot, v.grad_of) for slot, v in enumerate(op.outputs) if v is not None and v.grad_of is not None]
    if not wanted or op.domain != OWN:
        return None
    given = {v.grad_of for v in op.inputs if v is not None and v.grad_of is not None}
    for reader, slot in wanted[0][1].readers:
        fits = slot == wanted[0][0] and gradient_type(reader.domain, reader.type) == op.type
        if fits and all(reader.input(s) is v for s, v in wanted) and given & set(reader.outputs):
            return reader
    return None


def _halves(variables: Iterable[Variable | None]) -> set[str]:
    return {v.name for v in variables if v is not None and v.dtype in HALF}
