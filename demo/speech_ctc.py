"""Strings of spoken digits transcribed by convolutions, a recurrent network and CTC, in fp32, mixed and pure 16 bit.

    python demo/speech_ctc.py --data DIR                     # three modes in a few minutes on two cores
    python demo/speech_ctc.py --synthetic --mode pure   # telephone tones for digits, no file needed

DIR holds the recordings of the Free Spoken Digit Dataset; five takes of each digit by each speaker are held out.
``--hidden 256 --layers 3 --longest 7 --buckets 160 320 480 640 --epochs 60`` is larger.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import spoken
import training

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

#: Both convolutions halve time and frequency.
STRIDE = 4


def network(options: argparse.Namespace) -> tuple[amp.Variable, amp.Variable]:
    """Logits [steps, batch, CLASSES] and loss. The layers are inside ``fp16_guard``; logits and loss stay fp32."""
    features = amp.data("features", [None, 1, None, spoken.BANDS], "float32")
    steps, symbols = (amp.data(name, [None], "int32") for name in ("steps", "symbols"))
    labels = amp.data("labels", [None, options.longest], "int64")
    with amp.fp16_guard():
        h = amp.nn.conv2d(features, options.channels, 3, stride=2, padding=1, bias_attr=False)
        h = amp.nn.batch_norm(h, act="relu")
        h = amp.nn.conv2d(h, options.channels, 3, stride=2, padding=1, bias_attr=False)
        h = amp.nn.batch_norm(h, act="relu")
        h = F.reshape(F.transpose(h, [2, 0, 1, 3]), [0, 0, options.channels * (spoken.BANDS // STRIDE)])
        h = F.dropout(h, options.dropout)
        layer = amp.nn.gru if options.cell == "gru" else amp.nn.lstm
        h = layer(h, options.hidden, options.layers, "bidirectional", time_major=True, sequence_length=steps)[0]
        h = F.dropout(h, options.dropout)
    logits = amp.nn.fc(h, spoken.CLASSES, num_flatten_dims=2, name="logits")
    return logits, F.ctc_loss(logits, labels, steps, symbols, blank=spoken.BLANK)


def steps_of(frames: np.ndarray) -> np.ndarray:
    """How many steps the convolutions leave of so many frames."""
    return (-(-frames // STRIDE)).astype(np.int32)


@dataclass
class Run:
    """One training run: the programs, and what happened in it."""

    mode: str
    main: amp.Program
    test: amp.Program
    logits: str
    optimizer: Any
    executor: amp.Executor
    scope: amp.Scope
    fetches: list[str]
    loss: list[float] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)
    skipped: int = 0
    speeds: list[float] = field(default_factory=list)
    error: float = float("nan")


def prepare(mode: str, options: argparse.Namespace) -> Run:
    """Build the training and test programs of one mode and initialise their parameters."""
    main, startup = amp.Program(), amp.Program("startup")
    main.seed = startup.seed = options.seed
    pure, place = mode == "pure", training.place_of(options.place)
    with amp.program_guard(main, startup), amp.unique_name.guard():
        logits, loss = network(options)
        test = main.clone(for_test=True)
        optimizer: Any = amp.optimizer.Adam(
            options.lr, multi_precision=pure, grad_clip=amp.optimizer.ClipGradByGlobalNorm(5.0)
        )
        if mode != "fp32":
            lists = amp.AutoMixedPrecisionLists(custom_black_varnames=["logits.w_0"], dtype=options.dtype)
            optimizer = amp.decorate(
                optimizer, lists, use_pure_fp16=pure, dtype=options.dtype, **training.scaling(options)
            )
        optimizer.minimize(loss, startup)
    executor, scope = amp.Executor(place, threads=options.threads), amp.Scope()
    executor.run(startup, scope=scope)
    fetches = [loss.name]
    if mode != "fp32":
        optimizer.amp_init(place, scope=scope, test_program=test, use_fp16_test=True)
        fetches += [v.name for v in (optimizer.get_loss_scaling(), optimizer.get_found_inf()) if v is not None]
    return Run(mode, main, test, logits.name, optimizer, executor, scope, fetches)


def sizes_of(options: argparse.Namespace) -> spoken.Sizes:
    """The sizes of all batches."""
    return spoken.Sizes(options.batch_size, options.longest, tuple(sorted(options.buckets)))


def step(run: Run, batch: spoken.Batch, rate: float) -> None:
    """One training step at learning rate ``rate``."""
    feed = {
        "features": batch.features,
        "steps": steps_of(batch.frames),
        "labels": batch.labels,
        "symbols": batch.symbols.astype(np.int32),
    }
    begin = time.perf_counter()
    run.optimizer.set_lr(rate, run.scope)
    values = run.executor.run(run.main, feed=feed, fetch_list=run.fetches, scope=run.scope)
    run.speeds.append(len(batch.frames) / (time.perf_counter() - begin))
    run.loss.append(float(np.ravel(values[0])[0]))
    run.scale.append(float(np.ravel(values[1])[0]) if len(values) > 1 else 1.0)
    run.skipped += bool(np.ravel(values[2])[0]) if len(values) > 2 else 0


def rates(options: argparse.Namespace, steps: int) -> np.ndarray:
    """The learning rate of every step: up over the first tenth, then down to 0 on half a cosine."""
    place = (np.arange(steps) + 0.5) / steps
    return options.lr * np.minimum(place / 0.1, (1 + np.cos(np.pi * place)) / 2)


def epoch_of(
    data: spoken.Recordings, features: spoken.Features, options: argparse.Namespace, number: int
) -> list[spoken.Batch]:
    """The training takes, strung together anew for each epoch."""
    rng, sizes = np.random.default_rng([options.seed, number]), sizes_of(options)
    strings = spoken.utterances(
        data, ~data.held_out, sizes, features, rng, vary=not (options.plain or options.synthetic)
    )
    return spoken.batches(strings, sizes, features, rng)


def train(
    run: Run, data: spoken.Recordings, features: spoken.Features, options: argparse.Namespace, progress: Any
) -> None:
    """Epochs until ``--steps`` are done, or as many as ``--epochs`` of the first one's size take."""
    parts = epoch_of(data, features, options, 0)
    plan, epoch = rates(options, options.steps or options.epochs * len(parts)), 0
    for number, rate in enumerate(plan, 1):
        if not parts:
            epoch += 1
            parts = epoch_of(data, features, options, epoch)
        step(run, parts.pop(), rate)
        progress(run.mode, number, len(plan), run.loss[-1])


