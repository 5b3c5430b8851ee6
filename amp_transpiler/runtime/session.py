"""onnxruntime sessions for a place: their options, and the proof that they run where they should.

The GPU wheel of onnxruntime lists CUDA on every machine, and runs on CPU without a word where its libraries or a
kernel are missing. Here both are errors that say what is missing.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import InferenceSession as LoadedModel

from amp_transpiler.errors import ExecutionError, PlaceError
from amp_transpiler.ir.control import every_node
from amp_transpiler.ir.types import NAMES, numpy_dtype
from amp_transpiler.lists import place_traits
from amp_transpiler.ops.row_sums import races
from amp_transpiler.option_checks import choice, listed, switch, whole
from amp_transpiler.passes.lowering.arena import REGION
from amp_transpiler.passes.lowering.exchanges import Exchanged, by_itself, has_exchanges, taken_apart
from amp_transpiler.passes.lowering.parts import Parts, cuts
from amp_transpiler.passes.lowering.place import CPUPlace, CUDAPlace, Place
from amp_transpiler.passes.lowering.size_check import Inferred
from amp_transpiler.runtime.budget import unbounded_optimizers
from amp_transpiler.runtime.chain import chained
from amp_transpiler.runtime.collective.current import engine_on
from amp_transpiler.runtime.graph_optimizers import IN_FP32, PAIRS_AS_THEY_ARE, TURNS, UNWANTED, useless_optimizers
from amp_transpiler.runtime.heap import make_arena, trim
from amp_transpiler.runtime.inputs_held import inputs_held
from amp_transpiler.runtime.providers import alone, built_in, in_turn, plugin
from amp_transpiler.runtime.session_cache import SessionCache
from amp_transpiler.runtime.size_nodes import size_nodes
from amp_transpiler.warn import AmpWarning, warn_user

_CPU = place_traits("cpu").provider
_KINDS = {name.lower(): number for name, number in onnx.TensorProto.DataType.items()}
_SILENT = 4  # onnxruntime's log level "fatal": what it would log as an error is raised here
_LEVELS = {
    "disable": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


@dataclass(frozen=True)
class Settings:
    """How sessions are made; the arguments of :class:`~amp_transpiler.runtime.executor.Executor`."""

    optimization_level: str = "all"
    threads: int | None = None
    tf32: bool = False
    allow_cpu_fallback: bool = False
    cache: SessionCache | None = None
    cuda_graph: bool = False
    stream: int = 0  # on which the caller wants it to compute; 0: one of its own
    as_it_lies: bool = False  # nothing is turned, images where the provider would do so and all behind a Transpose

    def __post_init__(self) -> None:
        choice("optimization_level", self.optimization_level, _LEVELS)
        for name in ("tf32", "allow_cpu_fallback", "cuda_graph"):
            switch(name, getattr(self, name))
        if self.threads is not None:
            whole("threads", self.threads, 1)


def create_session(
    model: onnx.ModelProto,
    place: Place,
    settings: Settings,
    name: str,
    keep_graph: bool = False,
    in_parts: bool = False,
    updates: Container[str] = (),
) -> tuple[Any, onnx.GraphProto | None]:
    """A session for a lowered model and, with ``keep_graph``, the graph that it really runs (None: cannot be had).

    ``name`` is the program's, for messages. ``in_parts``: a large model on CPU may be a chain of sessions, which serves
    a :class:`~amp_transpiler.runtime.binding.Step`, and ranks exchange tensors between its parts; without it a rank
    computes with its own alone. ``updates``: tensors of new state. PlaceError where an operator has no kernel on
    ``place``, ExecutionError where onnxruntime refuses the model.
    """
    ends, exchanged, engine = list[int](), list[Exchanged](), None
    if has_exchanges(model):
        engine = engine_on(place) if in_parts else None
        apart = in_parts and (engine is not None or place.kind == "cpu")
        model, ends, exchanged = taken_apart(model, updates) if apart else (by_itself(model), ends, exchanged)
        settings = settings if engine is None else replace(settings, stream=engine.stream)
    elif place.kind == "cpu":
        ends = cuts(model.graph)
    if in_parts and (exchanged or len(ends) > 1):
        parts = Parts(model, ends, [tensor.name for each in exchanged for tensor in each.sent])
        make = partial(create_session, place=place, settings=settings, name=name, keep_graph=keep_graph)
        chain, graphs = chained(parts, make, place, exchanged, engine)
        if chain is not None:
            known = [graph for graph in graphs if graph is not None]
            if len(known) < len(ends):
                return chain, None
            chain.ends = list(accumulate(len(graph.node) for graph in known))
            return chain, parts.joined(known, chain.names)
        if exchanged:
            raise ExecutionError(
                f"program '{name}' is trained by several ranks, and hands what is no tensor across an exchange between "
                "them; leave sequences and optional values out of the training program"
            )
    _refuse_types(model.graph, place, name)
    data = _serialized(inputs_held(model, place.kind), name)
    if place.kind == "cpu" and b"ScatterND" in data and _races(model.graph):
        settings = replace(settings, threads=1)
    _settle_arena()
    alone_there = place.kind == "cuda" and not settings.allow_cpu_fallback and not settings.cuda_graph
    sizes = size_nodes(model.graph) if alone_there else frozenset()
    asked = replace(settings, allow_cpu_fallback=True) if sizes else settings
    useless = useless_optimizers(model)
    try:
        try:
            session, kept = _make(data, place, asked, useless, keep_graph)
        except Exception as error:
            if not place_traits(place.kind).turns_images or not _leaves(error):
                raise
            session, kept = _make(data, place, replace(asked, as_it_lies=True), useless, keep_graph)
    except AmpWarning:
        raise
    except Exception as error:  # onnxruntime's errors have no common base class
        raise _creation_error(error, data, place, settings, name) from None
    if asked.allow_cpu_fallback and place_traits(place.kind).device:
        _check_fallen(_on_cpu(session, sizes), place, settings, name)
    return session, None if kept is None or not keep_graph else onnx.load_model_from_string(kept).graph


def _races(graph: onnx.GraphProto) -> bool:
    """Whether results of a graph on CPU may depend on the number of threads."""
    return any(map(races, every_node(graph.node)))


def check_model(model: onnx.ModelProto, place: Place, settings: Settings, name: str) -> dict[str, Inferred]:
    """The shapes of the outputs, without a session: a tenth of its time.

    The errors of :func:`create_session` where types and shapes do not fit together.
    """
    data, options = _serialized(model, name), ort.SessionOptions()
    options.log_severity_level = _SILENT
    try:
        loaded = LoadedModel(options, data, False, False)
    except Exception as error:
        raise _creation_error(error, data, place, settings, name) from None
    return {output.name: (_element_type(output.type), tuple(output.shape)) for output in loaded.outputs_meta}


def _element_type(spelled: str) -> int:
    """The element type of a tensor, 0 of anything else; onnxruntime spells it "tensor(float)"."""
    return _KINDS.get(spelled.removeprefix("tensor(").removesuffix(")"), 0) if spelled.startswith("tensor(") else 0


def _make(
    data: bytes, place: Place, settings: Settings, useless: Sequence[str], keep: bool
) -> tuple[Any, bytes | None]:
    """A session, and the optimised model that it runs where that was asked for and can be had."""
    cache, key = settings.cache, ""
    if cache is not None:
        level, fallback = settings.optimization_level, settings.allow_cpu_fallback
        lies = settings.as_it_lies
        key = cache.key(data, (place.kind, level, settings.tf32, fallback, lies, *useless, *unbounded_optimizers()))
        kept = cache.read(key)
        if kept is not None:
            try:
                return _session(kept, place, replace(settings, optimization_level="disable")), kept
            except Exception as error:
                cache.discard(key, plain_message(error))
    if keep or cache is not None:
        try:
            with tempfile.TemporaryDirectory(prefix="amp_transpiler_") as folder:
                path = Path(folder) / "optimized.onnx"
                session, kept = _session(data, place, settings, path, useless=useless), path.read_bytes()
        except Exception:  # it may be only the saving that fails, on a full disk; the plain attempt below tells
            pass
        else:
            if cache is not None:
                cache.write(key, kept)
            return session, kept
    return _session(data, place, settings, useless=useless), None


def _serialized(model: onnx.ModelProto, name: str) -> bytes:
    try:
        data: bytes = model.SerializeToString()
    except Exception as error:  # protobuf's own, over 2 GB
        raise ExecutionError(
            f"the constants of program '{name}' do not fit the 2 GB of a model file ({error}); make the large ones "
            "persistable variables, which live in the scope"
        ) from None
    return data


def _session(
    data: bytes,
    place: Place,
    settings: Settings,
    saved: Path | None = None,
    *,
    fallback: bool | None = None,
    useless: Sequence[str] = (),
) -> Any:
    fallback = settings.allow_cpu_fallback if fallback is None else fallback
    options = ort.SessionOptions()
    options.log_severity_level = _SILENT
    options.graph_optimization_level = _LEVELS[settings.optimization_level]
    # A pattern is one more block of as much memory, taken in the second run beside what the arena has from the first.
    options.enable_mem_pattern = False
    options.add_session_config_entry(*(PAIRS_AS_THEY_ARE if b"QuantizeLinear" in data else IN_FP32))
    traits = place_traits(place.kind)
    if not traits.device:
        make_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
    # A tensor that takes a dead one's buffer keeps it allocated in between, from the forward into the backward pass;
    # the arena gives the same memory without that, as fast (4 to 18 % less of it on CPU, measured).
    options.enable_mem_reuse = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if settings.threads is not None:
        options.intra_op_num_threads = settings.threads
    if saved is not None:
        options.optimized_model_filepath = str(saved)
    if traits.device:
        entry = "record_ep_graph_assignment_info" if fallback else "disable_cpu_ep_fallback"
        options.add_session_config_entry(f"session.{entry}", "1")
    if settings.as_it_lies:
        options.add_session_config_entry(f"ep.{traits.provider.lower()}.preferredLayout", "NCHW")
    turning = [TURNS] if settings.as_it_lies else []
    providers = None
    if traits.plugin and not built_in(place.kind):
        options.add_provider_for_devices([plugin(place.kind).devices[place.device_id]], {})
    else:
        providers = _providers(place, settings, fallback)
    with alone(place):
        # The Python class would otherwise answer a CUDA error (no such device, no memory) with a session on the CPU.
        return ort.InferenceSession(
            data,
            options,
            providers=providers,
            enable_fallback=0,
            disabled_optimizers=[*unbounded_optimizers(), *UNWANTED, *useless, *turning],
        )


@functools.cache
def _settle_arena() -> None:
    """Let the arena take its small region, and then shrink."""
    _session(_probe(), CPUPlace(), Settings(threads=1)).run(None, {"x": np.zeros(2, np.float32)})
    release_memory()


def release_behind(made: Iterable[Any]) -> None:
    """Give memory back that large state lay in before it was copied; of small state it is not worth the time."""
    if sum(value.tensor_size_in_bytes() for value in made) >= REGION:
        release_memory()


def release_memory() -> None:
    """Give memory back to the system that no session needs any more."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    session = _session(_probe(), CPUPlace(), Settings(threads=1))
    binding = session.io_binding()  # a result in the arena would hold a region
    for bind, name in ((binding.bind_ortvalue_input, "x"), (binding.bind_ortvalue_output, "y")):
        bind(name, ort.OrtValue.ortvalue_from_numpy(np.zeros(2, np.float32)))
    session.run_with_iobinding(binding, options)
    trim()


