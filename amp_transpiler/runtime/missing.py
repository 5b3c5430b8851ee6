"""Whether onnxruntime can use a place, and what is missing where it cannot."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

import onnxruntime as ort

from amp_transpiler.errors import PlaceError
from amp_transpiler.lists import place_traits
from amp_transpiler.passes.lowering.place import CUDAPlace, Place, WebGPUPlace
from amp_transpiler.runtime.providers import built_in, plugin
from amp_transpiler.runtime.session import plain_message, probe

#: How a machine without a GPU runs WebGPU programs, for tests.
_SOFTWARE = ", or for tests a software one (Mesa's Vulkan >= 24, and ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1)"


def require(place: Place) -> None:
    """PlaceError that says what is missing, unless onnxruntime can use this place."""
    missing = what_is_missing(place)
    if missing is not None:
        raise PlaceError(
            f"{place!r} cannot be used: {missing}",
            f"Run on CPUPlace(), or allow that with Executor({place!r}, allow_cpu_fallback=True)",
        )


def what_is_missing(place: Place) -> str | None:
    """What keeps onnxruntime from using a place, in words; None where it can."""
    if isinstance(place, CUDAPlace):
        return cuda_missing(place.device_id)
    return webgpu_missing(place.device_id) if isinstance(place, WebGPUPlace) else None


def cuda_usable() -> bool:
    """Whether ``CUDAPlace(0)`` can be used: what scripts ask Paddle's ``is_compiled_with_cuda`` for."""
    return cuda_missing(0) is None


@functools.cache
def webgpu_missing(device_id: int) -> str | None:
    """What keeps onnxruntime from using this device through WebGPU, in words; None where it can."""
    if not built_in("webgpu"):
        found = plugin("webgpu")
        if isinstance(found.fault, ImportError):
            return (
                f"the installed onnxruntime {ort.__version__} was built without WebGPU, and its plugin is not there; "
                "install onnxruntime-ep-webgpu"
            )
        if found.fault is not None:
            return f"onnxruntime {ort.__version__} does not load its WebGPU plugin: {plain_message(found.fault)}"
        if not found.devices:
            return f"onnxruntime's WebGPU plugin finds no GPU; install its driver{_SOFTWARE}"
    if device_id:
        return "onnxruntime's WebGPU provider picks the GPU itself, one for a process; write WebGPUPlace(0)"
    try:
        probe(WebGPUPlace(device_id))
    except Exception as error:
        text = plain_message(error)
        if "WebGPU adapter" in text:
            return f"no driver offers WebGPU a GPU ({_after(text, 'WebGPU adapter: ')}); install its driver{_SOFTWARE}"
        return f"onnxruntime cannot use device {device_id}: {text}"
    return None


def _after(text: str, mark: str) -> str:
    return text.rpartition(mark)[2].rstrip(".")


@functools.cache
def cuda_missing(device_id: int) -> str | None:
    """What keeps onnxruntime from using this CUDA device, in words; None where it can."""
    cuda = place_traits("cuda").provider
    if cuda not in ort.get_available_providers():
        return (
            f"the installed onnxruntime {ort.__version__} was built without CUDA; install onnxruntime-gpu[cuda,cudnn]"
        )
    driver = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        ctypes.CDLL(driver)
    except OSError:
        return f"there is no NVIDIA driver on this machine ({driver} does not load)"
    ort.preload_dlls()
    try:
        found = probe(CUDAPlace(device_id))
    except Exception as error:
        return f"onnxruntime cannot use device {device_id}: {plain_message(error)}"
    if cuda in found:
        return None
    return f"onnxruntime's CUDA provider does not load ({_load_error()}); install onnxruntime-gpu[cuda,cudnn]"


def _load_error() -> str:
    """Why the provider's library does not load, in the loader's words."""
    library = "onnxruntime_providers_cuda.dll" if sys.platform == "win32" else "libonnxruntime_providers_cuda.so"
    try:
        ctypes.CDLL(str(Path(ort.__file__).parent / "capi" / library))
    except OSError as error:
        return str(error)
    return "for a reason that onnxruntime does not tell"
