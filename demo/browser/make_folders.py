"""Exports what the page of this folder trains: `steps/` beside this file, for any static file server.

    python demo/browser/make_folders.py                              # a CNN on digits, and a small image model's head
    python demo/browser/make_folders.py --model mobilenetv3.onnx     # the head of an image model of yours instead

Each task is one folder: ``step``, exported for wasm and WebGPU (docs/exported_steps.md), and ``task.json``, which says
what is fed and what comes out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import numpy_helper

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

HERE = Path(__file__).resolve().parent
DIGITS = [str(digit) for digit in range(10)]
PICTURES = ["desert", "forest", "sea", "night"]
#: The list of tasks.
TASKS = "tasks.json"
Number = TypeVar("Number", int, float)


@dataclass
class Task:
    """A training program with the variables that the page feeds and reads; ``said`` goes into task.json."""

    main: amp.Program
    startup: amp.Program
    test: amp.Program
    optimizer: Any
    image: str
    label: str
    scores: str
    batch: int
    evaluated: int
    said: dict[str, Any]


def scaled(optimizer: Any, guard: bool) -> Any:
    """Pure float16. The scale doubles so often that a page shows what happens when it gets too large."""
    return amp.decorate(
        optimizer,
        use_pure_fp16=True,
        use_fp16_guard=guard,
        init_loss_scaling=2.0**15,
        incr_every_n_steps=25,
        decr_every_n_nan_or_inf=1,
        decr_ratio=0.5,
    )


# -- a small CNN from nothing --------------------------------------------------------------------------------
def digits(batch: int) -> Task:
    """Two convolutions and two dense layers on digits of 28 x 28."""
    main, startup = amp.Program("digits"), amp.Program("startup")
    main.seed = startup.seed = 1
    with amp.program_guard(main, startup), amp.unique_name.guard():
        image, label = amp.data("image", [None, 1, 28, 28], "float32"), amp.data("label", [None, 1], "int64")
        with amp.fp16_guard():
            h = F.max_pool2d(amp.nn.conv2d(image, 16, 3, padding=1, act="relu"), 2, 2)
            h = F.max_pool2d(amp.nn.conv2d(h, 32, 3, padding=1, act="relu"), 2, 2)
            scores = amp.nn.fc(amp.nn.fc(h, 64, act="relu"), 10)
            loss = F.cross_entropy(scores, label)
        test = main.clone(for_test=True)
        optimizer = scaled(amp.optimizer.Adam(0.002, multi_precision=True), guard=True)
        optimizer.minimize(loss, startup)
    said = {
        "name": "digits",
        "title": "Digits",
        "about": "Two convolutions and two dense layers, from nothing",
        "kind": "digits",
        "classes": DIGITS,
        "channels": 1,
        "mean": [0.1307],
        "std": [0.3081],
    }
    return Task(main, startup, test, optimizer, image.name, label.name, scores.name, batch, 200, said)


# -- the head of an image model ------------------------------------------------------------------------------
def pictures(path: Path, title: str, options: argparse.Namespace) -> Task:
    """A new head on what the last dense layer of an image model reads; all else is frozen."""
    program = amp.Program.from_onnx(with_free_batch(path, options.size), name="pictures")
    amp.prepare_training(program, batch_norm="frozen")
    image = program.inputs[0]
    shape = list(image.shape or ())
    if len(shape) != 4 or not all(isinstance(size, int) for size in shape[1:]) or shape[1] != 3 or shape[2] != shape[3]:
        raise SystemExit(f"error: {path} takes {shape}; the page feeds colour images [batch, 3, n, n]")
    program.startup.seed = program.seed = 1
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        read = features(program.outputs[0])
        if read is None:
            raise SystemExit(f"error: {path} does not end in a dense layer (Gemm or MatMul) whose input can be taken")
        normal = amp.nn.batch_norm(read, name="new_head_norm")  # features of any size train alike
        scores = amp.nn.fc(normal, len(PICTURES), name="new_head")
        label = amp.data("label", [None, 1], "int64")
        loss = F.cross_entropy(scores, label)
        test = program.clone(for_test=True)
        optimizer = scaled(amp.optimizer.Adam(0.003, multi_precision=True), guard=False)
        head = [v for v in program.all_parameters() if v.name.startswith("new_head")]
        optimizer.minimize(loss, parameter_list=head)
    said = {
        "name": "pictures",
        "title": "Pictures",
        "about": f"A new last layer on {title}, whose other weights stay",
        "kind": "pictures",
        "classes": PICTURES,
        "channels": 3,
        "mean": [0.485, 0.456, 0.406],
        "std": [round(std / options.contrast, 4) for std in (0.229, 0.224, 0.225)],
    }
    batch = options.batch or (8 if shape[2] > 128 else 16)
    return Task(program, program.startup, test, optimizer, image.name, label.name, scores.name, batch, 40, said)


def features(scores: amp.Variable) -> amp.Variable | None:
    """What the last dense layer reads."""
    layer = scores.producer
    while layer is not None and layer.type not in ("MatMul", "Gemm"):
        layer = layer.inputs[0].producer if layer.inputs and layer.inputs[0] is not None else None
    return layer.inputs[0] if layer is not None else None


def with_free_batch(path: Path, size: int | None = None) -> onnx.ModelProto:
    """The model, whose batch is no longer that of the exporter's example; height and width are ``size``, if given."""
    try:
        model = onnx.load(path)
    except (OSError, DecodeError) as error:
        sys.exit(f"error: '{path}' is no ONNX model that can be read: {error}")
    graph = model.graph
    fixed = {dim.dim_value for value in graph.input for dim in value.type.tensor_type.shape.dim[:1]}
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim[:1]:
            dim.dim_param = "batch"
    if size is not None:
        for dim in graph.input[0].type.tensor_type.shape.dim[2:]:
            dim.dim_value = size
    del graph.value_info[:]
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        shape = constants.get(node.input[1]) if node.op_type == "Reshape" else None
        sizes = [] if shape is None else numpy_helper.to_array(shape).tolist()
        if sizes and sizes[0] in fixed - {0}:
            name = f"{node.output[0]}/shape"
            graph.initializer.append(numpy_helper.from_array(np.array([0, *sizes[1:]], np.int64), name))
            node.input[1] = name
            kept = [attribute for attribute in node.attribute if attribute.name != "allowzero"]
            del node.attribute[:]
            node.attribute.extend(kept)
    return model


