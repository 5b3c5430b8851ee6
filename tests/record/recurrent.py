"""Records gradients of torch's LSTM, GRU and RNN, in float64, in ``data/recurrent_torch.npz``.

Run where torch is installed (it is no requirement of this package): ``python -m tests.record.recurrent``. The tests
read the record alone. Sequences of different lengths, packed; bidirectional; every output has a gradient.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.helpers.where import RECORDED

RECORD = RECORDED / "recurrent_torch.npz"
STEPS, BATCH, WIDTH, HIDDEN = 6, 3, 2, 4
LENGTHS = [6, 3, 1]


def record(kind: str) -> dict[str, np.ndarray]:
    generator = torch.Generator().manual_seed(1997)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    layer = getattr(torch.nn, kind)(WIDTH, HIDDEN, bidirectional=True).double()
    for parameter in layer.parameters():
        parameter.data = 0.6 * normal(*parameter.shape)
    x = normal(STEPS, BATCH, WIDTH).requires_grad_()
    states = [normal(2, BATCH, HIDDEN).requires_grad_() for _ in range(2 if kind == "LSTM" else 1)]
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor(LENGTHS))
    y, last = layer(packed, tuple(states) if kind == "LSTM" else states[0])
    y, _ = torch.nn.utils.rnn.pad_packed_sequence(y, total_length=STEPS)
    outputs = [y, *(last if kind == "LSTM" else [last])]
    weights = [normal(*output.shape) for output in outputs]
    sum((w * output).sum() for w, output in zip(weights, outputs, strict=True)).backward()
    named = {"x": x, **dict(layer.named_parameters()), **{f"state{i}": s for i, s in enumerate(states)}}
    found = {name: value.detach().numpy() for name, value in named.items()}
    found |= {f"grad_{name}": value.grad.numpy() for name, value in named.items()}
    found |= {f"y{i}": value.detach().numpy() for i, value in enumerate(outputs)}
    return found | {f"dy{i}": value.numpy() for i, value in enumerate(weights)}


def main() -> None:
    found = {f"{kind}_{name}": value for kind in ("LSTM", "GRU", "RNN") for name, value in record(kind).items()}
    np.savez_compressed(RECORD, lengths=np.array(LENGTHS), torch=np.array(torch.__version__), **found)


if __name__ == "__main__":
    main()
