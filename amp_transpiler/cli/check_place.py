"""``amp-transpile check``: where a 16-bit model first goes wrong on a place."""

from __future__ import annotations

import argparse
import json
import os

from amp_transpiler.cli.conversion_arguments import add_tolerance
from amp_transpiler.cli.terminal import many, number, one_of, printable
from amp_transpiler.conversion.check_model import check_model
from amp_transpiler.files import array_files, check_outputs, put, write_files
from amp_transpiler.ir.locations import model_files
from amp_transpiler.lists import USUAL_PLACE, place_kinds


def add_options(parser: argparse.ArgumentParser) -> None:
    """What ``check`` takes."""
    parser.add_argument("model", metavar="MODEL.onnx", help="a model with 16-bit operators, made by any converter")
    parser.add_argument(
        "--place",
        metavar=one_of(place_kinds()),
        default=USUAL_PLACE,
        help="whose kernels and roundings count (default: %(default)s); no device is needed",
    )
    samples = "samples of the inputs: npz files, or folders of npz or npy files (default: one sample of normal numbers)"
    many(parser, "--data", "FILE", samples)
    add_tolerance(parser)
    parser.add_argument(
        "--time-budget", type=number, metavar="SECONDS", help="for one run of the model (default: no end)"
    )
    parser.add_argument("--json", metavar="OUT.json", help="what was found, of every operator, as JSON")


def run(options: argparse.Namespace) -> int:
    """Print what was found; 3 where an output is off, or a kernel fails."""
    read = {"MODEL.onnx": [path for path in model_files(options.model) if not os.path.isdir(path)]}
    check_outputs(
        {"--json": options.json}, {**read, "--data": [p for one in options.data or () for p in array_files(one)]}
    )
    found = check_model(
        options.model,
        options.place,
        data=options.data,
        tolerance=options.tolerance,
        time_budget=options.time_budget,
    )
    if options.json is not None:
        write_files([(options.json, put(json.dumps(found.to_dict(), indent=1).encode("ascii")))])
    print("\n".join(printable(line) for line in str(found).splitlines()))
    return 0 if found.ok else 3
