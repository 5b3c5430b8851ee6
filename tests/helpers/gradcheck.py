"""Proves gradient rules: one operator at a time, against central differences.

``check_gradient("Tanh", [x])`` runs the forward operator in float64 in ONNX's reference evaluator, emits the
gradient rule as the lowering would, and asserts

1. float64, reference evaluator: relative L2 distance to central differences along random directions < 1e-5,
   and each gradient asked for alone is the same,
2. fp32, onnxruntime on CPU: < 1e-4 from the float64 rule,
3. fp16 and bf16, the CPU lowering: < one unit in the last place, in L2, from the float64 rule on the same 16-bit
   inputs; where a rule computes in 16-bit steps, as near as the float64 rule itself comes on inputs that have been
   rounded six times more (what cancels in it is lost in any 16-bit steps); a rule declared exact makes no value that
   16 bit does not have,
4. fp16 and bf16, the CUDA lowering: well typed, every node has a CUDA kernel, and the fp16 one, computed by
   onnxruntime on CPU, is within format tolerance.

With ``pytest --place KIND``, fp32 and what 4 says are checked of that place's lowering, computed there; nothing else is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from hypothesis import settings, strategies as st

import amp_transpiler.ops  # noqa: F401  (fills the operator table)
from amp_transpiler.ir.infer import Declared, infer_operator
from amp_transpiler.ir.nodes import OWN, Operator, Variable
from amp_transpiler.ir.opdef import gradient_type, lookup
from amp_transpiler.ir.types import HALF, numpy_dtype
from amp_transpiler.program import Program
from tests.helpers import on_places
from tests.helpers.rules import OPSET, Array, Reference, as_model, emit, run_cpu, tensor_info, typed_feeds

Outputs = list[Array | None]
#: Half a unit in the last place, relative: what one rounding may add.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
#: What rounding may add to a value below the normal range.
SMALLEST = {"float16": 2.0**-25, "bfloat16": 2.0**-134}

#: For hypothesis: the same few examples in every run.
few = settings(max_examples=10, derandomize=True, deadline=None, database=None)
seeds = st.integers(0, 2**32 - 1)


@dataclass
class Case:
    """One forward operator on given values. Integer inputs are constants unless their slot is in ``feeds``."""

    type: str
    inputs: Sequence[Array | None]
    attrs: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    through: Sequence[int] = (0,)
    wrt: Sequence[int] = ()
    feeds: Sequence[int] = ()
    keep_fp32: Sequence[int] = ()
    domain: str = ""
    forward: Callable[..., Sequence[Array]] | None = None
    fixed: Sequence[int] = ()
    _rules: dict[Any, Reference] = field(default_factory=dict, init=False, repr=False)

    def run(self, inputs: Sequence[Array | None]) -> list[Array]:
        """The forward operator in float64, on inputs like the case's own."""
        if self.forward is not None:
            return [np.asarray(y) for y in self.forward(*inputs)]
        return self._operator.run({f"x{i}": a for i, a in enumerate(inputs) if a is not None})

    @cached_property
    def _operator(self) -> Reference:
        names = ["" if a is None else f"x{i}" for i, a in enumerate(self.inputs)]
        outs = [f"y{i}" for i in range(self.outputs)]
        node = onnx.helper.make_node(self.type, names, outs, domain=self.domain, **self.attrs)
        given = [(n, a) for n, a in zip(names, self.inputs, strict=True) if a is not None]
        infos = [tensor_info(n, a.dtype.name, a.shape) for n, a in given]
        untyped = [onnx.helper.make_empty_tensor_value_info(n) for n in outs]
        model = as_model(onnx.helper.make_graph([node], "forward", infos, untyped))
        if self.domain:
            model.opset_import.append(onnx.helper.make_opsetid(self.domain, 1))
        return Reference(model)

    def gradients(self, values: dict[str, Array]) -> list[Array]:
        """The gradients in float64, by the rule; values of the same sizes have the same model."""
        sizes = tuple(sorted((name, a.dtype.name, a.shape) for name, a in values.items()))
        if sizes not in self._rules:
            self._rules[sizes] = Reference(Gradient(self, "float64", values, self.wrt).model("reference"))
        rule = self._rules[sizes]
        return rule.run(typed_feeds(rule.model, values))

    def exists_in(self, dtype: str) -> bool:
        """Whether the forward operator has this 16-bit type at all (Sin has no bfloat16)."""
        try:
            schema = onnx.defs.get_schema(self.type, OPSET, self.domain)
        except onnx.defs.SchemaError:
            return True
        first = next(formal for formal in schema.inputs if "tensor(float)" in formal.types)
        return f"tensor({dtype})" in first.types

    def cotangents(self, ys: Sequence[Array], rng: np.random.Generator) -> Outputs:
        """A random dy for each differentiated output."""
        return [np.asarray(rng.normal(size=y.shape)) if i in self.through else None for i, y in enumerate(ys)]


