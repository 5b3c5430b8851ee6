"""Weights from safetensors, npz and ONNX files, with names mapped by pattern."""

from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from safetensors.numpy import save_file

import amp_transpiler as amp
from amp_transpiler.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ModelFileError,
    PrecisionError,
)
from amp_transpiler.runtime.checkpoint.renaming import renamed
from amp_transpiler.runtime.checkpoint.state_slots import state_slots
from tests.helpers.checkpoints import Small, build, state

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def net() -> Small:
    return build(mode="pure-fp16")


def weights(net: Small, seed: int = 0) -> Arrays:
    """fp32 values for everything that a file of weights holds, by the program's names."""
    rng = np.random.default_rng(seed)
    roles = ("parameter", "statistics")
    return {
        v.name: rng.uniform(0.5, 1, v.shape).astype(np.float32)
        for v, s in state_slots(net.main).items()
        if s.role in roles
    }


def as_torch(arrays: Arrays) -> Arrays:
    """The same as torch names and stores them: matrices of Linear [out, in], a counter in the norm."""
    names = {"fc_0": "net.0", "batch_norm_0": "net.1", "fc_1": "net.4"}
    ends = {"w_0": "weight", "b_0": "bias", "w_1": "running_mean", "w_2": "running_var"}
    found = {}
    for name, array in arrays.items():
        layer, end = name.split(".")
        found[f"{names[layer]}.{ends[end]}"] = array.T.copy() if array.ndim == 2 else array
    return {**found, "net.1.num_batches_tracked": np.array(7)}


def check(net: Small, scope: amp.Scope, expected: Arrays) -> None:
    """Masters have the values, 16-bit parameters have them rounded, and nothing else has changed."""
    before = state(net.main, net.start())
    for variable, slot in state_slots(net.main).items():
        found = scope.find_var(variable.name)
        if slot.of in expected and slot.role in ("parameter", "master", "statistics"):
            assert found.dtype == (np.float32 if slot.role == "master" else found.dtype)
            assert found.tobytes() == expected[slot.of].astype(found.dtype).tobytes(), variable.name
        else:
            assert state(net.main, scope)[variable.name] == before[variable.name]


def test_torch_names(net: Small, tmp_path: Path) -> None:
    values = weights(net)
    """A pattern of all weights transposes those that are matrices, and no scale of a norm."""
    save_file(as_torch(values), tmp_path / "model.safetensors")
    rename = {"net.*.weight": "net.*.w_0", "net.*.bias": "net.*.b_0"}
    with pytest.raises(CheckpointMismatchError):
        amp.load_weights(tmp_path / "model.safetensors", net.main, amp.Scope(), rename=rename)
    rename = {
        "*.num_batches_tracked": None,
        "net.1.running_mean": "batch_norm_0.w_1",
        "net.1.running_var": "batch_norm_0.w_2",
        "net.1.weight": "batch_norm_0.w_0",
        "net.1.bias": "batch_norm_0.b_0",
        r"re:net\.0\.(w|b).*": r"fc_0.\1_0",
        r"re:net\.4\.(?P<kind>.).*": r"fc_1.\g<kind>_0",
    }
    scope = net.start()
    loaded = amp.load_weights(tmp_path / "model.safetensors", net.main, scope, rename=rename, transpose=["*.weight"])
    check(net, scope, values)
    masters = {v.name for v, s in state_slots(net.main).items() if s.role == "master"}
    assert set(loaded.loaded) == set(values) | masters and loaded.missing == loaded.unused == ()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", ["safetensors", "npz", "onnx"])
def test_kinds_of_files(net: Small, kind: str, dtype: Any, tmp_path: Path) -> None:
    values = {name: array.astype(dtype) for name, array in weights(net).items()}
    path = tmp_path / f"weights.{kind}"
    if kind == "safetensors":
        save_file(values, path)
    elif kind == "npz":
        np.savez(path, **values)
    else:
        _save_onnx(values, path)
    scope = net.start()
    if kind == "npz" and dtype is ml_dtypes.bfloat16:
        with pytest.raises(CheckpointError, match="numpy writes bfloat16 so"):
            amp.load_weights(path, net.main, scope)
        return
    amp.load_weights(path, net.main, scope)
    check(net, scope, {name: array.astype(np.float32) for name, array in values.items()})


