"""The ``amp-transpile`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence

from . import __version__
from .convert import MODES, convert
from .errors import AmpError
from .ir.program import Program
from .ir.types import FLOATS

_EXAMPLES = """examples:
  amp-transpile convert model.onnx model_fp16.onnx
  amp-transpile convert model.onnx mixed.onnx --mode mixed --black-list Softmax LayerNormalization
  amp-transpile info model_fp16.onnx

exit status: 0 done, 1 the model or the request cannot be handled, 2 wrong usage, 130 interrupted
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
    to_half = commands.add_parser("convert", help="write a 16-bit copy of a model for inference")
    to_half.add_argument("input", metavar="IN.onnx")
    to_half.add_argument("output", metavar="OUT.onnx")
    to_half.add_argument("--mode", choices=MODES, default="pure-fp16", help="default: %(default)s")
    to_half.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16", help="default: %(default)s")
    to_half.add_argument("--white-list", nargs="+", metavar="OP", help="operators to run in 16 bit")
    to_half.add_argument("--black-list", nargs="+", metavar="OP", help="operators to keep in fp32")
    to_half.add_argument("--black-varnames", nargs="+", metavar="NAME", help="tensors whose operators stay fp32")
    info = commands.add_parser("info", help="operators, precisions and sizes of a model")
    info.add_argument("model", metavar="MODEL.onnx")
    return parser


def _float_type(program: Program) -> Counter[tuple[str, str]]:
    """How many operators of each type work on each floating-point type."""
    counts: Counter[tuple[str, str]] = Counter()
    for op in program.walk():
        kinds = [v.dtype for v in (*op.outputs, *op.inputs) if v is not None and v.dtype in FLOATS]
        counts[op.full_type, str(kinds[0]) if kinds else "no float"] += 1
    return counts


def _summary(program: Program) -> str:
    counts = _float_type(program)
    kinds = sorted({kind for _, kind in counts})
    types = sorted({type_ for type_, _ in counts})
    width = max([len(t) for t in types], default=8)
    lines = [f"{'operator':<{width}} " + " ".join(f"{kind:>9}" for kind in kinds)]
    for type_ in types:
        lines.append(f"{type_:<{width}} " + " ".join(f"{counts[type_, kind] or '':>9}" for kind in kinds))
    total = " ".join(f"{sum(n for (_, k), n in counts.items() if k == kind):>9}" for kind in kinds)
    lines.append(f"{'total':<{width}} {total}")
    lines.append(f"opset {program.opset()}, {sum(counts.values())} operators")
    return "\n".join(lines)


def _convert(options: argparse.Namespace) -> None:
    program = convert(
        options.input,
        mode=options.mode,
        dtype=options.dtype,
        white_list=options.white_list,
        black_list=options.black_list,
        black_varnames=options.black_varnames,
    )
    program.to_onnx(options.output)
    operators = list(program.walk())
    casts = sum(op.type == "Cast" for op in operators)
    halves = sum(op.precision == options.dtype and op.type != "Cast" for op in operators)
    share = f"{halves} of {len(operators) - casts} operators in {options.dtype}, {casts} casts"
    before, after = os.path.getsize(options.input), os.path.getsize(options.output)
    print(f"{options.output}: {share}, {before:,} -> {after:,} bytes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "convert":
            _convert(options)
        else:
            print(_summary(Program.from_onnx(options.model)))
    except AmpError as error:
        print(f"amp-transpile: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("amp-transpile: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
