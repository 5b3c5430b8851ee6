"""Models with operators in nested graphs for which a place may have no kernel, or one that fails: their feeds, and an operator
in them that it cannot be left to."""

from __future__ import annotations

import numpy as np
import onnx

from tests.helpers.sessions import run

#: The elements of each row of v but the last, read backwards.
_BACK = """two = Constant <value_ints = [2]> ()  end = Constant <value_ints = [-100]> ()
           axis = Constant <value_ints = [1]> ()  back = Constant <value_ints = [-1]> ()
           s = Slice(v, two, end, axis, back)"""
X = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
TEXTS: dict[str, tuple[str, dict[str, np.ndarray], str]] = {
    "branches": (
        f"""(float[2,4] x, bool c) => (float[2,3] y) {{
          v = Neg(x)
          y = If (c) <then_branch = yes () => (float[2,3] a) {{ {_BACK} a = Neg(s) }},
                      else_branch = no () => (float[2,3] a) {{ {_BACK} a = Abs(s) }}> }}""",
        {"x": X},
        "Slice",
    ),
    "branches of a branch": (
        """(float[2,4] x, bool c) => (float[2,1] y) {
          y = If (c) <
            then_branch = yes () => (float[2,1] a) {
              much = Constant <value_float = 500.0> ()
              z = Add(x, much)
              a = If (c) <then_branch = both () => (float[2,1] b) { b = ReduceLogSumExp <axes = [1]> (z) },
                          else_branch = one () => (float[2,1] b) { b = ReduceMax <axes = [1]> (z) }> },
            else_branch = no () => (float[2,1] a) { z = Mul(x, x)  a = ReduceLogSumExp <axes = [1]> (z) }> }""",
        {"x": X},
        "ReduceLogSumExp",
    ),
    "a recurrent layer of a branch": (
        """(float[2,1,4] x, bool c, float[1,4,4] w, float[1,4,1] r) => (float[2,1,1,1] y) {
          y = If (c) <then_branch = yes () => (float[2,1,1,1] a) { a = LSTM <hidden_size = 1> (x, w, r) },
                      else_branch = no () => (float[2,1,1,1] a) { b = LSTM <hidden_size = 1> (x, w, r)  a = Neg(b) }> }""",
        {"x": X[:, None], "w": np.resize(X, (1, 4, 4)), "r": X[:1, :, None]},
        "LSTM",
    ),
    "integers of branches": (
        """(float[2,4] x, bool c, int64[2] k) => (int64[2] y, float[2,4] z) {
          y, z = If (c) <
            then_branch = yes () => (int64[2] a, float[2,4] b) {
              t = Add(k, k)  m = ArgMax <axis = 1, keepdims = 0> (x)  a = Mul(t, m)  b = LogSoftmax(x) },
            else_branch = no () => (int64[2] a, float[2,4] b) {
              t = LogSoftmax(x)  b = LogSoftmax <axis = 0> (t)  a = Constant <value_ints = [7, -7]> () }> }""",
        {"x": X, "k": np.array([3, -5])},
        "LogSoftmax",
    ),
    "a loop": (
        f"""(float[2,4] x, bool c, int64 n) => (float[2,4] y, int64 t) {{
          t0 = Constant <value_int = 40> ()
          y, t = Loop (n, c, x, t0) <body = turn (int64 i, bool on, float[2,4] v, int64 k)
                                       => (bool go, float[2,4] w, int64 l) {{
            go = Identity(on)  l = Add(k, i)  {_BACK}
            zero = Constant <value_ints = [0]> ()  three = Constant <value_ints = [3]> ()
            l1 = Unsqueeze(l, zero)  last = Slice(v, three, l1, axis)  f = LogSoftmax <axis = 0> (last)
            w = Concat <axis = 1> (s, f) }}> }}""",
        {"x": X, "n": np.array(3)},
        "LogSoftmax",
    ),
    "a scan": (
        f"""(float[n,2,4] x) => (float[n,2,3] y) {{
          y = Scan <num_scan_inputs = 1, body = turn (float[2,4] v) => (float[2,3] w) {{ {_BACK} w = Neg(s) }}> (x) }}""",
        {"x": np.stack([X, 2 * X])},
        "Slice",
    ),
}


def nested(name: str, chosen: bool) -> tuple[onnx.ModelProto, dict[str, np.ndarray], list[np.ndarray], str]:
    """A model, its feeds, what onnxruntime's CPU kernels make of the model as it stands, and the operator."""
    text, feed, type_ = TEXTS[name]
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> net {text}')
    feed = feed | ({"c": np.array(chosen)} if any(info.name == "c" for info in model.graph.input) else {})
    return model, feed, run(model, feed), type_
