"""A small net with all kinds of state, for the tests of checkpoints; as a program, lives that are killed while saving.

``python -m tests.helpers.checkpoints part FOLDER`` trains the nets of ``CASES`` for half of their steps and saves them;
``python -m tests.helpers.checkpoints rest FOLDER`` loads them, trains the other half and writes what became of the state.
``python -m tests.helpers.checkpoints kills FOLDER COUNT`` kills COUNT processes that train and save, and checks what they left.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler.ir.gc_pause import leave_at_exit
from amp_transpiler.nn import functional as F

MODES = ("fp32", "amp", "pure-fp16", "pure-bf16")
SCALINGS = ("dynamic", "static", "none")
OPTIMIZERS = ("SGD", "Momentum", "Adam", "AdamW", "Lamb")
#: What the processes of the test train: optimizer, mode, scaling, learning-rate schedule.
CASES = (
    ("Adam", "pure-fp16", "dynamic", False),
    ("Momentum", "amp", "dynamic", True),
    ("Lamb", "pure-bf16", "static", False),
    ("AdamW", "fp32", "none", True),
)
STEPS, HALF, BATCH = 8, 4, 6
#: Steps whose gradients overflow, on both sides of the save; the scale changes on others.
BAD = (2, 5)


@dataclass
class Small:
    """The program, what runs it, and how its steps are fed."""

    main: amp.Program
    startup: amp.Program
    test: amp.Program
    loss: Any
    output: Any
    optimizer: Any
    checked: bool
    exe: amp.Executor

    def start(self) -> amp.Scope:
        """A scope in which the first step can run."""
        scope = amp.Scope()
        self.exe.run(self.startup, scope=scope)
        if hasattr(self.optimizer, "amp_init"):
            self.optimizer.amp_init(self.exe.place, scope)
        return scope

    def feed(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step, the same in every process."""
        rng = np.random.default_rng(step)
        x = rng.standard_normal((BATCH, 8)).astype(np.float32)
        if self.checked and step in BAD:
            x[0] = np.inf
        return {"x": x, "label": rng.integers(0, 4, (BATCH, 1))}

    def train(self, scope: amp.Scope, first: int, last: int) -> list[bytes]:
        """Steps first … last - 1; the bits of their losses."""
        return [
            self.exe.run(self.main, self.feed(s), [self.loss], scope=scope)[0].tobytes() for s in range(first, last)
        ]


def build(
    optimizer: str = "Adam",
    mode: str = "pure-fp16",
    scaling: Any = "dynamic",
    schedule: bool = False,
    *,
    hidden: int = 8,
    multi_precision: bool = True,
    window: int = 1,
    average: bool = False,
    place: amp.CPUPlace | amp.CUDAPlace | None = None,
    **arguments: Any,
) -> Small:
    """fc, batch norm, dropout, fc under a guard; ``minimize`` in a mode of ``MODES``.

    ``scaling`` is one of ``SCALINGS``, or a scaler. ``window`` accumulates the gradients of so many runs; ``average`` keeps moving averages of the parameters.
    """
    main, startup = amp.Program(), amp.Program("startup")
    main.seed = startup.seed = 3
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, label = amp.data("x", [BATCH, 8]), amp.data("label", [BATCH, 1], "int64")
        with amp.fp16_guard():
            h = amp.nn.batch_norm(amp.nn.fc(x, hidden), act="relu")
            output = amp.nn.fc(amp.nn.dropout(h, 0.25), 4)
            loss = F.cross_entropy(output, label)
        test = main.clone(for_test=True)
        rate = amp.optimizer.lr.PolynomialDecay(0.05, 20) if schedule else 0.05
        opt = getattr(amp.optimizer, optimizer)(rate, multi_precision=multi_precision and "pure" in mode, **arguments)
        if mode != "fp32":
            dtype = "bfloat16" if mode == "pure-bf16" else "float16"
            options: dict[str, Any] = (
                {"scaler": scaling}
                if not isinstance(scaling, str)
                else {
                    "dynamic": {"init_loss_scaling": 64.0, "incr_every_n_steps": 2, "decr_every_n_nan_or_inf": 1},
                    "static": {"init_loss_scaling": 64.0, "use_dynamic_loss_scaling": False},
                    "none": {"init_loss_scaling": 1.0, "use_dynamic_loss_scaling": False},
                }[scaling]
            )
            opt = amp.decorate(opt, use_pure_fp16="pure" in mode, dtype=dtype, accumulate_steps=window, **options)
        opt.minimize(loss, startup)
        if average:
            amp.optimizer.ExponentialMovingAverage(0.9, warmup=True).update(main, startup)
    checked = mode != "fp32" and opt.get_found_inf() is not None
    return Small(main, startup, test, loss, output, opt, checked, amp.Executor(place, threads=1))


