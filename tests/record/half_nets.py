"""Records tests/data/half_nets_torch.npz: gradients of the nets in tests/corpora/half_nets.py, by torch.

``<net>/float16 <i>`` and ``<net>/bfloat16 <i>`` are those of torch's own autograd in these types, ``<net>/float16 true <i>``
and so on those of float64 on the same values. Run where torch is installed: ``python -m tests.record.half_nets``. The tests
themselves need no torch.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.corpora.half_nets import BRAIN, NETS, arrays_of
from tests.helpers.where import RECORDED

torch.set_num_threads(1)


def gradients(name: str, given: torch.dtype, dtype: torch.dtype) -> list[np.ndarray]:
    """The gradients of sum(y * cotangent) for x and each parameter, of values that type ``given`` has."""
    x, cotangent, *parameters = (torch.tensor(a).to(given).to(dtype) for a in arrays_of(name))
    leaves = [t.requires_grad_() for t in (x, *parameters)]
    y = NETS[name][2](torch.nn.functional, torch, *leaves)
    y.backward(cotangent)
    return [np.asarray(t.grad.to(torch.float16 if dtype == torch.float16 else torch.float32).numpy()) for t in leaves]


if __name__ == "__main__":
    found = {}
    for name in NETS:
        for given in (torch.float16, *((torch.bfloat16,) if name in BRAIN else ())):
            word = str(given).removeprefix("torch.")
            for key, dtype in ((word, given), (f"{word} true", torch.float64)):
                found |= {f"{name}/{key} {i}": array for i, array in enumerate(gradients(name, given, dtype))}
    np.savez_compressed(RECORDED / "half_nets_torch.npz", **found)