def transcribe(
    run: Run, strings: list[spoken.Utterance], features: spoken.Features, options: argparse.Namespace
) -> list[list[int]]:
    """What the test program hears in each string."""
    heard: list[list[int]] = [[] for _ in strings]
    for batch in spoken.batches(strings, sizes_of(options), features, np.random.default_rng(0)):
        feed = {"features": batch.features, "steps": steps_of(batch.frames)}
        (logits,) = run.executor.run(run.test, feed=feed, fetch_list=[run.logits], scope=run.scope)
        for column, row in enumerate(batch.rows):
            heard[row] = spoken.greedy(logits[: feed["steps"][column], column])
    return heard


def save(run: Run, path: Path) -> None:
    """Write the test program as an ONNX model: features and steps to logits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    amp.save_inference_model(path, ["features", "steps"], [run.logits], run.executor, run.test, scope=run.scope)


def serve(path: Path, string: spoken.Utterance) -> list[int]:
    """What a saved model hears in one string, unpadded, with nothing but onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    frames = np.array([len(string.features)])
    (logits,) = session.run(None, {"features": string.features[None, None], "steps": steps_of(frames)})
    return spoken.greedy(logits[:, 0])


def table(runs: list[Run]) -> str:
    """One row a mode."""
    rows = [
        f"{'mode':<10} {'error rate':>10} {'final loss':>11} {'loss scale':>11} {'skipped':>8} {'steps':>6} "
        f"{'utterances/s':>13}"
    ]
    for run in runs:
        rows.append(
            f"{run.mode:<10} {run.error:>10.2%} {np.mean(run.loss[-20:]):>11.4f} {run.scale[-1]:>11g} "
            f"{run.skipped:>8d} {len(run.loss):>6d} {np.median(run.speeds):>13.1f}"
        )
    return "\n".join(rows)


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else "", formatter_class=training.Help
    )
    parser.add_argument("--data", type=Path, default=Path("data/fsdd"), help="folder with the recordings")
    parser.add_argument("--synthetic", action="store_true", help="telephone tones instead of recordings")
    training.add_precision_options(parser)
    parser.add_argument("--cell", choices=["gru", "lstm"], default="gru", help="the recurrent layers")
    for name, value, what in (
        ("epochs", 25, "times that every training take is heard"),
        ("steps", 0, "take so many steps instead (0: see --epochs)"),
        ("hidden", 64, "width of one direction"),
        ("layers", 1, "recurrent layers"),
        ("channels", 24, "filters of a convolution"),
        ("longest", 4, "digits in a string"),
        ("batch-size", 16, "strings in a step"),
        ("seed", 0, "of all that is random"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=what)
    parser.add_argument(
        "--buckets", type=int, nargs="+", default=[96, 160, 224, 320], help="frames of 10 ms that batches are padded to"
    )
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--dropout", type=float, default=0.2, help="before and behind the recurrent layers")
    parser.add_argument("--plain", action="store_true", help="train on the recordings as they are, not varied")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the model")
    return parser


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """The options; SystemExit for those that cannot work."""
    training.check_precision_options(options, ("epochs", "hidden", "layers", "channels", "longest", "batch_size"))
    if min(options.buckets) < 16:
        raise SystemExit(f"error: a bucket of {min(options.buckets)} frames holds no digit; give at least 16")
    return options


def main() -> int:
    """Run the demo."""
    options = checked(arguments().parse_args())
    data = spoken.synthetic(1000, 0) if options.synthetic else spoken.read(options.data)
    features = spoken.Features.of(data)
    rng, sizes = np.random.default_rng(1), sizes_of(options)  # one test for every seed: each take is heard twice
    strings = [u for _ in range(2) for u in spoken.utterances(data, data.held_out, sizes, features, rng)]
    digits = [u.digits for u in strings]
    print(
        f"takes: {(~data.held_out).sum()} to train on, {data.held_out.sum()} held out, in {len(strings)} strings "
        f"of {sum(map(len, digits))} digits",
        flush=True,
    )
    progress, runs = training.bar(), []
    for mode in training.MODES if options.mode == "all" else (options.mode,):
        run = prepare(mode, options)
        train(run, data, features, options, progress)
        run.error = spoken.error_rate(transcribe(run, strings, features, options), digits)
        runs.append(run)
    print(table(runs))
    path = options.out / "speech.onnx"
    save(runs[-1], path)
    print(f"model: {path} ({runs[-1].mode}, {path.stat().st_size:,} bytes)")
    if options.dtype == "bfloat16" and runs[-1].mode != "fp32":
        print("it needs a CUDA device: onnxruntime has no bfloat16 arithmetic on CPU")
        return 0
    said, heard = (" ".join(map(str, each)) for each in (digits[0], serve(path, strings[0])))
    print(f"bare onnxruntime hears: {heard or 'nothing'} (said: {said})")
    return 0


if __name__ == "__main__":
    sys.exit(training.guarded(main))