def _save_onnx(values: Arrays, path: Path, external: bool = False) -> None:
    """A model that uses each tensor as a weight, and a shape."""
    nodes, outputs = [], []
    for number, (name, array) in enumerate(values.items()):
        nodes.append(onnx.helper.make_node("Identity", [name], [f"y{number}"]))
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        outputs.append(onnx.helper.make_tensor_value_info(f"y{number}", kind, array.shape))
    nodes.append(onnx.helper.make_node("Reshape", ["y0", "a.shape"], ["r"]))
    outputs.append(onnx.helper.make_tensor_value_info("r", outputs[0].type.tensor_type.elem_type, [8, 8]))
    tensors = [numpy_helper.from_array(array, name) for name, array in values.items()]
    tensors.append(numpy_helper.from_array(np.array([8, 8]), "a.shape"))
    graph = onnx.helper.make_graph(nodes, "weights", [], outputs, tensors)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    onnx.save_model(model, path, save_as_external_data=external, location="data.bin", size_threshold=0)


def test_onnx_with_external_data(net: Small, tmp_path: Path) -> None:
    values = weights(net)
    _save_onnx(values, tmp_path / "m.onnx", external=True)
    assert (tmp_path / "data.bin").exists()
    scope = net.start()
    amp.load_weights(tmp_path / "m.onnx", net.main, scope)
    check(net, scope, values)


def test_an_exported_program_comes_back(tmp_path: Path) -> None:
    """What to_onnx writes loads into the program; the test program gives the outputs of the model."""
    net = build(mode="fp32")
    scope = net.start()
    net.train(scope, 0, 3)
    net.test.to_onnx(tmp_path / "m.onnx", scope=scope)
    fresh = net.start()
    amp.load_weights(tmp_path / "m.onnx", net.main, fresh)
    feed = {"x": net.feed(0)["x"]}
    outputs = [net.exe.run(net.test, feed, [net.output.name], scope=s)[0].tobytes() for s in (scope, fresh)]
    assert outputs[0] == outputs[1]


def test_into_a_program_that_infers(net: Small, tmp_path: Path) -> None:
    values = weights(net)
    save_file(values, tmp_path / "w.safetensors")
    scope = amp.Scope()
    loaded = amp.load_weights(tmp_path / "w.safetensors", net.test, scope)
    assert set(loaded.loaded) == set(values) == set(scope.var_names())


# -- what does not fit ------------------------------------------------------------------------------------
@pytest.mark.parametrize("strict", [True, False])
def test_every_mismatch_is_listed(strict: bool, net: Small, tmp_path: Path) -> None:
    values = weights(net)
    del values["fc_1.b_0"], values["batch_norm_0.w_1"]
    values |= {
        "fc_1.bias": np.zeros(4, np.float32),
        "other": np.zeros(2),
        "fc_0.w_0": np.zeros((8, 9), np.float32),
        "fc_1.w_0": np.zeros((4, 8), np.float32),
        "fc_0.b_0": np.zeros(8, np.int64),
    }
    save_file(values, tmp_path / "w.safetensors")
    scope = net.start()
    before = state(net.main, scope)
    with pytest.raises(CheckpointMismatchError) as caught:
        amp.load_weights(tmp_path / "w.safetensors", net.main, scope, strict=strict)
    error, text = caught.value, str(caught.value)
    assert error.missing == ("batch_norm_0.w_1", "fc_1.b_0") and error.extra == ("fc_1.bias", "other")
    assert {"fc_0.w_0", "fc_1.w_0", "fc_0.b_0"} <= set(error.wrong)
    assert "missing: fc_1.b_0 (the file has 'fc_1.bias')" in text
    assert "wrong:   fc_0.w_0 has shape [8, 9] and not [8, 8]" in text
    assert "fc_1.w_0 has shape [4, 8] and not [8, 4]; if the file has it transposed, say so" in text
    assert "fc_0.b_0 is int64 and not float16" in text
    assert "nothing was loaded" in text and state(net.main, scope) == before


