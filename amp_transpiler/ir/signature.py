"""Which element types the slots of an operator admit, from its ONNX schema.

A schema names the type of each slot by a type variable (``T``) or pins it (``tensor(float)``). Slots of one variable
hold one type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import onnx

from amp_transpiler.ir.types import NAMES

#: Attributes that set the element type of an output. Where that is no float, those of the inputs are free.
_TYPE_ATTRIBUTES = frozenset({"dtype", "to", "output_dtype", "output_datatype"})


@dataclass(frozen=True)
class Signature:
    """Type variable (or pinned type) of each formal slot, and the element types that each admits."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    optional_outputs: frozenset[int]
    admits: Mapping[str, frozenset[str]]
    typed_by_attribute: bool

    def input(self, slot: int) -> str:
        """The type variable of an input; slots beyond the last belong to the variadic one."""
        return self.inputs[min(slot, len(self.inputs) - 1)]

    def output(self, slot: int) -> str:
        """The type variable of an output."""
        return self.outputs[min(slot, len(self.outputs) - 1)]


@cache
def signature(type_: str, opset: int, domain: str) -> Signature | None:
    """The signature of an operator at an opset version, None where onnx knows no schema."""
    try:
        schema = onnx.defs.get_schema(type_, opset, domain)
    except onnx.defs.SchemaError:
        return None
    admits = {c.type_param_str: _elements(c.allowed_type_strs) for c in schema.type_constraints}
    for slot in (*schema.inputs, *schema.outputs):
        admits.setdefault(slot.type_str, _elements([slot.type_str]))
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    return Signature(
        tuple(slot.type_str for slot in schema.inputs),
        tuple(slot.type_str for slot in schema.outputs),
        frozenset(i for i, slot in enumerate(schema.outputs) if slot.option == optional),
        admits,
        bool(_TYPE_ATTRIBUTES & set(schema.attributes))
        and (not schema.inputs or any("float32" in admits[slot.type_str] for slot in schema.outputs)),
    )


def result_type(type_: str, opset: int, domain: str, dtypes: Sequence[str | None]) -> str:
    """The element type of an operator's first output, as its schema says: one for all, or that of an input.

    ``dtypes``: those of the inputs. TypeError where it takes more to tell.
    """
    schema, position = signature(type_, opset, domain), 0
    if schema is not None:
        made = schema.output(0)
        if len(schema.admits[made]) == 1:
            return next(iter(schema.admits[made]))
        position = schema.inputs.index(made) if made in schema.inputs else len(dtypes)
    found = dtypes[position] if position < len(dtypes) else None
    if found is None:
        raise TypeError(f"cannot tell the element type of {type_}; pass dtype=")
    return found


def _elements(type_strs: Sequence[str]) -> frozenset[str]:
    inner = (text[len("tensor(") : -1].upper() for text in type_strs if text.startswith("tensor("))
    return frozenset(NAMES[onnx.TensorProto.DataType.Value(name)] for name in inner)