def state(program: amp.Program, scope: amp.Scope) -> dict[str, bytes]:
    """Element type, shape and bits of all state."""
    arrays = {v.name: scope.find_var(v.name) for v in program.variables if v.persistable}
    return {name: f"{a.dtype}{a.shape}".encode() + a.tobytes() for name, a in arrays.items()}


def loads(net: Small, path: Path) -> dict[str, bytes]:
    """The state of an empty scope once the checkpoint is in it."""
    fresh = amp.Scope()
    amp.load_checkpoint(path, net.main, fresh)
    return state(net.main, fresh)


def digest(program: amp.Program, scope: amp.Scope) -> str:
    """A hash of all state."""
    found = hashlib.sha256()
    for name, content in sorted(state(program, scope).items()):
        found.update(name.encode() + content)
    return found.hexdigest()


# -- as a program ----------------------------------------------------------------------------------------
def part(folder: Path) -> None:
    for number, case in enumerate(CASES):
        net = build(*case)
        scope = net.start()
        net.train(scope, 0, HALF)
        amp.save_checkpoint(folder / str(number), net.main, scope, step=HALF, data_position={"next": HALF})


def rest(folder: Path) -> None:
    results = []
    for number, case in enumerate(CASES):
        net, scope = build(*case), amp.Scope()
        loaded = amp.load_checkpoint(folder / str(number), net.main, scope)
        assert loaded.exact and loaded.step == HALF
        losses = net.train(scope, loaded.data_position["next"], STEPS)
        results.append([digest(net.main, scope), [loss.hex() for loss in losses]])
    print(json.dumps(results))


def live(folder: Path, last: int, saved: int) -> None:
    """Go on from the last checkpoint, saving every step; write a byte after each save."""
    net = build(hidden=KILLED_HIDDEN)
    latest = amp.latest_checkpoint(folder)
    scope, step = amp.Scope(), 0
    if latest is None:
        scope = net.start()
    else:
        loaded = amp.load_checkpoint(folder, net.main, scope)
        assert loaded.step is not None
        step = loaded.step
    while step < last:
        net.train(scope, step, step + 1)
        step += 1
        amp.save_checkpoint(folder, net.main, scope, step=step, keep_last=2)
        os.write(saved, b".")
    time.sleep(60)


KILLED_HIDDEN = 6000  # so large that a good part of the time goes into saving


def kills(folder: Path, count: int, last: int, seed: int) -> None:
    """Kill ``count`` processes at random moments. Each leaves a checkpoint that an undisturbed run would have had."""
    chance = random.Random(seed)
    expected = _expected(last)
    net = build(hidden=KILLED_HIDDEN)
    torn = 0
    for _ in range(count):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            live(folder, last, writer)
            os._exit(0)
        os.close(writer)
        ready, _, _ = select.select([reader], [], [], 30)
        assert ready and os.read(reader, 1), "the process saved nothing"
        time.sleep(chance.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        torn += any(name.startswith(".amp_write.") for name in os.listdir(folder))
        scope = amp.Scope()
        loaded = amp.load_checkpoint(folder, net.main, scope)
        assert loaded.exact and digest(net.main, scope) == expected[str(loaded.step)], loaded.step
    left = sorted(os.listdir(folder))
    print(json.dumps({"kills": count, "in the middle of a save": torn, "reached": loaded.step, "left": left}))


def _expected(last: int) -> dict[str, str]:
    """The state after every step of an undisturbed run; in a process of its own, so that this one has no session."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        net = build(hidden=KILLED_HIDDEN)
        scope, found = net.start(), {}
        for step in range(last):
            net.train(scope, step, step + 1)
            found[str(step + 1)] = digest(net.main, scope)
        with os.fdopen(writer, "w") as stream:
            json.dump(found, stream)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        found = json.load(stream)
    os.waitpid(child, 0)
    return dict(found)


if __name__ == "__main__":
    leave_at_exit()
    what, where, *numbers = sys.argv[1:]
    if what == "kills":
        kills(Path(where), *map(int, numbers))
    else:
        {"part": part, "rest": rest}[what](Path(where))