class Gradient:
    """The gradient operator of a case at one float type, and the models that its rule becomes."""

    def __init__(self, case: Case, dtype: str, values: dict[str, Array], wanted: Sequence[int]) -> None:
        self.values, self.dtype = values, dtype
        self.constants: dict[str, Array] = {}
        program = Program()
        xs = [self._variable(program, f"x{i}", a, case, i) for i, a in enumerate(case.inputs)]
        ys = [program.add_variable(f"y{i}") for i in range(case.outputs)]
        forward = program.add_operator(case.type, xs, ys, attrs=dict(case.attrs), domain=case.domain)
        env = Declared()
        if dtype != "float64":  # which some operators do not have
            infer_operator(forward, env)
        for i, y in enumerate(ys):
            array = values[f"y{i}"]
            y.dtype, y.shape = env.types.get(y.key, (None, None))[0] or array.dtype.name, array.shape
        self.op = self._gradient_operator(forward, case, wanted)
        self.rule = lookup(self.op)
        self.forward = forward

    def _variable(self, program: Program, name: str, array: Array | None, case: Case, slot: int) -> Variable | None:
        if array is None:
            return None
        if array.dtype.kind != "f" or slot in case.fixed:
            if slot not in case.feeds:
                self.constants[name] = array
                return program.add_constant(name, array)
            return program.add_input(name, array.dtype, array.shape)
        keep = slot in case.keep_fp32 and self.dtype in HALF
        return program.add_input(name, "float32" if keep else self.dtype, array.shape)

    def _gradient_operator(self, forward: Operator, case: Case, wanted: Sequence[int]) -> Operator:
        program = forward.program
        found = lookup(forward)
        assert found is not None and found.gradient is not None, f"{case.type} has no gradient rule"
        inputs: list[Variable | None] = []
        for read in found.gradient.reads:
            kind, which = read.rstrip("*0123456789"), read.lstrip("xyd")
            source = forward.inputs if kind == "x" else forward.outputs
            slots = range(len(source)) if which == "*" else [int(which)]
            for slot in slots:
                variable = source[slot] if slot < len(source) else None
                assert kind != "y" or variable is not None, f"{case.type} reads {read}; pass outputs={slot + 1}"
                inputs.append(self._dy(program, variable, slot, case) if kind == "dy" else variable)
        outputs: list[Variable | None] = [None] * len(forward.inputs)
        for slot in wanted:
            source_variable = forward.inputs[slot]
            assert source_variable is not None
            grad = program.add_variable(f"dx{slot}", source_variable.dtype, source_variable.shape)
            grad.grad_of = source_variable
            outputs[slot] = grad
        attrs = {**case.attrs, **({"n_inputs": len(forward.inputs)} if "x*" in found.gradient.reads else {})}
        type_ = gradient_type(case.domain, case.type)
        return program.add_operator(type_, inputs, outputs, attrs=attrs, domain=OWN)

    def _dy(self, program: Program, y: Variable | None, slot: int, case: Case) -> Variable | None:
        if y is None or slot not in case.through:
            return None
        dy = program.add_variable(f"dy{slot}", y.dtype, y.shape)
        dy.grad_of = y
        return dy

    def model(self, place: str) -> onnx.ModelProto:
        """The rule as an ONNX model, with the graph inputs and the rounding that the lowering gives it."""
        assert self.rule is not None and self.rule.lowering is not None
        shapes = {v.name: self.values[v.name].shape for v in self.op.inputs if v is not None}
        return emit(self.op, self.rule, place, shapes, self.constants)

    def feeds(self, model: onnx.ModelProto) -> dict[str, Array]:
        """The values of the model's graph inputs, in the types that it declares."""
        return typed_feeds(model, self.values)


