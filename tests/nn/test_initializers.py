"""Initial values: what a startup program writes, against numpy, and what it depends on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import amp_transpiler as amp
from amp_transpiler import nn
from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir import unique_name
from amp_transpiler.ir.emitter import Emitter
from amp_transpiler.ir.types import ONNX_TYPES, numpy_dtype
from amp_transpiler.nn import initializer as I
from amp_transpiler.ops.training import initializers, random as R
from amp_transpiler.ops.training.chunks import by_chunks
from amp_transpiler.ops.training.initializers import constant_initializer
from amp_transpiler.program import Program, program_guard
from tests.helpers.building import startup_values
from tests.helpers.random_words import Words

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _wrapping() -> Iterator[None]:
    with np.errstate(over="ignore"):
        yield


def initial(build: Callable[[], None], seed: int = 0) -> dict[str, Array]:
    main, startup = Program(), Program("startup")
    startup.seed = seed
    with program_guard(main, startup), unique_name.guard():
        build()
    return startup_values(startup)


def test_uniform_initializer_is_the_words_of_its_name() -> None:
    found = initial(lambda: nn.create_parameter([30, 70], "float32", "w", I.Uniform(-2, 3)) is None, seed=11)["w"]
    u = (Words.bits(2100, 11, 2**32 - 1, R.stream_of("w")) >> np.uint32(8)).astype(np.float32) / np.float32(2**24)
    np.testing.assert_array_equal(found.ravel(), u * np.float32(5) + np.float32(-2))


def test_truncated_normal_is_the_inverse_of_its_distribution() -> None:
    found = initial(lambda: nn.create_parameter([50, 40], "float32", "w", I.TruncatedNormal(1.0, 0.5)) is None, seed=3)[
        "w"
    ]
    u = (Words.bits(2000, 3, 2**32 - 1, R.stream_of("w")) >> np.uint32(8)).astype(np.float64) / 2**24
    law = NormalDist()
    low, high = law.cdf(-2), law.cdf(2)
    expected = 1 + 0.5 * np.array([law.inv_cdf(low + (high - low) * float(v)) for v in u])
    np.testing.assert_allclose(found.ravel(), expected, rtol=2e-5, atol=2e-6)
    assert 0 <= found.min() < 0.05 and 1.95 < found.max() <= 2


@pytest.mark.parametrize("shape", [(40, 13), (521,)], ids=["of whole chunks", "with a rest"])
@pytest.mark.parametrize(
    "kind", [I.Uniform(-2, 3), I.Normal(1, 2), I.TruncatedNormal(1, 0.5)], ids=["uniform", "normal", "truncated"]
)
def test_large_variables_are_drawn_a_chunk_at_a_time(
    kind: I.Initializer, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> None:
        nn.create_parameter(list(shape), "float32", "w", kind)

    whole = initial(build, seed=7)["w"]
    monkeypatch.setattr(initializers, "_LARGE", 512)
    monkeypatch.setattr(initializers, "_CHUNK", 64)
    found, scans = initial(build, seed=7)["w"], []
    monkeypatch.setattr(initializers, "by_chunks", lambda *a: scans.append(a) or by_chunks(*a))
    again = initial(build, seed=7)["w"]
    assert len(scans) == 1 and again.tobytes() == found.tobytes()
    if isinstance(kind, I.Uniform):
        assert found.tobytes() == whole.tobytes()
    np.testing.assert_allclose(found, whole, rtol=1e-6, atol=1e-6)  # kernels treat the last few of a tensor apart


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (I.Constant(3.0), I.ConstantInitializer(value=3.0, force_cpu=False)),
        (I.Uniform(-2, 2), I.UniformInitializer(low=-2, high=2, seed=0)),
        (I.Normal(1, 2), I.NormalInitializer(loc=1, scale=2, seed=0)),
        (I.TruncatedNormal(0, 0.02), I.TruncatedNormalInitializer(loc=0, scale=0.02)),
        (I.Xavier(False, 3), I.XavierInitializer(uniform=False, fan_in=3, fan_out=None, seed=0)),
        (I.Kaiming(False), I.MSRAInitializer(uniform=False, fan_in=None, seed=0)),
        (I.KaimingNormal(), I.KaimingNormal(fan_in=None, negative_slope=0.0, nonlinearity="relu")),
        (I.Assign(np.ones(3)), I.NumpyArrayInitializer(value=np.ones(3))),
    ],
)
def test_paddles_names_of_initialisers(ours: I.Initializer, theirs: I.Initializer) -> None:
    assert type(ours) is type(theirs)
    if not isinstance(ours, I.Assign):
        assert ours.operator((3, 3), "float32") == theirs.operator((3, 3), "float32")


def test_what_an_initialiser_does_not_take_says_why() -> None:
    with pytest.raises(ArgumentError, match="KaimingNormal: negative_slope=0.1 .* slope="):
        I.KaimingNormal(negative_slope=0.1)
    with pytest.raises(ArgumentError, match="Normal: seed=3 .* amp.seed"):
        I.Normal(seed=3)
    with pytest.raises(AttributeError, match="'Orthogonal': give the array"):
        I.Orthogonal  # noqa: B018


def test_initial_values_do_not_depend_on_other_parameters() -> None:
    def alone() -> None:
        nn.create_parameter([30, 70], "float32", "w", I.Normal(1, 2))

    def among_others() -> None:
        nn.create_parameter([3], "float32", "a", I.Normal())
        nn.create_parameter([30, 70], "float32", "b", I.Normal(1, 2))
        alone()

    one, other = initial(alone), initial(among_others)
    np.testing.assert_array_equal(one["w"], other["w"])
    assert not (other["w"] == other["b"]).any()
    assert not (initial(alone, seed=1)["w"] == one["w"]).any()
    assert abs(one["w"].mean() - 1) < 0.2 and abs(one["w"].std() - 2) < 0.15


@pytest.mark.parametrize(
    ("initializer", "deviation", "uniform"),
    [
        (I.XavierUniform(), math.sqrt(2 / 300), True),
        (I.XavierNormal(), math.sqrt(2 / 300), False),
        (I.Xavier(uniform=False, fan_in=50, fan_out=150), math.sqrt(2 / 200), False),
        (I.KaimingUniform(), math.sqrt(2 / 100), True),
        (I.KaimingNormal(), math.sqrt(2 / 100), False),
        (I.Kaiming(uniform=False, slope=1.0), math.sqrt(1 / 100), False),
        (I.KaimingUniform(slope=2.0), math.sqrt(2 / 5 / 100), True),
        (I.KaimingNormal(slope=2.0, fan_in=50), math.sqrt(2 / 5 / 50), False),
    ],
)
def test_scaled_initializers(initializer: I.Initializer, deviation: float, uniform: bool) -> None:
    found = initial(lambda: nn.create_parameter([100, 200], "float32", "w", initializer) is None)["w"]
    assert abs(found.std() / deviation - 1) < 0.03 and abs(found.mean()) < 5 * deviation / math.sqrt(found.size)
    limit = math.sqrt(3) * deviation
    assert (np.abs(found).max() <= limit * 1.0001) == uniform


def test_filter_fans() -> None:
    """[out, in / groups, height, width]: fan in is in / groups * height * width."""
    found = initial(lambda: nn.create_parameter([64, 8, 3, 3], "float32", "w", I.KaimingNormal()) is None)["w"]
    assert abs(found.std() / math.sqrt(2 / 72) - 1) < 0.03


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint32", "bool"])
def test_constant_and_array(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(numpy_dtype(dtype))

    def build() -> None:
        nn.create_parameter([2, 3], dtype, "c", I.Constant(1))
        nn.create_parameter([], dtype, "s", I.Constant(1))
        nn.create_parameter([2, 3], dtype, "z", I.Constant())
        nn.create_parameter([2, 3], dtype, "a", array)
        nn.create_parameter([2, 3], dtype, "t", onnx.numpy_helper.from_array(array))

    found = initial(build)
    assert all(value.dtype == numpy_dtype(dtype) for name, value in found.items() if len(name) == 1)
    np.testing.assert_array_equal(found["c"], np.ones((2, 3), numpy_dtype(dtype)))
    np.testing.assert_array_equal(found["s"], np.ones((), numpy_dtype(dtype)))
    np.testing.assert_array_equal(found["z"], np.zeros((2, 3), numpy_dtype(dtype)))
    np.testing.assert_array_equal(found["a"], array)
    np.testing.assert_array_equal(found["t"], array)


def test_default_seed() -> None:
    def build() -> None:
        nn.create_parameter([30, 70], "float32", "w", I.Normal())

    try:
        I.set_seed(9)
        np.testing.assert_array_equal(initial(build)["w"], initial(build, seed=9)["w"])
        assert initial(build, seed=4)["w"][0, 0] != initial(build)["w"][0, 0]
    finally:
        I.set_seed(0)
    for wrong in (-1, 2**32):
        with pytest.raises(ValueError, match="seed is .*; expected a whole number, 0 to 4294967295"):
            I.set_seed(wrong)
    with pytest.raises(TypeError, match="expected a whole number$"):
        I.set_seed("3")


def test_constants_need_no_session_and_are_what_one_gives() -> None:
    values = [
        ("float32", -0.0),
        ("float32", 0.1),
        ("float16", math.inf),
        ("bfloat16", 0.1),
        ("float64", 0.1),
        ("int64", -3),
    ]
    values += [("int32", 7), ("bool", 1), ("float16", 1e-7), ("float32", math.nan)]
    main, startup = Program(), Program("startup")
    with program_guard(main, startup), unique_name.guard():
        for number, (dtype, value) in enumerate(values):
            nn.create_parameter([3, 2] if number % 2 else [], dtype, f"p{number}", I.Constant(value))
    scope = amp.Scope()
    amp.Executor().run(startup, scope=scope)
    names = [f"p{number}" for number in range(len(values))]
    emitter = Emitter()
    made = [constant_initializer(emitter, startup.var(name).producer)[0] for name in names]  # type: ignore[arg-type]
    outputs = [onnx.helper.make_tensor_value_info(v.name, ONNX_TYPES[v.dtype], v.shape) for v in made]
    graph = onnx.helper.make_graph(emitter.nodes, "g", [], outputs, list(emitter.initializers.values()))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", emitter.opset)])
    for name, expected in zip(names, ReferenceEvaluator(model).run(None, {}), strict=True):
        found = scope.find_var(name)
        assert found.astype(expected.dtype).tobytes() == expected.tobytes(), name
    assert {op.type for op in startup.operators} == {"ConstantInitializer"}


REFUSED: list[tuple[str, Callable[[], I.Initializer], str]] = [
    ("int64", lambda: I.Constant(1.5), "Constant: value is 1.5, which is no int64"),
    ("float16", lambda: I.Constant(1e6), "Constant: value is 1000000.0, beyond the range of float16"),
    ("float32", lambda: I.Constant("3"), "Constant: value is '3'; expected a number"),  # type: ignore[arg-type]
    ("float32", lambda: I.Constant([1, 2]), "expected a number .Assign takes arrays"),  # type: ignore[arg-type]
    ("int64", lambda: I.Assign([1.7, 2.0]), "initial value of 'p' is array.*which is no int64"),
    ("float16", lambda: I.Assign([1e6, 1.0]), "beyond the range of float16"),
    ("float32", lambda: I.Normal(math.nan, 1), "Normal: mean is nan; expected a number"),
    ("float32", lambda: I.TruncatedNormal(0, math.inf), "TruncatedNormal: std is inf"),
    ("float32", lambda: I.Uniform(-math.inf, 1), "Uniform: low is -inf"),
    ("float32", lambda: I.KaimingNormal(fan_in=-1), "Kaiming: fan_in is -1; expected a whole number, at least 1"),
    ("float32", lambda: I.XavierNormal(fan_in=0), "Xavier: fan_in is 0"),
    ("float32", lambda: I.XavierUniform(fan_out=2.5), "Xavier: fan_out is 2.5"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("dtype", "made", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_no_parameter_can_hold_is_refused(dtype: str, made: Callable[[], I.Initializer], words: str) -> None:
    with program_guard(Program(), Program()), pytest.raises(amp.AmpError, match=words):
        nn.create_parameter([2], dtype, "p", made())


@pytest.mark.parametrize("shape", [(7,), (5, 7), (32, 3), (128, 128)], ids=str)
@pytest.mark.parametrize(
    "kind", [I.Uniform(-2, 3), I.Normal(1, 2), I.TruncatedNormal(1, 0.5)], ids=["uniform", "normal", "truncated"]
)
def test_small_variables_are_drawn_together(kind: I.Initializer, shape: tuple[int, ...]) -> None:
    """As each is by itself, however many there are; what kernels do not compute in whole vectors stays apart."""

    def build(names: list[str], dtype: str = "float32") -> None:
        for name in names:
            nn.create_parameter(list(shape), dtype, name, kind)

    names = [f"w{number}" for number in range(70)]
    found = initial(lambda: build(names), seed=7)
    for name in names[:2] + names[-2:]:
        assert found[name].tobytes() == initial(partial(build, [name]), seed=7)[name].tobytes()
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup):
        build(names)
        build(["half"], "float16")
    hashed = sum(node.op_type == "BitShift" for node in startup.lower(amp.CPUPlace()).model.graph.node)
    together = isinstance(kind, I.Uniform) or math.prod(shape) % 16 == 0
    assert hashed <= 8 + 4 * (1 + 70 * math.prod(shape) // 2**20) if together else hashed > 2 * 70


@pytest.mark.parametrize(
    "kind", [I.Uniform(-2, 3), I.Normal(1, 2), I.TruncatedNormal(1, 0.5)], ids=["uniform", "normal", "truncated"]
)
def test_a_seed_gives_the_same_numbers_on_any_number_of_threads(kind: I.Initializer) -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), unique_name.guard():
        for number, shape in enumerate([(50001,), (128, 128), (128, 128), (301, 77)]):
            nn.create_parameter(list(shape), "float32", f"w{number}", kind)
    found = []
    for threads in (1, 3, 5):
        scope = amp.Scope()
        amp.Executor(amp.CPUPlace(), threads=threads).run(startup, scope=scope)
        found.append({name: scope.find_var(name).tobytes() for name in scope.var_names()})
    assert found[0] == found[1] == found[2]
