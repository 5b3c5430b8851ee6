"""Functions of the builder as programs, with what torch recorded of them."""

from __future__ import annotations

from functools import cache

import numpy as np

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.corpora.layer_cases import CASES, cotangent_of, inputs_of
from tests.helpers.where import RECORDED

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
