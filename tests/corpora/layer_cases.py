"""Functions of the builder beside torch's: the same call in both, for values and gradients recorded with torch.

Each case: the inputs (a shape: normal numbers; ``P(shape)``: positive ones; ``I(shape, n)``: integers below n;
``U(shape)``: probabilities; ``D(shape)``: rows that add up to 1), the call of the builder and that of torch. Neither
package is imported here: both come as arguments. ``F`` is amp.nn.functional, ``T`` torch.nn.functional, ``t`` torch.
"""

from __future__ import annotations

import zlib

import numpy as np

from tests.corpora.layer_cases_arrays import ARRAYS
from tests.corpora.layer_cases_images import IMAGES
from tests.corpora.layer_inputs import Case, Kind, Shape

CASES: dict[str, Case] = IMAGES | ARRAYS


def inputs_of(name: str) -> list[np.ndarray]:
    """The inputs of a case, the same in every run."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    found = []
    for given in CASES[name][0]:
        item = given if isinstance(given, Kind) else Kind(given, "normal")
        if item.kind == "integer":
            found.append(rng.integers(0, item.below, item.shape))
            continue
        array = rng.normal(size=item.shape)
        if item.kind == "positive":
            array = np.abs(array) + 0.3
        elif item.kind == "probability":
            array = 0.02 + 0.96 * rng.random(item.shape)
        elif item.kind == "distribution":
            array = np.exp(array) / np.exp(array).sum(-1, keepdims=True)
        found.append(array.astype(np.float32))
    return found


def cotangent_of(name: str, shape: Shape) -> np.ndarray:
    """What the gradient of a case's result is, in the recorded gradients."""
    return np.random.default_rng(zlib.crc32(name.encode()) + 1).normal(size=shape).astype(np.float32)
