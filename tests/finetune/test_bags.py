"""EmbeddingBags as torch's dynamo exporter writes them, a loop over bags, train beside numpy with offsets that are fed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.finetune.bags import sum_bags
from amp_transpiler.nn import functional as F
from tests.nn.test_embedding_bag import ROWS, WIDTH, expected

#: What becomes of a bag that is not empty, and what of the last one.
SUM = "{ part = Slice (rows, start, end)  r = ReduceSum (part, z1) }"
MEAN = """{ part = Slice (rows, start, end)  less = Sub (count, one)  is_last = Equal (at, less)
  r = If (is_last) <
    then_branch = a () => (float[1,6] r1) { s = ReduceSum (part, z1)  n = Sub (size, start)  some = Greater (n, zero)
      r1 = If (some) <then_branch = d () => (float[1,6] m) { q = Cast <to = 1> (n)  m = Div (s, q) },
                      else_branch = e () => (float[1,6] m2) { m2 = Identity (s) }> },
    else_branch = b () => (float[1,6] r2) { r2 = ReduceMean (part, z1) }> }"""
MAX = """{ less = Sub (count, one)  is_last = Equal (at, less)
  part = If (is_last) <then_branch = a () => (float[k,6] p1) { p1 = Slice (rows, start, size) },
                       else_branch = b () => (float[k,6] p2) { p2 = Slice (rows, start, end) }>
  r = ReduceMax (part, z1) }"""
BODIES = {"sum": SUM, "mean": MEAN, "max": MAX}
#: With offsets alone, and with the end of the last bag among them.
ENDS = {
    "begins": ("offsets = Concat <axis = 0> (given, size)", "count = Size (given)"),
    "begins and end": ("offsets = Identity (given)", "all = Size (given)  count = Sub (all, one)"),
}


def net(branch: str, ends: str) -> str:
    offsets, count = ENDS[ends]
    return f"""<ir_version: 10, opset_import: ["" : 20]>
    net (int64[n] ids, int64[b] given) => (float[k,6] y)
      <float[1] weight = {{1}}, int64[1] flat = {{-1}}, int64 zero = {{0}}, int64 one = {{1}},
       int64 two = {{2}}, int64[1] z1 = {{0}}, int64[1] o1 = {{1}}>
    {{
      list = Reshape (ids, flat)  found = Gather (table, list)  size = Shape (list)
      wide = Expand (weight, size)  weights = Unsqueeze (wide, o1)  rows = Mul (found, weights)
      {offsets}  {count}  none = SequenceEmpty ()  runs = Less (zero, count)
      made, after = Loop (, runs, none, zero) <
        body = turn (int64 i, bool go, seq(float[1,6]) had, int64 at)
          => (bool on, seq(float[1,6]) has, int64 next) {{
          here = Reshape (at, flat)  step = CastLike (one, here)  there = Add (here, step)
          start = Slice (offsets, here, there)  beyond = Add (here, two)  end = Slice (offsets, there, beyond)
          empty = Equal (start, end)
          row = If (empty) <then_branch = t () => (float[1,6] zeros) <float[1,6] zeros = {{0, 0, 0, 0, 0, 0}}> {{}},
                            else_branch = f () => (float[1,6] r) {branch}>
          has = SequenceInsert (had, row)  next = Add (at, one)  on = Less (next, count)
        }}>
      y = ConcatFromSequence <axis = 0> (made)
    }}"""


def load(text: str, table: np.ndarray) -> amp.Program:
    made = onnx.parser.parse_model(text)
    made.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    return amp.Program.from_onnx(made)


@pytest.mark.parametrize(
    ("mode", "ends"), [("sum", "begins"), ("mean", "begins"), ("mean", "begins and end"), ("max", "begins and end")]
)
def test_bags_train_with_offsets_that_are_fed(mode: str, ends: str) -> None:
    rng = np.random.default_rng(0)
    table = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    program = load(net(BODIES[mode], ends), table)
    done = amp.prepare_training(program)
    assert "1 loops over bags of rows are operators over all bags" in done.notes
    assert not {"Size", "Loop"} & {op.type for op in program.operators} and done.trainable == ("table",)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mean(F.square(program.outputs[0]))
        amp.optimizer.SGD(1.0).minimize(loss)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    for ids, begins in (rng.integers(0, ROWS, 12), [0, 3, 3, 7]), (rng.integers(0, ROWS, 5), [0, 0, 5]):
        exe.run(program.startup, scope=scope)
        offsets = np.array([*begins, len(ids)])
        feed = {"ids": ids, "given": offsets if "end" in ends else offsets[:-1]}
        (found,) = exe.run(program, feed, ["y"], scope)
        bags = [ids[a:b].tolist() for a, b in pairwise(offsets)]
        result, gradient = expected(table.astype(np.float64), bags, mode)
        np.testing.assert_allclose(found, result, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(table - scope.find_var("table"), gradient, rtol=1e-4, atol=1e-6)


def test_rows_behind_the_last_bag_are_in_none() -> None:
    program = load(net(SUM, "begins and end"), np.eye(ROWS, WIDTH, dtype=np.float32))
    amp.prepare_training(program)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    (found,) = exe.run(program, {"ids": np.array([1, 2, 1, 5]), "given": np.array([0, 2, 3])}, ["y"], scope)
    np.testing.assert_array_equal(found, [[0, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]])


@pytest.mark.parametrize(
    "other",
    [
        SUM.replace("start, end", "start, size"),
        SUM.replace("start, end", "end, size"),
        SUM.replace("ReduceSum (part, z1)", "ReduceSum <keepdims = 0> (part, o1)"),
        SUM.replace("ReduceSum", "ReduceProd"),
        MEAN.replace("Sub (size, start)", "Sub (size, end)"),
        MEAN.replace("ReduceMean", "ReduceMax"),
        MEAN.replace("Greater (n, zero)", "Greater (n, one)"),
        MEAN.replace("Cast <to = 1> (n)", "Cast <to = 1> (size)"),
    ],
)
def test_what_is_no_bag_stays_a_loop(other: str) -> None:
    program = load(net(other, "begins and end"), np.ones((ROWS, WIDTH), np.float32))
    assert not sum_bags(program) and program.nesting


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("on = Less (next, count)", "on = Less (at, count)"),
        ("SequenceInsert (had, row)", "SequenceInsert (had, row, zero)"),
        ("next = Add (at, one)  on = Less (next,", "more = Add (at, one)  next = Add (at, two)  on = Less (more,"),
        ("Concat <axis = 0> (given, size)", "Concat <axis = 0> (size, given)"),
    ],
)
def test_other_turns_stay_a_loop(old: str, new: str) -> None:
    text = net(SUM, "begins")
    assert old in text
    program = load(text.replace(old, new), np.ones((ROWS, WIDTH), np.float32))
    assert not sum_bags(program) and program.nesting
