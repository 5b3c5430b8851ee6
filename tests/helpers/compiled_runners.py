"""Compiles the runners in C++, C# and Java, where there is what they take (``make test-runners``).

They run with the library of the Python package: headers and interfaces may be older, never newer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import onnxruntime

from tests.helpers.runners import RUNNERS
from tests.helpers.where import ROOT

#: Where onnxruntime's C++ headers may lie: ``make test-runners`` says where it put them, Debian has a package.
HEADERS = [Path(p) for p in (os.environ.get("AMP_RUNNERS_HEADERS"), "/usr/include/onnxruntime") if p]
#: Where its interfaces for C# and Java lie (tests/tools/ort_bindings.py).
BINDINGS = Path(os.environ.get("AMP_RUNNERS_BINDINGS") or "nowhere")


def library() -> Path | None:
    """onnxruntime's library; the package has it under a name with its whole version."""
    return max((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"), default=None)


def made(words: list[str]) -> None:
    """Run a compiler."""
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def cpp(folder: Path) -> list[str]:
    """How the runner in C++ is called, compiled into ``folder``; empty without compiler, or header of onnxruntime."""
    held = library()
    header = next((path for path in HEADERS if (path / "onnxruntime_cxx_api.h").is_file()), None)
    if header is None or held is None or shutil.which("g++") is None:
        return []
    linked = folder / "libonnxruntime.so.1"  # what a program asks for
    linked.symlink_to(held)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-isystem", str(header)]
    made(["g++", *flags, str(RUNNERS / "train.cpp"), "-o", str(folder / "train"), str(linked), f"-Wl,-rpath,{folder}"])
    return [str(folder / "train")]


def csharp(folder: Path) -> list[str]:
    """The same in C#, for Mono."""
    held, interface = library(), BINDINGS / "onnxruntime.dll"
    if held is None or not interface.is_file() or not all(map(shutil.which, ("mcs", "mono"))):
        return []
    (folder / "libonnxruntime.so").symlink_to(held)
    shutil.copy(interface, folder)
    flags = ["-langversion:latest", "-warnaserror", f"-r:{interface}"]
    made(["mcs", *flags, f"-out:{folder / 'Train.exe'}", str(RUNNERS / "Train.cs")])
    return ["mono", str(folder / "Train.exe")]


def java(folder: Path) -> list[str]:
    """The same in Java. Its part in C is Android's, which needs what stands in for libraries there."""
    held, interface = library(), BINDINGS / "onnxruntime.jar"
    if held is None or not interface.is_file() or not all(map(shutil.which, ("javac", "java", "gcc"))):
        return []
    (folder / "libonnxruntime.so.1").symlink_to(held)
    shutil.copy(BINDINGS / "libonnxruntime4j_jni.so", folder)
    (folder / "versions").write_text("LIBC { };\nVERS_1.29.0 { Ort*; };\n", encoding="utf-8")
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-Wl,--version-script={folder / 'versions'}"]
    own = folder / "libonnxruntime.so"
    made(["gcc", *flags, "-o", str(own), str(ROOT / "tests" / "helpers" / "java_library.c"), "-ldl"])
    for name in ("libc.so", "libm.so", "libdl.so"):
        (folder / name).symlink_to(own)
    made(["javac", "-Xlint:all", "-Werror", "-cp", str(interface), "-d", str(folder), str(RUNNERS / "Train.java")])
    options = [f"-Donnxruntime.native.path={folder}", "-cp", f"{interface}{os.pathsep}{folder}"]
    return ["env", f"LD_LIBRARY_PATH={folder}", "java", *options, "Train"]