def _leaves(error: Exception) -> bool:
    """Whether onnxruntime refuses a model since some of it would run on the CPU."""
    return "fallback" in plain_message(error)


def _providers(place: Place, settings: Settings, fallback: bool) -> list[Any]:
    provider = place_traits(place.kind).provider
    if not isinstance(place, CUDAPlace):
        return [provider, _CPU] if fallback and provider != _CPU else [provider]
    options = {"use_tf32": int(settings.tf32), "enable_cuda_graph": int(settings.cuda_graph)}
    if place.device_id:  # onnxruntime 1.31 prints a warning for each session that is told its device
        options["device_id"] = place.device_id
    if settings.stream:
        options["user_compute_stream"] = settings.stream
    cuda = (provider, {name: str(value) for name, value in options.items()})
    return [cuda, _CPU] if fallback else [cuda]


# -- what went wrong -----------------------------------------------------------------------------------
def _creation_error(error: Exception, data: bytes, place: Place, settings: Settings, name: str) -> Exception:
    text = plain_message(error)
    if place_traits(place.kind).device and (_leaves(error) or "graph capture" in text or "CUDA Graph" in text):
        found = cpu_operators(data, place, replace(settings, cuda_graph=False))
        return _place_error(place, name, found)
    if "NOT_IMPLEMENTED" in text or "Could not find an implementation" in text or "Provider type for" in text:
        return PlaceError(f"an operator of program '{name}' has no kernel on {place!r}: {text}")
    return ExecutionError(f"onnxruntime refuses program '{name}', lowered for {place!r}: {text}")


