"""Proves lowering rules: one operator at a time, against the operator itself in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import lookup, lowering_rule_of
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.program import Program
from tests.helpers import on_places
from tests.helpers.gradcheck import ROUNDING, Case, assert_near
from tests.helpers.rules import Array, emit, run_reference, typed_feeds


def check_forward(
    type_: str,
    inputs: Sequence[Any],
    *,
    attrs: dict[str, Any] | None = None,
    outputs: int = 1,
    feeds: Sequence[int] = (),
    domain: str = "",
    half: Sequence[str] = ("float16", "bfloat16"),
    forward: Callable[..., Sequence[Array]] | None = None,
) -> None:
    """Prove the lowering rule of one operator: float64 against the operator itself, then fp32 and 16 bit."""
    arrays = [None if a is None else np.asarray(a) for a in inputs]
    arrays = [a.astype(np.float32).astype(np.float64) if a is not None and a.dtype.kind == "f" else a for a in arrays]
    case = Case(type_, arrays, dict(attrs or {}), outputs, (), (), tuple(feeds), (), domain, forward)
    there = on_places.chosen()
    first = [] if there else ["cpu"]
    sixteen = [(h, p, 3 * ROUNDING[h]) for h in half if case.exists_in(h) for p in (*first, *on_places.checked(h))]
    wide = [("float32", there, 1e-4)] if there else [("float64", "reference", 1e-9), ("float32", "cpu", 1e-5)]
    for dtype, place, limit in [*wide, *sixteen]:
        kind = numpy_dtype(dtype)
        at = [a if a is None or a.dtype.kind != "f" else a.astype(kind).astype(np.float64) for a in arrays]
        truth = case.run(at)
        op, shapes, constants = _forward_operator(case, dtype, at, truth)
        rule = lookup(op)
        assert rule is not None and lowering_rule_of(op) is not None, f"{type_} has no lowering rule for {dtype}"
        model = emit(op, rule, place, shapes, constants)
        if place in on_places.DEVICES:
            on_places.check_kernels(place, model, f"{type_} {case.attrs}, {dtype}")
        if place == "cuda" and not on_places.computes(place, dtype):
            continue
        fed = typed_feeds(model, {f"x{i}": a for i, a in enumerate(at) if a is not None})
        results = run_reference(model, fed) if place == "reference" else on_places.run_on(place, model, fed)
        for i, (found, expected) in enumerate(zip(results, truth, strict=True)):
            assert_near(found, expected, limit, f"{type_} {case.attrs}: output {i}, {dtype} for {place}")


def _forward_operator(
    case: Case, dtype: str, arrays: Sequence[Array | None], truth: Sequence[Array]
) -> tuple[Operator, dict[str, tuple[int, ...]], dict[str, Array]]:
    program = Program()
    shapes: dict[str, tuple[int, ...]] = {}
    constants: dict[str, Array] = {}
    xs: list[Variable | None] = []
    for i, a in enumerate(arrays):
        if a is None:
            xs.append(None)
            continue
        shapes[f"x{i}"] = a.shape
        if a.dtype.kind != "f" and i not in case.feeds:
            constants[f"x{i}"] = a
            xs.append(program.add_constant(f"x{i}", a))
            continue
        xs.append(program.add_input(f"x{i}", dtype if a.dtype.kind == "f" else a.dtype, a.shape))
    ys = [
        program.add_variable(f"y{i}", dtype if y.dtype.kind == "f" else y.dtype, y.shape) for i, y in enumerate(truth)
    ]
    return program.add_operator(case.type, xs, ys, attrs=dict(case.attrs), domain=case.domain), shapes, constants
