"""Masks of dropout: one hash of a step serves all of them. Statistics beside numpy, and what stays.

A mask compares a word, which all masks of the step share, times a key of its own; a large one takes lines of decisions
that all of them share, in an order of its own. The same statistics reject masks that share a word carelessly:
neighbouring intervals of it, products with small keys, and lines in one order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.nn import functional as F
from amp_transpiler.ops.training import random as R
from amp_transpiler.ops.training.seeds import rng_state
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.building import building, run, startup_values
from tests.helpers.placement import needs_placement_tool, place
from tests.helpers.random_words import DRAWN, LARGE, MASKS, WIDE, Words
from tests.helpers.sessions import session

Array = np.ndarray[Any, Any]
Source = Callable[[int, int, float], Array]  # (step, stream, ratio): which of COUNT elements are dropped
COUNT = 1 << 18
STREAMS = [*range(12), 57, 1000, 2**31, R.stream_of("y")]


@pytest.fixture(autouse=True)
def _wrapping() -> Iterator[None]:
    with np.errstate(over="ignore"):
        yield


# -- what a program draws ---------------------------------------------------------------------------------
def drawn(program: amp.Program, scope: dict[str, Array], place: str, fetches: list[Any]) -> list[Array]:
    """Fetches of a program as a place would run it, run on CPU; CUDA's operators on fp32 and integers run there too."""
    lowered = lower(program, place, {}, fetches)
    inputs = {port.tensor: scope[port.variable] for port in lowered.states}
    inputs |= {name: np.zeros((), np.float32) for name in lowered.scalars}
    found: list[Array] = session(lowered.model).run([port.tensor for port in lowered.fetches], inputs)
    return found


def of_sizes(shapes: list[tuple[int, ...]]) -> tuple[amp.Program, dict[str, Array], list[Any]]:
    """A program with a dropout of each shape, one after the other; its state, and the results of Dropout."""
    with building() as (main, startup):
        results = []
        for number, shape in enumerate(shapes):
            x = amp.create_parameter(list(shape), "float32", f"x{number}", initializer=amp.nn.initializer.Constant(1.0))
            results.append(F.dropout(x, 0.25))
    return main, startup_values(startup), results


