"""``amp-transpile export-step``."""

from __future__ import annotations

import argparse

from amp_transpiler.cli.cost import OF_SIZES, SIZES, shapes
from amp_transpiler.cli.terminal import many, number
from amp_transpiler.cli.training_options import add_training_options, training_options
from amp_transpiler.export.model_step import export_model_step
from amp_transpiler.finetune.options import options_of
from amp_transpiler.passes.lowering.place import PLACES, CPUPlace
from amp_transpiler.program import Program

#: Arguments that are none of the fields of FitOptions.
_OTHERS = ("command", "input", "folder", "place", "shape", "steps", "calibration", "portable", "overwrite", "quiet")
#: Fields of FitOptions that say how often something is run, and what becomes of it; and what several ranks do.
_OF_TRAINING = (
    *("metric", "patience", "monitor", "min_delta", "restore_best_weights"),
    *("save", "epochs", "batch_size", "shard_optimizer", "allreduce_precision", "check_every"),
)


def run(options: argparse.Namespace) -> int:
    """Write the folder."""
    given = training_options({name: value for name, value in vars(options).items() if name not in _OTHERS})
    given["flags"] = True
    program = Program.from_onnx(options.input)
    folder = export_model_step(
        program,
        options.folder,
        [PLACES[kind] for kind in options.place or [CPUPlace.kind]],
        shapes(program, options.shape or [], options_of(given).label),
        updates=options.steps,
        calibration=options.calibration or [],
        portable=options.portable,
        overwrite=options.overwrite,
        say=print if not options.quiet else lambda line: None,
        **given,
    )
    if not options.quiet:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        print(f"{folder}: {', '.join(f'{path.name} ({path.stat().st_size:,} bytes)' for path in files)}")
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("input", metavar="IN.onnx")
    parser.add_argument("folder", metavar="FOLDER", help="a new folder for the step: docs/exported_steps.md")
    many(parser, "--shape", SIZES, f"{OF_SIZES}; the batch is the first")
    parser.add_argument(
        "--place",
        choices=sorted(PLACES),
        action="append",
        help="what it is for (default: cpu); more than once: one folder for several places",
    )
    parser.add_argument("--steps", type=number, metavar="N", help="updates in all, for a schedule, which ends")
    samples = "samples of the inputs, npz files or folders: what leaves the range of float16 on them stays fp32"
    many(parser, "--calibration", "FILE", samples)
    parser.add_argument(
        "--portable", action="store_true", help="for CPU: the same bits under every build of onnxruntime, such as wasm"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the exported step that is in FOLDER")
    parser.add_argument("--quiet", action="store_true", help="no report")
    add_training_options(parser, without=_OF_TRAINING)
