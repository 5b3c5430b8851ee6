"""Calibration data: every form gives the same samples, and what does not fit is named before anything runs."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from amp_transpiler.conversion.calibration.samples import load_calibration
from amp_transpiler.errors import AmpError, ArgumentError, ArgumentTypeError, FeedError, FeedTypeError
from amp_transpiler.program import Program

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
TWO = "m (float[N,3] image, int64[N] label) => (float[N,3] y, int64[N] z) { y = Relu(image)  z = Neg(label) }"


def program(text: str = TWO) -> Program:
    return Program.from_onnx(onnx.parser.parse_model(HEAD + text))


def feeds(number: int = 0, rows: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    return {"image": rng.standard_normal((rows, 3)).astype(np.float32), "label": rng.integers(0, 9, rows)}


def same(found: list[dict[str, Any]], wanted: list[dict[str, np.ndarray]]) -> bool:
    return len(found) == len(wanted) and all(
        one.keys() == other.keys()
        and all(one[k].dtype == other[k].dtype and np.array_equal(one[k], other[k]) for k in other)
        for one, other in zip(found, wanted, strict=True)
    )


def save_pb(folder: Path, batch: dict[str, np.ndarray], named: bool = True) -> Path:
    folder.mkdir()
    for i, (name, array) in enumerate(batch.items()):
        tensor = onnx.numpy_helper.from_array(array, name if named else "")
        (folder / f"input_{i}.pb").write_bytes(tensor.SerializeToString())
        (folder / f"output_{i}.pb").write_bytes(tensor.SerializeToString())
    return folder


# -- forms that hold the same samples ------------------------------------------------------------------------
def npz_files(folder: Path, batches: list[dict[str, np.ndarray]]) -> Any:
    for i, batch in enumerate(batches):
        np.savez(folder / f"batch{i}.npz", **batch)
    return [str(folder / f"batch{i}.npz") for i in range(len(batches))]


def npz_folder(folder: Path, batches: list[dict[str, np.ndarray]]) -> Any:
    for i, batch in enumerate(batches):
        np.savez_compressed(folder / f"batch{i}.npz", **batch)
    return folder


def npy_folder(folder: Path, batches: list[dict[str, np.ndarray]]) -> Any:
    for i, batch in enumerate(batches):
        for name, array in batch.items():
            np.save(folder / f"{name}_{i:02}.npy", array)
    return str(folder)


def test_data(folder: Path, batches: list[dict[str, np.ndarray]]) -> Any:
    for i, batch in enumerate(batches):
        save_pb(folder / f"test_data_set_{i}", batch, named=i % 2 == 0)
    return folder


test_data.__test__ = False  # type: ignore[attr-defined]
FORMS: dict[str, Callable[[Path, list[dict[str, np.ndarray]]], Any]] = {
    "dicts": lambda folder, batches: batches,
    "a tuple of dicts": lambda folder, batches: tuple(batches),
    "npz files": npz_files,
    "a folder of npz": npz_folder,
    "a folder of npy": npy_folder,
    "a file and dicts": lambda folder, batches: [*npz_files(folder, batches[:1]), *batches[1:]],
    "onnx test data": test_data,
}


@pytest.mark.parametrize("count", [1, 3, 12])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, count: int, tmp_path: Path) -> None:
    batches = [feeds(i, rows=i + 1) for i in range(count)]
    assert same(load_calibration(FORMS[form](tmp_path, batches), program()), batches)


def test_one_sample_alone(tmp_path: Path) -> None:
    batch = feeds()
    assert same(load_calibration(batch, program()), [batch])
    np.savez(tmp_path / "a.npz", **batch)
    assert same(load_calibration(tmp_path / "a.npz", program()), [batch])
    arrays = tmp_path / "arrays"
    arrays.mkdir()
    for name, array in batch.items():
        np.save(arrays / f"{name}.npy", array)
    assert same(load_calibration(arrays, program()), [batch])
    assert same(load_calibration(save_pb(tmp_path / "pb", batch), program()), [batch])


def test_onnx_test_data_may_name_its_tensors(tmp_path: Path) -> None:
    batch = feeds()
    turned = {name: batch[name] for name in reversed(batch)}
    assert same(load_calibration(save_pb(tmp_path / "named", turned), program()), [batch])
    with pytest.raises(FeedTypeError, match="'label' is float32"):
        load_calibration(save_pb(tmp_path / "counted", turned, named=False), program())


def test_an_inputs_own_name_may_end_in_a_number(tmp_path: Path) -> None:
    p = program("m (float[2] input_0, float[2] input_1) => (float[2] y) { y = Add(input_0, input_1) }")
    batch = {"input_0": np.ones(2, np.float32), "input_1": np.zeros(2, np.float32)}
    for name, array in batch.items():
        np.save(tmp_path / f"{name}.npy", array)
    assert same(load_calibration(tmp_path, p), [batch])
    for name, array in batch.items():
        (tmp_path / f"{name}.npy").unlink()
        np.save(tmp_path / f"{name}_3.npy", array)
        np.save(tmp_path / f"{name}_11.npy", 2 * array)
    assert same(load_calibration(tmp_path, p), [batch, {k: 2 * v for k, v in batch.items()}])


def test_inputs_that_are_initializers_are_not_asked_for() -> None:
    p = program("m (float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 2}> { y = Add(x, w) }")
    x = np.ones(2, np.float32)
    assert list(load_calibration({"x": x}, p)[0]) == ["x"]
    with pytest.raises(FeedError, match="'w' is no input of program 'm'"):
        load_calibration({"x": x, "w": x}, p)


# -- element types -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.float32, ">f4"])
def test_floats_take_the_declared_type(dtype: Any) -> None:
    batch = feeds()
    batch["image"] = np.array([[1, -2.5, 0.125], [np.inf, 4, 0]], dtype)
    found = load_calibration(batch, program())[0]["image"]
    assert found.dtype == np.float32 and np.array_equal(found, batch["image"].astype(np.float32))


def test_one_data_set_serves_calibration_and_training(tmp_path: Path) -> None:
    """Its labels are no input, its images bytes, and its classes stand in a column."""
    image, label = np.arange(6, dtype=np.uint8).reshape(2, 3), np.array([[3.0], [4.0]])
    others = {"target": np.array(["no", "input"]), "notes": np.array([{"of": "Python"}], object)}
    np.savez(tmp_path / "a.npz", image=image, label=label, **others)
    folder = tmp_path / "folder"
    folder.mkdir()
    npy_folder(folder, [{"image": image, "label": label, **others}])
    for source in (tmp_path / "a.npz", folder):
        found = load_calibration(source, program())
        assert same(found, [{"image": image.astype(np.float32), "label": np.array([3, 4])}])


def test_python_numbers_take_the_declared_type() -> None:
    found = load_calibration({"image": [[1, 2, 3.5]], "label": [7]}, program())[0]
    assert found["image"].dtype == np.float32 and found["label"].dtype == np.int64


WRONG: dict[str, tuple[Any, type[AmpError], str]] = {
    "no name": ({"image": feeds()["image"]}, FeedError, "sample 1: .*needs the input 'label'; given were 'image'"),
    "near name": ({**feeds(), "lable": np.ones(2)}, FeedError, "has no input 'lable'; did you mean 'label'"),
    "wrong names": (
        {"a": np.ones(2), "b": np.ones(2)},
        FeedError,
        "'a', 'b' are no input and 'image', 'label' are missing; the inputs .* are 'image', 'label'",
    ),
    "misnamed": ({"img": feeds()["image"], "label": feeds()["label"]}, FeedError, "'img' is no input and 'image' is m"),
    "an output": ({**feeds(), "y": np.ones(2)}, FeedError, "'y' is no input of program 'm' but computed"),
    "integers for floats": (
        {**feeds(), "image": np.full((2, 3), 2**24 + 1)},
        FeedTypeError,
        "is int64, declared as float32, which cannot hold its value 16777217",
    ),
    "floats for integers": ({**feeds(), "label": np.full(2, 1.5)}, FeedTypeError, "float64, declared as int64, .* 1.5"),
    "wide integers": ({**feeds(), "label": np.full(2, 2**63, np.uint64)}, FeedTypeError, "its value 92233720368547758"),
    "strings": ({**feeds(), "label": np.array(["a", "b"])}, FeedTypeError, "is string"),
    "objects": ({**feeds(), "image": np.array([object()])}, FeedTypeError, "image"),
    "rank": ({**feeds(), "image": np.ones(3, np.float32)}, FeedError, r"shape \[3\]; it is declared with 2 dimensions"),
    "size": ({**feeds(), "image": np.ones((2, 4), np.float32)}, FeedError, "dimension 1 is declared as 3"),
    "sizes that belong together": ({**feeds(), "label": np.ones(5, np.int64)}, FeedError, "both sizes .* as 'N'"),
    "second sample": ([feeds(), {}], FeedError, "sample 2: "),
    "nothing in it": (feeds(rows=0), FeedError, r"every input is empty \('image' \[0, 3\], 'label' \[0\]\)"),
    "beyond float32": ({**feeds(), "image": np.full((2, 3), 1e300)}, FeedError, r"holds 1e\+300, beyond .* float32"),
    "no sample": ([], ArgumentError, "calibration is empty; give feeds"),
    "a number": (3, ArgumentTypeError, "calibration takes feeds .*; got int"),
    "an array": (np.ones((2, 3), np.float32), ArgumentTypeError, "got ndarray"),
    "bytes": (b"a.npz", ArgumentTypeError, "got bytes"),
    "a list of arrays": ([np.ones(3)], ArgumentTypeError, "got ndarray"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_samples(case: str) -> None:
    source, kind, message = WRONG[case]
    with pytest.raises(kind, match=message) as caught:
        load_calibration(source, program())
    assert "\n" not in str(caught.value) and str(caught.value).startswith("calibration")


def test_only_where_everything_is_empty_is_nothing_measured() -> None:
    p = program("m (float[1,K] past, float[1,2] x) => (float[1,M] y) { y = Concat<axis=1>(past, x) }")
    batch = {"past": np.zeros((1, 0), np.float32), "x": np.ones((1, 2), np.float32)}
    assert same(load_calibration(batch, p), [batch])
    assert load_calibration({}, program("m () => (float[1] y) { y = Constant<value_floats=[1.0]>() }")) == [{}]


# -- files that are not what they should be --------------------------------------------------------------------
def damaged(folder: Path, change: Callable[[bytes], bytes]) -> Path:
    path = folder / "a.npz"
    rng = np.random.default_rng(0)
    np.savez_compressed(path, image=rng.standard_normal((500, 3)).astype(np.float32), label=np.arange(500))
    path.write_bytes(change(path.read_bytes()))
    return path


def broken(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def pickled(folder: Path) -> Path:
    np.savez(folder / "a.npz", image=np.array([{"a": 1}], object), label=np.ones(2))
    return folder / "a.npz"


def not_an_archive(folder: Path) -> Path:
    np.save(folder / "a.npy", np.ones(3))
    (folder / "a.npy").rename(folder / "a.npz")
    return folder / "a.npz"


def an_archive(folder: Path) -> Path:
    np.savez(folder / "image.npz", a=np.ones(3))
    (folder / "image.npz").rename(folder / "image.npy")
    return folder


def claims_terabytes(folder: Path) -> Path:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,), }"
    header += b" " * (118 - len(header) - 1) + b"\n"
    broken(folder, "image.npy", b"\x93NUMPY\x01\x00v\x00" + header)
    return folder


def odd_compression(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        archive.writestr("image.npy", b"x" * 100)
    data = bytearray((folder / "a.npz").read_bytes())
    at = data.rindex(b"PK\x01\x02")
    data[8:10] = data[at + 10 : at + 12] = b"\x63\x00"
    return broken(folder, "a.npz", bytes(data))


def mixed(folder: Path) -> Path:
    np.savez(folder / "a.npz", **feeds())
    np.save(folder / "image.npy", np.ones(3))
    return folder


def some_numbered(folder: Path) -> Path:
    np.save(folder / "image.npy", np.ones(3))
    np.save(folder / "label_0.npy", np.ones(3))
    return folder


def same_number(folder: Path) -> Path:
    np.save(folder / "image_0.npy", np.ones(3))
    np.save(folder / "image_00.npy", np.ones(3))
    return folder


def an_input_too_many(folder: Path) -> Path:
    return save_pb(folder / "pb", {**feeds(), "third": np.ones(3)})


def external_pb(folder: Path) -> Path:
    tensor = onnx.numpy_helper.from_array(np.ones((2, 3), np.float32), "image")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    return broken(folder, "input_0.pb", tensor.SerializeToString()).parent


def cut_pb(folder: Path) -> Path:
    path = save_pb(folder / "pb", feeds()) / "input_0.pb"
    path.write_bytes(path.read_bytes()[:-5])
    return path.parent


FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda f: f / "none.npz", "there is no file or folder '.*none.npz'"),
    "empty folder": (lambda f: f, "folder '.*' holds no .npz, .npy or .pb files"),
    "another kind": (lambda f: broken(f, "a.txt", b"1 2 3"), "'.*a.txt' is neither an .npz file nor a folder"),
    "one npy alone": (lambda f: broken(f, "image.npy", b""), "image.npy' is neither.*; give the folder '"),
    "text": (lambda f: broken(f, "a.npz", b"not an archive"), "'.*a.npz' cannot be read as an .npz file"),
    "no bytes": (lambda f: broken(f, "a.npz", b""), "'.*a.npz' cannot be read as an .npz file"),
    "truncated": (lambda f: damaged(f, lambda b: b[: len(b) // 2]), "'.*a.npz' cannot be read as an .npz file"),
    "damaged": (lambda f: damaged(f, lambda b: b[:200] + bytes(300) + b[500:]), "a.npz' cannot be read as an .npz"),
    "damaged header": (lambda f: damaged(f, lambda b: b[:60] + bytes(40) + b[100:]), "a.npz' cannot be read as an "),
    "pickled": (
        pickled,
        "a.npz' cannot be read as an .npz file: array 'image' holds Python objects; save strings as array.astype",
    ),
    "a bare pickle": (
        lambda f: broken(f, "image.npy", pickle.dumps({})).parent,
        "image.npy' cannot .* no array file at all",
    ),
    "an array called npz": (not_an_archive, "it is a single array"),
    "an archive called npy": (an_archive, "it is an archive of arrays; call it .npz"),
    "truncated npy": (lambda f: broken(f, "image.npy", b"\x93NUMPY\x01\x00").parent, "image.npy' cannot be read"),
    "a claim of terabytes": (claims_terabytes, "image.npy' cannot be read as an .npy file"),
    "an unknown compression": (odd_compression, "a.npz' cannot be read as an .npz file"),
    "a folder called npz": (lambda f: (f / "a.npz").mkdir() or f, "folder '.*a.npz' holds no .npy"),
    "two kinds": (mixed, "holds .npz and .npy files; keep one kind"),
    "some numbered": (some_numbered, "some arrays are numbered and 'image' not"),
    "one number twice": (same_number, "holds two arrays numbered 0 for 'image'"),
    "more test data than inputs": (an_input_too_many, "is for input 2, counted from 0, and the model has 2: 'image', "),
    "test data elsewhere": (external_pb, "input_0.pb' cannot be read as a tensor of ONNX test data.*external file"),
    "truncated test data": (cut_pb, "input_0.pb' cannot be read as a tensor of ONNX test data"),
    "text as test data": (lambda f: broken(f, "input_0.pb", b"").parent, "test data: it holds no tensor"),
    "outputs alone": (lambda f: broken(f, "output_0.pb", b"").parent, "but no input_0.pb"),
}


@pytest.mark.parametrize("case", FILES)
def test_files(case: str, tmp_path: Path) -> None:
    make, message = FILES[case]
    path = make(tmp_path)
    with pytest.raises(ArgumentError, match=message) as caught:
        load_calibration(path, program())
    assert "\n" not in str(caught.value) and str(caught.value).startswith("calibration: ")


def test_a_sample_of_a_file_is_named_by_the_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", image=np.ones((2, 3), np.float32))
    with pytest.raises(FeedError, match=r"calibration, '.*a\.npz': .*needs the input 'label'"):
        load_calibration(tmp_path, program())
    arrays = tmp_path / "arrays"
    arrays.mkdir()
    npy_folder(arrays, [feeds()])
    np.save(arrays / "image_7.npy", np.ones((2, 3), np.float32))
    with pytest.raises(FeedError, match="sample 7 of folder '.*arrays': .*needs the input 'label'"):
        load_calibration(arrays, program())


def test_a_file_fills_the_batches_of_a_fixed_batch(tmp_path: Path) -> None:
    """As training data does; the last batch is filled up from the first samples."""
    fixed = program(TWO.replace("[N", "[2"))
    whole = feeds(rows=5)
    np.savez(tmp_path / "a.npz", **whole)
    found = load_calibration(tmp_path / "a.npz", fixed)
    assert same(found, [{name: array[rows] for name, array in whole.items()} for rows in ([0, 1], [2, 3], [4, 0])])
    numbers = {"image": np.array(1.0), "label": np.array(1)}
    for odd in ({"image": whole["image"], "label": whole["label"][:4]}, feeds(rows=1), numbers):
        np.savez(tmp_path / "b.npz", **odd)
        with pytest.raises(FeedError, match="dimension 0 is declared as 2|declared with 2 dimensions"):
            load_calibration(tmp_path / "b.npz", fixed)


def test_inputs_that_are_not_all_batches_are_no_data_set(tmp_path: Path) -> None:
    states = program("m (float[1,3] image, float[2,3] state) => (float[2,3] y) { y = Add(image, state) }")
    np.savez(tmp_path / "a.npz", image=np.zeros((6, 3), np.float32), state=np.zeros((6, 3), np.float32))
    with pytest.raises(FeedError, match="dimension 0 is declared as"):
        load_calibration(tmp_path / "a.npz", states)
