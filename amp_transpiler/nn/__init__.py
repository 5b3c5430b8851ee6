"""Build a program layer by layer: layers with parameters, functions, initialisers, operators on variables."""

from amp_transpiler.lists.paddle import add_paddle_names
from amp_transpiler.nn import functional, initializer, math
from amp_transpiler.nn.attention_layers import multi_head_attention
from amp_transpiler.nn.conv_layers import conv1d, conv1d_transpose, conv2d, conv2d_transpose, conv3d, conv3d_transpose
from amp_transpiler.nn.crf import crf_decoding, linear_chain_crf
from amp_transpiler.nn.elementwise_functions import dropout
from amp_transpiler.nn.embeddings import embedding, embedding_bag
from amp_transpiler.nn.getter import custom_getter, float32_variable_storage_getter
from amp_transpiler.nn.layers import fc, prelu
from amp_transpiler.nn.norm_layers import batch_norm, group_norm, instance_norm, layer_norm
from amp_transpiler.nn.parameters import ParamAttr, create_parameter, data
from amp_transpiler.nn.pooling import pool2d
from amp_transpiler.nn.recurrent import gru, lstm

add_paddle_names(globals())

__all__ = [
    "ParamAttr",
    "batch_norm",
    "conv1d",
    "conv1d_transpose",
    "conv2d",
    "conv2d_transpose",
    "conv3d",
    "conv3d_transpose",
    "create_parameter",
    "crf_decoding",
    "custom_getter",
    "data",
    "dropout",
    "embedding",
    "embedding_bag",
    "fc",
    "float32_variable_storage_getter",
    "functional",
    "group_norm",
    "gru",
    "initializer",
    "instance_norm",
    "layer_norm",
    "linear_chain_crf",
    "lstm",
    "math",
    "multi_head_attention",
    "pool2d",
    "prelu",
]
