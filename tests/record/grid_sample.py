"""Records PyTorch's gradients of grid_sample: ``python -m tests.record.grid_sample`` where torch is installed."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from tests.helpers.where import RECORDED

CASES = [
    *itertools.product(("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (0, 1), (2,)),
    *itertools.product(("bilinear", "nearest"), ("zeros", "border", "reflection"), (0, 1), (3,)),
]


def main() -> None:
    rng, found = np.random.default_rng(0), {}
    for rank in (2, 3):
        sizes, points = (4, 5, 3)[:rank], (3, 4, 2)[:rank]
        found[f"x{rank}"] = rng.normal(size=(2, 2, *sizes))
        found[f"grid{rank}"] = rng.uniform(-1.7, 1.7, (2, *points, rank))
        found[f"dy{rank}"] = rng.normal(size=(2, 2, *points))
    for mode, padding, aligned, rank in CASES:
        x, grid = (torch.tensor(found[f"{name}{rank}"], requires_grad=True) for name in ("x", "grid"))
        y = torch.nn.functional.grid_sample(x, grid, mode, padding, bool(aligned))
        y.backward(torch.tensor(found[f"dy{rank}"]))
        for name, value in (("y", y.detach()), ("dx", x.grad), ("dgrid", grid.grad)):
            found[f"{mode}|{padding}|{aligned}|{rank}|{name}"] = value.numpy()
    floats = {name: value.astype(np.float32) if "|" in name else value for name, value in found.items()}
    np.savez_compressed(RECORDED / "grid_sample.npz", **floats)


if __name__ == "__main__":
    main()