SIZES = [(3, 5), (70001,), (300, 301), (8, 8), (300, 301), (2, 45150), (1,), (5, 70001)]
SIZES += [(LARGE,), (2, LARGE + 5), (3, LARGE // 2 - 1), (LARGE - 1,)]


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("shapes", [SIZES, SIZES[::-1]], ids=["growing", "falling"])
def test_a_mask_depends_on_its_size_by_its_end_alone(place: str, shapes: list[tuple[int, ...]]) -> None:
    """Whatever was drawn before: longer, shorter, of the same size. Each mask equals numpy."""
    main, scope, results = of_sizes(shapes)
    scope["@rng_seed"], scope["@rng_step"] = np.array(2**32 - 1, np.uint32), np.array(41, np.uint32)
    masks = drawn(main, scope, place, [v.producer.outputs[1] for v in results])
    for shape, v, mask in zip(shapes, results, masks, strict=True):
        stream = int(v.producer.metadata[R.MASK_ID])
        wanted = Words.kept(math.prod(shape), 2**32 - 1, 41, stream, 0.25)
        np.testing.assert_array_equal(mask, wanted.reshape(shape))


def kernels(program: amp.Program, results: list[Any]) -> list[tuple[str, int]]:
    """Operators that compute, with the number of elements that they make, as CUDA runs them; scalars left out."""

    model = onnx.shape_inference.infer_shapes(lower(program, "cuda", {}, results).model, data_prop=True)
    sizes = {
        v.name: math.prod(d.dim_value for d in v.type.tensor_type.shape.dim)
        for v in (*model.graph.value_info, *model.graph.output)
    }
    nodes = [(node.op_type, sizes[node.output[0]]) for node in model.graph.node if node.op_type != "Reshape"]
    return [node for node in nodes if node[1] > 2]


def test_a_further_mask_costs_four_passes() -> None:
    """A product and a comparison, the product with the scale and the selection."""
    more = kernels(*[part for i, part in enumerate(of_sizes([(300, 301)] * 5)) if i != 1])
    less = kernels(*[part for i, part in enumerate(of_sizes([(300, 301)] * 4)) if i != 1])
    assert sorted(t for t, _ in more) == sorted([*(t for t, _ in less), "GreaterOrEqual", "Mul", "Mul", "Where"])


def test_a_further_large_mask_costs_three_passes() -> None:
    """Its lines are taken, the values scaled and selected; the lines are drawn for the first."""
    more, less = (kernels(*[v for i, v in enumerate(of_sizes([(LARGE,)] * n)) if i != 1]) for n in (3, 2))
    assert sorted(t for t, _ in more) == sorted([*(t for t, _ in less), "Gather", "Mul", "Where"])


def test_the_longest_mask_is_hashed_once() -> None:
    """Growing sizes hash the rest: no more words are made in all than the longest has, but for what joins them."""
    main, _, results = of_sizes([(100, 100), (200, 200), (50, 200)])
    made = [size for type_, size in kernels(main, results) if type_ == "Div"]
    assert sum(made) == 2 * 40000


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.7, 0.999])
@pytest.mark.parametrize("known", [True, False])
def test_the_ratio_is_exact(ratio: float, known: bool) -> None:
    """The threshold, which every word is as likely to be below as any other, is the ratio within 2**-24."""
    main = amp.Program()
    x = main.add_input("x", "float32", [300, 301])
    rate = main.add_constant("rate", np.array(ratio, np.float32)) if known else main.add_input("rate", "float32", [])
    rng_state(main)
    y, mask = main.add_variable("y", "float32", (300, 301)), main.add_variable("mask", "bool", (300, 301))
    main.add_operator("Dropout", [x, rate, main.add_constant("training", np.array(True))], [y, mask])
    assert main.startup is not None
    data = np.linspace(-3, 3, 300 * 301, dtype=np.float32).reshape(300, 301)
    feeds = {"x": data} if known else {"x": data, "rate": np.array(ratio, np.float32)}
    found, kept = run(main, startup_values(main.startup), feeds, [y, mask])
    products = Words.products(300 * 301, 0, 0, R.stream_of("y")).reshape(300, 301)
    threshold = int(products[kept].min())
    if ratio:
        assert products[~kept].max() < threshold
        assert (products[~kept].max() >> np.uint32(8)) / 2**24 <= ratio <= (threshold >> 8) / 2**24 + 2**-24
    np.testing.assert_array_equal(kept.ravel(), Words.kept(300 * 301, 0, 0, R.stream_of("y"), ratio))
    np.testing.assert_allclose(found, np.where(kept, data / (1 - np.float64(np.float32(ratio))), 0), rtol=3e-7)


# -- values -------------------------------------------------------------------------------------------------
def dropped(dtype: str, values: Array, p: float) -> tuple[Array, Array, Array]:
    """y, dx and the mask of a dropout of ``values`` whose result is multiplied with ``values`` again."""
    with building() as (main, startup):
        x = amp.create_parameter(list(values.shape), dtype, "x", initializer=values)
        other = main.add_constant("other", values.astype(numpy_dtype(dtype)))
        y = F.dropout(x, p)
        ((_, grad),) = amp.append_backward(F.sum(F.cast(y * other, "float32")))
    y_, dx, kept = run(main, startup_values(startup), {}, [y, grad, y.producer.outputs[1]])
    return y_, dx, kept


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_dropped_is_zero_whatever_it_was(dtype: str) -> None:
    """Infinite and NaN values that are dropped are 0, no NaN; so is -0.0; in both directions."""
    row = np.array([np.inf, -np.inf, np.nan, -0.0, -1.0, 65504.0, 6e-8, -6e-8], np.float32)
    values = np.tile(row, (64, 1))
    y, dx, kept = dropped(dtype, values, 0.5)
    assert 0.3 < kept.mean() < 0.7
    for found in (y, dx):
        wide = found.astype(np.float64)[~kept]
        assert (wide == 0).all() and not np.signbit(wide).any()
    with np.errstate(over="ignore"):
        wanted = (values.astype(numpy_dtype(dtype)).astype(np.float32) * 2).astype(numpy_dtype(dtype))
    np.testing.assert_array_equal(y[kept].astype(np.float32), wanted[kept].astype(np.float32))


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_accuracy_of_16_bit(dtype: str, p: float) -> None:
    """Median error against float64 at most twice that of fp32 arithmetic rounded once, as torch has it."""
    stored = np.random.default_rng(3).standard_normal((256, 256)).astype(numpy_dtype(dtype))
    y, dx, kept = dropped(dtype, stored.astype(np.float32), p)
    exact = stored[kept].astype(np.float64) / (1 - p)
    once = exact.astype(np.float32).astype(stored.dtype).astype(np.float64)
    best = np.median(np.abs(once / exact - 1))
    for found in (y, dx):
        assert np.median(np.abs(found[kept].astype(np.float64) / exact - 1)) <= 2 * best + 1e-9


