"""Runners in other languages train as the executor does, pass state on, and refuse what does not fit.

Those in JavaScript need node and the packages of ``demo/runners/package.json``, that in C++ the headers of onnxruntime, those
in C# and Java its interfaces and Mono or a JDK: ``make test-runners``.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import amp_transpiler as amp
from tests.helpers.checkpoints import STEPS, build, state
from tests.helpers.compiled_runners import cpp, csharp, java
from tests.helpers.page_folders import make_folders
from tests.helpers.runner_faults import FAULTS, edit
from tests.helpers.runners import (
    OVERFLOW,
    PYTHON,
    RUNNERS,
    Digits,
    batches,
    browser,
    call,
    losses,
    moved,
    node,
    trained,
)

BARE = [PYTHON or sys.executable, str(RUNNERS / "bare.py")]
COMMANDS = {"bare Python": BARE, "Node": node(), "wasm": node("--web"), "browser": browser()}
COMPILED = {"C++": cpp, "C#": csharp, "Java": java}
NAMES = [*COMMANDS, *COMPILED]
RUNNER = pytest.mark.parametrize("runner", NAMES)
NO_NODE = "no node with packages of npm: make test-runners"
MISSING = {
    "browser": "no Chromium",
    "C++": "no compiler, or no headers of onnxruntime",
    "C#": "no Mono (mono-mcs, mono-runtime), or no package of npm",
    "Java": "no JDK, or no package of npm",
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    return functools.cache(lambda runner: COMPILED[runner](tmp_path_factory.mktemp("compiled")))


@pytest.fixture
def command(runner: str, compiled: Callable[[str], list[str]]) -> list[str]:
    found = compiled(runner) if runner in COMPILED else COMMANDS[runner]
    return found or pytest.skip(f"{MISSING[runner]}: make test-runners" if runner in MISSING else NO_NODE)


@pytest.mark.skipif("AMP_RUNNERS" not in os.environ, reason="make test-runners")
def test_make_left_out_what_the_machine_cannot_run(compiled: Callable[[str], list[str]]) -> None:
    """What is skipped here is skipped because npm, Chromium, a compiler or headers are missing, and nothing else."""
    npm, headers = shutil.which("npm"), os.environ.get("AMP_RUNNERS_HEADERS")
    browser_there = npm and os.environ.get("AMP_BROWSER")
    expected = {"bare Python": True, "Node": npm, "wasm": npm, "browser": browser_there}
    expected["C++"] = shutil.which("g++") and headers
    expected["C#"] = npm and shutil.which("mcs") and shutil.which("mono")
    expected["Java"] = npm and shutil.which("javac") and shutil.which("gcc") and platform.machine() == "x86_64"
    found = COMMANDS | {runner: compiled(runner) for runner in COMPILED}
    assert [runner for runner in NAMES if expected[runner] and not found[runner]] == []
    assert bool(PYTHON) == bool(npm), "an environment with the onnxruntime of npm's version"


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    """Small batches: with larger ones wasm, which has no fused multiply-add, rounds to another fp16 now and then."""
    return Digits.made(tmp_path_factory.mktemp("digits"), 100, 4)


def test_the_step_overflows_where_it_was_planted(step: Digits) -> None:
    assert step.bad == [OVERFLOW] and np.isfinite(step.losses[-1]) and step.losses[-1] < step.losses[0] / 2


@RUNNER
def test_losses_and_state_are_those_of_the_executor(
    runner: str, command: list[str], step: Digits, tmp_path: Path
) -> None:
    """In a run in three parts: executor, runner, executor. The overflow is in the runner's part."""
    found, scope = moved(step, command, tmp_path)
    if runner not in ("wasm", "browser"):
        assert found.tobytes() == step.losses.tobytes()
        assert state(step.main, scope) == state(step.main, step.end)
    assert np.allclose(found, step.losses, rtol=0, atol=1e-5)


