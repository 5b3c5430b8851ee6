"""``python -m tests.tools.memory_run``, a process of its own: how much the resident memory of one training step grows over that of its state.

Prints forecast and measurement in MiB, state and feeds not counted. The arguments are a program of PROGRAMS, a mode
("fp32", "amp", "pure-fp16"), and a pattern to recompute. With ``--shapes``: see :func:`shapes`, with ``--steps``:
:func:`steps`, with ``--state``: :func:`state`, with ``--replaced FOLDER``: :func:`replaced`, with ``--loaded FOLDER``: :func:`loaded`. ``--serve`` takes such arguments
from standard input, a JSON list a line, and measures each in a process that parts from this one once all is imported.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

import amp_transpiler as amp
from amp_transpiler.ir.gc_pause import leave_at_exit
from amp_transpiler.nn import functional as F
from amp_transpiler.runtime.heap import trim
from amp_transpiler.runtime.session import release_memory
from tests.helpers.where import ROOT

Feeds = dict[str, np.ndarray]


def mlp() -> tuple[object, Feeds]:
    """Six layers whose activations are much larger than their weights."""
    x, label = amp.data("x", ["N", 256], "float32"), amp.data("label", ["N", 1], "int64")
    for number in range(6):
        with amp.name_scope(f"block_{number // 2}"):
            x = F.gelu(amp.nn.fc(x, 256))
    loss = F.cross_entropy(amp.nn.fc(x, 10), label)
    rng = np.random.default_rng(0)
    return loss, {"x": rng.standard_normal((8192, 256)).astype(np.float32), "label": rng.integers(0, 10, (8192, 1))}


def cnn() -> tuple[object, Feeds]:
    """Convolutions with batch normalisation."""
    x, label = amp.data("x", ["N", 3, 32, 32], "float32"), amp.data("label", ["N", 1], "int64")
    for number in range(4):
        with amp.name_scope(f"block_{number}"):
            x = amp.nn.batch_norm(amp.nn.conv2d(x, 32, 3, padding=1), act="relu")
    loss = F.cross_entropy(amp.nn.fc(F.global_avg_pool2d(x), 10), label)
    rng = np.random.default_rng(0)
    return loss, {"x": rng.standard_normal((64, 3, 32, 32)).astype(np.float32), "label": rng.integers(0, 10, (64, 1))}


def pooled() -> tuple[object, Feeds]:
    """Convolutions that pool and stride, then a wide layer."""
    x, label = amp.data("x", ["N", 3, 64, 64], "float32"), amp.data("label", ["N", 1], "int64")
    h = F.max_pool2d(amp.nn.conv2d(x, 32, 5, padding=2, act="relu"), 2, 2)
    h = F.max_pool2d(amp.nn.conv2d(h, 64, 3, padding=1, act="relu"), 2, 2)
    h = amp.nn.batch_norm(amp.nn.conv2d(h, 128, 3, stride=2, padding=1), act="relu")
    loss = F.cross_entropy(amp.nn.fc(amp.nn.fc(h, 256, act="relu"), 10), label)
    rng = np.random.default_rng(0)
    return loss, {"x": rng.standard_normal((64, 3, 64, 64)).astype(np.float32), "label": rng.integers(0, 10, (64, 1))}


def bert() -> tuple[object, Feeds]:
    """Two encoder layers with dropout, and a classifier of tokens."""
    hidden, steps, words = 128, 128, 1000
    ids, label = amp.data("x", ["N", steps], "int64"), amp.data("label", ["T", 1], "int64")
    h = amp.nn.embedding(ids, [words, hidden])
    position = amp.create_parameter([steps, hidden], "float32", name="positions")
    h = amp.nn.dropout(amp.nn.layer_norm(h + position), 0.1)
    for _ in range(2):
        h = amp.nn.layer_norm(h + amp.nn.dropout(amp.nn.multi_head_attention(h, num_heads=4), 0.1))
        inner = amp.nn.fc(h, 4 * hidden, act="gelu", num_flatten_dims=2)
        h = amp.nn.layer_norm(h + amp.nn.dropout(amp.nn.fc(inner, hidden, num_flatten_dims=2), 0.1))
    loss = F.cross_entropy(F.reshape(amp.nn.fc(h, words, num_flatten_dims=2), [-1, words]), label)
    rng = np.random.default_rng(0)
    return loss, {"x": rng.integers(0, words, (16, steps)), "label": rng.integers(0, words, (16 * steps, 1))}


def lstm() -> tuple[object, Feeds]:
    """Two recurrent layers; the last step is classified."""
    x, label = amp.data("x", ["N", 64, 128], "float32"), amp.data("label", ["N", 1], "int64")
    _, h, _ = amp.nn.lstm(x, 256, num_layers=2)
    loss = F.cross_entropy(amp.nn.fc(F.reshape(F.transpose(h, [1, 0, 2]), [-1, 512]), 10), label)
    rng = np.random.default_rng(0)
    return loss, {"x": rng.standard_normal((64, 64, 128)).astype(np.float32), "label": rng.integers(0, 10, (64, 1))}


def ctc() -> tuple[object, Feeds]:
    """Speech: convolutions over time, a bidirectional recurrent layer, the CTC loss."""
    steps = 100
    x = amp.data("x", ["N", 1, 2 * steps, 40], "float32")
    label, lengths = amp.data("label", ["N", 12], "int32"), amp.data("lengths", ["N"], "int32")
    h = amp.nn.conv2d(x, 32, 3, stride=2, padding=1, act="relu")
    h = amp.nn.conv2d(h, 32, 3, padding=1, act="relu")
    h = F.reshape(F.transpose(h, [2, 0, 1, 3]), [steps, -1, 32 * 20])
    y, _, _ = amp.nn.lstm(h, 128, direction="bidirectional", time_major=True)
    scores = amp.nn.fc(y, 11, num_flatten_dims=2)
    loss = F.ctc_loss(scores, label, amp.data("steps", ["N"], "int32"), lengths)
    rng = np.random.default_rng(0)
    return loss, {
        "x": rng.standard_normal((32, 1, 2 * steps, 40)).astype(np.float32),
        "label": rng.integers(1, 11, (32, 12)).astype(np.int32),
        "lengths": np.full(32, 12, np.int32),
        "steps": np.full(32, steps, np.int32),
    }


def gru() -> tuple[object, Feeds]:
    """A bidirectional recurrent layer between layers with dropout."""
    x, label = amp.data("x", ["N", 48, 64], "float32"), amp.data("label", ["T", 1], "int64")
    h = amp.nn.dropout(amp.nn.fc(x, 128, act="relu", num_flatten_dims=2), 0.2)
    y, _ = amp.nn.gru(h, 128, direction="bidirectional")
    h = amp.nn.dropout(amp.nn.fc(y, 256, act="tanh", num_flatten_dims=2), 0.2)
    loss = F.cross_entropy(F.reshape(amp.nn.fc(h, 50, num_flatten_dims=2), [-1, 50]), label)
    rng = np.random.default_rng(0)
    return loss, {"x": rng.standard_normal((64, 48, 64)).astype(np.float32), "label": rng.integers(0, 50, (3072, 1))}


def residual() -> tuple[object, Feeds]:
    """Blocks with a shortcut round them, pooled by averages in between."""
    x, label = amp.data("x", ["N", 3, 32, 32], "float32"), amp.data("label", ["N", 1], "int64")
    h = amp.nn.batch_norm(amp.nn.conv2d(x, 32, 3, padding=1), act="relu")
    for _ in range(2):
        inner = amp.nn.batch_norm(amp.nn.conv2d(h, 32, 3, padding=1), act="relu")
        h = F.avg_pool2d(F.relu(h + amp.nn.batch_norm(amp.nn.conv2d(inner, 32, 3, padding=1))), 2, 2)
    loss = F.cross_entropy(amp.nn.fc(F.global_avg_pool2d(h), 10), label)
    rng = np.random.default_rng(0)
    return loss, {"x": rng.standard_normal((64, 3, 32, 32)).astype(np.float32), "label": rng.integers(0, 10, (64, 1))}


PROGRAMS: dict[str, Callable[[], tuple[object, Feeds]]] = {
    "mlp": mlp,
    "cnn": cnn,
    "pooled": pooled,
    "bert": bert,
    "lstm": lstm,
    "ctc": ctc,
    "gru": gru,
    "residual": residual,
}


def status(key: str) -> float:
    """A size of this process in MiB, as Linux reports it."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024


