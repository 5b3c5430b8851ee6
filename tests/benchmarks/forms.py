"""Times the forms that rules choose among, each by itself, on a place: milliseconds, and the bytes in and out a second.

    python -m tests.benchmarks.forms [--place cuda] [--dtype float16] [--tiny] [CASE ...]

Sizes are those of ResNet-50 with 64 images and of BERT base with 32 x 128 tokens. Inputs and outputs lie on the place;
a time is the median of --runs runs, each waited for, which takes tens of microseconds by itself. ``--tiny`` tries all of
it in a second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime as ort

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.lists import place_traits
from amp_transpiler.ops import kernel_gradient, norm_parts
from amp_transpiler.ops.window import Window
from amp_transpiler.runtime.missing import cuda_missing
from tests.helpers.rules import tensor_info

Form = Callable[..., Value]
SETTLING = 3


@dataclass(frozen=True)
class Case:
    """Forms of one result: the shapes of what they read, and each as a rule writes it."""

    title: str
    shapes: Sequence[tuple[int, ...]]
    forms: dict[str, Form]


def weights(tiny: bool) -> Iterator[Case]:
    """The gradient of a convolution's weights."""
    batch, small = (2, 8) if tiny else (64, 1)
    found = [(3, 64, 224, 7, 2, 1), (64, 64, 56, 3, 1, 1), (128, 128, 56, 3, 2, 1), (128, 128, 28, 3, 1, 1)]
    for channels, outputs, size, kernel, stride, group in [*found, (512, 512, 7, 3, 1, 1), (96, 96, 56, 3, 1, 96)]:
        size = max(size // small, 7)
        target, pad = (size + 2 * (kernel // 2) - kernel) // stride + 1, kernel // 2
        window = Window(*((n,) * 2 for n in (kernel, stride, 1, pad, size, target)))
        forms: dict[str, Form] = {
            "one Conv": partial(_of_window, kernel_gradient.by_convolution, window, group),
            "gathered": partial(_of_window, kernel_gradient.by_gathering, window, group),
        }
        if group == 1:
            forms["a GEMM a position"] = partial(_of_window, kernel_gradient.by_gemms, window)
            forms["unfolded"] = partial(_of_window, kernel_gradient.by_unfolding, window)
        title = f"weights {outputs} x {channels // group} x {kernel} x {kernel}, stride {stride}, {target} x {target}"
        yield Case(title, [(batch, channels, size, size), (batch, outputs, target, target)], forms)


def _of_window(form: Form, window: Window, *group_and_values: Any) -> Value:
    *group, e, x, dy = group_and_values
    return form(e, x, dy, window, *group)


def rows(tiny: bool) -> Iterator[Case]:
    """Products and statistics of rows, as batch normalisation has them."""
    real = [(64, 802816), (256, 200704), (512, 50176), (1024, 12544), (2048, 3136)]
    for shape in [(8, 512 * 7)] if tiny else real:
        count = shape[1]
        products: dict[str, Form] = {"whole rows": partial(_in_blocks, ())}
        products |= {f"{n} blocks": partial(_in_blocks, (n,)) for n in (8, 16, 32, 64) if count % (8 * n) == 0}
        yield Case(f"products of rows {shape}", [shape, shape], products)
        forms: dict[str, Form] = {f"LayerNormalization, {n} a row": partial(_normalised, n) for n in (1, 8, 32)}
        forms["InstanceNormalization"] = _as_instances
        forms |= {name: partial(_reduced, name) for name in ("ReduceMean", "ReduceSumSquare")}
        yield Case(f"statistics of rows {shape}", [shape], forms)


def _in_blocks(blocks: tuple[int, ...], e: Emitter, a: Value, b: Value) -> Value:
    with mock.patch.object(norm_parts, "_BLOCKS", blocks):
        return norm_parts.correlation(e, a, b)


def _normalised(chunks: int, e: Emitter, x: Value) -> Value:
    channels, count = x.shape or (0, 0)
    shape = (channels * chunks, count // chunks)
    one, zero = (e.op("Expand", e.like(n, x), e.ints(shape[1]), shape=shape[1:]) for n in (1, 0))
    kinds = (x.dtype, "float32", "float32")
    return e.op("LayerNormalization", e.reshape(x, shape), one, zero, outputs=3, dtype=kinds, axis=-1, shape=shape)[0]


def _as_instances(e: Emitter, x: Value) -> Value:
    one, zero = (e.const(np.full((x.shape or (0,))[0], n), x.dtype) for n in (1, 0))
    shape = (1, *(x.shape or ()))
    return e.op("InstanceNormalization", e.reshape(x, shape), one, zero, shape=shape)


def _reduced(name: str, e: Emitter, x: Value) -> Value:
    return e.op(name, x, e.ints(1), keepdims=1, shape=((x.shape or (0,))[0], 1))


def sums(tiny: bool) -> Iterator[Case]:
    """Sums over tokens, of a bias's gradient."""
    shape = (2, 4, 8) if tiny else (32, 128, 768)
    tokens, width = prod(shape[:2]), shape[2]

    def product(e: Emitter, x: Value) -> Value:
        ones = e.const(np.ones((1, tokens)), x.dtype)
        return e.Gemm(ones, e.reshape(x, (tokens, width)), shape=(1, width))

    def reduced(e: Emitter, x: Value) -> Value:
        return e.ReduceSum(x, e.ints(0, 1), keepdims=1, shape=(1, 1, width))

    yield Case(f"sums of columns {shape}", [shape], {"ReduceSum": reduced, "Gemm with ones": product})


def zeros(tiny: bool) -> Iterator[Case]:
    """Zeros between strides."""
    shape = (4, 2, 4, 1, 4, 1) if tiny else (256, 64, 28, 1, 28, 1)
    wide = (*shape[:2], shape[2], 2, shape[4], 2)

    def chosen(e: Emitter, x: Value) -> Value:
        first = np.array([1, 0, 0, 0], bool).reshape(1, 2, 1, 2)
        return e.Where(e.const(first), x, e.like(0, x), shape=wide)

    def padded(e: Emitter, x: Value) -> Value:
        return e.Pad(x, e.ints(*[0] * 9, 1, 0, 1), shape=wide)

    yield Case(f"zeros between {shape}", [shape], {"Where": chosen, "Pad": padded})


CASES = {"weights": weights, "rows": rows, "sums": sums, "zeros": zeros}


def model(case: Case, form: Form, place: str, dtype: str) -> onnx.ModelProto:
    """One form as a model whose inputs are x0, x1, …"""
    e = Emitter(place)
    inputs = [Value(f"x{number}", dtype, shape) for number, shape in enumerate(case.shapes)]
    e.reserve(v.name for v in inputs)
    made = form(e, *inputs)
    graph = onnx.helper.make_graph(
        e.nodes,
        "form",
        [tensor_info(v.name, dtype, v.shape or ()) for v in inputs],
        [tensor_info(made.name, made.dtype, made.shape or ())],
        list(e.initializers.values()),
    )
    opsets = [onnx.helper.make_opsetid(domain, 1) for domain in sorted(e.domains)]
    return onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", e.opset), *opsets])


def measured(written: onnx.ModelProto, case: Case, place: str, dtype: str, runs: int) -> tuple[float, float]:
    """Seconds of a run, the median, and the bytes that go in and out."""
    options, traits = ort.SessionOptions(), place_traits(place)
    options.log_severity_level = 4
    providers: list[Any] = [(traits.provider, {"use_tf32": "0"})] if traits.device else []
    session = ort.InferenceSession(written.SerializeToString(), options, providers=[*providers, "CPUExecutionProvider"])
    binding, rng = session.io_binding(), np.random.default_rng(0)
    given = [rng.normal(size=shape).astype(dtype) for shape in case.shapes]
    for number, array in enumerate(given):
        binding.bind_ortvalue_input(f"x{number}", ort.OrtValue.ortvalue_from_numpy(array, traits.memory, 0))
    for output in session.get_outputs():
        binding.bind_output(output.name, traits.memory)
    times = []
    for _ in range(SETTLING + runs):
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        times.append(time.perf_counter() - start)
    made = sum(prod(value.shape()) for value in binding.get_outputs()) * np.dtype(dtype).itemsize
    return statistics.median(times[SETTLING:]), sum(array.nbytes for array in given) + made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all where none is named")
    parser.add_argument("--place", choices=("cpu", "cuda"), default="cuda", help="where they run (default: cuda)")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="of what they read")
    parser.add_argument("--runs", type=int, default=20, help="of which the median is taken (default: 20)")
    parser.add_argument("--tiny", action="store_true", help="small sizes: whether all of it runs")
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.cases) - CASES.keys()):
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if args.place == "cuda" and (why := cuda_missing(0)):
        parser.exit(2, f"not run: {why}\n")
    for name in args.cases or CASES:
        for case in CASES[name](args.tiny):
            print(case.title, flush=True)
            for form, write in case.forms.items():
                written = model(case, write, args.place, args.dtype)
                seconds, moved = measured(written, case, args.place, args.dtype, args.runs)
                print(f"  {form:28} {1e3 * seconds:9.3f} ms {moved / seconds / 1e9:9.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
