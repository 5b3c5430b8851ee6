"""What files of models hold beside weights: tensors to write into, cosines and sines that an exporter computed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.weights import not_a_weight

ANGLES = np.outer(np.arange(6), 0.1 ** np.arange(4)).astype(np.float32)
COSINES, SINES = (np.concatenate([f(ANGLES)] * 2, -1)[None, None] for f in (np.cos, np.sin))
STARTS = "what the examples of a batch begin with"


def program(text: str, opset: int = 18, **contents: np.ndarray) -> amp.Program:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]> {text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in contents.items())
    return amp.Program.from_onnx(model)


def reasons(made: amp.Program, *names: str) -> list[str]:
    return [not_a_weight(made.var(name)) for name in names]


@pytest.mark.parametrize(
    ("fill", "reason"),
    [
        ('ScatterElements <axis = 0, reduction = "add"> (c, i, x)', "what others are written into"),
        ("Where (b, c, x)", "what the examples of a batch begin with"),
        ("Where (b, x, c)", "what the examples of a batch begin with"),
        ("ScatterElements <axis = 0> (c, i, x)", "what others are written into"),
        ("Trilu (c)", "what others are written into"),
        ("Add (c, x)", ""),
        ("MatMul (x, c)", ""),
    ],
)
def test_one_number_that_is_filled_is_not_trained(fill: str, reason: str) -> None:
    text = f"net (float[4,4] x, int64[4,4] i, bool[4,1] b) => (float[4,4] y) {{ y = {fill} }}"
    assert reasons(program(text, c=np.zeros((4, 4), np.float32)), "c") == [reason]


def test_a_tensor_of_many_numbers_is_trained_though_it_is_written_into() -> None:
    text = "net (float[4,4] x, int64[4,4] i) => (float[4,4] y) { y = ScatterElements <axis = 0> (c, i, x) }"
    assert reasons(program(text, c=np.arange(16, dtype=np.float32).reshape(4, 4)), "c") == [""]


@pytest.mark.parametrize(
    ("reduction", "number", "reason"), [("add", 1, "what is counted"), ("add", 0.5, ""), ("none", 1, "")]
)
def test_ones_that_are_added_up_are_not_trained(reduction: str, number: float, reason: str) -> None:
    text = f"""net (float[4,4] x, int64[4,4] i) => (float[4,4] y)
        {{ y = ScatterElements <axis = 0, reduction = "{reduction}"> (x, i, c) }}"""
    assert reasons(program(text, c=np.full((4, 4), number, np.float32)), "c") == [reason]


@pytest.mark.parametrize("loss", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_weights_of_classes_are_not_trained(loss: str) -> None:
    text = (
        f"net (float[4,4] x, int64[4] t) => (float l) {{ z = MatMul (x, w)  p = LogSoftmax (z)  l = {loss} (p, t, c) }}"
    )
    made = program(text, w=np.eye(4, dtype=np.float32), c=np.array([1, 2, 3, 0.5], np.float32))
    assert reasons(made, "w", "c") == ["", f"a number of {loss}"]
    amp.prepare_training(made)
    with amp.program_guard(made, made.startup):
        amp.optimizer.SGD(0.1).minimize(made.outputs[0])
    assert [v.name for v in made.parameters] == ["w"]


@pytest.mark.parametrize(("shape", "reason"), [((2, 4), STARTS), ((1, 4), ""), ((4,), "")])
def test_the_zeros_that_a_scan_begins_with_are_not_trained(shape: tuple[int, ...], reason: str) -> None:
    sizes = ",".join(map(str, shape))
    text = f"""net (float[5,{sizes}] x) => (float[{sizes}] last, float[5,{sizes}] y) {{
        last, y = Scan <num_scan_inputs = 1,
            body = step (float[{sizes}] s, float[{sizes}] v) => (float[{sizes}] t, float[{sizes}] w)
                {{ t = Add (s, v) w = Tanh (t) }}> (c, x) }}"""
    assert reasons(program(text, c=np.zeros(shape, np.float32)), "c") == [reason]
    made = program(text, c=np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    assert reasons(made, "c") == [""]  # a state that was learned


@pytest.mark.parametrize(
    ("shape", "reason"),
    [((2, 3, 4, 4), "what the examples of a batch begin with"), ((3, 4, 4), ""), ((1, 3, 4, 4), "")],
)
def test_the_state_of_zeros_that_linear_attention_asks_is_not_trained(shape: tuple[int, ...], reason: str) -> None:
    text = "net (float[2,3,5,4] x) => (float[2,3,5,4] y) { y = MatMul (x, c) }"
    assert reasons(program(text, c=np.zeros(shape, np.float32)), "c") == [reason]


@pytest.mark.parametrize(
    ("name", "batch", "reason"),
    [("val_9", 3, STARTS), ("h0", 3, STARTS), ("val_9", 1, STARTS), ("h0", 1, "")],
)
def test_zeros_that_recurrent_layers_begin_with_are_not_trained(name: str, batch: int, reason: str) -> None:
    """Those of one example may be learned, where they have a name."""
    text = f"""net (float[5,{batch},2] x) => (float[5,1,{batch},4] y)
        {{ y = LSTM <hidden_size = 4> (x, w, r, , , {name}, {name}) }}"""
    held = {"w": np.ones((1, 16, 2), np.float32), "r": np.ones((1, 16, 4), np.float32)}
    state = {name: np.zeros((1, batch, 4), np.float32)}
    assert reasons(program(text, **held, **state), name) == [reason]
    assert reasons(program(text, **held, **{name: np.arange(batch * 4, dtype=np.float32).reshape(1, -1, 4)}), name) == [
        ""
    ]


@pytest.mark.parametrize(
    ("name", "cell", "reason"),
    [
        ("zeros", "f = Sigmoid (x)  y = Mul (f, zeros)", STARTS),
        ("zeros_1", "h = MatMul (zeros_1, w)  f = Sigmoid (h)  g = Add (f, x)  y = Mul (g, zeros_1)", STARTS),
        ("state", "f = Sigmoid (x)  y = Mul (f, state)", ""),
        ("zeros", "h = MatMul (zeros, w)  y = Add (h, x)", ""),
        ("zeros", "y = MatMul (x, zeros)", ""),
    ],
)
def test_zeros_that_a_written_out_cell_begins_with_are_not_trained(name: str, cell: str, reason: str) -> None:
    text = f"net (float[4,4] x) => (float[4,4] y) {{ {cell} }}"
    assert reasons(program(text, w=np.eye(4, dtype=np.float32), **{name: np.zeros((4, 4), np.float32)}), name) == [
        reason
    ]


def test_zeros_that_are_written_into_and_chosen_are_not_trained() -> None:
    text = """net (float[4,4] x, int64[4,1] i, bool[4,4] b) => (float[4,4] y)
        { s = ScatterND <reduction = "add"> (c, i, x)  y = Where (b, c, s) }"""
    assert reasons(program(text, c=np.zeros((4, 4), np.float32)), "c") == [STARTS]


def test_the_products_that_a_sampling_grid_adds_up_are_not_trained() -> None:
    """As affine_grid does of the identity, in images that are too large for exporters to add them up."""
    line = (np.arange(6, dtype=np.float32) * 2 + 1) / 6 - 1
    grid = np.stack([*np.meshgrid(line, line), np.ones((6, 6), np.float32)], -1).reshape(1, 36, 3, 1)
    products = grid * np.array([[1, 0], [0, 1], [0, 0]], np.float32)
    text = "net (float[1,36,2] x) => (float[1,36,2] y) { g = ReduceSum <keepdims = 0> (c, a)  y = Add (g, x) }"
    assert reasons(program(text, c=products, a=np.array([-2], np.int64)), "c") == ["places"]
    assert reasons(program(text, c=np.exp(products), a=np.array([-2], np.int64)), "c") == [""]


@pytest.mark.parametrize(("after", "reason"), [("Softmax", "a mask of nothing"), ("Relu", "")])
def test_zeros_that_join_scores_mask_nothing(after: str, reason: str) -> None:
    text = f"net (float[1,2,4,4] x) => (float[1,2,4,4] y) {{ s = Add (x, c) y = {after} (s) }}"
    assert reasons(program(text, c=np.zeros((1, 2, 4, 4), np.float32)), "c") == [reason]


@pytest.mark.parametrize(
    ("begins", "shape", "reason"),
    [
        ("Add (x, c)", (3, 4, 2), "what the examples of a batch begin with"),
        ("Concat <axis = 1> (c, x)", (3, 2, 2), "what the examples of a batch begin with"),
        ("Add (x, c)", (1, 4, 2), ""),
        ("Add (x, c)", (3, 1, 1), ""),
        ("MatMul (c, x)", (3, 4, 4), ""),
    ],
)
def test_a_state_of_zeros_is_not_trained(begins: str, shape: tuple[int, ...], reason: str) -> None:
    text = f"net (float[3,4,2] x) => (float[3,k,2] z) {{ y = {begins} z = Relu (y) }}"
    assert reasons(program(text, c=np.zeros(shape, np.float32)), "c") == [reason]
    some = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert reasons(program(text, c=some), "c") == [""]


@pytest.mark.parametrize(
    ("made", "shape", "reason"),
    [
        ("Conv (x, w)", (1, 5, 1, 1), ""),
        ("Conv (x, w)", (1, 5, 4, 1), "a mask of nothing"),
        ("MatMul (x, v)", (1, 1, 4), ""),
        ("MatMul (x, x)", (1, 1, 4), "a mask of nothing"),
    ],
)
def test_zeros_that_are_added_to_scores_may_be_a_bias(made: str, shape: tuple[int, ...], reason: str) -> None:
    """As of a segmentation that begins; where nothing known is multiplied it is attention."""
    text = f"net (float[2,3,4,4] x) => (float y) {{ m = {made} s = Identity (m) a = Add (s, c) y = Softmax (a) }}"
    weights = {"w": np.ones((5, 3, 1, 1), np.float32), "v": np.ones((4, 4), np.float32)}
    assert reasons(program(text, c=np.zeros(shape, np.float32), **weights), "c") == [reason]


@pytest.mark.parametrize(
    ("reads", "number", "reason"),
    [
        ("Mul (x, c)", 0.0, "a mask of zeros and ones"),
        ("Add (x, c)", 0.0, "a mask of zeros and ones"),
        ("Mul (x, c)", 0.5, ""),
        ("Mul (x, c)", 1.0, ""),
        ("MatMul (x, c)", 0.0, ""),  # where weights begin as an identity
    ],
)
def test_zeros_and_ones_that_meet_elements_are_a_mask(reads: str, number: float, reason: str) -> None:
    content = np.eye(4, dtype=np.float32) + np.float32(number) * (1 - np.eye(4, dtype=np.float32))
    text = f"net (float[4,4] x) => (float[4,4] y) {{ y = {reads} }}"
    assert reasons(program(text, c=content), "c") == [reason]


ROTATION = """net (float[1,2,6,8] x) => (float[1,2,6,8] y) {
    a, b = Split <axis = -1, num_outputs = 2> (x)
    n = Neg (b)
    t = Concat <axis = -1> (n, a)
    p = Mul (x, c)
    q = Mul (t, s)
    y = Add (p, q)
}"""


def test_rotary_positions_that_the_exporter_computed_are_not_trained() -> None:
    turned = program(ROTATION, c=COSINES, s=SINES)
    assert reasons(turned, "c", "s") == ["cosines and sines of angles"] * 2
    assert not turned.parameters
    learned = np.random.default_rng(0).normal(size=COSINES.shape).astype(np.float32)
    assert reasons(program(ROTATION, c=learned, s=SINES), "c", "s") == ["", ""]


@pytest.mark.parametrize("order", ["halves", "in turn"])
def test_a_table_of_waves_is_not_trained(order: str) -> None:
    table = np.stack([np.sin(ANGLES), np.cos(ANGLES)], 1 if order == "halves" else 2).reshape(6, 8)
    table[0] = 0.0  # the row of padding
    text = "net (int64[2] i) => (float[2,8] y) { y = Gather (t, i) }"
    assert reasons(program(text, t=table), "t") == ["cosines and sines of angles"]
    noisy = table + np.random.default_rng(0).normal(size=table.shape).astype(np.float32) * np.float32(0.02)
    assert reasons(program(text, t=noisy), "t") == [""]  # trained on
    assert reasons(program(text, t=np.zeros((6, 8), np.float32)), "t") == [""]


GROUPS = """net (float[2,6,5] x) => (float[2,6,5] y) <int64[3] apart = {0, 2, -1}, int64[3] whole = {2, 6, 5}> {
    g = Reshape (x, apart)
    n = InstanceNormalization (g, c, s)
    r = Reshape (n, whole)
    m = Mul (r, w)
    y = Add (m, b)
}"""


def test_of_a_group_norm_scale_and_shift_of_channels_are_trained_alone() -> None:
    channels = {"w": np.ones((6, 1), np.float32), "b": np.zeros((6, 1), np.float32)}
    ones, zeros = np.ones(2, np.float32), np.zeros(2, np.float32)
    made = program(GROUPS, c=ones, s=zeros, **channels)
    assert [v.name for v in made.parameters] == ["w", "b"]
    alone = """net (float[2,6,5] x) => (float[2,6,5] y) { n = InstanceNormalization (x, c, s) y = Relu (n) }"""
    made = program(alone, c=np.ones(6, np.float32), s=np.zeros(6, np.float32))  # an instance norm, untrained
    assert [v.name for v in made.parameters] == ["c", "s"]
    each = alone.replace("y = Relu (n)", "m = Mul (n, w) y = Add (m, b)")  # of groups of one channel
    assert [
        v.name for v in program(each, c=np.ones(6, np.float32), s=np.zeros(6, np.float32), **channels).parameters
    ] == ["w", "b"]
    made = program(GROUPS, c=ones * 2, s=zeros, **channels)
    assert {v.name for v in made.parameters} == {"c", "w", "b"}


@pytest.mark.parametrize("held", ["scale", "Constant"])
def test_a_number_called_by_its_name_is_trained(held: str) -> None:
    """As the temperature of a contrastive model: y = x w exp(scale), and the mean of y falls by its gradient."""
    constant = "scale = Constant <value_float = 0.5> ()" if held == "Constant" else ""
    text = f"net (float[2,3] x) => (float[2,4] y) {{ {constant} p = MatMul (x, w) e = Exp (scale) y = Mul (p, e) }}"
    rng = np.random.default_rng(0)
    contents = {"w": rng.standard_normal((3, 4), np.float32)}
    contents |= {"scale": np.array(0.5, np.float32)} if held != "Constant" else {}
    made = program(text, **contents)
    done = amp.prepare_training(made, trainable=["*", "scale"])
    assert set(done.trainable) == {"w", "scale"}
    assert "'scale': trained, because named" in done.notes
    reread = amp.Program.from_onnx(made.to_onnx())
    assert {v.name for v in reread.parameters} == {"w", "scale"}
    with amp.program_guard(made, made.startup), amp.unique_name.guard():
        amp.optimizer.SGD(0.1).minimize(amp.nn.functional.mean(made.outputs[0]))
    exe, scope, x = amp.Executor(amp.CPUPlace()), amp.Scope(), rng.standard_normal((2, 3), np.float32)
    exe.run(made.startup, scope=scope)
    exe.run(made, {"x": x}, scope=scope)
    gradient = np.mean(x.astype(np.float64) @ contents["w"] * np.exp(0.5))
    assert scope.find_var("scale") == pytest.approx(0.5 - 0.1 * gradient, rel=1e-5)


def test_a_pattern_brings_in_no_number() -> None:
    made = program(
        "net (float[2,3] x) => (float[2,4] y) { p = MatMul (x, w) e = Exp (scale) y = Mul (p, e) }",
        w=np.ones((3, 4), np.float32),
        scale=np.array(0.5, np.float32),
    )
    assert amp.prepare_training(made, trainable=["*"]).trainable == ("w",)
    with pytest.raises(amp.AmpError, match=r"trainable: pattern 'scal\?' matches no parameter"):
        amp.prepare_training(made, trainable=["scal?"])


X, Y = np.meshgrid(np.arange(5, dtype=np.float32), np.arange(6, dtype=np.float32))
PLACES = {
    "a line": np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1),
    "a line in fp16": np.linspace(1, -1, 31).astype(np.float16),
    "one coordinate": Y * 8 + 4,
    "coordinates last": np.stack([X, Y, np.ones_like(X)], -1).reshape(30, 3, 1),
    "coordinates first": np.stack([X, Y])[None],
    "grids of three sizes": np.concatenate([np.mgrid[:n, :n].reshape(2, -1) for n in (8, 4, 2)], 1).astype(np.float32),
    "strides of three grids": np.repeat(np.array([8, 16, 32], np.float32), [64, 16, 4])[None],
}
NO_PLACES = {
    "few": np.arange(4, dtype=np.float32),
    "no order": np.tile(np.array([0, 2, 1, 3], np.float32), 4),
    "two levels": np.repeat(np.array([1, 3], np.float32), 8).reshape(4, 4),
    "counted": np.arange(16, dtype=np.float32).reshape(4, 4),
    "counted in columns": np.arange(16, dtype=np.float32).reshape(8, 2),
    "distances": np.arange(8, dtype=np.float32) - np.arange(8, dtype=np.float32)[:, None],
    "a filter": np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], np.float32),
    "zeros": np.zeros(768, np.float32),
    "numbers": np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32),
    "not even": (np.arange(16, dtype=np.float32) / 15) ** 1.1,
    "of eight bits": np.random.default_rng(0).integers(-128, 128, (64, 3)).astype(np.float32) / 64,
    "ones between zeros": np.repeat(np.array([0, 1, 0], np.float32), 8),
    "infinite": np.array([0] * 8 + [np.inf], np.float32),
}


@pytest.mark.parametrize("name", [*PLACES, *NO_PLACES])
def test_places_are_not_trained(name: str) -> None:
    content = {**PLACES, **NO_PLACES}[name]
    kind = "float16" if content.dtype == np.float16 else "float"
    made = program(f"net ({kind} x) => ({kind} y) {{ y = Add (x, c) }}", c=content)
    assert reasons(made, "c") == ["places" if name in PLACES else ""]


@pytest.mark.parametrize(
    "reads",
    ["m = MatMul (x, w) y = Add (m, c)", "y = Gemm (x, w, c)", "m = MatMul (x, w) y = LayerNormalization (m, c)"],
)
def test_a_bias_or_a_scale_may_be_counted(reads: str) -> None:
    contents = {"w": np.ones((4, 8), np.float32), "c": np.arange(8, dtype=np.float32)}
    assert reasons(program(f"net (float[2,4] x) => (float[2,8] y) {{ {reads} }}", **contents), "c") == [""]


def test_the_rates_that_a_state_space_layer_begins_with_are_trained() -> None:
    rates = np.broadcast_to(-np.arange(1, 17, dtype=np.float32), (4, 16)).copy()
    made = program("net (float[4,16] x) => (float[4,16] y) { t = Mul (x, c) y = Exp (t) }", c=rates)
    assert reasons(made, "c") == [""]
    logarithms = np.log(np.broadcast_to(np.arange(1, 5, dtype=np.float32), (16, 4)))  # as few look like places
    text = "net (float[16,4] x) => (float[16,4] y) { r = Exp (c) n = Neg (r) t = Mul (x, n) y = Exp (t) }"
    assert reasons(program(text, c=logarithms), "c") == [""]


def test_what_cannot_be_is_no_weight() -> None:
    """``jnp.var`` chooses between a variance and NaN, which jax2onnx writes as a tensor."""
    text = "net (float[2,4] x, bool some) => (float[2,4] y) { h = Mul(x, w) y = Where(some, h, never) }"
    made = program(text, w=np.full((2, 4), 1.5, np.float32), never=np.full((2, 4), np.nan, np.float32))
    assert reasons(made, "w", "never") == ["", "a mask"]


def test_numbers_are_no_weights() -> None:
    rng = np.random.default_rng(0)
    text = f"""
      net (float[1,2,4,4] x, float[1,3] position) => (float[1,2,4,4] y, float[1,3,2] angle)
        <float[2] scale = {{1.0, 1.0}}, float[2] bias = {{0.0, 0.0}}, float[2] mean = {{0.1, 0.2}},
         float[2] var = {{1.0, 2.0}}, float[4,4] causal = {{{", ".join(["0", "-3.4e38"] * 8)}}},
         int64[1] two = {{2}}>
      {{
        n = BatchNormalization(x, scale, bias, mean, var)
        m = Add(n, causal)
        y = Add(m, real)
        p = Unsqueeze(position, two)
        f = Mul(p, frequencies)
        angle = Cos(f)
      }}"""
    real, frequencies = (rng.normal(size=size).astype(np.float32) for size in ((4, 4), (1, 2)))
    made = program(text, real=real, frequencies=frequencies)
    found = {v.name: not_a_weight(v) for v in made.variables if v.data is not None and v.dtype == "float32"}
    assert found == {
        "scale": "",
        "bias": "",
        "mean": "statistics",
        "var": "statistics",
        "causal": "a mask",
        "real": "",
        "frequencies": "the frequencies of an angle",
    }
    assert {v.name for v in made.parameters} == {"scale", "bias", "real"}
    assert {v.name for v in made.variables if v.persistable} == {"scale", "bias", "real", "mean", "var"}


MOVED_NUMBERS = {
    "a causal half": ("a mask", "[4,4]", ["0", "-3.4e38"] * 8, "t = Trilu(c)  y = Add(x, t)"),
    "a part of a mask": (
        "a mask",
        "[4,4]",
        ["0", "-3.4e38"] * 8,
        "t, u = Split<axis=0, num_outputs=2>(c)  y = Add(x, t)",
    ),
    "two frequencies": (
        "the frequencies of an angle",
        "[4]",
        ["0.5"] * 4,
        "s, t = Split<num_outputs=2>(c)  u = Sin(s)  v = Cos(t)  y = Add(u, v)",
    ),
    "half frequencies": ("", "[4]", ["0.5"] * 4, "s, t = Split<num_outputs=2>(c)  u = Sin(s)  y = Add(u, t)"),
    "a dropped weight": ("", "[4,4]", ["0.5"] * 16, "t = Dropout(c)  y = MatMul(x, t)"),
    "a table": ("", "[4,4]", ["0.5"] * 16, "i = ArgMax(x)  t = Gather(c, i)  y = Sin(t)"),
}


@pytest.mark.parametrize("name", MOVED_NUMBERS)
def test_numbers_that_are_moved_first_are_no_weights(name: str) -> None:
    reason, shape, numbers, nodes = MOVED_NUMBERS[name]
    made = program(f"net (float[4,4] x) => (float[N] y) <float{shape} c = {{{', '.join(numbers)}}}> {{ {nodes} }}")
    assert not_a_weight(made.var("c")) == reason
