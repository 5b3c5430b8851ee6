"""An exported step trains under bare onnxruntime as the executor does, bit for bit, and its state goes both ways."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file

import amp_transpiler as amp
from amp_transpiler.export.step_programs import predictions
from amp_transpiler.ir.control import every_node
from amp_transpiler.nn import functional as F
from tests.helpers.checkpoints import HALF, STEPS, Small, build, state
from tests.helpers.runners import bare, batches, losses
from tests.helpers.where import ROOT

CPU = amp.CPUPlace()
CASES: dict[str, dict[str, Any]] = {
    "pure fp16": {},
    "pure bfloat16, static": {"optimizer": "Lamb", "mode": "pure-bf16", "scaling": "static"},
    "mixed, schedule": {"optimizer": "Momentum", "mode": "amp", "schedule": True},
    "fp32": {"mode": "fp32", "scaling": "none"},
    "window, averages": {"window": 3, "average": True},
}


def trained(net: Small, scope: amp.Scope, first: int, last: int) -> list[np.float32]:
    return [net.exe.run(net.main, net.feed(s), [net.loss], scope=scope)[0].item() for s in range(first, last)]


@pytest.mark.parametrize("case", CASES)
def test_steps_are_the_executors_and_state_goes_both_ways(case: str, tmp_path: Path) -> None:
    """Half of the steps by the runner, one by the executor, the rest by the runner: as in one run of the executor."""
    net = build(**CASES[case])
    scope = net.start()
    net.main.export_training(tmp_path / "step", CPU, scope=scope)
    data = batches(tmp_path / "data.safetensors", [net.feed(s) for s in range(STEPS)])
    expected = [np.float32(loss) for loss in trained(net, scope, 0, STEPS)]

    found = [*losses(bare(tmp_path / "step", data, HALF, tmp_path / "half"), net.loss.name)]
    moved = amp.Scope()
    loaded = amp.load_checkpoint(tmp_path / "half", net.main, moved)
    assert loaded.exact and loaded.step == HALF
    found += trained(net, moved, HALF, HALF + 1)
    amp.save_checkpoint(tmp_path / "steps", net.main, moved, step=HALF + 1)
    there = tmp_path / "steps" / f"step_{HALF + 1:08d}"
    rest = STEPS - HALF - 1
    found += [*losses(bare(tmp_path / "step", data, rest, tmp_path / "end", there), net.loss.name)]
    assert np.array_equal(np.array(found), np.array(expected), equal_nan=True)
    ended = amp.Scope()
    assert amp.load_checkpoint(tmp_path / "end", net.main, ended).step == STEPS
    assert state(net.main, ended) == state(net.main, scope)


def test_a_step_for_processors_has_no_kernel_that_older_builds_lack(tmp_path: Path) -> None:
    """onnxruntime 1.23 knows no GatedAdd, which Adam's update and the gradient of a softmax have here."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup):
        x, label = amp.data("x", [4, 64], "float32"), amp.data("label", [4, 1], "int64")
        loss = F.cross_entropy(amp.nn.fc(x, 64), label)
        amp.optimizer.Adam(0.01).minimize(loss, startup)
    lowered = main.lower(CPU, fetch_list=[loss]).model
    assert "GatedAdd" in {node.op_type for node in every_node(lowered.graph.node)}
    with amp.scope_guard(amp.Scope()):
        executor = amp.Executor(CPU)
        executor.run(startup)
        step = onnx.load(main.export_training(tmp_path / "step", CPU) / "train.onnx")
    assert not {node.domain for node in every_node(step.graph.node)}.union(o.domain for o in step.opset_import) - {""}


