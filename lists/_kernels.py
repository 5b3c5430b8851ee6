"""For which element types onnxruntime has a kernel, and which operators have no lowering to 16 bit on a place.

The table is the registry of the onnxruntime-gpu wheel that ``kernels.json`` names, and of WebGPU: under
``WebGpuExecutionProvider`` what the plugin and the wheel that has the provider built in have in common, under
``WebGpuExecutionProvider/plugin`` all that the plugin has. One trap is built into it: a kernel
registered for ``12+`` serves only operators whose schema is of version 12 exactly, so that an operator may *lose* its
kernel in a newer opset.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from onnx import defs

from amp_transpiler.errors import ListError
from amp_transpiler.lists._bodies import bodies_of, is_typed, outgrown_parts, parts_in
from amp_transpiler.lists._places import place_traits
from amp_transpiler.lists._schemas import ELEMENTS, admitted, element_of, read_text, schema_at, schemas, split_name

TARGET_OPSET = 21
"""The opset of ai.onnx that layers, gradients and lowering rules are written in, and programs are lowered at.

From 22 on onnxruntime's CUDA provider has no MaxPool, Dropout and others.
"""

NEWEST_OPSET = 26
"""The newest opset of ai.onnx whose models every admitted onnxruntime takes; 1.31 refuses later ones."""

TARGET_IR_VERSION = 10
"""The ONNX format version that the target opset needs."""

#: The place whose kernels count where none is named.
USUAL_PLACE = "cuda"

_FLOATS = frozenset(ELEMENTS.values())
# A constant becomes an initializer, which needs no kernel.
_NO_KERNEL_NEEDED = frozenset({"Constant"})
#: Operators that a lowering rule writes out; the rules declare them.
_WRITTEN_OUT: set[str] = set()

_Ranges = list[tuple[int, int, dict[str, frozenset[str]]]]


@cache
def _data() -> Any:
    return json.loads(read_text("kernels.json"))


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]]]:
    """By provider, domain, operator type and versions: the number of the set of element types of each parameter."""
    return MappingProxyType(_data()["kernels"])


@cache
def _type_set(index: int) -> frozenset[str]:
    """Element types; a sequence or an optional counts as what it holds."""
    return frozenset(element_of(each) for each in _data()["type_sets"][index])


@cache
def _ranges(provider: str, domain: str, op_type: str) -> _Ranges:
    """First and last version of each registration of an operator, with the element types of its parameters."""
    registered = _table()[provider].get(domain, {}).get(op_type, {})
    return [
        (*_versions(versions), {param: _type_set(index) for param, index in params.items()})
        for versions, params in registered.items()
    ]


def _versions(text: str) -> tuple[int, int]:
    """First and last schema version that a registration serves; an open end serves the first one alone."""
    first, _, last = text.rstrip("+").partition("-")
    return int(first), int(last or first)


def runtime_operators(domain: str) -> frozenset[str]:
    """The operator types of a domain (empty for ai.onnx) that onnxruntime has a kernel for, known to onnx or not."""
    name = domain or "ai.onnx"
    return frozenset(op_type for domains in _table().values() for op_type in domains.get(name, ()))


def kernel_types(provider: str, op_type: str, opset: int, domain: str = "") -> dict[str, frozenset[str]] | None:
    """The element types that a provider has a kernel for, by the operator's type parameters.

    Args:
        provider: a provider of the table, such as ``CUDAExecutionProvider`` or ``CPUExecutionProvider``.
        op_type: the operator's type.
        opset: the opset version of the operator's domain that the model imports. It is ignored for operators without an
            onnx schema (com.microsoft), which count as version 1.
        domain: the operator's domain; empty for ai.onnx.

    Returns:
        Type parameter to element types in onnxruntime's spelling (``float`` is 32 bit wide, ``double`` 64). A parameter
        that is absent is not constrained. None where there is no kernel.

    Raises:
        ListError: the table does not know the provider.
    """
    table = _table()
    if provider not in table:
        raise ListError(f"The kernel table has no provider '{provider}'; it has {', '.join(sorted(table))}.")
    version = 1
    if defs.has(op_type, domain):
        schema = schema_at(op_type, opset, domain)
        if schema is None or schema.deprecated:
            return None
        version = schema.since_version
    found: dict[str, frozenset[str]] | None = None
    for first, last, params in _ranges(provider, domain or "ai.onnx", op_type):
        if first <= version <= last:
            found = found or {}
            for param, types in params.items():
                found[param] = found.get(param, frozenset()) | types
    return found


def has_kernel(provider: str, op_type: str, dtype: str, opset: int, domain: str = "") -> bool:
    """Whether a provider has a kernel for the operator with data of this element type.

    The element type is asked of the first input and the first output that may be of a float type, in the schema and in
    the kernel. An input for which there are integer kernels alone (the indices of OneHot) is passed over.

    Args:
        provider: a provider of the table, see :func:`kernel_types`.
        op_type: the operator's type.
        dtype: ``float16``, ``bfloat16``, ``float32`` or ``float64``.
        opset: the opset version that the model imports, see :func:`kernel_types`.
        domain: the operator's domain; empty for ai.onnx.

    Raises:
        ListError: unknown provider or element type.
    """
    if dtype not in ELEMENTS:
        raise ListError(f"The kernel table has no element type '{dtype}'; expected one of {', '.join(ELEMENTS)}.")
    element = ELEMENTS[dtype]
    kernels = kernel_types(provider, op_type, opset, domain)
    if kernels is None:
        return False
    schema = schema_at(op_type, opset, domain)
    if schema is None:  # no schema says which parameter is the data's; onnxruntime calls it T, or numbers it from 1
        types = next(
            (found for param in ("T", "T1", "V") if (found := kernels.get(param, frozenset()) & _FLOATS)), None
        )
        return any(element in each for each in ((types,) if types else kernels.values()))
    data = [_first_float(schema, schema.inputs, kernels), _first_float(schema, schema.outputs, kernels)]
    return any(data) and all(element in types for types in data if types)


def _first_float(
    schema: defs.OpSchema, slots: Iterable[defs.OpSchema.FormalParameter], kernels: Mapping[str, frozenset[str]]
) -> frozenset[str]:
    """Element types, in the schema and in the kernel, of the first slot that may be of a float type; empty for none."""
    for slot in slots:
        allowed = admitted(schema, slot.type_str)
        if allowed & _FLOATS:
            types = allowed & kernels.get(slot.type_str, allowed)
            if types & _FLOATS:
                return types
    return frozenset()


def is_float_operator(schema: defs.OpSchema) -> bool:
    """Whether an input or output of the operator may hold fp16 or fp32."""
    slots = [*schema.inputs, *schema.outputs]
    return any(admitted(schema, slot.type_str) & {"float", "float16"} for slot in slots)


def unsupported_reason(op_type: str, dtype: str, opset: int = TARGET_OPSET, place: str = USUAL_PLACE) -> str | None:
    """Why an operator cannot run at an element type on a place, or None if it can.

    It can with a kernel at this opset, or with a function body in its onnx schema that onnxruntime uses there and each
    part of which can. An operator newer than the opset is judged by its newest body, for lowering decomposes it.

    Args:
        op_type: ``Type`` for ai.onnx, ``domain::Type`` for other domains. A domain that onnxruntime does not define
            cannot be judged, and gives None.
        dtype: ``float16``, ``bfloat16`` or ``float32``.
        opset: the opset that programs are lowered to.
        place: a kind of place.
    """
    return _reason(op_type, dtype, opset, place, outgrown=False)


def written_out(op_type: str) -> None:
    """Declare that a lowering rule writes an operator out in others: it needs neither a kernel nor a function body."""
    _WRITTEN_OUT.add(op_type)


def lowering_gap(op_type: str, dtype: str, opset: int = TARGET_OPSET, place: str = USUAL_PLACE) -> str | None:
    """:func:`unsupported_reason` of an operator that no lowering rule writes out; None for the others.

    On a place whose programs hold bodies of ours, the function body shows what an operator can be written in, whether
    onnxruntime uses it or not.
    """
    if op_type in _WRITTEN_OUT:
        return None
    return _reason(op_type, dtype, opset, place, outgrown=place_traits(place).bodies)


def _reason(op_type: str, dtype: str, opset: int, place: str, *, outgrown: bool) -> str | None:
    domain, name = split_name(op_type)
    if domain != "com.microsoft" and not defs.has(name, domain):
        return None
    return _gap(name, domain, dtype, opset, place, outgrown)


def no_kernel(place: str) -> str:
    """What the reason of an operator without kernel on a place begins with."""
    return f"no {place_traits(place).title} kernel for "


def parts_of(op_type: str, dtype: str, opset: int, place: str) -> tuple[str, ...]:
    """The operator types that onnxruntime computes an operator of ai.onnx by on a place without a kernel for it; none
    where there is one, or nothing to compute it by."""
    if has_kernel(place_traits(place).provider, op_type, dtype, opset):
        return ()
    schema = schema_at(op_type, opset, "")
    if schema is None or outgrown_parts(schema, opset):
        return ()
    return tuple(dict.fromkeys(part for body in bodies_of(schema, dtype, opset) for part, _ in parts_in(body, dtype)))


def unsupported_operators(dtype: str, place: str = USUAL_PLACE) -> frozenset[str]:
    """The float operators of ai.onnx for which :func:`lowering_gap` has a reason."""
    return frozenset(
        name
        for (domain, name), schema in schemas().items()
        if not domain and is_float_operator(schema) and lowering_gap(name, dtype, TARGET_OPSET, place)
    )


@cache
def _gap(op_type: str, domain: str, dtype: str, opset: int, place: str, outgrown: bool) -> str | None:
    """:func:`unsupported_reason` of a known operator; with ``outgrown``, bodies that onnxruntime does not use count."""
    if not domain and op_type in _NO_KERNEL_NEEDED:
        return None
    if has_kernel(place_traits(place).provider, op_type, dtype, opset, domain):
        return None
    lacking = f"{no_kernel(place)}{op_type} at {dtype} in opset {opset}"
    schema = schema_at(op_type, opset, domain) or schemas().get((domain, op_type))
    if schema is None:
        return lacking
    if not _admits(schema, ELEMENTS[dtype]):
        return f"{lacking}, and its schema does not admit {dtype}"
    bodies = bodies_of(schema, dtype, opset)
    if not bodies:
        return f"{lacking}, and no function body"
    older = () if outgrown else outgrown_parts(schema, opset)
    if older:
        return f"{lacking}, and its function body was written for older versions of {', '.join(older)}"
    if not all(map(is_typed, bodies)):
        return f"{lacking}, and its function body mixes types"
    for part, elements in (part for body in bodies for part in parts_in(body, dtype)):
        gap = _part_gap(part, elements, opset, place, outgrown)
        if gap:
            return f"{lacking}, and its function body has no lowering: {gap}"
    return None


def _admits(schema: defs.OpSchema, element: str) -> bool:
    """Whether the data may be of this element type: the first input that may be a float, or the first such output."""
    slots = (admitted(schema, slot.type_str) for slot in [*schema.inputs, *schema.outputs])
    return element in next((types for types in slots if types & _FLOATS), ())


def _part_gap(op_type: str, elements: frozenset[str], opset: int, place: str, outgrown: bool) -> str | None:
    names = {element: name for name, element in ELEMENTS.items()}
    for element in sorted(elements & _FLOATS):
        gap = _gap(op_type, "", names[element], opset, place, outgrown)
        if gap:
            return gap
    return None
