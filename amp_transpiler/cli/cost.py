"""``amp-transpile info --cost``: what a run of a model costs, and whether 16 bit pays."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from amp_transpiler.cli.terminal import many, number, printable
from amp_transpiler.conversion.converting import convert
from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.types import HALF
from amp_transpiler.lists.devices import devices
from amp_transpiler.option_checks import is_whole
from amp_transpiler.passes.lowering.cost_comparison import compare_costs
from amp_transpiler.passes.lowering.cost_estimate import CostEstimate
from amp_transpiler.passes.lowering.place import PLACES, no_faster
from amp_transpiler.program import Program
from amp_transpiler.runtime.states import fits

_PLACE = "cuda"
#: The option --shape, wherever it is.
SIZES, OF_SIZES = "NAME=SIZE,SIZE", "sizes of an input that are not fixed, such as image=8,3,224,224"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``info`` that ask for costs."""
    costs = parser.add_argument_group("costs of a run, counted and forecast; nothing runs, and no GPU is needed")
    costs.add_argument(
        "--cost",
        action="store_true",
        help="kernels, bytes, arithmetic and memory; of a float32 model also those of its conversions, and whether "
        "they pay",
    )
    costs.add_argument("--place", choices=sorted(PLACES), help=f"default: {_PLACE}")
    many(costs, "--shape", SIZES, OF_SIZES)
    many(costs, "--device", "NAME", f"default: all of {', '.join(devices())}")


def show(program: Program, options: argparse.Namespace) -> None:
    """Print what a run costs; on a GPU also forecasts, beside the model's conversions where it is float32."""
    sizes = shapes(program, options.shape or [])
    name = options.place or _PLACE
    place = PLACES[name]
    estimate = program.cost_estimate(place, sizes)
    print(estimate)
    if not estimate.has_forecast:
        if name != "cpu":
            print("no forecast: those are of CUDA devices")
        if no_faster(name):
            print(no_faster(name))
        return
    if any(v.dtype in HALF for each in program.blocks for v in each.variables):
        print(_forecasts(estimate, options.device))
        return
    estimates = {"fp32": estimate}
    for mode in ("mixed", "pure"):
        estimates[mode] = convert(options.model, mode=mode).cost_estimate(place, sizes)
    print("\nconverted to float16:")
    print(compare_costs(estimates, options.device))


def _forecasts(estimate: CostEstimate, names: list[str] | None) -> str:
    lines = ["forecast, launched one by one / captured as a CUDA graph, and what takes most of it:"]
    for name in names or devices():
        alone, captured = (estimate.forecast(name, captured=captured) for captured in (False, True))
        lines.append(
            f"{alone.device:<10} {alone.seconds * 1e3:,.2f} / {captured.seconds * 1e3:,.2f} ms, {alone.bound} / "
            f"{captured.bound}" + ("" if alone.fits else "; it does not fit into the memory")
        )
    return "\n".join(lines)


def shapes(program: Program, texts: list[str], label: str = "") -> dict[str, tuple[int, ...]]:
    """Shapes by input; ArgumentError for text that is none, for what the model declares otherwise or has not, and for
    an input whose size is still open.

    ``label``: the feed that the inputs of a training step have beside them. Their batch may be another than declared.
    """
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, equals, sizes = text.rpartition("=")
        given = list(map(number, sizes.split(","))) if sizes else []
        if not equals or not all(is_whole(size) and 0 <= size < 2**63 for size in given):
            raise ArgumentError(f"--shape takes NAME=SIZE,SIZE, such as image=8,3,224,224, got {text!r}")
        if name in found:
            raise ArgumentError(f"--shape gives '{printable(name)}' twice")
        found[name] = tuple(map(int, given))
        _check(program, text, name, found[name], label)
    feeds = {feed.name: (None,) if feed.shape is None else feed.shape for feed in program.inputs if feed.readers}
    named = {size for name in found for size in feeds.get(name, ()) if isinstance(size, str)}
    for name, shape in feeds.items():
        if name not in found and not all(isinstance(size, int) or size in named for size in shape):
            sizes = ",".join(str(size) if isinstance(size, int) else "8" for size in shape)
            way = f"give its sizes, as in --shape {printable(name)}={sizes}"
            raise ArgumentError(f"input '{printable(name)}' has the shape {_shown(shape)}; {way}")
    return found


def _check(program: Program, text: str, name: str, shape: tuple[int, ...], label: str) -> None:
    """ArgumentError where ``shape`` is none of the input's."""
    inputs, said = {feed.name: feed.shape for feed in program.inputs}, f"--shape {printable(text)}"
    if name not in inputs and name != (label or None):
        raise ArgumentError(f"{said}: the model has no such input; it has {printable(', '.join(inputs)) or 'none'}")
    declared, free = inputs.get(name), int(bool(label))
    if declared is not None and (len(shape) != len(declared) or not fits(shape[free:], declared[free:])):
        raise ArgumentError(f"{said}: input '{printable(name)}' has the shape {_shown(declared)}")
    if label and 0 in shape:
        raise ArgumentError(f"{said}: a size is 0; expected numbers from 1 on")


def _shown(shape: Sequence[int | str | None]) -> str:
    return f"[{','.join('?' if size is None else printable(str(size)) for size in shape)}]"
