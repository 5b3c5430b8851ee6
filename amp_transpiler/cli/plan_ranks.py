"""``amp-transpile info --ranks``: what training a model on several ranks is forecast to take, and what limits it."""

from __future__ import annotations

import argparse
from typing import Any

from amp_transpiler.cli.cost import shapes
from amp_transpiler.cli.terminal import many, number
from amp_transpiler.errors import ArgumentError
from amp_transpiler.finetune.options import MODES
from amp_transpiler.finetune.prepare import prepare_training
from amp_transpiler.ir import unique_name
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.nn import functional as F
from amp_transpiler.optimizer import Adam, decorate
from amp_transpiler.passes.lowering.planning import plan
from amp_transpiler.passes.view.training_step import training_step
from amp_transpiler.program import Program, program_guard

_MODE = "mixed"
#: Options that are arguments of ``plan`` by the same name, which has their defaults.
_PLANNED = ("bandwidth", "latency", "ranks_per_node", "bandwidth_within", "step_time", "shard_state")
#: Options that say something of a plan alone.
OPTIONS = ("mode", *_PLANNED)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``info`` that ask for a plan."""
    ranks = parser.add_argument_group("training on several ranks with Adam, forecast; nothing runs (also: --shape)")
    many(ranks, "--ranks", "N", "how many, such as 1 8 64; needs --bandwidth")
    ranks.add_argument("--mode", choices=MODES, help=f"precision to train in (default: {_MODE})")
    ranks.add_argument(
        "--bandwidth", type=number, metavar="GB/S", help="what a node sends to others; 100 Gbit/s are 12.5"
    )
    ranks.add_argument("--latency", type=number, metavar="US", help="of a message (default: 20)")
    ranks.add_argument("--ranks-per-node", type=number, metavar="N", help="default: 1")
    ranks.add_argument("--bandwidth-within", type=number, metavar="GB/S", help="of a rank within its node")
    ranks.add_argument(
        "--step-time", type=number, metavar="SECONDS", help="of one rank, as measured; else forecast for each --device"
    )
    ranks.add_argument("--shard-state", action="store_true", help="masters and moments are dealt out among the ranks")


def show(options: argparse.Namespace) -> None:
    """Print a plan for each device."""
    counts: Any = [number(text) for each in options.ranks for text in each.split(",") if text]
    if options.bandwidth is None:
        raise ArgumentError("--ranks needs --bandwidth, the GB/s that a node sends to others: 12.5, say")
    if not options.device and options.step_time is None:
        raise ArgumentError("--ranks needs --device A100, say, or --step-time, the seconds of a step on one rank")
    program = Program.from_onnx(options.model)
    if not training_step(program).gradients:
        _train(program, options.mode or _MODE)
    given = {name: value for name in _PLANNED if (value := getattr(options, name)) is not None}
    for device in options.device or [None]:
        planned = plan(
            program,
            counts,
            feed_shapes=shapes(program, options.shape or []),
            device=device,
            **given,
        )
        print(planned)


def _train(program: Program, mode: str) -> None:
    """Append a training step: what it minimises does not matter for its costs."""
    prepare_training(program)
    output = next((v for v in program.outputs if v.dtype in FLOATS), None)
    if output is None:
        raise ArgumentError(f"program '{program.name}' has no float output that a loss could read")
    with program_guard(program, program.startup), unique_name.guard():
        optimizer: Any = Adam(multi_precision=mode != "fp32")
        if mode != "fp32":
            optimizer = decorate(optimizer, use_pure_fp16=mode == "pure", use_fp16_guard=False)
        optimizer.minimize(F.mean(output), program.startup)
