"""Arguments, dispatch and exit status of ``amp-transpile``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from amp_transpiler.cli import check_place, convert, cost, diff, explain, export_step, info, plan_ranks, shipped, train
from amp_transpiler.cli.output import patient_output
from amp_transpiler.cli.ranks import Voice
from amp_transpiler.cli.terminal import complain, number, plain_warnings, safe_streams
from amp_transpiler.conversion.conversion_options import MODES, TOLERANCE, ConversionOptions
from amp_transpiler.errors import AmpError, ArgumentError, ArgumentTypeError, ListError
from amp_transpiler.lists import half_places
from amp_transpiler.version import __version__

_EXAMPLES = """examples:
  amp-transpile convert model.onnx model_fp16.onnx
  amp-transpile convert model.onnx mixed.onnx --mode mixed --black-list Softmax LayerNormalization
  amp-transpile convert model.onnx auto.onnx --mode auto --calibration samples/ --tolerance 0.01 --report why.html
  amp-transpile convert model.onnx half.onnx --except 'decoder/*' 're:.*norm[0-9]+' --no-keep-io
  amp-transpile convert model.onnx bf16.onnx --dtype bfloat16 --check
  amp-transpile convert model.onnx web.onnx --place webgpu
  amp-transpile train model.onnx tuned.onnx --data train.npz --test test.npz --epochs 3 --freeze 'encoder/*'
  amp-transpile export-step model.onnx step/ --shape image=32,3,224,224 --mode pure --optimizer adamw --lr 1e-4
  amp-transpile trained-model step/ trained.onnx --checkpoint trained/
  amp-transpile check model_fp16.onnx --place webgpu --data samples.npz
  amp-transpile explain model_fp16.onnx Softmax_3
  amp-transpile explain --passes
  amp-transpile diff model.onnx model_fp16.onnx
  amp-transpile info model_fp16.onnx
  amp-transpile info model.onnx --cost --shape image=8,3,224,224
  amp-transpile info model.onnx --ranks 1 8 64 --bandwidth 12.5 --device A100 --shape image=8,3,224,224

exit status: 0 done, 1 the model or the file cannot be handled, 2 wrong usage, 3 a check failed or the tolerance
was not met, 130 interrupted
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="amp-transpile",
        description="Mixed and pure 16-bit precision for ONNX models.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"amp-transpile {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _convert_options(
        commands.add_parser(
            "convert",
            help="write a 16-bit copy of a model for inference",
            epilog=_EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    check_place.add_options(
        commands.add_parser("check", help="where a 16-bit model, made by any converter, first goes wrong on a place")
    )
    train.add_options(commands.add_parser("train", help="train or fine-tune a model on arrays"))
    export_step.add_options(
        commands.add_parser("export-step", help="write a model's training step for other runtimes: C++, Node, browsers")
    )
    shipped.add_options(
        commands.add_parser("trained-model", help="the model of an exported step, with the weights of a checkpoint")
    )
    reasons = commands.add_parser("explain", help="why each operator, or one, has its precision; what passes do")
    reasons.add_argument("model", metavar="MODEL.onnx", nargs="?")
    reasons.add_argument("nodes", metavar="NODE", nargs="*", help="operator or tensor names, globs, or re:EXPRESSION")
    _precision_options(reasons)
    reasons.add_argument(
        "--passes",
        metavar="PASSES",
        nargs="?",
        const="",
        help="which passes of a list such as 'inline-functions,opset' change the model (without a list, of a "
        "conversion's); without a model, every pass with what it does, and those of convert, decorate and lower",
    )
    changes = commands.add_parser("diff", help="what changed between two models")
    changes.add_argument("before", metavar="A.onnx")
    changes.add_argument("after", metavar="B.onnx")
    changes.add_argument("--all", action="store_true", help="list every operator that changed, not the first few")
    facts = commands.add_parser("info", help="operators, precisions, casts, sizes, and what would leave CUDA")
    facts.add_argument("model", metavar="MODEL.onnx")
    cost.add_options(facts)
    plan_ranks.add_options(facts)
    return parser


def _precision_options(parser: argparse.ArgumentParser) -> None:
    modes, types = "{" + ",".join(MODES) + "}", "{" + ",".join(TOLERANCE) + "}"
    parser.add_argument(
        "--mode",
        metavar=modes,
        default=ConversionOptions.mode,
        help="pure: 16 bit wherever it is profitable; mixed: matrix products, convolutions and what lies between them; "
        "auto: as much as calibration data allow (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", metavar=types, default=ConversionOptions.dtype, help="the 16-bit type (default: %(default)s)"
    )


def _convert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN.onnx")
    parser.add_argument("output", metavar="OUT.onnx")
    _precision_options(parser)

    def many(group: argparse._ActionsContainer, flag: str, metavar: str, text: str) -> None:
        group.add_argument(flag, nargs="+", action="extend", metavar=metavar, help=text)

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
        metavar="{" + ",".join(half_places()) + "}",
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
    data.add_argument(
        "--tolerance",
        type=number,
        metavar="ERROR",
        help="largest relative L2 error allowed at an output (default: 0.01, bfloat16 0.05)",
    )
    many(
        data,
        "--input-range",
        "NAME=LOW:HIGH",
        "smallest and largest number in an input, from which those of other tensors are computed",
    )
    written = parser.add_argument_group("what is written")
    written.add_argument(
        "--external-data",
        nargs="?",
        const=True,
        default=None,
        metavar="NAME",
        help="write weights into a file beside the model (default: where they were before)",
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


_COMMANDS = {
    "convert": convert.run,
    "check": check_place.run,
    "train": train.run,
    "export-step": export_step.run,
    "trained-model": shipped.run,
    "explain": explain.run,
    "diff": diff.run,
    "info": info.run,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    with safe_streams(), Voice() as voice:
        return _run(_parser().parse_args(arguments), voice)


def _run(options: argparse.Namespace, voice: Voice) -> int:
    try:
        with patient_output() as output, plain_warnings():
            status = _COMMANDS[options.command](options)
        if output.trouble is None or isinstance(output.trouble, BrokenPipeError):
            return status  # the reader of our output (head, less) may have gone
        complain(f"standard output cannot be written: {output.trouble.strerror}")
        return status or 1
    except AmpError as error:
        voice.complain(error)
        return 2 if isinstance(error, ArgumentError | ArgumentTypeError | ListError) else 1
    except MemoryError:
        complain("there is not enough memory for this")
        return 1
    except KeyboardInterrupt:
        complain("interrupted; nothing was written")
        return 130
