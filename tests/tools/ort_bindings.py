#!/usr/bin/env python3
"""onnxruntime's interfaces for C# and Java, out of npm's package for Unity, into a folder, for what is here to run them.

    python -m tests.tools.ort_bindings FOLDER

Prints where they are: ``onnxruntime.dll`` with Mono's compiler, ``onnxruntime.jar`` and ``libonnxruntime4j_jni.so`` with
Java's. Where neither is, or the package cannot be had, says so, with exit status 1. They are a little older than the library
of the Python package, which programs run on with them: its interface is only added to.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE, VERSION = "com.github.asus4.onnxruntime", "0.4.9"  # onnxruntime 1.29
#: Mono's compiler knows C# 7.2: what the sources have of later versions, and what it says instead.
OLDER = (
    (r"\bis null\b", "== null"),
    (r"\((\S+) is not (\w+)\)", r"(!(\1 is \2))"),
    (r"(?m)^(\s*)using var ", r"\1var "),
    (r"\(static (\w+) =>", r"(\1 =>"),
    (r"\b(DisposableList<OrtValue>) (\w+) = new\(", r"\1 \2 = new \1("),
    (r"\bunmanaged\b", "struct"),
    (r"(?m)^(\s*)(\w+\.Span)\[(\w+)\] = (.+);", r"\1{ var held = \2; held[\3] = \4; }"),
    (r"(\w+\[0\]) = (\w+\[1\]) = (\w+);", r"\1 = \3; \2 = \3;"),
)


def fetched(folder: Path) -> Path:
    """The package, unpacked; CalledProcessError where it cannot be had."""
    package = folder / "node_modules" / PACKAGE
    if not (package / "package.json").is_file():
        words = ["npm", "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
        subprocess.run([*words, f"{PACKAGE}@{VERSION}"], check=True, capture_output=True, text=True)
    return package


def for_mono(package: Path, made: Path) -> None:
    """Compile the sources of C#."""
    sources = made.with_suffix(".src")
    shutil.rmtree(sources, ignore_errors=True)
    sources.mkdir()
    for source in (package / "Runtime").rglob("*.cs"):
        text = source.read_text(encoding="utf-8-sig")
        for found, instead in OLDER:
            text = re.sub(found, instead, text)
        (sources / source.name).write_text(text, encoding="utf-8")
    words = ["mcs", "-target:library", "-unsafe", "-langversion:latest", "-warn:0", "-define:NETSTANDARD2_0"]
    files = sorted(map(str, sources.iterdir()))
    subprocess.run([*words, f"-out:{made}", *files], check=True, capture_output=True, text=True)


def for_java(package: Path, folder: Path) -> None:
    """Unpack what there is for Android; the library runs elsewhere too (tests/helpers/java_library.c)."""
    with zipfile.ZipFile(package / "Plugins" / "Android" / "onnxruntime.aar") as archive:
        (folder / "libonnxruntime4j_jni.so").write_bytes(archive.read("jni/x86_64/libonnxruntime4j_jni.so"))
        (folder / "onnxruntime.jar").write_bytes(archive.read("classes.jar"))


def main() -> int:
    """Print where the interfaces are."""
    folder = Path(sys.argv[1]).resolve()
    mono, java = (all(map(shutil.which, words)) for words in (("mcs", "mono"), ("javac", "java")))
    if not (mono or java):
        print("no interfaces for C# and Java: neither Mono (mono-mcs) nor a JDK is here", file=sys.stderr)
        return 1
    try:
        package = fetched(folder)
        if mono and not (folder / "onnxruntime.dll").is_file():
            for_mono(package, folder / "onnxruntime.dll")
        if java and not (folder / "onnxruntime.jar").is_file():
            for_java(package, folder)
    except subprocess.CalledProcessError as error:
        print(f"no interfaces for C# and Java: {error.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return 1
    except (OSError, KeyError) as error:
        print(f"no interfaces for C# and Java: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