def same_everywhere(folder: Path, data: Path, steps: int, loss: str, home: Path) -> np.ndarray:
    """The losses of steps, which are those of each runner bit for bit, as is the state in the end."""
    home.mkdir()
    ends = {}
    for name, command in COMMANDS.items():
        if command:
            found = losses(trained(command, folder, data, steps, home / name), loss)
            held = load_file(home / name / "state.safetensors")
            ends[name] = {"": found.tobytes()} | {state: array.tobytes() for state, array in held.items()}
    for name, end in ends.items():
        assert [key for key, held in end.items() if held != ends["bare Python"][key]] == [], name
    return found


def test_portable_steps_have_the_same_bits_in_wasm(tmp_path: Path) -> None:
    """With batches of 64, where steps that are not portable leave each other in step 15; in one part, and in three."""
    if not node():
        pytest.skip(NO_NODE)
    step = Digits.made(tmp_path, 30, 64, portable=True)
    found = same_everywhere(step.folder, step.data, 30, step.loss, tmp_path / "ends")
    assert np.allclose(found[:20], step.losses[:20], rtol=0.05), "the same training but for roundings"
    parts, scope = moved(step, browser() or node("--web"), tmp_path, BARE)
    amp.load_checkpoint(tmp_path / "ends" / "bare Python", step.main, whole := amp.Scope())
    assert parts.tobytes() == found.tobytes() and state(step.main, scope) == state(step.main, whole)


def test_the_page_has_the_same_bits_in_wasm(tmp_path: Path) -> None:
    """Its folders; those that are not portable had other bits in wasm within these steps."""
    if not node():
        pytest.skip(NO_NODE)
    make_folders(tmp_path / "steps")
    rng = np.random.default_rng(0)
    for task in ("digits", "pictures"):
        folder = tmp_path / "steps" / task / "step"
        said = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        image, label = said["places"][0]["models"]["train"]["feeds"]
        feeds = [
            {
                image["name"]: rng.normal(0, 1, image["shape"]).astype(np.float32),
                label["name"]: rng.integers(0, 4, label["shape"]),
            }
            for _ in range(40)
        ]
        data = batches(tmp_path / f"{task}.safetensors", feeds)
        same_everywhere(folder, data, 40, said["losses"][0], tmp_path / task)


@RUNNER
@pytest.mark.parametrize(("mode", "scaling"), [("pure-bf16", "static"), ("pure-fp16", "dynamic")])
def test_windows_schedules_and_averages_go_through(
    runner: str, command: list[str], mode: str, scaling: str, tmp_path: Path
) -> None:
    """With steps that overflow inside of windows and at their ends."""
    net = build(mode=mode, scaling=scaling, schedule=True, window=3, average=True)
    scope = net.start()
    folder = net.main.export_training(tmp_path / "step", amp.CPUPlace(), scope=scope)
    data = batches(tmp_path / "data.safetensors", [net.feed(s) for s in range(STEPS)])
    found = losses(trained(command, folder, data, STEPS, tmp_path / "end"), net.loss.name)
    expected = np.frombuffer(b"".join(net.train(scope, 0, STEPS)), np.float32)
    assert np.array_equal(found, expected, equal_nan=True)
    ended = amp.Scope()
    assert amp.load_checkpoint(tmp_path / "end", net.main, ended).exact
    assert state(net.main, ended) == state(net.main, scope)


@RUNNER
def test_names_may_hold_any_character(runner: str, command: list[str], tmp_path: Path) -> None:
    """But for those beyond U+FFFF in Java, where onnxruntime does not find them."""
    far = "" if runner == "Java" else "😀"
    main, startup, scope = amp.Program("größe $$ $in ${x}"), amp.Program("startup"), amp.Scope()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data(f'weiß "\\ {far}', [2, 3], "float32")
        loss = amp.nn.functional.mean(amp.nn.fc(x, 2, name=f'schicht/{far} ü "\\\t\x1f'))
        amp.optimizer.SGD(0.1).minimize(loss, startup)
    amp.Executor().run(startup, scope=scope)
    folder = main.export_training(tmp_path / "step", amp.CPUPlace(), outputs=[loss], scope=scope)
    feed = {x.name: np.ones((2, 3), np.float32)}
    found = trained(command, folder, batches(tmp_path / "data.safetensors", [feed]), 3, tmp_path / "end")
    expected = [amp.Executor(threads=1).run(main, feed, [loss], scope=scope)[0].item() for _ in range(3)]
    assert losses(found, loss.name).tolist() == expected
    ended = amp.Scope()
    amp.load_checkpoint(tmp_path / "end", main, ended)
    assert state(main, ended) == state(main, scope)