# -- an image model where none is given ----------------------------------------------------------------------
def export_stand_in(path: Path, steps: int = 150, batch: int = 32, size: int = 64) -> None:
    """Train a small CNN to tell gratings apart, and write it: what one would download."""

    def network() -> tuple[amp.Variable, amp.Variable, amp.Variable, amp.Variable]:
        image, label = amp.data("image", [None, 3, size, size], "float32"), amp.data("label", [None, 1], "int64")
        h = image
        for filters in (16, 32, 64):
            h = amp.nn.batch_norm(amp.nn.conv2d(h, filters, 3, stride=2, padding=1, bias_attr=False), act="relu")
        h = F.mean(h, axis=[2, 3])
        scores = amp.nn.fc(h, 8)
        return image, label, scores, F.cross_entropy(scores, label)

    main, startup = amp.Program(), amp.Program("startup")
    main.seed = startup.seed = 1
    with amp.program_guard(main, startup), amp.unique_name.guard():
        image, label, scores, loss = network()
        test = main.clone(for_test=True)
        amp.optimizer.Adam(0.003).minimize(loss, startup)
    executor, scope, rng = amp.Executor(), amp.Scope(), np.random.default_rng(0)
    executor.run(startup, scope=scope)
    for _ in range(steps):
        pictures, labels = gratings(rng, batch, size)
        executor.run(main, {image.name: pictures, label.name: labels}, [loss], scope=scope)
    with amp.scope_guard(scope):
        amp.save_inference_model(str(path), [test.var(image.name)], [test.var(scores.name)], executor, test)


