"""Recommenders with sparse tables beside dense layers, in fp32, mixed and pure 16-bit precision.

    python demo/recommender.py                            # DeepFM on synthetic clicks, no file needed
    python demo/recommender.py --data DIR                 # DIR with MovieTweetings: two towers; with UCI Adult: DeepFM
    python demo/recommender.py --data criteo --rows 1000000 --table-rows 5000000
    mpiexec -n 2 python demo/recommender.py               # the same on two ranks, each of which takes half of a batch

A step works on the rows of the tables that its batch looks up. Tables and dense layers have optimizers of their own,
under one loss scale: a gradient that is not finite in either leaves both as they are.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import tabular
import training

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

Net = tuple[amp.Variable, amp.Variable]


def two_towers(sizes: dict[str, int], most: int, width: int, mean: float) -> Net:
    """A vector of the user and one of the film, and what each is liked by itself; (rating, loss).

    The film's vector is made of its own row and of the bag of its genres, row 0 of which fills up.
    """
    user, film = amp.data("user", [None, 1], "int64"), amp.data("film", [None, 1], "int64")
    genres, label = amp.data("genres", [None, most], "int64"), amp.data("label", [None, 1], "float32")
    small = amp.nn.initializer.Normal(0.0, 0.05)

    def row(ids: amp.Variable, rows: int, columns: int, name: str) -> amp.Variable:
        found = amp.nn.embedding(ids, [rows, columns], is_sparse=True, param_attr=amp.ParamAttr(name, small))
        return found.reshape([-1, columns])

    bag = amp.nn.embedding_bag(
        genres,
        [sizes["genres"], width],
        mode="mean",
        padding_idx=0,
        is_sparse=True,
        param_attr=amp.ParamAttr("of_genres", small),
    )
    left, right = row(user, sizes["users"], width, "of_users"), row(film, sizes["films"], width, "of_films")
    with amp.fp16_guard():
        left = amp.nn.fc(amp.nn.fc(left, 2 * width, act="relu"), width)
        right = amp.nn.fc(amp.nn.fc(F.concat([right, bag], axis=1), 2 * width, act="relu"), width)
    liked = row(user, sizes["users"], 1, "liking") + row(film, sizes["films"], 1, "liked")
    rating = F.cast(F.sum(left * right, axis=1, keepdim=True), "float32") + liked + mean
    return rating, F.mse_loss(rating, label)


def deep_fm(rows: int, fields: int, numbers: int, width: int) -> Net:
    """DeepFM (Guo et al. 2017): a weight for each id, products of their vectors, and dense layers; (logit, loss).

    A row of the table is an id's weight and its vector: of a large table both are then one access to memory.
    """
    ids, dense = amp.data("ids", [None, fields], "int64"), amp.data("dense", [None, numbers], "float32")
    label = amp.data("label", [None, 1], "float32")
    small = amp.nn.initializer.Normal(0.0, 0.01)
    found = amp.nn.embedding(ids, [rows, width], is_sparse=True, param_attr=amp.ParamAttr("of_ids", small))
    weights, vectors = found[:, :, :1], found[:, :, 1:]
    total = F.sum(vectors, axis=1)
    products = F.sum(total * total - F.sum(vectors * vectors, axis=1), axis=1, keepdim=True) * 0.5
    with amp.fp16_guard():
        h = F.concat([vectors.reshape([-1, fields * (width - 1)]), dense], axis=1)
        deep = amp.nn.fc(amp.nn.fc(amp.nn.fc(h, 64, act="relu"), 32, act="relu"), 1)
    logit = F.sum(weights, axis=1) + products + F.cast(deep, "float32") + amp.nn.fc(dense, 1)
    return logit, F.bce_with_logits(logit, label)


@dataclass
class Run:
    """One training: the programs, and what happened in it."""

    mode: str
    main: amp.Program
    test: amp.Program
    score: amp.Variable
    scope: amp.Scope
    executor: amp.Executor
    optimizer: Any
    fetches: list[Any]
    loss: list[float]
    seconds: list[float]
    scale: float = 1.0
    skipped: int = 0
    result: float = float("nan")


def prepare(mode: str, data: tabular.Data, options: argparse.Namespace) -> Run:
    """Build the programs of one mode: tables and dense layers apart, each with its optimizer."""
    main, startup = amp.Program(), amp.Program("startup")
    main.seed = startup.seed = options.seed
    with amp.program_guard(main, startup), amp.unique_name.guard():
        features = data.train.features
        if "film" in features:
            score, loss = two_towers(data.sizes, features["genres"].shape[1], options.width, data.train.label.mean())
        else:
            shape = features["ids"].shape[1], features["dense"].shape[1]
            score, loss = deep_fm(data.sizes["ids"], *shape, options.width)
        test = main.clone(for_test=True)
        tables, others = amp.split_embedding_parameters(main)
        pure = mode == "pure"
        of_tables = amp.optimizer.Adagrad(options.table_lr, row_wise=True, parameter_list=tables, multi_precision=pure)
        of_others = amp.optimizer.Adam(options.lr, parameter_list=others, multi_precision=pure)
        if mode == "fp32":
            pairs = of_others.backward(loss, startup, parameter_list=[*tables, *others])
            names = {table.name for table in tables}
            of_tables.apply_gradients([pair for pair in pairs if pair[0].name in names])
            of_others.apply_gradients([pair for pair in pairs if pair[0].name not in names])
            optimizer: Any = None
        else:
            lists = amp.AutoMixedPrecisionLists(dtype=options.dtype)
            scaling = {"init_loss_scaling": 2.0**12} if options.dtype == "float16" else {}
            optimizer = amp.decorate([of_tables, of_others], lists, use_pure_fp16=pure, dtype=options.dtype, **scaling)
            optimizer.minimize(loss, startup)
    executor, scope = amp.Executor(training.place_of(options.place)), amp.Scope()
    executor.run(startup, scope=scope)
    fetches = [loss]
    if optimizer is not None:
        optimizer.amp_init(training.place_of(options.place), scope=scope, test_program=test, use_fp16_test=True)
        fetches += [v for v in (optimizer.get_loss_scaling(), optimizer.get_found_inf()) if v is not None]
    return Run(mode, main, test, score, scope, executor, optimizer, fetches, [], [])


def train(run: Run, data: tabular.Data, options: argparse.Namespace, progress: Any) -> None:
    """All epochs; each rank takes its share of every batch."""
    steps, size = len(data.train) // options.batch_size, options.batch_size
    if not steps:
        raise SystemExit(f"error: --batch-size {size} is more than the {len(data.train)} examples to train on")
    for epoch in range(options.epochs):
        for batch in amp.distributed.batches(len(data.train), size, epoch, options.seed, drop_last=True):
            feed = data.train.feed(batch.rows)
            begin = time.perf_counter()
            values = run.executor.run(run.main, feed=feed, fetch_list=run.fetches, scope=run.scope)
            run.seconds.append(time.perf_counter() - begin)
            run.loss.append(training.mean_over_ranks(float(np.ravel(values[0])[0])))
            run.scale = float(np.ravel(values[1])[0]) if len(values) > 1 else 1.0
            run.skipped += bool(np.ravel(values[2])[0]) if len(values) > 2 else 0
            progress(run.mode, epoch * steps + batch.number + 1, options.epochs * steps, run.loss[-1])


def predict(run: Run, examples: tabular.Examples, size: int = 4096) -> np.ndarray:
    """The scores of all examples, on every rank; each computes its part."""
    own = np.array_split(np.arange(len(examples)), amp.distributed.world_size())[amp.distributed.rank()]
    found = [np.zeros((0, 1), np.float32)]
    for begin in range(0, len(own), size):
        feed = examples.feed(own[begin : begin + size])
        del feed["label"]
        found += run.executor.run(run.test, feed=feed, fetch_list=[run.score.name], scope=run.scope)
    return np.concatenate(training.gathered(np.concatenate(found)))


def table(runs: list[Run], name: str, data: tabular.Data) -> str:
    """A row for each mode, and for what needs no network."""
    rows = [f"{'mode':<24} {'test ' + name:>10} {'final loss':>11} {'loss scale':>11} {'skipped':>8} {'ms/step':>8}"]
    for run in runs:
        rows.append(
            f"{run.mode:<24} {run.result:>10.4f} {np.mean(run.loss[-100:]):>11.4f} {run.scale:>11g} {run.skipped:>8d} "
            f"{1e3 * float(np.median(run.seconds)):>8.2f}"
        )
    return "\n".join(rows + [f"{what:<24} {value:>10.4f}" for what, value in data.baselines.items()])


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = training.arguments("Train recommenders with sparse tables in fp32, mixed or pure 16 bit.", epochs=0)
    parser.set_defaults(batch_size=256)
    parser.add_argument("--data", default="criteo", help="criteo (synthetic), or a folder with MovieTweetings or Adult")
    parser.add_argument("--rows", type=int, default=100_000, help="examples of the synthetic data")
    parser.add_argument("--table-rows", type=int, default=100_000, help="ids of the synthetic data")
    parser.add_argument("--width", type=int, default=16, help="numbers in a row of a table")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of the dense layers")
    parser.add_argument("--table-lr", type=float, default=0.0, help="learning rate of the tables")
    parser.epilog = "--epochs and --table-lr of 0 take what suits the data."
    return parser


def main() -> int:
    """Run the demo."""
    options = arguments().parse_args()
    training.check_ranks(options.batch_size)
    for name, least in (("rows", 1000), ("table_rows", 1000), ("width", 2), ("epochs", 0), ("batch_size", 1)):
        if getattr(options, name) < least:
            raise SystemExit(f"error: --{name.replace('_', '-')} must be at least {least}")
    data = tabular.load(options.data, options.rows, options.table_rows)
    options.epochs = options.epochs or data.epochs
    options.table_lr = options.table_lr or data.table_lr
    sizes = ", ".join(f"{name} {size:,}" for name, size in data.sizes.items())
    print(
        f"examples: {len(data.train):,} to train on, {len(data.test):,} to score; rows of tables: {sizes}", flush=True
    )
    score, name = (tabular.rmse, "RMSE") if "film" in data.train.features else (tabular.auc, "AUC")
    progress, runs = training.bar(), []
    for mode in training.MODES if options.mode == "all" else (options.mode,):
        run = prepare(mode, data, options)
        train(run, data, options, progress)
        run.result = score(predict(run, data.test), data.test.label)
        if amp.distributed.world_size() > 1:
            amp.distributed.check_equal(run.main, run.scope)
        runs.append(run)
    print(table(runs, name, data))
    return 0


if __name__ == "__main__":
    sys.exit(training.guarded(main))
