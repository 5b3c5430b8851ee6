"""Extractive question answering: a small BERT on SQuAD in fp32, by the BERT recipe, and in pure 16 bit.

    python demo/bert_squad.py --data DIR --vocab DIR               # train on squad11_train, score on squad11_dev
    python demo/bert_squad.py --data DIR --vocab DIR --overfit 64  # until 90 % of 64 windows are right
    python demo/bert_squad.py --synthetic --mode pure         # synthetic text, no file needed
    python demo/bert_squad.py ... --model encoder.onnx             # fine-tune an exported encoder
    mpiexec -n 2 python demo/bert_squad.py ...                     # two ranks, each of which takes half of a batch

All three modes take about five minutes on two cores. A network of this size that starts from nothing hardly learns to
read: its scores compare precisions, not models. ``--layers 12 --hidden 768 --heads 12 --seq-len 384 --doc-stride 128
--dropout 0.1 --lr 5e-5`` is BERT-base.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import encoder
import numpy as np
import squad
import training

import amp_transpiler as amp

MODES = ("fp32", "recipe", "pure")


@dataclass
class Run:
    """One training run: the programs, and what happened in it."""

    mode: str
    model: encoder.Model
    optimizer: Any
    executor: amp.Executor
    scope: amp.Scope
    fetches: list[str]
    loss: list[float] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0
    scores: tuple[float, float] = (float("nan"), float("nan"))


def prepare(mode: str, options: argparse.Namespace, pieces: squad.Pieces) -> Run:
    """Build the training and test programs of one mode and initialise their parameters."""
    pure = mode == "pure"
    model = encoder.imported(options) if options.model else encoder.built(options, pieces.size)
    model.main.seed = model.startup.seed = options.seed
    with amp.program_guard(model.main, model.startup):
        optimizer: Any = amp.optimizer.AdamW(
            options.lr, weight_decay=0.01, multi_precision=pure, grad_clip=amp.optimizer.ClipGradByGlobalNorm(1.0)
        )
        if mode != "fp32":
            lists = amp.AutoMixedPrecisionLists(preset="bert_pure" if pure else "bert", dtype=options.dtype)
            optimizer = amp.decorate(
                optimizer, lists, use_pure_fp16=pure, dtype=options.dtype, **training.scaling(options)
            )
        optimizer.minimize(model.loss, model.startup)
    executor, scope = amp.Executor(training.place_of(options.place), threads=options.threads), amp.Scope()
    executor.run(model.startup, scope=scope)
    fetches = [model.loss.name]
    if mode != "fp32":
        optimizer.amp_init(training.place_of(options.place), scope=scope, test_program=model.test, use_fp16_test=True)
        found = (optimizer.get_loss_scaling(), optimizer.get_found_inf())
        fetches += [v.name for v in found if v is not None]
    return Run(mode, model, optimizer, executor, scope, fetches)


def step(run: Run, batch: squad.Windows, rate: float) -> None:
    """One training step at learning rate ``rate``."""
    feed = run.model.feed(batch) | {"start": batch.start, "end": batch.end}
    begin = time.perf_counter()
    run.optimizer.set_lr(rate, run.scope)
    values = run.executor.run(run.model.main, feed=feed, fetch_list=run.fetches, scope=run.scope)
    if run.loss:  # the first step makes the session
        run.seconds += time.perf_counter() - begin
    run.loss.append(training.mean_over_ranks(float(np.ravel(values[0])[0])))
    run.scale.append(float(np.ravel(values[1])[0]) if len(values) > 1 else 1.0)
    run.skipped += bool(np.ravel(values[2])[0]) if len(values) > 2 else 0


def answers(
    run: Run, data: squad.Windows, questions: list[squad.Question], options: argparse.Namespace
) -> dict[int, str]:
    """The model's answer to every question that ``data`` holds windows of; each rank reads its part of these."""
    own = np.array_split(np.arange(len(data)), amp.distributed.world_size())[amp.distributed.rank()]
    logits = [np.zeros((0, 2, options.seq_len), np.float32)]
    size = encoder.share(options)
    for begin in range(0, len(own), size):
        rows = np.resize(own[begin : begin + size], size)  # filled up: the shape is fixed
        feed = run.model.feed(data.pick(rows))
        found = run.executor.run(run.model.test, feed=feed, fetch_list=run.model.logits, scope=run.scope)
        logits.append(np.stack(found, 1).astype(np.float32)[: len(own) - begin])
    start, end = np.concatenate(training.gathered(np.concatenate(logits))).transpose(1, 0, 2)
    return squad.best_spans(data, start, end, questions)


