"""Concat and Split as CUDA's kernels take them: 32 tensors, pieces of one length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.helpers.cuda_kernels import with_tables
from tests.helpers.places import change_place
from tests.helpers.sessions import run

X = np.random.default_rng(0).normal(size=(2, 7)).astype(np.float32)


def many_pieces() -> tuple[amp.Program, amp.Program, list[amp.Variable]]:
    """A step of a program that cuts into pieces of several lengths, into many, and joins as many."""
    main, startup = amp.Program("pieces"), amp.Program("startup")
    main.random_seed = startup.random_seed = 3
    with amp.program_guard(main, startup), amp.unique_name.guard():
        h = amp.nn.fc(amp.data("x", [2, 7]), 140, act="tanh")
        first = F.split(h, [3, 40, 40, 40, 1, 16], axis=1)
        pieces = F.split(F.concat(first[1:4], axis=1), [1] * 40 + [2] * 40, axis=1)
        joined = F.concat([first[0], *pieces[::-1], *first[4:]], axis=-1)
        loss = F.mean(joined * joined * F.assign(np.arange(140, dtype=np.float32)))
        amp.optimizer.SGD(0.1).minimize(loss, startup)
    return main, startup, [loss, joined]


def test_a_program_and_its_gradients_make_no_table() -> None:
    main, _, fetched = many_pieces()
    model = main.lower(amp.CUDAPlace(0), fetch_list=fetched).model
    assert with_tables(model) == []
    assert {"Concat", "Slice", "Split"} <= {node.op_type for node in model.graph.node}


def test_every_number_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, three steps."""
    found = []
    for traits in ({}, {"by_address": True, "most_tensors": 5, "most_pieces": 5}):
        change_place(monkeypatch, "cpu", **traits)
        main, startup, fetched = many_pieces()
        assert bool(with_tables(main.lower(amp.CPUPlace(), fetch_list=fetched).model, 5)) != bool(traits)
        scope, exe = amp.Scope(), amp.Executor(threads=1, optimization_level="basic")
        exe.run(startup, scope=scope)
        steps = [exe.run(main, {"x": X * n}, fetched, scope) for n in (1, 2, 3)]
        found.append([array.tobytes() for step in steps for array in step])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("opset", "split", "kinds"),
    [
        (11, "Split<axis=1, split=[3, 3, 1]>(h)", ["Slice", "Split", "Slice"]),
        (18, "Split<axis=-1, num_outputs=3>(h)", ["Slice", "Split", "Slice"]),
        (18, "Split<axis=1, num_outputs=3>(x)", ["Slice", "Split", "Slice"]),
        (18, "Split<axis=1>(h, sizes)", ["Slice", "Slice", "Slice"]),
        (18, "Split<axis=1>(h, computed)", ["Split"]),
        (18, "Split<axis=1>(h, none)", ["Slice", "Slice", "Slice"]),
    ],
)
def test_imported_models(opset: int, split: str, kinds: list[str], tmp_path: Path) -> None:
    graph = f"""<ir_version: 8, opset_import: ["" : {opset}]>
        g (float[2, 7] x, int64[3] computed) => (float[2, n] a, float[2, m] b, float[2, k] c)
        <int64[3] sizes = {{1, 4, 2}}, int64[3] none = {{0, 7, 0}}> {{ h = Neg(x) a, b, c = {split} }}"""
    model = parser.parse_model(graph)
    onnx.save(model, tmp_path / "model.onnx")
    program = amp.Program.from_onnx(tmp_path / "model.onnx")
    lowered = program.lower(amp.CUDAPlace(0)).model
    made = [node.op_type for node in lowered.graph.node if node.op_type in ("Slice", "Split")]
    assert made == kinds
    feeds = {"x": X, "computed": np.array([2, 2, 3])}
    read = {info.name for info in lowered.graph.input}
    for left, right in zip(run(lowered, {k: v for k, v in feeds.items() if k in read}), run(model, feeds), strict=True):
        np.testing.assert_array_equal(left, right)
