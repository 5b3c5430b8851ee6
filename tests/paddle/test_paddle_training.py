"""Training programs that Paddle's ``decorate(...).minimize`` was recorded to make: types of parameters, gradients, masters."""

from __future__ import annotations

from typing import Any

import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.helpers.where import oracle

VARIANTS = oracle("full_train_programs.json")["variants"]
TYPES = {"fp32": "float32", "fp16": "float16"}
#: Variant -> optimizer, pure, operators kept in fp32.
ARGUMENTS: dict[str, tuple[Any, bool, list[str]]] = {
    "2021pure_guard_momentum_mp": (amp.optimizer.Momentum, True, ["pool2d"]),
    "262_O2_guard_momentum_mp": (amp.optimizer.Momentum, True, ["pool2d"]),
    "262_O1_adam": (amp.optimizer.Adam, False, []),
    "262_O2_adam_master_grad": (amp.optimizer.Adam, True, []),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_gradients_and_masters(name: str) -> None:
    recorded, (kind, pure, black) = VARIANTS[name], ARGUMENTS[name]
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        image, label = amp.data("image", [None, 1, 28, 28], "float32"), amp.data("label", [None, 1], "int64")
        conv = amp.nn.conv2d(image, 6, 3)
        with amp.fp16_guard():
            h = F.max_pool2d(amp.nn.batch_norm(conv, act="relu"), 2, 2)
            loss = F.cross_entropy(amp.nn.fc(h, 64), label)
        lists = amp.AutoMixedPrecisionLists(custom_black_list=black) if black else None
        options = {"momentum": 0.9} if kind is amp.optimizer.Momentum else {}
        optimizer = amp.decorate(kind(learning_rate=0.01, multi_precision=pure, **options), lists, use_pure_fp16=pure)
        _, pairs = optimizer.minimize(loss, startup)
    held = {p.name: [list(p.shape or ()), p.dtype] for p in main.all_parameters()}
    assert held == {n: [shape, TYPES[dtype]] for n, (shape, dtype) in recorded["parameters"].items()}
    grads = {p.name: (p.dtype, g.name, g.dtype) for p, g in pairs}
    assert grads == {p: (TYPES[a], g, TYPES[b]) for p, a, g, b in recorded["params_grads"]}
    masters = {v.name for v in main.variables if v.name.endswith("_fp32_master_0")}
    assert masters == {m.removeprefix("opt_") for m in recorded["master_weights"].values()}


SECOND = {"fc_1.w_0", "fc_1.b_0"}
BOTH = SECOND | {"fc_0.w_0", "fc_0.b_0"}
#: Arguments of ``decorate`` with ``dtype="bfloat16"`` -> the parameters that Paddle 2.6.2 declares bfloat16 and rounds in
#: ``amp_init``, and those that get masters.
BFLOAT16: list[tuple[dict[str, Any], set[str], set[str]]] = [
    ({"level": "O1"}, set(), set()),
    ({"level": "O2"}, BOTH, BOTH),
    ({"level": "O2", "master_grad": True}, BOTH, BOTH),
    ({"level": "O2", "use_amp_guard": True}, SECOND, SECOND),
    ({"level": "O2", "master_weight": False}, BOTH, set()),
]


@pytest.mark.filterwarnings("ignore:.*multi_precision")
@pytest.mark.parametrize("arguments, low, masters", BFLOAT16, ids=[str(each) for each, _, _ in BFLOAT16])
def test_bfloat16_by_level(arguments: dict[str, Any], low: set[str], masters: set[str]) -> None:
    main, startup, scope = amp.Program(), amp.Program("startup"), amp.Scope()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        hidden = amp.nn.fc(amp.data("x", [4, 8], "float32"), 8)
        with amp.fp16_guard():
            loss = F.mean(amp.nn.fc(amp.nn.layer_norm(hidden, begin_norm_axis=1), 4))
        optimizer = amp.decorate(amp.optimizer.AdamW(0.1), dtype="bfloat16", **arguments)
        optimizer.minimize(loss, startup)
    amp.Executor(amp.CPUPlace()).run(startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope)
    assert {p.name for p in main.all_parameters() if p.dtype == "bfloat16"} == low
    assert {p.name for p in main.all_parameters() if scope.find_var(p.name).dtype == "bfloat16"} == low
    found = {v.name.removesuffix("_fp32_master_0") for v in main.variables if v.name.endswith("_fp32_master_0")}
    assert found == masters