def rates(options: argparse.Namespace, steps: int) -> np.ndarray:
    """The learning rate of every step: up over the first tenth, then straight down (Devlin et al. 2019)."""
    place = (np.arange(steps) + 1) / (steps + 1)
    return options.lr * np.minimum(place / options.warmup, (1 - place) / (1 - options.warmup))


def train(run: Run, data: squad.Windows, options: argparse.Namespace, progress: Any) -> None:
    """Whole batches of ``data`` in a new order each epoch; ``--steps`` ends it early."""
    per_epoch = len(data) // options.batch
    if not per_epoch:
        raise SystemExit(f"error: {len(data)} windows with an answer are less than a batch of {options.batch}")
    steps = min(options.steps or options.epochs * per_epoch, options.epochs * per_epoch)
    plan = rates(options, steps)
    for epoch in range(options.epochs):
        for batch in amp.distributed.batches(len(data), options.batch, epoch, options.seed, drop_last=True):
            number = epoch * per_epoch + batch.number
            if number == steps:
                return
            step(run, data.pick(batch.rows), plan[number])
            progress(run.mode, number + 1, steps, run.loss[-1])


def overfit(run: Run, data: squad.Windows, questions: list[squad.Question], options: argparse.Namespace) -> int:
    """Train on the first windows until 90 % of their answers are right; the steps that it took, 0 where it failed."""
    data = data.pick(slice(0, options.overfit))
    if len(data) < options.overfit:
        raise SystemExit(
            f"error: --overfit {options.overfit} needs as many windows with an answer; there are {len(data)}"
        )
    asked = [questions[q] for q in data.question]
    data.question = np.arange(len(data))  # each window is a question of its own
    rng, limit = np.random.default_rng(options.seed), options.steps or 2000
    for number in range(1, limit + 1):
        rows = np.resize(rng.permutation(len(data)), options.batch)  # fewer than a batch come more than once
        rows = rows[amp.distributed.rank() :: amp.distributed.world_size()]
        step(run, data.pick(rows), options.lr * min(1.0, number / 50))
        if number % 20 == 0 or number == limit:
            run.scores = squad.score(answers(run, data, asked, options), asked)
            if run.scores[0] >= 90:
                return number
    return 0


def kept_fp32(program: amp.Program) -> str:
    """A table of the forward operators that compute in fp32: how many of which type, and why."""
    counts: dict[tuple[str, str], int] = {}
    for op in program.operators:
        if op.role == "forward" and op.reason.startswith("fp32: "):
            why = op.reason.removeprefix("fp32: ")
            why = "follows what is fp32" if why.startswith("follows ") else why.replace(op.name or "\0", "it")
            counts[op.type, why] = counts.get((op.type, why), 0) + 1
    rows = [f"  {count:>4} {type_:<26} {why}" for (type_, why), count in sorted(counts.items())]
    return "\n".join(rows) or "  nothing"


