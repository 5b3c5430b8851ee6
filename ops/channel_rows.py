"""Images by channel: [C, N * positions], a row for each channel, of a tensor [N, C, ...].

Batch normalisation adds up over rows, and a convolution with one position multiplies them. What is elementwise, or
treats each channel of each image by itself, does not care which of the two axes comes first. So on a GPU place what was
made in rows stays in rows; where a reader wants images it is turned back, and where none does the lowering leaves that
out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ops.common import size_of


def by_channel(e: Emitter, value: Value) -> Value:
    """[N, C, ...] as [C, N * positions]. Made once for each tensor."""
    key = f"{value.name} by channel"
    if key not in e.shared:
        batch, channels, *spatial = size_of(value)
        positions = math.prod(spatial)
        split = e.reshape(value, (batch, channels, positions))
        turned = split if batch == 1 else e.transpose(split, [1, 0, 2])
        e.shared[key] = (e.reshape(turned, (channels, batch * positions)),)
    return e.shared[key][0]


def is_by_channel(e: Emitter, value: Value) -> bool:
    """Whether :func:`by_channel` has it already."""
    return f"{value.name} by channel" in e.shared


def by_image(e: Emitter, rows: Value, shape: Sequence[int]) -> Value:
    """The way back from :func:`by_channel`, which then gives these rows. It lies in rows, of a rank from 3 on."""
    batch, channels, *spatial = shape
    split = e.reshape(rows, (channels, batch, math.prod(spatial)))
    value = e.reshape(split if batch == 1 else e.transpose(split, [1, 0, 2]), shape)
    e.shared[f"{value.name} by channel"] = (rows,)
    if spatial:
        e.shared[_made_so(value)] = (rows,)
    return value


def lies_in_rows(e: Emitter, value: Value | None) -> bool:
    """Whether a tensor was made in rows."""
    return value is not None and _made_so(value) in e.shared


def _made_so(value: Value) -> str:
    return f"{value.name} was made by channel"


def exchanged(e: Emitter, value: Value) -> Value:
    """[N, C, ...] as [C, N, ...]."""
    batch, channels, *spatial = size_of(value)
    key = f"{value.name} with channels first"
    if key not in e.shared:
        turned = e.reshape(by_channel(e, value), (channels, batch, *spatial))
        e.shared[key] = (turned,)
        e.shared[f"{turned.name} with images first"] = (value,)
    return e.shared[key][0]


def restored(e: Emitter, turned: Value) -> Value:
    """[N, C, ...] of [C, N, ...]; it lies in rows."""
    key = f"{turned.name} with images first"
    if key not in e.shared:
        channels, batch, *spatial = size_of(turned)
        rows = e.reshape(turned, (channels, batch * math.prod(spatial)))
        image = by_image(e, rows, (batch, channels, *spatial))
        e.shared[key] = (image,)
        e.shared[f"{image.name} with channels first"] = (turned,)
    return e.shared[key][0]