def _place_error(place: Place, name: str, found: Sequence[str]) -> PlaceError:
    return PlaceError(
        f"program '{name}' does not run on {place!r} alone: onnxruntime has no kernel there for "
        f"{listed(found, 8, quote='') or 'some operators'}",
        "Where only the 16-bit kernel is missing, keep the operator in fp32 (custom_black_list); else let it run "
        "on the CPU with Executor(place, allow_cpu_fallback=True)",
    )


def cpu_operators(data: bytes, place: Place, settings: Settings) -> list[str]:
    """``Type 'name'`` of each node that falls to the CPU in a session that may fall back; empty where none is made."""
    try:
        return _on_cpu(_session(data, place, settings, fallback=True))
    except Exception:  # the caller reports its own error; these names only help
        return []


def _on_cpu(session: Any, but: Container[str] = ()) -> list[str]:
    """``Type 'name'`` of each node but these that falls to the CPU in a session that may fall back."""
    nodes = (node for p in session.get_provider_graph_assignment_info() if p.ep_name == _CPU for node in p.get_nodes())
    return [f"{node.op_type} '{node.name}'" for node in nodes if node.name not in but]


def _check_fallen(found: Sequence[str], place: Place, settings: Settings, name: str) -> None:
    if found and not settings.allow_cpu_fallback:
        raise _place_error(place, name, found)
    if found:
        warn_user(
            f"program '{name}' runs on {place!r} except {listed(found, 8, quote='')} on the "
            "CPU, where stock onnxruntime does not round 16-bit results as a GPU does"
        )


