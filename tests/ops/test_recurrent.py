"""Gradients of LSTM, GRU and RNN: against central differences of a plain numpy oracle, and against torch's."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.helpers import recurrent_oracle
from tests.helpers.forwardcheck import check_forward
from tests.helpers.gradcheck import Case, Gradient, check_gradient
from tests.helpers.node_by_node import node_by_node
from tests.helpers.recurrent_oracle import uneven
from tests.helpers.rules import run_reference

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
TYPES = sorted(GATES)


def inputs(
    type_: str,
    *,
    directions: int = 1,
    steps: int = 4,
    batch: int = 3,
    width: int = 2,
    hidden: int = 3,
    lengths: list[int] | None = None,
    states: bool = True,
    bias: bool = True,
    peepholes: bool = False,
    first: bool = False,
    scale: float = 0.7,
    seed: int = 0,
) -> list[np.ndarray | None]:
    """Inputs of one recurrent operator."""
    rng = np.random.default_rng(seed)
    gates = GATES[type_] * hidden

    def normal(*shape: int) -> np.ndarray:
        return scale * rng.normal(size=shape)

    x, state = (
        ((batch, steps, width), (batch, directions, hidden))
        if first
        else ((steps, batch, width), (directions, batch, hidden))
    )
    found = [
        normal(*x),
        normal(directions, gates, width),
        normal(directions, gates, hidden),
        normal(directions, 2 * gates) if bias else None,
        None if lengths is None else np.array(lengths, np.int32),
        normal(*state) if states else None,
    ]
    if type_ == "LSTM":
        found += [normal(*state) if states else None, normal(directions, 3 * hidden) if peepholes else None]
    return found


def check(
    type_: str,
    *,
    through: tuple[int, ...] | None = None,
    attrs: dict[str, Any] | None = None,
    half: tuple[str, ...] = ("float16",),
    alone: bool = True,
    **shape: Any,
) -> None:
    given = inputs(type_, first=bool((attrs or {}).get("layout")), **shape)
    attrs = {"hidden_size": shape.get("hidden", 3), **(attrs or {})}
    outputs = 3 if type_ == "LSTM" else 2
    check_gradient(
        type_,
        given,
        attrs=attrs,
        outputs=outputs,
        through=tuple(range(outputs)) if through is None else through,
        forward=partial(recurrent_oracle.run, type_, attrs),
        feeds=(4,),
        half=half,
        alone=alone,
    )


@pytest.mark.parametrize("type_", TYPES)
def test_plain(type_: str) -> None:
    check(type_, half=("float16", "bfloat16"))


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
@pytest.mark.parametrize("layout", [0, 1])
def test_directions_layouts_and_lengths(type_: str, direction: str, layout: int) -> None:
    attrs = {"direction": direction, "layout": layout}
    count = 2 if direction == "bidirectional" else 1
    check(type_, directions=count, attrs=attrs, alone=False)
    check(type_, directions=count, attrs=attrs, lengths=[4, 2, 1])


@pytest.mark.parametrize("type_", TYPES)
def test_an_empty_sequence_and_one_step(type_: str) -> None:
    check(type_, directions=2, attrs={"direction": "bidirectional"}, lengths=[0, 4, 3], alone=False)
    check(type_, steps=1, directions=2, attrs={"direction": "bidirectional"}, lengths=[1, 0, 1], alone=False)
    check(type_, steps=1, batch=1, alone=False)


@pytest.mark.parametrize("type_", TYPES)
def test_more_steps_than_are_unrolled_on_cpu(type_: str) -> None:
    check(type_, steps=11, directions=2, attrs={"direction": "bidirectional"}, lengths=[11, 7, 3], alone=False)
    check(type_, steps=40, batch=1, scale=0.5, alone=False)


@pytest.mark.parametrize("type_", TYPES)
def test_a_batch_that_stands_on_the_right_of_products_on_cpu(type_: str) -> None:
    lengths = [6, 4, 1, 0, 5, 6, 2, 3, 6]
    attrs: dict[str, Any] = {"linear_before_reset": 1} if type_ == "GRU" else {}
    check(
        type_,
        steps=6,
        batch=9,
        directions=2,
        attrs={"direction": "bidirectional", **attrs},
        lengths=lengths,
        alone=False,
    )
    check(type_, steps=5, batch=8, hidden=4, attrs={"direction": "reverse", "layout": 1, **attrs}, half=(), alone=False)
    if type_ == "LSTM":
        check(
            type_,
            steps=6,
            batch=8,
            peepholes=True,
            attrs={"input_forget": 1, "clip": 0.6},
            lengths=lengths[:8],
            alone=False,
        )


@pytest.mark.parametrize("type_", TYPES)
def test_each_output_alone(type_: str) -> None:
    for slot in range(3 if type_ == "LSTM" else 2):
        check(type_, through=(slot,), half=())
        check(type_, through=(slot,), lengths=[4, 1, 3], states=False, bias=False, half=())


@pytest.mark.parametrize("before", [0, 1])
def test_gru_resets_before_or_after_the_product(before: int) -> None:
    for bias in (True, False):
        check(
            "GRU",
            attrs={"linear_before_reset": before, "direction": "bidirectional"},
            directions=2,
            lengths=[4, 1, 3],
            bias=bias,
        )


@pytest.mark.parametrize("coupled", [0, 1])
@pytest.mark.parametrize("lengths", [None, [4, 1, 3]])
def test_lstm_peepholes_and_coupled_gates(coupled: int, lengths: list[int] | None) -> None:
    attrs = {"input_forget": coupled, "direction": "bidirectional"}
    check("LSTM", attrs=attrs, directions=2, peepholes=True, lengths=lengths)
    check("LSTM", attrs=attrs, directions=2, lengths=lengths, half=())
    check("LSTM", attrs={"input_forget": coupled}, peepholes=True, steps=12, half=(), alone=False)


@pytest.mark.parametrize("type_", TYPES)
def test_clip(type_: str) -> None:
    check(type_, attrs={"clip": 0.45}, scale=1.5, half=(), alone=False)
    if type_ == "LSTM":
        check(type_, attrs={"clip": 0.45}, scale=1.5, peepholes=True, half=(), alone=False)


@pytest.mark.parametrize("name", sorted(recurrent_oracle.ACTIVATIONS))
@pytest.mark.parametrize("type_", TYPES)
def test_activations(type_: str, name: str) -> None:
    count = {"LSTM": 3, "GRU": 2, "RNN": 1}[type_]
    parameters = len(recurrent_oracle.ACTIVATIONS[name][1])
    given = {"activations": [name] * count}
    for which, value in zip(("alpha", "beta"), (0.35, 0.2), strict=False):
        if parameters and (which == "alpha" or parameters == 2):
            given[f"activation_{which}"] = [value] * count
    check(type_, attrs=given, half=(), scale=0.4, alone=False)
    check(type_, attrs={"activations": [name] * count}, half=(), scale=0.4, alone=False)


def test_activations_take_their_numbers_in_order() -> None:
    names = ["HardSigmoid", "Tanh", "LeakyRelu", "Sigmoid", "Affine", "Elu"]
    attrs = {
        "activations": names,
        "activation_alpha": [0.3, 0.1, 0.8, 0.6],
        "activation_beta": [0.45, 0.2],
        "direction": "bidirectional",
    }
    check("LSTM", attrs=attrs, directions=2, half=(), alone=False)


def forward(type_: str, attrs: dict[str, Any], **shape: Any) -> None:
    given = inputs(type_, first=bool(attrs.get("layout")), **shape)
    attrs = {"hidden_size": shape.get("hidden", 3), **attrs}
    oracle = partial(recurrent_oracle.run, type_, attrs)
    check_forward(
        type_, given, attrs=attrs, outputs=3 if type_ == "LSTM" else 2, feeds=(4,), half=("float16",), forward=oracle
    )


@pytest.mark.parametrize("type_", TYPES)
def test_forms_without_a_kernel_are_composed(type_: str) -> None:
    both = {"direction": "bidirectional"}
    forward(type_, {"layout": 1, "linear_before_reset": 1} if type_ == "GRU" else {"layout": 1})
    forward(type_, {"layout": 1, **both}, directions=2, lengths=[4, 0, 2])
    forward(type_, {"clip": 0.4}, scale=1.5)
    forward(type_, both, directions=2, lengths=[0, 4, 1], states=False, bias=False)
    forward(type_, {"activations": ["Elu"] * {"LSTM": 3, "GRU": 2, "RNN": 1}[type_]}, scale=0.4)


@pytest.mark.parametrize("type_", TYPES)
def test_splits_and_concats_are_such_that_a_cuda_graph_can_be_replayed(type_: str) -> None:
    for before in (0, 1) if type_ == "GRU" else (0,):
        attrs = {"hidden_size": 3, "direction": "bidirectional", "linear_before_reset": before}
        given = inputs(type_, directions=2, steps=5, lengths=[5, 2, 3], peepholes=type_ == "LSTM")
        if type_ != "GRU":
            del attrs["linear_before_reset"]
        outputs = recurrent_oracle.run(type_, attrs, *given)
        case = Case(type_, given, attrs, len(outputs), range(len(outputs)), [0, 1, 2, 3, 5], (4,))
        values = {f"x{i}": a for i, a in enumerate(given) if a is not None}
        values |= {f"y{i}": y for i, y in enumerate(outputs)} | {f"dy{i}": y for i, y in enumerate(outputs)}
        assert not uneven(Gradient(case, "float32", values, case.wrt).model("cuda"))


@pytest.mark.parametrize("type_", TYPES)
def test_products_of_all_steps_are_of_16_bit_on_a_gpu(type_: str) -> None:
    """Alone that of a step stays fp32: its errors would go on to all steps before it."""
    attrs = {"hidden_size": 16, "direction": "bidirectional", **({"linear_before_reset": 1} if type_ == "GRU" else {})}
    given = inputs(type_, directions=2, steps=20, width=8, hidden=16, scale=0.4)
    given = [None if a is None else a.astype(np.float16).astype(np.float64) for a in given]
    y, *_ = recurrent_oracle.run(type_, attrs, *given)
    y = y.astype(np.float16).astype(np.float64)
    case = Case(type_, given, attrs, wrt=range(4), forward=lambda *_: [y])
    values = {f"x{i}": a for i, a in enumerate(given) if a is not None} | {"y0": y, "dy0": y[::-1]}
    wide, half = (Gradient(case, dtype, values, case.wrt) for dtype in ("float64", "float16"))
    truth = wide.model("reference")
    wanted = run_reference(truth, wide.feeds(truth))
    model = half.model("cuda")
    known = node_by_node(model, half.feeds(model))
    for output, right in zip(model.graph.output, wanted, strict=True):
        assert np.linalg.norm(known[output.name] - right) < 2.0**-10 * np.linalg.norm(right), output.name
    if type_ == "GRU":  # gates' gradients are the state's times factors that lie side by side
        assert sum(node.op_type == "Concat" for node in model.graph.node) < 20
    products = [node for node in model.graph.node if node.op_type in ("Gemm", "MatMul")]
    assert {(node.op_type, str(known[node.input[0]].dtype)) for node in products} == {
        ("Gemm", "float16"),
        ("MatMul", "float32"),
    }


def test_forms_of_lstm_and_gru_without_a_kernel_are_composed() -> None:
    forward("GRU", {"linear_before_reset": 1, "direction": "reverse"}, lengths=None)
    forward("RNN", {"direction": "reverse", "layout": 1})
    forward("LSTM", {"direction": "reverse"}, peepholes=True)
    forward("LSTM", {"input_forget": 1, "clip": 0.5}, peepholes=True, lengths=[4, 2, 3])
    forward("GRU", {})
    forward("GRU", {"linear_before_reset": 1, "direction": "reverse"}, lengths=[1, 4, 3], bias=False)