def warm_up(executor: amp.Executor) -> None:
    """Read in the libraries, by a step that takes next to nothing."""
    main_, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main_, startup), amp.unique_name.guard():
        loss = F.mean(amp.nn.fc(amp.data("x", ["N", 4], "float32"), 4))
        amp.optimizer.SGD(0.01).minimize(loss)
    executor.run(startup, scope=(scope := amp.Scope()))
    executor.run(main_, feed={"x": np.ones((4, 4), np.float32)}, fetch_list=[loss], scope=scope)


def main(name: str, mode: str, pattern: str = "") -> None:
    """Build, forecast, run one step."""
    main_, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main_, startup), amp.unique_name.guard(), amp.fp16_guard():
        loss, feed = PROGRAMS[name]()
        if pattern:
            amp.recompute(main_, [pattern])
        optimizer = amp.optimizer.SGD(0.01, multi_precision=mode == "pure-fp16")
        if mode != "fp32":
            optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure-fp16", init_loss_scaling=128.0)
        optimizer.minimize(loss)
    estimate = main_.memory_estimate({name: array.shape for name, array in feed.items()}, fetch_list=[loss])
    held = estimate.parameters + estimate.master_weights + estimate.moments + estimate.other_state + estimate.feeds
    executor, scope = amp.Executor(threads=1), amp.Scope()
    executor.run(startup, scope=scope)
    if mode != "fp32":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
    release_memory()  # what the startup program took of the arena would not count again
    for value in scope.ort_values.values():  # a page of zeros that was never written does not count as resident yet
        copy = value.numpy().copy()
        ctypes.memmove(value.data_ptr(), copy.ctypes.data, copy.nbytes)
    warm_up(executor)
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    executor.run(main_, feed=feed, fetch_list=[loss], scope=scope)
    print((estimate.peak - held) / 2**20, status("VmHWM") - before)


