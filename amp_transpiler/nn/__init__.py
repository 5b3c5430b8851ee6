"""Build a program layer by layer: layers with parameters, functions, initialisers, operators on variables."""

from . import functional, initializer, math
from .attention import multi_head_attention
from .elementwise import dropout
from .layers import batch_norm, conv2d, embedding, fc, layer_norm
from .parameters import create_parameter, data
from .recurrent import gru, lstm

__all__ = [
    "batch_norm", "conv2d", "create_parameter", "data", "dropout", "embedding", "fc", "functional", "gru",
    "initializer", "layer_norm", "lstm", "math", "multi_head_attention",
]  # fmt: skip
