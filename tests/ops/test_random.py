"""Counter-based random numbers against numpy, statistics, masks of dropout and initial values.

``Words`` is the module's text in numpy. The statistics have a negative control: the same tests reject a hash made
of sums, shifts and constant factors alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from amp_transpiler import nn
from amp_transpiler.ir import unique_name
from amp_transpiler.ir.context import name_scope
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.infer import type_proto
from amp_transpiler.nn import functional as F, initializer as I
from amp_transpiler.ops.training import hashed_words as R
from amp_transpiler.ops.training.random import MASK_ID
from amp_transpiler.ops.training.seeds import rng_state
from amp_transpiler.passes.autodiff.backward import append_backward
from amp_transpiler.program import Program, program_guard
from tests.helpers.building import run, startup_values
from tests.helpers.random_words import WEYL, Words
from tests.tools.gpu_device import device_missing, driver_missing

Array = np.ndarray[Any, Any]


def linear_bits(count: int, seed: int, step: int, stream: int) -> Array:
    """What must fail: no product of the word with itself."""
    k1, k2 = Words.keys(seed, step, stream)
    x = ((np.arange(count, dtype=np.uint64) * WEYL + k1 % 2**32) % 2**32).astype(np.uint32)
    x = (x + (x >> np.uint32(16))) * np.uint32(k2 % 2**32)
    return (x + (x >> np.uint32(15))) * np.uint32(0x846CA68B)


@pytest.fixture(autouse=True)
def _wrapping() -> Iterator[None]:
    with np.errstate(over="ignore"):
        yield


def emitted(
    place: str,
    body: Callable[[Emitter, Value, Value], Value],
    options: ort.SessionOptions | None = None,
    providers: tuple[str, ...] = ("CPUExecutionProvider",),
) -> ort.InferenceSession:
    """A session whose inputs are the seed and the step."""
    e = Emitter(place)
    e.reserve(["seed", "step"])
    result = body(e, Value("seed", "uint32", ()), Value("step", "uint32", ()))
    infos = []
    for name, dtype, shape in (
        ("seed", "uint32", ()),
        ("step", "uint32", ()),
        (result.name, result.dtype, result.shape),
    ):
        infos.append(onnx.ValueInfoProto(name=name, type=type_proto(dtype, shape)))
    graph = onnx.helper.make_graph(e.nodes, "random", infos[:2], infos[2:], list(e.initializers.values()))
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 21)])
    if options is None:
        options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=list(providers))


def draw(session: ort.InferenceSession, seed: int, step: int) -> Array:
    found: Array = session.run(None, {"seed": np.array(seed, np.uint32), "step": np.array(step, np.uint32)})[0]
    return found


# -- the words ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (1, 1, 300), (70001,), (70001, 3), (5, 70001)])
def test_bits_equal_numpy(place: str, shape: tuple[int, ...]) -> None:
    """Whatever the shape and however it is cut into lines, element i is a function of (seed, step, stream, i)."""
    session = emitted(place, lambda e, seed, step: R.random_bits(e, shape, seed, step, 77))
    for seed, step in ((0, 0), (1, 0), (2**32 - 1, 2**32 - 1), (123456789, 41)):
        found = draw(session, seed, step)
        assert found.shape == shape and found.dtype == np.uint32
        np.testing.assert_array_equal(found.ravel(), Words.bits(math.prod(shape), seed, step, 77))


def test_runs_repeat() -> None:
    first, second = (emitted("cpu", lambda e, s, t: R.uniform(e, (64, 33), s, t, 5)) for _ in range(2))
    np.testing.assert_array_equal(draw(first, 3, 9), draw(first, 3, 9))
    np.testing.assert_array_equal(draw(first, 3, 9), draw(second, 3, 9))
    assert (draw(first, 3, 9) != draw(first, 3, 10)).mean() > 0.999


def test_uniform_equals_numpy() -> None:
    found = draw(emitted("cpu", lambda e, s, t: R.uniform(e, (64, 33), s, t, 5)), 3, 9).ravel()
    np.testing.assert_array_equal(found, (Words.bits(64 * 33, 3, 9, 5) >> np.uint32(8)).astype(np.float32) / 2**24)
    assert found.min() >= 0 and found.max() < 1


def test_normal() -> None:
    """Mean, deviation and the Kolmogorov-Smirnov distance to the normal distribution, and numpy's Box-Muller."""
    shape = (256, 512)
    z = draw(emitted("cpu", lambda e, s, t: R.normal(e, shape, s, t, 5)), 3, 9).ravel().astype(np.float64)
    count = z.size
    radius = ((Words.bits(count, 3, 9, 5) >> np.uint32(8)) + 1.0) / 2**24
    angle = (Words.bits(count, 3, 9, R.mix(6)) >> np.uint32(8)) / 2**24
    np.testing.assert_allclose(z, np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle), atol=1e-5)
    assert abs(z.mean()) < 4 / math.sqrt(count) and abs(z.std() - 1) < 4 / math.sqrt(2 * count)
    ordered = np.sort(z)
    normal = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in ordered[:: count // 1000]])
    assert np.abs(normal - np.arange(count)[:: count // 1000] / count).max() < 2 / math.sqrt(count)


def test_nothing_large_is_folded(tmp_path: Any) -> None:
    """The runtime keeps no constant of the mask's size."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    emitted("cpu", lambda e, s, t: R.uniform(e, (512, 1024), s, t, 5), options)
    kept = onnx.load(options.optimized_model_filepath)
    assert max(math.prod(t.dims) for t in kept.graph.initializer) <= 1024


@pytest.mark.gpu
def test_cuda_gives_the_same_bits() -> None:
    missing = driver_missing() or device_missing()
    if missing:
        pytest.skip(missing)
    providers = ("CUDAExecutionProvider",)
    session = emitted("cuda", lambda e, s, t: R.random_bits(e, (97, 1031), s, t, 77), providers=providers)
    np.testing.assert_array_equal(draw(session, 3, 9).ravel(), Words.bits(97 * 1031, 3, 9, 77))


# -- statistics -----------------------------------------------------------------------------------------
Bits = Callable[[int, int, int, int], Array]
COUNT = 1 << 19
KEYS = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (7, 1000, 3), (2**32 - 1, 5, 2**31)]


def chi_square(values: Array, bins: int) -> float:
    """The chi-square statistic of counts that should be equal, in deviations of its distribution."""
    counts = np.bincount(values.astype(np.int64), minlength=bins)
    expected = values.size / bins
    return float((((counts - expected) ** 2 / expected).sum() - (bins - 1)) / math.sqrt(2 * (bins - 1)))


def worst_uniformity(bits: Bits) -> float:
    """Upper and middle bits, and pairs of neighbours."""
    found = []
    for key in KEYS:
        x = bits(COUNT, *key)
        found += [chi_square(x >> np.uint32(20), 4096), chi_square(x >> np.uint32(8) & np.uint32(4095), 4096)]
        found += [
            chi_square((x[:-lag] >> np.uint32(26) << np.uint32(6)) + (x[lag:] >> np.uint32(26)), 4096)
            for lag in (1, 2, 28, 64, 1024, 4096)
        ]
    return max(found)


def worst_difference(bits: Bits) -> float:
    """First and second differences of elements some lag apart: a lattice has few of them."""
    found = []
    for key in KEYS:
        x = bits(COUNT, *key)
        for lag in (1, 2, 64, 1000, 4096):
            first = x[lag:] - x[:-lag]
            found += [
                chi_square(first >> np.uint32(20), 4096),
                chi_square((first[lag:] - first[:-lag]) >> np.uint32(20), 4096),
            ]
    return max(found)


def correlation(a: Array, b: Array) -> float:
    """Correlation of two rows of words as numbers, in deviations of that of independent ones."""
    u, v = a / 2.0**32 - 0.5, b / 2.0**32 - 0.5
    return abs(float((u * v).sum() * 12 / math.sqrt(u.size)))


def worst_correlation(bits: Bits) -> float:
    """Neighbours in each of the numbers that are hashed: element, stream, step, seed."""
    count, found = 1 << 16, []
    for key in KEYS:
        x = bits(count, *key)
        found += [correlation(x[lag:], x[:-lag]) for lag in (1, 2, 3, 8, 64, 256, 1024)]
        for i in range(3):
            for change in (1, 2, 16):
                other = list(key)
                other[i] = (other[i] + change) % 2**32
                y = bits(count, *other)
                found += [correlation(x, y), correlation(x[1:], y[:-1])]
    return max(found)


def test_uniform() -> None:
    assert worst_uniformity(Words.bits) < 4.5


def test_no_lattice() -> None:
    assert worst_difference(Words.bits) < 4.5


def test_no_correlation() -> None:
    """About 125 correlations: the largest of so many normal deviates is below 4.5."""
    assert worst_correlation(Words.bits) < 4.5


def test_the_statistics_reject_a_linear_hash() -> None:
    assert worst_uniformity(linear_bits) > 100
    assert worst_difference(linear_bits) > 1000
    assert worst_correlation(linear_bits) > 10


# -- dropout in a program -------------------------------------------------------------------------------
def dropout_program(p: float = 0.3, dtype: str = "float32") -> tuple[Program, Program, Any, Any]:
    main, startup = Program(), Program("startup")
    with program_guard(main, startup), unique_name.guard(), name_scope("net"):
        x = nn.create_parameter([40, 50], dtype, "x", initializer=I.Uniform(0.5, 1.5))
        first, second = nn.dropout(x, p), F.dropout(x, p)
    return main, startup, first, second


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dropout_forward_and_backward(dtype: str) -> None:
    main, startup, y, _ = dropout_program(0.3, dtype)
    with program_guard(main, startup):
        loss = F.sum(y * y)
        ((_, grad),) = append_backward(loss)
    scope = startup_values(startup)
    mask = y.producer.outputs[1]
    x, found, kept, dx = run(main, scope, {}, [main.var("x"), y, mask, grad])
    wide = x.astype(np.float64)
    tolerance = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    assert kept.dtype == bool and found.dtype == x.dtype
    np.testing.assert_allclose(found.astype(np.float64), np.where(kept, wide / 0.7, 0), rtol=tolerance)
    np.testing.assert_allclose(dx.astype(np.float64), np.where(kept, 2 * wide / 0.49, 0), rtol=2 * tolerance)
    assert abs(kept.mean() - 0.7) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_dropout_of_everything(dtype: str) -> None:
    """Zeros, whose gradients are zeros, also where a value overflowed; an evaluation passes all through."""
    main, startup, y, _ = dropout_program(1.0, dtype)
    with program_guard(main, startup):
        ((_, grad),) = append_backward(F.sum(y * y + main.var("x")))
    scope = startup_values(startup)
    scope["x"] = scope["x"].copy()
    scope["x"].flat[7] = np.inf
    found, dx, kept = run(main, scope, {}, [y, grad, y.producer.outputs[1]])
    assert not found.any() and not kept.any() and (dx == 1).all()
    test = main.clone(for_test=True)
    np.testing.assert_array_equal(run(test, scope, {}, [test.var(y.name)])[0], scope["x"])


def test_dropout_mask_follows_seed_step_and_operator() -> None:
    main, startup, first, second = dropout_program()
    masks = [v.producer.outputs[1] for v in (first, second)]
    ids = [int(v.producer.metadata[MASK_ID]) for v in (first, second)]
    assert ids[0] != ids[1]
    scope = startup_values(startup)
    for step in range(3):
        assert scope["@rng_step"] == step
        before = dict(scope)
        found = run(main, scope, {}, masks)
        for mask, stream in zip(found, ids, strict=True):
            np.testing.assert_array_equal(mask.ravel(), Words.kept(2000, 0, step, stream, 0.3))
        again = run(main, before, {}, masks)
        np.testing.assert_array_equal(found, again)
    startup.seed = 5
    scope = startup_values(startup)
    assert (run(main, scope, {}, masks)[0] != found[0]).mean() > 0.3


def test_masks_of_what_data_choose_are_those_of_as_many_elements() -> None:
    """Beside one of a fixed size, whose words they must not take for theirs."""
    main, startup = Program(), Program()
    with program_guard(main, startup), unique_name.guard():
        x, keep = nn.data("x", [9, 2, 3]), nn.data("keep", [9], "bool")
        w = nn.create_parameter([3], "float32", name="w", initializer=np.ones(3))
        parts = [F.dropout(v * w, 0.3) for v in (x, x[keep], x[keep, 1:])]
        append_backward(F.sum(F.concat([F.reshape(part, [-1]) for part in parts])))
    masks = [part.producer.outputs[1] for part in parts]
    scope = startup_values(startup)
    for step, count in enumerate((4, 9, 0, 1)):
        feeds = {"x": np.ones((9, 2, 3), np.float32), "keep": np.arange(9) % 9 < count}
        for mask, part in zip(run(main, scope, feeds, masks), parts, strict=True):
            stream = int(part.producer.metadata[MASK_ID])
            np.testing.assert_array_equal(mask.ravel(), Words.kept(mask.size, 0, step, stream, 0.3))


def test_rng_state_is_made_once_and_always_advances() -> None:
    main, startup, *_ = dropout_program()
    assert [op.type for op in startup.operators].count("SeedInitializer") == 1
    (advance,) = [op for op in main.operators if op.type == "Add"]
    assert main.updates[main.var("@rng_step")] is advance.outputs[0]
    assert advance.role == "forward" and not advance.guard and advance.scope == ""
    assert not main.var("@rng_seed").trainable


def test_dropout_for_test() -> None:
    from amp_transpiler.ir.clone import clone

    main, startup, y, _ = dropout_program()
    test = clone(main, for_test=True)
    op = test.var(y.name).producer
    assert op is not None and len(op.inputs) == 2 and len(op.outputs) == 1 and MASK_ID not in op.metadata
    assert not test.has_var("@rng_step") and not test.updates
    scope = startup_values(startup)
    (found,) = run(test, scope, {}, [test.var(y.name)])
    np.testing.assert_array_equal(found, scope["x"])


def test_imported_dropout_without_a_number() -> None:
    """Its stream comes from its output's name; a ratio that is left out is 0.5."""
    main = Program()
    x = main.add_input("x", "float32", [64, 64])
    rng_state(main)
    y = main.add_variable("y")
    main.add_operator("Dropout", [x, None, main.add_constant("training", np.array(True))], [y])
    y.dtype, y.shape = "float32", (64, 64)
    assert main.startup is not None
    (found,) = run(main, startup_values(main.startup), {"x": np.ones((64, 64), np.float32)}, [y])
    expected = Words.kept(4096, 0, 0, R.stream_of("y"), 0.5)
    np.testing.assert_array_equal(found.ravel(), np.where(expected, np.float32(2), np.float32(0)))
