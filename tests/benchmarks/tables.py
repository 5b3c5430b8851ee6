"""Steps over large embedding tables: ``python -m tests.benchmarks.tables [--torch-python PYTHON] [--sweep]``.

A bag of 20 ids for each of 512 examples, a table of width 16 with lazy Adam, two dense layers with Adam, one thread. The
table has 10,000 rows, and 10,000,000; beside it torch's ``EmbeddingBag(sparse=True)`` with ``SparseAdam`` and ``Adam``, in
an environment of its own. Times are process time, medians of the steps; programs run in turn. ``--sweep`` has other
optimizers, widths and batches instead, in fp32; ``--clicks`` the DeepFM of ``demo/recommender.py`` with its synthetic
clicks, some ids of which are frequent and most rare; ``--apart`` tables in host memory beside the place, and tables dealt out
among 2 and 4 ranks under mpiexec, of 256 examples each; ``--memory`` what state and step take, beside what
``memory_estimate`` says, and fails where they differ.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.where import ROOT

ROWS, WIDTH, BATCH, IDS, HIDDEN, STEPS = (10_000, 10_000_000), 16, 512, 20, 64, 30

TORCH = """
import sys, time, json, torch
rows, width, batch, ids, hidden, steps = map(int, sys.argv[1:])
torch.set_num_threads(1)
bag = torch.nn.EmbeddingBag(rows, width, mode="sum", sparse=True)
net = torch.nn.Sequential(torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1))
tables, others = torch.optim.SparseAdam(bag.parameters(), lr=0.01), torch.optim.Adam(net.parameters(), lr=0.01)
times = []
for step in range(steps):
    torch.manual_seed(step)
    x, y = torch.randint(0, rows, (batch * ids,)), torch.rand(batch, 1)
    offsets = torch.arange(0, batch * ids, ids)
    begin = time.process_time()
    tables.zero_grad(); others.zero_grad()
    loss = ((net(bag(x, offsets)) - y) ** 2).mean()
    loss.backward()
    tables.step(); others.step()
    times.append(time.process_time() - begin)
print(json.dumps(times))
"""


#: The optimizers of a sweep, by name.
OPTIMIZERS: dict[str, dict[str, bool]] = {
    "SGD": {},
    "Momentum": {"lazy_mode": True},
    "Adagrad": {},
    "RowWiseAdagrad": {"row_wise": True},
    "Adam": {"lazy_mode": True},
    "AdamW": {"lazy_mode": True},
}


def prepared(rows: int, mode: str, name: str = "Adam", width: int = WIDTH, batch: int = BATCH) -> tuple[Any, ...]:
    """The program, its loss, an executor, and a scope in which the state is."""
    import amp_transpiler as amp
    from amp_transpiler.nn import functional as F

    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, begins = amp.data("x", [batch * IDS], "int64"), amp.data("offsets", [batch], "int64")
        y = amp.data("y", [batch, 1], "float32")
        bag = amp.nn.embedding_bag(x, [rows, width], begins, "sum", is_sparse=True)
        error = amp.nn.fc(amp.nn.fc(bag, HIDDEN, act="relu"), 1) - y
        loss = F.mean(error * error)
        kind = getattr(amp.optimizer, name.removeprefix("RowWise"))
        optimizer = kind(0.01, multi_precision=True, **OPTIMIZERS[name])
        if mode != "fp32":
            optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure", use_fp16_guard=False)
        optimizer.minimize(loss, startup)
    exe, scope = amp.Executor(amp.CPUPlace(), threads=1), amp.Scope()
    exe.run(startup, scope=scope)
    if mode != "fp32":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
    return main, loss, exe, scope


def feed_of(step: int, rows: int, batch: int) -> dict[str, np.ndarray]:
    """What a step is fed: any ids, as many in each bag."""
    rng = np.random.default_rng(step)
    ids, offsets = rng.integers(0, rows, batch * IDS), np.arange(0, batch * IDS, IDS)
    return {"x": ids, "offsets": offsets, "y": rng.random((batch, 1), np.float32)}


def ours(rows: int, mode: str, name: str = "Adam", width: int = WIDTH, batch: int = BATCH) -> list[float]:
    """The times of the steps, seconds."""
    main, loss, exe, scope = prepared(rows, mode, name, width, batch)
    times = []
    for step in range(STEPS):
        feed = feed_of(step, rows, batch)
        begin = time.process_time()
        exe.run(main, feed=feed, fetch_list=[loss], scope=scope)
        times.append(time.process_time() - begin)
    return times


def clicks(rows: int, mode: str) -> list[float]:
    """The times of the steps of the demo's recommender, seconds."""
    sys.path.insert(0, str(ROOT / "demo"))
    import recommender
    import tabular

    import amp_transpiler as amp

    data = tabular.clicks((STEPS + 5) * BATCH, rows)
    options = recommender.arguments().parse_args(["--table-lr", "0.05"])
    run = recommender.prepare(mode, data, options)
    exe, times = amp.Executor(amp.CPUPlace(), threads=1), []
    for step in range(STEPS):
        feed = data.train.feed(np.arange(step * BATCH, (step + 1) * BATCH))
        begin = time.process_time()
        exe.run(run.main, feed=feed, fetch_list=run.fetches, scope=run.scope)
        times.append(time.process_time() - begin)
    return times


