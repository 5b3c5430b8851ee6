"""The options of ``amp-transpile convert``, and of every command that converts."""

from __future__ import annotations

import argparse

from amp_transpiler.cli.terminal import many, number, one_of
from amp_transpiler.conversion.conversion_options import MODES, TOLERANCE, ConversionOptions
from amp_transpiler.lists import half_places


def add_precision_options(parser: argparse.ArgumentParser) -> None:
    """How much becomes 16 bit, and of which type."""
    parser.add_argument(
        "--mode",
        metavar=one_of(MODES),
        default=ConversionOptions.mode,
        help="pure: 16 bit wherever it is profitable; mixed: matrix products, convolutions and what lies between them; "
        "auto: as much as calibration data allow (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        metavar=one_of(TOLERANCE),
        default=ConversionOptions.dtype,
        help="the 16-bit type (default: %(default)s)",
    )


def add_tolerance(parser: argparse._ActionsContainer) -> None:
    """How far off outputs may be."""
    text = "largest relative L2 error allowed at an output (default: {float16:g}, bfloat16 {bfloat16:g})"
    parser.add_argument("--tolerance", type=number, metavar="ERROR", help=text.format(**TOLERANCE))


def add_conversion_options(parser: argparse.ArgumentParser) -> None:
    """All that ``convert`` takes."""
    parser.add_argument("input", metavar="IN.onnx")
    parser.add_argument("output", metavar="OUT.onnx")
    add_precision_options(parser)

    where = parser.add_argument_group("what becomes 16 bit")
    many(where, "--white-list", "OP", "operators to run in 16 bit")
    many(where, "--black-list", "OP", "operators to keep in fp32")
    many(where, "--black-varnames", "NAME", "tensors whose operators stay fp32")
    many(
        where,
        "--only",
        "PATTERN",
        "change these operators alone: names or scopes, wildcards such as 'encoder/*', or re:EXPRESSION",
    )
    many(where, "--except", "PATTERN", "operators to leave unchanged")
    where.add_argument(
        "--no-numeric-guards",
        action="store_true",
        help="do not keep fp32 what is known to overflow or to lose its digits in 16 bit",
    )
    where.add_argument(
        "--place",
        metavar=one_of(half_places()),
        default=ConversionOptions.place,
        help="where the model will run: its kernels decide what stays fp32 (default: %(default)s)",
    )
    kept = parser.add_argument_group("inputs and outputs").add_mutually_exclusive_group()
    kept.add_argument(
        "--keep-io", nargs="*", metavar="NAME", help="keep the element types of all (default), or of these only"
    )
    kept.add_argument("--no-keep-io", action="store_true", help="float32 inputs and outputs become 16 bit")
    data = parser.add_argument_group("calibration")
    many(data, "--calibration", "FILE", "samples of the inputs: npz files, or folders of npz or npy files")
    add_tolerance(data)
    many(
        data,
        "--input-range",
        "NAME=LOW:HIGH",
        "smallest and largest number in an input, from which those of other tensors are computed",
    )
    written = parser.add_argument_group("what is written")
    weights = written.add_mutually_exclusive_group()
    weights.add_argument(
        "--external-data",
        nargs="?",
        const=True,
        default=None,
        metavar="NAME",
        help="write weights into a file beside the model (default: where they were before)",
    )
    weights.add_argument(
        "--no-external-data", dest="external_data", action="store_false", help="write them into OUT.onnx itself"
    )
    written.add_argument("--report", metavar="OUT.html", help="a page that shows what was done and why")
    written.add_argument("--json", metavar="OUT.json", help="the report as JSON")
    written.add_argument(
        "--check", action="store_true", help="check and load the file, and compare its outputs with the original's"
    )
    written.add_argument("--quiet", action="store_true", help="no progress bar and no summary")
    limits = parser.add_argument_group("limits of running the model (--check, --calibration)")
    limits.add_argument(
        "--time-budget",
        type=number,
        metavar="SECONDS",
        help="for one run (default: 8 for --check on a synthetic sample, 60 on calibration data, and one "
        "more for every 2 MB of weights and data)",
    )
    limits.add_argument(
        "--memory-budget",
        type=number,
        metavar="GIB",
        help="beyond the model itself (default: 0.7 and 16 times the weights for --check on a synthetic "
        "sample, what is free on calibration data)",
    )
