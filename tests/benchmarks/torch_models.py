"""Real models in torch eager, exported to ONNX and trained; runs in an environment of its own.

    python torch_models.py FOLDER NAME PLACE FORM   # NAME: a key of MODELS; PLACE: cpu or cuda; needs torch, timm,
                                                    # transformers, and for a compiled model a C++ compiler

FORM "export" writes FOLDER/NAME.onnx and FOLDER/NAME.npz (its inputs and a target). "eager", with Adam as it is by default,
and "compiled", with fused Adam, print "ready", and answer each line with a number on standard input with the time of that
many Adam steps in ms a step (process time; on cuda wall-clock time), and the line "peak" with the peak memory of this
process, on cuda of the device, in MiB. The loss is the mean squared distance of the output to the target.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Last(nn.Module):
    """One tensor of what a model gives."""

    def __init__(self, model, pick):
        super().__init__()
        self.model, self.pick = model, pick

    def forward(self, *inputs):
        return self.pick(self.model, *inputs)


def mlp():
    """784-512-512-10, batch 64."""
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, (torch.randn(64, 784),), ["x"]


def resnet50():
    """Batch 4, 224 x 224; batch normalisation folded, as an export for inference has it."""
    import timm

    model = timm.create_model("resnet50", pretrained=False, zero_init_last=False)
    model.train()
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(4, 3, 224, 224))
    return model.eval(), (torch.randn(4, 3, 224, 224),), ["x"]


def vit():
    """ViT-S of patches of 16, batch 8, 224 x 224."""
    import timm

    model = timm.create_model("vit_small_patch16_224", pretrained=False)
    return model.eval(), (torch.randn(8, 3, 224, 224),), ["x"]


def bert(batch=8, tokens=128):
    """2 layers."""
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(num_hidden_layers=2, attn_implementation="eager")).eval()
    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[1, tokens * 3 // 4 :] = 0
    wrapped = Last(model, lambda m, i, a: m(input_ids=i, attention_mask=a).last_hidden_state)
    return wrapped, (torch.randint(0, 30000, (batch, tokens)), mask), ["input_ids", "attention_mask"]


def short_bert():
    """2 layers on so little text that the update decides the time of a step."""
    return bert(2, 16)


def lstm():
    """2 bidirectional layers of 256, batch 16, 50 steps."""

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(1000, 128)
            self.r = nn.LSTM(128, 256, num_layers=2, bidirectional=True, batch_first=True)
            self.h = nn.Linear(512, 50)

        def forward(self, ids):
            return self.h(self.r(self.e(ids))[0]).log_softmax(-1)

    return Tagger().eval(), (torch.randint(0, 1000, (16, 50)),), ["ids"]


class Experts(nn.Module):
    """Eight experts, of which a router gives each token two: each computes the rows that it is given."""

    def __init__(self, width, hidden):
        super().__init__()
        self.router = nn.Linear(width, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width)) for _ in range(8)
        )

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(self.router(rows).softmax(-1), 2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            at, slot = torch.where(chosen == number)
            out = out.index_add(0, at, expert(rows[at]) * weights[at, slot, None])
        return out.reshape(x.shape)


def mixture():
    """Two layers of experts, 1,024 tokens of 256: sizes that data decide."""

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out, self.norm = nn.Linear(64, 256), nn.Linear(256, 16), nn.LayerNorm(256)
            self.one, self.two = Experts(256, 512), Experts(256, 512)

        def forward(self, x):
            x = self.into(x)
            x = x + self.one(self.norm(x))
            return self.out(x + self.two(self.norm(x)))

    return Mixture().eval(), (torch.randn(4, 256, 64),), ["x"]


#: What stands beside ours.
MODELS = {
    "mlp": mlp,
    "bert": bert,
    "short_bert": short_bert,
    "resnet50": resnet50,
    "vit": vit,
    "lstm": lstm,
    "mixture": mixture,
}


def export(model, inputs, names, path):
    """The model as PATH.onnx, its inputs and a target for its output as PATH.npz."""
    with torch.no_grad():
        out = model(*inputs)
        torch.onnx.export(
            model,
            inputs,
            f"{path}.onnx",
            dynamo=False,
            input_names=names,
            opset_version=17,
            do_constant_folding=True,
        )
    target = out + torch.randn_like(out) * out.std()
    np.savez(f"{path}.npz", target=target.numpy(), **{n: v.numpy() for n, v in zip(names, inputs, strict=True)})


def main():
    """Export, or serve."""
    folder, name, place, form = sys.argv[1:]
    library = None  # kept alive: the operators go with it
    with contextlib.suppress(PackageNotFoundError):
        if version("torch").partition("+")[2] != version("torchvision").partition("+")[2]:
            # torchvision of another build than torch's loads none of its operators, which its import asks for
            library = torch.library.Library("torchvision", "DEF")
            for missing in ("nms", "qnms"):
                library.define(f"{missing}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    model, inputs, names = MODELS[name]()
    if form == "export":
        export(model, inputs, names, f"{folder}/{name}")
        return
    target = torch.from_numpy(np.load(f"{folder}/{name}.npz")["target"])
    print("ready", flush=True)
    cuda, compiled = place == "cuda", form == "compiled"
    model, target, inputs = model.to(place), target.to(place), [v.to(place) for v in inputs]
    clock = time.perf_counter if cuda else time.process_time
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=compiled or None)

    def loss_of(*given):
        return nn.functional.mse_loss(model(*given), target)

    step = torch.compile(loss_of) if compiled else loss_of
    for line in sys.stdin:
        if line.strip() == "peak":
            peak = (
                torch.cuda.max_memory_reserved() if cuda else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            )
            print(peak / 2**20, flush=True)
            continue
        start = clock()
        for _ in range(int(line)):
            optimizer.zero_grad(set_to_none=True)
            step(*inputs).backward()
            optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        print((clock() - start) * 1e3 / int(line), flush=True)


if __name__ == "__main__":
    main()