def memory(rows: int, mode: str) -> list[float]:
    """Of this process, in MiB: state as forecast and as held, a step beside them as forecast and as measured."""
    from amp_transpiler.runtime.session import release_memory
    from tests.tools.memory_run import status, warm_up

    main, loss, exe, scope = prepared(rows, mode)
    feed = feed_of(0, rows, BATCH)
    estimate = main.memory_estimate({name: array.shape for name, array in feed.items()}, fetch_list=[loss])
    state = estimate.parameters + estimate.master_weights + estimate.moments + estimate.other_state
    held = sum(value.tensor_size_in_bytes() for value in scope.ort_values.values())
    for value in scope.ort_values.values():  # a page of zeros takes memory once it is written
        copy = value.numpy().copy()
        ctypes.memmove(value.data_ptr(), copy.ctypes.data, copy.nbytes)
        del copy
    warm_up(exe)
    release_memory()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # what was the most until now does not count
    before = status("VmRSS")
    for step in range(STEPS):
        exe.run(main, feed=feed_of(step, rows, BATCH), fetch_list=[loss], scope=scope)
    step_takes = estimate.peak - state - estimate.feeds
    return [state / 2**20, held / 2**20, step_takes / 2**20, status("VmHWM") - before]


def print_memory() -> None:
    """The table of ``--memory``. AssertionError where state is not what was forecast, or a step's memory far from it."""
    print("| | state: forecast, held, MiB | a step beside it: forecast, measured |\n|---|---|---|")
    here = [sys.executable, "-m", "tests.benchmarks.tables", "--memory-of"]
    for mode in ("fp32", "mixed", "pure"):
        for rows in ROWS:
            command = [*here, json.dumps([rows, mode])]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            state, held, step, measured = json.loads(done.stdout.splitlines()[-1])
            print(f"| {mode}, {rows:,} rows | {state:,.1f}, {held:,.1f} | {step:.1f}, {measured:.1f} |", flush=True)
            assert abs(held - state) < 0.01, "state is not what was forecast"
            assert abs(measured - step) < max(4, 0.25 * step), "a step's memory is not what was forecast"


def apart(rows: int, host: bool) -> dict[str, list[float]]:
    """Of a table that every rank has whole, and of one apart: milliseconds of a step, MiB held, KiB sent in a step."""
    import amp_transpiler as amp
    from amp_transpiler.nn import functional as F

    nets, batch = [], BATCH if host else BATCH // 2
    for separate in (False, True):
        main, startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(main, startup), amp.unique_name.guard():
            x, y = amp.data("x", [batch, IDS], "int64"), amp.data("y", [batch, 1], "float32")
            error = amp.nn.fc(F.sum(amp.nn.embedding(x, [rows, WIDTH], is_sparse=True), axis=1), 1) - y
            loss = F.mean(error * error)
            tables, _ = amp.split_embedding_parameters(main)
            if separate and not host:
                amp.distributed.shard_tables(tables)
            amp.optimizer.Adam(0.01, lazy_mode=True).minimize(loss, startup)
        exe = amp.Executor(amp.CPUPlace(), threads=1, host_tables=tables if separate and host else ())
        scope = amp.Scope()
        exe.run(startup, scope=scope)
        nets.append((exe, main, scope, loss, list[float]()))
    sent = [0.0, 0.0]
    for step in range(STEPS):
        rng = np.random.default_rng(1000 * step + amp.distributed.rank())
        feed = {"x": rng.integers(0, rows, (batch, IDS)), "y": rng.random((batch, 1), np.float32)}
        for number, (exe, main, scope, loss, times) in enumerate(nets):
            begin = time.process_time()
            exe.run(main, feed, [loss], scope)
            times.append(time.process_time() - begin)
            if not host:
                sent[number] = sum(each.sent for each in amp.distributed.step_report().exchanges) / 2**10
    held = [sum(v.tensor_size_in_bytes() for v in net[2].ort_values.values()) / 2**20 for net in nets]
    return {"ms": [1e3 * statistics.median(net[4][5:]) for net in nets], "MiB": held, "KiB": sent}


