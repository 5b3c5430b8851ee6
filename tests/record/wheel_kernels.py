"""Records in ``lists/kernels.json`` what the installed onnxruntime has kernels for on CPU, and on CUDA where it has that.

    python -m tests.record.wheel_kernels

The GPU build tells its registry where its libraries load; over stubs they do (gcc and the headers of CUDA are needed,
neither driver nor GPU).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.kernel_registry import Registry, installed_version, read, record
from tests.helpers.where import ROOT
from tests.tools.cuda_placement import build_stubs, compile_stub, over_stubs, provider_library

PROVIDERS = ("CPUExecutionProvider", "CUDAExecutionProvider")

#: What the library of TensorRT, which is asked as well, wants of cuDNN. CUDA's own would take this for cuDNN's.
_CUDNN = "".join(f"int {name}(void) {{ return 0; }}\n" for name in ("cudnnCreate", "cudnnDestroy", "cudnnSetStream"))
_SCRIPT = "from tests.record import wheel_kernels; wheel_kernels.tell()"


def needs_stubs() -> bool:
    """Whether the installed onnxruntime is a build with CUDA."""
    return bool(provider_library().exists())


def registries(folder: Path) -> dict[str, Registry]:
    """By provider. ``folder``, an empty one, gets the stubs that the GPU build needs."""
    environment = dict(os.environ)
    if needs_stubs():
        build_stubs(folder)
        compile_stub(folder, "libcudnn.so.9", _CUDNN)
        environment = over_stubs(folder)
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        sys.exit(f"onnxruntime does not tell its kernels: {done.stderr[-600:]} (status {done.returncode})")
    found: dict[str, Registry] = json.loads(done.stdout.splitlines()[-1])
    return found


def tell() -> None:
    """Prints :func:`registries`, of the interpreter that it is called in."""
    from onnxruntime.capi import onnxruntime_pybind11_state as bindings

    kernels = bindings.get_all_opkernel_def()
    found = {provider: read(each for each in kernels if each.provider == provider) for provider in PROVIDERS}
    print("\n" + json.dumps({provider: each for provider, each in found.items() if any(each.values())}))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for provider, found in registries(Path(folder)).items():
            record(provider, found, installed_version())


if __name__ == "__main__":
    main()
