"""Records tests/data/half_nets_torch.npz: gradients of the nets in tests/corpora/half_nets.py, by torch.

``<net>/half<i>`` are those of torch's own float16 autograd, ``<net>/true<i>`` those of float64. Run where torch is
installed: ``python -m tests.record.half_nets``. The tests themselves need no torch.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.corpora.half_nets import NETS, arrays_of
from tests.helpers.where import RECORDED

torch.set_num_threads(1)


def gradients(name: str, dtype: torch.dtype) -> list[np.ndarray]:
    """The gradients of sum(y * cotangent) for x and each parameter."""
    x, cotangent, *parameters = (torch.tensor(a).to(dtype) for a in arrays_of(name))
    leaves = [t.requires_grad_() for t in (x, *parameters)]
    y = NETS[name][2](torch.nn.functional, torch, *leaves)
    y.backward(cotangent)
    return [np.asarray(t.grad.numpy()) for t in leaves]


if __name__ == "__main__":
    found = {}
    for name in NETS:
        for key, dtype in (("half", torch.float16), ("true", torch.float64)):
            for i, array in enumerate(gradients(name, dtype)):
                found[f"{name}/{key}{i}"] = array.astype(np.float32) if dtype == torch.float64 else array
    np.savez_compressed(RECORDED / "half_nets_torch.npz", **found)