def print_apart(rows: int) -> None:
    """The table of ``--apart``."""
    here = [sys.executable, "-m", "tests.benchmarks.tables", "--apart-of", str(rows)]
    launcher = str(Path(sys.executable).with_name("mpiexec"))
    print("| | a step, ms: whole, apart | held, MiB | sent by rank 0, KiB |\n|---|---|---|---|")
    for name, command in (("host memory", here), *((f"{n} ranks", [launcher, "-n", str(n), *here]) for n in (2, 4))):
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        columns = [", ".join(f"{value:.1f}" for value in found[key]) for key in ("ms", "MiB", "KiB")]
        print(f"| {name}, {rows:,} rows | " + " | ".join(columns) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", metavar="PYTHON", help="an interpreter of another environment that has torch")
    parser.add_argument("--sweep", action="store_true", help="other optimizers, widths and batches")
    parser.add_argument("--clicks", action="store_true", help="the recommender of the demo")
    parser.add_argument("--apart", action="store_true", help="tables in host memory, and dealt out among ranks")
    parser.add_argument("--apart-of", type=int, metavar="ROWS", help="a rank of that, or one program by itself")
    parser.add_argument("--memory", action="store_true", help="memory of state and step, beside the forecast")
    parser.add_argument("--memory-of", metavar="ARGUMENTS", help="that of one program, in JSON its arguments")
    parser.add_argument("--clicks-of", metavar="ARGUMENTS", help="that of one program, in JSON its arguments")
    parser.add_argument("--one", metavar="ARGUMENTS", help="print the times of one program, in JSON its arguments")
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(ours(*json.loads(chosen.one))))
        return
    if chosen.clicks_of:
        print(json.dumps(clicks(*json.loads(chosen.clicks_of))))
        return
    if chosen.apart_of:
        import amp_transpiler as amp

        amp.distributed.init()
        found_here = apart(chosen.apart_of, amp.distributed.world_size() == 1)
        if amp.distributed.rank() == 0:
            print(json.dumps(found_here), flush=True)
        return
    if chosen.memory_of:
        print(json.dumps(memory(*json.loads(chosen.memory_of))))
        return
    if chosen.memory:
        print_memory()
        return
    if chosen.apart:
        print_apart(1_000_000)
        return
    kinds: dict[str, tuple[object, ...]] = {mode: (mode,) for mode in ("fp32", "mixed", "pure")}
    if chosen.sweep:
        kinds = {name: ("fp32", name) for name in OPTIMIZERS}
        kinds |= {f"Adam, width {width}": ("fp32", "Adam", width) for width in (8, 32)}
        kinds |= {f"Adam, batch {batch}": ("fp32", "Adam", WIDTH, batch) for batch in (128, 2048)}
    here = [sys.executable, "-m", "tests.benchmarks.tables", "--clicks-of" if chosen.clicks else "--one"]
    programs = {(name, rows): [*here, json.dumps([rows, *kind])] for name, kind in kinds.items() for rows in ROWS}
    if chosen.torch_python:
        sizes = [str(n) for n in (WIDTH, BATCH, IDS, HIDDEN, STEPS)]
        programs |= {("torch", rows): [chosen.torch_python, "-c", TORCH, str(rows), *sizes] for rows in ROWS}
    found: dict[tuple[str, int], list[float]] = {key: [] for key in programs}
    for _ in range(3):
        for key, command in programs.items():
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[key] += json.loads(done.stdout.splitlines()[-1])[5:]
    middle = {key: statistics.median(times) for key, times in found.items()}
    print("| | " + " | ".join(f"{rows:,} rows, ms" for rows in ROWS) + " | ratio |" + "\n|---|---|---|---|")
    for name in dict.fromkeys(name for name, _ in programs):
        few, many = (middle[name, rows] * 1e3 for rows in ROWS)
        print(f"| {name} | {few:.2f} | {many:.2f} | {many / few:.2f} |")


if __name__ == "__main__":
    main()
