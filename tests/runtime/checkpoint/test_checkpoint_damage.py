"""Damage to a checkpoint, and one that does not fit, is named, and the scope stays as it is."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import amp_transpiler as amp
from amp_transpiler.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from amp_transpiler.runtime.checkpoint.writing import META, TENSORS
from tests.helpers.checkpoints import Small, build, loads, state


# -- damage -----------------------------------------------------------------------------------------------
def refused(net: Small, path: Path, message: str, error: type[Exception] = CheckpointError) -> None:
    """Loading raises, and the scope is as it was."""
    scope = amp.Scope()
    scope.set_var("fc_0.b_0", np.ones(2, np.float32))
    with pytest.raises(error, match=message):
        amp.load_checkpoint(path, net.main, scope)
    assert scope.var_names() == ["fc_0.b_0"] and scope.find_var("fc_0.b_0").shape == (2,)


def test_every_flipped_byte_is_found(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    amp.save_checkpoint(tmp_path, net.main, scope, step=1)
    folder = amp.save_checkpoint(tmp_path, net.main, scope, step=2)
    rng = np.random.default_rng(0)
    for name in (TENSORS, META):
        good = (folder / name).read_bytes()
        for place in (0, len(good) - 1, *rng.integers(0, len(good), 40)):
            bad = bytearray(good)
            bad[place] ^= 1 << int(rng.integers(0, 8))
            (folder / name).write_bytes(bad)
            if bytes(bad).split() != good.split():
                refused(net, tmp_path, "step_00000002.*(damaged|cannot be read|not that of|format version)")
        (folder / name).write_bytes(good)
    assert loads(net, folder) == state(net.main, scope)
    (tmp_path / "step_00000001" / META).write_text("{}")  # an old one does no harm
    assert loads(net, tmp_path) == state(net.main, scope)
    amp.save_checkpoint(tmp_path, net.main, scope, step=3, keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["step_00000002", "step_00000003"]


def test_damage_names_the_checkpoint_before(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    amp.save_checkpoint(tmp_path, net.main, scope, step=1)
    folder = amp.save_checkpoint(tmp_path, net.main, scope, step=2)
    good = (folder / TENSORS).read_bytes()
    for cut in (0, 7, len(good) // 2, len(good) - 1):
        (folder / TENSORS).write_bytes(good[:cut])
        refused(net, tmp_path, rf"step_00000002' is damaged \(there is 'step_00000001' beside it\).*has {cut} bytes")
    (folder / TENSORS).unlink()
    refused(net, tmp_path, "No such file")
    assert loads(net, tmp_path / "step_00000001") == state(net.main, scope)


def test_what_is_no_checkpoint(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    refused(net, tmp_path / "none", "there is no checkpoint", CheckpointNotFoundError)
    refused(net, tmp_path, "there is no checkpoint in folder", CheckpointNotFoundError)
    folder = amp.save_checkpoint(tmp_path / "c", net.main, scope)
    refused(net, folder / TENSORS, "is a file; a checkpoint is a folder", CheckpointNotFoundError)
    meta = (folder / META).read_text()
    (folder / META).unlink()
    refused(net, folder, "has no meta.json.*load_weights", CheckpointNotFoundError)
    (folder / META).write_text('{"format": "other"}')
    refused(net, folder, "not that of a checkpoint")
    (folder / META).write_text(meta.replace('"version": 1', '"version": 2'))
    refused(net, folder, "format version 2")
    (folder / META).write_text(meta)
    save_file({"x": np.zeros(3)}, folder / TENSORS)  # foreign
    refused(net, folder, "damaged")


# -- another program --------------------------------------------------------------------------------------
def test_every_mismatch_is_listed(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    amp.save_checkpoint(tmp_path / "c", net.main, scope)
    other = build(hidden=9)
    with pytest.raises(CheckpointMismatchError) as caught:
        amp.load_checkpoint(tmp_path / "c", other.main, amp.Scope())
    wrong = {v.name for v in other.main.variables if v.persistable and 9 in (v.shape or ())}
    assert set(caught.value.wrong) == wrong and all(name in str(caught.value) for name in wrong)
    assert "fc_0.w_0 has shape [8, 8] and not [8, 9]" in str(caught.value)
    assert "strict=False with rename={'fc_0.w_0': None, 'fc_0.b_0': None, " in str(caught.value)

    with amp.program_guard(amp.Program(), amp.Program("startup")):  # without the guard of names
        main = amp.default_main_program()
        amp.nn.fc(amp.nn.fc(amp.data("x", [2, 8]), 8), 4)
    renamed = [v.name for v in main.parameters]
    with pytest.raises(CheckpointMismatchError, match=r"unique_name\.guard\(\)") as caught:
        amp.load_checkpoint(tmp_path / "c", main, amp.Scope(), rename={"fc_0.*": "other.*"})
    assert set(caught.value.missing) == set(renamed) - {"fc_1.w_0", "fc_1.b_0"}
    assert "fc_0.w_0" in caught.value.extra
