"""Our passes against the programs that PaddlePaddle's own passes were recorded on: same precision, same casts.

Every deviation is one function below, with the design decision behind it. A recorded result goes through
the deviations and must then equal ours exactly; :data:`DEVIATING` says which of them each program needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.precision.pure import cast_model_to_fp16
from amp_transpiler.passes.precision.rewrite import rewrite_program
from amp_transpiler.program import Program
from tests.helpers.paddle_programs import Recorded, Slot, View, load, translate, view, view_of

# ---------------------------------------------------------------- deviations, each with its decision


def feeds(expected: View, before: Program) -> View:
    """Feeds keep their declared type; the cast is inside the program. Paddle retypes the feed itself."""
    fed = {v.name for v in before.inputs if v.dtype == "float32"}
    retyped = {slot[0] for _, ins, _ in expected.ops for slot in ins if slot[0] in fed and slot[1] == "float16"}
    missing = [(name, "float16") for name in sorted(retyped) if (name, "float16") not in expected.casts]
    return View(expected.ops, expected.casts + missing, expected.parameters)


def fetches(expected: View, before: Program) -> View:
    """Fetches keep their declared type: what nothing reads can only be fetched, and is cast back to fp32."""
    read = {slot[0] for _, ins, _ in expected.ops for slot in ins} | {name for name, _ in expected.casts}
    optional = {"LayerNormalization", "BatchNormalization", "SoftmaxCrossEntropyLoss", "Dropout"}
    ends = [
        slot
        for type_, _, outs in expected.ops
        for i, slot in enumerate(outs)
        if slot[0] not in read and slot[1] == "float16" and not (i and type_ in optional)
    ]
    return View(expected.ops, expected.casts + [(name, "float32") for name, _ in ends], expected.parameters)


def layer_norm_slots(expected: View, before: Program) -> View:
    """LayerNormalization has one type for data, scale and bias in ONNX: the fp32 parameters are cast at the slot."""
    ops, casts = [], list(expected.casts)
    for type_, ins, outs in expected.ops:
        if type_ == "LayerNormalization" and ins[0][1] == "float16":
            casts += [(name, "float16") for name, dtype in ins[1:] if dtype == "float32"]
            ins = (ins[0], *((name, "float16") for name, _ in ins[1:]))
        ops.append((type_, ins, outs))
    return View(ops, casts, expected.parameters)


Deviation = Callable[[View, Program], View]
ALL: tuple[Deviation, ...] = (feeds, layer_norm_slots, fetches)

# ---------------------------------------------------------------- what is compared

O1, PURE = "2021_O1", "2021_pure_noguard"
#: File, program in it (None: it holds one) and variant -> the deviations that it needs.
DEVIATING: dict[tuple[str, str | None, str], set[Deviation]] = {
    ("prog_conv_guard.json", None, O1): set(),
    ("prog_conv_guard.json", None, "2021_O1_blackPool2d"): set(),
    ("prog_conv_guard.json", None, "2021_O1_blackvar_conv_w"): set(),
    ("prog_conv_guard.json", None, "2021_pure_guard_blackPool2d"): {fetches},
    ("prog_conv_guard.json", None, "2021_pure_guard_nocustom"): {fetches},
    ("prog_conv_guard.json", None, PURE): {feeds, fetches},
    ("prog_conv_guard.json", None, "2021_pure_noguard_blackPool2d_reduce_mean"): {feeds},
    ("prog_conv_test_program.json", None, "2021_pure_guard_blackPool2d"): {fetches},
    ("prog_bert2_2021.json", None, O1): set(),
    ("prog_bert2_2021.json", None, PURE): {feeds, layer_norm_slots, fetches},
    ("micro_rewrites_1.json", "gray_no_producer_relu", O1): set(),
    ("micro_rewrites_1.json", "white_gray", O1): {fetches},
    ("micro_rewrites_1.json", "black_gray", O1): set(),
    ("micro_rewrites_1.json", "gray_add_X_black_Y_white", O1): set(),
    ("micro_rewrites_1.json", "gray_add_X_white_Y_black", O1): set(),
    ("micro_rewrites_1.json", "gray_add_white_data", O1): {fetches},
    ("micro_rewrites_1.json", "gray_chain", O1): {fetches},
    ("micro_rewrites_1.json", "dedupe_two_white_consumers", O1): {fetches},
    ("micro_rewrites_1.json", "white_black_white", O1): {fetches},
    ("micro_rewrites_1.json", "black_after_white_twice_dedupe", O1): set(),
    ("micro_rewrites_1.json", "unlisted_op_gelu_after_white", O1): set(),
    ("micro_rewrites_1.json", "unlisted_between_whites", O1): {fetches},
    ("micro_rewrites_1.json", "layer_norm_after_white", O1): {layer_norm_slots, fetches},
    ("micro_rewrites_1.json", "batch_norm_after_conv", O1): {fetches},
    ("micro_rewrites_1.json", "dropout_mask", O1): {fetches},
    ("micro_rewrites_1.json", "int_only_gray", O1): set(),
    ("micro_rewrites_1.json", "concat_data_white", O1): {fetches},
    ("micro_rewrites_1.json", "int_only_gray", PURE): set(),
    ("micro_rewrites_1.json", "layer_norm_after_white", PURE): {feeds, layer_norm_slots, fetches},
} | {
    ("micro_rewrites_1.json", name, PURE): {feeds, fetches}
    for name in (
        "gray_no_producer_relu",
        "white_gray",
        "black_gray",
        "gray_add_X_black_Y_white",
        "gray_add_X_white_Y_black",
        "gray_add_white_data",
        "gray_chain",
        "dedupe_two_white_consumers",
        "white_black_white",
        "black_after_white_twice_dedupe",
        "unlisted_op_gelu_after_white",
        "unlisted_between_whites",
        "batch_norm_after_conv",
        "dropout_mask",
        "concat_data_white",
    )
}


def _data(file: str, name: str | None, variant: str) -> tuple[dict[str, Any], dict[str, Any]]:
    data = load(file)
    if name is None:
        return data["before"], data["variants"][variant]
    return data["programs"][name]["before"], data["programs"][name]["after"][variant]


def _lists(variant: str) -> AutoMixedPrecisionLists:
    black = (["pool2d"] if "blackPool2d" in variant else []) + (["reduce_mean"] if "reduce_mean" in variant else [])
    names = ["conv2d_0.w_0"] if "blackvar_conv_w" in variant else None
    return AutoMixedPrecisionLists(custom_black_list=black, custom_black_varnames=names)


def _rewritten(before: dict[str, Any], variant: str) -> tuple[Program, Program, set[str] | None]:
    old, new = translate(Recorded.read(before)), translate(Recorded.read(before))
    if variant.startswith("2021_O1"):
        rewrite_program(new, _lists(variant))
        return old, new, None
    return old, new, cast_model_to_fp16(new, _lists(variant), use_fp16_guard="noguard" not in variant)


@pytest.mark.parametrize("file, name, variant", DEVIATING, ids=lambda each: str(each).removesuffix(".json"))
def test_recorded_program(file: str, name: str | None, variant: str) -> None:
    before, after = _data(file, name, variant)
    old, new, returned = _rewritten(before, variant)
    expected, needed = view(Recorded.read(after)), set()
    for deviation in ALL:
        changed = deviation(expected, old)
        if changed != expected:
            needed.add(deviation)
        expected = changed
    ours = view_of(new, old)
    assert ours.ops == expected.ops
    assert sorted(ours.casts) == sorted(expected.casts)  # as lists: a second cast of one tensor would show
    assert ours.parameters == expected.parameters
    assert needed == DEVIATING[file, name, variant]
    if returned is not None:
        assert returned == Recorded.read(after).returned


def test_every_recorded_2021_program_is_compared() -> None:
    found: set[tuple[str, str | None, str]] = set()
    for file in ("prog_conv_guard.json", "prog_conv_test_program.json", "prog_bert2_2021.json"):
        found |= {(file, None, variant) for variant in load(file)["variants"] if variant.startswith("2021")}
    for name, program in load("micro_rewrites_1.json")["programs"].items():
        found |= {("micro_rewrites_1.json", name, v) for v in program["after"] if v.startswith("2021")}
    assert found == set(DEVIATING)


def test_the_view_sees_a_wrong_precision_and_a_second_cast() -> None:
    """The comparison above can fail."""
    before, _ = _data("micro_rewrites_1.json", "white_gray", O1)
    old, new, _ = _rewritten(before, O1)
    right = view_of(new, old)
    source = new.var("x")
    again = new.add_variable("x.again", "float16")
    new.add_operator("Cast", [source], [again], attrs={"to": 10})
    assert view_of(new, old).casts != right.casts
    matmul = next(op for op in new.operators if op.type == "MatMul")
    matmul.set_input(0, source)
    assert view_of(new, old).ops != right.ops


def test_casts_stand_right_before_their_first_reader() -> None:
    """As in Paddle: the order of the recorded program, but for the order among the casts of one operator."""
    before, after = _data("prog_bert2_2021.json", None, O1)
    _, new, _ = _rewritten(before, O1)
    waiting: set[Slot] = set()
    for op in new.operators:
        if op.type == "Cast":
            waiting.add((op.outputs[0].name, op.reason))  # type: ignore[union-attr]
        else:
            read = {v.name for v in op.inputs if v is not None}
            assert {name for name, _ in waiting} <= read, f"a cast stands far before {op}"
            waiting.clear()
    assert len(view(Recorded.read(after)).casts) == sum(op.type == "Cast" for op in new.operators)
