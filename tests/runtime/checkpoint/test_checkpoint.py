"""Checkpoints on disk: what is in them, how many are kept, and what is not saved."""

from __future__ import annotations

import errno
import json
import os
import re
from functools import reduce
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import amp_transpiler as amp
from amp_transpiler.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointWriteError,
    ScopeError,
)
from amp_transpiler.runtime.checkpoint.writing import META, TENSORS
from tests.helpers.checkpoints import HALF, Small, build, loads, state


# -- what is written --------------------------------------------------------------------------------------
def test_content(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    folder = amp.save_checkpoint(
        tmp_path / "run",
        net.main,
        scope,
        step=123,
        data_position=(4, np.int64(2)),
        extra={"best": float("inf"), "rng": rng.bit_generator.state},
    )
    assert folder == tmp_path / "run" / "step_00000123"
    assert sorted(os.listdir(folder)) == [META, TENSORS]
    assert os.listdir(tmp_path / "run") == [folder.name]
    arrays = load_file(folder / TENSORS)
    assert set(arrays) == {v.name for v in net.main.variables if v.persistable}
    for name, array in arrays.items():
        assert array.dtype == scope.find_var(name).dtype
        assert array.tobytes() == scope.find_var(name).tobytes()
    assert {str(array.dtype) for array in arrays.values()} == {"float32", "float16", "int32", "uint32"}
    meta = json.loads((folder / META).read_text())
    assert (meta["version"], meta["step"], meta["data_position"]) == (1, 123, [4, 2])
    assert meta["scaling"][0]["incr_every_n_steps"] == 2
    assert meta["versions"]["numpy"] == np.__version__
    roles = {one["role"] for one in meta["tensors"].values()}
    assert roles == {
        "parameter",
        "master",
        "moment1",
        "moment2",
        "beta1_pow_acc",
        "beta2_pow_acc",
        "statistics",
        "loss_scaling",
        "learning_rate",
        "random",
    }
    loaded = amp.load_checkpoint(tmp_path / "run", net.main, amp.Scope())
    assert loaded.path == folder and loaded.step == 123 and loaded.data_position == [4, 2]
    assert loaded.extra == {"best": float("inf"), "rng": rng.bit_generator.state}


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_modes_of_files(net: Small, scope: amp.Scope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the process gives its files; where the disk sets none, nobody else reads the tensors."""

    def modes(name: str) -> list[int]:
        folder = amp.save_checkpoint(tmp_path / name, net.main, scope)
        return [(folder / file).stat().st_mode & 0o777 for file in (META, TENSORS)]

    def refusing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    before = os.umask(0o027)
    try:
        assert modes("run") == [0o640, 0o640]
        monkeypatch.setattr(Path, "chmod", refusing)
        assert modes("elsewhere") == [0o640, 0o600]
    finally:
        os.umask(before)
    assert amp.load_checkpoint(tmp_path / "elsewhere", net.main, scope).exact


def test_the_same_state_gives_the_same_tensors(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    folders = [amp.save_checkpoint(tmp_path / name, net.main, scope) for name in "ab"]
    assert len({(folder / TENSORS).read_bytes() for folder in folders}) == 1


def test_bfloat16_is_stored_as_such(tmp_path: Path) -> None:
    net = build(mode="pure-bf16")
    folder = amp.save_checkpoint(tmp_path / "c", net.main, net.start())
    assert np.dtype(ml_dtypes.bfloat16) in {array.dtype for array in load_file(folder / TENSORS).values()}


def test_every_element_type_comes_back(tmp_path: Path) -> None:
    program, scope = amp.Program(), amp.Scope()
    types = [
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8e4m3fn",
        "int4",
    ]
    for number, dtype in enumerate(types):
        shape = [(), (3,), (0, 2), (2, 3)][number % 4]
        variable = program.add_variable(f"v.{dtype}", dtype, shape, persistable=True)
        program.add_operator("Identity", [variable], [program.add_variable(f"r.{dtype}", dtype, shape)])
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        scope.set_var(variable.name, array.astype(amp.ir.types.numpy_dtype(dtype)))
    amp.save_checkpoint(tmp_path / "c", program, scope)
    fresh = amp.Scope()
    amp.load_checkpoint(tmp_path / "c", program, fresh)
    assert state(program, fresh) == state(program, scope)


def test_replaced_where_there_is_one(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    for last in range(3, 6):
        net.train(scope, last - 1, last)
        amp.save_checkpoint(tmp_path / "c", net.main, scope)
        assert loads(net, tmp_path / "c") == state(net.main, scope)
        assert len(os.listdir(tmp_path / "c")) == 2
    (tmp_path / "empty").mkdir()
    amp.save_checkpoint(tmp_path / "empty", net.main, scope)
    assert loads(net, tmp_path / "empty") == state(net.main, scope)


def test_the_last_k_in_the_order_of_writing(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    assert amp.latest_checkpoint(tmp_path / "none") is None
    for step in (1, 2, 30):
        amp.save_checkpoint(tmp_path, net.main, scope, step=step, keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["step_00000002", "step_00000030"]
    net.train(scope, 2, 3)
    newest = amp.save_checkpoint(tmp_path, net.main, scope, step=3, keep_last=2)  # training went back
    assert sorted(os.listdir(tmp_path)) == ["step_00000003", "step_00000030"]
    assert amp.latest_checkpoint(tmp_path) == newest
    assert amp.latest_checkpoint(newest) == newest
    assert loads(net, tmp_path) == state(net.main, scope)
    amp.save_checkpoint(tmp_path, net.main, scope, step=30, keep_last=1)
    assert os.listdir(tmp_path) == ["step_00000030"]
    for step in (31, 32, 33):
        amp.save_checkpoint(tmp_path, net.main, scope, step=step, keep_last=2, keep_steps=[30, 7])
    assert sorted(os.listdir(tmp_path)) == ["step_00000030", "step_00000032", "step_00000033"]


def test_files_of_others_stay_where_a_checkpoint_was(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    first = amp.save_checkpoint(tmp_path, net.main, scope, step=1)
    (first / "notes.txt").write_text("best so far")
    newest = amp.save_checkpoint(tmp_path, net.main, scope, step=2, keep_last=1)
    assert os.listdir(first) == ["notes.txt"] and amp.latest_checkpoint(tmp_path) == newest
    assert sorted(os.listdir(tmp_path)) == ["step_00000001", "step_00000002"]


# -- arguments --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"step": -1}, ArgumentError, "step is -1"),
        ({"step": 1.5}, ArgumentTypeError, "step is 1.5"),
        ({"step": True}, ArgumentTypeError, "step is True"),
        ({"step": 1, "keep_last": 0}, ArgumentError, "keep_last is 0; expected a whole number, at least 1"),
        ({"keep_last": 2}, ArgumentError, "pass step="),
        ({"step": 1, "keep_steps": 3}, ArgumentTypeError, "keep_steps is 3; expected a list of steps"),
        ({"extra": np.zeros(2)}, ArgumentTypeError, r"array\.tolist\(\)"),
        ({"extra": {"a": [object()]}}, ArgumentTypeError, r"extra\['a'\]\[0\] is <object"),
        (
            {"extra": reduce(lambda inner, _: [inner], range(5000), 1)},
            ArgumentError,
            "extra has lists .* more than 100 deep",
        ),
        ({"extra": {"n": -(10**5000)}}, ArgumentError, r"extra\['n'\] is a whole number of 16610 bits"),
        ({"data_position": {1: 2}}, ArgumentTypeError, "data_position has the key 1"),
        ({"program": 3}, ArgumentTypeError, "takes a program as second argument"),
        ({"path": None}, ArgumentTypeError, "path is None; expected the path of a folder"),
    ],
)
def test_bad_arguments(
    net: Small, scope: amp.Scope, tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {"path": tmp_path / "c", "program": net.main, "scope": scope} | arguments
    with pytest.raises(error, match=message):
        amp.save_checkpoint(**given)
    assert os.listdir(tmp_path) == []


def test_no_whole_state(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    with pytest.raises(ScopeError, match=r"'fc_0.w_0' of program 'program_\d+' is not in the scope.*no whole state"):
        amp.save_checkpoint(tmp_path / "c", net.main, amp.Scope())
    fresh = amp.Scope()
    net.exe.run(net.startup, scope=fresh)
    with pytest.raises(ScopeError, match="amp_init"):
        amp.save_checkpoint(tmp_path / "c", net.main, fresh)
    scope.set_var("fc_0.b_0", np.zeros(5, scope.find_var("fc_0.b_0").dtype))
    with pytest.raises(ScopeError, match=r"'fc_0.b_0' has shape \[5\]"):
        amp.save_checkpoint(tmp_path / "c", net.main, scope)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_something_else(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointWriteError, match="is not empty, and is no checkpoint"):
        amp.save_checkpoint(tmp_path / "c", net.main, scope)
    with pytest.raises(CheckpointWriteError, match="cannot be written"):
        amp.save_checkpoint(tmp_path / "c" / "mine.txt", net.main, scope, step=1)
    with pytest.raises(CheckpointWriteError, match="cannot be written"):
        amp.save_checkpoint(tmp_path / "c" / "mine.txt", net.main, scope)
    assert os.listdir(tmp_path / "c") == ["mine.txt"] and os.listdir(tmp_path) == ["c"]
    amp.save_checkpoint(tmp_path / "d", net.main, scope)
    with pytest.raises(ArgumentError, match="is a checkpoint itself"):
        amp.save_checkpoint(tmp_path / "d", net.main, scope, step=1)


def test_renamed(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    """Moments and masters follow their parameter."""
    amp.save_checkpoint(tmp_path / "c", net.main, scope)
    other = build()
    for variable in list(other.main.variables):
        if variable.persistable and variable.name.startswith("fc_0"):
            other.main.rename_variable(variable, variable.name.replace("fc_0", "head"))
    fresh = amp.Scope()
    loaded = amp.load_checkpoint(tmp_path / "c", other.main, fresh, rename={"fc_0.*": "head.*"})
    assert not loaded.exact
    before = state(net.main, scope)
    assert {name.replace("head", "fc_0"): bits for name, bits in state(other.main, fresh).items()} == before


def test_the_same_state_of_another_program(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    amp.save_checkpoint(tmp_path / "c", net.main, scope)
    with pytest.warns(UserWarning, match="computes something else.*not bit for bit"):
        loaded = amp.load_checkpoint(tmp_path / "c", build(beta1=0.8).main, amp.Scope())
    assert not loaded.exact


def test_fingerprint() -> None:
    from amp_transpiler.runtime.checkpoint.state_slots import fingerprint

    one, other = build(), build()
    assert fingerprint(one.main) == fingerprint(other.main) == fingerprint(one.main.clone())
    other.main.seed = 9
    amp.StepReports(other.main)  # whether steps are reported changes nothing
    assert fingerprint(one.main) == fingerprint(other.main)
    prints = [fingerprint(build(*case).main) for case in (("Adam",), ("AdamW",), ("Adam", "amp"), ("Adam", "fp32"))]
    prints += [fingerprint(build(weight_decay=0.1).main), fingerprint(build(schedule=True).main)]
    assert len(set(prints)) == len(prints)
    ratio = next(op.input(1) for op in other.main.operators if op.type == "Dropout")
    assert ratio is not None
    ratio.data = np.float32(0.5)
    assert fingerprint(other.main) != fingerprint(one.main)


def test_fingerprint_of_a_program_in_a_file() -> None:
    from amp_transpiler.runtime.checkpoint.state_slots import fingerprint

    main = build(average=True).main
    assert fingerprint(amp.Program.from_onnx(main.to_onnx())) == fingerprint(main)


def test_other_variables_of_the_scope_stay(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    amp.save_checkpoint(tmp_path / "c", net.main, scope)
    other = amp.Scope()
    other.set_var("mine", np.arange(3))
    amp.load_checkpoint(tmp_path / "c", net.main, other)
    assert np.array_equal(other.find_var("mine"), np.arange(3))
    net.train(other, HALF, HALF + 1)
    assert re.fullmatch(r"[0-9a-f]{64}", json.loads((tmp_path / "c" / META).read_text())["file"]["sha256"])
