"""Full MNIST with a two-convolution network, in fp32, mixed and pure 16-bit precision.

    python demo/mnist.py --data DIR --mode pure --epochs 3

DIR holds the four standard idx files (``train-images-idx3-ubyte`` …), plain, ``.gz`` or ``.xz``; missing
ones are downloaded where the network allows it.
"""

from __future__ import annotations

import gzip
import lzma
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import training

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_OPEN = {"": open, ".gz": gzip.open, ".xz": lzma.open}


def network() -> tuple[amp.Variable, amp.Variable, amp.Variable, amp.Variable]:
    """conv 32, pool, conv 64, pool, dense 128, dense 10; everything but the data inside the guard."""
    image = amp.data("image", [None, 1, 28, 28], "float32")
    label = amp.data("label", [None, 1], "int64")
    with amp.fp16_guard():
        h = F.max_pool2d(amp.nn.conv2d(image, 32, 3, padding=1, act="relu"), 2, 2)
        h = F.max_pool2d(amp.nn.conv2d(h, 64, 3, padding=1, act="relu"), 2, 2)
        logits = amp.nn.fc(amp.nn.fc(h, 128, act="relu"), 10)
        loss = F.cross_entropy(logits, label)
    return image, label, logits, loss


def read_idx(folder: Path, name: str) -> np.ndarray:
    """One idx file as an array of unsigned bytes."""
    for suffix, opener in _OPEN.items():
        path = folder / (name + suffix)
        if path.exists():
            with opener(path, "rb") as file:
                content = file.read()
            break
    else:
        content = gzip.decompress(_download(folder, name))
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise SystemExit(f"error: {folder / name}* is not an idx file of unsigned bytes")
    rank = content[3]
    shape = np.frombuffer(content, ">i4", rank, 4)
    data = np.frombuffer(content, np.uint8, offset=4 + 4 * rank)
    if data.size != int(np.prod(shape)):
        raise SystemExit(f"error: {folder / name}* is cut short: {data.size} of {int(np.prod(shape))} bytes")
    return data.reshape(shape)


def _download(folder: Path, name: str) -> bytes:
    print(f"downloading {name}.gz into {folder}", file=sys.stderr)
    try:
        with urllib.request.urlopen(MIRROR + name + ".gz", timeout=30) as answer:
            content = answer.read()
    except (urllib.error.URLError, OSError) as error:
        raise SystemExit(
            f"error: {folder} has no {name}[.gz|.xz], and downloading it failed ({error}). "
            "Put the four MNIST idx files there and pass --data"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{name}.gz.part"
    part.write_bytes(content)
    part.rename(folder / f"{name}.gz")
    return content


def mnist(folder: Path) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(train images, labels), (test images, labels); images [n, 1, 28, 28] float32, standardised."""
    result = []
    for part in ("train", "t10k"):
        images = read_idx(folder, f"{part}-images-idx3-ubyte")[:, None].astype(np.float32)
        labels = read_idx(folder, f"{part}-labels-idx1-ubyte").astype(np.int64)[:, None]
        result.append(((images / 255 - np.float32(0.1307)) / np.float32(0.3081), labels))
    return result[0], result[1]


def main() -> int:
    """Run the demo."""
    parser = training.arguments("Train on full MNIST in fp32, mixed or pure 16-bit precision.", epochs=3)
    parser.add_argument("--data", type=Path, default=Path("data/mnist"), help="folder with the four idx files")
    parser.add_argument("--limit", type=int, default=0, help="use only this many training images (0: all)")
    options = parser.parse_args()
    training.check_ranks(options.batch_size)
    train, test = mnist(options.data)
    if options.limit:
        train = train[0][: options.limit], train[1][: options.limit]
    task = training.Task(network, train, test, decay=0.4, init_loss_scaling=2.0**15)
    modes = training.MODES if options.mode == "all" else (options.mode,)
    progress = training.bar()
    print(training.table([training.fit(task, mode, options, progress).history for mode in modes]))
    return 0


if __name__ == "__main__":
    sys.exit(training.guarded(main))
