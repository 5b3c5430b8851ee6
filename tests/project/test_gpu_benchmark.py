"""The GPU benchmark runs: up to the first call of CUDA where there is none, and on the processor to its last line."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from amp_transpiler.runtime.missing import cuda_missing
from tests.benchmarks import forms, gpu, kernel_times, profiled
from tests.helpers.where import ROOT

SHORT = ["--tiny", "--models", "bert", "--modes", "pure"]


class Elsewhere:
    """torch's side, where there is none."""

    def ask(self, what: str) -> Any:
        return 2.0

    def close(self) -> None:
        pass


def begin(asked: gpu.Asked, torch: str | None = None, profiled: bool = False) -> Any:
    """Ours in this process."""
    return gpu.Ours(asked) if torch is None else Elsewhere()


def test_what_launches_nothing_costs_nothing() -> None:
    """Nor do graphs, whose nodes are events of their own, nor the first run."""

    def node(start: int, name: str, took: int) -> dict[str, Any]:
        return {"ts": start, "name": f"{name}_kernel_time", "cat": "Node", "dur": took, "args": {"op_name": name}}

    runs = [{"ts": start, "name": "model_run"} for start in (0, 10)]
    events = [node(start, name, 3) for start in (1, 11) for name in ("Mul", "Mul", "Reshape", "If", "Shape")]
    spent: collections.Counter[str] = collections.Counter()
    profiled._add_costs([*runs, *events], spent)
    assert spent == {"Mul": 6}


def test_kernels_are_of_the_nodes_that_launched_them() -> None:
    """The clocks of the two begin apart, nodes follow each other closely, and views launch nothing."""
    profile, trace = [], []
    for run in range(3):
        profile.append({"ts": 1000 * run, "name": "model_run"})
        for number in range(40):
            start, name = 1000 * run + 20 + 12 * number, ("Reshape", "Mul", "Gemm")[number % 3]
            node = {"op_name": name, "input_type_shape": [{"float16": [4, number]}], "output_type_shape": []}
            profile.append({"ts": start, "dur": 11, "name": f"n{number}_kernel_time", "args": node})
            for kernel in range(number % 3 if run else 0):
                at, key = {"correlation": len(trace)}, start + 3 + kernel + 54321.5
                trace.append({"ts": key, "dur": 1, "cat": "cuda_runtime", "name": "launch", "args": at})
                trace.append({"ts": key + 90, "dur": 7, "cat": "kernel", "name": f"{name} {kernel}", "args": at})
    records = kernel_times.by_node(profile, trace)
    assert [len(record["kernels"]) for record in records] == [number % 3 for number in range(40)]
    assert all(kernel[0].startswith(record["operator"]) for record in records for kernel in record["kernels"])
    assert kernel_times.moved(records[5]) == 4 * 5 * 2
    lines = list(kernel_times.summary(records, 2))
    assert lines[0].split() == ["us", "kernels", "GB/s", "operator"] and lines[1].split()[:2] == ["182.0", "26"]


@pytest.mark.skipif(cuda_missing(0) is None, reason="there is a device")
def test_without_a_device_everything_before_is_done(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main([*SHORT, "--out", str(tmp_path / "table.md")]) == 2
    built, message = capsys.readouterr().out.splitlines()
    assert built.startswith("built bert pure: ") and "MiB forecast at the peak" in built
    assert message.startswith("GPU benchmark not run: ") and "Everything before" in message
    assert not list(tmp_path.iterdir())


def test_on_the_processor_the_table_is_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    arguments = ["--tiny", "--models", "bert", "--modes", "mixed", "--place", "cpu", "--steps", "1", "--blocks", "2"]
    assert gpu.main([*arguments, "--device", "T4", "--out", str(out)], begin) == 0
    head, rule, *rows = out.read_text(encoding="utf-8").splitlines()
    assert head.strip("| ").split(" | ") == list(gpu.COLUMNS) and rule.count("---") == len(gpu.COLUMNS)
    cells = [row.strip("|").split("|") for row in rows]
    assert [(row[0].strip(), row[1].strip()) for row in cells] == [
        ("bert mixed, 2", side) for side in ("ours", "torch, eager", "torch, compiled")
    ]
    ours, torch = cells[0], cells[1]
    assert float(ours[2].replace(",", "")) == pytest.approx(2e3 / float(ours[3]), rel=0.02)
    assert float(ours[5].replace(",", "")) > 10 and float(ours[6]) > 0 and ours[7].count("%") == 4
    assert [cell.strip() for cell in torch[2:6]] == ["1,000.0", "2.00", "±0.0 %", "2"]
    assert "\n".join([head, rule, *rows]) in capsys.readouterr().out


def test_a_side_that_fails_says_so_in_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(asked: gpu.Asked, **_: Any) -> Any:
        raise gpu.SideFailed("out of memory | on line 3")

    assert gpu.main([*SHORT, "--place", "cpu"], fails) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.count("|") == len(gpu.COLUMNS) + 1 and row.count("not run: out of memory / on line 3") == 2


def test_what_cannot_be_written_is_refused_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for wrong in (["--out", str(tmp_path)], ["--steps", "0"], ["--models", "gpt"]):
        with pytest.raises(SystemExit) as caught:
            gpu.main([*SHORT, *wrong])
        assert caught.value.code == 2
    assert "built" not in capsys.readouterr().out


def test_a_process_answers_or_says_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "print('noise'); print('{\"ready\": \"1\"}', flush=True); print(len(input())); raise SystemExit('no memory')"
    )
    side = gpu.Process([sys.executable, "-c", script], {})
    assert side.ready == "1" and side.ask("memory") == 6
    for _ in range(2):
        with pytest.raises(gpu.SideFailed, match="no memory"):
            side.ask("memory")
    side.close()
    with pytest.raises(gpu.SideFailed, match="ended with status 3"):
        gpu.Process([sys.executable, "-c", "raise SystemExit(3)"], {})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA A1000", None),
        ("", None),
    ],
)
def test_forecasts_are_those_of_the_card(name: str, key: str | None) -> None:
    assert gpu.named_device(name) == key


@pytest.mark.parametrize("model", ["bert", "resnet"])
def test_the_torch_side_answers(model: str, torch_python: str) -> None:
    asked = asdict(gpu.Asked(model, "mixed", False, "cpu", gpu.TINY[model], False))
    script = ROOT / "tests" / "benchmarks" / "torch_gpu.py"
    done = subprocess.run(
        [torch_python, str(script), json.dumps(asked)],
        input="block 1\nmemory\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and lines[0]["ready"].startswith("torch") and min(lines[1:]) > 0, done.stderr


def test_every_form_runs_and_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    forms.main(["--place", "cpu", "--tiny", "--dtype", "float32", "--runs", "1"])
    lines = capsys.readouterr().out.splitlines()
    written = [case for make in forms.CASES.values() for case in make(True)]
    assert len(lines) == sum(1 + len(case.forms) for case in written) > 30
    assert all(line.startswith("  ") == line.endswith(" ms") for line in lines)
    with pytest.raises(SystemExit, match="2"):
        forms.main(["row", "--place", "cpu"])
    assert "there is no case row; there are weights, dense, convolutions" in capsys.readouterr().err
    if cuda_missing(0):
        with pytest.raises(SystemExit, match="2"):
            forms.main(["rows"])
        assert capsys.readouterr().err.startswith("not run: ")
