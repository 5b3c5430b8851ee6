"""Operators that ONNX's reference evaluator (1.23) gets wrong or cannot do, written out in numpy.

ConvTranspose: groups with several channels. MaxPool: indices where every stride is 1. AveragePool: ceil_mode, which
it lets pad in front too. GlobalMaxPool: one spatial axis. GridSample: places in float64. RotaryEmbedding, Inverse:
those of onnxruntime.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_grid_sample import GridSample as _GridSample

Array = np.ndarray[Any, Any]


def everywhere(conditions: list[Array]) -> Array:
    """Where all of these conditions, one an axis, hold."""
    return np.all(np.broadcast_arrays(*conditions), axis=0)


class _Windowed(OpRun):
    """Attributes of a sliding window, and the input index that each output position reads at each tap."""

    op_domain = ""

    def numbers(self, name: str, rank: int, default: int) -> list[int]:
        return list(getattr(self, name, None) or [default] * rank)

    def sizes(self, spatial: tuple[int, ...], kernel: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Output sizes and padding before and behind, by the pooling operators' formulas."""
        rank = len(spatial)
        strides, dilations = self.numbers("strides", rank, 1), self.numbers("dilations", rank, 1)
        pads = self.numbers("pads", 2 * rank, 0)
        auto_pad = getattr(self, "auto_pad", None) or "NOTSET"
        outs, begins, ends = [], [], []
        for i, n in enumerate(spatial):
            reach = dilations[i] * (kernel[i] - 1) + 1
            begin, end = pads[i], pads[rank + i]
            if auto_pad.startswith("SAME"):
                out = -(-n // strides[i])
                total = max((out - 1) * strides[i] + reach - n, 0)
                begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
                end = total - begin
            else:
                if auto_pad == "VALID":
                    begin = end = 0
                room = n + begin + end - reach
                out = room // strides[i] + 1
                if getattr(self, "ceil_mode", 0) and room % strides[i] and out * strides[i] < n + begin:
                    out += 1  # a window that starts in the padding behind does not count
            outs.append(out)
            begins.append(begin)
            ends.append(end)
        return outs, begins, ends

    def taps(self, spatial: tuple[int, ...], kernel: list[int], outs: list[int], begins: list[int]) -> Any:
        """For each tap: the coordinates (one index array per axis, broadcasting) that the outputs read."""
        rank = len(spatial)
        strides, dilations = self.numbers("strides", rank, 1), self.numbers("dilations", rank, 1)
        for tap in itertools.product(*(range(k) for k in kernel)):
            axes = [np.arange(outs[i]) * strides[i] + tap[i] * dilations[i] - begins[i] for i in range(rank)]
            yield tap, np.ix_(*axes)


class MaxPool(_Windowed):
    def _run(self, x: Array, **_: Any) -> tuple[Array, ...]:
        spatial, kernel = x.shape[2:], list(self.kernel_shape)
        outs, begins, _ends = self.sizes(spatial, kernel)
        best = np.full((*x.shape[:2], *outs), -np.inf)
        where = np.zeros(best.shape, np.int64)
        first = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * len(spatial)) * int(np.prod(spatial))
        for _tap, at in self.taps(spatial, kernel, outs, begins):
            inside = everywhere([(a >= 0) & (a < n) for a, n in zip(at, spatial, strict=True)])
            at = tuple(np.clip(a, 0, n - 1) for a, n in zip(at, spatial, strict=True))
            values = np.where(inside, x[(slice(None), slice(None), *at)].astype(np.float64), -np.inf)
            flat = first + sum(a * int(np.prod(spatial[i + 1 :])) for i, a in enumerate(at))
            better = values > best
            best, where = np.where(better, values, best), np.where(better, flat, where)
        y = best.astype(x.dtype)
        return (y, where) if len(self.output) > 1 else (y,)


class AveragePool(_Windowed):
    def _run(self, x: Array, **_: Any) -> tuple[Array, ...]:
        spatial, kernel = x.shape[2:], list(self.kernel_shape)
        outs, begins, ends = self.sizes(spatial, kernel)
        total, count = np.zeros((*x.shape[:2], *outs)), np.zeros(outs)
        include = bool(getattr(self, "count_include_pad", 0))
        for _tap, at in self.taps(spatial, kernel, outs, begins):
            inside = everywhere([(a >= 0) & (a < n) for a, n in zip(at, spatial, strict=True)])
            padded = everywhere([a < n + end for a, n, end in zip(at, spatial, ends, strict=True)])
            at = tuple(np.clip(a, 0, n - 1) for a, n in zip(at, spatial, strict=True))
            total += np.where(inside, x[(slice(None), slice(None), *at)].astype(np.float64), 0.0)
            count += padded if include else inside
        return ((total / count).astype(x.dtype),)


