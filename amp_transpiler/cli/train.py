"""``amp-transpile train``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from .. import optimizer as optimizers
from ..convert import convert as convert_model
from ..errors import ArgumentError, FeedError, ModelFileWriteError
from ..ir import names as unique_name
from ..ir.context import program_guard
from ..ir.program import Program, Variable
from ..lists import AutoMixedPrecisionLists
from ..nn import data
from ..nn import functional as F
from ..nn.initializer import set_seed
from ..optimizer import decorate
from ..prepare import prepare_training
from ..runtime import CPUPlace, CUDAPlace, Executor, Scope
from ..runtime.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint

#: Loss by name: its function, and the activation at a model's end that it applies itself.
LOSSES: dict[str, tuple[Callable[..., Variable], str]] = {
    "cross_entropy": (F.cross_entropy, "Softmax"), "mse": (F.mse_loss, ""),
    "bce_with_logits": (F.bce_with_logits, "Sigmoid"), "kl_div": (F.kl_div, ""),
}  # fmt: skip
OPTIMIZERS = {"sgd": "SGD", "momentum": "Momentum", "adam": "Adam", "adamw": "AdamW", "lamb": "Lamb"}
MODES = ("fp32", "mixed", "pure-fp16")


def run(options: argparse.Namespace) -> int:
    """Prepare, train, write; 1 where the loss is not finite at the end."""
    _check_target(options.output)
    if options.accumulate > 1 and options.mode == "fp32":
        raise ArgumentError("--accumulate goes with --mode mixed or pure-fp16, whose gradients are added up in fp32")
    set_seed(options.seed)
    training = _Training(options)
    train = _load(options.data, training)
    test = _load(options.test, training) if options.test else None
    training.compile(train.count // training.batch)
    try:
        finite = training.fit(train, test)
    except KeyboardInterrupt:
        kept = f"; the same command goes on from the checkpoint in {options.checkpoint}" if options.checkpoint else ""
        print(f"\namp-transpile: interrupted; {options.output} was not written{kept}", file=sys.stderr)
        return 130
    if not finite:
        print("amp-transpile: the loss is not finite; nothing was written. Lower --lr, or train in --mode fp32",
              file=sys.stderr)  # fmt: skip
        return 1
    training.write()
    return 0


def _check_target(path: str) -> None:
    folder = Path(path).resolve().parent
    if os.path.isdir(path) or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ModelFileWriteError(f"OUT.onnx '{path}' cannot be written: it is a folder, or its folder is missing or "
                                  "may not be written to")  # fmt: skip


@dataclass
class Samples:
    """Arrays by input name; the first dimension counts samples."""

    arrays: dict[str, np.ndarray]
    count: int

    def batches(self, size: int, rng: np.random.Generator | None) -> Iterator[dict[str, np.ndarray]]:
        """Whole batches, shuffled where there is a generator."""
        order = np.arange(self.count) if rng is None else rng.permutation(self.count)
        for start in range(0, self.count - size + 1, size):
            rows = np.sort(order[start : start + size])
            yield {name: np.ascontiguousarray(array[rows]) for name, array in self.arrays.items()}


def _load(source: str, training: _Training) -> Samples:
    """The arrays of an npz file, or of a folder of npy files (mapped, not read)."""
    path = Path(source)
    try:
        if path.is_dir():
            arrays = {file.stem: np.load(file, mmap_mode="r") for file in sorted(path.glob("*.npy"))}
        else:
            arrays = dict(np.load(path))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"'{source}' cannot be read as an npz file or a folder of npy files: {error}") from None
    needed = [v.name for v in training.program.inputs]
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise FeedError(f"'{source}' has no array '{missing[0]}'; the program is fed {', '.join(needed)}, and there is "
                        f"{', '.join(arrays) or 'nothing'}")  # fmt: skip
    counts = {name: len(arrays[name]) for name in needed}
    if len(set(counts.values())) != 1:
        raise FeedError(f"'{source}': arrays differ in the number of samples: {counts}")
    count = next(iter(counts.values()))
    if count < training.batch:
        raise FeedError(f"'{source}' holds {count} samples, fewer than a batch of {training.batch}")
    return Samples({name: arrays[name] for name in needed}, count)


class _Training:
    """The programs of one run, and what runs them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.program = Program.from_onnx(options.input)
        self.place = CUDAPlace(0) if options.place == "cuda" else CPUPlace()
        told = prepare_training(
            self.program, trainable=options.trainable, freeze=options.freeze or (), batch_norm=options.batch_norm,
            dropout=_pairs(options.dropout, "--dropout", float), values=_pairs(options.value, "--value", _number),
        )  # fmt: skip
        self._say(str(told))
        self.model = self.program.clone(for_test=True)
        self.batch = self._batch()
        self.loss = self._attach()
        self.evaluation = self.program.clone(for_test=True)

    def compile(self, steps: int) -> None:
        """Append the training step and initialise; ``steps`` is the number of batches in an epoch."""
        options = self.options
        self.optimizer = self._optimizer(max(options.epochs * steps // options.accumulate, 1))
        with program_guard(self.program, self.program.startup), unique_name.guard():
            self.optimizer.minimize(self.loss, self.program.startup)
        self.scope, self.executor = Scope(), Executor(self.place)
        self.executor.run(self.program.startup, scope=self.scope)
        if options.mode != "fp32":
            self.optimizer.amp_init(self.place, scope=self.scope, test_program=self.evaluation, use_fp16_test=True)

    def _say(self, text: str) -> None:
        if not self.options.quiet:
            print(text)

    def _batch(self) -> int:
        sizes = {v.shape[0] for v in self.program.inputs if v.shape}
        fixed = next((size for size in sizes if isinstance(size, int)), None)
        wanted = self.options.batch_size
        if fixed is not None and wanted not in (None, fixed):
            raise ArgumentError(f"--batch-size {wanted}: the model was exported with a fixed batch of {fixed}; export "
                                "it with a dynamic batch, or leave the option out")  # fmt: skip
        return int(fixed or wanted or 32)

    def _attach(self) -> Variable:
        """The loss on the chosen output, behind the final activation where the loss applies that itself."""
        options, program = self.options, self.program
        call, applied = LOSSES[options.loss]
        floats = [v for v in program.outputs if v.dtype in ("float32", "float16", "bfloat16")]
        found = [v for v in program.outputs if v.name == options.target] if options.target else floats[:1]
        if not found:
            known = ", ".join(v.name for v in program.outputs)
            raise ArgumentError(f"--output {options.target}: the model has no such float output; it has {known}")
        out = found[0]
        if applied and out.producer is not None and out.producer.type == applied and out.producer.inputs[0] is not None:
            self._say(f"the model ends in {applied}, which {options.loss} applies itself: the loss reads its input")
            out = out.producer.inputs[0]
        with program_guard(program, program.startup), unique_name.guard():
            shape = list(out.shape or ())
            if options.loss == "cross_entropy":
                label = data(options.label, shape[:-1], "int64")
            else:
                label = data(options.label, shape, "float32")
            return call(out, label)

    def _optimizer(self, updates: int) -> Any:
        options = self.options
        kind = getattr(optimizers, OPTIMIZERS[options.optimizer])
        more: dict[str, Any] = {"multi_precision": options.mode != "fp32"}
        if options.weight_decay:
            more["lamb_weight_decay" if kind is optimizers.Lamb else "weight_decay"] = options.weight_decay
        if options.clip_norm:
            more["grad_clip"] = optimizers.ClipGradByGlobalNorm(options.clip_norm)
        base = kind(learning_rate=self._rate(updates), **more)
        if options.mode == "fp32":
            return base
        lists = AutoMixedPrecisionLists(custom_black_list=options.black_list, dtype=options.dtype)
        scaling = {"init_loss_scaling": options.loss_scale} if options.loss_scale else {}
        return decorate(base, lists, use_pure_fp16=options.mode == "pure-fp16", use_fp16_guard=False,
                        dtype=options.dtype, accumulate_steps=options.accumulate, **scaling)  # fmt: skip

    def _rate(self, updates: int) -> Any:
        """The learning rate: a number, or a schedule over so many updates."""
        options, rate = self.options, self.options.lr
        rest = max(updates - options.warmup_steps, 1)
        if options.schedule == "cosine":
            rate = optimizers.lr.CosineAnnealingDecay(rate, rest)
        elif options.schedule == "linear":
            rate = optimizers.lr.PolynomialDecay(rate, rest, end_lr=0.0)
        if options.warmup_steps:
            rate = optimizers.lr.LinearWarmup(rate, options.warmup_steps, 0.0, options.lr)
        return rate

    def _resumed(self) -> int:
        """The number of epochs that a checkpoint has behind it, which is loaded; 0 where there is none."""
        found = latest_checkpoint(self.options.checkpoint) if self.options.checkpoint else None
        if found is None:
            return 0
        done = load_checkpoint(found, self.program, self.scope).step or 0
        self._say(f"{found}: going on after epoch {done}")
        return done

    def fit(self, train: Samples, test: Samples | None) -> bool:
        """Train; whether the last loss is finite."""
        options = self.options
        fetches = [self.loss]
        found_inf = self.optimizer.get_found_inf() if options.mode != "fp32" else None
        if found_inf is not None:
            fetches += [found_inf, self.optimizer.get_loss_scaling()]
        mean = 0.0
        steps = train.count // self.batch
        for epoch in range(self._resumed() + 1, options.epochs + 1):
            rng = np.random.default_rng([options.seed, epoch])
            losses, skipped, scale = [], 0, 1.0
            shown = not options.quiet and sys.stderr.isatty()
            for feed in tqdm(train.batches(self.batch, rng), total=steps, disable=not shown, leave=False, unit="step"):
                values = self.executor.run(self.program, feed=feed, fetch_list=fetches, scope=self.scope)
                losses.append(float(np.ravel(values[0])[0]))
                if found_inf is not None:
                    skipped += int(np.ravel(values[1])[0])
                    scale = float(np.ravel(values[2])[0])
            mean = float(np.mean(losses))
            line = f"epoch {epoch}: loss {mean:.4f}"
            if found_inf is not None:
                line += f", loss scale {scale:g}, skipped steps {skipped}"
            if test is not None:
                line += f", test loss {self._evaluate(test):.4f}"
            self._say(line)
            if options.checkpoint and np.isfinite(mean):
                save_checkpoint(options.checkpoint, self.program, self.scope, step=epoch, keep_last=2)
        return bool(np.isfinite(mean))

    def _evaluate(self, test: Samples) -> float:
        losses = [self.executor.run(self.evaluation, feed=feed, fetch_list=[self.loss.name], scope=self.scope)[0]
                  for feed in test.batches(self.batch, None)]  # fmt: skip
        return float(np.mean([float(np.ravel(loss)[0]) for loss in losses]))

    def write(self) -> None:
        """The trained model for inference, from the fp32 masters, in the chosen precision."""
        model = self.model.to_onnx(scope=_Masters(self.scope))
        kept = self.options.save or self.options.mode
        if kept == "fp32":
            Program.from_onnx(model).to_onnx(self.options.output)
        else:
            convert_model(model, mode=kept, dtype=self.options.dtype).to_onnx(self.options.output)
        size = os.path.getsize(self.options.output)
        self._say(f"{self.options.output}: the trained model in {kept}, {size:,} bytes")


class _Masters:
    """A scope in which a parameter has the value of its fp32 master."""

    def __init__(self, scope: Scope) -> None:
        self.scope, self.names = scope, set(scope.var_names())

    def find_var(self, name: str) -> Any:
        """The master's value, else the variable's own."""
        master = f"{name}_fp32_master_0"
        return self.scope.find_var(master if master in self.names else name)


def _number(text: str) -> Any:
    return float(text) if any(sign in text for sign in ".eE") else int(text)


def _pairs(texts: list[str] | None, option: str, kind: Callable[[str], Any]) -> dict[str, Any]:
    pairs = {}
    for text in texts or []:
        name, equals, value = text.rpartition("=")
        try:
            pairs[name] = kind(value)
        except ValueError:
            equals = ""
        if not (name and equals):
            raise ArgumentError(f"{option} takes NAME=NUMBER, such as x=0.1, got {text!r}")
    return pairs


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""

    def many(flag: str, metavar: str, text: str) -> None:
        parser.add_argument(flag, nargs="+", action="extend", metavar=metavar, help=text)

    parser.add_argument("input", metavar="IN.onnx")
    parser.add_argument("output", metavar="OUT.onnx")
    parser.add_argument("--data", required=True, metavar="FILE", help="npz file, or folder of npy files: one array for "
                        "each input and one for the label; the first dimension counts samples")  # fmt: skip
    parser.add_argument("--test", metavar="FILE", help="data of which the loss is told after each epoch")
    parser.add_argument("--label", default="label", metavar="NAME", help="the label's array (default: %(default)s)")
    parser.add_argument("--loss", choices=LOSSES, default="cross_entropy", help="default: %(default)s")
    parser.add_argument("--output", dest="target", metavar="NAME", help="what the loss reads (default: first)")
    parser.add_argument("--mode", choices=MODES, default="mixed", help="precision to train in (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16", help="default: %(default)s")
    parser.add_argument("--save", choices=MODES, help="precision of OUT.onnx (default: as trained)")
    many("--black-list", "OP", "operators to keep in fp32")
    parser.add_argument("--loss-scale", type=float, metavar="NUMBER", help="loss scale to begin with (default: 32768)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate (default: %(default)s)")
    parser.add_argument("--weight-decay", type=float, default=0.0, help="default: %(default)s")
    parser.add_argument("--schedule", choices=["constant", "cosine", "linear"], default="constant",
                        help="of the learning rate, down to 0 at the end (default: %(default)s)")  # fmt: skip
    parser.add_argument("--warmup-steps", type=int, default=0, metavar="N", help="updates while the rate rises from 0")
    parser.add_argument("--clip-norm", type=float, metavar="NORM", help="limit of the global norm of the gradients")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches to an update")
    parser.add_argument("--checkpoint", metavar="FOLDER",
                        help="save all state there after each epoch, and go on from what lies there")  # fmt: skip
    parser.add_argument("--epochs", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, help="default: what the model has, else 32")
    many("--trainable", "PATTERN", "parameters to train, by name or by the operator that reads them (default: all)")
    many("--freeze", "PATTERN", "parameters to leave as they are")
    many("--dropout", "PATTERN=RATE", "a dropout behind each operator that matches")
    many("--value", "INPUT=NUMBER", "inputs that get one value for good")
    parser.add_argument("--batch-norm", choices=["train", "frozen"], default="train", help="default: %(default)s")
    parser.add_argument("--place", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="order of samples, dropout (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no report")
