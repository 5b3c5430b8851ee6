"""Large models in parts: the same results bit for bit, cut between layers, and as many parts as there is model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering import parts
from amp_transpiler.runtime import chain, device_tensors

RNG = np.random.default_rng(7)
FEEDS = [{"x": RNG.normal(size=(6, 12)).astype(np.float32) * size, "y": RNG.integers(0, 5, (6, 1))} for size in (1, 2)]
FEEDS += [{"x": np.full((6, 12), 1e30, np.float32), "y": FEEDS[0]["y"]}, FEEDS[0]]


def built(layers: int, mode: str, drop: float = 0.1) -> tuple[Any, Any, Any, Any, Any]:
    """A residual net with dropout and running statistics; its last hidden tensor is made in the middle of the step."""
    main, startup = amp.Program(), amp.Program("startup")
    main.random_seed = startup.random_seed = 3
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, y = amp.data("x", [None, 12], "float32"), amp.data("y", [None, 1], "int64")
        hidden = amp.nn.batch_norm(x)
        for _ in range(layers):
            inner = amp.nn.fc(amp.nn.layer_norm(hidden), 12, act="gelu")
            hidden = hidden + (F.dropout(inner, drop) if drop else inner)
        loss = F.cross_entropy(amp.nn.fc(hidden, 5), y)
        optimizer = amp.optimizer.AdamW(
            0.01, multi_precision=mode != "fp32", grad_clip=amp.optimizer.ClipGradByValue(1)
        )
        opt = (
            amp.decorate(optimizer, use_pure_fp16=mode == "pure", use_fp16_guard=False) if mode != "fp32" else optimizer
        )
        opt.minimize(loss, startup)
    return main, startup, opt, loss, hidden


def trained(
    mode: str, return_numpy: bool = True, layers: int = 6, drop: float = 0.1
) -> tuple[Any, list[Any], dict[str, bytes], Any]:
    main, startup, opt, loss, hidden = built(layers, mode, drop)
    exe, scope = amp.Executor(amp.CPUPlace(), threads=1), amp.Scope()
    exe.run(startup, scope=scope)
    if mode == "pure":
        opt.amp_init(amp.CPUPlace(), scope)
    found = [exe.run(main, feed, [hidden, loss], scope, return_numpy) for feed in FEEDS]
    session = exe._tables.programs[main].last.last.session
    return session, found, {name: scope.find_var(name).tobytes() for name in scope.var_names()}, exe.memory_report(main)


@pytest.mark.parametrize(("mode", "small"), [("fp32", 16384), ("pure", 10)])
def test_a_model_in_parts_does_what_it_does_whole(mode: str, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected, state, report = trained(mode)
    monkeypatch.setattr(parts, "PART", 60)
    monkeypatch.setattr(parts, "WHOLE", 100)
    monkeypatch.setattr(chain, "SMALL", small)
    session, found, after, in_parts = trained(mode)
    assert isinstance(session, chain.Chain) and len(session.sessions) >= 5
    large = len(session.last) - len(session.small)
    assert session.small and (large > 4) is (small < 16384)
    for a, b in zip(expected, found, strict=True):
        assert a[0].tobytes() == b[0].tobytes() and a[1].tobytes() == b[1].tobytes()
    assert state == after and (mode == "fp32" or np.isnan(found[2][1]))
    assert set(in_parts.in_place) >= set(report.in_place) and len(report.in_place) > 20


def test_layers_that_are_alike_share_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many layers take as many sessions, and the results are those of the whole."""
    monkeypatch.setattr(parts, "PART", 150)
    monkeypatch.setattr(parts, "WHOLE", 300)
    made, counts = [], []
    for layers in (40, 80):
        session, found, after, _ = trained("pure", layers=layers, drop=0)
        made.append(len({id(each) for each in session.sessions}))
        counts.append(len(session.sessions))
    assert counts[1] > 1.7 * counts[0] and made[1] < made[0] + 4
    monkeypatch.setattr(parts, "WHOLE", 10**6)
    _, expected, state, _ = trained("pure", layers=80, drop=0)
    assert [[a.tobytes() for a in run] for run in found] == [[a.tobytes() for a in run] for run in expected]
    assert after == state


def test_a_large_tensor_is_free_when_its_last_reader_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART", 60)
    monkeypatch.setattr(parts, "WHOLE", 100)
    monkeypatch.setattr(chain, "SMALL", 10)
    held: list[int] = []
    take = chain.Binding._take

    def counted(self: Any, number: int, values: dict[str, Any]) -> None:
        take(self, number, values)
        held.append(len(values))
        names = [name for name in self.order[number] if name not in self.bound]
        kept = [
            value.has_value()
            for name, value in zip(self.order[number], self.parts[number].get_outputs(), strict=True)
            if name in names and name in self.passed[number]
        ]
        assert not any(kept), "the part that made it holds it"

    monkeypatch.setattr(chain.Binding, "_take", counted)
    session, found, *_ = trained("pure", return_numpy=False)
    assert all(np.isfinite(device_tensors.to_array(value)).all() for value in found[-1])
    count = len(session.sessions)
    one, again = held[-2 * count : -count], held[-count:]
    assert max(one) > 1.5 * one[-1] and again == one
    assert one[-1] <= len(session.inputs[-1]), "what is left is what the last part reads"


@pytest.mark.parametrize("layers", [12, 24])
def test_parts_grow_in_number_not_in_size_and_end_between_layers(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART", 300)
    monkeypatch.setattr(parts, "WHOLE", 600)
    main, _, _, loss, _ = built(layers, "pure")
    graph = main.lower(amp.CPUPlace(), {"x": (6, 12), "y": (6, 1)}, [loss]).model.graph
    ends = parts.cuts(graph)
    sizes = np.diff([0, *ends])
    assert ends[-1] == len(graph.node) and np.all((sizes >= 150) & (sizes <= 450))
    forward = [i for i in ends if i < len(graph.node) // 3]
    made = {name: i for i, node in enumerate(graph.node) for name in node.output}
    for end in forward:
        soon = {name for node in graph.node[end : end + 12] for name in node.input if made.get(name, -1) in range(end)}
        recent = {name for name in soon if made[name] > end - 40}
        assert len(recent) <= 4, "the hidden tensor, and what is shared"
