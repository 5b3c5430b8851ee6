"""A ModelProto as the bytes of one file."""

from __future__ import annotations

import os

import onnx
from google.protobuf.message import EncodeError

from amp_transpiler.errors import ModelFileError
from amp_transpiler.files import put, write_files

#: protobuf's limit for one message, less room for what surrounds the tensors.
LIMIT = 2**31 - 2**24


def serialized(model: onnx.ModelProto) -> bytes:
    """The model's bytes, the same for the same model; ModelFileError beyond protobuf's 2 GB."""
    try:
        data: bytes = model.SerializeToString(deterministic=True)
    except (EncodeError, ValueError):
        raise _too_large(model.graph.name) from None
    return data


def check_size(name: str, size: int) -> None:
    """ModelFileError where a file of this size, with the model of this name in it, is one that protobuf does not
    read."""
    if size >= 2**31:
        raise _too_large(name)


def _too_large(name: str) -> ModelFileError:
    return ModelFileError(
        f"model '{name}' is larger than the 2 GB that one file can hold; write it with external_data=True "
        "(--external-data)"
    )


def write_model(model: onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Write one model file, whole or not at all."""
    write_files([(path, put(serialized(model)))])
