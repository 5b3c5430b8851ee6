"""Arguments, dispatch and exit status of ``amp-transpile``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from amp_transpiler.cli.output import patient_output
from amp_transpiler.cli.ranks import Voice
from amp_transpiler.cli.terminal import complain, plain_warnings, safe_streams
from amp_transpiler.errors import AmpError, ArgumentError, ListError
from amp_transpiler.spelling import near_options
from amp_transpiler.stops import stop_of, terminable
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
was not met, 130 interrupted, 143 terminated
"""


#: The module of each command, which has its ``add_options`` and its ``run``, and what it does.
COMMANDS = {
    "convert": ("convert", "write a 16-bit copy of a model for inference"),
    "check": ("check_place", "where a 16-bit model, made by any converter, first goes wrong on a place"),
    "train": ("train", "train or fine-tune a model on arrays"),
    "export-step": ("export_step", "write a model's training step for other runtimes: C++, Node, browsers"),
    "trained-model": ("shipped", "the model of an exported step, with the weights of a checkpoint"),
    "explain": ("explain", "why each operator, or one, has its precision; what passes do"),
    "diff": ("diff", "what changed between two models"),
    "info": ("info", "operators, precisions, casts, sizes, and what would leave CUDA"),
}


def load(command: str) -> ModuleType:
    """A command's module: none of the others is needed when that command is given."""
    return import_module(f"amp_transpiler.cli.{COMMANDS[command][0]}")


class _CommandParser(argparse.ArgumentParser):
    """Parses what follows a command, and takes its options from the command's module when it does."""

    command = ""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        load(self.command).add_options(self)
        options, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            hint = near_options(unknown[0].partition("=")[0], self._option_string_actions, "; ")
            told = f"unrecognized arguments: {' '.join(unknown)}{hint}"
            self.exit(2, f"{self.prog}: error: {told}\n'{self.prog} --help' lists what it takes\n")
        return options, unknown


def _parser() -> argparse.ArgumentParser:
    shown: dict[str, Any] = {"epilog": _EXAMPLES, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(
        prog="amp-transpile", description="Mixed and pure 16-bit precision for ONNX models.", **shown
    )
    parser.add_argument("--version", action="version", version=f"amp-transpile {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser)
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, **(shown if name == "convert" else {})).command = name
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    with safe_streams(), Voice() as voice:
        return _run(arguments, voice)


def _run(arguments: Sequence[str] | None, voice: Voice) -> int:
    try:
        with terminable():
            return _ran(arguments)
    except AmpError as error:
        voice.complain(error)
        return 2 if isinstance(error, ArgumentError | ListError) else 1
    except MemoryError:
        complain("there is not enough memory for this")
        return 1
    except KeyboardInterrupt as error:
        stop = stop_of(error)
        complain(f"{stop.word}; nothing was written")
        return stop.status


def _ran(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    with patient_output() as output, plain_warnings():
        status: int = load(options.command).run(options)
    if output.trouble is None or isinstance(output.trouble, BrokenPipeError):
        return status  # the reader of our output (head, less) may have gone
    complain(f"standard output cannot be written: {output.trouble.strerror}")
    return status or 1
