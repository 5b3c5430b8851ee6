"""Converted models on WebGPU beside fp32 on CPU, where a session has it (see tests/tools/webgpu_run.py):

    python -m tests.benchmarks.webgpu_models [--exports FOLDER] [--only NAME ...] [--out TABLE.md]

FOLDER holds what ``python -m tests.tools.export_models`` wrote; the trained models come from AMP_TEST_DATA. Errors are
relative L2 errors of the worst output. "storage": of the plain fp16 conversion, rounded wherever 16 bit is stored and
nowhere else, on CPU; "replayed": with the sums of WebGPU as well (``amp.check_model``). "fp32", "plain", "for WebGPU": of the model itself, of that conversion and of ``place="webgpu"`` on the
device; "ratio": the last in storage roundings. Each model has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import amp_transpiler as amp
from tests.helpers.converting import faithful, off
from tests.helpers.webgpu_sessions import PROVIDER, built_in, devices, missing

TRAINED = Path(os.environ.get("AMP_TEST_DATA", "")) / "onnx_models"
COLUMNS = ("model", "fp16", "on CPU", "storage", "replayed", "fp32", "plain", "for WebGPU", "ratio", "bytes")


def models(exports: Path | None) -> Iterator[tuple[str, Path]]:
    """Names and files."""
    for path in sorted(exports.glob("*.onnx")) if exports is not None else ():
        yield path.stem, path
    for path in sorted(TRAINED.glob("*.onnx.xz")):
        yield path.name.removesuffix(".onnx.xz"), path


def feeds_of(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The input that lies beside an export, or that a trained model's recorded outputs were computed from."""
    if path.suffix == ".onnx":
        return dict(np.load(path.with_suffix(".npz")))
    random, feeds = np.random.default_rng(0), {}
    spec = json.loads((TRAINED / "golden_spec.json").read_text())[path.name.removesuffix(".onnx.xz")]
    for key, (dtype, shape) in spec["inputs"].items():
        if dtype == "int64":
            feeds[key] = np.asarray(8000, np.int64)
        elif dtype == "int32":
            feeds[key] = random.integers(0, 256, shape, np.int32)
        else:
            feeds[key] = random.random(shape, dtype=np.float32)
    if "state" in feeds:  # of silero_vad
        feeds["input"] = (feeds["input"] - np.float32(0.5)) * np.float32(0.2)
        feeds["state"] = np.zeros_like(feeds["state"])
    return feeds


def run(model: bytes, feeds: Mapping[str, Any], device: bool) -> tuple[list[Any], int]:
    """The outputs on WebGPU or on CPU, as onnxruntime optimizes by default, and how many nodes stayed on CPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    providers = [PROVIDER, "CPUExecutionProvider"] if device and built_in() else ["CPUExecutionProvider"]
    if device and not built_in():
        options.add_provider_for_devices(devices(), {})
        session = onnxruntime.InferenceSession(model, options)
    else:
        session = onnxruntime.InferenceSession(model, options, providers=providers)
    assigned = session.get_provider_graph_assignment_info() if device else []
    left = sum(len(part.get_nodes()) for part in assigned if part.ep_name == "CPUExecutionProvider")
    return session.run(None, dict(feeds)), left


def worst(got: list[Any], wanted: list[Any]) -> float:
    """The error of the output that is furthest off."""
    return max(off(np.asarray(one), np.asarray(other)) for one, other in zip(got, wanted, strict=True))


def measured(name: str, path: Path) -> dict[str, Any]:
    """A row of the table."""
    raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    model, feeds = onnx.load_from_string(raw), feeds_of(path)
    wanted, _ = run(raw, feeds, device=False)
    plain = amp.convert(model)
    found: dict[str, Any] = {"model": name, "storage": worst(faithful(plain, feeds), wanted)}
    found["replayed"] = _or_message(
        lambda: max(amp.check_model(plain.to_onnx(), "webgpu", data=feeds).outputs.values())
    )
    found["fp32"] = _or_message(lambda: worst(run(raw, feeds, device=True)[0], wanted))
    found["plain"] = _or_message(lambda: worst(run(plain.to_onnx().SerializeToString(), feeds, device=True)[0], wanted))
    program = amp.convert(model, place="webgpu")
    written = program.to_onnx().SerializeToString()
    got, found["on CPU"] = run(written, feeds, device=True)
    found["for WebGPU"] = worst(got, wanted)
    found["ratio"] = found["for WebGPU"] / found["storage"]
    own = [op for op in program.walk() if not op.inserted]
    found["fp16"] = f"{sum(op.precision == 'float16' for op in own)}/{len(own)}"
    found["bytes"] = len(written) / len(raw)
    return found


def _or_message(compute: Any) -> Any:
    try:
        return compute()
    except Exception as error:  # onnxruntime's errors have no common base
        return f"fails: {str(error).splitlines()[0][-60:]}"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for row in rows:
        cells = [row.get(column, "") for column in COLUMNS]
        lines.append(
            "| " + " | ".join(f"{cell:.2g}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure all, one process each; 1 where a conversion is more than twice its storage roundings off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exports", type=Path)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    found = {name: path for name, path in models(options.exports) if not options.only or name in options.only}
    if options.child:
        print(json.dumps(measured(options.child, found[options.child])))
        return 0
    lacking = missing()
    if lacking or not found:
        print(lacking or "no models: give --exports FOLDER, or set AMP_TEST_DATA")
        return 1
    rows = []
    for name in found:
        begun = time.monotonic()
        child = [sys.executable, "-m", "tests.benchmarks.webgpu_models", "--child", name]
        child += ["--exports", str(options.exports)] if options.exports else []
        done = subprocess.run(child, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            tail = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        rows.append(json.loads(lines[-1]) if lines else {"model": name, "for WebGPU": f"fails: {tail[0][-80:]}"})
        print(table(rows[-1:]).splitlines()[-1], f"{time.monotonic() - begun:.0f} s", flush=True)
    if options.out:
        options.out.write_text(table(rows) + "\n", encoding="utf-8")
    return int(not all(isinstance(row.get("ratio"), float) and row["ratio"] <= 2 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
