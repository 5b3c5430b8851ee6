"""``amp-transpile trained-model``."""

from __future__ import annotations

import argparse
from pathlib import Path

from amp_transpiler.export.trained_model import write_trained_model


def run(options: argparse.Namespace) -> int:
    """Write the model."""
    write_trained_model(options.folder, options.output, options.checkpoint)
    if not options.quiet:
        print(f"{options.output}: {Path(options.output).stat().st_size:,} bytes")
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("folder", metavar="FOLDER", help="an exported step: docs/exported_steps.md")
    parser.add_argument("output", metavar="OUT.onnx")
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="what a runner or amp.save_checkpoint saved (default: the state in FOLDER, before training)",
    )
    parser.add_argument("--quiet", action="store_true", help="no report")
