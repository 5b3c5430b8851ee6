"""Arguments of another kind than a function takes are named, and no Python error leaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GraphError
from amp_transpiler.monitor import CsvWriter, JsonlWriter, TensorBoardWriter
from amp_transpiler.nn import functional as F

Net = tuple[amp.Program, amp.Variable, amp.Executor, amp.Scope]


@pytest.fixture
def net() -> Net:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        loss = F.mean(amp.nn.fc(amp.data("x", [4, 3]), 2))
        amp.optimizer.SGD(0.1).minimize(loss)
    scope, executor = amp.Scope(), amp.Executor(amp.CPUPlace())
    executor.run(startup, scope=scope)
    return main, loss, executor, scope


def imported() -> amp.Program:
    text = "net (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }"
    return amp.Program.from_onnx(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}'))


CALLS: dict[str, tuple[Callable[[Net], Any], str]] = {
    "to_onnx": (lambda net: net[0].to_onnx(5), "path is 5; expected the path of a file"),
    "save_inference_model": (
        lambda net: amp.save_inference_model("x.onnx", ["x"], [net[1]], net[2], "main"),
        "program is 'main'; expected a Program",
    ),
    "trainable": (lambda _: amp.prepare_training(imported(), trainable=5), "trainable takes strings, .* got 5"),
    "freeze": (lambda _: amp.prepare_training(imported(), freeze=5), "freeze takes strings, .* got 5"),
    "keep_tied": (lambda _: amp.prepare_training(imported(), keep_tied=5), "keep_tied takes strings"),
    "values": (lambda _: amp.prepare_training(imported(), values=5), "values is 5; expected a mapping"),
    "feed_shapes": (lambda _: amp.prepare_training(imported(), feed_shapes=5), "feed_shapes is 5; expected a mapping"),
    "a feed's shape": (
        lambda _: amp.prepare_training(imported(), feed_shapes={"x": 5}),  # type: ignore[dict-item]
        "feed_shapes: the shape of input 'x' is 5; expected a list of sizes",
    ),
    "an input's value": (
        lambda _: amp.prepare_training(imported(), values={"x": "abc"}),
        "values: 'abc' does not fit input 'x'",
    ),
    "apply_gradients": (
        lambda _: amp.optimizer.SGD(0.1).apply_gradients(None),  # type: ignore[arg-type]
        "params_grads is None; expected a list",
    ),
    "feed": (lambda net: net[2].run(net[0], np.ones(2), scope=net[3]), "feed is a dictionary"),  # type: ignore[arg-type]
    "strict": (lambda net: amp.load_weights("w.npz", net[0], net[3], strict="no"), "strict is 'no'"),  # type: ignore[arg-type]
    "find_culprit": (lambda net: amp.find_culprit(net[0], 5, net[3]), "feed is 5; expected a mapping"),
    "before": (lambda net: amp.find_culprit(net[0], {}, net[3], before=5), "before is 5; expected a mapping"),
    "save_step": (lambda _: amp.save_step("step.npz", None), "a program as second argument, got None"),
    "CsvWriter": (lambda _: CsvWriter(None), "output is None; expected the path of a file"),
    "TensorBoardWriter": (lambda _: TensorBoardWriter(None), "folder is None; expected the path of a folder"),
    "cache_dir": (lambda _: amp.Executor(cache_dir="a\0b"), "cache_dir is .*; expected the path of a folder"),
    "JsonlWriter": (lambda _: JsonlWriter(5), "output is 5; expected the path of a file"),
    "Pipeline": (lambda _: amp.Pipeline(5), "takes passes, or their text, .* got 5"),
    "Pipeline of numbers": (lambda _: amp.Pipeline([5]), "takes passes, or their text, .* got 5"),
    "shard_tables": (lambda _: amp.distributed.shard_tables(None), "a list of variables, got None"),
    "shard_tables by name": (lambda _: amp.distributed.shard_tables(["t"]), r"a list of variables, got \['t'\]"),
    "fc": (lambda _: amp.nn.fc(amp.data("z", [2, 2]), 2, name=5), "fc: name is 5; expected a string"),
    "batch_norm": (lambda _: amp.nn.batch_norm(amp.data("q", [2, 2]), name=5), "batch_norm: name is 5"),
    "shown": (lambda net: amp.gradient_underflow(net[0], {}, net[3], target="a"), "target is 'a'"),
    "clip": (lambda _: amp.optimizer.ClipGradByValue("a", min="b"), "max is 'a'; expected a number"),
    "schedule": (lambda _: amp.optimizer.lr.StepDecay(0.1, 1).set_state_dict({}), "takes what state_dict gave, got {}"),
    "run": (lambda _: amp.Pipeline("canonicalize").run(None), "runs on a program, got None"),
    "transpose": (
        lambda net: amp.load_weights(Path("w.npz"), net[0], net[3], transpose=None),
        "transpose takes strings, .* got None",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_function_does_not_take_is_named(
    name: str, net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("w.npz", a=np.zeros(3))
    call, told = CALLS[name]
    with amp.program_guard(amp.Program(), amp.Program()), pytest.raises((ArgumentError, ArgumentTypeError), match=told):
        call(net)
    assert [path.name for path in tmp_path.iterdir()] == ["w.npz"]


@pytest.mark.parametrize("name", [None, 5])
def test_a_variable_by_something_else_than_its_name(name: Any, net: Net) -> None:
    with pytest.raises(GraphError, match=f"has no variable '{name}'"):
        net[0].var(name)


def test_what_catches_a_wrong_value_catches_a_wrong_type() -> None:
    kinds = {name: kind for name, kind in vars(amp.errors).items() if isinstance(kind, type)}
    of_types = {name for name, kind in kinds.items() if issubclass(kind, TypeError)}
    assert of_types >= {"ArgumentTypeError", "ListTypeError", "FeedTypeError"}
    assert all(issubclass(kinds[name], kinds[name.replace("Type", "")]) for name in of_types)