def shapes() -> None:
    """What one feed shape takes, what seven more take with it, and what is left after ``close``, in MiB."""
    main_, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main_, startup), amp.unique_name.guard():
        loss, feed = mlp()
        amp.optimizer.SGD(0.01).minimize(loss)
    executor, scope = amp.Executor(threads=1), amp.Scope()
    executor.run(startup, scope=scope)
    before, found = status("VmRSS"), []
    for number in range(8):
        part = {key: array[: 4096 - 64 * number] for key, array in feed.items()}
        executor.run(main_, feed=part, fetch_list=[loss], scope=scope)
        found.append(status("VmRSS") - before)
    executor.close()
    print(found[0], found[-1], status("VmRSS") - before)


def steps() -> None:
    """What one step of three times the batch takes, and what two do, in MiB."""
    main_, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main_, startup), amp.unique_name.guard():
        loss, feed = mlp()
        amp.optimizer.SGD(0.01).minimize(loss)
    executor, scope = amp.Executor(threads=1), amp.Scope()
    executor.run(startup, scope=scope)
    feed, before, found = {key: np.tile(array, (3, 1)) for key, array in feed.items()}, status("VmRSS"), []
    for _ in range(2):
        executor.run(main_, feed=feed, fetch_list=[loss], scope=scope)
        found.append(status("VmRSS") - before)
    print(found[0], found[-1])


def state() -> None:
    """What a table of 256 MiB and its accumulator take once they are made and at most, and their size, in MiB."""
    main_, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main_, startup), amp.unique_name.guard():
        rows = amp.nn.embedding(amp.data("x", [8], "int64"), [2**22, 16], is_sparse=True)
        amp.optimizer.Adagrad(0.01, initial_accumulator_value=0.1).minimize(F.mean(rows))
    executor, scope = amp.Executor(threads=1), amp.Scope()
    warm_up(executor)
    before = status("VmRSS")
    executor.run(startup, scope=scope)
    size = sum(value.tensor_size_in_bytes() for value in scope.ort_values.values()) / 2**20
    print(status("VmRSS") - before, status("VmHWM") - before, size)