class GlobalMaxPool(OpRun):
    op_domain = ""

    def _run(self, x: Array) -> tuple[Array, ...]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class ConvTranspose(_Windowed):
    def _run(self, x: Array, w: Array, b: Array | None = None, **_: Any) -> tuple[Array, ...]:
        rank, group = x.ndim - 2, int(getattr(self, "group", None) or 1)
        kernel, ins = list(w.shape[2:]), list(x.shape[2:])
        strides, dilations = self.numbers("strides", rank, 1), self.numbers("dilations", rank, 1)
        extra = self.numbers("output_padding", rank, 0)
        outs, begins = self._target(rank, ins, kernel, strides, dilations, extra)
        high = [
            max(n, (i - 1) * s + (k - 1) * d + 1 - b0)
            for n, i, s, k, d, b0 in zip(outs, ins, strides, kernel, dilations, begins, strict=True)
        ]
        full = np.zeros((x.shape[0], group * w.shape[1], *[h + b0 for h, b0 in zip(high, begins, strict=True)]))
        xg = x.astype(np.float64).reshape(x.shape[0], group, x.shape[1] // group, *ins)
        wg = w.astype(np.float64).reshape(group, w.shape[0] // group, w.shape[1], *kernel)
        for tap, at in self.taps(tuple(outs), kernel, ins, [0] * rank):
            part = np.einsum("ngc...,gco->ngo...", xg, wg[(slice(None), slice(None), slice(None), *tap)])
            full[(slice(None), slice(None), *at)] += part.reshape(x.shape[0], group * w.shape[1], *ins)
        y = full[(slice(None), slice(None), *[slice(b0, b0 + n) for b0, n in zip(begins, outs, strict=True)])]
        if b is not None:
            y = y + b.astype(np.float64).reshape(1, -1, *[1] * rank)
        return (y.astype(x.dtype),)

    def _target(
        self, rank: int, ins: list[int], kernel: list[int], strides: list[int], dilations: list[int], extra: list[int]
    ) -> tuple[list[int], list[int]]:
        pads, asked = self.numbers("pads", 2 * rank, 0), getattr(self, "output_shape", None)
        auto_pad = getattr(self, "auto_pad", None) or "NOTSET"
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        full = [s * (n - 1) + p + r for s, n, p, r in zip(strides, ins, extra, reach, strict=True)]
        if asked is None and not auto_pad.startswith("SAME"):
            pads = pads if auto_pad == "NOTSET" else [0] * 2 * rank
            return [f - pads[i] - pads[rank + i] for i, f in enumerate(full)], pads[:rank]
        outs = list(asked)[-rank:] if asked is not None else [n * s for n, s in zip(ins, strides, strict=True)]
        total = [max(f - n, 0) for f, n in zip(full, outs, strict=True)]
        return outs, [t // 2 if auto_pad == "SAME_UPPER" else t - t // 2 for t in total]


class GridSample(_GridSample):
    op_domain = ""

    def _gs_denormalize_coordinates(self, n: Array, dims: Array, align_corners: bool) -> Array:
        return np.array(
            [self._gs_denormalize(v, dim, align_corners) for v, dim in zip(n, dims, strict=False)], np.float64
        )


class RotaryEmbedding(OpRun):
    """x [batch, heads, places, size] or [batch, places, heads * size]; pairs of numbers as complex ones."""

    op_domain = "com.microsoft"

    def _run(self, x: Array, positions: Array, cos: Array, sin: Array, **_: Any) -> tuple[Array, ...]:
        heads, turning = getattr(self, "num_heads", None) or 0, getattr(self, "rotary_embedding_dim", None) or 0
        width = 2 * cos.shape[1]
        if x.ndim == 3:
            heads = heads or x.shape[2] // width
            x = x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)
        at = positions + np.arange(x.shape[2])[None] if positions.ndim == 1 else positions
        turn = (cos + 1j * sin)[at][:, None, :, : (turning or width) // 2]
        size = 2 * turn.shape[-1]
        first, second = (slice(0, size, 2), slice(1, size, 2))
        if not getattr(self, "interleaved", None):
            first, second = (slice(0, size // 2), slice(size // 2, size))
        result = x.copy()
        turned = (x[..., first] + 1j * x[..., second]) * turn
        result[..., first], result[..., second] = turned.real, turned.imag
        if heads:
            result = result.transpose(0, 2, 1, 3).reshape(result.shape[0], result.shape[2], -1)
        return (result.astype(x.dtype),)


class Inverse(OpRun):
    """The inverse of each matrix of a batch."""

    op_domain = "com.microsoft"

    def _run(self, x: Array, **_: Any) -> tuple[Array, ...]:
        return (np.linalg.inv(x).astype(x.dtype),)


CORRECTED = [MaxPool, AveragePool, GlobalMaxPool, ConvTranspose, GridSample, RotaryEmbedding, Inverse]
