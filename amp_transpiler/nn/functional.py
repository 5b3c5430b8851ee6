"""Functions of variables: each adds standard ONNX operators to the current program.

All raise ArgumentError (a ValueError) for element types and shapes that do not fit, and ArgumentTypeError (a
TypeError) for what is no variable.
"""

from .ctc import ctc_loss
from .elementwise import (
    cast,
    dropout,
    exp,
    gelu,
    log,
    log_softmax,
    matmul,
    mean,
    pow,
    relu,
    sigmoid,
    softmax,
    sqrt,
    sum,
    tanh,
    where,
)
from .losses import accuracy, bce_with_logits, cross_entropy, kl_div, mse_loss, span_loss
from .manipulation import concat, flatten, gather, reshape, slice, split, squeeze, transpose, unsqueeze
from .pooling import adaptive_avg_pool2d, avg_pool2d, global_avg_pool2d, global_max_pool2d, max_pool2d

__all__ = [
    "accuracy", "adaptive_avg_pool2d", "avg_pool2d", "bce_with_logits", "cast", "concat", "cross_entropy",
    "ctc_loss", "dropout", "exp", "flatten", "gather", "gelu", "global_avg_pool2d", "global_max_pool2d", "kl_div",
    "log", "log_softmax", "matmul", "max_pool2d", "mean", "mse_loss", "pow", "relu", "reshape", "sigmoid", "slice",
    "softmax", "span_loss", "split", "sqrt", "squeeze", "sum", "tanh", "transpose", "unsqueeze", "where",
]  # fmt: skip