def gratings(rng: np.random.Generator, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Waves of two lengths in four directions, in random colours with noise, and which of the eight they are."""
    labels = rng.integers(0, 8, count)
    angle = (labels % 4) * np.pi / 4 + rng.normal(0, 0.1, count)
    waves = np.where(labels < 4, 4.0, 10.0) * rng.uniform(0.8, 1.25, count)
    y, x = np.mgrid[:size, :size] / size
    along = np.cos(angle)[:, None, None] * x + np.sin(angle)[:, None, None] * y
    level = np.sin(2 * np.pi * (waves[:, None, None] * along + rng.random((count, 1, 1))))
    color, ground = rng.normal(0, 1, (2, count, 3, 1, 1))
    images = ground + color * level[:, None] + rng.normal(0, 0.2, (count, 3, size, size))
    return images.astype(np.float32), labels[:, None].astype(np.int64)


# -- what is written -----------------------------------------------------------------------------------------
def write_task(task: Task, home: Path) -> dict[str, Any]:
    """Export the task's steps and its model into ``home``; returns what the list of tasks says of it."""
    scope, executor = amp.Scope(), amp.Executor()
    executor.run(task.startup, scope=scope)
    task.optimizer.amp_init(amp.CPUPlace(), scope=scope, test_program=task.test, use_fp16_test=True)
    size = [int(n) for n in (task.main.var(task.image).shape or ())[1:]]

    def shapes(batch: int) -> dict[str, tuple[int, ...]]:
        return {task.image: (batch, *size), task.label: (batch, 1)}

    task.main.export_training(
        home / "step",
        [amp.CPUPlace(), amp.WebGPUPlace()],
        shapes(task.batch),
        outputs=[task.scores],
        eval_shapes=shapes(task.evaluated),
        infer_shapes={task.image: (1, *size)},
        test_program=task.test,
        scope=scope,
        portable=True,
    )
    said = {
        **task.said,
        "image": task.image,
        "label": task.label,
        "scores": task.scores,
        "size": size[-1],
        "batch": task.batch,
        "evaluated": task.evaluated,
    }
    (home / "task.json").write_text(json.dumps(said, indent=1), encoding="utf-8")
    return {name: said[name] for name in ("name", "title", "about", "kind")}


def above_0(kind: type[Number]) -> Callable[[str], Number]:
    """What reads a number above 0."""

    def read(text: str) -> Number:
        if not 0 < (found := kind(text)) < float("inf"):
            raise ValueError
        return found

    read.__name__ = f"{kind.__name__} above 0"  # what argparse says of other texts
    return read


def main() -> int:
    """Write the folders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, help="an exported image model whose head is trained (default: a small CNN)"
    )
    parser.add_argument("--batch", type=above_0(int), help="pictures of a step (default: 8, 16 where they are small)")
    parser.add_argument("--size", type=above_0(int), help="height and width of pictures (default: the model's)")
    parser.add_argument(
        "--contrast",
        type=above_0(float),
        default=1.0,
        help="of pictures; one that was never trained tells them apart at 2",
    )
    parser.add_argument("--out", type=Path, default=HERE / "steps", help="where to; what it made before is replaced")
    options = parser.parse_args()
    if options.out.exists() and not (options.out / TASKS).is_file():
        parser.error(f"'{options.out}' is there, and was not made by this program: name a new folder")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out.parent, prefix=".steps") as made:
        home = Path(made) / "steps"
        model, title = options.model, "a small CNN"
        if model is None:
            model = Path(made) / "stand_in.onnx"
            export_stand_in(model)
        else:
            title = model.stem
        tasks: list[Callable[[], Task]] = [lambda: digits(32), lambda: pictures(model, title, options)]
        said = []
        for build in tasks:
            task = build()
            folder = home / task.said["name"]
            folder.mkdir(parents=True)
            said.append(write_task(task, folder))
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            print(f"{options.out / folder.name}: {task.said['about']}; {size / 1e6:.1f} MB")
        (home / TASKS).write_text(json.dumps(said, indent=1), encoding="utf-8")
        shutil.rmtree(options.out, ignore_errors=True)
        shutil.move(home, options.out)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (amp.AmpError, OSError) as error:
        sys.exit(f"error: {error}")