def test_not_strict(net: Small, tmp_path: Path) -> None:
    values = weights(net)
    part = {name: array for name, array in values.items() if name.startswith("fc_0")}
    save_file({**part, "other": np.zeros(2)}, tmp_path / "w.safetensors")
    scope = net.start()
    loaded = amp.load_weights(tmp_path / "w.safetensors", net.main, scope, strict=False)
    check(net, scope, part)
    assert set(loaded.missing) == set(values) - set(part) and loaded.unused == ("other",)


def test_a_square_matrix_is_never_guessed(net: Small, tmp_path: Path) -> None:
    values = weights(net)
    assert values["fc_0.w_0"].shape == (8, 8)
    save_file({**values, "fc_0.w_0": values["fc_0.w_0"].T.copy()}, tmp_path / "w.safetensors")
    scope = net.start()
    amp.load_weights(tmp_path / "w.safetensors", net.main, scope, transpose=["fc_0.w_0"])
    check(net, scope, values)
    amp.load_weights(tmp_path / "w.safetensors", net.main, scope)
    check(net, scope, {**values, "fc_0.w_0": values["fc_0.w_0"].T})


def test_beyond_fp16(net: Small, tmp_path: Path) -> None:
    values = weights(net)
    values["fc_0.w_0"][1, 2] = -1e5
    save_file(values, tmp_path / "w.safetensors")
    scope = net.start()
    before = state(net.main, scope)
    with pytest.raises(PrecisionError, match="'fc_0.w_0' does not fit float16: its largest value is 100000"):
        amp.load_weights(tmp_path / "w.safetensors", net.main, scope)
    assert state(net.main, scope) == before


def test_bad_files(net: Small, tmp_path: Path) -> None:
    scope = amp.Scope()
    with pytest.raises(CheckpointNotFoundError, match="there is no file"):
        amp.load_weights(tmp_path / "none.npz", net.main, scope)
    with pytest.raises(ArgumentError, match=r"reads \.safetensors, \.npz, \.onnx.*save_file\(model.state_dict"):
        amp.load_weights(tmp_path / "model.pt", net.main, scope)
    values = weights(net)
    save_file(values, tmp_path / "w.safetensors")
    np.savez(tmp_path / "w.npz", **values)
    _save_onnx(values, tmp_path / "w.onnx")
    for kind, error in (("safetensors", CheckpointError), ("npz", CheckpointError), ("onnx", ModelFileError)):
        good = (tmp_path / f"w.{kind}").read_bytes()
        for cut in (0, 5, len(good) // 2, len(good) - 30):
            (tmp_path / f"cut.{kind}").write_bytes(good[:cut])
            with pytest.raises(error, match="cut"):
                amp.load_weights(tmp_path / f"cut.{kind}", net.main, scope)
    np.savez(tmp_path / "pickled.npz", **values, x=np.array([{}], object))
    with pytest.raises(CheckpointError, match="pickle"):
        amp.load_weights(tmp_path / "pickled.npz", net.main, scope)
    np.savez(tmp_path / "wide.npz", **values, x=np.ones(2, np.longdouble))
    with pytest.raises(CheckpointError, match=r"array 'x' of '.*wide.npz' has element type float128"):
        amp.load_weights(tmp_path / "wide.npz", net.main, scope, strict=False)
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(CheckpointError, match="folder.npz"):
        amp.load_weights(tmp_path / "folder.npz", net.main, scope)
    shutil.copy(tmp_path / "w.npz", tmp_path / "w2.safetensors")
    with pytest.raises(CheckpointError, match="w2.safetensors"):
        amp.load_weights(tmp_path / "w2.safetensors", net.main, scope)
    assert scope.var_names() == []


def test_an_archive_that_unpacks_to_gigabytes_is_refused_before(net: Small, tmp_path: Path) -> None:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (1 << 27,)})
    with (
        zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("fc_0.w_0.npy", "w", force_zip64=True) as stream,
    ):
        stream.write(head.getvalue())
        for _ in range(1 << 9):
            stream.write(bytes(1 << 20))
    with pytest.raises(CheckpointError, match=r"bomb.npz' cannot be read .* unpacks from [\d,]* to 536,870,912 bytes"):
        amp.load_weights(tmp_path / "bomb.npz", net.main, net.start(), strict=False)


