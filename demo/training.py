"""What the demos share: one training loop, and one evaluation, over numpy arrays, on any number of ranks."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler import spelling

MODES = ("fp32", "mixed", "pure")


@dataclass
class History:
    """What a run did: one entry a step for loss and scale, one an epoch for test accuracy."""

    mode: str
    loss: list[float] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    bad_steps: int = 0
    step_seconds: list[float] = field(default_factory=list)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Says the default of each option; of one that is left out as nothing, its own help says what that means."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in (None, []) else action.help


def arguments(description: str, epochs: int) -> argparse.ArgumentParser:
    """The options that every demo takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=Help)
    add_modes(parser, MODES)
    parser.add_argument("--place", choices=["cpu", "cuda", "webgpu"], default="cpu", help="device to train on")
    parser.add_argument("--epochs", type=int, default=epochs, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(eval_batch=500)
    return parser


def add_modes(parser: argparse.ArgumentParser, modes: tuple[str, ...]) -> None:
    """The precision, by any of the spellings that the package reads."""
    mode, dtype = (partial(spelling.read_as, table) for table in (spelling.MODES, spelling.TYPES))
    parser.add_argument("--mode", choices=[*modes, "all"], type=mode, default="all", help="precision to train in")
    parser.add_argument(
        "--dtype", choices=["float16", "bfloat16"], type=dtype, default="float16", help="the 16-bit type"
    )


def add_precision_options(parser: argparse.ArgumentParser, modes: tuple[str, ...] = MODES) -> None:
    """The options of the larger demos on how to compute."""
    add_modes(parser, modes)
    parser.add_argument("--loss-scale", default="dynamic", help="dynamic, or a number for a static scale")
    parser.add_argument("--place", choices=["cpu", "cuda", "webgpu"], default="cpu", help="device to train on")
    parser.add_argument("--threads", type=int, help="threads of one operator (default: all cores)")


def check_precision_options(options: argparse.Namespace, counts: tuple[str, ...]) -> None:
    """SystemExit for a loss scale that is none, or one of ``counts`` below 1."""
    if options.loss_scale != "dynamic":
        try:
            float(options.loss_scale)
        except ValueError:
            raise SystemExit(f"error: --loss-scale is 'dynamic' or a number, not {options.loss_scale!r}") from None
    for name in counts:
        if getattr(options, name) < 1:
            raise SystemExit(f"error: --{name.replace('_', '-')} must be at least 1")


def scaling(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``decorate``: a number is a static scale; dynamic, bfloat16 needs none."""
    if options.loss_scale != "dynamic":
        return {"init_loss_scaling": float(options.loss_scale), "use_dynamic_loss_scaling": False}
    return {"incr_every_n_steps": 200} if options.dtype == "float16" else {}


def place_of(name: str) -> amp.CPUPlace | amp.CUDAPlace | amp.WebGPUPlace:
    """CPUPlace(), WebGPUPlace(0), or the CUDA device of this rank."""
    if name != "cuda":
        return amp.CPUPlace() if name == "cpu" else amp.WebGPUPlace(0)
    several = amp.distributed.world_size() > 1
    return amp.distributed.get_engine().place if several else amp.CUDAPlace(0)  # type: ignore[attr-defined]


@dataclass
class Task:
    """A network on data: ``layers()`` builds it and returns (image, label, prediction, loss)."""

    layers: Callable[[], tuple[amp.Variable, amp.Variable, amp.Variable, amp.Variable]]
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    learning_rate: float = 0.001
    decay: float = 1.0  # factor on the learning rate after each epoch
    black_list: tuple[str, ...] = ()
    init_loss_scaling: float = 128.0
    incr_every_n_steps: int = 1000


@dataclass
class Trained:
    """A finished run: its history, and what it takes to predict or to save."""

    history: History
    executor: amp.Executor
    scope: amp.Scope
    test_program: amp.Program
    image: str
    prediction: str


def fit(
    task: Task, mode: str, options: argparse.Namespace, progress: Callable[[str, int, int, float], None]
) -> Trained:
    """Train ``task`` in one mode; ``progress(mode, step, steps, loss)`` is called after each step."""
    main, startup, test = amp.Program(), amp.Program("startup"), amp.Program("test")
    startup.seed = main.seed = options.seed
    with amp.program_guard(main, startup), amp.unique_name.guard():
        image, label, _, loss = task.layers()
        optimizer = amp.optimizer.Adam(task.learning_rate, multi_precision=mode == "pure")
        if mode != "fp32":
            lists = amp.AutoMixedPrecisionLists(custom_black_list=list(task.black_list), dtype=options.dtype)
            scaling: dict[str, Any] = {}
            if options.dtype == "float16":  # bfloat16 has the range of fp32 and needs none
                scaling = {
                    "init_loss_scaling": task.init_loss_scaling,
                    "incr_every_n_steps": task.incr_every_n_steps,
                }
            optimizer = amp.decorate(optimizer, lists, use_pure_fp16=mode == "pure", dtype=options.dtype, **scaling)
    with amp.program_guard(test, amp.Program("test_startup")), amp.unique_name.guard():
        test_prediction = task.layers()[2]
    test = test.clone(for_test=True)
    with amp.program_guard(main, startup):
        optimizer.minimize(loss, startup)
    scope = amp.Scope()
    executor = amp.Executor(place_of(options.place))
    executor.run(startup, scope=scope)
    fetches = [loss.name]
    if mode != "fp32":
        optimizer.amp_init(place_of(options.place), scope=scope, test_program=test, use_fp16_test=True)
        found_inf = optimizer.get_found_inf()
        fetches += [v.name for v in (optimizer.get_loss_scaling(), found_inf) if v is not None]
    trained = Trained(History(mode), executor, scope, test, image.name, test_prediction.name)
    run(task, trained, main, optimizer, fetches, label.name, options, progress)
    return trained


def run(
    task: Task,
    trained: Trained,
    main: amp.Program,
    optimizer: Any,
    fetches: list[str],
    label: str,
    options: argparse.Namespace,
    progress: Callable[[str, int, int, float], None],
) -> None:
    """Train a program for ``options.epochs``; ``fetches``: the loss, then scale and found_inf where there are any."""
    for epoch in range(options.epochs):
        optimizer.set_lr(task.learning_rate * task.decay**epoch, trained.scope)
        _epoch(task, trained, main, fetches, label, options, epoch, progress)
        trained.history.accuracy.append(evaluate(trained, *task.test, batch=options.eval_batch))


def _epoch(
    task: Task,
    trained: Trained,
    main: amp.Program,
    fetches: list[str],
    label: str,
    options: argparse.Namespace,
    epoch: int,
    progress: Callable[[str, int, int, float], None],
) -> None:
    images, labels = task.train
    history = trained.history
    steps = len(images) // options.batch_size
    for batch in amp.distributed.batches(len(images), options.batch_size, epoch, options.seed, drop_last=True):
        feed = {trained.image: images[batch.rows], label: labels[batch.rows]}
        start = time.perf_counter()
        values = trained.executor.run(main, feed=feed, fetch_list=fetches, scope=trained.scope)
        history.step_seconds.append(time.perf_counter() - start)
        history.loss.append(mean_over_ranks(float(np.ravel(values[0])[0])))
        scale = float(np.ravel(values[1])[0]) if len(values) > 1 else 1.0
        history.bad_steps += bool(len(values) > 2 and np.ravel(values[2])[0])
        history.scale.append(scale)
        progress(history.mode, epoch * steps + batch.number + 1, options.epochs * steps, history.loss[-1])


def evaluate(trained: Trained, images: np.ndarray, labels: np.ndarray, batch: int) -> float:
    """Share of right decisions of the test program; each rank takes its share of the batches."""
    if amp.distributed.world_size() > 1:
        amp.distributed.broadcast_statistics(trained.test_program, trained.scope)
    right = 0.0
    for share in amp.distributed.batches(len(images), batch, shuffle=False):
        (scores,) = trained.executor.run(
            trained.test_program,
            feed={trained.image: images[share.rows]},
            fetch_list=[trained.prediction],
            scope=trained.scope,
        )
        right += share.own * int((np.argmax(scores, -1) == np.ravel(labels[share.rows])).sum())
    return mean_over_ranks(right) * amp.distributed.world_size() / len(images)


# -- several ranks ---------------------------------------------------------------------------------------------------
def mean_over_ranks(value: float) -> float:
    """The mean of a number over the ranks."""
    if amp.distributed.world_size() == 1:
        return value
    return float(amp.distributed.all_reduce(np.array([value]))[0])


def gathered(array: np.ndarray) -> list[np.ndarray]:
    """The arrays of all ranks."""
    return [array] if amp.distributed.world_size() == 1 else amp.distributed.all_gather(array)


def check_ranks(batch: int) -> None:
    """SystemExit for a batch that the ranks cannot share alike."""
    ranks = amp.distributed.world_size()
    if batch % ranks:
        raise SystemExit(
            f"error: --batch-size {batch} is that of all {ranks} ranks together; take a multiple of {ranks}"
        )


def bar() -> Callable[[str, int, int, float], None]:
    """A progress callback that draws one tqdm bar a mode."""
    from tqdm import tqdm

    bars: dict[str, tqdm] = {}

    def update(mode: str, step: int, steps: int, loss: float) -> None:
        if mode not in bars:
            # None: no bar where the output is no terminal.
            bars[mode] = tqdm(total=steps, desc=f"{mode:>9}", unit="step", mininterval=0.2, disable=None)
        bars[mode].set_postfix_str(f"loss {loss:.3f}", refresh=False)
        bars[mode].update(1)
        if step == steps:
            bars[mode].close()

    return update


def table(histories: list[History]) -> str:
    """A final table, one row a mode."""
    rows = [
        f"{'mode':<10} {'test accuracy':>13} {'final loss':>11} {'loss scale':>11} {'bad steps':>10} {'ms/step':>8}"
    ]
    for h in histories:
        final = float(np.mean(h.loss[-10:])) if h.loss else float("nan")
        accuracy = h.accuracy[-1] if h.accuracy else float("nan")
        scale = h.scale[-1] if h.scale else 1.0
        milliseconds = float(np.median(h.step_seconds)) * 1e3 if h.step_seconds else float("nan")
        rows.append(
            f"{h.mode:<10} {accuracy:>13.2%} {final:>11.4f} {scale:>11g} {h.bad_steps:>10d} {milliseconds:>8.2f}"
        )
    return "\n".join(rows)


def plot(histories: list[History], path: str, title: str) -> None:
    """Training loss, loss scale and test accuracy as one PNG: a row of panels for each mode, the first mode in gray.

    The curves of the modes nearly coincide, so each has panels of its own, on shared axes.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(
        len(histories), 3, figsize=(12, 0.6 + 2.2 * len(histories)), sharex="col", sharey="col", squeeze=False
    )
    for row, history in enumerate(histories):
        color = f"C{row}"
        behind = _curves(histories[0]) if row else []
        for axes, curve in zip(rows[row], behind, strict=False):
            axes.plot(*curve, color="0.75", linewidth=3, label=histories[0].mode)
        for axes, curve in zip(rows[row], _curves(history), strict=True):
            axes.plot(*curve, color=color, linewidth=1.2, label=history.mode)
            axes.grid(alpha=0.3)
        rows[row][0].set_ylabel(history.mode)
        rows[row][0].legend(loc="upper right")
    for axes, name in zip(rows[0], ("training loss", "loss scale", "test accuracy"), strict=True):
        axes.set_title(name)
    for axes, unit in zip(rows[-1], ("step", "step", "epoch"), strict=True):
        axes.set_xlabel(unit)
    rows[0][0].set_ylim(bottom=0)
    rows[0][1].set_yscale("log", base=2)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _curves(history: History) -> list[tuple[Any, Any]]:
    """Loss (a mean over 2 % of the steps), scale and accuracy: what each is drawn over, and its values."""
    width = max(1, len(history.loss) // 50)
    smooth = np.convolve(history.loss, np.ones(width) / width, "valid")
    steps, epochs = np.arange(len(smooth)) + width, np.arange(len(history.accuracy)) + 1
    return [(steps, smooth), (np.arange(len(history.scale)) + 1, history.scale), (epochs, history.accuracy)]


def guarded(main: Callable[[], int]) -> int:
    """Run a demo, as one of several ranks where ``mpiexec`` started it: then rank 0 alone prints.

    An interrupt or an error of the library is one line and an exit status.
    """
    streams, nowhere = (sys.stdout, sys.stderr), open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    rank, several = 0, False
    try:
        engine = amp.distributed.init()
        rank, several = engine.rank, engine.size > 1
        if rank:
            sys.stdout = sys.stderr = nowhere
        if several and ("cuda" in sys.argv or "--place=cuda" in sys.argv):
            amp.distributed.shutdown()
            several = False  # while there is no engine
            engine = amp.distributed.init("nccl")
            several = True
        return main()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        if several:
            engine.abort("was interrupted")
        return 130
    except SystemExit as ended:
        if rank and isinstance(ended.code, str):
            return 1  # rank 0 says it
        raise
    except amp.AmpError as error:
        rank_0_is_gone = isinstance(error, amp.errors.DistributedError) and not error.told and 0 in error.ranks
        print(f"error: {error}", file=streams[1] if rank_0_is_gone else sys.stderr)
        if several:
            engine.abort(f"raised {type(error).__name__}: {error}")
        return 1
    finally:
        sys.stdout, sys.stderr = streams
        nowhere.close()
