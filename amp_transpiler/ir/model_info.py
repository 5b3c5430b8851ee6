"""What a model file says besides its graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from amp_transpiler.lists import TARGET_IR_VERSION, TARGET_OPSET

#: The first format version in which initializers need not be graph inputs.
FREE_INITIALIZERS = 4


@dataclass
class ModelInfo:
    """What a model file says besides its graph; kept so that it leaves as it came."""

    ir_version: int = TARGET_IR_VERSION
    opsets: dict[str, int] = field(default_factory=lambda: {"": TARGET_OPSET})
    producer_name: str = "amp_transpiler"
    producer_version: str = ""
    domain: str = ""
    model_version: int = 0
    doc: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    graph_doc: str = ""
    graph_metadata: dict[str, str] = field(default_factory=dict)
    functions: list[Any] = field(default_factory=list)  # FunctionProto, as they came
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of the file, by protobuf name