def plain_message(error: Exception) -> str:
    """onnxruntime's message without source positions and colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    text = re.sub(r"/\S+\.(?:cc|h|cpp|cu):\d+\s+\S[^\n]*?\)\s*(?:const\s*)?(?:\[with [^\]]*\]\s*)?", "", text)
    return " ".join(text.split())[:1500]


def probe(place: Place, dtype: str = "float32") -> list[str]:
    """Run a little there, and the providers of its session; onnxruntime's error where that fails."""
    session = _session(_probe(dtype), place, Settings(), fallback=True)
    with in_turn(place):  # a device too old for this build takes a session, and no run
        session.run(None, {"x": np.zeros(2, numpy_dtype(dtype))})
    return list(session.get_providers())


def _probe(dtype: str = "float32") -> bytes:
    kind = dtype.replace("float32", "float")
    model: bytes = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> probe ({kind}[2] x) => ({kind}[2] y) {{ y = Add(x, x) }}'
    ).SerializeToString()
    return model


@functools.cache
def _lacks(place: Place) -> frozenset[str]:
    """The float types that other devices of this kind of place have, and this one has not."""
    found = set()
    for dtype in place_traits(place.kind).optional:
        try:
            probe(place, dtype)
        except Exception:  # onnxruntime's errors have no common base class
            found.add(dtype)
    return frozenset(found)


def _refuse_types(graph: onnx.GraphProto, place: Place, name: str) -> None:
    """PlaceError for a program with a float type that the device has no arithmetic for."""
    if not place_traits(place.kind).optional:
        return
    kinds = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    kinds |= {tensor.data_type for tensor in graph.initializer}
    kinds |= {a.i for node in graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to"}
    for dtype in sorted(_lacks(place) & {NAMES[kind] for kind in kinds if kind in NAMES}):
        raise PlaceError(
            f"program '{name}' computes in {dtype}, for which the GPU of {place!r}, or its driver, has no arithmetic",
            "Leave the program in fp32 there, or run it on CPUPlace(), with every rounding of 16 bit",
        )
