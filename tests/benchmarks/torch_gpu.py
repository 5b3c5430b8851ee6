"""The training steps of the GPU benchmark in torch; runs in an environment of its own, with torch alone.

    python torch_gpu.py '{"model": "bert", "mode": "mixed", "graph": true, "place": "cuda", "sizes": {...}, "tf32": false}'

``mode``: "fp32", or "mixed" for autocast to float16 with a gradient scaler; ``graph``: through torch.compile. Models and
sizes are those of tests/helpers/benchmark_programs.py. Answers as tests/benchmarks/gpu.py says.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    """An encoder layer: attention and a dense part, each followed by dropout, the sum and a norm."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x, seen):
        def split(y):
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = (split(part(x)) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=0.1)
        x = self.first(x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1))
        return self.second(x + F.dropout(self.narrow(F.gelu(self.wide(x))), 0.1))


class Bert(nn.Module):
    """Embeddings, encoder layers, the loss of a span."""

    def __init__(self, batch, length, width, layers, heads, words):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.norm, self.span = nn.LayerNorm(width), nn.Linear(width, 2)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, ids, mask, start, end):
        x = F.dropout(self.norm(self.words(ids) + self.position), 0.1)
        seen = mask.bool()[:, None, None]
        for layer in self.layers:
            x = layer(x, seen)
        first, last = self.span(x).unbind(-1)
        return (F.cross_entropy(first, start) + F.cross_entropy(last, end)) / 2

    @staticmethod
    def feeds(sizes):
        batch, length = sizes["batch"], sizes["length"]
        ids = torch.randint(0, sizes["words"], (batch, length))
        return ids, torch.ones_like(ids), *(torch.randint(0, length, (batch,)) for _ in range(2))


def conv(inputs, channels, kernel, stride=1):
    return nn.Sequential(nn.Conv2d(inputs, channels, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(channels))


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut."""

    def __init__(self, inputs, channels, stride, first):
        super().__init__()
        self.inner = nn.Sequential(conv(inputs, channels, 1), nn.ReLU(), conv(channels, channels, 3, stride), nn.ReLU())
        self.outer = conv(channels, 4 * channels, 1)
        self.short = conv(inputs, 4 * channels, 1, stride) if first else nn.Identity()

    def forward(self, x):
        return F.relu(self.outer(self.inner(x)) + self.short(x))


class ResNet(nn.Module):
    """A stem, stages of bottlenecks, a dense layer, cross entropy."""

    def __init__(self, batch, size, stem, stages, classes):
        super().__init__()
        self.stem = nn.Sequential(conv(3, stem, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks, inputs = [], stem
        for stage, (count, channels) in enumerate(stages):
            for block in range(count):
                stride = 2 if stage and not block else 1
                blocks.append(Bottleneck(inputs, channels, stride, not block))
                inputs = 4 * channels
        self.blocks, self.dense = nn.Sequential(*blocks), nn.Linear(inputs, classes)

    def forward(self, image, label):
        return F.cross_entropy(self.dense(self.blocks(self.stem(image)).mean((2, 3))), label)

    @staticmethod
    def feeds(sizes):
        batch, size = sizes["batch"], sizes["size"]
        return torch.randn(batch, 3, size, size), torch.randint(0, sizes["classes"], (batch,))


class Side:
    """A training step."""

    def __init__(self, model, mode, graph, place, sizes, tf32):
        torch.manual_seed(0)
        self.place, self.cuda, self.mixed = place, place == "cuda", mode == "mixed"
        if self.cuda:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
            torch.backends.cudnn.benchmark = True
            torch.zeros(1, device=place)
            self.before = self._used()
        kind = {"bert": Bert, "resnet": ResNet}[model]
        self.model = kind(**sizes).to(place).train()
        self.feeds = [feed.to(place) for feed in kind.feeds(sizes)]
        parameters = list(self.model.parameters())
        if model == "resnet":
            self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=self.cuda)
        else:
            self.optimizer = torch.optim.Adam(parameters, lr=1e-3, fused=self.cuda)
        self.scaler = torch.amp.GradScaler(place, enabled=self.mixed and self.cuda)
        self.loss = torch.compile(self.model) if graph else self.model

    def block(self, steps):
        """Milliseconds a step."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad(set_to_none=True)
            cast = torch.autocast(self.place, torch.float16) if self.mixed else contextlib.nullcontext()
            with cast:
                loss = self.loss(*self.feeds)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3 / steps

    def _used(self):
        free, total = torch.cuda.mem_get_info()
        return total - free

    def memory(self):
        """MiB on the device beyond what its context takes; on the processor the peak of the process."""
        if self.cuda:
            return (self._used() - self.before) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main():
    """Serve requests until standard input ends."""
    asked = json.loads(sys.argv[1])
    if asked["place"] == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} finds no CUDA device")
    side = Side(**asked)
    print(json.dumps({"ready": f"torch {torch.__version__}"}), flush=True)
    for line in sys.stdin:
        what, *count = line.split()
        print(json.dumps(side.block(int(count[0])) if what == "block" else side.memory()), flush=True)


if __name__ == "__main__":
    main()
