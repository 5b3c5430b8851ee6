"""Convolutions and transposed convolutions over one, two and three axes.

Each layer ``conv<n>d`` and ``conv<n>d_transpose`` creates its filters and bias; the functions of the same names in
:mod:`amp.nn.functional` take them.
"""

from __future__ import annotations

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.nn.activation_functions import activate, check_activation
from amp_transpiler.nn.building import Builder, describe, layer_name, whole
from amp_transpiler.nn.calls import family
from amp_transpiler.nn.conv_functions import Attributes, applied, groups_of, sliding, transposed
from amp_transpiler.nn.initializer import Constant, Initializer, KaimingNormal, XavierUniform
from amp_transpiler.nn.parameters import Attr, parameter, required
from amp_transpiler.nn.windows import Image, Padding, Sizes, image, numbers, padding


def _kernel_of(
    at: Image, output_size: Sizes | None, stride: Sizes, pad: Padding, dilation: Sizes, rank: int
) -> list[int]:
    """The kernel that makes ``output_size`` of the image's sizes, where no filter_size is given."""
    call = at.call
    if output_size is None:
        raise ArgumentError(f"{call}: one of filter_size and output_size must be given")
    strides, dilations = numbers(call, "stride", stride, rank), numbers(call, "dilation", dilation, rank)
    if isinstance(pad, str):
        raise ArgumentError(f"{call}: without a filter_size, padding must be given in numbers, not as {pad!r}")
    pads: list[int] = padding(at, pad, [1] * rank, strides, dilations)["pads"]
    wanted = numbers(call, "output_size", output_size, rank)
    sizes = at.known_sizes()
    kernel = [
        (wanted[i] - (sizes[i] - 1) * strides[i] + pads[i] + pads[rank + i] - 1) // dilations[i] + 1
        for i in range(rank)
    ]
    if min(kernel) < 1:
        raise ArgumentError(f"{call}: no filter makes output_size={output_size!r} of {describe(at.x)}")
    return kernel


def _layer(
    type_: str,
    at: Image,
    attrs: Attributes,
    shape: list[int],
    filters: int,
    start: Initializer,
    param_attr: Attr,
    bias_attr: Attr,
    act: str | None,
    name: str | None,
) -> Variable:
    call = at.call
    check_activation(call, act)
    required(call, "param_attr", param_attr)
    name = layer_name(call, name)
    weights = parameter(call, f"{name}.w_0", shape, at.x.dtype, param_attr, start)
    bias = None
    if bias_attr is not False:
        bias = parameter(call, f"{name}.b_0", [filters], at.x.dtype, bias_attr, Constant())
    return activate(applied(Builder(call, name), type_, at, weights, bias, attrs), act, name)


def _convolution(
    rank: int,
    x: Variable,
    num_filters: int,
    filter_size: Sizes,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int | None = 1,
    param_attr: Attr = None,
    bias_attr: Attr = None,
    act: str | None = None,
    name: str | None = None,
    data_format: str | None = None,
) -> Variable:
    """{0}-D convolution (cross-correlation) with a bias.

    ``x``: float [batch, channels, *sizes], channels known; with ``data_format`` "NLC", "NHWC" or "NDHWC" its channels
    come last, and so do the result's (ONNX has its channels first: a transposition on either side). ``padding``: an
    integer, one for each axis, two for each axis (before, behind, before, …), pairs for each dimension, "VALID" (none)
    or "SAME" (ceil(size / stride) positions). Filters w_0 [num_filters, channels / groups, *filter_size], in this order
    for every layout, start Kaiming normal (standard deviation sqrt(2 / fan in), as Paddle's where there is one group),
    the bias b_0 [num_filters] at 0. ArgumentError: unknown channels, groups that do not divide them, a filter larger
    than the padded image.
    """
    call = f"conv{rank}d"
    at = image(call, x, rank, data_format)
    filters, kernel = whole(call, "num_filters", num_filters), numbers(call, "filter_size", filter_size, rank)
    group = groups_of(call, groups, at.channels, filters, x)
    attrs = sliding(at, kernel, stride, padding, dilation, group)
    shape = [filters, at.channels // group, *kernel]
    return _layer("Conv", at, attrs, shape, filters, KaimingNormal(), param_attr, bias_attr, act, name)


def _transposed_convolution(
    rank: int,
    x: Variable,
    num_filters: int,
    output_size: Sizes | None = None,
    filter_size: Sizes | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int | None = 1,
    param_attr: Attr = None,
    bias_attr: Attr = None,
    act: str | None = None,
    name: str | None = None,
    data_format: str | None = None,
) -> Variable:
    """{0}-D transposed convolution (the gradient of :func:`conv{0}d` with respect to its input) with a bias.

    Each axis becomes ``(size - 1) * stride - padding + dilation * (filter_size - 1) + 1`` long, padding on both sides
    together; ``output_size`` asks for up to stride - 1 more, which needs known sizes, or stands for ``filter_size``
    where that is left out. Filters w_0 [channels, num_filters / groups, *filter_size] start Xavier uniform, the bias
    b_0 [num_filters] at 0. Other arguments and ArgumentError: as :func:`conv{0}d`, and an ``output_size`` out of reach.
    """
    call = f"conv{rank}d_transpose"
    at = image(call, x, rank, data_format)
    filters = whole(call, "num_filters", num_filters)
    group = groups_of(call, groups, at.channels, filters, x)
    if filter_size is None:
        kernel = _kernel_of(at, output_size, stride, padding, dilation, rank)
    else:
        kernel = numbers(call, "filter_size", filter_size, rank)
    attrs = transposed(at, kernel, stride, padding, dilation, group, 0, output_size)
    shape = [at.channels, filters // group, *kernel]
    return _layer("ConvTranspose", at, attrs, shape, filters, XavierUniform(), param_attr, bias_attr, act, name)


_carries = paddle_arguments("nn.layer", "nn.cudnn")
conv1d, conv2d, conv3d = (_carries(family(_convolution, rank, f"conv{rank}d")) for rank in (1, 2, 3))
conv1d_transpose, conv2d_transpose, conv3d_transpose = (
    _carries(family(_transposed_convolution, rank, f"conv{rank}d_transpose")) for rank in (1, 2, 3)
)
