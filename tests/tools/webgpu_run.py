"""Runs what computes on WebGPU in environments of their own: ``python -m tests.tools.webgpu_run FOLDER [--install-vulkan] [pytest's arguments]``.

Two of them, side by side with the packages of the interpreter that runs this: ``FOLDER/wheel`` has onnxruntime-webgpu in
place of onnxruntime, ``FOLDER/plugin`` the plugin onnxruntime-ep-webgpu beside it. They use the machine's graphics card,
or software Vulkan. Where there is neither, this says what to install, and passes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

from tests.helpers.webgpu_sessions import REQUIRED, real_card, software_allowed
from tests.helpers.where import ROOT

PACKAGES = {"wheel": "onnxruntime-webgpu==1.27.0", "plugin": "onnxruntime-ep-webgpu==0.4.0"}
_OWN = ["tests/webgpu"]
# Tests that take every place, and what proves rules, computed there.
_SHARED = ["-m", "webgpu", "tests/runtime", "tests/optimizer/test_groups.py", "tests/optimizer/test_ema.py"]
_RULES = ["--place", "webgpu", "-m", "rules", "tests/ops"]
SUITES = {"wheel": [_OWN], "plugin": [_OWN, [*_SHARED, "tests/whole/test_use_case.py"], _RULES]}
"""What pytest runs in each environment."""


def vulkan_driver() -> bool:
    """Whether a Vulkan driver is installed, or another system's graphics (Metal, D3D12) need none."""
    folders = ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d")
    named = bool(os.environ.get("VK_DRIVER_FILES") or os.environ.get("VK_ICD_FILENAMES"))
    return not sys.platform.startswith("linux") or named or any(any(Path(f).glob("*.json")) for f in folders)


def install_vulkan() -> str | None:
    """Install Mesa's software Vulkan with apt-get; why that failed, or None."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return "software Vulkan is installed with apt-get, as root"
    release = _os_release()
    sources = []
    if release.get("VERSION_CODENAME") == "bookworm":  # its own Mesa, 22.3, is refused by Dawn
        Path("/etc/apt/sources.list.d/bookworm-backports.list").write_text(f"deb {_mirror()} bookworm-backports main\n")
        sources = ["-t", "bookworm-backports"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *sources]
    for command in (["apt-get", "update", "-q"], [*install, "libvulkan1", "mesa-vulkan-drivers"]):
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            return f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}"
    return None


def _os_release() -> dict[str, str]:
    lines = Path("/etc/os-release").read_text().splitlines() if Path("/etc/os-release").exists() else []
    return {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines)}


def _mirror() -> str:
    """Where this machine gets its Debian from."""
    for file in [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]:
        for line in file.read_text().splitlines() if file.is_file() else []:
            words = line.split()
            if line.startswith(("URIs:", "deb ")) and any("/debian" in word for word in words):
                return next(word for word in words if "/debian" in word).rstrip("/")
    return "http://deb.debian.org/debian"


def environment(folder: Path, package: str) -> Path:
    """The interpreter of an environment that has ``package`` before the packages of this interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "packages_of_tests.pth").write_text("".join(f"{each}\n" for each in site.getsitepackages()))
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--ignore-installed",
    ]
    wanted = [folder / f".{package}"]
    if not wanted[0].exists():
        subprocess.run([*pip, package], check=True)
        wanted[0].touch()
    return python


def run(kind: str, folder: Path, arguments: list[str]) -> int:
    """pytest's exit status in one of the environments; 0 where it has no device."""
    python = environment(folder / kind, PACKAGES[kind])
    os.environ.setdefault("XDG_RUNTIME_DIR", str(_runtime_folder(folder)))
    command, around = [str(python)], software_allowed()
    code = "from tests.helpers.webgpu_sessions import missing; print(missing() or '')"
    asked = subprocess.run([*command, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=around)
    why = "the process that asked was killed" if asked.returncode else asked.stdout.splitlines()[-1]
    if why:
        print(f"WebGPU tests not run with {PACKAGES[kind]}: {why}.")
        return 0
    statuses, around = [], around | {REQUIRED: "1"}
    for suite in SUITES[kind]:
        print(f"WebGPU tests with {PACKAGES[kind]}: {' '.join(suite)}", flush=True)
        ran = subprocess.run([*command, "-m", "pytest", "-q", *arguments, *suite], cwd=ROOT, env=around)
        statuses.append(ran.returncode)
    return max(statuses)


def _runtime_folder(folder: Path) -> Path:
    """Mesa wants a folder that is the user's alone."""
    made = folder / "run"
    made.mkdir(mode=0o700, exist_ok=True)
    return made.resolve()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--install-vulkan", action="store_true", help="install software Vulkan where no driver is")
    parser.add_argument("--only", choices=PACKAGES, help="one of the environments")
    args, arguments = parser.parse_known_args()
    if not vulkan_driver():
        why = (
            install_vulkan()
            if args.install_vulkan
            else "software Vulkan is not installed (make test-webgpu VULKAN=install)"
        )
        if why:
            print(f"WebGPU tests not run: no Vulkan driver is here, and {why}. Debian: mesa-vulkan-drivers >= 24.")
            return 0
    if not real_card():
        print("No graphics card: software Vulkan")
    kinds = [args.only] if args.only else list(PACKAGES)
    statuses = [run(kind, args.folder.resolve(), arguments or ["-n", "2"]) for kind in kinds]
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
