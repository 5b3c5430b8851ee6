"""Step reports: every number against a fetched or recomputed one, no cost unless asked for, lines and files."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, MissingPackageError, ModelFileWriteError, OrderError
from amp_transpiler.nn import functional as F
from tests.helpers import programs
from tests.helpers.cuda_kernels import without_cuda_kernel
from tests.helpers.full_disk import full_disk


def started(name: str, mode: str, **options: object) -> tuple[programs.Net, amp.Executor, amp.Scope]:
    net = programs.build(name, mode, **options)
    exe, scope = amp.Executor(amp.CPUPlace(), threads=1), amp.Scope()
    exe.run(net.startup, scope=scope)
    if mode != "fp32":
        net.optimizer.amp_init(amp.CPUPlace(), scope)
    return net, exe, scope


@pytest.mark.parametrize("name", ["use_case", "transformer"])
@pytest.mark.parametrize("mode", ["fp32", "amp", "pure-fp16"])
def test_a_report_says_what_fetching_says(name: str, mode: str) -> None:
    net, exe, scope = started(name, mode)
    pairs = [(p.name, f"{p.name}@GRAD" + ("@UNSCALED" if mode != "fp32" else "")) for p in net.main.parameters]
    reports = amp.StepReports(net.main, step=7)
    for number in range(2):
        loss, report, *grads = exe.run(net.main, net.feeds, [net.loss, reports, *(g for _, g in pairs)], scope)
        assert report.step == 7 + number and report.loss == float(loss) == report.losses[net.loss.name]
        assert (report.found_inf, report.skipped, report.checked) == (False, False, mode != "fp32")
        assert report.learning_rate == np.float32(0.001)
        squares = {p: float(np.square(g.astype(np.float64)).sum()) for (p, _), g in zip(pairs, grads, strict=True)}
        assert report.grad_norm == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-5)
        assert report.grad_norms == pytest.approx({p: math.sqrt(s) for p, s in squares.items()}, rel=1e-5)
        zeros = {p: float((g == 0).mean()) for (p, _), g in zip(pairs, grads, strict=True)}
        assert report.zero_shares == pytest.approx(zeros)
        assert report.zero_share == pytest.approx(sum((g == 0).sum() for g in grads) / sum(g.size for g in grads))
        if mode == "fp32":
            assert (report.loss_scaling, report.next_loss_scaling, report.num_good_steps) == (None, None, None)
        else:
            assert (report.loss_scaling, report.num_good_steps, report.num_bad_steps) == (128.0, number + 1, 0)


def test_bad_steps_scales_and_groups() -> None:
    net, exe, scope = started(
        "transformer", "amp", init_loss_scaling=2.0**30, decr_every_n_nan_or_inf=2, decr_ratio=0.5
    )
    groups = {"attention": "multi_head_attention_0*", "fc": ["fc_*", "re:.*nothing|fc_0.*"]}
    plain, grouped = amp.StepReports(net.main), amp.StepReports(net.main, groups=groups)
    seen = [exe.run(net.main, net.feeds, [plain, grouped], scope) for _ in range(3)]
    scales = [(report.loss_scaling, report.next_loss_scaling) for report, _ in seen]
    assert scales == [(2.0**30, 2.0**30), (2.0**30, 2.0**29), (2.0**29, 2.0**29)]
    assert [report.num_bad_steps for report, _ in seen] == [1, 0, 1]
    assert all(report.skipped and report.found_inf for report, _ in seen)
    report, by_group = seen[1]
    assert set(report.found_inf_by_parameter) == {p.name for p in net.main.parameters}
    assert "multi_head_attention_0/*" in report.found_inf_by_group and "fc_0.*" in report.found_inf_by_group
    assert set(by_group.found_inf_by_group) == {"attention", "fc", "others"}
    assert "scale 1.07374e+09 -> 5.36871e+08, skipped (overflow in all gradients)" in str(report)


def test_only_the_groups_that_overflow_are_named() -> None:
    net, exe, scope = started("mlp", "amp", init_loss_scaling=2.0**12)
    w = scope.find_var("fc_0.w_0")
    reports = amp.StepReports(net.main)
    feeds = {**net.feeds, "image": np.full((4, 784), 60000, np.float32)}
    scope.set_var("fc_0.w_0", w * np.float32(1e-6))
    report = exe.run(net.main, feeds, [reports], scope)[0]
    assert report.found_inf_by_group == {"fc_0.*": True, "fc_1.*": False, "fc_2.*": False}
    assert report.found_inf_by_parameter == {
        name: name == "fc_0.w_0" for name in ("fc_0.w_0", "fc_0.b_0", "fc_1.w_0", "fc_1.b_0", "fc_2.w_0", "fc_2.b_0")
    }
    assert "skipped (overflow in fc_0.*)" in str(report) and report.to_dict()["overflow"] == ["fc_0.*"]


def test_a_run_without_a_report_costs_nothing_and_one_with_changes_no_bit() -> None:
    with_report, exe, scope = started("transformer", "amp")
    reports = amp.StepReports(with_report.main)
    without, other_exe, other_scope = started("transformer", "amp")
    shapes = {name: value.shape for name, value in without.feeds.items()}
    models = [net.main.lower(amp.CPUPlace(), shapes, [net.loss.name]).model for net in (with_report, without)]
    assert models[0].SerializeToString() == models[1].SerializeToString()
    for _ in range(3):
        loss = exe.run(with_report.main, with_report.feeds, [with_report.loss, reports], scope)[0]
        assert loss == other_exe.run(without.main, without.feeds, [without.loss], other_scope)[0]
    for name in other_scope.var_names():
        assert scope.find_var(name).tobytes() == other_scope.find_var(name).tobytes()
    amp.check_step(with_report.main)


@pytest.mark.parametrize("name", ["use_case", "transformer"])
def test_reports_stay_on_cuda(name: str) -> None:
    net = programs.build(name, "pure-fp16")
    reports = amp.StepReports(net.main)
    shapes = {feed: value.shape for feed, value in net.feeds.items()}
    model = net.main.lower(amp.CUDAPlace(0), shapes, [net.loss.name, *(v.name for v in reports.variables)]).model
    assert not without_cuda_kernel(model)


@pytest.mark.gpu
def test_a_report_from_cuda() -> None:
    net = programs.build("transformer", "pure-fp16", init_loss_scaling=2.0**30)
    exe, scope = amp.Executor(amp.CUDAPlace(0)), amp.Scope()
    exe.run(net.startup, scope=scope)
    net.optimizer.amp_init(amp.CUDAPlace(0), scope)
    loss, report = exe.run(net.main, net.feeds, [net.loss, amp.StepReports(net.main)], scope)
    assert isinstance(loss, np.ndarray) and all(value.device_name() == "cuda" for value in report.values)
    assert report.skipped and report.loss == float(loss) and report.loss_scaling == 2.0**30


def test_values_are_copied_when_they_are_read() -> None:
    net, exe, scope = started("mlp", "amp")
    report = exe.run(net.main, net.feeds, [amp.StepReports(net.main)], scope, return_numpy=False)[0]
    assert all(hasattr(value, "device_name") for value in report.values)
    assert report.loss_scaling == 128.0
    assert [isinstance(value, np.ndarray) for value in report.values] == [True, False, False, False]


def test_several_losses_and_accumulation() -> None:
    main, startup = amp.Program(), amp.Program("startup")
    startup.seed = 1
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [4, 3], "float32")
        loss = F.mean(amp.nn.fc(x, 2))
        opt = amp.decorate(amp.optimizer.SGD(0.1), init_loss_scaling=4.0, accumulate_steps=2)
        opt.minimize(loss, startup)
        extra = F.mean(x)
    exe, scope = amp.Executor(), amp.Scope()
    exe.run(startup, scope=scope)
    reports = amp.StepReports(main, loss=[loss, extra.name])
    feeds = [{"x": np.full((4, 3), value, np.float32)} for value in (1, 2, np.inf, 3)]
    seen = [exe.run(main, feed, [reports], scope)[0] for feed in feeds]
    assert [report.micro_batch for report in seen] == [1, 2, 1, 2]
    assert [report.found_inf for report in seen] == [False, False, True, True]
    assert [report.skipped for report in seen] == [False, False, False, True]
    assert seen[1].losses[extra.name] == 2 and seen[1].loss == sum(seen[1].losses.values())
    assert seen[1].grad_norms["fc_0.b_0"] == pytest.approx(math.sqrt(0.5))  # the sum of two halves
    assert "step 2 (1 of 2)" in str(seen[2]) and "bad (overflow" in str(seen[2]) and "skipped" in str(seen[3])


def test_lines() -> None:
    net, exe, scope = started("use_case", "amp")
    assert str(exe.run(net.main, net.feeds, [amp.StepReports(net.main, step=120)], scope)[0]) == (
        "step 120: loss 4.15, scale 128, lr 0.001, |g| 0.693"
    )


# -- files --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def run_of_three() -> list[object]:
    net, exe, scope = started("mlp", "amp", init_loss_scaling=2.0**30)
    reports = amp.StepReports(net.main)
    seen = [exe.run(net.main, net.feeds, [reports], scope)[0] for _ in range(2)]
    scope.set_var("loss_scaling_0", np.array([8.0], np.float32))
    return [*seen, exe.run(net.main, net.feeds, [reports], scope)[0]]


def test_csv(tmp_path: object, run_of_three: list[object]) -> None:
    path = tmp_path / "steps.csv"
    with amp.CsvWriter(path) as writer:
        writer.write(run_of_three[0])
        assert len(path.read_text().splitlines()) == 2  # readable while training goes on
        writer.write(run_of_three[1])
    with amp.CsvWriter(path, append=True) as writer:
        writer.write(run_of_three[2])
    rows = list(csv.DictReader(path.open()))
    assert [row["step"] for row in rows] == ["0", "1", "2"] and list(rows[0]) == list(run_of_three[0].to_dict())
    assert rows[0]["skipped"] == "True" and rows[0]["overflow"] == "fc_0.* fc_1.* fc_2.*"
    assert float(rows[2]["loss"]) == run_of_three[2].loss and rows[2]["overflow"] == ""


def test_a_file_that_was_cut_short_is_gone_on_with(tmp_path: Path, run_of_three: list[Any]) -> None:
    for kind, name in ((amp.CsvWriter, "log.csv"), (amp.JsonlWriter, "log.jsonl")):
        path = tmp_path / name
        with kind(path) as writer:
            for report in run_of_three[:2]:
                writer.write(report)
        whole = path.read_text()
        path.write_text(whole[:-9])
        with kind(path, append=True) as writer:
            writer.write(run_of_three[1])
        lines = path.read_text().splitlines()
        assert lines[-1] == whole.splitlines()[-1] and lines[-2] == lines[-1][:-8]


@pytest.mark.parametrize("kind", [amp.CsvWriter, amp.JsonlWriter, amp.TensorBoardWriter])
def test_a_closed_writer_says_so(kind: Any, tmp_path: Path, run_of_three: list[Any]) -> None:
    with kind(tmp_path / "log") as writer:
        writer.write(run_of_three[0])
    with pytest.raises(ArgumentError, match=f"{kind.__name__}.write: the writer is closed"):
        writer.write(run_of_three[1])


@pytest.mark.parametrize("kind", [amp.CsvWriter, amp.JsonlWriter, amp.TensorBoardWriter])
def test_what_a_full_disk_does_not_take_is_named(kind: Any, tmp_path: Path, run_of_three: list[Any]) -> None:
    with (
        full_disk(900),
        pytest.raises(ModelFileWriteError, match=f"'{tmp_path}/log' cannot be written: File too large"),
        kind(tmp_path / "log") as writer,
    ):
        for _ in range(20):
            writer.write(run_of_three[2])


@pytest.mark.parametrize("content", [b"time,foo\n1,2\n", b"\xff\xfe\x00"])
def test_a_file_of_something_else_is_not_gone_on_with(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_bytes(content)
    with pytest.raises(amp.errors.ModelFileWriteError, match="names no columns of step reports"):
        amp.CsvWriter(tmp_path / "other.csv", append=True)


def test_jsonl(tmp_path: object, run_of_three: list[object]) -> None:
    path = tmp_path / "steps.jsonl"
    with amp.JsonlWriter(path) as writer:
        for report in run_of_three:
            writer.write(report)
    records = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert records[2] == run_of_three[2].to_dict()
    assert records[0]["grad_norm"] == "nan" and records[0]["overflow"] == ["fc_0.*", "fc_1.*", "fc_2.*"]


def test_tensorboard_is_asked_for_by_name(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingPackageError, match="pip install tensorboardX") as caught:
        amp.TensorBoardWriter(tmp_path)
    assert isinstance(caught.value, ImportError)


def records(content: bytes) -> Iterator[bytes]:
    """Of a TFRecord file: a length of 8 bytes, its checksum of 4, the record, its checksum of 4."""
    while content:
        length = int.from_bytes(content[:8], "little")
        yield content[12 : 12 + length]
        content = content[16 + length :]


@pytest.mark.skipif(importlib.util.find_spec("tensorboardX") is None, reason="tensorboardX is not installed")
def test_tensorboard(tmp_path: object, run_of_three: list[object]) -> None:
    from tensorboardX.proto.event_pb2 import Event

    with amp.TensorBoardWriter(tmp_path, parameters=True) as writer:
        for report in run_of_three:
            writer.write(report)
    (path,) = tmp_path.iterdir()
    scalars: dict[tuple[str, int], float] = {}
    for record in records(path.read_bytes()):
        event = Event.FromString(record)
        scalars |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    assert scalars["train/loss", 2] == np.float32(run_of_three[2].loss) and scalars["train/skipped", 0] == 1
    assert ("train/grad_norm", 0) not in scalars and ("grad_norm/fc_0.w_0", 2) in scalars


# -- errors ---------------------------------------------------------------------------------------------------
def test_bad_arguments(tmp_path: object) -> None:
    net, _, _ = started("mlp", "fp32")
    with pytest.raises(OrderError, match="updates no parameter; minimize a loss first"):
        amp.StepReports(net.startup)
    with pytest.raises(ArgumentTypeError, match="expected the training program"):
        amp.StepReports(net.optimizer)
    with pytest.raises(ArgumentError, match="'bfc' matches no parameter"):
        amp.StepReports(net.main, groups={"a": "bfc"})
    with pytest.raises(ArgumentTypeError, match="groups is"):
        amp.StepReports(net.main, groups=["fc"])
    with pytest.raises(ArgumentError, match="expected one number"):
        amp.StepReports(net.main, loss="fc_0.tmp_0")
    with pytest.raises(ArgumentTypeError, match="loss is 3"):
        amp.StepReports(net.main, loss=3)
    with pytest.raises(ArgumentError, match="step is -1"):
        amp.StepReports(net.main, step=-1)
    with amp.CsvWriter(tmp_path / "x.csv") as writer, pytest.raises(ArgumentTypeError, match="takes a StepReport"):
        writer.write({"loss": 1.0})
