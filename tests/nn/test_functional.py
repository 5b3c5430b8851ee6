"""Functions of the builder: values and gradients beside torch's, element types, every node on CUDA."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
from tests.corpora.layer_cases import CASES, cotangent_of, inputs_of
from tests.helpers.cuda_kernels import without_cuda_kernel
from tests.helpers.where import RECORDED, ROOT

DATA = RECORDED / "layers_torch.npz"


@cache
def recorded() -> dict[str, np.ndarray]:
    with np.load(DATA) as arrays:
        return dict(arrays)


def built(name: str) -> tuple[amp.Program, amp.Program, dict[str, np.ndarray], amp.Variable, dict[int, amp.Variable]]:
    """A case as a program: float inputs are parameters, so that they have gradients; integers are fed."""
    main, startup = amp.Program(), amp.Program("startup")
    expected = {key.split("/")[1] for key in recorded() if key.startswith(f"{name}/")}
    feeds: dict[str, np.ndarray] = {}
    with amp.program_guard(main, startup), amp.unique_name.guard():
        inputs: list[amp.Variable] = []
        for i, array in enumerate(inputs_of(name)):
            if array.dtype.kind == "f":
                inputs.append(amp.create_parameter(array.shape, "float32", name=f"x{i}", initializer=array))
            else:
                feeds[f"x{i}"] = array
                inputs.append(amp.data(f"x{i}", list(array.shape), "int64"))
        y = CASES[name][1](F, *inputs)
        grads: dict[int, amp.Variable] = {}
        if len(expected) > 1:
            weights = amp.data("weights", list(recorded()[f"{name}/y"].shape), "float32")
            feeds["weights"] = cotangent_of(name, recorded()[f"{name}/y"].shape)
            pairs = dict(
                amp.append_backward(
                    F.sum(y * weights), parameter_list=[v for i, v in enumerate(inputs) if f"d{i}" in expected]
                )
            )
            grads = {i: pairs[v] for i, v in enumerate(inputs) if v in pairs}
    return main, startup, feeds, y, grads


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_torchs(name: str) -> None:
    main, startup, feeds, y, grads = built(name)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(startup, scope=scope)
    value, *found = exe.run(main, feed=feeds, fetch_list=[y, *grads.values()], scope=scope)
    expected = recorded()[f"{name}/y"]
    assert value.dtype == expected.dtype and y.dtype == expected.dtype.name
    assert y.shape is not None and len(y.shape) == expected.ndim
    assert all(size in (None, there) for size, there in zip(y.shape, expected.shape, strict=True))
    np.testing.assert_allclose(value, expected, rtol=2e-4, atol=2e-5)
    wanted = {int(key.split("/d")[1]) for key in recorded() if key.startswith(f"{name}/d")}
    assert set(grads) == wanted
    for i, gradient in zip(grads, found, strict=True):
        np.testing.assert_allclose(gradient, recorded()[f"{name}/d{i}"], rtol=3e-4, atol=3e-5, err_msg=f"input {i}")


@pytest.mark.parametrize("name", CASES)
def test_every_node_has_a_cuda_kernel(name: str) -> None:
    main, _, feeds, y, grads = built(name)
    model = lower(main, "cuda", {key: array.shape for key, array in feeds.items()}, [y, *grads.values()]).model
    missing = [node.split("(")[0] for node in without_cuda_kernel(model)]
    # onnxruntime replaces a node without a kernel by its function body, of operators that all have one
    assert set(missing) <= {"Mish", "Celu"}


def test_the_record_is_of_these_cases() -> None:
    assert {key.split("/")[0] for key in recorded()} == set(CASES)


def test_every_function_is_tried_somewhere() -> None:
    """A function that is added to F without a test fails here."""
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert [name for name in F.__all__ if not re.search(rf"F\.{name}\b", text) and name not in CASES] == []