def deep(parameters: int, rows: int) -> tuple[amp.Program, amp.Program, amp.Variable, Any]:
    """Many small parameters, which lie in flat buffers here, and a large one, which is updated in chunks."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        h = amp.data("x", [2, rows], "float32")
        label = amp.data("label", [2, 1], "int64")
        with amp.fp16_guard():
            h = amp.nn.fc(h, 256)
            h = amp.nn.fc(h, 6)
            for _ in range(parameters):
                h = amp.nn.fc(h, 6, act="tanh")
            loss = F.cross_entropy(h, label)
        clip = amp.optimizer.ClipGradByGlobalNorm(0.1)
        optimizer = amp.decorate(
            amp.optimizer.Adam(0.01, multi_precision=True, grad_clip=clip), use_pure_fp16=True, init_loss_scaling=64.0
        )
        optimizer.minimize(loss, startup)
    return main, startup, loss, optimizer


def test_flat_buffers_come_out_as_their_variables(tmp_path: Path) -> None:
    main, startup, loss, optimizer = deep(32, 2048)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(startup, scope=scope)
    optimizer.amp_init(CPU, scope)
    lowered = main.lower(CPU)
    chunks = [port.shape for port in lowered.states if port.segments]
    assert {shape[0] > 1 for shape in chunks if shape} == {True, False}, "the net has both kinds of flat state"
    main.export_training(tmp_path / "step", CPU, scope=scope)
    rng = np.random.default_rng(0)
    feeds = [
        {"x": rng.standard_normal((2, 2048)).astype(np.float32), "label": rng.integers(0, 6, (2, 1))} for _ in range(3)
    ]
    data = batches(tmp_path / "data.safetensors", feeds)
    found = losses(bare(tmp_path / "step", data, 3, tmp_path / "end"), loss.name)
    assert [*found] == [np.float32(exe.run(main, feed, [loss], scope=scope)[0].item()) for feed in feeds]
    ended = amp.Scope()
    amp.load_checkpoint(tmp_path / "end", main, ended)
    assert state(main, ended) == state(main, scope)


def test_the_manifest_fits_its_schema(tmp_path: Path) -> None:
    import jsonschema

    schema = json.loads((ROOT / "amp_transpiler" / "export" / "manifest.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    for number, case in enumerate(CASES.values()):
        net = build(**case)
        folder = net.main.export_training(tmp_path / str(number), CPU, scope=net.start())
        manifest = manifest_of(folder)
        jsonschema.validate(manifest, schema)
        files = manifest["files"].keys() | manifest["places"][0]["files"].keys()
        assert files == {path.name for path in folder.iterdir()} - {"manifest.json"}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(manifest | {"version": 2}, schema)


def test_what_a_state_becomes_may_be_looked_at(tmp_path: Path) -> None:
    """In bfloat16, which goes out as fp32: one output for both."""
    net = build(mode="pure-bf16", scaling="static")
    new = net.main.updates[net.main.var("fc_0.w_0")]
    folder = net.main.export_training(tmp_path / "step", CPU, fetch_list=[new], scope=net.start())
    train = manifest_of(folder)["places"][0]["models"]["train"]
    fetched = next(one for one in train["fetches"] if one["name"] == new.name)
    assert fetched["dtype"] == "float32" and train["updates"]["fc_0.w_0"] == fetched["output"]
    ort.InferenceSession(folder / "train.onnx", providers=["CPUExecutionProvider"])


def test_one_folder_has_steps_of_several_places(tmp_path: Path) -> None:
    """Each as in a folder of its own, fed the same; what one place alone had goes when the folder is replaced."""
    net = build(window=2)
    scope, places = net.start(), {"cpu": CPU, "webgpu": amp.WebGPUPlace(0), "cuda": amp.CUDAPlace(0)}
    folder = net.main.export_training(tmp_path / "all", [*places.values()], scope=scope, portable=True)
    said = manifest_of(folder)
    assert [(one["place"], one["portable"]) for one in said["places"]] == [
        ("cpu", True),
        ("webgpu", False),
        ("cuda", False),
    ]
    for one, place in zip(said["places"], places.values(), strict=True):
        alone = net.main.export_training(tmp_path / one["place"], place, scope=scope, portable=one["portable"])
        (only,) = manifest_of(alone)["places"]
        for name, model in one["models"].items():
            assert model["file"] == f"{name}.onnx" if place is CPU else f"{name}.{one['place']}.onnx"
            assert (folder / model["file"]).read_bytes() == (alone / f"{name}.onnx").read_bytes()
            assert model | {"file": f"{name}.onnx"} == only["models"][name]
            first = said["places"][0]["models"][name]
            fed, same = ([(one["name"], one["dtype"], one["shape"]) for one in m["feeds"]] for m in (model, first))
            assert fed == same, "64-bit integers on each"
        for file in manifest_of(alone)["files"]:
            assert file == "meta.json" or (folder / file).read_bytes() == (alone / file).read_bytes()
    assert amp.load_checkpoint(folder, net.main, amp.Scope()).exact
    net.main.export_training(folder, places["webgpu"], scope=scope, overwrite=True)
    assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "webgpu").iterdir()}


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
@pytest.mark.parametrize("loss", ["entropy", "weighed", "squares"])
def test_what_is_inferred_is_what_the_loss_compares(loss: str, mode: str) -> None:
    """Not the weights that a mixed step casts, what inputs are before they are joined, or losses of examples."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, ids = amp.data("x", [4, 8], "float32"), amp.data("ids", [4, 3], "int64")
        label, weights = amp.data("label", [4, 1], "int64"), amp.data("weights", [4, 1], "float32")
        with amp.fp16_guard():
            joined = F.concat([F.relu(amp.nn.fc(x, 8)), F.mean(amp.nn.embedding(ids, [40, 6]), axis=1)], axis=1)
            scores = amp.nn.fc(F.concat([joined, F.cast(x, joined.dtype)], axis=1), 4)
        each = F.cross_entropy(scores, label, reduction="none")
        total = F.mean(each * weights if loss == "weighed" else each)
        if loss == "squares":
            total = total + 0.01 * sum(F.sum(F.square(F.cast(v, "float32"))) for v in main.parameters)
        optimizer: Any = amp.optimizer.SGD(0.1, multi_precision=True)
        if mode != "fp32":
            optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure")
        optimizer.minimize(total, startup)
    (found,) = predictions(main.clone(for_test=True), [total.name])
    assert found.removesuffix(".cast_fp32") == scores.name


