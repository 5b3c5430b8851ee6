"""Times the forms that rules choose among, each by itself, on a place: milliseconds.

    python -m tests.benchmarks.forms [--place cuda] [--dtype float16] [--tiny] [CASE ...]

Sizes are those of ResNet-50 with 64 images and of BERT base with 32 x 128 tokens. Inputs and outputs lie on the place;
a time is a quarter of that of four of them, the median of --runs runs, each waited for, which takes tens of microseconds
by itself. ``--tiny`` tries all of it in a second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.lists import place_traits
from amp_transpiler.ops import kernel_gradient
from amp_transpiler.ops.common import size_of
from amp_transpiler.ops.gpu_kernels import along_rows, product, sums_of_rows
from amp_transpiler.ops.row_sums import added_rows
from amp_transpiler.ops.window import Window
from amp_transpiler.runtime.missing import cuda_missing
from tests.benchmarks.form import Case, Form
from tests.benchmarks.forms_of_norms import apart, pools, relu, rows
from tests.helpers.rules import tensor_info

SETTLING, TIMES = 2, 4


def weights(tiny: bool) -> Iterator[Case]:
    """The gradient of a convolution's weights."""
    batch, small = (2, 8) if tiny else (64, 1)
    found = [(3, 64, 224, 7, 2, 1), (64, 64, 56, 3, 1, 1), (128, 128, 56, 3, 2, 1), (128, 128, 28, 3, 1, 1)]
    for channels, outputs, size, kernel, stride, group in [
        *found,
        (256, 256, 14, 3, 1, 1),
        (512, 512, 7, 3, 1, 1),
        (96, 96, 56, 3, 1, 96),
        (96, 96, 56, 7, 1, 96),
    ]:
        size = max(size // small, 7)
        target, pad = (size + 2 * (kernel // 2) - kernel) // stride + 1, kernel // 2
        window = Window(*((n,) * 2 for n in (kernel, stride, 1, pad, size, target)))
        forms: dict[str, Form] = {
            "one Conv": partial(_of_window, kernel_gradient.by_convolution, window, group),
            "gathered": partial(_of_window, kernel_gradient.by_gathering, window, group),
        }
        if group > 1 or stride == 1:
            by_axis = kernel_gradient.by_axis if group > 1 else kernel_gradient.by_axis_of_all
            forms["gathered by axis"] = partial(_of_window, by_axis, window, group)
        if group == 1:
            for parts in (2, 4, 8, 16) if not tiny else (2,):
                forms[f"one Conv of {parts} groups"] = partial(_of_window, _by_groups, window, parts)
            forms["a GEMM a position"] = partial(_of_window, kernel_gradient.by_gemms, window)
            forms["unfolded"] = partial(_of_window, kernel_gradient.by_unfolding, window)
        title = f"weights {outputs} x {channels // group} x {kernel} x {kernel}, stride {stride}, {target} x {target}"
        yield Case(title, [(batch, channels, size, size), (batch, outputs, target, target)], forms)


def _by_groups(e: Emitter, x: Value, dy: Value, window: Window, parts: int) -> Value:
    """One Conv with a group for each part of the images, and the sum over these."""
    batch, channels, outputs = size_of(x)[0], size_of(x)[1], size_of(dy)[1]
    positions, taps = prod(window.target), prod(window.kernel)
    images = e.reshape(e.transpose(x, [1, 0, 2, 3]), (channels, batch, *window.source))
    turned = e.transpose(e.reshape(dy, (parts, batch // parts, outputs, positions)), [0, 2, 1, 3])
    kernels = e.reshape(turned, (parts * outputs, batch // parts, *window.target))
    reach = [k + (t - 1) * s for k, t, s in zip(window.kernel, window.target, window.strides, strict=True)]
    made = e.Conv(
        images,
        kernels,
        group=parts,
        strides=list(window.dilations),
        dilations=list(window.strides),
        pads=[*window.begin, *(read - n - b for read, n, b in zip(reach, window.source, window.begin, strict=True))],
        shape=(channels, parts * outputs, *window.kernel),
    )
    dw = e.ReduceSum(e.reshape(made, (channels, parts, outputs * taps)), e.ints(1), keepdims=0)
    return e.transpose(e.reshape(dw, (channels, outputs, *window.kernel)), [1, 0, 2, 3])


def _of_window(form: Form, window: Window, *group_and_values: Any) -> Value:
    *group, e, x, dy = group_and_values
    return form(e, x, dy, window, *group)


def sums(tiny: bool) -> Iterator[Case]:
    """Sums over tokens as products with ones, of several rows: of one a product computes a small part of a tile."""
    for tokens, width in [(32, 16)] if tiny else [(4096, 768), (4096, 3072), (12544, 2048)]:

        def product_of(rows: int, e: Emitter, x: Value, tokens: int = tokens, width: int = width) -> Value:
            return e.Gemm(e.const(np.ones((rows, tokens)), x.dtype), x, shape=(rows, width))

        forms: dict[str, Form] = {
            "ReduceSum": lambda e, x, s=(1, width): e.ReduceSum(x, e.ints(0), keepdims=1, shape=s)
        }
        forms |= {f"Gemm with {rows} rows of ones": partial(product_of, rows) for rows in (1, 8, 64)}
        yield Case(f"sums over {tokens} of {width}", [(tokens, width)], forms)


def row_sums(tiny: bool) -> Iterator[Case]:
    """Sums over short rows, and the gradient of a softmax, which has one."""
    rows, width = (16, 8) if tiny else (49152, 128)

    def reduced(e: Emitter, x: Value) -> Value:
        return e.ReduceSum(x, e.ints(1), keepdims=1, shape=(rows, 1))

    def mixed(e: Emitter, x: Value, y: Value, s: Value) -> Value:
        return along_rows(e, e.const(1.0, "float32"), x, e.f32(s), y)

    forms: dict[str, Form] = {
        "HyperConnectionPostMix": mixed,
        "GatedAdd": lambda e, x, y, s: e.op("GatedAdd", x, y, s, domain=DOMAIN, shape=x.shape),
        "Sub": lambda e, x, y, s: e.Sub(x, s, shape=x.shape),
        "Mul": lambda e, x, y, s: e.Mul(x, s, shape=x.shape),
        "Mul of two": lambda e, x, y, s: e.Mul(x, y, shape=x.shape),
        "Add of two": lambda e, x, y, s: e.Add(x, y, shape=x.shape),
        "ReduceSum": lambda e, x, y, s: reduced(e, x),
        "product with ones": lambda e, x, y, s: sums_of_rows(e, x),
    }
    yield Case(f"rows {rows} x {width}", [(rows, width), (rows, width), (rows, 1)], forms)


def sums_of_two(tiny: bool) -> Iterator[Case]:
    """a x + b y of fp32 with numbers a and b."""
    line = (1, 64 if tiny else 12582912)

    def mixed(e: Emitter, x: Value, y: Value, a: Value) -> Value:
        numbers = e.reshape(a, (1,)), e.const([[0.9]], x.dtype)
        return e.op("HyperConnectionPostMix", x, e.reshape(y, line[1:]), *numbers, domain=DOMAIN, shape=line)

    forms: dict[str, Form] = {
        "HyperConnectionPostMix": mixed,
        "Mul, GatedAdd": lambda e, x, y, a: e.op(
            "GatedAdd", e.Mul(x, e.like(0.9, x), shape=x.shape), y, a, domain=DOMAIN, shape=x.shape
        ),
        "Mul, Mul, Add": lambda e, x, y, a: e.Add(
            e.Mul(x, e.like(0.9, x), shape=x.shape), e.Mul(y, e.reshape(a, ()), shape=y.shape), shape=x.shape
        ),
        "Mul": lambda e, x, y, a: e.Mul(x, e.like(0.9, x), shape=x.shape),
        "GatedAdd": lambda e, x, y, a: e.op("GatedAdd", x, y, a, domain=DOMAIN, shape=x.shape),
    }
    yield Case("a x + b y", [line, line, (1, 1)], forms, ("float32",) * 3)


def embedding(tiny: bool) -> Iterator[Case]:
    """The gradient of a table of words."""
    words, tokens, width = (50, 16, 8) if tiny else (30522, 4096, 768)
    zero = (words, width)

    def flat(e: Emitter, at: Value, dy: Value) -> Value:
        return e.op("ScatterND", e.zeros(zero, dy.dtype), e.reshape(at, (tokens, 1)), dy, reduction="add", shape=zero)

    def added(e: Emitter, at: Value, dy: Value) -> Value:
        return added_rows(e, e.zeros(zero, dy.dtype), e.reshape(at, (tokens, 1)), dy)

    forms: dict[str, Form] = {"ScatterND": flat, "as rows are added": added}
    yield Case("gradient of a table", [(tokens,), (tokens, width)], forms, ("int64", "float32"))


def slow_convolutions(tiny: bool) -> Iterator[Case]:
    """A stem's convolution, of few channels; convolutions that step over positions, backwards."""
    batch, few = (2, 8) if tiny else (64, 0)
    size = few or 224
    x, w = (batch, 3, size, size), (8 if tiny else 64, 3, 7, 7)
    y = (batch, w[0], size // 2, size // 2)

    def wider(to: int, e: Emitter, x: Value, w: Value) -> Value:
        pads = e.ints(0, 0, 0, 0, 0, to - 3, 0, 0)
        wide = (e.Pad(v, pads, shape=(v.shape[0], to, *v.shape[2:])) for v in (x, w) if v.shape)
        return e.Conv(*wide, pads=[3] * 4, strides=[2, 2], shape=y)

    yield Case(
        "stem",
        [x, w],
        {
            "Conv": lambda e, x, w: e.Conv(x, w, pads=[3] * 4, strides=[2, 2], shape=y),
            "of 4 channels": partial(wider, 4),
            "of 8 channels": partial(wider, 8),
        },
    )
    for channels, size in [(8, 4)] if tiny else [(128, 28), (256, 14), (512, 7)]:
        dy, w = (batch, channels, size, size), (channels, channels, 3, 3)
        dx = (batch, channels, 2 * size, 2 * size)

        def transposed(e: Emitter, dy: Value, w: Value, dx: Any = dx) -> Value:
            return e.ConvTranspose(dy, w, pads=[1] * 4, strides=[2, 2], output_padding=[1, 1], shape=dx)

        def spread(e: Emitter, dy: Value, w: Value, dx: Any = dx, size: int = size) -> Value:
            first = np.array([1, 0, 0, 0], bool).reshape(1, 2, 1, 2)
            flat = (dx[0] * dx[1], size, 1, size, 1)
            wide = e.Where(e.const(first), e.reshape(dy, flat), e.like(0, dy), shape=(*flat[:2], 2, size, 2))
            turned = e.transpose(w, [1, 0, 2, 3])  # and flipped, which takes as long
            return e.Conv(e.reshape(wide, dx), turned, pads=[1] * 4, shape=dx)

        def whole(e: Emitter, dy: Value, w: Value, dx: Any = dx) -> Value:
            return e.ConvTranspose(dy, w, pads=[0] * 4, strides=[2, 2], shape=(*dx[:2], dx[2] + 1, dx[3] + 1))

        forms: dict[str, Form] = {"ConvTranspose": transposed, "ConvTranspose, whole": whole, "zeros, Conv": spread}
        yield Case(f"backwards over strides {channels}, {size} x {size}", [dy, w], forms)


def dense(tiny: bool) -> Iterator[Case]:
    """A dense layer, and the products of its gradients."""
    rows, sizes = (16, [(8, 16)]) if tiny else (4096, [(768, 768), (768, 3072), (3072, 768)])
    for inputs, outputs in sizes:
        made, weight = (rows, outputs), (inputs, outputs)
        forms: dict[str, Form] = {
            "Gemm with bias": lambda e, x, w, b, s=made: e.Gemm(x, w, b, shape=s),
            "MatMul": lambda e, x, w, b, s=made: e.MatMul(x, w, shape=s),
            "MatMul, Add": lambda e, x, w, b, s=made: e.Add(e.MatMul(x, w, shape=s), b, shape=s),
        }
        yield Case(f"dense {rows} x {inputs} x {outputs}", [(rows, inputs), weight, (outputs,)], forms)
        back: dict[str, Form] = {
            "of x": lambda e, x, dy, w, s=(rows, inputs): e.Gemm(dy, w, transB=1, shape=s),
            "of x, weights transposed": lambda e, x, dy, w, s=(rows, inputs): e.MatMul(
                dy, e.Transpose(w, perm=[1, 0], shape=w.shape[::-1]), shape=s
            ),
            "of w": lambda e, x, dy, w, s=weight: e.Gemm(x, dy, transA=1, shape=s),
            "of w, transposed": lambda e, x, dy, w, s=weight[::-1]: e.Gemm(dy, x, transA=1, shape=s),
        }
        yield Case(f"gradients {rows} x {inputs} x {outputs}", [(rows, inputs), made, weight], back)


def convolutions(tiny: bool) -> Iterator[Case]:
    """Convolutions and the gradients of what they read, channels second and last."""
    batch = 2 if tiny else 64
    sizes = [
        (64, 64, 56, 1),
        (64, 64, 56, 3),
        (256, 64, 56, 1),
        (128, 128, 28, 3),
        (1024, 256, 14, 1),
        (512, 512, 7, 3),
    ]
    for inputs, outputs, size, kernel in [(8, 16, 7, 3), (8, 16, 7, 1)] if tiny else sizes:
        pads, weight = [kernel // 2] * 4, (outputs, inputs, kernel, kernel)
        x, y = (batch, inputs, size, size), (batch, outputs, size, size)
        flat, made = (batch, inputs, size * size), (batch, outputs, size * size)
        forms: dict[str, Form] = {"Conv": lambda e, x, w, dy, s=y, p=pads: e.Conv(x, w, pads=p, shape=s)}
        if kernel == 1:
            forms["MatMul"] = lambda e, x, w, dy, f=flat, m=made, s=y: e.reshape(
                e.MatMul(e.reshape(w, w.shape[:2]), e.reshape(x, f), shape=m), s
            )
        forms["gradient: ConvTranspose"] = lambda e, x, w, dy, s=x, p=pads: e.ConvTranspose(dy, w, pads=p, shape=s)
        if kernel == 1:
            forms["gradient: FusedMatMul"] = lambda e, x, w, dy, f=flat, m=made, s=x: e.reshape(
                product(e, e.reshape(w, w.shape[:2]), e.reshape(dy, m), trans_a=True), s
            )
        title = f"convolution {outputs} x {inputs} x {kernel} x {kernel}, {size} x {size}"
        yield Case(title, [x, weight, y], forms)
        if kernel > 1:
            continue
        last: dict[str, Form] = {
            "Gemm": lambda e, x, w, s=(batch * size * size, outputs), c=inputs: e.Gemm(
                e.reshape(x, (s[0], c)), e.reshape(w, (s[1], c)), transB=1, shape=s
            )
        }
        yield Case(f"{title}, channels last", [(batch, size, size, inputs), (outputs, kernel, kernel, inputs)], last)


def thin(tiny: bool) -> Iterator[Case]:
    """Long rows of two matrices, of which one has a number of rows that tensor cores do not write."""
    rows, columns, length = (8, 5, 64) if tiny else (64, 147, 802816)
    forms: dict[str, Form] = {
        "Gemm": lambda e, a, b: e.Gemm(a, b, transB=1, shape=(rows, columns)),
        "Gemm, the other first": lambda e, a, b: e.Gemm(b, a, transB=1, shape=(columns, rows)),
    }
    for parts in () if tiny else (8, 32, 128):

        def in_parts(first: int, e: Emitter, *both: Value, parts: int = parts) -> Value:
            left, right = (
                e.transpose(e.reshape(v, ((v.shape or (0,))[0], parts, length // parts)), [1, 0, 2]) for v in both
            )
            pair = (left, right) if not first else (right, left)
            sizes = [(v.shape or (0, 0))[1] for v in pair]
            return e.op("FusedMatMul", *pair, domain=DOMAIN, transB=1, shape=(parts, *sizes))

        forms[f"{parts} products"] = partial(in_parts, 0)
        forms[f"{parts} products, the other first"] = partial(in_parts, 1)
    yield Case(f"products of {rows} and {columns} rows of {length}", [(rows, length), (columns, length)], forms)


CASES = {
    "weights": weights,
    "dense": dense,
    "convolutions": convolutions,
    "sums": sums,
    "row_sums": row_sums,
    "sums_of_two": sums_of_two,
    "embedding": embedding,
    "slow_convolutions": slow_convolutions,
    "thin": thin,
    "rows": rows,
    "relu": relu,
    "apart": apart,
    "pools": pools,
}


def model(case: Case, form: Form, place: str, dtype: str) -> onnx.ModelProto:
    """One form as a model whose inputs are x0, x1, …"""
    e = Emitter(place)
    kinds = case.dtypes or (dtype,) * len(case.shapes)
    inputs = [Value(f"x{number}", *each) for number, each in enumerate(zip(kinds, case.shapes, strict=True))]
    e.reserve(v.name for v in inputs)
    made = [form(e, *inputs) for _ in range(TIMES)]
    graph = onnx.helper.make_graph(
        e.nodes,
        "form",
        [tensor_info(v.name, v.dtype, v.shape or ()) for v in inputs],
        [tensor_info(v.name, v.dtype, v.shape or ()) for v in made],
        list(e.initializers.values()),
    )
    opsets = [onnx.helper.make_opsetid(domain, 1) for domain in sorted(e.domains)]
    return onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", e.opset), *opsets])


def given(case: Case, place: str, dtype: str) -> list[ort.OrtValue]:
    """What the forms of a case read, on the place."""
    rng, found = np.random.default_rng(0), list[ort.OrtValue]()
    for kind, shape in zip(case.dtypes or (dtype,) * len(case.shapes), case.shapes, strict=True):
        if kind == "int64":
            array: np.ndarray[Any, Any] = rng.integers(0, 50, shape)
        else:
            array = rng.standard_normal(shape, np.float32).astype(kind)
        found.append(ort.OrtValue.ortvalue_from_numpy(array, place_traits(place).memory, 0))
    return found


def measured(
    written: onnx.ModelProto, read: Sequence[ort.OrtValue], place: str, runs: int, tf32: bool = False
) -> float:
    """Seconds of a run, the median."""
    options, traits = ort.SessionOptions(), place_traits(place)
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # forms as they are written
    providers: list[Any] = [(traits.provider, {"use_tf32": str(int(tf32))})] if traits.device else []
    session = ort.InferenceSession(written.SerializeToString(), options, providers=[*providers, "CPUExecutionProvider"])
    binding = session.io_binding()
    for number, value in enumerate(read):
        binding.bind_ortvalue_input(f"x{number}", value)
    for output in session.get_outputs():
        binding.bind_output(output.name, traits.memory)
    times = []
    for _ in range(SETTLING + runs):
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        times.append(time.perf_counter() - start)
    return statistics.median(times[SETTLING:]) / TIMES


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all where none is named")
    parser.add_argument("--place", choices=("cpu", "cuda"), default="cuda", help="where they run (default: cuda)")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="of what they read")
    parser.add_argument("--runs", type=int, default=20, help="of which the median is taken (default: 20)")
    parser.add_argument("--tf32", action="store_true", help="let convolutions and products of fp32 use TF32")
    parser.add_argument("--tiny", action="store_true", help="small sizes: whether all of it runs")
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.cases) - CASES.keys()):
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if args.place == "cuda" and (why := cuda_missing(0)):
        parser.exit(2, f"not run: {why}\n")
    for name in args.cases or CASES:
        for case in CASES[name](args.tiny):
            print(case.title, flush=True)
            read = given(case, args.place, args.dtype)
            for form, write in case.forms.items():
                try:
                    seconds = measured(
                        model(case, write, args.place, args.dtype), read, args.place, args.runs, args.tf32
                    )
                except Exception as error:  # of onnxruntime: no kernel, or no memory
                    print(f"  {form:32} {' '.join(str(error).split())[:120]}", flush=True)
                    continue
                print(f"  {form:32} {1e3 * seconds:9.3f} ms", flush=True)


if __name__ == "__main__":
    main()
