"""What a terminal is sent: nothing that a model could steer it with, in any locale; clear words where it takes nothing."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from amp_transpiler.cli import main
from amp_transpiler.cli.output import Patient
from amp_transpiler.cli.terminal import printable
from tests.helpers.where import ORACLES, ROOT

EVIL = "a\x1b[31mb\x9bc\u202ed\u2066e\rf\x00g\nfloat16  forged"
SHOWN = "a\\x1b[31mb\\x9bc\\u202ed\\u2066e\\x0df\\x00g\\x0afloat16  forged"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1, 2, 3, 4}> { h = MatMul(x, w)  y = Softmax(h) }""")
    made.graph.node[0].name = made.graph.node[0].output[0] = made.graph.node[1].input[0] = EVIL
    made.graph.node[1].output[0] = made.graph.output[0].name = EVIL + "!"
    made.graph.input[0].name = made.graph.node[0].input[0] = EVIL + "?"
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = EVIL
    onnx.save(made, tmp_path / "evil.onnx")
    return tmp_path / "evil.onnx"


def steering(text: str) -> set[str]:
    return {c for c in text if (c < " " and c != "\n") or "\x7f" <= c < "\xa0" or c in "\u202a\u202e\u2066\u2069\u200f"}


@pytest.mark.parametrize(
    "command",
    [
        "info {m}",
        "explain {m}",
        "explain {m} *",
        "explain {o}",
        "diff {m} {o}",
        "convert {m} {o} --check",
        "convert {m} {m}",
        "convert {m} {o} --input-range q=1:2",
        "convert {m} {o} --keep-io q",
        "explain {m} ab",
    ],
)
def test_names_cannot_steer_the_terminal(command: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = model.parent / "out.onnx"
    main(["convert", str(model), str(out), "--quiet"])
    main([a.format(m=model, o=out) for a in command.split()])
    captured = capsys.readouterr()
    assert not steering(captured.out) and not steering(captured.err)
    assert not any(line.startswith("float16  forged") for line in (captured.out + captured.err).splitlines())
    if command in ("info {m}", "explain {m} *", "convert {m} {o} --check"):
        assert SHOWN in captured.out


def test_the_report_cannot_be_steered_either(model: Path, tmp_path: Path) -> None:
    for source in (model, ORACLES / "hostile" / "s_metadata_evil.onnx"):
        page, data = tmp_path / "r.html", tmp_path / "r.json"
        assert (
            main(
                [
                    "convert",
                    str(source),
                    str(tmp_path / "o.onnx"),
                    "--report",
                    str(page),
                    "--json",
                    str(data),
                    "--quiet",
                ]
            )
            == 0
        )
        text = page.read_text("utf-8")
        assert not steering(text) and not steering(data.read_text("ascii"))
        assert text.count("<script") == text.count("</script") == Path(page).read_text("utf-8").lower().count("<script")


def run(*arguments: str, stdout: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "amp_transpiler.cli", *arguments],
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE if stdout is None else stdout,
        encoding="utf-8",
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_output_that_is_full_is_one_clear_error(model: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run("info", str(model), stdout=full.fileno())
    assert done.returncode == 1
    assert done.stderr == "amp-transpile: standard output cannot be written: No space left on device\n"


def test_a_reader_that_has_gone_is_no_error(model: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = run("info", str(model), stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [(1,), (1, 2)])
def test_an_output_that_is_closed_takes_everything(model: Path, tmp_path: Path, closed: tuple[int, ...]) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "amp_transpiler.cli", "convert", str(model), str(tmp_path / "half.onnx")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=None if 2 in closed else subprocess.PIPE,
        preexec_fn=lambda: [os.close(one) for one in closed],
        timeout=120,
    )
    assert made.returncode == 0 and not made.stderr
    onnx.checker.check_model(onnx.load(tmp_path / "half.onnx"))


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["ascii", "C"],
)
@pytest.mark.parametrize("names", [[], ["größe×"]])
def test_explain_under_an_ascii_locale(names: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    made = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[2,2] x) => (float[2,2] y) <float[2,2] w = {1, 2, 3, 4}> { h = MatMul(x, w)  y = Relu(h) }""")
    made.graph.node[0].name = "größe×"
    onnx.save(made, tmp_path / "m.onnx")
    done = run("explain", str(tmp_path / "m.onnx"), *names, **environment)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.isascii()
    assert "gr\\xf6\\xdfe\\xd7" in done.stdout


def test_nothing_is_said_of_an_output_that_was_closed_before() -> None:
    stream = io.TextIOWrapper(io.BytesIO())
    output = Patient(stream)
    output.write("line\n")
    stream.close()
    output.close()  # what the end of its life does, which Python 3.14 reports
    assert output.trouble is None


def test_ordinary_text_is_printed_as_it_is() -> None:
    assert printable("encoder/layer.0 größe 漢字 ×") == "encoder/layer.0 größe 漢字 ×"
    assert printable("\udcff") == "\\udcff" and printable("a\tb") == "a\\x09b"


def test_a_message_shows_both_ends_of_a_very_long_name(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(model), "a" * 100_000 + "z"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("amp-transpile: explain: the model has no operator or tensor 'aaa") and line.endswith(
        "aaaz'\n"
    )
    assert len(line) < 2100 and " … " in line
