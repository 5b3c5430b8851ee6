"""How long each kernel of a training step takes on a GPU, by the node that launched it.

    python -m tests.benchmarks.kernel_times bert pure [--out TIMES.jsonl] [--provider-option KEY=VALUE ...]

Needs a GPU, ``onnxruntime-gpu`` and a torch with CUDA in one environment: torch's profiler sees the kernels of the whole
process (CUPTI), onnxruntime's says which node ran when; a kernel is of the node during which the host launched it. Prints
the operators that take most, and the kernels that do; ``--out`` gets a line of JSON for each node of the last step: operator,
name, element types and shapes of operands and results, and its kernels with microseconds and grids.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime as ort

import amp_transpiler as amp
from amp_transpiler.files import check_outputs
from amp_transpiler.ir.kernel_cost import launches
from amp_transpiler.ir.types import BYTES
from amp_transpiler.runtime.missing import cuda_missing
from tests.benchmarks.gpu import SIZES, TINY, feeds, used
from tests.helpers.benchmark_programs import MODES, training

Event = dict[str, Any]
SETTLING, TRACED = 4, 2
_CANDIDATES, _SAMPLES = 60, 300
#: Names that onnxruntime's profile has for element types.
_TYPES = {"float": "float32", "double": "float64"}


def traced(asked: argparse.Namespace, folder: Path) -> tuple[list[Event], list[Event], float]:
    """The events of onnxruntime's profile and of torch's trace, and milliseconds of a step that nothing records."""
    from torch.profiler import ProfilerActivity, profile

    options = dict(option.split("=", 1) for option in asked.provider_option)
    sessions: list[Any] = []
    create = ort.InferenceSession
    recorded = False

    def profiled(model: Any, settings: Any, providers: Any = (), **others: Any) -> Any:
        if recorded:
            settings.enable_profiling, settings.profile_file_prefix = True, str(folder / str(len(sessions)))
        named = [(each[0], each[1] | options) if isinstance(each, tuple) else each for each in providers]
        sessions.append(create(model, settings, providers=named, **others))
        return sessions[-1]

    place = amp.CUDAPlace(0)
    main, startup, loss, optimizer = training(asked.model, asked.mode, **(TINY if asked.tiny else SIZES)[asked.model])
    scope, feed = amp.Scope(), feeds(main)

    def steps(executor: amp.Executor, count: int) -> float:
        staged = executor.stage(feed)
        begin = time.perf_counter()
        for _ in range(count):
            executor.run(main, staged, [loss], scope)
        return (time.perf_counter() - begin) / count * 1e3

    with mock.patch.object(ort, "InferenceSession", profiled):
        with closing(amp.Executor(place, threads=1)) as executor:
            memory = [used()]
            executor.run(startup, scope=scope)
            if asked.mode != "fp32":
                optimizer.amp_init(place, scope=scope)
            memory.append(used())
            steps(executor, SETTLING)
            alone = steps(executor, asked.steps)
            memory.append(used())
        taken = " and ".join(f"{(each - memory[0]) / 2**20:,.0f}" for each in memory[1:])
        print(f"{taken} MiB of the device after the startup program and the steps")
        recorded, made = True, len(sessions)
        with closing(amp.Executor(place, threads=1)) as executor:
            steps(executor, SETTLING)
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                steps(executor, TRACED)
        trace.export_chrome_trace(str(folder / "trace.json"))
    own = [json.loads(Path(session.end_profiling()).read_text(encoding="utf-8")) for session in sessions[made:]]
    return max(own, key=len), json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"], alone


def by_node(profile: Iterable[Event], trace: Iterable[Event]) -> list[dict[str, Any]]:
    """The nodes of the last step, each with the kernels that were launched while it ran.

    The clocks of the two have different beginnings, which are laid upon each other so that most launches fall into nodes
    that launch.
    """
    nodes = sorted((e for e in profile if e["name"].endswith("_kernel_time")), key=lambda e: e["ts"])
    runs = sorted(e["ts"] for e in profile if e["name"] == "model_run")
    trace = [e for e in trace if "correlation" in e.get("args", {})]
    launched = {e["args"]["correlation"]: e["ts"] for e in trace if e["cat"] in ("cuda_runtime", "cuda_driver")}
    kernels = [e for e in trace if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels = sorted((e for e in kernels if e["args"]["correlation"] in launched), key=lambda e: e["ts"])
    nodes = [e for e in nodes if e["ts"] >= runs[-TRACED]]
    begins = [e["ts"] for e in nodes]
    at = np.array([launched[e["args"]["correlation"]] for e in kernels])

    def node_of(time: float) -> int | None:
        number = bisect.bisect_right(begins, time) - 1
        return number if number >= 0 and time <= nodes[number]["ts"] + nodes[number]["dur"] else None

    launching = [launches(e["args"]["op_name"]) for e in nodes]

    def fits(offset: float, times: Sequence[float]) -> int:
        numbers = (node_of(time - offset) for time in times)
        return sum(-1 if number is None or not launching[number] else 1 for number in numbers)

    some = at[:: 1 + len(at) // _SAMPLES]
    offsets = [float(a - b) for a in at[:_CANDIDATES] for b in begins[:_CANDIDATES]]
    near = sorted(offsets, key=lambda offset: fits(offset, some))[-5:]
    offset = max((n + step / 2 for n in near for step in range(-40, 41)), key=lambda offset: fits(offset, at))
    found: list[dict[str, Any]] = [_record(node) for node in nodes]
    outside = 0.0
    for kernel, time_ in zip(kernels, at, strict=True):
        number = node_of(time_ - offset)
        if number is None:
            outside += kernel["dur"]
            continue
        found[number]["kernels"].append([kernel["name"], kernel["dur"], kernel["args"].get("grid")])
    print(f"{len(kernels)} kernels of {TRACED} steps, {outside / TRACED:.0f} us a step of those outside of nodes")
    return [record for record, node in zip(found, nodes, strict=True) if node["ts"] >= runs[-1]]


def _record(node: Event) -> dict[str, Any]:
    args = node["args"]
    return {
        "operator": args["op_name"],
        "name": node["name"].removesuffix("_kernel_time"),
        "inputs": args.get("input_type_shape", []),
        "outputs": args.get("output_type_shape", []),
        "host": node["dur"],
        "kernels": [],
    }


def moved(record: dict[str, Any]) -> int:
    """Bytes of operands and results, each whole."""
    sizes = [item for each in (*record["inputs"], *record["outputs"]) for item in each.items()]
    return sum(prod(shape) * BYTES.get(_TYPES.get(kind, kind), 1) for kind, shape in sizes)


def summary(records: Sequence[dict[str, Any]], rows: int) -> Iterable[str]:
    """The operators, shapes and kernels that take most."""
    for title, key in (("operator", _operator), ("operands", _operands)):
        spent: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
        for record in records:
            took = sum(kernel[1] for kernel in record["kernels"])
            for number, amount in enumerate((took, len(record["kernels"]), moved(record) if took else 0)):
                spent[key(record)][number] += amount
        yield f"{'us':>9} {'kernels':>7} {'GB/s':>7}  {title}"
        for name, (took, count, size) in sorted(spent.items(), key=lambda each: -each[1][0])[:rows]:
            yield f"{took:9.1f} {count:7.0f} {size / took / 1e3 if took else 0:7.0f}  {name}"
    names: collections.Counter[str] = collections.Counter()
    for record in records:
        for name, took, _ in record["kernels"]:
            names[name[:110]] += took
    yield f"{'us':>9}  kernel"
    for name, took in names.most_common(rows):
        yield f"{took:9.1f}  {name}"


def _operator(record: dict[str, Any]) -> str:
    return str(record["operator"])


def _operands(record: dict[str, Any]) -> str:
    shapes = [" ".join(f"{k}{v}" for k, v in each.items()) for each in record["inputs"]]
    return f"{record['operator']} {', '.join(shapes)}"[:150]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(SIZES))
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--out", metavar="TIMES.jsonl", help="file to write every node to")
    parser.add_argument(
        "--provider-option", metavar="KEY=VALUE", action="append", default=[], help="of CUDA's provider"
    )
    parser.add_argument("--rows", type=int, default=25, help="lines of each list (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed alone (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="sizes that take no time")
    asked = parser.parse_args(arguments)
    try:
        check_outputs({"--out": asked.out}, {})
    except amp.AmpError as error:
        parser.error(str(error))
    if why := cuda_missing(0):
        parser.exit(2, f"not run: {why}\n")
    with tempfile.TemporaryDirectory() as folder:
        profile, trace, alone = traced(asked, Path(folder))
    records = by_node(profile, trace)
    busy = sum(kernel[1] for record in records for kernel in record["kernels"]) / 1e3
    print(f"{asked.model} {asked.mode}: {alone:.2f} ms a step, {busy:.2f} ms of kernels")
    print("\n".join(summary(records, asked.rows)))
    if asked.out:
        Path(asked.out).write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    main()
