"""A tensor that an exporter repeated for each example of its fixed batch is trained as one."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

ROW = np.random.default_rng(0).normal(size=(1, 2, 4)).astype(np.float32)
ROWS = np.repeat(ROW, 3, 0)


def load(body: str, token: np.ndarray) -> amp.Program:
    text = f'<ir_version: 9, opset_import: ["" : 18]> net (float[3,2,4] x) => (float[3,k,4] y) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    weight = np.eye(4, dtype=np.float32)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in (("token", token), ("w", weight)))
    return amp.Program.from_onnx(model)


@pytest.mark.parametrize(
    "body",
    [
        "y = Add (x, token)",
        "y = Concat <axis = 1> (token, x)",
        "t = MatMul (token, w) y = Add (t, x)",
        "t = Add (token, x) y = Concat <axis = 1> (token, t)",
    ],
)
def test_a_token_repeated_for_each_example_is_one(body: str) -> None:
    program = load(body, ROWS)
    done = amp.prepare_training(program, restore=False)
    assert program.var("token").shape == (1, 2, 4)
    assert any("'token'" in note and "one for all examples" in note for note in done.notes)
    with amp.program_guard(program, program.startup):
        loss = F.mean(program.outputs[0] * program.outputs[0])
        gradients = {p.name: g for p, g in amp.append_backward(loss)}
    x = np.random.default_rng(1).normal(size=(3, 2, 4)).astype(np.float32)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    out, slope = exe.run(program, feed={"x": x}, fetch_list=[program.outputs[0], gradients["token"]], scope=scope)
    doubled, times = 2 * (ROWS + x) / out.size, 2 * ROWS / out.size
    expected = {
        "y = Add (x, token)": (ROWS + x, doubled),
        "y = Concat <axis = 1> (token, x)": (np.concatenate([ROWS, x], 1), times),
        "t = MatMul (token, w) y = Add (t, x)": (ROWS + x, doubled),
        "t = Add (token, x) y = Concat <axis = 1> (token, t)": (np.concatenate([ROWS, ROWS + x], 1), doubled + times),
    }[body]
    np.testing.assert_allclose(out, expected[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(slope, expected[1].sum(0, keepdims=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "added"),
    [
        ("y = Concat <axis = 2> (x, token)", False),
        ("y = Add (x, token)", True),
        (
            "first = Slice (x, zero, one, one) y = Add (first, token)",
            True,
        ),  # it gives the places of what it is added to
    ],
)
def test_sinks_repeated_for_each_example_and_place_are_one(body: str, added: bool) -> None:
    """One number for each head, which attention puts beside the scores of each query."""
    sinks = ROW[:, :1]
    head = '<ir_version: 9, opset_import: ["" : 18]> net (float[3,2,4] x) => (float[3,2,k] y)'
    model = onnx.parser.parse_model(f"{head} <int64[1] zero = {{0}}, int64[1] one = {{1}}> {{ {body} }}")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.tile(sinks, (3, 2, 1)), "token"))
    program = amp.Program.from_onnx(model)
    amp.prepare_training(program, restore=False)
    assert program.var("token").shape == (1, 1, 4)
    with amp.program_guard(program, program.startup):
        loss = F.mean(program.outputs[0] * program.outputs[0])
        ((_, gradient),) = amp.append_backward(loss)
    x = np.random.default_rng(1).normal(size=(3, 2, 4)).astype(np.float32)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    out, slope = exe.run(program, feed={"x": x}, fetch_list=[program.outputs[0], gradient], scope=scope)
    beside = x[:, :1] if "first" in body else x
    shown = beside + sinks if added else np.broadcast_to(sinks, x.shape)
    np.testing.assert_allclose(out[..., -4:], np.broadcast_to(shown, x.shape), rtol=1e-6)
    np.testing.assert_allclose(slope, (2 * out[..., -4:] / out.size).sum((0, 1), keepdims=True), rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "token"),
    [
        ("y = Add (x, token)", ROWS + np.arange(3, dtype=np.float32)[:, None, None]),  # not alike
        ("y = MatMul (x, token)", np.repeat(np.concatenate([ROW, ROW], 1), 3, 0)),  # a matrix for each expert
        ("t = Concat <axis = 0> (token, x) y = Slice (t, one, four)", np.repeat(ROW, 2, 0)),  # no batch
    ],
)
def test_what_may_differ_by_example_stays(body: str, token: np.ndarray) -> None:
    if "Slice" in body:
        body = "one = Constant <value_ints = [2]> () four = Constant <value_ints = [5]> () " + body
    program = load(body, token)
    amp.prepare_training(program, restore=False)
    assert program.var("token").shape == token.shape


@pytest.mark.parametrize(("name", "size"), [("embedding_1", 1), ("kinds", 5)])
def test_what_was_looked_up_for_each_place_is_one(name: str, size: int) -> None:
    """A matrix of rows that are alike may be a weight, where it has a name."""
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 18]> net (float[n,5,4] x) => (float[n,5,4] y) {{ y = Add (x, {name}) }}'
    )
    rows = np.repeat(ROW[:, :1], 5, 1)
    model.graph.initializer.append(onnx.numpy_helper.from_array(rows, name))
    program = amp.Program.from_onnx(model)
    done = amp.prepare_training(program, restore=False)
    assert program.var(name).shape == (1, size, 4) and (size > 1) != any("one for all places" in n for n in done.notes)


def test_what_was_looked_up_for_each_text_is_one_where_texts_are_several_an_example() -> None:
    """As the choices of a multiple choice, which lie behind each other."""
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18]> net (float[2,3,5,4] x) => (float[6,5,4] y)
            <int64[3] sizes = {6, 5, 4}> { texts = Reshape (x, sizes)  y = Add (texts, embedding_1) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.tile(ROW[:1, :1], (6, 5, 1)), "embedding_1"))
    program = amp.Program.from_onnx(model)
    amp.prepare_training(program, restore=False)
    assert program.var("embedding_1").shape == (1, 1, 4)
