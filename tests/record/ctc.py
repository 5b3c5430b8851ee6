"""Records torch's ``ctc_loss``: values and gradients in float64, in ``data/ctc_torch.npz``.

Run where torch is installed (it is no requirement of this package): ``python -m tests.record.ctc``. The tests read
the record alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.helpers.where import RECORDED

RECORD = RECORDED / "ctc_torch.npz"


def case(rng: np.random.Generator, index: int) -> dict[str, Any]:
    """Random sizes and lengths; few classes, so that labels repeat, and inputs too short for some labels."""
    steps, batch, classes, width = (int(rng.integers(low, high)) for low, high in ((1, 15), (1, 5), (2, 6), (1, 7)))
    blank = int(rng.integers(classes))
    labels = rng.integers(0, classes - 1, (batch, width))
    labels += labels >= blank
    symbols = rng.integers(0, width + 1, batch)
    inputs = rng.integers(0 if index % 5 == 0 else max(1, steps // 2), steps + 1, batch)
    if index % 4 == 0:
        symbols[0] = 0
    if index % 4 == 1:
        inputs[:] = steps
        symbols = np.minimum(symbols, steps // 2)
    return {
        "logits": (rng.normal(size=(steps, batch, classes)) * rng.choice([0.5, 3.0])).astype(np.float32),
        "labels": labels.astype(np.int64),
        "input_lengths": inputs,
        "label_lengths": symbols,
        "blank": np.int64(blank),
    }


def results(given: dict[str, Any]) -> dict[str, Any]:
    """For each reduction, with and without ``zero_infinity``, the loss; of some its gradient at logits and log_probs.

    The gradient is that of the losses times 1, 2, 3, ..
    """
    found = {}
    arguments = [torch.tensor(given[name]) for name in ("labels", "input_lengths", "label_lengths")]
    for reduction in ("mean", "sum", "none"):
        for zero in (False, True):
            logits = torch.tensor(given["logits"], dtype=torch.float64, requires_grad=True)
            log_probs = logits.log_softmax(2)
            log_probs.retain_grad()
            loss = torch.nn.functional.ctc_loss(
                log_probs, *arguments, blank=int(given["blank"]), reduction=reduction, zero_infinity=zero
            )
            weights = torch.arange(1, loss.numel() + 1, dtype=torch.float64).reshape(loss.shape)
            (loss * weights).sum().backward()
            key = f"{reduction}{int(zero)}"
            found[f"loss_{key}"] = loss.detach().numpy()
            if key in ("none0", "mean1", "sum0"):
                found[f"logits_{key}"] = logits.grad.numpy().astype(np.float32)
            if key == "none0":
                found[f"log_probs_{key}"] = log_probs.grad.numpy().astype(np.float32)
    return found


def main() -> None:
    rng = np.random.default_rng(20060625)
    record = {}
    for index in range(40):
        given = case(rng, index)
        record |= {f"{index}_{name}": value for name, value in (given | results(given)).items()}
    RECORD.parent.mkdir(exist_ok=True)
    np.savez_compressed(RECORD, cases=np.int64(40), torch=np.array(torch.__version__), **record)


if __name__ == "__main__":
    main()
