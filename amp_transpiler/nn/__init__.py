"""Build a program layer by layer: layers with parameters, functions, initialisers, operators on variables."""

from ..lists.paddle import paddle_attributes
from . import functional, initializer, math
from .attention import multi_head_attention
from .conv import conv1d, conv1d_transpose, conv2d, conv2d_transpose, conv3d, conv3d_transpose
from .elementwise import dropout
from .getter import custom_getter, float32_variable_storage_getter
from .layers import embedding, fc, prelu
from .norm import batch_norm, group_norm, instance_norm, layer_norm
from .parameters import ParamAttr, create_parameter, data
from .pooling import pool2d
from .recurrent import gru, lstm

__getattr__ = paddle_attributes("amp_transpiler.nn")

__all__ = [
    "ParamAttr", "batch_norm", "conv1d", "conv1d_transpose", "conv2d", "conv2d_transpose", "conv3d",
    "conv3d_transpose", "create_parameter", "custom_getter", "data", "dropout", "embedding", "fc",
    "float32_variable_storage_getter", "functional", "group_norm", "gru", "initializer", "instance_norm",
    "layer_norm", "lstm", "math", "multi_head_attention", "pool2d", "prelu",
]  # fmt: skip
