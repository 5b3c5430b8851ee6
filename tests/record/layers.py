"""Records tests/data/layers_torch.npz: results and gradients of the cases in tests/corpora/layer_cases.py, by torch in float64.

Run where torch is installed: ``python -m tests.record.layers``. The tests themselves need no torch.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.corpora.layer_cases import CASES, cotangent_of, inputs_of
from tests.helpers.where import RECORDED

torch.set_num_threads(1)


def record(name: str) -> dict[str, np.ndarray]:
    """The result, and the gradient of each float input (none for those that torch holds constant)."""
    tensors = [torch.tensor(a.astype(np.float64) if a.dtype.kind == "f" else a) for a in inputs_of(name)]
    for tensor in tensors:
        tensor.requires_grad_(tensor.is_floating_point())
    y = CASES[name][2](torch.nn.functional, torch, *tensors)
    found = {f"{name}/y": y.detach().numpy()}
    if y.requires_grad:
        y.backward(torch.tensor(cotangent_of(name, tuple(y.shape)).astype(np.float64)))
        found |= {f"{name}/d{i}": t.grad.numpy() for i, t in enumerate(tensors) if t.grad is not None}
    return {key: a.astype(np.float32) if a.dtype == np.float64 else a for key, a in found.items()}


if __name__ == "__main__":
    arrays = {key: array for name in CASES for key, array in record(name).items()}
    np.savez_compressed(RECORDED / "layers_torch.npz", **arrays)
