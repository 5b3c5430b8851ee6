"""Functions of variables: each adds standard ONNX operators to the current program.

Names and arguments are Paddle's (``paddle.nn.functional`` and ``paddle``). All take ``name``, the prefix of their
results' names. They raise ArgumentError (a ValueError) for element types and shapes that do not fit, and
ArgumentTypeError (a TypeError) for what is no variable.
"""

from amp_transpiler.lists.paddle import paddle_attributes
from amp_transpiler.nn.activation import (
    celu,
    elu,
    gelu,
    glu,
    hardshrink,
    hardsigmoid,
    hardswish,
    hardtanh,
    leaky_relu,
    log_sigmoid,
    log_softmax,
    maxout,
    mish,
    prelu,
    relu,
    relu6,
    selu,
    sigmoid,
    silu,
    softmax,
    softplus,
    softshrink,
    softsign,
    swish,
    tanh,
    tanhshrink,
    thresholded_relu,
)
from amp_transpiler.nn.classification import (
    accuracy,
    cross_entropy,
    label_smooth,
    nll_loss,
    softmax_with_cross_entropy,
    span_loss,
)
from amp_transpiler.nn.conv import functional_conv1d as conv1d
from amp_transpiler.nn.conv import functional_conv1d_transpose as conv1d_transpose
from amp_transpiler.nn.conv import functional_conv2d as conv2d
from amp_transpiler.nn.conv import functional_conv2d_transpose as conv2d_transpose
from amp_transpiler.nn.conv import functional_conv3d as conv3d
from amp_transpiler.nn.conv import functional_conv3d_transpose as conv3d_transpose
from amp_transpiler.nn.creation import arange, assign, full, full_like, ones, ones_like, zeros, zeros_like
from amp_transpiler.nn.ctc import ctc_loss
from amp_transpiler.nn.elementwise import (
    abs,
    add,
    cast,
    ceil,
    clip,
    cos,
    divide,
    dropout,
    equal,
    erf,
    exp,
    expm1,
    floor,
    greater_equal,
    greater_than,
    isinf,
    isnan,
    less_equal,
    less_than,
    log,
    log1p,
    log2,
    log10,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    multiply,
    neg,
    not_equal,
    pow,
    reciprocal,
    round,
    rsqrt,
    scale,
    sign,
    sin,
    sqrt,
    square,
    subtract,
    where,
)
from amp_transpiler.nn.indexing import (
    gather,
    gather_nd,
    index_select,
    one_hot,
    scatter,
    scatter_nd_add,
    take_along_axis,
)
from amp_transpiler.nn.layers import functional_embedding as embedding
from amp_transpiler.nn.linalg import bmm, dot, einsum, linear, matmul, mm
from amp_transpiler.nn.losses import (
    bce_with_logits,
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    kl_div,
    l1_loss,
    mse_loss,
    smooth_l1_loss,
    square_error_cost,
)
from amp_transpiler.nn.manipulation import (
    broadcast_to,
    chunk,
    concat,
    expand,
    expand_as,
    flatten,
    flip,
    pad,
    reshape,
    roll,
    slice,
    split,
    squeeze,
    stack,
    strided_slice,
    tile,
    transpose,
    tril,
    triu,
    unbind,
    unsqueeze,
    unstack,
)
from amp_transpiler.nn.norm import functional_layer_norm as layer_norm
from amp_transpiler.nn.pooling import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    adaptive_max_pool1d,
    adaptive_max_pool2d,
    adaptive_max_pool3d,
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    global_avg_pool2d,
    global_max_pool2d,
    max_pool1d,
    max_pool2d,
    max_pool3d,
)
from amp_transpiler.nn.reduction import (
    argmax,
    argmin,
    argsort,
    cosine_similarity,
    cumsum,
    logsumexp,
    max,
    mean,
    min,
    norm,
    normalize,
    prod,
    sort,
    std,
    sum,
    topk,
    var,
)
from amp_transpiler.nn.vision import interpolate, pixel_shuffle, upsample

__getattr__ = paddle_attributes("amp_transpiler.nn.functional")

__all__ = [
    "abs", "accuracy", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
    "adaptive_max_pool2d", "adaptive_max_pool3d", "add", "arange", "argmax", "argmin", "argsort", "assign",
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "bce_with_logits", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "bmm", "broadcast_to", "cast", "ceil", "celu", "chunk", "clip", "concat",
    "conv1d", "conv1d_transpose", "conv2d", "conv2d_transpose", "conv3d", "conv3d_transpose", "cos",
    "cosine_similarity", "cross_entropy", "ctc_loss", "cumsum", "divide", "dot", "dropout", "einsum", "elu",
    "embedding", "equal", "erf", "exp", "expand", "expand_as", "expm1", "flatten", "flip", "floor", "full",
    "full_like", "gather", "gather_nd", "gelu", "global_avg_pool2d", "global_max_pool2d", "glu", "greater_equal",
    "greater_than", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "index_select", "interpolate", "isinf",
    "isnan", "kl_div", "l1_loss", "label_smooth", "layer_norm", "leaky_relu", "less_equal", "less_than", "linear",
    "log", "log10", "log1p", "log2", "log_sigmoid", "log_softmax", "logical_and", "logical_not", "logical_or",
    "logsumexp", "matmul", "max", "max_pool1d", "max_pool2d", "max_pool3d", "maximum", "maxout", "mean", "min",
    "minimum", "mish", "mm", "mse_loss", "multiply", "neg", "nll_loss", "norm", "normalize", "not_equal", "one_hot",
    "ones", "ones_like", "pad", "pixel_shuffle", "pow", "prelu", "prod", "reciprocal", "relu", "relu6", "reshape",
    "roll", "round", "rsqrt", "scale", "scatter", "scatter_nd_add", "selu", "sigmoid", "sign", "silu", "sin", "slice",
    "smooth_l1_loss", "softmax", "softmax_with_cross_entropy", "softplus", "softshrink", "softsign", "sort",
    "span_loss", "split", "sqrt", "square", "square_error_cost", "squeeze", "stack", "std", "strided_slice",
    "subtract", "sum", "swish", "take_along_axis", "tanh", "tanhshrink", "thresholded_relu", "tile", "topk",
    "transpose", "tril", "triu", "unbind", "unsqueeze", "unstack", "upsample", "var", "where", "zeros", "zeros_like",
]  # fmt: skip
