"""Exchanges between ranks anywhere in a step: when what is sent, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler import distributed
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.exchange_call import Ranks
from amp_transpiler.ir.infer import declare_outputs
from amp_transpiler.ir.nodes import OWN, Operator
from amp_transpiler.ir.opdef import lowering_rule, own
from amp_transpiler.nn import functional as F
from amp_transpiler.ops.training.exchange import exchange, exchanged
from amp_transpiler.passes.lowering.exchanges import by_itself, taken_apart
from amp_transpiler.passes.lowering.rounds import BUCKET, MUCH, WORK, Rounds, rounds

SMALL = 64


def planned(graph: Mapping[str, str], sizes: Mapping[str, int], uneven: Sequence[str] = ()) -> tuple[Rounds, list[str]]:
    """The rounds of ``{node: the nodes it reads}``, and the parts with the sends behind them as text."""
    number = {name: i for i, name in enumerate(graph)}
    reads = [[number[other] for other in names.split()] for names in graph.values()]
    found = rounds(reads, {number[name]: size for name, size in sizes.items()}, {number[name] for name in uneven})
    lines = []
    for part in range(found.parts):
        here = [name for name, i in number.items() if found.part[i] == part]
        sent = sorted(
            (name for name in here if name in sizes), key=lambda name: (found.send[number[name]], -number[name])
        )
        lines.append(" ".join(name for name in here if name not in sizes) + " | " + " ".join(sent))
    return found, lines


def test_gradients_leave_in_buckets_and_are_waited_for_last() -> None:
    graph = {"f1": "", "f2": "f1", "loss": "f2", "b2": "loss", "g2": "b2", "b1": "b2", "g1": "b1"}
    graph |= {"r1": "g1", "r2": "g2", "u1": "r1", "u2": "r2"}
    _, lines = planned(graph, {"r1": BUCKET, "r2": BUCKET})
    assert lines == ["f1 f2 loss b2 g2 | r2", "b1 g1 | r1", "u1 u2 | "]
    assert planned(graph, {"r1": 8, "r2": 8})[1] == ["f1 f2 loss b2 g2 b1 g1 | r2 r1", "u1 u2 | "]


def test_what_others_wait_for_leaves_by_itself_and_what_is_equally_deep_together() -> None:
    graph = {
        "a": "",
        "b": "",
        "xa": "a",
        "xb": "b",
        "c": "xa xb",
        "xc": "c",
        "d": "xc",
        "g": "d xa",
        "xg": "g",
        "u": "xg",
    }
    assert planned(graph, dict.fromkeys(("xa", "xb", "xc", "xg"), 8))[1] == [
        "a b | xb xa",
        "c | xc",
        "d g | xg",
        "u | ",
    ]


def test_a_gradient_travels_while_the_exchanges_of_the_backward_pass_go_on() -> None:
    graph = {"y": "", "g2": "y", "s": "y", "xs": "s", "d": "xs", "g1": "d", "x1": "g1", "x2": "g2", "u": "x1 x2"}
    found, lines = planned(graph, {"xs": 8, "x1": 4 * BUCKET, "x2": 4 * BUCKET})
    assert lines == ["y g2 s | xs x2", "d g1 | x1", "u | "]
    assert found.send[6] > found.send[3] and found.part[7] < found.parts - 1


def test_gradients_are_made_when_the_backward_pass_comes_by() -> None:
    """What they read would be kept until their bucket leaves otherwise."""
    graph = {"d3": "", "x3": "d3", "d2": "x3", "g2": "d2", "x2": "d2", "d1": "x2", "g1": "d1", "r2": "g2", "r1": "g1"}
    graph |= {"u2": "r2", "u1": "r1"}
    _, lines = planned(graph, dict.fromkeys(("x3", "x2", "r2", "r1"), 8))
    assert lines == ["d3 | x3", "d2 g2 | x2", "d1 g1 | r1 r2", "u2 u1 | "]


def test_what_can_be_computed_meanwhile_is_a_part_where_much_travels() -> None:
    others = {f"n{i}": f"n{i - 1}" if i else "" for i in range(WORK)}
    graph = {"ids": "", "xi": "ids", "rows": "xi", **others, "y": f"rows n{WORK - 1}", "xy": "y", "z": "xy"}
    chain = " ".join(others)
    assert planned(graph, {"xi": MUCH, "xy": 8})[1] == ["ids | xi", f"{chain} | ", "rows y | xy", "z | "]
    assert planned(graph, {"xi": MUCH - 1, "xy": 8})[1] == ["ids | xi", f"rows {chain} y | xy", "z | "]


def test_other_sizes_on_another_rank_change_no_order() -> None:
    graph = {"a": "", "b": "", "c": "", "xa": "a", "xb": "b", "xc": "c", "u": "xa xb xc"}
    for size in (8, 9 * BUCKET):
        _, lines = planned(graph, {"xa": BUCKET, "xb": size, "xc": BUCKET}, ["xb"])
        assert lines == ["c | xc", "a b | xb xa", "u | "]


@pytest.mark.parametrize("seed", range(60))
def test_parts_and_sends_of_any_graph(seed: int) -> None:
    rng = np.random.default_rng(seed)
    reads: list[list[int]] = []
    sizes: dict[int, int] = {}
    for i in range(60):
        free = [j for j in range(i) if j not in sizes]
        if free and rng.random() < 0.25:  # an exchange, of something that a node has made
            sizes[i] = int(rng.choice([8, MUCH, BUCKET]))
            reads.append([int(rng.choice(free))])
        else:
            reads.append(sorted({int(j) for j in rng.integers(0, i, 2)}) if i and rng.random() < 0.8 else [])
    found = rounds(reads, sizes)
    computed = {found.part[i] for i in range(60) if i not in sizes}
    assert computed == set(range(found.parts))
    for i, of_node in enumerate(reads):
        for j in of_node:
            if j not in sizes:
                assert found.part[j] <= found.part[i]  # there, and for an exchange not before its end
            else:
                assert found.part[j] < found.part[i]  # what is received is read in a later part
    order = sorted(sizes, key=lambda i: (found.send[i], -i))
    assert [found.part[i] for i in order] == sorted(found.part[i] for i in order)
    behind: dict[int, set[int]] = {}
    for i, of_node in enumerate(reads):
        behind[i] = {k for j in of_node for k in behind[j] | ({j} if j in sizes else set())}
        assert i not in sizes or all(found.send[j] < found.send[i] for j in behind[i])


# -- what ranks compute ---------------------------------------------------------------------------------------------
@exchange(own("SwapBlocks"))
def _swap(ranks: Ranks, sent: Sequence[Any], received: Sequence[Any], attrs: Mapping[str, Any]) -> None:
    for number, part in enumerate(ranks.all_to_all(list(sent[0]))):
        received[0][number] = part


@lowering_rule(
    own("SwapBlocks"), native=True, infer=lambda op: [(v.dtype, v.shape) for v in op.inputs if v is not None]
)
def _swap_blocks(e: Emitter, op: Operator, blocks: Value) -> Sequence[Value]:
    return exchanged(e, "SwapBlocks", [blocks])


def appended(type_: str, value: amp.Variable, **attrs: Any) -> amp.Variable:
    program = value.program
    new = program.add_variable(program.unique(type_), value.dtype, value.shape)
    program.add_operator(type_, [value], [new], attrs=attrs, domain=OWN)
    return new


def run(build: Callable[[amp.Variable], Sequence[amp.Variable]], shape: tuple[int, ...]) -> tuple[list[Any], list[str]]:
    """The results on this rank, whose x is full of (rank + 1), and the parts of the step as text."""
    main = amp.Program()
    with amp.program_guard(main, amp.Program()), amp.unique_name.guard():
        wanted = build(amp.data("x", list(shape), "float32"))
    x = np.full(shape, distributed.rank() + 1, np.float32)
    exe = amp.Executor(amp.CPUPlace())
    for _ in range(2):
        found = exe.run(main, {"x": x}, list(wanted), amp.Scope())
    model, ends, _ = taken_apart(main.lower(amp.CPUPlace(), fetch_list=list(wanted), feed_shapes={"x": shape}).model)
    types = [node.op_type for node in model.graph.node]
    return found, [" ".join(types[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def test_a_forward_pass_may_wait_for_others_again_and_again() -> None:
    def build(x: amp.Variable) -> list[amp.Variable]:
        mean = appended("AllReduce", x * x, precision="float32")  # 14 / 3 of three ranks
        inner = appended("AllReduce", mean * x, precision="float32")  # times 2
        return [inner + x, mean, appended("AllReduce", x, precision="float32"), F.exp(x)]

    for rank, (found, parts) in enumerate(distributed.simulate(3, lambda: run(build, (2, 3)))):
        mine, mean = rank + 1, 14 / 3
        for array, value in zip(found, (2 * mean + mine, mean, 2, np.exp(mine)), strict=True):
            np.testing.assert_allclose(array, np.full((2, 3), value), rtol=1e-6)
        assert len(parts) == 3 and parts[0].startswith("Mul") and "Exp" in parts[0]


def test_what_another_call_of_the_engine_does_is_its_definition_alone() -> None:
    """Blocks to all, what came back to all again, and what is neither sent nor received beside."""

    def build(x: amp.Variable) -> list[amp.Variable]:
        numbered = x * x.program.add_constant("scale", np.array([[1], [10], [100]], np.float32))
        there = appended("SwapBlocks", numbered)
        return [there, appended("SwapBlocks", there), numbered]

    for rank, (found, parts) in enumerate(distributed.simulate(3, lambda: run(build, (3, 2)))):
        scale = np.array([[1], [10], [100]], np.float32)
        np.testing.assert_array_equal(found[0], np.array([[1], [2], [3]]) * scale[rank] * np.ones((1, 2)))
        np.testing.assert_array_equal(found[1], found[2])
        np.testing.assert_array_equal(found[2], (rank + 1) * scale * np.ones((1, 2)))
        assert len(parts) == 3


def test_by_itself_a_rank_receives_what_it_sends() -> None:
    """As the search for the culprit of a bad step runs it, and a program of several ranks in one process."""
    main = amp.Program()
    with amp.program_guard(main, amp.Program()):
        x, ids = amp.data("x", [2, 3], "float32"), amp.data("ids", [2], "int64")
    rows, values = (main.add_variable(name, None, None) for name in ("rows", "values"))
    attrs = {"ranks": 3, "precision": "float16"}
    declare_outputs(main.add_operator("AllGatherRows", [ids, x], [rows, values], attrs=attrs, domain=OWN))
    wanted = [rows, values, appended("AllReduce", x, precision="float32")]
    feed = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "ids": np.array([4, 1])}
    lowered = main.lower(amp.CPUPlace(), fetch_list=wanted)
    alone = ort.InferenceSession(by_itself(lowered.model).SerializeToString())
    for found in (
        alone.run([port.tensor for port in lowered.fetches], feed),
        amp.Executor(amp.CPUPlace()).run(main, feed, wanted, amp.Scope()),
    ):
        np.testing.assert_array_equal(found[0], [4, 1] * 3)
        np.testing.assert_array_equal(found[1], np.tile(feed["x"], (3, 1)))
        np.testing.assert_array_equal(found[2], feed["x"])
