"""What is declared of operators, held to what they do: the node tests of ONNX, run again on other numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from amp_transpiler.ir.opdef import _TABLE, traits_of
from amp_transpiler.ir.traits import Traits
from amp_transpiler.passes.numerics.ranges import Ranges
from amp_transpiler.program import Program
from tests.helpers.node_tests import node_tests

Array = np.ndarray[Any, Any]
#: The largest number of float16, and one beyond.
LARGEST, BEYOND = 65504.0, 1e6


@dataclass
class Case:
    """One node on given inputs, by slot; None where an input is left out."""

    model: onnx.ModelProto
    inputs: list[Array | None]
    evaluator: ReferenceEvaluator

    @property
    def node(self) -> onnx.NodeProto:
        return self.model.graph.node[0]

    def run(self, slot: int = 0, value: Array | None = None) -> list[Array]:
        """The outputs, with another value in a slot."""
        read = [value if i == slot and value is not None else array for i, array in enumerate(self.inputs)]
        feeds = {name: array for name, array in zip(self.node.input, read, strict=True) if array is not None}
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results: Any = self.evaluator.run(None, feeds)
        return [np.asarray(result) for result in results]

    def data(self) -> Array:
        assert self.inputs[0] is not None
        return self.inputs[0]

    def floats(self) -> list[int]:
        """The slots that hold floats and no settings."""
        return [
            slot
            for slot, array in enumerate(self.inputs)
            if array is not None and array.dtype.kind == "f" and slot not in traits_of(self.node.op_type).settings
        ]


@cache
def cases() -> dict[str, list[Case]]:
    """By operator type, the node tests of one standard operator on tensors that the reference evaluator runs again."""
    found: dict[str, list[Case]] = {}
    for test in node_tests():
        model = test.model
        if model is None or not test.data_sets or len(model.graph.node) != 1 or model.graph.node[0].domain:
            continue
        inputs, outputs = test.data_sets[0]
        node = model.graph.node[0]
        known = found.setdefault(node.op_type, [])
        arrays = [v for v in (*inputs, *outputs) if isinstance(v, np.ndarray | np.generic)]
        if len(known) > 2 or len(arrays) < len(inputs) + len(outputs) or sum(a.size for a in arrays) > 20000:
            continue
        given = iter(np.asarray(v) for v in inputs)
        by_slot = [next(given) if name else None for name in node.input]
        floats = [array for array in by_slot if array is not None and array.dtype.kind == "f" and array.size]
        if not floats or not arrays[-1].size or traits_of(node.op_type).random:
            continue
        try:
            case = Case(model, by_slot, ReferenceEvaluator(model))
            case.run()
        except Exception:  # the evaluator does not run every one of these tests
            continue
        known.append(case)
    return {type_: tests for type_, tests in found.items() if tests}


def declared(of: Callable[[Traits], object]) -> list[str]:
    return sorted(type_ for type_ in cases() if of(traits_of(type_)))


STANDARD = sorted({schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain})
#: What has no node test with floats in its first input.
UNTRIED = {"Cast", "CastLike", "ConstantOfShape", "GlobalLpPool", "Scatter", "Trilu", "Where"}


def tried(of: Callable[[Traits], object]) -> list[str]:
    """Known before the node tests are made, which the collection of tests need not wait for."""
    return [type_ for type_ in STANDARD if of(traits_of(type_)) and type_ not in UNTRIED]


def test_what_is_tried_has_node_tests() -> None:
    assert not {type_ for type_ in UNTRIED & cases().keys() if all(0 in case.floats() for case in cases()[type_])}
    assert set(tried(lambda t: t.over)) == set(declared(lambda t: t.over))


def differs(one: Array, other: Array) -> Array:
    return ~((one == other) | ((one != one) & (other != other)))


def places(case: Case, slot: int, at: tuple[int, ...], shape: tuple[int, ...]) -> Array | None:
    """Where an element of an input goes when the input broadcasts to a shape; None where it does not."""
    array = case.inputs[slot]
    assert array is not None
    mask = np.zeros(array.shape, bool)
    mask[at] = True
    try:
        return np.broadcast_to(mask, shape)
    except ValueError:
        return None


def reach(case: Case) -> str:
    """How far an element reaches, each of a few changed: to "its place" in the outputs, "beyond" it, or to "none"."""
    before, reached = case.run(), False
    rng = np.random.default_rng(0)
    for slot in case.floats():
        array = case.inputs[slot]
        assert array is not None
        for flat in rng.choice(array.size, min(3, array.size), replace=False):
            at = tuple(int(i) for i in np.unravel_index(flat, array.shape))
            for new in (array[at] + 1.5, -array[at] - 0.5):
                changed = array.copy()
                changed[at] = new
                for one, other in zip(before, case.run(slot, changed), strict=True):
                    own = places(case, slot, at, one.shape)
                    if own is None or one.shape != other.shape or (differs(one, other) & ~own).any():
                        return "beyond"
                    reached |= bool(differs(one, other).any())
    return "its place" if reached else "none"


#: What reaches only its place in the node tests, and is no elementwise operator.
IN_PLACE = {
    "BitCast": "of bits",
    "Loop": "what is inside computes",
    "OptionalGetElement": "what is inside moves",
    "QLinearConv": "its floats are scales",
    "QLinearMatMul": "its floats are scales",
    "QuantizeLinear": "scales may hold for one axis",
}


def test_elementwise_operators_are_those_that_reach_only_their_place() -> None:
    reaches = {type_: set(map(reach, tests)) for type_, tests in cases().items()}
    elementwise = set(declared(lambda t: t.elementwise))
    assert len(elementwise) >= 50 and not any("beyond" in reaches[type_] for type_ in elementwise)
    found = {type_ for type_, far in reaches.items() if "its place" in far and "beyond" not in far}
    assert {type_ for type_ in found - elementwise if traits_of(type_).moves == ()} == set(IN_PLACE)


def along(case: Case, at: tuple[int, ...], made: Array) -> Array:
    """Where an element of the first input may reach: all places that share its index off the axes of ``over``."""
    node, x = case.node, case.data()
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    over = traits_of(node.op_type).over
    given = case.inputs[1] if len(case.inputs) > 1 and over != "spatial" else None
    if over == "spatial":
        axes = set(range(2, x.ndim))
    elif over == "axis":
        axes = {int(attrs.get("axis", 0 if "Arg" in node.op_type else -1) if given is None else np.ravel(given)[0])}
    else:
        read = attrs.get("axes") if given is None else given.tolist()
        everything = () if attrs.get("noop_with_empty_axes") else range(x.ndim)
        axes = set(read if read is not None and len(read) else everything)
    axes = {axis % x.ndim for axis in axes}
    if made.ndim < x.ndim:
        made = np.expand_dims(made, tuple(sorted(axes)))
    mask = np.zeros(made.shape, bool)
    mask[tuple(slice(None) if axis in axes else index for axis, index in enumerate(at))] = True
    return mask


@pytest.mark.parametrize("type_", tried(lambda t: t.over))
def test_an_element_reaches_along_the_axes_that_are_declared(type_: str) -> None:
    reached = False
    for case in cases()[type_]:
        rng, x = np.random.default_rng(0), case.data()
        before = case.run()[0]
        for flat in rng.choice(x.size, min(5, x.size), replace=False):
            at = tuple(int(i) for i in np.unravel_index(flat, x.shape))
            changed = x.copy()
            changed[at] += 7
            hit = differs(before, case.run(0, changed)[0]).reshape(along(case, at, before).shape)
            assert not (hit & ~along(case, at, before)).any()
            reached |= bool(hit.any())
    assert reached


OF_TWOS: dict[str, Callable[[int], float]] = {
    "sum": lambda n: 2 * n,
    "mean": lambda n: 2,
    "max": lambda n: 2,
    "min": lambda n: 2,
    "squares": lambda n: 4 * n,
    "norm": lambda n: 2 * math.sqrt(n),
    "product": lambda n: 2**n,
}


@pytest.mark.parametrize("type_", tried(lambda t: t.over in ("axes", "spatial") and t.reduces in OF_TWOS))
def test_what_many_twos_make(type_: str) -> None:
    """The sum of n twos is 2 n, their mean 2, …; padding may take some away from the edges."""
    for case in cases()[type_]:
        made = case.run(0, np.full_like(case.data(), 2))[0]
        many = case.data().size // max(made.size, 1)
        if type_.startswith(("Max", "Average")):
            many = 1
        assert made.max(initial=-math.inf) == pytest.approx(OF_TWOS[traits_of(type_).reduces](many))


def extremes(case: Case, seed: int) -> Array:
    """Numbers of every size for the first input."""
    rng, x = np.random.default_rng(seed), case.data()
    sizes = rng.choice([0.0, 1e-6, 0.3, 1.0, 7.0, 1e4, 1e30], x.shape)
    sizes.flat[0] = 1e4
    with np.errstate(over="ignore"):  # of float16
        return np.asarray(sizes * rng.choice([-1.0, 1.0], x.shape), x.dtype)


def within(values: Array, low: float, high: float) -> bool:
    kept = values[np.isfinite(values)]
    slack = 1e-5 * (1 + max(abs(end) for end in (low, high, 0.0) if math.isfinite(end)))
    return bool(((low - slack <= kept) & (kept <= high + slack)).all())


def test_what_is_bounded_stays_in_its_interval() -> None:
    small = set()
    for type_, tests in cases().items():
        traits = traits_of(type_)
        if traits.bounded is None and not (traits.elementwise or traits.over):
            continue
        made = [case.run(0, extremes(case, seed))[0] for case in tests for seed in range(3) if 0 in case.floats()]
        if traits.bounded is not None:
            assert made and all(within(array, *traits.bounded) for array in made), type_
        elif made and made[0].dtype.kind == "f" and all(within(array, -4, 4) for array in made):
            small.add(type_)
    assert small <= UNBOUNDED.keys()
    assert len(declared(lambda t: t.bounded is not None)) >= 14


#: What stays small on these numbers and is not bounded.
UNBOUNDED = {
    "Atanh": "it takes none of them",
    "Clip": "at its bounds",
    "LpNormalization": "1 at most, but for p = 1 in the reference evaluator, which takes no absolute values",
    "Mod": "at its divisor",
    "Tan": "its poles are seldom met",
}


def of_one_large(case: Case, number: float) -> Array:
    x = case.data().copy()
    with np.errstate(over="ignore"):  # of float16
        x.flat[x.size // 2] = number
    return x


def carries(case: Case) -> bool:
    """Whether a number beyond float16 in the first input, among ordinary ones, makes one beyond it."""
    made = [case.run(0, of_one_large(case, sign * BEYOND))[0] for sign in (1, -1)]
    return any(array.dtype.kind == "f" and bool((np.abs(array) > LARGEST).any()) for array in made)


#: What carries large numbers in the node tests, and is not declared: what asks looks closer, or has words of its own.
LOOKED_AT = {
    "Div": "at the divisor",
    "Pow": "at the exponent",
    "BatchNormalization": "the variance that it divides by is that of such numbers",
    "LogSoftmax": "what lies so far below the largest is masked",
    "AffineGrid": "of angles and shifts",
    "CausalConvWithState": "a product",
    "DeformConv": "a product",
    "DFT": "a product",
    "STFT": "a product",
    "Det": "overflows by itself",
    "NegativeLogLikelihoodLoss": "losses stay fp32",
    "SoftmaxCrossEntropyLoss": "losses stay fp32",
    "OptionalGetElement": "what is inside moves",
    "Scan": "what is inside computes",
    "RotaryEmbedding": "decomposed",
    "SwiGLU": "decomposed",
}


def test_large_numbers_are_carried() -> None:
    found = {
        type_
        for type_, tests in cases().items()
        if all(0 in case.floats() for case in tests) and any(map(carries, tests))
    }
    large = set(declared(lambda t: t.carries_large))
    assert large <= found and len(large) >= 35
    rest = {t for t in found - large if traits_of(t).moves == () and not traits_of(t).product}
    assert rest == set(LOOKED_AT)


@pytest.mark.parametrize("type_", tried(lambda t: t.ignores))
def test_numbers_that_count_for_nothing(type_: str) -> None:
    """Far beyond the format or at its end, a masked place makes no difference to the others."""
    sign = -1 if traits_of(type_).ignores == "low" else 1
    for case in cases()[type_]:
        if case.data().size > 1:
            far, near = (
                np.clip(case.run(0, of_one_large(case, sign * s))[0], -LARGEST, LARGEST) for s in (1e30, LARGEST)
            )
            np.testing.assert_array_equal(far, near)


@pytest.mark.parametrize("type_", tried(lambda t: t.adds and not t.compares))
def test_what_adds_is_off_by_no_more_than_an_operand(type_: str) -> None:
    for case in cases()[type_]:
        before = case.run()[0].astype(np.float64)
        for slot in case.floats():
            array = case.inputs[slot]
            assert array is not None
            off = np.abs(case.run(slot, array + array.dtype.type(0.25))[0] - before)
            assert off.max(initial=0) <= 0.25 + 1e-5


def test_comparisons_make_truth_values_of_floats() -> None:
    found = {t for t in declared(lambda t: t.elementwise) if cases()[t][0].run()[0].dtype == bool}
    assert found == set(declared(lambda t: t.compares)) >= {"Greater", "IsNaN"}


def test_angles_come_round() -> None:
    found = set()
    for type_ in declared(lambda t: t.elementwise):
        case = cases()[type_][0]
        if case.floats() == [0] and case.run()[0].dtype.kind == "f":
            x = np.random.default_rng(0).uniform(0.1, 0.9, case.data().shape)
            one, other = (case.run(0, np.asarray(x + turn, case.data().dtype))[0] for turn in (0, 2 * math.pi))
            if np.allclose(one, other, atol=1e-4):
                found.add(type_)
    assert found - {"Ceil", "Sign"} == set(declared(lambda t: t.periodic)) == {"Sin", "Cos", "Tan"}


def test_shape_only_operators_read_no_elements() -> None:
    for type_ in declared(lambda t: t.shape_only):
        for case in cases()[type_]:
            np.testing.assert_array_equal(case.run()[0], case.run(0, case.data() * 3 + 1)[0])
    assert declared(lambda t: t.shape_only) == ["Shape", "Size"]


def bounds_of(case: Case, low: float, high: float) -> tuple[float, float] | None:
    """The interval of the first output for a first input in an interval; the others are constants."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    graph, kept = model.graph, case.inputs[1:]
    for name, array in zip(case.node.input[1:], kept, strict=True):
        if array is not None:
            graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    del graph.input[1:]
    program = Program.from_onnx(model)
    for parameter in program.parameters:
        parameter.persistable = parameter.trainable = False
    return Ranges(program, {case.node.input[0]: (low, high)}).bound(program.var(case.node.output[0]))


def ruled(type_: str) -> bool:
    found = _TABLE.get(("", type_))
    return found is not None and found.range_rule is not None


@pytest.mark.parametrize("type_", [t for t in STANDARD if ruled(t) and t not in UNTRIED])
def test_results_lie_in_the_interval_of_the_rule(type_: str) -> None:
    known = 0
    for case in cases()[type_]:
        x = case.data()
        for low, high in ((-3.0, 2.0), (0.5, 2.5), (-2.0, -0.25)):
            bound = bounds_of(case, low, high)
            if bound is None:
                continue
            known += 1
            for seed in range(4):
                rng = np.random.default_rng(seed)
                fed = rng.choice([low, high], x.shape) if seed == 0 else rng.uniform(low, high, x.shape)
                made = case.run(0, np.asarray(fed, x.dtype))[0]
                assert within(made, *bound), (bound, made)
    assert known, "the rule says nothing of any node test"