def assert_near(found: Array, expected: Array, tolerance: float, what: str, floor: float = 1e-8) -> None:
    """Relative L2 distance below ``tolerance``, with an absolute floor (per element) for gradients that are zero."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}"
    assert np.isfinite(found).all(), f"{what}: not finite: {found}"
    distance, size = float(np.linalg.norm(found - expected)), float(np.linalg.norm(expected))
    assert distance <= tolerance * size + floor * np.sqrt(found.size), (
        f"{what}: relative distance {distance / max(size, 1e-300):.3g} is not below {tolerance:.3g}\n"
        f"found\n{found}\nexpected\n{expected}"
    )


def _values(case: Case, inputs: Sequence[Array | None], rng: np.random.Generator) -> tuple[dict[str, Array], Outputs]:
    ys = case.run(inputs)
    dys = case.cotangents(ys, rng)
    values = {f"x{i}": a for i, a in enumerate(inputs) if a is not None}
    values |= {f"y{i}": y for i, y in enumerate(ys)} | {f"dy{i}": d for i, d in enumerate(dys) if d is not None}
    return values, dys


def _central_differences(case: Case, slot: int, dys: Outputs, directions: Array, step: float) -> Array:
    """d sum(dy * y) along each direction of input ``slot``."""

    def loss(at: Array) -> float:
        ys = case.run([at if i == slot else a for i, a in enumerate(case.inputs)])
        return float(sum(np.sum(dy * y) for dy, y in zip(dys, ys, strict=False) if dy is not None))

    x = case.inputs[slot]
    assert x is not None
    return np.array([(loss(x + step * v) - loss(x - step * v)) / (2 * step) for v in directions])


def check_gradient(
    type_: str,
    inputs: Sequence[Any],
    *,
    attrs: dict[str, Any] | None = None,
    outputs: int = 1,
    through: Sequence[int] = (0,),
    wrt: Sequence[int] | None = None,
    feeds: Sequence[int] = (),
    keep_fp32: Sequence[int] = (),
    domain: str = "",
    half: Sequence[str] = ("float16", "bfloat16"),
    tolerance: dict[str, float] | None = None,
    step: float = 1e-5,
    seed: int = 0,
    forward: Callable[..., Sequence[Array]] | None = None,
    fixed: Sequence[int] = (),
    alone: bool = True,
) -> None:
    """Prove the gradient rule of one operator on these inputs (see the module's text).

    ``inputs``: float arrays (any float type; taken as float64), integer and bool arrays, None where left
    out. ``wrt``: the slots to differentiate (default: every float input). ``through``: outputs that have
    a gradient. ``outputs``: how many the forward operator has, those that the rule reads included.
    ``feeds``: integer slots whose value is not known before the run. ``keep_fp32``: float slots that stay
    fp32 in 16 bit. ``forward``: a float64 oracle ``f(*inputs) -> outputs``, where the reference evaluator
    has none. ``fixed``: float slots whose value is known before the run. ``tolerance``: overrides by "float64", "float32", "float16", "bfloat16". ``alone``: ask for each gradient alone as well.
    """
    arrays = [None if a is None else np.asarray(a) for a in inputs]
    arrays = [
        a.astype(np.float32).astype(np.float64) if a is not None and a.dtype.kind == "f" and i not in fixed else a
        for i, a in enumerate(arrays)
    ]
    if wrt is None:
        wrt = [i for i, a in enumerate(arrays) if a is not None and a.dtype.kind == "f" and i not in fixed]
    case = Case(type_, arrays, dict(attrs or {}), outputs, through, wrt, feeds, keep_fp32, domain, forward, fixed)
    limits = {"float64": 1e-5, "float32": 1e-4} | (tolerance or {})
    rng = np.random.default_rng(seed)
    values, dys = _values(case, arrays, rng)

    if on_places.chosen() is None:
        expected = _check_float64(case, values, dys, limits["float64"], step, rng, alone)
    else:
        expected = case.gradients(values)
    _check_float32(case, values, expected, limits["float32"])
    for dtype in half:
        if case.exists_in(dtype):
            _check_half(case, dtype, rng, limits)


def _check_float64(
    case: Case, values: dict[str, Array], dys: Outputs, limit: float, step: float, rng: np.random.Generator, alone: bool
) -> list[Array]:
    found = case.gradients(values)
    for slot, dx in zip(case.wrt, found, strict=True):
        what = f"{case.type} {case.attrs}: gradient of input {slot}, float64"
        assert dx.dtype == np.float64, f"{what}: came as {dx.dtype}; a constant has a fixed type"
        assert dx.shape == values[f"x{slot}"].shape, f"{what}: shape {dx.shape}, not {values[f'x{slot}'].shape}"
        directions = rng.normal(size=(3, *dx.shape))
        expected = _central_differences(case, slot, dys, directions, step)
        assert_near(np.array([np.sum(v * dx) for v in directions]), expected, limit, what)
        if alone and len(case.wrt) > 1:
            single = Gradient(case, "float64", values, [slot])
            model = single.model("reference")
            np.testing.assert_allclose(Reference(model).run(single.feeds(model))[0], dx, err_msg=what)
    return found


def _check_float32(case: Case, values: dict[str, Array], expected: Sequence[Array], limit: float) -> None:
    gradient = Gradient(case, "float32", values, case.wrt)
    place = on_places.chosen() or "cpu"
    model = gradient.model(place)
    for slot, dx, truth in zip(case.wrt, on_places.run_on(place, model, gradient.feeds(model)), expected, strict=True):
        assert dx.dtype == np.float32
        assert_near(dx, truth, limit, f"{case.type} {case.attrs}: gradient of input {slot}, float32")


def _rounded(case: Case, dtype: str, rng: np.random.Generator) -> Gradient:
    """On inputs, outputs and output gradients as a 16-bit program holds them."""
    kind = numpy_dtype(dtype)

    def rounds(a: Array) -> Array:
        return a.astype(kind).astype(np.float64)

    inputs = [
        a if a is None or a.dtype.kind != "f" or i in (*case.keep_fp32, *case.fixed) else rounds(a)
        for i, a in enumerate(case.inputs)
    ]
    values, _ = _values(case, inputs, rng)
    gradient = Gradient(case, dtype, values, case.wrt)
    held = {v.name: v.dtype for v in gradient.forward.outputs if v is not None}
    gradient.values = {n: rounds(a) if held.get(n.removeprefix("d")) in HALF else a for n, a in values.items()}
    return gradient


def _check_half(case: Case, dtype: str, rng: np.random.Generator, limits: dict[str, float]) -> None:
    gradient = _rounded(case, dtype, rng)
    truth = case.gradients(gradient.values)
    assert gradient.rule is not None
    unit = limits.get(dtype, 2 * ROUNDING[dtype])
    lost = _lost_to_steps(case, gradient.values, truth, dtype) if gradient.rule.native else [0.0] * len(truth)

    if on_places.chosen() is None:
        model = gradient.model("cpu")
        for slot, dx, expected, steps in zip(case.wrt, run_cpu(model, gradient.feeds(model)), truth, lost, strict=True):
            what = f"{case.type} {case.attrs}: gradient of input {slot}, {dtype} on CPU"
            assert_near(dx, expected, unit, what, SMALLEST[dtype] + 1e-8 + steps)
            if slot not in case.keep_fp32:
                np.testing.assert_array_equal(dx, dx.astype(numpy_dtype(dtype)).astype(dx.dtype), what)
    for place in on_places.checked(dtype):
        model = gradient.model(place)
        on_places.check_kernels(place, model, f"{case.type} {case.attrs}, {dtype}")
        if not on_places.computes(place, dtype):
            continue
        results = on_places.run_on(place, model, gradient.feeds(model))
        for slot, dx, expected, steps in zip(case.wrt, results, truth, lost, strict=True):
            what = f"{case.type} {case.attrs}: gradient of input {slot}, {dtype} for {place}"
            assert_near(dx, expected, 4 * unit, what, 4 * SMALLEST[dtype] + steps)


def _lost_to_steps(case: Case, values: dict[str, Array], truth: Sequence[Array], dtype: str) -> list[float]:
    """Of each gradient, six times how far it moves (root mean square) where what it is computed from is rounded."""
    draws = np.random.default_rng(1)
    moved = np.zeros(len(truth))
    for _ in range(4):
        noisy = {
            name: a * (1 + ROUNDING[dtype] * draws.uniform(-1, 1, a.shape)) if a.dtype.kind == "f" else a
            for name, a in values.items()
        }
        again = case.gradients(noisy)
        moved += [np.mean((a - b) ** 2) if a.size else 0.0 for a, b in zip(again, truth, strict=True)]
    return [6 * math.sqrt(m / 4) for m in moved]


def _one(type_: str, inputs: Sequence[Any], dtype: str, attrs: dict[str, Any], wrt: Sequence[int] | None) -> Gradient:
    arrays = [None if a is None else np.asarray(a) for a in inputs]
    if wrt is None:
        wrt = [i for i, a in enumerate(arrays) if a is not None and a.dtype.kind == "f"]
    case = Case(type_, arrays, attrs, wrt=wrt)
    values, _ = _values(case, arrays, np.random.default_rng(0))
    return Gradient(case, dtype, {n: np.ones_like(a) if n.startswith("dy") else a for n, a in values.items()}, wrt)


def gradient_values(type_: str, inputs: Sequence[Any], **attrs: Any) -> list[Array]:
    """The float64 gradients of the sum of the first output, for each float input."""
    gradient = _one(type_, inputs, "float64", attrs, None)
    model = gradient.model("reference")
    return Reference(model).run(gradient.feeds(model))


def gradient_model(
    type_: str, inputs: Sequence[Any], dtype: str, place: str, wrt: Sequence[int] | None = None, **attrs: Any
) -> onnx.ModelProto:
    """The gradient rule of one operator as it is emitted for a place."""
    return _one(type_, inputs, dtype, attrs, wrt).model(place)


def normal(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng([seed, 1])  # not the stream that dy comes from
    return [rng.normal(size=shape) for shape in shapes]
