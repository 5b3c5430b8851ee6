"""``amp-transpile train``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tqdm import tqdm

from amp_transpiler import distributed
from amp_transpiler.cli.terminal import one_of
from amp_transpiler.cli.training_options import add_training_options, training_options
from amp_transpiler.errors import AmpError, ArgumentError, ArgumentTypeError, ListError
from amp_transpiler.finetune import fit
from amp_transpiler.passes.lowering.place import PLACES
from amp_transpiler.runtime.collective.mpi import launched
from amp_transpiler.stops import stop_of

#: Arguments that are none of the fields of FitOptions.
_OTHERS = ("command", "input", "output", "data", "test", "checkpoint", "log", "place", "cache_dir", "quiet")


def run(options: argparse.Namespace) -> int:
    """Train and write; as one of several ranks where ``mpiexec`` started this."""
    given = training_options({name: value for name, value in vars(options).items() if name not in _OTHERS})
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
            say=bar.say if not options.quiet else lambda line: None,
            progress=bar.step,
            flags=True,
            **given,
        )
    except KeyboardInterrupt as stopped:
        bar.close()
        stop = stop_of(stopped)
        if several:
            distributed.get_engine().abort(stop.told)
        stands = str(stopped) or f"{options.output} was not written"
        print(f"\namp-transpile: {stop.word}; {stands}", file=sys.stderr)
        return stop.status
    except (AmpError, MemoryError) as error:
        if several and not isinstance(error, ArgumentError | ArgumentTypeError | ListError):  # which all ranks raise
            distributed.get_engine().abort(f"raised {type(error).__name__}: {error}")
        raise
    finally:
        bar.close()
    return 0


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
    parser.add_argument("--place", metavar=one_of(PLACES), default="cpu", help="where to train (default: %(default)s)")
    parser.add_argument(
        "--cache-dir", metavar="FOLDER", help="keep optimised models there: the same training then starts sooner"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no report")
    add_training_options(parser)