def replaced(folder: str) -> None:
    """What the process has with parameters of 32 MiB, once they are rounded to 16 bit, and once they are read from a
    checkpoint, in MiB; with blocks that glibc takes from its heap."""
    main_, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main_, startup), amp.unique_name.guard():
        h = amp.data("x", [2, 2048], "float32")
        for _ in range(2):
            h = amp.nn.fc(h, 2048)
        optimizer = amp.decorate(amp.optimizer.SGD(0.1, multi_precision=True), use_pure_fp16=True, use_fp16_guard=False)
        optimizer.minimize(F.mean(h), startup)
    scope = amp.Scope()
    for v in startup.variables:
        scope.set_var(v.name, np.full(v.shape or (), 0.5, v.dtype))
    np.ones(2**22 - 2**10)  # freed: from now on blocks of up to that size are of the heap
    for v in main_.parameters:
        scope.set_var(v.name, np.full(v.shape or (), 0.5, np.float32))
    trim()
    taken = [status("VmRSS")]
    optimizer.amp_init(amp.CPUPlace(), scope=scope)
    taken.append(status("VmRSS"))
    amp.save_checkpoint(f"{folder}/state", main_, scope=scope)
    amp.load_checkpoint(f"{folder}/state", main_, scope=scope)
    print(*taken, status("VmRSS"))


def loaded(folder: str) -> None:
    """By how much the resident memory grows at most when a checkpoint is loaded over the state of the startup program,
    and into an empty scope, and the size of that state, in MiB."""
    main_, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main_, startup), amp.unique_name.guard():
        h = amp.data("x", [2, 1024], "float32")
        for _ in range(6):
            h = amp.nn.fc(h, 1024)
        amp.optimizer.Adam(0.1).minimize(F.mean(h))
    executor, scope = amp.Executor(threads=1), amp.Scope()
    executor.run(startup, scope=scope)
    amp.save_checkpoint(f"{folder}/state", main_, scope=scope)
    grown = []
    for each in (scope, amp.Scope()):
        trim()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the most memory is counted anew
        before = status("VmRSS")
        amp.load_checkpoint(f"{folder}/state", main_, scope=each)
        grown.append(status("VmHWM") - before)
    print(*grown, sum(value.tensor_size_in_bytes() for value in scope.ort_values.values()) / 2**20)


def print_figures(arguments: Sequence[str]) -> None:
    """What the arguments ask for."""
    if arguments == ["--shapes"]:
        shapes()
    elif arguments == ["--steps"]:
        steps()
    elif arguments == ["--state"]:
        state()
    elif arguments[:1] == ["--replaced"]:
        replaced(*arguments[1:])
    elif arguments[:1] == ["--loaded"]:
        loaded(*arguments[1:])
    else:
        main(*arguments)


def serve() -> None:
    """A line of figures, none where that failed, and an empty one, for each list of arguments."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                print_figures(json.loads(line))
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        print(flush=True)


@cache
def _server() -> subprocess.Popen[str]:
    """The process that others part from, which has no threads, for as long as this one lives."""
    command = [sys.executable, "-m", "tests.tools.memory_run", "--serve"]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, cwd=ROOT, env=alone, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(server.communicate)  # which ends it
    return server


def measured(*arguments: str) -> list[float]:
    """What this module prints in a process of its own: forecast and measurement in MiB."""
    server = _server()
    print(json.dumps(arguments), file=server.stdin, flush=True)
    assert server.stdout is not None
    figures = [float(number) for line in itertools.takewhile(str.strip, server.stdout) for number in line.split()]
    assert figures, f"memory_run {' '.join(arguments)} failed"
    return figures


if __name__ == "__main__":
    leave_at_exit()
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        print_figures(sys.argv[1:])
