"""Records torch's quantisation-aware training: ``python -m tests.record.fake_quantize`` where torch and onnxscript are.

The tests read the record alone: which gradients pass a pair at the ends of each integer type, and a net whose weights
and activations are fake-quantised, as torch's exporters write it, with the losses of its first steps.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import torch
from torch.nn import functional as F

from tests.helpers.where import RECORDED

RECORD = RECORDED / "fake_quantize_torch.npz"
#: The ends of each type, and zero points, whose parity decides where numbers between two integers go.
ENDS = {
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int16": (-32768, 32767),
    "uint16": (0, 65535),
    "int4": (-8, 7),
    "uint4": (0, 15),
}
SCALE, STEPS, RATE = 0.25, 6, 0.25


class Fake(torch.nn.Module):
    """A pair; ``scale`` is a list where it has one for each channel."""

    def __init__(self, scale: float | list[float], zero_point: int, least: int, largest: int) -> None:
        super().__init__()
        self.ends, self.several = (least, largest), isinstance(scale, list)
        self.register_buffer("scale", torch.tensor(scale))
        zeros = [zero_point] * len(scale) if isinstance(scale, list) else zero_point
        self.register_buffer("zero", torch.tensor(zeros, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.several:
            return torch.fake_quantize_per_channel_affine(x, self.scale, self.zero, 0, *self.ends)
        return torch.fake_quantize_per_tensor_affine(x, self.scale, self.zero, *self.ends)


class Net(torch.nn.Module):
    """Weights by channel and by tensor; activations of 8 bits and, as torch's own settings for x86, of 7."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.out = torch.nn.Conv2d(1, 4, 3), torch.nn.Linear(64, 8), torch.nn.Linear(8, 3)
        self.of_x, self.of_hidden, self.of_pooled = (
            Fake(0.03, 60, 0, 127),
            Fake(0.008, 0, 0, 255),
            Fake(0.011, -20, -128, 127),
        )
        self.of_conv = Fake([0.0021, 0.0024, 0.0017, 0.0025], 0, -128, 127)
        self.of_fc, self.of_out = Fake(0.0009, 0, -128, 127), Fake([0.0023, 0.0026, 0.0029], 0, -128, 127)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.conv2d(self.of_x(x), self.of_conv(self.conv.weight), self.conv.bias))
        x = self.of_hidden(x).flatten(1)
        x = self.of_pooled(torch.tanh(F.linear(x, self.of_fc(self.fc.weight), self.fc.bias)))
        return F.linear(x, self.of_out(self.out.weight), self.out.bias)


def borders() -> dict[str, np.ndarray]:
    """Numbers around both ends of each type, a quarter of a step apart, and what passes of a gradient of ones."""
    found = {}
    for name, ends in ENDS.items():
        for zero in (ends[0], (ends[0] + ends[1]) // 2, (ends[0] + ends[1]) // 2 + 1):
            near = [end - zero + np.arange(-8, 9) / 4 for end in ends]
            x = torch.tensor(SCALE * np.concatenate(near), dtype=torch.float32, requires_grad=True)
            y = torch.fake_quantize_per_tensor_affine(x, SCALE, zero, *ends)
            y.sum().backward()
            assert x.grad is not None
            for what, value in (("x", x.detach()), ("y", y.detach()), ("dx", x.grad)):
                found[f"{name}|{zero}|{what}"] = value.numpy()
    return found


def exported(net: Net, x: torch.Tensor) -> dict[str, np.ndarray]:
    """The net as both exporters write it."""
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path, script = Path(folder) / "net.onnx", io.BytesIO()
        torch.onnx.export(net, (x,), path, dynamo=True, external_data=False, verbose=False)
        mode = torch.onnx.TrainingMode.TRAINING
        torch.onnx.export(net, (x,), script, dynamo=False, training=mode, do_constant_folding=False)
        model = onnx.load(path)
    for node in model.graph.node:
        del node.metadata_props[:]  # lines of this file, and where it lies
    files = {"dynamo": model.SerializeToString(), "script": script.getvalue()}
    return {f"model|{name}": np.frombuffer(content, np.uint8) for name, content in files.items()}


def trained(net: Net, x: torch.Tensor, label: torch.Tensor) -> dict[str, np.ndarray]:
    """The losses of some steps of gradient descent, the first step's gradients, and the parameters in the end."""
    optimizer, losses, first = torch.optim.SGD(net.parameters(), RATE), [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), label)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            first = {f"grad|{name}": p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        optimizer.step()
    last = {f"last|{name}": p.detach() for name, p in net.named_parameters()}
    return {"losses": np.array(losses)} | {name: value.numpy() for name, value in (first | last).items()}


def main() -> None:
    torch.manual_seed(5)
    net, x = Net(), torch.randn(16, 1, 6, 6)
    label = torch.randint(0, 3, (16,))
    found = {"x": x.numpy(), "label": label.numpy(), "torch": np.array(torch.__version__)}
    found |= exported(net, x) | trained(net, x, label) | borders()
    np.savez_compressed(RECORD, **found)


if __name__ == "__main__":
    main()
