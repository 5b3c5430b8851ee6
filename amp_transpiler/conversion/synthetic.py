"""A sample that is made up, where the user of a conversion or a check gives none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from amp_transpiler.conversion.calibration.as_given import outputs_as_given, session_as_given, undefined
from amp_transpiler.errors import AmpError, FeedError, ModelFileError
from amp_transpiler.ir.contrib_shapes import asked_sizes
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.size_names import size_of
from amp_transpiler.ir.tensors import byte_size
from amp_transpiler.ir.types import FLOATS, numpy_dtype
from amp_transpiler.program import Program
from amp_transpiler.runtime.budget import OverBudget

SYNTHETIC = "a synthetic sample"
#: Bytes of a synthetic sample; larger inputs are the user's to give.
_SAMPLE = 1 << 28
#: What unknown dimensions are tried with beyond 1, from which axis on, those of the batch not before all are: the sides
#: of an image, a stretch of sound, one beside states whose batch is no first dimension and has no name, any dimension.
_SIZES = ((64, 1), (1024, 1), (256, -1), (64, 0))
#: Layers whose weights are asked for the size of their input.
_LAYERS = 3
#: Sides of images that are tried first: 32 and 48 are the heights of lines of text.
_SIDES = (64, 32, 48)


def synthetic_sample(program: Program) -> tuple[dict[str, np.ndarray], list[Any]]:
    """One input of each, and the outputs: normal numbers, zeros and ones, and one turn of loops that an input counts;
    numbers between 0 and 1 where the program makes nothing but NaN of normal ones, as a logarithm of prices does.

    Unknown dimensions are 1, what an operator asks of them (heads of a cache), or what their names compute of others
    (``past + 1``), and larger where the program does not run on those (one pixel is no image) or makes nothing but
    zeros of them (one token may be padding), or as many as the weights of a layer have rows; of an image that goes
    through windows they are larger from the start.
    Raises what running it on the first of the samples raises,
    and FeedError where that is too large.
    """
    first: AmpError | None = None
    zeros: tuple[dict[str, np.ndarray], list[Any]] | None = None
    session = session_as_given(program)
    for shapes in _shapes(program):
        try:
            sample = _filled(program, shapes)
            outputs = outputs_as_given(program, [sample], session)[0]
            if undefined(outputs):
                shares = _filled(program, shapes, shares=True)
                others = outputs_as_given(program, [shares], session)[0]
                if not undefined(others) and not any(map(_is_infinite, others)):  # as of weights that are
                    sample, outputs = shares, others
        except ModelFileError:
            raise
        except AmpError as error:
            first = first or error
            if isinstance(error, OverBudget):  # as larger ones would be
                break
            continue
        if any(map(_tells, outputs)):
            return sample, outputs
        zeros = zeros or (sample, outputs)
    if zeros is not None:
        return zeros
    assert first is not None
    raise first


def _tells(output: Any) -> bool:
    """Whether an output is more than zeros, of which every conversion is right."""
    return not isinstance(output, np.ndarray) or output.dtype.kind not in "fV" or bool((output != 0).any())


def _is_infinite(output: Any) -> bool:
    """Whether an output holds no finite number."""
    return isinstance(output, np.ndarray) and output.dtype.kind == "f" and not np.isfinite(output).any()


def _shapes(program: Program) -> Iterator[list[list[int]]]:
    """Shapes of the inputs to try, all with 1 for what is unknown first, but for images: windows make nothing of one
    pixel, or what is behind its borders."""
    fed = _fed(program)
    batch = frozenset(v.shape[0] for v in fed if v.shape and isinstance(v.shape[0], str))
    asked: dict[str | None, int] = {name: size for op in program.walk() for name, size in asked_sizes(op).items()}
    ones = [[size_of(size, lambda name: asked.get(name, 1)) for size in v.shape or ()] for v in fed]
    images = any(map(_is_image, fed)) and any("kernel_shape" in op.attrs or op.type == "Conv" for op in program.walk())
    if images:
        yield from (_opened(fed, asked, batch, side, 1) for side in _SIDES)
    yield ones
    if not all(isinstance(size, int) for v in fed for size in v.shape or ()):
        yield from (_opened(fed, asked, batch, size, start) for size, start in _SIZES)
        for rows in _rows(program):
            yield _opened(fed, asked, batch, rows, -1)


def _rows(program: Program) -> list[int]:
    """How many numbers of a place the first layers of each size take, which exporters of them may leave open."""
    found = dict[int, None]()
    for op in program.walk():
        weights, traits = op.input(1), traits_of(op)
        sizes = static(None if weights is None else weights.shape)
        if sizes and len(sizes) > 2 and traits.starts:
            found[sizes[-1]] = None
        elif sizes and len(sizes) == 2 and traits.product and traits.weight_axes is not None:
            found[math.prod(sizes[axis] for axis in traits.weight_axes(op, len(sizes)))] = None
    return list(found)[:_LAYERS]


def _opened(
    fed: list[Variable], asked: Mapping[str | None, int], batch: frozenset[str], open_size: int, start: int
) -> list[list[int]]:
    """Shapes of the inputs with this size for what is unknown from an axis on."""
    known = dict(asked) | dict.fromkeys(batch if start else (), 1)
    return [
        [
            size_of(size, partial(_open, open_size, known, axis in range(len(v.shape or ()))[start:]))
            for axis, size in enumerate(v.shape or ())
        ]
        for v in fed
    ]


def _is_image(variable: Variable) -> bool:
    """Whether it may be a batch of images whose sides are open."""
    sizes = variable.shape or ()
    return variable.dtype in FLOATS and len(sizes) == 4 and sum(not isinstance(size, int) for size in sizes[1:]) >= 2


def _open(size: int, known: Mapping[str | None, int], free: bool, name: str | None) -> int:
    """The size of an unknown dimension that may be ``free``, unless its name is one of the ``known``."""
    return known.get(name, size if free else 1)


def _fed(program: Program) -> list[Variable]:
    return [v for v in program.inputs if v.data is None and v.dtype is not None]


def _filled(program: Program, shapes: list[list[int]], *, shares: bool = False) -> dict[str, np.ndarray]:
    """The inputs in these shapes, of normal numbers or ``shares`` between 0 and 1; FeedError where they are too
    large."""
    rng = np.random.default_rng(0)
    feeds = {}
    left = _SAMPLE
    for variable, shape in zip(_fed(program), shapes, strict=True):
        dtype = str(variable.dtype)
        size = byte_size(dtype, shape)
        if size > left:
            raise FeedError(
                f"input '{variable.name}', {dtype}{shape}, takes {size:,} bytes, and {SYNTHETIC} at most {_SAMPLE:,}"
            )
        left -= size
        if dtype in FLOATS:
            made = rng.random(shape, np.float32) if shares else rng.standard_normal(shape, np.float32)
        else:
            made = rng.integers(0, 2, shape, np.int8)
            if not shape and dtype != "bool":
                made = np.ones_like(made)
        feeds[variable.name] = made.astype(numpy_dtype(dtype))
    return feeds