def test_node_writes_the_trained_model(tmp_path: Path) -> None:
    """The bytes that ``amp.write_trained_model`` makes of the checkpoint; bfloat16 weights are narrowed on the way."""
    if not node():
        pytest.skip(NO_NODE)
    for case in ({}, {"mode": "pure-bf16", "scaling": "static"}):
        net, home = build(**case), tmp_path / case.get("mode", "fp16")
        home.mkdir()
        folder = net.main.export_training(home / "step", amp.CPUPlace(), outputs=[net.output], scope=net.start())
        data = batches(home / "data.safetensors", [net.feed(0)])
        trained(node("--model", str(home / "model")), folder, data, 3, home / "end")
        amp.write_trained_model(folder, home / "expected.onnx", home / "end")
        assert (home / "model" / "model.onnx").read_bytes() == (home / "expected.onnx").read_bytes()
        assert (folder / "model.onnx").read_bytes() != (home / "expected.onnx").read_bytes()


# -- what does not fit -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported step, data for it and a checkpoint."""
    home = tmp_path_factory.mktemp("small")
    net = build()
    scope = net.start()
    net.main.export_training(home / "step", amp.CPUPlace(), scope=scope)
    amp.save_checkpoint(home / "checkpoint", net.main, scope)
    batches(home / "data.safetensors", [net.feed(0)])
    return home


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("runner", [name for name in NAMES if name != "wasm"])
def test_what_does_not_fit_is_one_clear_error(
    runner: str, command: list[str], fault: Callable[[Path], None], small: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    shutil.copytree(small, home)
    fault(home)
    done = call(command, home / "step", home / "data.safetensors", 1, home / "end", home / "checkpoint")
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 1 and len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert all(part.lower() in lines[0].lower() for part in FAULTS[fault]), lines[0]
    assert not (home / "end").exists()


@pytest.mark.parametrize("runner", ["bare Python", "Node", *COMPILED])
def test_what_is_there_already_is_told_before_the_training(
    runner: str, command: list[str], small: Path, tmp_path: Path
) -> None:
    (tmp_path / "end").mkdir()
    done = call(command, small / "step", small / "data.safetensors", 1, tmp_path / "end")
    assert done.returncode == 1 and f"'{tmp_path / 'end'}'" in done.stderr and "already" in done.stderr
    assert done.stdout == "" and not any((tmp_path / "end").iterdir())
    assert "FOLDER BATCHES STEPS TO [FROM" in call(command, small / "step").stderr
    for steps in ("1.5", "-3", ""):
        done = call(command, small / "step", small / "data.safetensors", steps, tmp_path / "other")
        assert done.returncode == 1 and done.stdout == "" and not (tmp_path / "other").exists()
        assert f"'{steps}'" in done.stderr
    done = call(command, small / "step", small / "data.safetensors", 1, tmp_path / "missing" / "end")
    assert done.returncode == 1 and done.stdout == "" and f"there is no folder '{tmp_path / 'missing'}'" in done.stderr


@pytest.mark.parametrize("runner", ["bare Python", "Node", *COMPILED])
def test_a_checkpoint_has_its_name_when_it_is_whole(
    runner: str, command: list[str], small: Path, tmp_path: Path
) -> None:
    """What was begun and not ended is in nobody's way: a disk that was full, a run that was killed."""
    arguments, part = (small / "step", small / "data.safetensors", 1, tmp_path / "end"), tmp_path / "end.part"
    (part / "meta.json").mkdir(parents=True)  # no file can be written there
    assert call(command, *arguments).returncode == 1 and not (tmp_path / "end").exists()
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    (part / "state.safetensors").write_bytes(b"cut short")
    trained(command, *arguments)
    assert sorted(os.listdir(tmp_path / "end")) == ["meta.json", "state.safetensors"] and not part.exists()


@pytest.mark.parametrize("runner", ["bare Python", "Node", *COMPILED])
def test_a_step_for_a_place_that_is_not_here_is_refused(
    runner: str, command: list[str], small: Path, tmp_path: Path
) -> None:
    """It is not run on another: what is lowered for a device with 16-bit arithmetic would not round on CPU."""
    shutil.copytree(small, tmp_path / "home")
    change = {"place": "cuda", "provider": "CUDAExecutionProvider"}
    edit(tmp_path / "home" / "step" / "manifest.json", lambda said: said["places"][0].update(change))
    done = call(command, tmp_path / "home" / "step", small / "data.safetensors", 1, tmp_path / "end")
    told = done.stderr.strip().splitlines()[-1]  # onnxruntime tells of its libraries before
    assert done.returncode == 1 and told.startswith("error: ") and "cuda" in told.lower(), done.stderr
    assert not (tmp_path / "end").exists()


#: How a runner is told a place, behind the checkpoint to begin with; those in C# and Java run steps for cpu alone.
NAMED: dict[str, Callable[[str], list[str]]] = {
    "bare Python": lambda place: [place],
    "Node": lambda place: ["--provider", place],
    "wasm": lambda place: ["--provider", "wasm" if place == "cpu" else place],
    "C++": lambda place: [place],
    "C#": lambda place: [],
    "Java": lambda place: [],
}


@pytest.mark.parametrize("runner", NAMED)
def test_a_folder_has_a_step_for_each_of_its_places(runner: str, command: list[str], tmp_path: Path) -> None:
    """The first is taken where none is named; what is not there, or not here, is refused by name."""
    net = build()
    scope = net.start()
    step = net.main.export_training(tmp_path / "step", [amp.CUDAPlace(0), amp.CPUPlace()], scope=scope)
    (step / "train.onnx").write_bytes(b"")  # of the place that is not taken: nothing reads it
    data = batches(tmp_path / "data.safetensors", [net.feed(0)])
    found = trained(command, step, data, 1, tmp_path / "end", step, *NAMED[runner]("cpu"))
    assert np.allclose(losses(found, net.loss.name), np.frombuffer(net.train(scope, 0, 1)[0], np.float32), atol=1e-5)
    if not NAMED[runner]("webgpu"):
        return
    told = call(command, step, data, 1, tmp_path / "other", step, *NAMED[runner]("webgpu"))
    assert told.returncode == 1 and "step for" in told.stderr and "webgpu" in told.stderr, told.stderr
    assert call(command, step, data, 1, tmp_path / "other").returncode == 1, "the first is for CUDA"
    assert not (tmp_path / "other").exists()


def test_the_module_evaluates_infers_and_keeps_checkpoints_in_memory(tmp_path: Path) -> None:
    """What a page does: no folder, state from one step object to another, and errors that name feeds."""
    if not node():
        pytest.skip(NO_NODE)
    net = build()
    scope = net.start()
    folder = net.main.export_training(tmp_path / "step", amp.CPUPlace(), outputs=[net.output.name], scope=scope)
    feed = net.feed(0)
    script = f"""
    import * as ort from "onnxruntime-node";
    import {{ TrainingStep, StepError, files, folder }} from "./amp_step.mjs";
    const read = folder({json.dumps(str(folder))});
    const feeds = {{ x: new Float32Array({feed["x"].ravel().tolist()}), label: new BigInt64Array({feed["label"].ravel().tolist()}.map(BigInt)) }};
    const one = await TrainingStep.open(read, {{ ort }});
    await one.train(feeds);
    const two = await TrainingStep.open(read, {{ ort, checkpoint: files(await one.checkpoint()) }});
    const found = [await one.train(feeds), await two.train(feeds), await two.evaluate(feeds), await two.infer({{ x: feeds.x }})];
    const told = [];
    for (const wrong of [{{ x: feeds.x }}, {{ ...feeds, y: feeds.x }}, {{ ...feeds, label: new Int32Array(6) }}]) {{
      try {{ await two.train(wrong); }} catch (error) {{ told.push([error instanceof StepError, error.message]); }}
    }}
    const plain = (values) => Object.fromEntries(Object.entries(values).map(([name, data]) => [name, Array.from(data, Number)]));
    console.log(JSON.stringify({{ found: found.map(plain), told, step: two.step, scale: await two.lossScale() }}));
    """
    done = subprocess.run(["node", "--input-type=module", "-e", script], cwd=RUNNERS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for _ in range(2):
        expected = net.exe.run(net.main, feed, [net.loss], scope=scope)[0].item()
    names = [net.loss.name, net.output.name]
    loss, scores = net.exe.run(net.main.clone(for_test=True), feed, names, scope=scope)
    one, two, evaluated, inferred = said["found"]
    assert one[net.loss.name] == two[net.loss.name] == [expected]
    assert evaluated[net.loss.name] == [loss.item()]
    assert evaluated[net.output.name] == inferred[net.output.name] == scores.ravel().tolist()
    assert said["step"] == 2 and said["scale"] == net.optimizer.get_loss_scale_state(scope).scale
    for (known, message), part in zip(said["told"], ("feed 'label'", "no feed 'y'", "BigInt64Array of 6"), strict=True):
        assert known and part in message, message


def test_what_the_module_is_asked_for_at_once_is_done_one_after_the_other(tmp_path: Path) -> None:
    """Nobody waited for: each step begins with the state of the one before, and what fails stands in no other's way."""
    if not node():
        pytest.skip(NO_NODE)
    net = build(window=3)
    folder = net.main.export_training(tmp_path / "step", amp.CPUPlace(), scope=net.start())
    data = batches(tmp_path / "data.safetensors", [net.feed(s) for s in range(6)])
    script = f"""
    import * as ort from "onnxruntime-node";
    import {{ TrainingStep, folder, readSafetensors, url }} from "./amp_step.mjs";
    import {{ readFile }} from "node:fs/promises";
    const read = folder({json.dumps(str(folder))});
    const data = [...readSafetensors(new Uint8Array(await readFile({json.dumps(str(data))})))];
    const part = ({{ data, shape }}, n) => data.slice((n * data.length) / shape[0], ((n + 1) * data.length) / shape[0]);
    const feeds = (n) => Object.fromEntries(data.map(([name, all]) => [name, part(all, n)]));
    const tensors = (n) => Object.fromEntries(data.map(([name, all]) => [name, new ort.Tensor(all.dtype, part(all, n), all.shape.slice(1))]));
    const [one, two] = [await TrainingStep.open(read, {{ ort }}), await TrainingStep.open(read, {{ ort }})];
    for (let n = 0; n < 6; n += 1) await one.train(feeds(n));
    const asked = [two.train(feeds(0)), two.train(feeds(1)), two.train({{}}).catch((error) => error.message)];
    for (let n = 2; n < 6; n += 1) asked.push(two.train(tensors(n)));
    const end = two.checkpoint();
    const [expected, found] = (await Promise.all([one.checkpoint(), end])).map((files) => Buffer.from(files.get("state.safetensors")));
    const wrong = (await Promise.all(asked))[2];
    const seen = [];
    globalThis.fetch = async (address) => (seen.push(String(address)), new Response("{{}}"));
    await url("http://host/a/step?v=1")("manifest.json");
    await url(new URL("http://host/a/step/"))("manifest.json");
    Object.defineProperty(globalThis, "crypto", {{ value: {{}} }}); // as on a page of http:
    const insecure = await TrainingStep.open(read, {{ ort }}).catch((error) => error.message);
    console.log(JSON.stringify({{ same: found.equals(expected), step: two.step, wrong, seen, insecure }}));
    """
    done = subprocess.run(["node", "--input-type=module", "-e", script], cwd=RUNNERS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["same"] and said["step"] == 6 and "feed 'x'" in said["wrong"]
    assert said["seen"] == ["http://host/a/step/manifest.json"] * 2
    assert "SHA-256" in said["insecure"] and "https:" in said["insecure"]
