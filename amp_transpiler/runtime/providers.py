"""Where onnxruntime has the provider of a place from, built in or a plugin beside it, and values on its device."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import onnx
import onnxruntime as ort

from amp_transpiler.lists import PlaceTraits, place_kinds, place_traits
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.runtime.locks import DEVICES

_VIRTUAL = "is_virtual"  # of a plugin's device on which sessions are made and never run
_LIBRARY = "library_path"  # where a plugin's device comes from
_FREE = nullcontext()


@dataclass(frozen=True)
class Plugin:
    """A plugin of onnxruntime: the devices that it offers, and what kept it from being loaded."""

    devices: tuple[Any, ...] = ()
    fault: Exception | None = None


@functools.cache
def built_in(kind: str) -> bool:
    """Whether onnxruntime was built with the provider of a place."""
    provider = place_traits(kind).provider
    if provider not in ort.get_available_providers():
        return False
    # It counts those of loaded plugins as well.
    return not any(each.ep_name == provider and _LIBRARY in each.ep_metadata for each in ort.get_ep_devices())


@functools.cache
def plugin(kind: str) -> Plugin:
    """The plugin with the provider of a place; it is loaded when first asked for."""
    traits = place_traits(kind)
    devices = _devices(traits.provider)
    if devices:  # another part of the process has loaded it
        return Plugin(devices)
    try:
        ort.register_execution_provider_library(kind, importlib.import_module(traits.plugin).get_library_path())
    except Exception as error:  # onnxruntime's errors have no common base class
        return Plugin(fault=error)
    return Plugin(_devices(traits.provider))


def _devices(provider: str) -> tuple[Any, ...]:
    listed = [each for each in ort.get_ep_devices() if each.ep_name == provider]
    return tuple(each for each in listed if each.device.metadata.get(_VIRTUAL) != "1")


def on_device(place: Place) -> bool:
    """Whether values of a place lie in memory of a device."""
    return place_traits(place.kind).memory != "cpu"


def alone(place: Place) -> AbstractContextManager[None]:
    """Around what uses a device: nobody else uses it inside, where its runtime serves one thread at a time."""
    return DEVICES.writing() if place_traits(place.kind).one_thread else _FREE


def in_turn(place: Place) -> AbstractContextManager[None]:
    """Around runs and copies: as :func:`alone`, and elsewhere on a device nobody captures a graph inside."""
    traits = place_traits(place.kind)
    return DEVICES.reading() if traits.device and not traits.one_thread else alone(place)


# -- values --------------------------------------------------------------------------------------------
def allocate(shape: Sequence[int], kind: int, place: Place) -> Any:
    """A value of this shape and ONNX element type on a place, content undefined; RuntimeError for strings."""
    traits = place_traits(place.kind)
    with _turn_for(traits.memory):
        try:
            return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), kind, traits.memory, place.device_id)
        except RuntimeError:
            if not traits.plugin or not built_in(place.kind):
                raise
        # Up to 1.27 onnxruntime gives memory of WebGPU to sessions alone.
        return _from_session(list(shape), kind, place.kind)


def copy(source: Any, target: Any) -> None:
    """Give a value the content of another of its shape and element type, on whichever device either is."""
    names = source.device_name(), target.device_name()
    with _turn_for(*names):
        if any(map(_is_a_plugins, names)):
            ort.copy_tensors([source], [target])
        else:
            target.update_inplace(source)


def takes_arrays(value: Any) -> bool:
    """Whether onnxruntime copies a numpy array to where a value lies; elsewhere it copies values alone."""
    return _takes_arrays(value.device_name())


def lies_on(value: Any, place: Place) -> bool:
    """Whether a value lies on a place (no number of a device is kept by onnxruntime's values on CPU)."""
    traits = place_traits(place.kind)
    if not _is_in(value.device_name(), traits, place.kind):
        return False
    return not traits.numbered or value.__dlpack_device__()[1] == place.device_id


def _is_in(memory: str, traits: PlaceTraits, kind: str) -> bool:
    """Whether memory of this name is a place's: up to 1.27 onnxruntime calls that of WebGPU CUDA's."""
    return memory == traits.memory or (bool(traits.plugin) and memory != "cpu" and built_in(kind))


@functools.cache
def _serves_one_thread(memory: str) -> bool:
    kinds = [(kind, place_traits(kind)) for kind in place_kinds()]
    return any(traits.one_thread and _is_in(memory, traits, kind) for kind, traits in kinds)


def _turn_for(*memories: str) -> AbstractContextManager[None]:
    return DEVICES.writing() if any(map(_serves_one_thread, memories)) else _FREE


@functools.cache
def _takes_arrays(memory: str) -> bool:
    return not any(_is_in(memory, place_traits(kind), kind) for kind in _with_plugins())


@functools.cache
def _is_a_plugins(memory: str) -> bool:
    return any(memory == place_traits(kind).memory for kind in _with_plugins())


def _with_plugins() -> list[str]:
    return [kind for kind in place_kinds() if place_traits(kind).plugin]


def _from_session(shape: list[int], kind: int, place: str) -> Any:
    """An output of a session that lives as long as the process, since the memory is the session's."""
    session = _copies(kind, place)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_shape_and_type(shape, kind, "cpu", 0))
    binding.bind_output("y", place_traits(place).memory, 0)
    session.run_with_iobinding(binding)
    return binding.get_outputs()[0]


@functools.cache
def _copies(kind: int, place: str) -> Any:
    x, y = (onnx.helper.make_tensor_value_info(name, kind, None) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "copy", [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    providers = [place_traits(place).provider, place_traits("cpu").provider]
    return ort.InferenceSession(model.SerializeToString(), options, providers=providers)
