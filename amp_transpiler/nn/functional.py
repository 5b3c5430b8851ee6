"""Functions of variables: each adds standard ONNX operators to the current program.

Names and arguments are Paddle's (``paddle.nn.functional`` and ``paddle``). All take ``name``, the prefix of their
results' names. They raise ArgumentError (a ValueError) for element types and shapes that do not fit, and
ArgumentTypeError (a TypeError) for what is no variable.
"""

import typing as _typing

from amp_transpiler.lists.paddle import add_paddle_names as _add_paddle_names
from amp_transpiler.nn.activation_functions import (
    celu as celu,
    elu as elu,
    gelu as gelu,
    glu as glu,
    hardshrink as hardshrink,
    hardsigmoid as hardsigmoid,
    hardswish as hardswish,
    hardtanh as hardtanh,
    leaky_relu as leaky_relu,
    log_sigmoid as log_sigmoid,
    log_softmax as log_softmax,
    maxout as maxout,
    mish as mish,
    prelu as prelu,
    relu as relu,
    relu6 as relu6,
    selu as selu,
    sigmoid as sigmoid,
    silu as silu,
    softmax as softmax,
    softplus as softplus,
    softshrink as softshrink,
    softsign as softsign,
    swish as swish,
    tanh as tanh,
    tanhshrink as tanhshrink,
    thresholded_relu as thresholded_relu,
)
from amp_transpiler.nn.classification import (
    accuracy as accuracy,
    cross_entropy as cross_entropy,
    label_smooth as label_smooth,
    nll_loss as nll_loss,
    softmax_with_cross_entropy as softmax_with_cross_entropy,
    span_loss as span_loss,
)
from amp_transpiler.nn.conv_functions import (
    conv1d as conv1d,
    conv1d_transpose as conv1d_transpose,
    conv2d as conv2d,
    conv2d_transpose as conv2d_transpose,
    conv3d as conv3d,
    conv3d_transpose as conv3d_transpose,
)
from amp_transpiler.nn.creation import (
    arange as arange,
    assign as assign,
    detach as detach,
    full as full,
    full_like as full_like,
    ones as ones,
    ones_like as ones_like,
    zeros as zeros,
    zeros_like as zeros_like,
)
from amp_transpiler.nn.ctc_loss import ctc_greedy_decoder as ctc_greedy_decoder, ctc_loss as ctc_loss
from amp_transpiler.nn.elementwise_functions import (
    abs as abs,
    add as add,
    cast as cast,
    ceil as ceil,
    clip as clip,
    cos as cos,
    divide as divide,
    dropout as dropout,
    equal as equal,
    erf as erf,
    exp as exp,
    expm1 as expm1,
    floor as floor,
    greater_equal as greater_equal,
    greater_than as greater_than,
    isinf as isinf,
    isnan as isnan,
    less_equal as less_equal,
    less_than as less_than,
    log as log,
    log1p as log1p,
    log2 as log2,
    log10 as log10,
    logical_and as logical_and,
    logical_not as logical_not,
    logical_or as logical_or,
    maximum as maximum,
    minimum as minimum,
    multiply as multiply,
    neg as neg,
    not_equal as not_equal,
    pow as pow,
    reciprocal as reciprocal,
    round as round,
    rsqrt as rsqrt,
    scale as scale,
    sign as sign,
    sin as sin,
    sqrt as sqrt,
    square as square,
    subtract as subtract,
    where as where,
)
from amp_transpiler.nn.embeddings import functional_embedding as _embedding, functional_embedding_bag as _embedding_bag
from amp_transpiler.nn.indexing import (
    gather as gather,
    gather_nd as gather_nd,
    index_select as index_select,
    masked_select as masked_select,
    nonzero as nonzero,
    one_hot as one_hot,
    scatter as scatter,
    scatter_nd_add as scatter_nd_add,
    take_along_axis as take_along_axis,
    unique as unique,
)
from amp_transpiler.nn.linalg import (
    bmm as bmm,
    dot as dot,
    einsum as einsum,
    linear as linear,
    matmul as matmul,
    mm as mm,
    tril as tril,
    triu as triu,
)
from amp_transpiler.nn.losses import (
    bce_with_logits as bce_with_logits,
    binary_cross_entropy as binary_cross_entropy,
    binary_cross_entropy_with_logits as binary_cross_entropy_with_logits,
    kl_div as kl_div,
    l1_loss as l1_loss,
    mse_loss as mse_loss,
    smooth_l1_loss as smooth_l1_loss,
    square_error_cost as square_error_cost,
)
from amp_transpiler.nn.manipulation import (
    broadcast_to as broadcast_to,
    chunk as chunk,
    concat as concat,
    expand as expand,
    expand_as as expand_as,
    flatten as flatten,
    flip as flip,
    pad as pad,
    reshape as reshape,
    roll as roll,
    slice as slice,
    split as split,
    squeeze as squeeze,
    stack as stack,
    strided_slice as strided_slice,
    tile as tile,
    transpose as transpose,
    unbind as unbind,
    unsqueeze as unsqueeze,
    unstack as unstack,
)
from amp_transpiler.nn.norm_layers import functional_layer_norm as _layer_norm
from amp_transpiler.nn.number_functions import (
    all as all,
    any as any,
    equal_all as equal_all,
    floor_divide as floor_divide,
    isfinite as isfinite,
    linspace as linspace,
    mod as mod,
    numel as numel,
    outer as outer,
    sequence_mask as sequence_mask,
    shape as shape,
    t as t,
)
from amp_transpiler.nn.pooling import (
    adaptive_avg_pool1d as adaptive_avg_pool1d,
    adaptive_avg_pool2d as adaptive_avg_pool2d,
    adaptive_avg_pool3d as adaptive_avg_pool3d,
    adaptive_max_pool1d as adaptive_max_pool1d,
    adaptive_max_pool2d as adaptive_max_pool2d,
    adaptive_max_pool3d as adaptive_max_pool3d,
    avg_pool1d as avg_pool1d,
    avg_pool2d as avg_pool2d,
    avg_pool3d as avg_pool3d,
    global_avg_pool2d as global_avg_pool2d,
    global_max_pool2d as global_max_pool2d,
    max_pool1d as max_pool1d,
    max_pool2d as max_pool2d,
    max_pool3d as max_pool3d,
)
from amp_transpiler.nn.ranking_losses import (
    log_loss as log_loss,
    margin_ranking_loss as margin_ranking_loss,
    sigmoid_focal_loss as sigmoid_focal_loss,
    triplet_margin_loss as triplet_margin_loss,
)
from amp_transpiler.nn.reduction import (
    argmax as argmax,
    argmin as argmin,
    argsort as argsort,
    cosine_similarity as cosine_similarity,
    cumprod as cumprod,
    cumsum as cumsum,
    logsumexp as logsumexp,
    max as max,
    mean as mean,
    min as min,
    norm as norm,
    normalize as normalize,
    prod as prod,
    sort as sort,
    std as std,
    sum as sum,
    topk as topk,
    var as var,
)
from amp_transpiler.nn.vision import (
    grid_sample as grid_sample,
    interpolate as interpolate,
    pixel_shuffle as pixel_shuffle,
    unfold as unfold,
    upsample as upsample,
)

#: Named in their homes beside the layers of these names.
embedding, embedding_bag, layer_norm = _embedding, _embedding_bag, _layer_norm
_add_paddle_names(globals())

if not _typing.TYPE_CHECKING:  # which reads the imports: a name that is imported as itself is public
    __all__ = [name for name in globals() if not name.startswith("_")]
