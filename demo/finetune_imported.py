"""Fine-tune an exported CNN on MNIST with nothing but onnxruntime, in fp32, mixed and pure 16-bit precision.

    python demo/finetune_imported.py --data DIR                     # a small network that the demo exports itself
    python demo/finetune_imported.py --data DIR --model cnn.onnx --freeze 'conv*' --mode pure

Without ``--data`` scikit-learn's handwritten digits are used. The model takes images [batch, channels, height, width];
digits are enlarged and repeated to fit. A model with another number of outputs than ten gets a new last layer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import mnist
import numpy as np
import quickstart
import training

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

#: The network that stands in for a download has seen these digits only.
SEEN = 5


def digits(options: argparse.Namespace) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Training and test images [n, 1, 28, 28] float32 with labels [n, 1]."""
    if options.data is not None:
        train, test = mnist.mnist(options.data)
    else:
        train, test = (
            (np.kron(images, np.ones((1, 1, 3, 3), np.float32)), labels) for images, labels in quickstart.digits()
        )
    limit = options.limit or len(train[0])
    return (train[0][:limit], train[1][:limit]), test


def fit_images(images: np.ndarray, shape: tuple[int | str | None, ...]) -> np.ndarray:
    """Enlarge (nearest neighbour) or crop to the model's height and width, and repeat to its channels."""
    channels, *size = (d if isinstance(d, int) else have for d, have in zip(shape[1:], images.shape[1:], strict=True))
    for axis, (have, want) in enumerate(zip(images.shape[2:], size, strict=True), 2):
        images = np.take(images, np.arange(want) * have // want, axis)
    return np.ascontiguousarray(np.broadcast_to(images, (len(images), channels, *size)))


def export_stand_in(path: Path, train: tuple[np.ndarray, np.ndarray], options: argparse.Namespace) -> None:
    """Train a small CNN on the first five digits and write it as an inference model: what one would download."""
    size = train[0].shape[2:]

    def network() -> tuple[amp.Variable, amp.Variable, amp.Variable, amp.Variable]:
        image, label = amp.data("image", [None, 1, *size], "float32"), amp.data("label", [None, 1], "int64")
        h = F.max_pool2d(amp.nn.conv2d(image, 16, 3, padding=1, act="relu"), 2, 2)
        h = F.max_pool2d(amp.nn.conv2d(h, 32, 3, padding=1, act="relu"), 2, 2)
        logits = amp.nn.fc(h, SEEN)
        return image, label, logits, F.cross_entropy(logits, label)

    seen = train[1][:, 0] < SEEN
    part = train[0][seen][:2000], train[1][seen][:2000]
    task = training.Task(network, part, part)
    alone = argparse.Namespace(**{**vars(options), "epochs": 1, "batch_size": 32})
    done = training.fit(task, "fp32", alone, lambda *_: None)
    program = done.test_program
    path.parent.mkdir(parents=True, exist_ok=True)
    with amp.scope_guard(done.scope):
        amp.save_inference_model(
            str(path), [program.var(done.image)], [program.var(done.prediction)], done.executor, program
        )
    print(f"{path}: a CNN that knows the digits 0 to {SEEN - 1}")


def features(scores: amp.Variable) -> amp.Variable:
    """What the last dense layer reads. Its parameters are trained no more."""
    layer, read = scores.producer, []
    while layer is not None:
        read += [variable for variable in layer.inputs if variable is not None and variable.trainable]
        if layer.type in ("MatMul", "Gemm"):
            for parameter in read:
                parameter.trainable = False
            return layer.inputs[0]
        layer = layer.inputs[0].producer
    return scores


def tune(
    path: Path,
    mode: str,
    data: tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
    options: argparse.Namespace,
) -> training.Trained:
    """Import the model, train it in one mode, and evaluate it."""
    program = amp.Program.from_onnx(path)
    if len(program.inputs) != 1 or len(program.inputs[0].shape or ()) != 4:
        raise SystemExit(f"error: {path} does not take one batch of images")
    image = program.inputs[0]
    (train, test), batch = data, (image.shape or (None,))[0]
    report = amp.prepare_training(program, freeze=options.freeze)
    if mode == options.modes[0]:
        print(report)
    if isinstance(batch, int):
        options.batch_size = options.eval_batch = batch
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        scores = program.outputs[0]
        if scores.producer.type == "Softmax":
            scores = scores.producer.inputs[0]  # the loss applies it
        if not scores.shape or len(scores.shape) != 2 or scores.shape[1] != 10:
            scores = amp.nn.fc(features(scores), 10, name="new_head")
        label = amp.data("label", [batch, 1], "int64")
        loss = F.cross_entropy(scores, label)
        test_program = program.clone(for_test=True)
        optimizer = amp.optimizer.Adam(options.lr, multi_precision=mode == "pure")
        if mode != "fp32":
            optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure", use_fp16_guard=False, dtype=options.dtype)
        optimizer.minimize(loss)
    place, scope = training.place_of(options.place), amp.Scope()
    executor = amp.Executor(place)
    executor.run(program.startup, scope=scope)
    fetches = [loss.name]
    if mode != "fp32":
        optimizer.amp_init(place, scope=scope, test_program=test_program, use_fp16_test=True)
        found_inf = optimizer.get_found_inf()
        fetches += [v.name for v in (optimizer.get_loss_scaling(), found_inf) if v is not None]
    task = training.Task(
        lambda: (image, label, scores, loss), _shaped(train, image), _shaped(test, image), learning_rate=options.lr
    )
    trained = training.Trained(training.History(mode), executor, scope, test_program, image.name, scores.name)
    training.run(task, trained, program, optimizer, fetches, label.name, options, training.bar())
    return trained


def _shaped(part: tuple[np.ndarray, np.ndarray], image: amp.Variable) -> tuple[np.ndarray, np.ndarray]:
    return fit_images(part[0], image.shape or ()), part[1]


def main() -> int:
    """Run the demo."""
    parser = training.arguments(__doc__.splitlines()[0], epochs=1)
    parser.add_argument("--data", type=Path, help="folder with the four MNIST idx files (default: scikit-learn digits)")
    parser.add_argument("--model", type=Path, help="exported CNN (default: one that the demo trains and exports)")
    parser.add_argument("--freeze", nargs="+", default=[], metavar="PATTERN", help="parameters that are not trained")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--limit", type=int, default=10000, help="use only this many training images (0: all)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the models")
    options = parser.parse_args()
    data = digits(options)
    path = options.model
    if path is None:
        path = options.out / "pretrained.onnx"
        export_stand_in(path, data[0], options)
    options.modes = training.MODES if options.mode == "all" else (options.mode,)
    runs = [tune(path, mode, data, options) for mode in options.modes]
    print(training.table([run.history for run in runs]))
    last = runs[-1]
    with amp.scope_guard(last.scope):
        program = last.test_program
        amp.save_inference_model(
            str(options.out / "finetuned.onnx"),
            [program.var(last.image)],
            [program.var(last.prediction)],
            last.executor,
            program,
        )
    print(f"{options.out / 'finetuned.onnx'}: all ten digits ({last.history.mode})")
    return 0


if __name__ == "__main__":
    sys.exit(training.guarded(main))
