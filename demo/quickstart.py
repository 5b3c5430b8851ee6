"""Train one network on real handwritten digits in fp32, mixed and pure fp16, and serve the three models.

python demo/quickstart.py                      # all three modes, some seconds on two cores
python demo/quickstart.py --mode pure --dtype bfloat16
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import training

import amp_transpiler as amp
from amp_transpiler.nn import functional as F


def network() -> tuple[amp.Variable, amp.Variable, amp.Variable, amp.Variable]:
    """Convolution in fp32; batch norm, pooling, the dense layer and the loss inside ``fp16_guard``.

    ``cross_entropy`` applies the softmax itself, so it takes the dense layer's output as it is.
    """
    image = amp.data("image", [None, 1, 8, 8], "float32")
    label = amp.data("label", [None, 1], "int64")
    conv = amp.nn.conv2d(image, num_filters=6, filter_size=3)
    with amp.fp16_guard():
        normed = amp.nn.batch_norm(conv, act="relu")
        pool = F.max_pool2d(normed, kernel_size=2, stride=2)
        scores = amp.nn.fc(pool, size=10)
        loss = F.cross_entropy(scores, label, reduction="mean")
    return image, label, scores, loss


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 pixels in [0, 1]; every fifth is held out for the test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = (data.images[:, None] / 16).astype(np.float32)
    labels = data.target[:, None].astype(np.int64)
    held_out = np.arange(len(images)) % 5 == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


def save(trained: training.Trained, path: Path) -> None:
    """Write the trained model as ONNX."""
    image = trained.test_program.var(trained.image)
    prediction = trained.test_program.var(trained.prediction)
    with amp.scope_guard(trained.scope):
        amp.save_inference_model(str(path), [image], [prediction], trained.executor, trained.test_program)


def serve(path: Path, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of right answers of a saved model, run with nothing but onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: images})
    return float((np.argmax(scores, -1) == labels[:, 0]).mean())


def main() -> int:
    """Run the demo; the exit code is 0 when every mode learned."""
    parser = training.arguments("Train on real handwritten digits in fp32, mixed and pure 16-bit precision.", epochs=25)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture and the model")
    options = parser.parse_args()
    training.check_ranks(options.batch_size)
    train, test = digits()
    task = training.Task(network, train, test, learning_rate=0.005, black_list=("pool2d",), incr_every_n_steps=100)
    modes = training.MODES if options.mode == "all" else (options.mode,)
    progress = training.bar()
    runs = [training.fit(task, mode, options, progress) for mode in modes]
    histories = [run.history for run in runs]
    print(training.table(histories))
    if amp.distributed.rank():
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "quickstart.png"
    training.plot(histories, str(picture), "scikit-learn digits")
    print(f"picture: {picture}")
    for mode, trained in zip(modes, runs, strict=True):
        model = options.out / f"quickstart_{mode}.onnx"
        save(trained, model)
        if options.dtype == "bfloat16" and mode != "fp32":
            told = "for a CUDA device: onnxruntime has no bfloat16 arithmetic on CPU"
        else:
            told = f"served by bare onnxruntime: {serve(model, *test):.2%} right"
        print(f"model:   {model} ({os.path.getsize(model):,} bytes), {told}")
    return 0


if __name__ == "__main__":
    sys.exit(training.guarded(main))
