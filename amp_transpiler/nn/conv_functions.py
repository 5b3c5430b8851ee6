"""Convolutions and transposed convolutions by filters that are given: the functions of :mod:`amp.nn.functional`.

Arguments are those of the layers, see :mod:`amp_transpiler.nn.conv_layers`.
"""

from __future__ import annotations

from typing import Any

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.nn.building import Builder, appending, describe, fixed, variable, whole
from amp_transpiler.nn.calls import member
from amp_transpiler.nn.windows import Image, Padding, Sizes, check_fit, image, numbers, output_sizes, padding

Attributes = dict[str, Any]


def groups_of(call: str, groups: int | None, channels: int, filters: int, x: Variable) -> int:
    """The number of groups, which divides the channels of ``x`` and the filters."""
    count = 1 if groups is None else whole(call, "groups", groups)
    if channels % count or filters % count:
        raise ArgumentError(
            f"{call}: groups={count} must divide the {channels} channels of '{x.name}' and the {filters} filters"
        )
    return count


def sliding(at: Image, kernel: list[int], stride: Sizes, pad: Padding, dilation: Sizes, group: int) -> Attributes:
    """The attributes of Conv."""
    rank = len(kernel)
    strides = numbers(at.call, "stride", stride, rank)
    dilations = numbers(at.call, "dilation", dilation, rank)
    attrs = padding(at, pad, kernel, strides, dilations)
    check_fit(at, attrs.get("pads"), kernel, dilations)
    return {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "group": group, **attrs}


def transposed(
    at: Image,
    kernel: list[int],
    stride: Sizes,
    pad: Padding,
    dilation: Sizes,
    group: int,
    extra: Sizes,
    output_size: Sizes | None,
) -> Attributes:
    """The attributes of ConvTranspose."""
    call, rank = at.call, len(kernel)
    strides = numbers(call, "stride", stride, rank)
    dilations = numbers(call, "dilation", dilation, rank)
    attrs = padding(at, pad, kernel, strides, dilations)
    if "pads" not in attrs:
        raise ArgumentError(f'{call}: padding="SAME" with a stride needs the sizes of {describe(at.x)}; give numbers')
    pads: list[int] = attrs["pads"]
    more = numbers(call, "output_padding", extra, rank, 0)
    if output_size is not None:
        if any(more):
            raise ArgumentError(f"{call}: output_padding and output_size say the same thing; give one of them")
        natural = [
            (size - 1) * strides[i] - pads[i] - pads[rank + i] + dilations[i] * (kernel[i] - 1) + 1
            for i, size in enumerate(at.known_sizes())
        ]
        more = output_sizes(at, output_size, natural, strides)
    return {
        "kernel_shape": kernel,
        "strides": strides,
        "dilations": dilations,
        "group": group,
        "output_padding": more,
        **attrs,
    }


def applied(
    put: Builder, type_: str, at: Image, weights: Variable, bias: Variable | None, attrs: Attributes
) -> Variable:
    """The operator ``type_`` on an image, in the layout in which it came."""
    inputs = [at.channels_first(put), weights, *([] if bias is None else [bias])]
    return at.as_given(put, put(type_, *inputs, **attrs))


def _filters(call: str, at: Image, weight: Variable, rank: int, groups: int | None, own: int) -> tuple[list[int], int]:
    """The kernel's sizes and the number of groups of ``weight``, whose dimension ``own`` belongs to the channels."""
    variable(call, "weight", weight, dtypes=(str(at.x.dtype),), rank=rank + 2)
    kernel = [fixed(call, "weight", weight, 2 + i) for i in range(rank)]
    group = groups_of(call, groups, at.channels, fixed(call, "weight", weight, 0), at.x)
    wanted = at.channels // group if own else at.channels
    if fixed(call, "weight", weight, own) != wanted:
        raise ArgumentError(
            f"{call}: weight {describe(weight)} must have {wanted} in dimension {own}: x "
            f"{describe(at.x)} has {at.channels} channels in {group} groups"
        )
    return kernel, group


def _convolution(
    rank: int,
    x: Variable,
    weight: Variable,
    bias: Variable | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int | None = 1,
    data_format: str | None = None,
    *,
    name: str | None = None,
) -> Variable:
    """{0}-D convolution of ``x`` with given filters ``weight`` [filters, channels / groups, …] and ``bias`` [filters].

    Other arguments as :func:`amp.nn.conv{0}d`.
    """
    call = f"conv{rank}d"
    at = image(call, x, rank, data_format)
    kernel, group = _filters(call, at, weight, rank, groups, 1)
    attrs = sliding(at, kernel, stride, padding, dilation, group)
    return applied(appending(call), "Conv", at, weight, bias, attrs)


def _transposed_convolution(
    rank: int,
    x: Variable,
    weight: Variable,
    bias: Variable | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    groups: int | None = 1,
    dilation: Sizes = 1,
    data_format: str | None = None,
    output_size: Sizes | None = None,
    *,
    name: str | None = None,
) -> Variable:
    """{0}-D transposed convolution of ``x`` with given filters ``weight`` [channels, filters / groups, …].

    ``bias``: [filters]. ``output_padding``: elements more behind each axis. Other arguments as
    :func:`amp.nn.conv{0}d_transpose`.
    """
    call = f"conv{rank}d_transpose"
    at = image(call, x, rank, data_format)
    kernel, group = _filters(call, at, weight, rank, groups, 0)
    attrs = transposed(at, kernel, stride, padding, dilation, group, output_padding, output_size)
    return applied(appending(call), "ConvTranspose", at, weight, bias, attrs)


conv1d, conv2d, conv3d = (member(_convolution, rank, f"conv{rank}d") for rank in (1, 2, 3))
conv1d_transpose, conv2d_transpose, conv3d_transpose = (
    member(_transposed_convolution, rank, f"conv{rank}d_transpose") for rank in (1, 2, 3)
)
