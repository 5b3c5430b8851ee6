"""Constants that hang on sizes which data decide: computed in the run, whatever the sizes are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.emitter import Value
from amp_transpiler.passes.lowering.computed_sizes import with_computed_sizes
from amp_transpiler.passes.lowering.lowered import Lowered, Port

#: Numbers of what is found in each of three masks: those that stand for them, each time.
NUMBERS = ((67, 71, 73), (83, 97, 89), (127, 113, 149))
Made = Callable[[int, int, int], np.ndarray]


def lowered(constant: np.ndarray, sizes: tuple[int, int, int], kind: str = "Identity") -> Lowered:
    """A model that gives a constant, and finds places."""
    graph = onnx.GraphProto(name="net")
    tensors = {}
    for place, size in enumerate(sizes):
        graph.node.add(op_type="NonZero", input=[f"mask{place}"], output=[f"found{place}"])
        graph.input.append(onnx.helper.make_tensor_value_info(f"mask{place}", onnx.TensorProto.BOOL, [None]))
        graph.output.append(onnx.helper.make_tensor_value_info(f"found{place}", onnx.TensorProto.INT64, (1, size)))
        tensors[f"found{place}"] = Value(f"found{place}", "int64", (1, size))
    graph.node.add(op_type=kind, input=["constant"], output=["y"])
    graph.initializer.append(onnx.numpy_helper.from_array(constant, "constant"))
    element = onnx.helper.np_dtype_to_tensor_dtype(constant.dtype)
    graph.output.append(onnx.helper.make_tensor_value_info("y", element, constant.shape))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    fetches = [Port("y", "y", "", constant.shape)]
    return Lowered(model, "cpu", fetches=fetches, tensors=tensors, origins=[None] * 4, decided=list(tensors))


def joined(made: Made) -> Lowered | None:
    return with_computed_sizes([lowered(made(*sizes), sizes) for sizes in zip(*NUMBERS, strict=True)])


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def floats(number: float) -> np.ndarray:
    return np.array(number, np.float32)


FORMS: dict[str, Made] = {
    "a size": lambda a, b, c: ints(b),
    "a number": lambda a, b, c: np.array(b, np.int64),
    "int32": lambda a, b, c: np.array([a, c], np.int32),
    "a shape": lambda a, b, c: ints(4, b, 8),
    "a multiple": lambda a, b, c: ints(-1, 12 * c),
    "one more": lambda a, b, c: ints(a + 1, c - 3),
    "the rest": lambda a, b, c: ints(1000 - b),
    "twice and one less": lambda a, b, c: ints(2 * b - 1),
    "a product": lambda a, b, c: ints(3 * a * c, b * b),
    "a sum of all": lambda a, b, c: ints(a + b + c, 5 + a + b),
    "a sum of two apart": lambda a, b, c: ints(a + c + 2),
    "a difference": lambda a, b, c: ints(c - a, c - b - 7),
    "equal numbers": lambda a, b, c: np.full((9, 9), a, np.int64),
    "several of each": lambda a, b, c: np.repeat(np.array([a, 7, c - 1], np.float32), 50).reshape(2, 75),
    "a mean": lambda a, b, c: floats(1 / b),
    "a mean of several": lambda a, b, c: np.full((1, 1), 2 / (12 * b), np.float32),
    "a root": lambda a, b, c: floats(0.125 / np.sqrt(c)),
    "as a float": lambda a, b, c: floats(3 * a),
    "one less, divided by": lambda a, b, c: floats(1 / (b - 1)),
    "of a product": lambda a, b, c: floats(1 / (a * b)),
    "in 16 bit": lambda a, b, c: np.array([1 / c], np.float16),
    "equal numbers, as many": lambda a, b, c: np.full((a, 3), 0.5, np.float32),
    "numbers that count": lambda a, b, c: np.arange(b, dtype=np.int64),
    "rows that count": lambda a, b, c: np.arange(3 * b, dtype=np.int64).reshape(b, 1, 3),
    "numbers that count by two": lambda a, b, c: np.arange(3, 3 + 2 * a, 2, dtype=np.int64),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_run_computes_them(form: str) -> None:
    found = joined(FORMS[form])
    assert found is not None
    assert all(isinstance(d, int) or d is None for port in found.fetches for d in port.shape or ())
    onnx.checker.check_model(found.model, full_check=True)
    used = {name for node in found.model.graph.node for name in node.input}
    assert {tensor.name for tensor in found.model.graph.initializer} <= used
    session = ort.InferenceSession(found.model.SerializeToString(), providers=["CPUExecutionProvider"])
    for sizes in ((5, 6, 7), (12, 2, 31), (1, 2, 8), (100, 300, 200)):
        feeds = {f"mask{place}": np.ones(size, bool) for place, size in enumerate(sizes)}
        (y,) = session.run(["y"], feeds)
        wanted = FORMS[form](*sizes)
        assert y.dtype == wanted.dtype and y.shape == wanted.shape
        np.testing.assert_allclose(y, wanted, rtol=2e-3 if y.dtype == np.float16 else 3e-7)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda a, b, c: ints(a // 2), r"what follows from them \(33, 35, 36\) is no sum, multiple or product"),
        (lambda a, b, c: floats(np.log(a)), "a number that follows from them is no multiple or power of a size"),
        (lambda a, b, c: np.arange(a, dtype=np.int64) ** 2, r"so they do the shape of a constant \(int64\)"),
        (lambda a, b, c: np.arange(100, dtype=np.int64) * a, "many numbers of a tensor hang on them"),
    ],
)
def test_what_it_cannot_compute_is_said(made: Made, said: str) -> None:
    with pytest.raises(GraphError, match=rf"data decide the sizes of 'found0', and {said}.*Pad what is chosen"):
        joined(made)


def test_models_of_other_operators_have_none() -> None:
    sizes = list(zip(*NUMBERS, strict=True))
    kinds = ("Identity", "Identity", "Neg")
    assert with_computed_sizes([lowered(ints(s[0]), s, k) for s, k in zip(sizes, kinds, strict=True)]) is None


def test_a_size_is_known_before_what_it_shapes() -> None:
    """What needs a size stands behind what finds it, even if it reads none of it."""
    times = [lowered(ints(a), (a, b, c)) for a, b, c in zip(*NUMBERS, strict=True)]
    for each in times:
        nodes = [*each.model.graph.node][::-1]
        del each.model.graph.node[:]
        each.model.graph.node.extend(nodes)
    found = with_computed_sizes(times)
    assert found is not None and len(found.origins) == len(found.model.graph.node)
    onnx.checker.check_model(found.model, full_check=True)
