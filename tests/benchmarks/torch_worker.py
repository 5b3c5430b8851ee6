"""The torch side of the benchmark; runs in an environment of its own.

Reads lines ``NAME STEPS`` and answers each with the process time of that many training steps, in ms per step.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """784-512-512-10."""
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, torch.randn(64, 784)


def cnn() -> tuple[nn.Module, torch.Tensor]:
    """conv 32, pool, conv 64, pool, dense."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 49, 10),
    )
    return model, torch.randn(64, 1, 28, 28)


def main() -> None:
    """Serve requests until standard input ends."""
    label = torch.randint(0, 10, (64,))
    nets = {}
    for name, make in (("mlp", mlp), ("cnn", cnn)):
        model, x = make()
        nets[name] = (model, x, torch.optim.SGD(model.parameters(), lr=0.01))
    print(f"torch {torch.__version__}", flush=True)
    for line in sys.stdin:
        name, steps = line.split()
        model, x, optimizer = nets[name]
        start = time.process_time()
        for _ in range(int(steps)):
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(x), label)
            loss.backward()
            optimizer.step()
        print((time.process_time() - start) * 1e3 / int(steps), flush=True)


if __name__ == "__main__":
    main()
