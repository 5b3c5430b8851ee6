"""``ctc_loss``: against every alignment of tiny cases, and against torch's values and gradients (record_ctc.py)."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import AmpError, ArgumentError
from amp_transpiler.ir.program import OWN
from tests.gradcheck import check_forward, check_gradient

F = amp.nn.functional
RECORD = Path(__file__).resolve().parent / "data" / "ctc_torch.npz"


def collapsed(path: tuple[int, ...], blank: int) -> list[int]:
    """The label of an alignment: repeats merged, then blanks dropped."""
    return [c for c, _ in itertools.groupby(path) if c != blank]


def every_alignment(logits: np.ndarray, labels: np.ndarray, steps: np.ndarray, symbols: np.ndarray, *, blank: int = 0,
                    reduction: str = "mean", zero_infinity: int = 0) -> list[np.ndarray]:  # fmt: skip
    """The loss by its definition: the probabilities of all paths whose label is the target, added."""
    log_prob = logits - np.log(np.exp(logits).sum(2, keepdims=True))
    each = []
    for n in range(logits.shape[1]):
        target = [int(c) for c in labels[n, : symbols[n]]]
        total = sum(
            np.exp(sum(log_prob[t, n, c] for t, c in enumerate(path)))
            for path in itertools.product(range(logits.shape[2]), repeat=int(steps[n]))
            if collapsed(path, blank) == target
        )
        each.append(-np.log(total) if total else 0.0 if zero_infinity else np.inf)
    losses = np.array(each)
    if reduction == "mean":
        return [np.mean(losses / np.maximum(symbols, 1))]
    return [losses.sum() if reduction == "sum" else losses]


def tiny(seed: int = 0, steps: int = 4, classes: int = 3) -> list[np.ndarray]:
    """Sequences with repeats, an empty target, a short input, padding that is no class."""
    logits = np.random.default_rng(seed).normal(size=(steps, 4, classes))
    labels = np.array([[1, 1], [2, -7], [99, 99], [1, 2]])
    return [logits, labels, np.array([4, 2, 3, 4]), np.array([2, 1, 0, 2], np.int32)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_definition(reduction: str) -> None:
    attrs = {"reduction": reduction, "blank": 0}
    oracle = partial(every_alignment, **attrs)
    check_forward("CTCLoss", tiny(), attrs=attrs, domain=OWN, feeds=(1, 2, 3), forward=oracle)
    check_gradient("CTCLoss", tiny(), attrs=attrs, domain=OWN, feeds=(1, 2, 3), forward=oracle)


def test_another_blank_and_impossible_targets() -> None:
    logits, _, steps, _ = tiny(1)
    given = [logits, np.array([[0, 0], [1, 1], [0, 1], [1, 0]]), np.array([4, 2, 0, 1]), np.array([2, 2, 1, 0])]
    attrs = {"blank": 2, "reduction": "none", "zero_infinity": 1}
    oracle = partial(every_alignment, **attrs)
    check_forward("CTCLoss", given, attrs=attrs, domain=OWN, feeds=(1, 2, 3), forward=oracle)
    check_gradient("CTCLoss", given, attrs=attrs, domain=OWN, feeds=(1, 2, 3), forward=oracle)


def test_no_labels_at_all_and_more_steps_than_are_unrolled_on_cpu() -> None:
    given = [*tiny(2)[:1], np.zeros((4, 0), np.int64), np.array([4, 2, 3, 4]), np.zeros(4, np.int64)]
    check_gradient("CTCLoss", given, domain=OWN, feeds=(1, 2, 3), forward=every_alignment)
    given = tiny(3, steps=11, classes=2)
    given[1:] = [np.array([[1, 1], [1, 0], [1, 1], [1, 1]]), np.array([11, 9, 4, 3]), np.array([2, 1, 0, 2])]
    check_gradient("CTCLoss", given, domain=OWN, feeds=(1, 2, 3), forward=every_alignment)


def run(given: dict[str, np.ndarray], logits: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """The loss and its gradient on CPU; of several losses, that of 1, 2, 3, .. times them."""
    main, startup = amp.Program(), amp.Program()
    with amp.program_guard(main, startup), amp.scope_guard(amp.Scope()):
        x = amp.create_parameter(list(logits.shape), "float32", initializer=logits.astype(np.float32))
        names = ("labels", "input_lengths", "label_lengths")
        fed = [amp.data(name, list(given[name].shape), str(given[name].dtype)) for name in names]
        loss = F.ctc_loss(x, *fed, **options)
        total = loss
        if loss.shape:
            total = F.sum(loss * np.arange(1, loss.shape[0] + 1, dtype=np.float32))
        [(_, gradient)] = amp.append_backward(total)
        exe = amp.Executor(amp.CPUPlace())
        exe.run(startup)
        found = exe.run(main, feed={name: given[name] for name in names}, fetch_list=[loss, gradient])
    return found[0], found[1]


def recorded() -> list[dict[str, np.ndarray]]:
    with np.load(RECORD) as record:
        cases: list[dict[str, np.ndarray]] = [{} for _ in range(int(record["cases"]))]
        for key in record.files:
            index, _, name = key.partition("_")
            if name:
                cases[int(index)][name] = record[key]
    return cases


@pytest.mark.parametrize("key", ["none0", "mean1", "sum0"])
def test_values_and_gradients_are_torchs(key: str) -> None:
    options = {"reduction": key[:-1], "zero_infinity": key[-1] == "1"}
    impossible = empty = 0
    for index, case in enumerate(recorded()):
        loss, gradient = run(case, case["logits"], blank=int(case["blank"]), **options)
        what = f"case {index}, {key}"
        np.testing.assert_allclose(loss, case[f"loss_{key}"], rtol=1e-5, atol=1e-5, err_msg=what)
        expected = case[f"logits_{key}"]
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5 * max(1, loss.size), err_msg=what)
        impossible += int(np.isinf(case["loss_none0"]).sum())
        empty += int((case["label_lengths"] == 0).sum())
    assert impossible >= 5 and empty >= 10


def test_log_probabilities_give_what_their_logits_give() -> None:
    for index, case in enumerate(recorded()[:12]):
        x = case["logits"].astype(np.float64)
        log_probs = x - np.log(np.exp(x).sum(2, keepdims=True))
        loss, gradient = run(case, log_probs, blank=int(case["blank"]), reduction="none")
        np.testing.assert_allclose(loss, case["loss_none0"], rtol=1e-5, atol=1e-5, err_msg=f"case {index}")
        np.testing.assert_allclose(gradient, case["log_probs_none0"], rtol=1e-5, atol=5e-5, err_msg=f"case {index}")