def table(runs: list[Run], batch: int) -> str:
    """One row a mode."""
    rows = [
        f"{'mode':<10} {'exact match':>11} {'F1':>7} {'final loss':>11} {'loss scale':>11} {'skipped':>8} "
        f"{'steps':>6} {'examples/s':>11}"
    ]
    for run in runs:
        speed = (len(run.loss) - 1) * batch / run.seconds if run.seconds else float("nan")
        rows.append(
            f"{run.mode:<10} {run.scores[0]:>11.2f} {run.scores[1]:>7.2f} {np.mean(run.loss[-20:]):>11.4f} "
            f"{run.scale[-1]:>11g} {run.skipped:>8d} {len(run.loss):>6d} {speed:>11.1f}"
        )
    return "\n".join(rows)


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else "", formatter_class=training.Help
    )
    parser.add_argument("--data", type=Path, default=Path("data/squad"), help="folder with SQuAD v1.1")
    parser.add_argument("--vocab", type=Path, default=Path("data/bert_vocab"), help="folder with BERT's vocab.txt")
    parser.add_argument("--synthetic", action="store_true", help="synthetic text instead of SQuAD")
    parser.add_argument("--model", type=Path, help="exported encoder that gives last_hidden_state, to fine-tune")
    training.add_precision_options(parser, MODES)
    for name, value in (
        ("layers", 2),
        ("hidden", 64),
        ("heads", 2),
        ("seq-len", 128),
        ("doc-stride", 64),
        ("batch", 32),
        ("epochs", 3),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--warmup", type=float, default=0.1, help="share of the steps in which the rate rises")
    parser.add_argument("--dropout", type=float, default=0.0, help="BERT's is 0.1; little data learns more without")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps (0: after all epochs)")
    parser.add_argument("--limit", type=int, default=0, help="use only so many questions of each part (0: all)")
    parser.add_argument("--overfit", type=int, default=0, help="train on so many windows until 90 %% are right")
    return parser


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """The options; SystemExit for those that cannot work."""
    training.check_precision_options(options, ("layers", "hidden", "heads", "seq_len", "doc_stride", "batch", "epochs"))
    if not 0 < options.warmup < 1:
        raise SystemExit("error: --warmup lies between 0 and 1")
    if options.model:
        encoder.adopt_sizes(options)
    training.check_ranks(options.batch)
    return options


def load(options: argparse.Namespace) -> tuple[list[squad.Question], list[squad.Question], squad.Pieces]:
    """Training questions, test questions, and the tokeniser."""
    if options.synthetic:
        (train_set, pieces), (test_set, _) = squad.synthetic(options.limit or 2000, 0), squad.synthetic(200, 1)
        return train_set, test_set, pieces
    train_set, test_set = (squad.read_questions(options.data, part) for part in ("train", "dev"))
    limit = options.limit or None
    return train_set[:limit], test_set[:limit], squad.wordpiece(options.vocab)


def main() -> int:
    """Run the demo; the exit code is 1 where ``--overfit`` did not reach 90 %."""
    options = checked(arguments().parse_args())
    train_set, test_set, pieces = load(options)
    data = squad.windows(train_set, pieces, options.seq_len, options.doc_stride)
    data = data.pick(data.start >= 0)
    modes = MODES if options.mode == "all" else (options.mode,)
    test = None if options.overfit else squad.windows(test_set, pieces, options.seq_len, options.doc_stride)
    print(f"windows: {len(data)} with an answer to train on, {len(test) if test else 0} to score on", flush=True)
    progress, runs, failed = training.bar(), [], False
    for mode in modes:
        run = prepare(mode, options, pieces)
        if test is None:
            taken = overfit(run, data, train_set, options)
            failed |= not taken
            print(f"{mode}: {run.scores[0]:.1f} % right after {taken or 'all'} steps", flush=True)
        else:
            train(run, data, options, progress)
            run.scores = squad.score(answers(run, test, test_set, options), test_set)
        if mode != "fp32":
            print(f"{mode}: what stayed in fp32\n{kept_fp32(run.model.main)}", flush=True)
        runs.append(run)
    print(table(runs, options.batch))
    return int(failed)


if __name__ == "__main__":
    sys.exit(training.guarded(main))
