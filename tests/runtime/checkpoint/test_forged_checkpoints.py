"""A checkpoint that somebody altered, checksums and all, is refused by name, and nothing in the scope changes before."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, CheckpointError, CheckpointNotFoundError, PrecisionError
from amp_transpiler.warn import AmpWarning
from tests.helpers.checkpoints import build, state
from tests.helpers.forgeries import META, TENSORS, forgeries, sign


def test_forged_checkpoints_change_nothing(tmp_path: Path) -> None:
    net = build()
    scope = net.start()
    net.train(scope, 0, 1)
    good = amp.save_checkpoint(tmp_path / "good", net.main, scope)
    net.train(scope, 1, 3)
    other = amp.save_checkpoint(tmp_path / "other", net.main, scope)
    before = state(net.main, scope)
    made = forgeries(good, seed=7)
    refused = 0
    for number, forgery in enumerate(made):
        folder = shutil.copytree(good, tmp_path / str(number))
        forgery.make(folder)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                amp.load_checkpoint(folder, net.main, scope, strict=number % 3 != 0)
        except (CheckpointError, PrecisionError) as error:
            refused += 1
            told = str(error)
            assert str(folder) in told or isinstance(error, PrecisionError), (forgery.what, told)
            assert len(told) < 5000 and told.encode() and "\0" not in told, forgery.what
            assert state(net.main, scope) == before, f"{forgery.what}: the scope changed"
        else:
            assert not forgery.fatal, f"{forgery.what} was loaded"
            amp.load_checkpoint(other, net.main, scope)
        shutil.rmtree(folder)
    assert len(made) >= 240 and refused >= 240, (len(made), refused)
    assert state(net.main, scope) == before and amp.load_checkpoint(good, net.main, scope).exact


@pytest.mark.parametrize(
    "field, value, told",
    [
        ("step", "ghost", r"meta\.json: 'step' is 'ghost'; expected null or a whole number"),
        ("file", {"name": "../x/state.safetensors", "bytes": 1, "sha256": "0" * 64}, r"'file\.name' is '\.\./x/"),
        ("versions", None, r"'versions' is None; expected an object of strings"),
    ],
)
def test_the_message_names_file_and_field(field: str, value: Any, told: str, tmp_path: Path) -> None:
    net = build()
    scope = net.start()
    good = amp.save_checkpoint(tmp_path / "good", net.main, scope)
    (tmp_path / "x").mkdir()
    shutil.copy(good / TENSORS, tmp_path / "x" / TENSORS)
    folder = shutil.copytree(good, tmp_path / field)
    meta = json.loads((folder / META).read_text())
    meta[field] = value
    sign(folder, meta)
    with pytest.raises(CheckpointError, match=told):
        amp.load_checkpoint(folder, net.main, amp.Scope())
    del meta[field]
    sign(folder, meta)
    with pytest.raises(CheckpointError, match=rf"meta\.json lacks '{field}"):
        amp.load_checkpoint(folder, net.main, amp.Scope())


def test_a_window_of_several_counts_is_no_error_of_python(tmp_path: Path) -> None:
    net, other = build(window=2), build(window=3)
    scope = net.start()
    net.train(scope, 0, 1)
    folder = amp.save_checkpoint(tmp_path / "good", net.main, scope)
    meta, tensors = json.loads((folder / META).read_text()), load_file(folder / TENSORS)
    (name,) = (name for name, said in meta["tensors"].items() if said["role"] == "micro_step")
    meta["tensors"][name]["shape"], tensors[name] = [2], np.array([1, 2], np.int32)
    save_file(tensors, folder / TENSORS)
    sign(folder, meta, file=True)
    with pytest.warns(AmpWarning, match=r"saved after \[1 2\] of the 2 runs"):
        amp.load_checkpoint(folder, other.main, amp.Scope())


def test_paths_that_are_none(tmp_path: Path) -> None:
    net = build()
    scope = net.start()
    (tmp_path / "loop").symlink_to("loop")
    for call in (
        lambda path: amp.load_checkpoint(path, net.main, scope),
        amp.latest_checkpoint,
        lambda path: amp.save_checkpoint(path, net.main, scope),
        lambda path: amp.save_checkpoint(path, net.main, scope, step=1),
    ):
        with pytest.raises(ArgumentError, match="path is .*; expected the path of a folder"):
            call(str(tmp_path / "a\0b"))
        with pytest.raises(CheckpointError):
            found = call(tmp_path / "loop")
            raise CheckpointNotFoundError(str(found)) if found is None else AssertionError(found)
    assert [p.name for p in tmp_path.iterdir()] == ["loop"]


def test_a_folder_that_is_a_link_takes_checkpoints(tmp_path: Path) -> None:
    net = build()
    scope = net.start()
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    amp.save_checkpoint(tmp_path / "runs", net.main, scope)
    amp.save_checkpoint(tmp_path / "runs", net.main, scope)
    assert (tmp_path / "runs").is_symlink() and len(list((tmp_path / "disk").iterdir())) == 2
    assert amp.load_checkpoint(tmp_path / "disk", net.main, amp.Scope()).exact