@needs_placement_tool
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [48, LARGE // 32], ids=["words", "lines"])
def test_masks_are_made_on_cuda(width: int, dtype: str, tmp_path: Any) -> None:
    with building() as (main, _):
        x = amp.create_parameter([64, width], dtype, "x", initializer=amp.nn.initializer.Uniform(0.5, 1.5))
        y = F.dropout(F.dropout(x[:32], 0.1) * F.dropout(x[32:], 0.1), 0.3)
        ((_, grad),) = amp.append_backward(F.sum(F.cast(y, "float32")))
    done = place(main.lower(amp.CUDAPlace(0), None, [grad]).model, tmp_path / "masks.onnx")
    assert done.status == 0, done.said


# -- statistics -----------------------------------------------------------------------------------------------
def ours(step: int, stream: int, ratio: float) -> Array:
    return ~Words.kept(COUNT, 3, step, stream, ratio)


def of_lines(step: int, stream: int, ratio: float) -> Array:
    return ~Words.kept(LARGE, 3, step, stream, ratio)[:COUNT]


def numpys(step: int, stream: int, ratio: float) -> Array:
    dropped: Array = np.random.default_rng([step, stream]).random(COUNT, np.float32) < ratio
    return dropped


def intervals(step: int, stream: int, ratio: float) -> Array:
    """What must fail: each mask is an interval of the shared word."""
    return Words.bits(COUNT, 3, step, MASKS) + np.uint32(stream * 0x10000001 % 2**32) < np.uint32(ratio * 2**32)


def small_keys(step: int, stream: int, ratio: float) -> Array:
    """What must fail: keys 1, 3, 5, …"""
    product = Words.bits(COUNT, 3, step, MASKS) * np.uint32((2 * stream + 1) % 2**32)
    return product < np.uint32(ratio * 2**32)


def one_order(step: int, stream: int, ratio: float) -> Array:
    """What must fail: the same lines, each mask some lines further on."""
    return np.roll(of_lines(step, 0, ratio), 4096 * (stream % 2))


def normal(source: Source, step: int, ratio: float, streams: list[int] = STREAMS) -> Array:
    """Masks as rows of mean 0 and variance 1."""
    masks = np.array([source(step, stream, ratio) for stream in streams], np.float32)
    return (masks - np.float32(ratio)) / np.float32(math.sqrt(ratio * (1 - ratio)))


def worst_pair(source: Source, ratio: float) -> float:
    """The largest correlation of two masks of a step at the same element and at some lags, in deviations."""
    rows, found = normal(source, 5, ratio), []
    for lag in (0, 1, 64, 768, 4096):
        products = rows[:, lag:] @ rows[:, : COUNT - lag].T / math.sqrt(COUNT - lag)
        found.append(np.abs(products[np.triu_indices(len(rows), 1)]).max())
    return float(max(found))


def worst_triple(source: Source, ratio: float) -> float:
    """The same of three masks: masks that are independent in pairs alone would show."""
    rows = normal(source, 5, ratio, STREAMS[:12])
    found = [np.abs((rows[i] * rows[j]) @ rows[j + 1 :].T).max() for i, j in combinations(range(len(rows) - 1), 2)]
    return float(max(found) / math.sqrt(COUNT))


def worst_within(source: Source, ratio: float) -> float:
    """Mean, runs, sums of rows and of columns of each mask, in deviations."""
    found = []
    for stream in STREAMS:
        z = normal(source, 5, ratio, [stream])[0].astype(np.float64)
        mask = z > 0
        ones, changes = int(mask.sum()), int((mask[1:] != mask[:-1]).sum())
        expected = 2 * ones * (COUNT - ones) / COUNT
        found += [z.sum() / math.sqrt(COUNT), (changes - expected) / math.sqrt(expected * (expected - 1) / (COUNT - 1))]
        for columns in (64, 256, 1024, 768):
            table = z[: COUNT // columns * columns].reshape(-1, columns)
            for axis in (0, 1):
                squares = table.sum(axis) ** 2 / table.shape[axis]
                found.append((squares.sum() - squares.size) / math.sqrt(2 * squares.size))
    return float(np.abs(found).max())


def worst_between_steps(source: Source, ratio: float) -> float:
    """Correlation of one stream at neighbouring steps, and of different streams."""
    rows = np.concatenate([normal(source, step, ratio, STREAMS[:4]) for step in (0, 1, 2, 3, 1000)])
    products = rows @ rows.T / math.sqrt(COUNT)
    return float(np.abs(products[np.triu_indices(len(rows), 1)]).max())


#: The largest of a few hundred normal deviates is below 4.5.
STATISTICS = {
    "pairs": worst_pair,
    "triples": worst_triple,
    "within a mask": worst_within,
    "between steps": worst_between_steps,
}


@pytest.mark.parametrize("ratio", [0.1, 0.5])
@pytest.mark.parametrize("source", [ours, of_lines, numpys])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_statistics(statistic: str, source: Source, ratio: float) -> None:
    assert STATISTICS[statistic](source, ratio) < 4.7


@pytest.mark.parametrize("source", [intervals, small_keys, one_order])
def test_the_statistics_reject_what_shares_words_carelessly(source: Source) -> None:
    assert worst_pair(source, 0.1) > 20


def test_large_masks_share_few_lines() -> None:
    """At the same place, and some places on: about one line of 4096 of two masks, as independent orders would have it.

    In one mask a line comes again, where it is longer than what was drawn, but neither often nor near."""
    orders = np.array([Words.order(stream) for stream in range(37)])
    for lag in (0, 1, 3, 64, 768):
        same = [int((a == np.roll(b, lag)).sum()) for a, b in combinations(orders, 2)]
        assert max(same) < 9 and 0.8 < np.mean(same) < 1.2
    for stream in STREAMS[:3]:
        mask = Words.kept(3 * DRAWN * WIDE, 3, 5, stream, 0.5).reshape(3, DRAWN, WIDE)
        for a, b in combinations(mask, 2):
            assert (a == b).all(1).sum() < 9


def test_two_masks_fill_the_plane() -> None:
    """The products of one word with two keys: counts of a 64 x 64 grid are those of independent numbers."""

    def worst(keys: list[int]) -> float:
        words = Words.bits(COUNT, 3, 5, MASKS)
        tops = [words * np.uint32(key % 2**32) >> np.uint32(26) for key in keys]
        found = []
        for a, b in combinations(tops, 2):
            counts = np.bincount((a << np.uint32(6)) + b, minlength=4096)
            found.append((((counts - COUNT / 4096) ** 2).sum() * 4096 / COUNT - 4095) / math.sqrt(2 * 4095))
        return float(max(found))

    assert worst([Words.keys(3, 5, stream)[1] for stream in STREAMS]) < 4.7
    assert worst([1, 3]) > 1000


def shortest(one: int, other: int) -> float:
    """Length of the shortest (h, k) with h * one + k * other = 0 modulo 2**32: the spectral test in two dimensions.

    Such a pair is a correlation of about 1 / (10 h k) of the two masks; Gauss's reduction finds the shortest.
    """
    factor = other * pow(one, -1, 2**32) % 2**32
    u, v = (2**32, 0), (-factor, 1)
    while True:
        if math.hypot(*u) < math.hypot(*v):
            u, v = v, u
        times = round((u[0] * v[0] + u[1] * v[1]) / (v[0] ** 2 + v[1] ** 2))
        if not times:
            return math.hypot(*v)
        u = (u[0] - times * v[0], u[1] - times * v[1])


def test_spectral_test_of_pairs() -> None:
    """All pairs of 37 masks (BERT base) at 10 steps; independent random keys would give about 600."""
    found = [
        shortest(a, b)
        for step in range(10)
        for a, b in combinations([Words.keys(0, step, stream)[1] % 2**32 for stream in range(100, 137)], 2)
    ]
    assert min(found) > 100
    assert shortest(1, 3) == math.hypot(3, 1)
