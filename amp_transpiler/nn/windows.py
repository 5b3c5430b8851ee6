"""What layers and functions that slide a window over an image share: layout, sizes along each axis, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.nn.building import FLOATING, Builder, describe, fixed, moved, variable, whole
from amp_transpiler.option_checks import choice

#: A size along every axis, or one for each.
Sizes = int | Sequence[int]
#: Paddings, by axis: see :func:`padding`.
Padding = int | str | Sequence[int] | Sequence[Sequence[int]]
#: Names of the layouts of an image of 1, 2 and 3 axes: channels first, channels last.
LAYOUTS = {1: ("NCL", "NLC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}
_MORE = {1: "", 2: " or two", 3: " or three"}


@dataclass(frozen=True)
class Image:
    """A variable [batch, channels, axis, …], or [batch, axis, …, channels] where ``channels_last``."""

    call: str
    x: Variable
    channels_last: bool

    @property
    def first_axis(self) -> int:
        """The dimension of the first of the image's axes."""
        return 1 if self.channels_last else 2

    @property
    def sizes(self) -> list[int | str | None]:
        """The size along each axis of the image."""
        shape = list(self.x.shape or ())
        return shape[1:-1] if self.channels_last else shape[2:]

    @property
    def channels(self) -> int:
        """The number of channels; ArgumentError where it is not fixed."""
        return fixed(self.call, "x", self.x, -1 if self.channels_last else 1)

    def known_sizes(self) -> list[int]:
        """:attr:`sizes`; ArgumentError where one is not fixed."""
        return [fixed(self.call, "x", self.x, self.first_axis + i) for i in range(len(self.sizes))]

    def channels_first(self, put: Builder) -> Variable:
        """The image in ONNX's layout."""
        return moved(put, self.x, len(self.sizes) + 1, 1) if self.channels_last else self.x

    def as_given(self, put: Builder, y: Variable) -> Variable:
        """A result in ONNX's layout brought to that of the image."""
        return moved(put, y, 1, len(self.sizes) + 1) if self.channels_last else y


def image(call: str, x: Variable, rank: int, data_format: str | None = None) -> Image:
    """``x`` as an image of ``rank`` axes; ArgumentError for a layout of another name."""
    variable(call, "x", x, dtypes=FLOATING, rank=rank + 2)
    return Image(call, x, channels_last(call, data_format, rank))


def channels_last(call: str, data_format: str | None, rank: int, argument: str = "data_format") -> bool:
    """Whether ``data_format`` names the layout with its channels last; None is that with its channels first."""
    first, last = LAYOUTS[rank]
    return data_format is not None and choice(f"{call}: {argument}", data_format, (first, last)) == last


def per_axis(value: Any, rank: int) -> list[Any]:
    """What was given for each axis, or once for all."""
    return list(value) if isinstance(value, (list, tuple)) else [value] * rank


def numbers(call: str, argument: str, value: Any, rank: int, minimum: int = 1) -> list[int]:
    """One integer for every axis, or one for each of ``rank``, as ``rank`` of them."""
    items = per_axis(value, rank)
    if len(items) != rank:
        raise ArgumentError(f"{call}: {argument} must be one integer{_MORE[rank]}, not {value!r}")
    return [whole(call, argument, item, minimum) for item in items]


def padding(
    at: Image, value: Any, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> dict[str, Any]:
    """The ONNX attribute that stands for ``value``: ``pads``, or ``auto_pad`` where they hang on unknown sizes.

    ``value``: an integer; one for each axis; two for each axis (before, behind, before, …); a pair for each dimension
    of the image, those of batch and channels [0, 0]; "VALID" for none; "SAME", which gives ceil(size / stride)
    positions and puts an odd element behind.
    """
    rank = len(kernel)
    if not isinstance(value, str):
        return {"pads": _in_numbers(at, value, rank)}
    name = value.upper()
    if name not in ("SAME", "VALID"):
        raise ArgumentError(f'{at.call}: padding={value!r}; it is given in numbers, or as "SAME" or "VALID"')
    if name == "VALID":
        return {"pads": [0] * 2 * rank}
    if any(d != 1 for d in dilations):
        raise ArgumentError(f'{at.call}: padding="SAME" goes with dilation 1, not {list(dilations)}; give numbers')
    total = []
    for size, window, stride in zip(at.sizes, kernel, strides, strict=True):
        if stride == 1:
            total.append(window - 1)
        elif isinstance(size, int):
            total.append(max((-(-size // stride) - 1) * stride + window - size, 0))
        else:
            return {"auto_pad": "SAME_UPPER"}
    return {"pads": [t // 2 for t in total] + [t - t // 2 for t in total]}


def _in_numbers(at: Image, value: Any, rank: int) -> list[int]:
    """Padding before each axis, then behind each."""
    call = at.call
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)):
        pairs = [numbers(call, "padding", item, 2, 0) for item in value]
        start = at.first_axis
        if len(pairs) != rank + 2 or any(map(any, pairs[:start] + pairs[start + rank :])):
            raise ArgumentError(
                f"{call}: padding in pairs has one for each of the {rank + 2} dimensions, [0, 0] for "
                f"batch and channels, not {value!r}"
            )
        value = [number for pair in pairs[start : start + rank] for number in pair]
    if isinstance(value, (list, tuple)) and len(value) == 2 * rank:
        each = [whole(call, "padding", item, 0) for item in value]
        return each[::2] + each[1::2]
    return numbers(call, "padding", value, rank, 0) * 2


def check_fit(at: Image, pads: Sequence[int] | None, kernel: Sequence[int], dilations: Sequence[int]) -> None:
    """ArgumentError where a window is larger than the padded image; nothing where the padding is not known yet."""
    if pads is None:
        return
    rank = len(kernel)
    for i, size in enumerate(at.sizes):
        window = dilations[i] * (kernel[i] - 1) + 1
        if isinstance(size, int) and size + pads[i] + pads[rank + i] < window:
            raise ArgumentError(
                f"{at.call}: a window of {window} does not fit dimension {at.first_axis + i} of "
                f"{describe(at.x)} padded by {pads[i]} and {pads[rank + i]}"
            )


def output_sizes(at: Image, value: Any, natural: Sequence[int], strides: Sequence[int]) -> list[int]:
    """How much larger than ``natural`` a transposed convolution is asked to make each axis."""
    wanted = numbers(at.call, "output_size", value, len(natural))
    extra = [size - n for size, n in zip(wanted, natural, strict=True)]
    if any(not 0 <= more < stride for more, stride in zip(extra, strides, strict=True)):
        raise ArgumentError(
            f"{at.call}: output_size={value!r} is out of reach: it can be {list(natural)}, or less "
            f"than a stride of {list(strides)} above that"
        )
    return extra
