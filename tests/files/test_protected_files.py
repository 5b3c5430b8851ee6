"""What a model names, or consists of, is not written over, and links are not followed out of its folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, numpy_helper

import amp_transpiler as amp
from amp_transpiler.cli import main
from amp_transpiler.errors import ArgumentError, ModelFileError, ModelFileWriteError
from amp_transpiler.files import check_outputs
from tests.helpers.external_nets import X, contents, convert, external, net, net_at, outputs


# -- names in a model ------------------------------------------------------------------------------------
def test_locations_in_a_model_name_no_file_that_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mal, victim = tmp_path / "mal", tmp_path / "victim"
    path = net(mal)
    model = onnx.load(path, load_external_data=False)
    for number, location in enumerate((".bashrc", ".ssh/authorized_keys", "other.onnx", "other.onnx.data")):
        tensor = numpy_helper.from_array(np.full(4096, number, np.uint8), f"t{number}")
        (mal / location).parent.mkdir(exist_ok=True)
        (mal / location).write_bytes(external(tensor, location))
        model.graph.initializer.append(tensor)
        model.graph.node.append(onnx.helper.make_node("Identity", [tensor.name], [f"o{number}"]))
        model.graph.output.append(onnx.helper.make_tensor_value_info(f"o{number}", TensorProto.UINT8, [4096]))
    hidden = numpy_helper.from_array(np.full(8192, 9, np.uint8), "hidden")
    (mal / "attribute").write_bytes(external(hidden, "attribute"))
    model.graph.node.append(onnx.helper.make_node("Constant", [], ["c"], value=hidden))
    model.graph.output.append(onnx.helper.make_tensor_value_info("c", TensorProto.UINT8, [8192]))
    onnx.save_model(model, path)
    (victim / ".ssh").mkdir(parents=True)
    for location in (".bashrc", ".ssh/authorized_keys", "other.onnx", "other.onnx.data", "attribute"):
        (victim / location).write_text("mine")
    expected = outputs(path)
    before = contents(victim)
    assert convert(capsys, path, victim / "out.onnx")[0] == 0
    after = contents(victim)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"out.onnx", "out.onnx.data"}
    shutil.rmtree(mal)
    found = outputs(victim / "out.onnx")
    assert all(np.array_equal(a, b) for a, b in zip(found[1:], expected[1:], strict=True))
    amp.Program.from_onnx(victim / "out.onnx").to_onnx(victim / "again.onnx")
    assert set(contents(victim)) - set(after) == {"again.onnx", "again.onnx.data"}


def test_a_neighbour_keeps_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = net(tmp_path / "AA", "model.onnx", "model.onnx.data", seed=1)
    other = net(tmp_path / "BB", "model.onnx", "model.onnx.data", seed=2)
    before, expected = contents(other.parent), outputs(one)
    assert convert(capsys, one, other.parent / "out.onnx", "--black-list", "MatMul")[0] == 0
    after = contents(other.parent)
    assert {name: after[name] for name in before} == before
    assert np.allclose(outputs(other.parent / "out.onnx")[0], expected[0], rtol=1e-2, atol=1e-2)


def test_what_the_input_consists_of_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = net(tmp_path)
    os.link(tmp_path / "net.onnx.data", tmp_path / "hard.bin")
    (tmp_path / "soft.bin").symlink_to("net.onnx.data")
    os.link(path, tmp_path / "twin.onnx")
    (tmp_path / "loop").symlink_to("loop")
    samples = tmp_path / "samples"
    samples.mkdir()
    np.savez(samples / "a.npz", x=X)
    before = contents(tmp_path)
    requests = [
        *[
            [path, tmp_path / "half.onnx", "--external-data", name]
            for name in ("net.onnx.data", "net.onnx", "hard.bin", "soft.bin", "twin.onnx", "half.onnx", "..", "samples")
        ],
        [path, path],
        [path, tmp_path / "twin.onnx"],
        [path, tmp_path / "net.onnx.data"],
        [path, tmp_path / "hard.bin"],
        [path, tmp_path / "soft.bin"],
        [path, tmp_path / "loop"],
        *[
            [path, tmp_path / "half.onnx", option, tmp_path / name]
            for option in ("--report", "--json")
            for name in ("net.onnx", "net.onnx.data", "hard.bin", "half.onnx", "half.onnx.data", "samples", "loop")
        ],
        [path, tmp_path / "half.onnx", "--report", tmp_path / "r", "--json", tmp_path / "." / "r"],
        [path, samples / "a.npz", "--calibration", samples],
        [path, tmp_path / "half.onnx", "--calibration", samples / "a.npz", "--json", samples / "a.npz"],
        [path, tmp_path / "half.onnx", "--report", tmp_path / "x\0y"],
        [path, tmp_path / "half.onnx", "--report", tmp_path / ("n" * 300)],
        [path, str(tmp_path / "new.onnx") + "/"],
    ]
    for request in requests:
        status, _, err = convert(capsys, *request)
        assert status in (1, 2) and err.count("\n") == 1, (request, err)
        assert contents(tmp_path) == before, request


def test_a_program_does_not_overwrite_the_weights_that_it_maps(tmp_path: Path) -> None:
    path = net(tmp_path)
    before = contents(tmp_path)
    for program in (amp.Program.from_onnx(path), amp.convert(path), amp.convert(path, mode="mixed").clone()):
        for target, choice in (("half.onnx", "net.onnx.data"), ("half.onnx", "net.onnx"), ("net.onnx.data", None)):
            with pytest.raises(ArgumentError, match="choose another name"):
                program.to_onnx(tmp_path / target, external_data=choice)
    given = onnx.load(path, load_external_data=False)
    with pytest.raises(ArgumentError, match="choose another name"):
        amp.Program.from_onnx(given, external_data_dir=tmp_path).to_onnx(tmp_path / "net.onnx.data")
    assert contents(tmp_path) == before
    expected = outputs(path)
    program = amp.Program.from_onnx(path)
    program.to_onnx(path, external_data="net.onnx.data")  # in place, as asked: whole, from the file that it replaces
    assert all(np.array_equal(a, b) for a, b in zip(outputs(path), expected, strict=True))
    assert sorted(contents(tmp_path)) == ["net.onnx", "net.onnx.data"]


def test_a_data_file_that_nobody_named_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = net(tmp_path / "in")
    out = tmp_path / "out.onnx"
    (tmp_path / "out.onnx.data").write_text("mine")
    status, _, err = convert(capsys, path, out)
    assert status == 2 and "out.onnx.data' is there, and is not the data of a model" in err
    with pytest.raises(ArgumentError, match="is there, and is not the data"):
        amp.Program.from_onnx(path).to_onnx(out)
    assert set(contents(tmp_path)) == {"in/net.onnx", "in/net.onnx.data", "out.onnx.data"}
    assert convert(capsys, path, out, "--external-data", "out.onnx.data")[0] == 0  # named
    assert convert(capsys, path, out)[0] == 0  # it is the model's own now
    amp.Program.from_onnx(path).to_onnx(tmp_path / "in" / "inside.onnx", external_data=False)
    status, told, _ = convert(capsys, tmp_path / "in" / "inside.onnx", out)
    assert status == 0 and "from before" not in told and not (tmp_path / "out.onnx.data").exists(), (
        "gone with its model"
    )
    (tmp_path / "out.onnx.data").write_text("mine")
    status, told, _ = convert(capsys, tmp_path / "in" / "inside.onnx", out)
    assert status == 0 and f"'{out}.data' lies there from before; {out} has no use for it" in told
    assert (tmp_path / "out.onnx.data").read_text() == "mine", "nothing else is removed"


@pytest.mark.parametrize("choice", [False, "weights.bin"])
def test_data_goes_with_the_model_that_it_belonged_to(tmp_path: Path, choice: bool | str) -> None:
    path, out = net(tmp_path / "in"), tmp_path / "out.onnx"
    program, expected = amp.Program.from_onnx(path), outputs(path)
    program.to_onnx(out)
    program.to_onnx(out, external_data=choice)
    assert sorted(contents(tmp_path)) == sorted(
        ["in/net.onnx", "in/net.onnx.data", "out.onnx", *([choice] if isinstance(choice, str) else [])]
    )
    program.to_onnx(out)
    assert all(np.array_equal(a, b) for a, b in zip(outputs(out), expected, strict=True))


def test_data_stays_that_is_read_or_whose_model_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = net(tmp_path)
    data = (tmp_path / "net.onnx.data").read_bytes()
    program = amp.Program.from_onnx(path)
    program.to_onnx(path, external_data="weights.bin")
    assert (tmp_path / "net.onnx.data").read_bytes() == data, "the program still reads it"
    amp.Program.from_onnx(path).to_onnx(tmp_path / "out.onnx")
    before = contents(tmp_path)

    def full(path: object, size: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(ModelFileWriteError):
        patch.setattr(os, "replace", full)
        amp.Program.from_onnx(path).to_onnx(tmp_path / "out.onnx", external_data=False)
    assert contents(tmp_path) == before, "a write that fails removes nothing"


def test_training_takes_along_the_external_data_that_it_does_not_touch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = net(tmp_path)
    np.savez(tmp_path / "data.npz", x=X, label=np.zeros((2, 64), np.float32))
    given = ["--data", str(tmp_path / "data.npz"), "--loss", "mse", "--epochs", "1", "--batch-size", "2"]
    assert main(["train", str(path), str(tmp_path / "out.onnx"), *given]) == 0
    size = (tmp_path / "out.onnx").stat().st_size
    assert f"{size:,} bytes" in capsys.readouterr().out
    assert np.array_equal(outputs(tmp_path / "out.onnx")[1], outputs(path)[1])


def test_outputs_that_are_inputs(tmp_path: Path) -> None:
    for name in ("in.onnx", "train.npz", "test.npz"):
        (tmp_path / name).write_text(name)
    data = tmp_path / "data"
    data.mkdir()
    (data / "x.npy").write_text("x")
    os.link(data / "x.npy", tmp_path / "same.npy")
    read = {"IN.onnx": [tmp_path / "in.onnx"], "--data": [data], "--test": [tmp_path / "test.npz"]}
    for target in ("in.onnx", "test.npz", "data/x.npy", "same.npy", "data/../in.onnx"):
        with pytest.raises(ArgumentError, match="are the same file"):
            check_outputs({"OUT.onnx": tmp_path / target}, read)
    check_outputs({"OUT.onnx": tmp_path / "out.onnx", "--log": None}, read)
    assert sorted(os.listdir(tmp_path)) == ["data", "in.onnx", "same.npy", "test.npz", "train.npz"]


# -- locations ---------------------------------------------------------------------------------------------
def test_links_out_of_the_folder_are_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = net(tmp_path / "model")
    secret = tmp_path / "secret"
    (path.parent / "net.onnx.data").rename(secret)
    inside = path.parent / "store"
    inside.mkdir()
    for target, works in ((secret, False), (Path("../secret"), False), (inside / "data", True)):
        (path.parent / "net.onnx.data").unlink(missing_ok=True)
        (path.parent / "net.onnx.data").symlink_to(target)
        if works:
            shutil.copy(secret, inside / "data")
            assert amp.Program.from_onnx(path).has_var("w")
            continue
        with pytest.raises(ModelFileError, match="link out of the model's folder"):
            amp.Program.from_onnx(path)
        status, _, err = convert(capsys, path, tmp_path / "out.onnx")
        assert status == 1 and "'w'" in err and not (tmp_path / "out.onnx").exists()
    (path.parent / "sub").symlink_to(tmp_path)  # a folder on the way is a link
    (tmp_path / "net.onnx.data").write_bytes(secret.read_bytes())
    with pytest.raises(ModelFileError, match="link out of the model's folder"):
        amp.Program.from_onnx(net_at(path, "sub/net.onnx.data"))


def test_the_cache_of_a_model_hub_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """snapshots/<rev>/onnx/model.onnx -> ../../../blobs/<hash>, its data likewise; but not out of the blobs."""
    plain = net(tmp_path / "plain", "model.onnx", "model.onnx_data")
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0123" / "onnx"
    snapshot.mkdir(parents=True)
    for name, blob in (("model.onnx", "5ea1"), ("model.onnx_data", "beef")):
        shutil.copy(plain.parent / name, cache / "blobs" / blob)
        (snapshot / name).symlink_to(f"../../../blobs/{blob}")
    before = contents(cache)
    assert convert(capsys, snapshot / "model.onnx", tmp_path / "out.onnx", "--check")[0] == 0
    assert np.allclose(outputs(tmp_path / "out.onnx")[0], outputs(plain)[0], rtol=1e-2, atol=1e-2)
    status, _, err = convert(capsys, snapshot / "model.onnx", snapshot / "model.onnx_data")
    assert status == 2 and "same file" in err and contents(cache) == before
    (cache / "secret").write_bytes((cache / "blobs" / "beef").read_bytes())
    (snapshot / "model.onnx_data").unlink()
    (snapshot / "model.onnx_data").symlink_to("../../../secret")
    with pytest.raises(ModelFileError, match="link out of the model's folder"):
        amp.Program.from_onnx(snapshot / "model.onnx")


@pytest.mark.parametrize(
    "location, complaint",
    [
        ("a\0b", "does not lie in"),
        ("n" * 5000, "cannot be read"),
        ("C:\\x", "does not lie in"),
        ("a/../net.onnx.data", "does not lie in"),
        ("\\\\host\\x", "does not lie in"),
        ("pipe", "no ordinary file"),
        (".", "does not lie in|no ordinary file"),
    ],
)
def test_locations_that_cannot_be(location: str, complaint: str, tmp_path: Path) -> None:
    path = net(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match=complaint) as caught:
        amp.Program.from_onnx(net_at(path, location))
    assert len(str(caught.value)) < 1000 and "\0" not in str(caught.value)
