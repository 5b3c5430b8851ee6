"""``amp-transpile train``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from amp_transpiler import distributed
from amp_transpiler.cli.terminal import number
from amp_transpiler.errors import AmpError, ArgumentError, ArgumentTypeError, ListError
from amp_transpiler.finetune import fit
from amp_transpiler.finetune.metrics import METRICS
from amp_transpiler.finetune.options import LOSSES, MODES, OPTIMIZERS, SCHEDULES, FitOptions
from amp_transpiler.runtime.collective.exits import INTERRUPTED
from amp_transpiler.runtime.collective.mpi import launched

_DEFAULTS = FitOptions()
#: Arguments that are none of the fields of FitOptions.
_OTHERS = ("command", "input", "output", "data", "test", "checkpoint", "log", "place", "cache_dir", "quiet")


def run(options: argparse.Namespace) -> int:
    """Train and write; as one of several ranks where ``mpiexec`` started this."""
    given = {name: value for name, value in vars(options).items() if name not in _OTHERS}
    given |= {
        name: _pairs(given[name], flag)
        for name, flag in (("dropout", "--dropout"), ("values", "--value"))
        if name in given
    }
    several = (launched() or (1, ""))[0] > 1
    if several:
        distributed.init("nccl" if options.place == "cuda" else "auto")
    bar = _Bar(not options.quiet and sys.stderr.isatty())
    try:
        fit(
            options.input,
            options.output,
            data=options.data,
            test=options.test,
            checkpoint=options.checkpoint,
            log=options.log,
            place=options.place,
            cache_dir=options.cache_dir,
            say=bar.say if not options.quiet else _silent,
            progress=bar.step,
            flags=True,
            **given,
        )
    except KeyboardInterrupt as stopped:
        bar.close()
        if several:
            distributed.get_engine().abort(INTERRUPTED)
        stands = str(stopped) or f"{options.output} was not written"
        print(f"\namp-transpile: interrupted; {stands}", file=sys.stderr)
        return 130
    except (AmpError, MemoryError) as error:
        if several and not isinstance(error, ArgumentError | ArgumentTypeError | ListError):  # which all ranks raise
            distributed.get_engine().abort(f"raised {type(error).__name__}: {error}")
        raise
    finally:
        bar.close()
    return 0


def _silent(line: str) -> None:
    pass


class _Bar:
    """A progress bar for each epoch, where it is shown; and lines that do not run into it."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self.bar: Any = None

    def step(self, done: int, steps: int) -> None:
        """Move on."""
        if self.bar is None and self.shown:
            self.bar = tqdm(total=steps, leave=False, unit="step")
        if self.bar is not None:
            self.bar.update()
            if done == steps:
                self.close()

    def say(self, line: str) -> None:
        """Print a line."""
        self.close()
        print(line)

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _pairs(texts: list[str], option: str) -> dict[str, Any]:
    pairs = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        pairs[name] = number(value)
        if not name or isinstance(pairs[name], str):
            raise ArgumentError(f"{option} takes NAME=NUMBER, such as x=0.1, got {text!r}")
    return pairs


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's arguments. What is not given is left to the checkpoint, where there is one, else to FitOptions."""
    parser.add_argument("input", metavar="IN.onnx")
    parser.add_argument("output", metavar="OUT.onnx")
    parser.add_argument(
        "--data",
        required=True,
        metavar="FILE",
        help="npz file, or folder of npy files: one array for "
        "each input and one for the label; the first dimension counts samples",
    )
    parser.add_argument("--test", metavar="FILE", help="data to evaluate before training and after each epoch")
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="save all state there after each epoch, and go on from "
        "what lies there; options given win over those it was made with",
    )
    parser.add_argument("--log", metavar="FOLDER", help="steps.csv, epochs.csv and TensorBoard")
    parser.add_argument("--place", metavar="{cpu,cuda}", default="cpu", help="where to train (default: %(default)s)")
    parser.add_argument(
        "--cache-dir", metavar="FOLDER", help="keep optimised models there: the same training then starts sooner"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no report")

    def option(flag: str, text: str, **more: Any) -> None:
        name = more.get("dest", flag[2:].replace("-", "_"))
        value = getattr(_DEFAULTS, name)
        default = f" (default: {value})" if isinstance(value, str | float | int) else ""
        parser.add_argument(flag, default=argparse.SUPPRESS, help=text + default, **more)

    def one_of(flag: str, text: str, choices: Iterable[str]) -> None:
        option(flag, text, metavar=f"{{{','.join(choices)}}}")  # FitOptions refuses others, and reads their spellings

    def many(flag: str, metavar: str, text: str, **more: Any) -> None:
        option(flag, text, nargs="+", action="extend", metavar=metavar, **more)

    option("--label", "the label's array", metavar="NAME")
    one_of("--loss", "what is minimised", LOSSES)
    option("--output", "what the loss reads (default: the first float output)", dest="target", metavar="NAME")
    one_of("--metric", "what is reported beside the loss (default: what suits the loss)", METRICS)
    one_of("--mode", "precision to train in; pure stores parameters in 16 bit too", MODES)
    one_of("--dtype", "the 16-bit type", ["float16", "bfloat16"])
    one_of("--save", "precision of OUT.onnx (default: as trained)", MODES)
    many("--black-list", "OP", "operators to keep in fp32")
    option("--loss-scale", "loss scale to begin with (default: 32768 in float16)", type=number, metavar="NUMBER")
    one_of("--optimizer", "the update rule", OPTIMIZERS)
    option("--lr", "learning rate", type=number)
    option("--weight-decay", "coefficient of weight decay", type=number)
    one_of("--schedule", "of the learning rate, down to 0 at the end", SCHEDULES)
    option("--warmup-steps", "updates while the rate rises from 0", type=number, metavar="N")
    option("--clip-norm", "scale gradients down to this global norm", type=number, metavar="NORM")
    option("--accumulate", "batches whose gradients are averaged for one update", type=number, metavar="N")
    option("--epochs", "passes over the data", type=number)
    option(
        "--batch-size",
        "samples in a batch (default: as the model fixes it, else 32); a fixed batch dimension is made variable where "
        "its operators allow it",
        type=number,
    )
    many("--trainable", "PATTERN", "parameters to train, by name or by the operator that reads them (default: all)")
    many("--freeze", "PATTERN", "parameters to leave unchanged")
    many("--dropout", "PATTERN=RATE", "insert a Dropout behind each operator that matches")
    many("--value", "INPUT=NUMBER", "inputs to replace by a constant", dest="values")
    one_of("--batch-norm", "normalise by statistics of the batch, or by the running ones", ["train", "frozen"])
    option("--seed", "for the order of samples and dropout", type=number)
    option(
        "--check-every",
        "of several ranks: steps between comparisons of their state; 0: never",
        type=number,
        metavar="N",
    )
