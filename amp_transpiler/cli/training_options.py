"""The options of commands that make a training step: fields of FitOptions."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from amp_transpiler.cli.terminal import number, one_of
from amp_transpiler.errors import ArgumentError
from amp_transpiler.finetune.metrics import METRICS
from amp_transpiler.finetune.options import LOSSES, MODES, OPTIMIZERS, SCHEDULES, FitOptions

_DEFAULTS = FitOptions()


def training_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options as FitOptions takes them. ArgumentError for one that holds no pairs, and should."""
    flags = (("dropout", "--dropout"), ("values", "--value"))
    found = {name: _pairs(given[name], flag) for name, flag in flags if name in given}
    return {**given, **found} | ({"batch_norm": _ways(given["batch_norm"])} if "batch_norm" in given else {})


def _ways(texts: list[str]) -> str | dict[str, str]:
    """One way for all, or the ways of patterns, of which ``*`` is that of a word without one."""
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    return {pattern or "*": way for pattern, _, way in (text.rpartition("=") for text in texts)}


def _pairs(texts: list[str], option: str) -> dict[str, Any]:
    pairs = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        pairs[name] = number(value)
        if not name or isinstance(pairs[name], str):
            raise ArgumentError(f"{option} takes NAME=NUMBER, such as x=0.1, got {text!r}")
    return pairs


def add_training_options(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """The options but for some; one that is not given is not in the result."""

    def option(flag: str, text: str, **more: Any) -> None:
        name = more.get("dest", flag[2:].replace("-", "_"))
        if name in without:
            return
        value = getattr(_DEFAULTS, name)
        default = f" (default: {value})" if isinstance(value, str | float | int) else ""
        parser.add_argument(flag, default=argparse.SUPPRESS, help=text + default, **more)

    def choice(flag: str, text: str, choices: Iterable[str]) -> None:
        option(flag, text, metavar=one_of(choices))  # FitOptions refuses others, and reads their spellings

    def many(flag: str, metavar: str, text: str, **more: Any) -> None:
        option(flag, text, nargs="+", action="extend", metavar=metavar, **more)

    option("--label", "the label's array", metavar="NAME")
    choice("--loss", "what is minimised", LOSSES)
    option(
        "--label-smoothing",
        "share of a label's probability that is spread over all classes",
        type=number,
        metavar="SHARE",
    )
    option("--output", "what the loss reads (default: the first float output)", dest="target", metavar="NAME")
    choice("--metric", "what is reported beside the loss (default: what suits the loss)", METRICS)
    option(
        "--patience",
        "end after so many epochs in a row without a better one by --monitor (default: never)",
        type=number,
        metavar="N",
    )
    option(
        "--monitor", "by what of the test data an epoch is the best: test_loss, or test_ and the metric", metavar="NAME"
    )
    option("--min-delta", "by how much an epoch has to be better", type=number, metavar="NUMBER")
    option("--restore-best-weights", "write the weights of the best epoch, not of the last", action="store_true")
    choice("--mode", "precision to train in; pure stores parameters in 16 bit too", MODES)
    choice("--dtype", "the 16-bit type", ["float16", "bfloat16"])
    choice("--save", "precision of OUT.onnx (default: as trained)", MODES)
    many("--black-list", "OP", "operators to keep in fp32")
    option("--loss-scale", "loss scale to begin with (default: 32768 in float16)", type=number, metavar="NUMBER")
    choice("--optimizer", "the update rule", OPTIMIZERS)
    option("--lr", "learning rate", type=number)
    option("--weight-decay", "coefficient of weight decay (default: the optimizer's own)", type=number)
    choice("--schedule", "of the learning rate, down to 0 at the end", SCHEDULES)
    option("--warmup-steps", "updates while the rate rises from 0", type=number, metavar="N")
    option("--clip-norm", "scale gradients down to this global norm", type=number, metavar="NORM")
    option("--accumulate", "batches whose gradients are averaged for one update", type=number, metavar="N")
    option("--epochs", "passes over the data", type=number)
    option(
        "--batch-size",
        "samples in a batch (default: as the model fixes it, else 32); a fixed batch dimension is made variable where "
        "its operators allow it",
        type=number,
    )
    trained = (
        "parameters to train, by name or by the operator that reads them (default: all); numbers by their own name"
    )
    many("--trainable", "PATTERN", trained)
    many("--freeze", "PATTERN", "parameters to leave unchanged")
    many("--keep-tied", "PATTERN", "parameters that stay one for all readers, though their elements are all alike")
    many("--dropout", "PATTERN=RATE", "insert a Dropout behind each operator that matches")
    many("--value", "INPUT=NUMBER", "inputs to replace by a constant", dest="values")
    statistics = (
        "normalise by statistics of the batch (train), of the batches of all ranks (synchronized), or by the running "
        "ones (frozen); with a pattern those that it fits, the last that fits"
    )
    many("--batch-norm", "[PATTERN=]WAY", statistics)
    option("--seed", "for the order of samples and dropout", type=number)
    option(
        "--shard-optimizer",
        "of several ranks: each holds and updates its part of masters and moments",
        action="store_true",
    )
    choice(
        "--allreduce-precision",
        "of several ranks: the type in which gradients travel (default: that of the training)",
        ["float16", "bfloat16", "float32"],
    )
    option(
        "--check-every",
        "of several ranks: steps between comparisons of their state; 0: never",
        type=number,
        metavar="N",
    )