# -- names ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({}, ["a.0.w", "a.1.w", "b"]),
        ({"b": "c"}, ["a.0.w", "a.1.w", "c"]),
        ({"a.*.w": "layer_*.weight"}, ["layer_0.weight", "layer_1.weight", "b"]),
        ({"?.*.w": "*/*"}, ["a/0", "a/1", "b"]),
        ({"a.[0]*": "x*y*", "a.*": "z*"}, ["x0y.w", "z1.w", "b"]),
        ({"a.[!0].w": None}, ["a.0.w", None, "b"]),
        ({"[^b]*": "x*"}, ["a.0.w", "a.1.w", "xb"]),  # no negation, as in every glob
        ({r"re:a\.(\d)\.(?P<end>w)": r"\g<end>\1"}, ["w0", "w1", "b"]),
        ({"*": "p.*"}, ["p.a.0.w", "p.a.1.w", "p.b"]),
    ],
)
def test_renaming(rename: dict[str, str | None], expected: list[str | None]) -> None:
    assert list(renamed(["a.0.w", "a.1.w", "b"], rename, "test").values()) == expected


@pytest.mark.parametrize(
    ("rename", "error", "message"),
    [
        ({"c.*": "d"}, ArgumentError, r"test: rename pattern 'c\.\*' fits no stored name; there are.*'a\.0\.w'"),
        ({"[z-a]*": "x*"}, ArgumentError, r"pattern '\[z-a\]\*' fits no stored name"),
        ({"[\\]x": "x*"}, ArgumentError, "fits no stored name"),
        ({"[!]": None}, ArgumentError, r"pattern '\[!\]' fits no stored name"),
        ({"a.*": "same"}, ArgumentError, "gives 'a.0.w' and 'a.1.w' one name, 'same'"),
        ({"b": "a.0.w"}, ArgumentError, "one name"),
        ({"a.*": "*-*"}, ArgumentError, "more wildcards"),
        ({"re:a(": "b"}, ArgumentError, "no regular expression"),
        ({"re:a.*": r"\2"}, ArgumentError, "replacement of 're:a.*' is wrong"),
        (["a"], ArgumentTypeError, "maps patterns to replacements"),
        ({"a": 1}, ArgumentTypeError, "maps patterns to replacements"),
    ],
)
def test_bad_renaming(rename: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        renamed(["a.0.w", "a.1.w", "b"], rename, "test")


@pytest.mark.parametrize(
    "transpose, error, message",
    [
        (["nothing.*"], ArgumentError, "transpose: pattern 'nothing.*' matches no matrix of the file"),
        (["*.b_0"], ArgumentError, "transpose: pattern '.*b_0' matches no matrix of the file"),
        (["fc_0.b_0"], ArgumentError, r"'fc_0.b_0', of shape \[8\], which is no matrix"),
        ("fc_0.w_0", ArgumentTypeError, "takes strings"),
    ],
)
def test_bad_transposes(transpose: Any, error: type[Exception], message: str, net: Small, tmp_path: Path) -> None:
    save_file(weights(net), tmp_path / "w.safetensors")
    with pytest.raises(error, match=message):
        amp.load_weights(tmp_path / "w.safetensors", net.main, amp.Scope(), transpose=transpose)
