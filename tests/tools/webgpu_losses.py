"""How far the losses of 50 steps on WebGPU are from the CPU lowering's, beside what one rounding of the feeds does there.

``python -m tests.tools.webgpu_losses [STEPS] [NET ...]`` trains the use case, an MLP, a CNN, a transformer block and an LSTM
in fp32, mixed and pure fp16 on WebGPU, on the CPU, and on the CPU with every floating-point feed changed by a random share
of its last bit (2**-24 of it in fp32, 2**-11 else), twice. Where a sign flips losses part, on one place as on two: what
two lowerings may differ by is what such a change does. It prints the largest difference of a loss, and fails where the
device's is more than four times that of the changed feeds, and more than 1e-5 in fp32 or 1e-2 else, each relative to the
first loss.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tests.helpers import benchmark_programs
from tests.helpers.programs import build
from tests.webgpu.test_training import CPU, SIZES, WEBGPU, Training, named

NETS = ("use_case", "mlp", "cnn", "bert", "lstm")
_MODES = {"fp32": "fp32", "mixed": "amp", "pure": "pure-fp16"}
_BATCHES = 4


def of(net: str, mode: str, place: Any) -> Training:
    def use_case() -> Any:
        made = build("use_case", _MODES[mode])
        return made.main, made.startup, made.loss, made.optimizer

    return Training(use_case if net == "use_case" else named(net, mode), place)


def fed(training: Training, net: str, number: int) -> dict[str, np.ndarray[Any, Any]]:
    if net in SIZES:
        return training.feeds(number)
    rng, given = np.random.default_rng(number), build(net).feeds
    return given | {"image": rng.standard_normal(given["image"].shape).astype(np.float32)}


def nudged(feeds: dict[str, np.ndarray[Any, Any]], mode: str, rng: np.random.Generator) -> dict[str, Any]:
    step = 2.0 ** (-24 if mode == "fp32" else -11)
    return {
        name: (array * (1 + step * rng.uniform(-1, 1, array.shape))).astype(array.dtype)
        if array.dtype.kind == "f"
        else array
        for name, array in feeds.items()
    }


def losses(net: str, mode: str, place: Any, steps: int, seed: int | None = None) -> np.ndarray[Any, Any]:
    training, found = of(net, mode, place), []
    given = [fed(training, net, number) for number in range(_BATCHES)]
    if seed is not None:
        given = [nudged(feeds, mode, np.random.default_rng((seed, at))) for at, feeds in enumerate(given)]
    for step in range(steps):
        found.append(float(training(given[step % _BATCHES])[0]))
    return np.array(found)


def main(arguments: list[str]) -> int:
    steps, nets = int(arguments[0]) if arguments else 50, arguments[1:] or NETS
    failed = False
    print(f"{'net':<9} {'mode':<6} {'loss, first to last':<20} {'WebGPU':>8} {'changed feeds':>14}")
    for net in nets:
        for mode in benchmark_programs.MODES:
            cpu = losses(net, mode, CPU, steps)
            device = np.abs(losses(net, mode, WEBGPU, steps) - cpu).max()
            changed = max(np.abs(losses(net, mode, CPU, steps, seed) - cpu).max() for seed in (1, 2))
            allowed = max(4 * changed, (1e-5 if mode == "fp32" else 1e-2) * abs(cpu[0]))
            failed |= not device <= allowed
            said = "" if device <= allowed else "  too far"
            print(
                f"{net:<9} {mode:<6} {f'{cpu[0]:.3f} to {cpu[-1]:.4f}':<20} {device:8.1e} {changed:14.1e}{said}",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
