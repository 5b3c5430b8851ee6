"""The nets of the demos with their losses, freshly initialised, as ONNX models with a batch to feed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx

import amp_transpiler as amp
from tests.helpers.where import ROOT

sys.path.insert(0, str(ROOT / "demo"))  # the demos import one another by their bare names

import encoder
import mnist
import quickstart
import speech_ctc

Net = tuple[onnx.ModelProto, dict[str, np.ndarray]]


def _model(build: Callable[[], Any], seed: int) -> onnx.ModelProto:
    main, startup, scope = amp.Program(), amp.Program("startup"), amp.Scope()
    main.seed = startup.seed = seed
    with amp.program_guard(main, startup), amp.unique_name.guard():
        build()
    amp.Executor(threads=1).run(startup, scope=scope)
    return main.to_onnx(scope=scope)


def _images(network: Callable[[], Any], size: int, seed: int) -> Net:
    rng = np.random.default_rng(seed)
    images = rng.random((64, 1, size, size), np.float32)
    return _model(network, seed), {"image": images, "label": rng.integers(0, 10, (64, 1))}


def _squad(seed: int) -> Net:
    sizes = argparse.Namespace(batch=8, seq_len=64, hidden=64, heads=2, layers=2, dropout=0.0)
    model, scope = encoder.built(sizes, 1000), amp.Scope()
    model.startup.seed = seed
    amp.Executor(threads=1).run(model.startup, scope=scope)
    rng, shape = np.random.default_rng(seed), (sizes.batch, sizes.seq_len)
    mask = np.arange(sizes.seq_len) < rng.integers(32, sizes.seq_len, (sizes.batch, 1))
    feeds = {"ids": rng.integers(0, 1000, shape), "segments": mask * rng.integers(0, 2, shape)}
    feeds |= {"mask": mask.astype(np.int64), "inside": mask}
    return model.main.to_onnx(scope=scope), feeds | {n: rng.integers(0, 30, sizes.batch) for n in ("start", "end")}


def _speech(cell: str, seed: int) -> Net:
    options = speech_ctc.arguments().parse_args(["--cell", cell, "--dropout", "0"])
    rng, frames = np.random.default_rng(seed), np.array([96, 80, 96, 64, 72, 90, 96, 88])
    feeds = {
        "features": rng.normal(size=(8, 1, 96, speech_ctc.spoken.BANDS)).astype(np.float32),
        "steps": speech_ctc.steps_of(frames),
        "labels": rng.integers(1, 11, (8, options.longest)),
        "symbols": rng.integers(1, options.longest + 1, 8).astype(np.int32),
    }
    return _model(lambda: speech_ctc.network(options), seed), feeds


#: By seed.
NETS: dict[str, Callable[[int], Net]] = {
    "demo_quickstart": partial(_images, quickstart.network, 8),
    "demo_mnist": partial(_images, mnist.network, 28),
    "demo_squad": _squad,
    "demo_speech_gru": partial(_speech, "gru"),
    "demo_speech_lstm": partial(_speech, "lstm"),
}
