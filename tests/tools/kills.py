"""Kills processes that write, at random moments, and checks what they leave: ``python -m tests.tools.kills COUNT [SEED]``.

COUNT kills are shared out among ``convert`` (embedded, external data, with reports in two folders), ``train`` with a
checkpoint, and the saving of checkpoints. After each kill no file is a part of itself, no model stands beside the data
of another; after the next run nothing hidden is left and every file is what an undisturbed run writes; a training that
was killed, however often, ends with the very bytes of one that was not. Prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from amp_transpiler.cli import main
from tests.helpers import checkpoints

WIDTH = 512
Files = dict[str, str]


def model(path: Path) -> None:
    """Three layers with some megabytes of weights, so that a good part of the time goes into writing."""
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,{WIDTH}] x) => (float[N,4] y) {{ a = MatMul(x, w0)\n b = Relu(a)\n c = MatMul(b, w1)\n d = Relu(c)
        e = MatMul(d, w2)\n y = Add(e, b2) }}""")
    for name, shape in (("w0", (WIDTH, WIDTH)), ("w1", (WIDTH, WIDTH)), ("w2", (WIDTH, 4)), ("b2", (4,))):
        array = rng.standard_normal(shape).astype(np.float32) / 20
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save_model(proto, path)


def start(arguments: Sequence[object]) -> int:
    """The command in a process of its own; this one has no session, so it can be forked."""
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as sink:
            os.dup2(sink.fileno(), 1)
        os._exit(main([str(argument) for argument in arguments]))
    return child


def finish(arguments: Sequence[object]) -> float:
    """Run the command to its end; gives the seconds."""
    begun = time.monotonic()
    status = os.waitstatus_to_exitcode(os.waitpid(start(arguments), 0)[1])
    assert status == 0, (status, arguments)
    return time.monotonic() - begun


def hidden(folder: Path) -> list[Path]:
    """What writers keep out of sight."""
    return [Path(at, name) for at, folders, _ in os.walk(folder) for name in folders if name.startswith(".amp")]


def visible(folder: Path) -> Files:
    """Every file that a user sees, and the hash of its content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part.startswith(".amp") for part in path.relative_to(folder).parts)
    }


@dataclass
class Killer:
    """Kills at random: over the whole run, or soon after the first hidden file is seen, in turn."""

    chance: random.Random
    kills: int = 0
    torn: int = field(default=0)

    def strike(self, arguments: Sequence[object], folder: Path, seconds: float) -> None:
        """Start the command and kill it, or see it end first."""
        child = start(arguments)
        writing = self.chance.random() < 0.6
        deadline = time.monotonic() + 20 * seconds
        if writing:
            while not hidden(folder) and time.monotonic() < deadline:
                if os.waitpid(child, os.WNOHANG)[0]:
                    return  # it was faster
                time.sleep(0.001)
            time.sleep(self.chance.uniform(0, 0.03))
        else:
            time.sleep(self.chance.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        if os.WIFEXITED(os.waitpid(child, 0)[1]):
            return  # it was faster
        self.kills += 1
        self.torn += bool(hidden(folder))


def converting(home: Path, options: Sequence[object], count: int, killer: Killer) -> None:
    """``convert`` with ``options``, in two modes by turns into the same files."""
    source, out = home / "net.onnx", home / "out"
    model(source)
    (out / "reports").mkdir(parents=True)
    commands = [["convert", source, out / "m.onnx", "--mode", mode, *options] for mode in ("pure-fp16", "mixed")]
    commands[1] += ["--black-list", "Add"]
    wanted, seconds = [], 0.0
    for command in commands:
        seconds = finish(command)
        wanted.append(visible(out))
    assert wanted[0] != wanted[1] and wanted[0].keys() == wanted[1].keys()
    turn, goal = 0, killer.kills + count
    while killer.kills < goal:
        killer.strike(commands[turn], out, seconds)
        found = visible(out)
        assert all(found[name] in (wanted[0][name], wanted[1][name]) for name in found), "a part of a file"
        pair = {name: content for name, content in found.items() if name.startswith("m.onnx")}
        whole = [{name: one[name] for name in pair} for one in wanted]
        assert "m.onnx" not in found or (pair in whole and len(pair) == sum(n.startswith("m.onnx") for n in wanted[0]))
        turn = killer.chance.randrange(2)
        finish(commands[turn])
        assert visible(out) == wanted[turn] and not hidden(out), (visible(out), hidden(out))


def training(home: Path, count: int, killer: Killer) -> None:
    """``train`` with a checkpoint: killed and started again until it ends, it ends as if it had not been."""
    model(home / "net.onnx")
    rng = np.random.default_rng(1)
    np.savez(home / "data.npz", x=rng.standard_normal((48, WIDTH)).astype(np.float32), label=rng.integers(0, 4, 48))
    out = home / "out"
    command = [
        "train",
        home / "net.onnx",
        out / "m.onnx",
        "--data",
        home / "data.npz",
        "--epochs",
        3,
        "--batch-size",
        16,
        "--optimizer",
        "adam",
        "--checkpoint",
        out / "saved",
    ]
    out.mkdir()
    seconds = finish(command)
    wanted = hashlib.sha256((out / "m.onnx").read_bytes()).hexdigest()
    goal = killer.kills + count
    while killer.kills < goal:
        shutil.rmtree(out)
        out.mkdir()
        for _ in range(killer.chance.randint(1, 4)):
            if killer.kills < goal:
                killer.strike(command, out, seconds)
            assert visible(out).get("m.onnx", wanted) == wanted, "a part of a file"
        finish(command)
        assert visible(out)["m.onnx"] == wanted and not hidden(out), hidden(out)


def all_of_them(home: Path, count: int, seed: int) -> None:
    """Share the kills out, and print what came of them."""
    killer = Killer(random.Random(seed))
    told = {}
    scenes = {
        "embedded": [],
        "external": ["--external-data"],
        "reports": [
            "--external-data",
            "w.bin",
            "--report",
            home / "reports" / "out" / "reports" / "r.html",
            "--json",
            home / "reports" / "out" / "r.json",
            "--check",
        ],
    }
    share = -(-count // (len(scenes) + 2))
    for name, options in scenes.items():
        (home / name).mkdir()
        converting(home / name, options, share, killer)
        told[name] = share
    (home / "train").mkdir()
    training(home / "train", share, killer)
    told["train"] = share
    last = count - killer.kills
    if last > 0:
        (home / "checkpoints").mkdir()
        checkpoints.kills(home / "checkpoints", last, last * 12, seed)
        told["checkpoints"] = last
    print(json.dumps({"kills": sum(told.values()), "in the middle of a write": killer.torn, **told}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        all_of_them(Path(folder), int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
