"""What an executor and a conversion do not take is named before anything runs."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, ArgumentTypeError


def test_a_feed_that_comes_twice_is_named() -> None:
    with amp.program_guard(main := amp.Program(), amp.Program()):
        x = amp.data("x", [2])
        y = x + 1.0
        with pytest.raises(ArgumentError, match="feed has 'x' twice, as a variable and by its name"):
            amp.Executor().run(main, feed={"x": np.ones(2, np.float32), x: np.ones(2, np.float32)}, fetch_list=[y])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tf32": "no"}, "tf32 is 'no'; expected True or False"),
        ({"allow_cpu_fallback": 1}, "allow_cpu_fallback is 1; expected True or False"),
        ({"optimization_level": []}, "optimization_level is .*; expected one of "),
        ({"threads": 1.5}, "threads is 1.5; expected a whole number"),
        ({"max_sessions": "3"}, "max_sessions is '3'; expected a whole number"),
        ({"host_tables": "table"}, r"host_tables is a list of variables or names; got 'table', write \['table'\]"),
        ({"host_tables": {3}}, "host_tables holds variables or names, got 3"),
        ({"host_tables": np.array(["table"])}, "host_tables is a list of variables or names"),
    ],
)
def test_settings_of_an_executor(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(amp.AmpError, match=words):
        amp.Executor(**settings)


def test_threads_are_any_whole_number() -> None:
    with amp.program_guard(main := amp.Program(), amp.Program()):
        y = amp.data("x", [2]) + 1.0
        (found,) = amp.Executor(threads=np.int64(2)).run(main, {"x": np.ones(2, np.float32)}, [y])  # type: ignore[arg-type]
    assert found.tolist() == [2, 2]


def test_a_program_trains_where_no_file_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that a session runs is read from a file of a moment; without it, updates have two buffers."""

    def full(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with amp.program_guard(main := amp.Program(), startup := amp.Program()), amp.unique_name.guard():
        loss = amp.nn.functional.mean(amp.nn.fc(amp.data("x", [2, 3]), 2))
        amp.optimizer.SGD(0.1).minimize(loss)
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(startup, scope=scope)
    first, second = (executor.run(main, {"x": np.ones((2, 3), np.float32)}, [loss], scope=scope)[0] for _ in range(2))
    assert second < first
    assert set(executor.memory_report(main).two_buffers) == {"fc_0.w_0", "fc_0.b_0"}


def test_what_is_no_model_is_not_converted() -> None:
    for wrong in (None, {}, 3):
        with pytest.raises(ArgumentTypeError):
            amp.convert(wrong)  # type: ignore[arg-type]
