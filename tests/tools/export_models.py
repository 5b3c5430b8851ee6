"""Makes the exported models that some tests want: ``python -m tests.tools.export_models FOLDER [NAME ...]``.

Runs in an environment of its own, on a CPU::

    pip install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 torchvision==0.28.0
    pip install transformers==5.23.0 timm==1.0.31 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.31.1

Each NAME.onnx has random weights and comes with NAME.npz, an input. Names that end in ``_leg`` come from the TorchScript
exporter (opset 17), those in ``_dyn`` from the dynamo exporter. What is written is compared with torch in onnxruntime.
``pytest --exports FOLDER`` then runs the tests that want them. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from torch import nn

#: Kept alive: the operators go with it.
LIBRARY = None
if version("torch").partition("+")[2] != version("torchvision").partition("+")[2]:
    # torchvision of another build than torch's loads none of its operators; nobody calls them, but its import asks.
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class Call(nn.Module):
    """A model called by a function of it and its inputs, so that one tensor comes out."""

    def __init__(self, model: nn.Module, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self.model, *inputs)


class Recurrent(nn.Module):
    """Two bidirectional layers between an embedding and scores."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.layers = kind(128, 256, num_layers=2, bidirectional=True, batch_first=True)
        self.scores = nn.Linear(512, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.scores(self.layers(self.embedding(ids))[0]).log_softmax(-1)


class Branches(nn.Module):
    """A loop and an If; scripted, so that both are exported."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        for _ in range(int(n)):
            x = torch.tanh(self.inner(x)) + x
        if bool(x.sum() > 0):
            x = self.outer(x) * 2.0
        else:
            x = self.outer(torch.relu(x)) - 1.0
        return x.softmax(-1)


Made = tuple[nn.Module, dict[str, torch.Tensor]]


def image(name: str, **options: Any) -> Made:
    """A model of timm; its batch normalisations have seen some data."""
    import timm

    model = timm.create_model(name, pretrained=False, **options).train()
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(4, 3, 224, 224))
    return model, {"x": torch.randn(1, 3, 224, 224)}


def bert(attention: str) -> Made:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(num_hidden_layers=2, attn_implementation=attention))
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[1, 40:] = 0
    called = Call(model, lambda m, ids, mask: m(input_ids=ids, attention_mask=mask).last_hidden_state)
    return called, {"input_ids": torch.randint(0, 30000, (2, 64)), "attention_mask": mask}


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False))
    called = Call(model, lambda m, ids: m(input_ids=ids, use_cache=False).logits)
    return called, {"input_ids": torch.randint(0, 50000, (1, 64))}


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 3, "vocab_size": 16000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, attn_implementation="eager"))
    called = Call(model, lambda m, ids, mask: m(input_ids=ids, attention_mask=mask, use_cache=False).logits)
    return called, {
        "input_ids": torch.randint(0, 16000, (1, 48)),
        "attention_mask": torch.ones(1, 48, dtype=torch.long),
    }


def whisper() -> Made:
    from transformers import WhisperConfig, WhisperModel

    encoder = {"encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536}
    decoder = {"decoder_layers": 1, "decoder_attention_heads": 6, "decoder_ffn_dim": 1536}
    model = WhisperModel(WhisperConfig(d_model=384, **encoder, **decoder)).encoder
    return Call(model, lambda m, x: m(x).last_hidden_state), {"input_features": torch.randn(1, 80, 3000)}


MODELS: dict[str, Callable[[], Made]] = {
    "bert_l2_dyn": lambda: bert("sdpa"),
    "bert_l2_leg": lambda: bert("eager"),
    "gpt2_dyn": gpt2,
    "vit_small_dyn": lambda: image("vit_small_patch16_224"),
    "lstm_leg": lambda: (Recurrent(nn.LSTM), {"ids": torch.randint(0, 1000, (2, 20))}),
    "gru_leg": lambda: (Recurrent(nn.GRU), {"ids": torch.randint(0, 1000, (2, 20))}),
    "llama_l3_leg": llama,
    "whisper_tiny_enc_dyn": whisper,
    "mobilenetv3_dyn": lambda: image("mobilenetv3_large_100"),
    "efficientnet_b0_leg": lambda: image("efficientnet_b0"),
    "resnet50_leg": lambda: image("resnet50", zero_init_last=False),
    "script_ifloop_leg": lambda: (torch.jit.script(Branches()), {"x": torch.randn(4, 32), "n": torch.tensor(3)}),
}


def export(name: str, folder: Path) -> None:
    """Write NAME.onnx and NAME.npz, and say how far onnxruntime's result is from torch's."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.eval()
    path = folder / f"{name}.onnx"
    arguments, names = tuple(inputs.values()), list(inputs)
    with torch.no_grad():
        wanted = model(*arguments).numpy()
        if name.endswith("_dyn"):
            exported = torch.onnx.export(model, arguments, dynamo=True, input_names=names, verbose=False)
            exported.save(path, external_data=False)
        else:
            torch.onnx.export(model, arguments, path, dynamo=False, input_names=names, opset_version=17)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = {i.name: a.numpy() for i, a in zip(session.get_inputs(), arguments, strict=True)}
    np.savez(path.with_suffix(".npz"), **feeds)
    off = np.abs(session.run(None, feeds)[0] - wanted).max()
    print(f"{name}: {path.stat().st_size / 1e6:.1f} MB, at most {off:.1e} from torch", flush=True)
    assert off < 1e-2 * (1 + np.abs(wanted).max()), "the exporter changed what the model computes"


def main() -> None:
    """Export the named models, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)} (default: all)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or MODELS:
        export(name, options.folder)


if __name__ == "__main__":
    main()
