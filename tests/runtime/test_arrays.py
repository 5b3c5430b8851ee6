"""Files of arrays: what they hold, by name, mapped where it is large; and every way in which they can be broken."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp_transpiler.errors import ArgumentError, FeedError, FeedTypeError
from amp_transpiler.runtime import arrays
from amp_transpiler.runtime.arrays import array_names, as_declared, as_ranked, check_declared, read_arrays

RNG = np.random.default_rng(0)
HELD = {
    "x": RNG.standard_normal((5, 3)),
    "y": RNG.integers(0, 9, 5),
    "z": np.asfortranarray(RNG.random((4, 6))),
    "one": np.array(3.5),
    "none": np.zeros((0, 4), np.float32),
    "words": np.array(["a", "bc"]),
}


def written(folder: Path, form: str) -> Path:
    if form == "npy":
        for name, array in HELD.items():
            np.save(folder / f"{name}.npy", array)
        return folder
    (np.savez if form == "npz" else np.savez_compressed)(folder / "a.npz", **HELD)
    return folder / "a.npz"


@pytest.mark.parametrize("form", ["npy", "npz", "compressed"])
def test_arrays_come_back_by_name(form: str, tmp_path: Path) -> None:
    path = written(tmp_path, form)
    found = read_arrays(path)
    assert set(array_names(path)) == set(found) == set(HELD)
    for name, array in HELD.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array), name
    assert set(read_arrays(path, ["y", "unknown"])) == {"y"}


def test_large_arrays_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_MAPPED", 64)
    found = read_arrays(written(tmp_path, "npz"))
    assert {name for name, array in found.items() if isinstance(array, np.memmap)} == {"x", "z"}
    np.testing.assert_array_equal(found["x"], HELD["x"])
    np.testing.assert_array_equal(found["z"], HELD["z"])
    (tmp_path / "folder").mkdir()
    assert isinstance(read_arrays(written(tmp_path / "folder", "npy"))["x"], np.memmap)


def test_an_array_that_is_not_wanted_may_be_broken(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones(2), objects=np.array([{}], object))
    assert list(read_arrays(tmp_path / "a.npz", ["x"])) == ["x"]
    with pytest.raises(ArgumentError, match="Python objects"):
        read_arrays(tmp_path / "a.npz")


# -- broken files ----------------------------------------------------------------------------------------------
def header(shape: str, descr: str = "'<f4'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00v\x00" + text


def zipped(folder: Path, content: bytes, name: str = "x.npy", kind: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(folder / "a.npz", "w", kind) as archive:
        archive.writestr(name, content)
    return folder / "a.npz"


def bomb(folder: Path) -> Path:
    """An array of 6 MB of zeros in 6 kB."""
    return zipped(folder, header("(1500000,)") + bytes(6_000_000))


def flipped(folder: Path, kind: int) -> Path:
    stream = io.BytesIO()
    np.save(stream, RNG.integers(0, 255, 4096).astype(np.uint8))
    path = zipped(folder, stream.getvalue(), kind=kind)
    data = bytearray(path.read_bytes())
    data[1000] ^= 64
    path.write_bytes(bytes(data))
    return path


def cut(folder: Path, form: str, keep: float) -> Path:
    path = written(folder, form)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    return path


def twice(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "a.npz", "w") as archive, pytest.warns(UserWarning):
        for _ in range(2):
            archive.writestr("x.npy", header("(0,)"))
    return folder / "a.npz"


def npy(folder: Path, content: bytes) -> Path:
    (folder / "x.npy").write_bytes(content)
    return folder


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "a.npz")
    return folder / "a.npz"


BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda f: f / "a.npz", "there is no file"),
    "a pipe": (pipe, "no regular file"),
    "cut in the middle": (lambda f: cut(f, "npz", 0.5), "BadZipFile|not a zip"),
    "cut at the end": (lambda f: cut(f, "compressed", 0.99), "not a zip"),
    "a flipped bit": (lambda f: flipped(f, zipfile.ZIP_STORED), "CRC|decompress"),
    "a flipped bit, packed": (lambda f: flipped(f, zipfile.ZIP_DEFLATED), "CRC|decompress"),
    "a bomb": (bomb, "'x' unpacks from [0-9,]+ to 6,000,000 bytes, more than 200 times"),
    "two of one name": (twice, "two arrays called 'x'"),
    "no array": (lambda f: zipped(f, b"text"), "is no array file at all"),
    "an array cut short": (
        lambda f: zipped(f, header("(7,)") + bytes(27)),
        "'x' is cut short: .* takes 28 bytes, and 27",
    ),
    "terabytes": (lambda f: zipped(f, header("(10000000000000,)")), "takes 40,000,000,000,000 bytes"),
    "a negative size": (lambda f: zipped(f, header("(-4,)")), r"shape \[-4\]"),
    "fields": (lambda f: zipped(f, header("(1,)", "[('a', '<f4')]") + bytes(4)), "element type"),
    "objects": (lambda f: zipped(f, header("(1,)", "'|O'") + bytes(8)), "Python objects"),
    "a header that is code": (lambda f: zipped(f, header("__import__('os')")), "header"),
    "npy: cut short": (lambda f: npy(f, header("(7,)") + bytes(27)), "takes 28 bytes, and 27"),
    "npy: terabytes": (lambda f: npy(f, header("(10000000000000,)")), "takes 40,000,000,000,000 bytes"),
    "npy: empty": (lambda f: npy(f, b""), "is no array file at all"),
    "npy: objects": (lambda f: npy(f, header("(1,)", "'|O'") + bytes(8)), "Python objects"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_by_name(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_SUSPECT", 1 << 20)
    make, message = BROKEN[case]
    path = make(tmp_path)
    with pytest.raises(ArgumentError, match=message) as caught:
        read_arrays(path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_does_not_fit_into_memory_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(arrays, "_memory", lambda: 300)
    with pytest.raises(ArgumentError, match="takes [0-9]+ bytes once it is unpacked, .*numpy.savez"):
        read_arrays(written(tmp_path, "compressed"))


@pytest.mark.parametrize("form", ["npz", "compressed", "npy"])
def test_any_cut_is_an_error_of_the_family(form: str, tmp_path: Path) -> None:
    content = written(tmp_path, form) if form != "npy" else tmp_path / "one.npy"
    if form == "npy":
        np.save(content, HELD["x"])
    data = content.read_bytes()
    for length in range(0, len(data) - 1, 13):
        content.write_bytes(data[:length])
        with pytest.raises(ArgumentError):
            read_arrays(tmp_path if form == "npy" else content)


# -- values ----------------------------------------------------------------------------------------------------
KEPT = [
    (np.array([0, 7, 255], np.uint8), "float32"),
    (np.array([1.5, -2.25, np.inf]), "float32"),
    (np.array([0.0, 3.0, -8.0]), "int64"),
    (np.array([1, 2], np.int32), "int64"),
    (np.array([1, 2]), "int32"),
    (np.array([0, 1]), "bool"),
    (np.array([True, False]), "float32"),
    (np.array([2048]), "float16"),
    (np.array([-(2**63)]), "float32"),
    (np.array([2**31 - 1]), "int32"),
    (np.array([5.0], np.float16), "uint8"),
    (np.zeros(0), "int64"),
    (np.array([2**24]), "float32"),
]


@pytest.mark.parametrize("array, dtype", KEPT, ids=lambda value: str(getattr(value, "dtype", value)))
def test_what_a_type_holds_is_converted(array: np.ndarray, dtype: str) -> None:
    typed = as_declared(array, dtype, "x")
    check_declared(array, dtype, "x")
    assert typed.dtype == dtype and typed.astype(object).tolist() == array.astype(object).tolist()


def test_floats_round_to_the_declared_float() -> None:
    assert as_declared(np.array([0.1]), "float32", "x")[0] == np.float32(0.1)


LOST: list[tuple[np.ndarray, str, type[Exception], str]] = [
    (np.array([1.0, 1.5]), "int64", FeedTypeError, "its value 1.5"),
    (np.array([300]), "uint8", FeedTypeError, "300"),
    (np.array([-1]), "uint8", FeedTypeError, "-1"),
    (np.array([np.nan]), "int32", FeedTypeError, "nan"),
    (np.array([2.0**63]), "int64", FeedTypeError, "9.2"),
    (np.array([2**63 - 1]), "float32", FeedTypeError, "92233"),
    (np.array([2**63 - 1]), "float64", FeedTypeError, "92233"),
    (np.array([2**64 - 1], np.uint64), "int64", FeedTypeError, "184"),
    (np.array([2**24 + 1]), "float32", FeedTypeError, "16777217"),
    (np.array([2]), "bool", FeedTypeError, "its value 2"),
    (np.array([1e300]), "float32", FeedError, "holds 1e\\+300, beyond the range of float32"),
    (np.array([70000]), "float16", FeedTypeError, "70000"),
    (np.array(["a"]), "float32", FeedTypeError, "is string"),
    (np.array([1j]), "float32", FeedTypeError, "complex"),
    (np.array(["2020"], "M8"), "float32", FeedTypeError, "datetime64"),
]


@pytest.mark.parametrize("array, dtype, kind, message", LOST, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("convert", [as_declared, check_declared])
def test_a_value_that_would_change_is_named(
    convert: Any, array: np.ndarray, dtype: str, kind: Any, message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        convert(array, dtype, "array 'x'")
    assert str(caught.value).startswith("array 'x'")


def test_all_of_a_large_array_is_checked() -> None:
    array = np.zeros((3_000_000, 1))
    check_declared(array, "int8", "x")
    array[-1] = 0.5
    with pytest.raises(FeedTypeError, match=r"0\.5"):
        check_declared(array, "int8", "x")


def test_labels_of_either_rank() -> None:
    flat = np.arange(4)
    assert as_ranked(flat, (None, 1)).shape == (4, 1) and as_ranked(flat, ("N", 1)).shape == (4, 1)
    assert as_ranked(flat[:, None], ("N",)).shape == (4,)
    for array, shape in ((flat, ("N",)), (flat, ("N", 5)), (flat, None), (np.ones((4, 2)), ("N",))):
        assert as_ranked(array, shape) is array