def test_numbers_that_a_place_cannot_hold_stay_out_of_range(tmp_path: Path) -> None:
    """2 ** 32 + 1 would be row 1 in 32 bits; the models of that place run on any provider here."""
    main, startup, scope = amp.Program(), amp.Program("startup"), amp.Scope()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        ids = amp.data("ids", [2], "int64")
        rows = amp.nn.embedding(ids, [8, 4])
        twice = ids + ids
        amp.optimizer.SGD(0.1).minimize(F.mean(F.square(rows)), startup)
    amp.Executor().run(startup, scope=scope)
    folder = main.export_training(tmp_path / "step", amp.WebGPUPlace(0), outputs=[rows, twice], scope=scope)
    infer = manifest_of(folder)["places"][0]["models"]["infer"]
    assert [one["dtype"] for one in (*infer["feeds"], *infer["fetches"])] == ["int64", "float32", "int64"]
    table = load_file(folder / "state.safetensors")
    session = ort.InferenceSession(folder / infer["file"], providers=["CPUExecutionProvider"])

    def given(*numbers: int) -> list[np.ndarray]:
        feeds = {infer["feeds"][0]["input"]: np.array(numbers)}
        feeds |= {tensor: table[name] for name, tensor in infer["states"].items()}
        feeds |= dict.fromkeys(infer["zeros"], np.zeros((), np.float32))
        found: list[np.ndarray] = session.run([one["output"] for one in infer["fetches"]], feeds)
        return found

    found, both = given(1, 7)
    (weights,) = (array for array in table.values() if array.shape == (8, 4))
    assert np.array_equal(found, weights[[1, 7]]) and both.tolist() == [2, 14]
    with pytest.raises(Exception, match="out of .*(range|bounds)"):
        given(2**32 + 1, 0)


def manifest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return found


def test_who_follows_the_documentation_sets_the_options_that_runners_set() -> None:
    recipe = (ROOT / "docs" / "exported_steps.md").read_text(encoding="utf-8")
    recipe = recipe.partition("## A step in other languages")[2].partition("\n## ")[0]
    for name in ("bare.py", "train.cpp", "Train.cs", "Train.java"):
        options = re.findall(r'"(session\.\w+)"', (ROOT / "demo" / "runners" / name).read_text(encoding="utf-8"))
        assert options and all(f"`{option}`" in recipe for option in options), name


def test_a_program_of_several_ranks_is_refused(tmp_path: Path) -> None:
    def rank() -> str:
        net = build()
        with pytest.raises(amp.AmpError, match="exchanges tensors between ranks.*a process of one rank") as refused:
            net.main.export_training(tmp_path / "step", CPU, scope=net.start())
        return str(refused.value)

    amp.distributed.simulate(2, rank)
    assert not (tmp_path / "step").exists()
