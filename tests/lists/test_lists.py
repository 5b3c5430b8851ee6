"""The operator lists: every operator in one list, the merge rule, and every message."""

import json

import pytest
from onnx import defs

from amp_transpiler import lists
from amp_transpiler.errors import AmpError, ListError, ListTypeError
from amp_transpiler.lists import AutoMixedPrecisionLists, default_lists, kept_fp32, resolve
from amp_transpiler.lists._data import _KEPT_FP32, parse_aliases, parse_lists
from amp_transpiler.lists._schemas import read_text, schemas, split_name
from tests.helpers.where import ORACLES

# ---------------------------------------------------------------- default lists


def float_operators():
    """Every operator of ai.onnx, deprecated ones too, that has an input or output of fp16 or fp32."""
    found = set()
    for (domain, name), schema in schemas().items():
        types = {t for c in schema.type_constraints for t in c.allowed_type_strs}
        types |= {slot.type_str for slot in [*schema.inputs, *schema.outputs]}
        if not domain and any("tensor(float16)" in t or "tensor(float)" in t for t in types):
            found.add(name)
    return found


def test_every_float_operator_is_in_exactly_one_list():
    default = default_lists()
    homes = {name: [c for c in ("white", "black", "gray") if name in getattr(default, c)] for name in float_operators()}
    assert {name: home for name, home in homes.items() if len(home) != 1} == {}
    listed = default.white | default.black | default.gray
    assert {name for name in listed if "::" not in name} == {*homes, "SimplifiedLayerNormalization"}
    assert set(default.reasons) == listed and all(default.reasons.values())
    assert {"Upsample", "Scatter", "If", "Loop", "Scan"} <= set(homes)


def test_the_lists_name_what_onnxruntime_writes_and_no_other_domain():
    default = default_lists()
    assert {split_name(name)[0] for name in default.reasons} == {"", "com.microsoft"}
    assert parse_lists(read_text("default.toml"), "default.toml") == default, "each of them exists"


def test_default_lists_are_paddles_of_2021():
    default = default_lists()
    white = """conv2d matmul matmul_v2 mul"""
    black = """exp square log mean sum softmax softmax_with_cross_entropy cross_entropy reduce_sum"""
    gray = """elementwise_add elementwise_sub elementwise_mul elementwise_div elementwise_max elementwise_min
        elementwise_mod batch_norm layer_norm tanh sigmoid top_k pool2d pool3d dropout relu relu6 leaky_relu flatten2
        stack unstack uniform_random gaussian_random slice scale transpose2 reshape2 gather fill_constant sign cast
        concat split"""
    for colour, names in (("white", white), ("black", black), ("gray", gray)):
        for name in names.split():
            assert set(resolve(name)) <= getattr(default, colour), name
    # Paddle's lookup_table is black and its gather gray; ONNX Gather is both, and the passes look after trained tables.
    assert resolve("lookup_table") == ("Gather",)
    # in no list of Paddle's, hence fp32 there
    assert {"Gelu", "Erf", "LSTM", "Resize", "InstanceNormalization"} <= default.black


def test_a_gray_function_has_no_black_part():
    default = default_lists()
    comparisons = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
    for name in sorted(default.gray):
        schema = schemas().get(("", name))
        if schema is not None and schema.has_function:
            parts = {node.op_type for node in schema.function_body.node}
            assert not parts & (default.black - comparisons), name


def test_lists_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        default_lists().white = frozenset()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[[white]]\nwhy = ""\noperators = ["MatMull"]',
            r"a\.toml, list white: onnx has no operator 'MatMull'.*'MatMul'",
        ),
        ('[[white]]\nwhy = ""\noperators = ["Foo::X", "zzzz"]', r"onnx has no operator 'zzzz'\.$"),
        (
            '[[white]]\nwhy = ""\noperators = ["com.microsoft::FusedMatMull"]',
            r"onnx has no operator 'com\.microsoft::FusedMatMull'.*'FusedMatMul'",
        ),
        ('[[red]]\nwhy = ""\noperators = []', r"a\.toml: there is no list 'red'; the lists are white, black and gray"),
        (
            '[[white]]\nwhy = ""\noperators = ["Exp"]\n[[gray]]\nwhy = ""\noperators = ["Exp"]',
            r"a\.toml: 'Exp' stands in list white and again in gray",
        ),
    ],
)
def test_a_wrong_list_file_is_refused(text, message):
    with pytest.raises(ListError, match=message):
        parse_lists(text, "a.toml")


# ---------------------------------------------------------------- slots that stay fp32


def test_kept_fp32_slots():
    assert kept_fp32("BatchNormalization") == ({1, 2, 3, 4}, {1, 2})
    assert kept_fp32("LayerNormalization") == ({1, 2}, {1, 2})
    assert kept_fp32("RMSNormalization") == ({1}, set())
    assert kept_fp32("SkipLayerNormalization", "com.microsoft") == ({2, 3}, {1, 2})
    assert kept_fp32("SkipLayerNormalization") == kept_fp32("MatMul") == (set(), set())


def test_the_slots_that_stay_fp32_are_there() -> None:
    """Of operators that onnx knows; the first input and output carry the data."""
    for name, kept in _KEPT_FP32.items():
        schema = schemas().get(split_name(name))
        assert schema is not None or name.startswith("com.microsoft::"), name
        for slots, formal in zip(kept, (schema.inputs, schema.outputs), strict=True) if schema else ():
            assert slots <= set(range(1, len(formal))), name


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "operators"),
    [
        ("MatMul", ("MatMul",)),
        ("ai.onnx::MatMul", ("MatMul",)),
        ("com.microsoft::FusedMatMul", ("com.microsoft::FusedMatMul",)),
        ("ai.onnx.ml::Scaler", ("ai.onnx.ml::Scaler",)),
        ("my.own::Thing", ("my.own::Thing",)),
        ("mul", ("MatMul", "Gemm")),
        ("pool2d", ("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool")),
        ("softmax_with_cross_entropy", ("SoftmaxCrossEntropyLoss",)),
        ("square", ("Pow",)),
        ("reshape", ("Reshape",)),
        ("not_equal", ("Equal", "Not")),
        ("warpctc", ("amp_transpiler::CTCLoss",)),
        ("Upsample", ("Upsample",)),
    ],
)
def test_resolve(name, operators):
    assert resolve(name) == operators


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ReLU", r"no operator has the name 'ReLU'\. Did you mean 'Relu'"),
        ("conv2", r"Did you mean .*'conv2d'.* Expected an ONNX operator type such as 'MatMul'"),
        ("", r"no operator has the name ''"),
        ("qqqqqqqq", r"no operator has the name 'qqqqqqqq'\. Expected"),
        ("com.microsoft::FusedMatMull", r"Did you mean 'FusedMatMul'"),
        ("cos_sim", r"Paddle's operator 'cos_sim' has no ONNX counterpart, it becomes .* Name ONNX operators instead"),
        (
            "smooth_l1_loss",
            r"Paddle's operator 'smooth_l1_loss' has no ONNX counterpart, it becomes Sub, Abs, Min and Mul",
        ),
        ("c_allreduce_sum", r"has no ONNX counterpart, it is a collective"),
    ],
)
def test_resolve_refuses(name, message):
    with pytest.raises(ListError, match=message):
        resolve(name)


def test_resolve_refuses_a_name_that_is_no_string():
    with pytest.raises(ListTypeError, match="holds 3 .int."):
        resolve(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[aliases]\nx = ["Convv"]\n[no_counterpart]', r"f\.toml, alias x: onnx has no operator 'Convv'.*'Conv'"),
        ("[aliases]\nx = []\n[no_counterpart]", r"alias 'x' needs either operators or a place in no_counterpart"),
        ('[aliases]\nx = ["Conv"]\n[no_counterpart]\nx = ""', r"and not both"),
    ],
)
def test_a_wrong_alias_file_is_refused(text, message):
    with pytest.raises(ListError, match=message):
        parse_aliases(text, "f.toml")


def test_the_default_lists_name_operators_of_onnx():
    """Which a conversion takes for granted."""
    assert parse_lists(read_text("default.toml"), "default.toml") == lists.default_lists()


def test_every_name_of_paddles_lists_is_known():
    recorded = json.loads((ORACLES / "paddle" / "op_lists.json").read_text())
    names = {
        name for key in ("2021-09", "2.6.2_fp16", "2.6.2_bf16") for group in recorded[key].values() for name in group
    }
    aliases, missing = parse_aliases(read_text("aliases.toml"), "aliases.toml")
    assert names - aliases.keys() - missing.keys() == set()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_unsupported_operator_is_a_float_operator(dtype):
    assert lists.unsupported_operators(dtype) <= float_operators()


# ---------------------------------------------------------------- the lists of one conversion


def test_without_arguments_the_lists_are_the_defaults():
    chosen, default = AutoMixedPrecisionLists(), default_lists()
    assert chosen.white_list == default.white and chosen.black_list == default.black
    assert chosen.gray_list == default.gray and chosen.black_varnames == set() and chosen.dtype == "float16"
    assert chosen.unsupported_list == lists.unsupported_operators("float16")


def test_each_instance_has_sets_of_its_own():
    first, second = AutoMixedPrecisionLists(), AutoMixedPrecisionLists()
    first.white_list.clear()
    first.black_varnames.add("x")
    assert second.white_list == default_lists().white and second.black_varnames == set()


#                 white          black          the operators     leaves
MERGES = [
    (["exp"], None, {"Exp"}, "black"),
    (["tanh"], None, {"Tanh"}, "gray"),
    (["lookup_table", "Gather"], None, {"Gather"}, "gray"),
    (["pool2d"], None, {"MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool"}, "gray"),
    (["com.microsoft::FusedMatMul"], None, {"com.microsoft::FusedMatMul"}, None),
    (None, ["conv2d"], {"Conv"}, "white"),
    (None, ["tanh"], {"Tanh"}, "gray"),
    (None, ("my.own::Thing",), {"my.own::Thing"}, None),
    (None, {"Exp"}, {"Exp"}, None),
]


@pytest.mark.parametrize(("white", "black", "operators", "leaves"), MERGES)
def test_merge(white, black, operators, leaves):
    chosen, default = AutoMixedPrecisionLists(white, black), default_lists()
    expected = {colour: set(getattr(default, colour)) for colour in ("white", "black", "gray")}
    if leaves:
        expected[leaves] -= operators
    expected["white" if white else "black"] |= operators
    assert chosen.white_list == expected["white"]
    assert chosen.black_list == expected["black"]
    assert chosen.gray_list == expected["gray"]
    assert chosen.unsupported_list == lists.unsupported_operators("float16") | (operators if black else set())


RECORDED = json.loads((ORACLES / "paddle" / "list_merge_cases_262.json").read_text())


def test_what_paddle_refuses_is_refused():
    assert [case["name"] for case in RECORDED if "error" in case]
    with pytest.raises(ListError, match="overlap in LSTM"):
        AutoMixedPrecisionLists(["lstm"], ["lstm"])


@pytest.mark.parametrize("case", [case for case in RECORDED if "error" not in case], ids=lambda case: case["name"])
def test_merge_cases_recorded_from_paddle(case):
    arguments = case.get("args", {})
    chosen, default = AutoMixedPrecisionLists(**arguments), default_lists()

    def types(key):
        return {operator for name in case[key] for operator in resolve(name)}

    def moved_in(key, old):
        return types(key) - old

    # Paddle 2.6 differs from the lists of 2021 in what stands where, not in the rule; what was added must agree.
    assert chosen.white_list - default.white == moved_in("white_added", default.white), case["name"]
    assert default.white - chosen.white_list == types("white_removed"), case["name"]
    assert types("black_added") <= chosen.black_list and types("unsupported_added") <= chosen.unsupported_list
    assert not types("black_removed") & chosen.black_list and not types("gray_removed") & chosen.gray_list


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"custom_white_list": "MatMul"}, ListTypeError, r"custom_white_list is the string 'MatMul'; .*\['MatMul'\]"),
        ({"custom_black_list": "MatMul"}, ListTypeError, r"custom_black_list is the string"),
        ({"custom_black_varnames": "x"}, ListTypeError, r"custom_black_varnames is the string 'x'"),
        ({"custom_black_list": 3}, ListTypeError, r"custom_black_list is 3; expected a list of strings"),
        ({"custom_white_list": ["Exp", None]}, ListTypeError, r"custom_white_list holds None \(NoneType\)"),
        ({"custom_white_list": ["Expp"]}, ListError, r"no operator has the name 'Expp'.*'Exp'"),
        ({"dtype": "float32"}, ListError, r"dtype is 'float32'; expected 'float16' or 'bfloat16'"),
        ({"dtype": None}, ListError, r"dtype is None"),
        (
            {"custom_white_list": ["conv2d", "Exp"], "custom_black_list": ["Conv"]},
            ListError,
            r"overlap in Conv \(Conv: white as 'conv2d', black as 'Conv'\)\. Take each operator out of one of them",
        ),
        (
            {"custom_white_list": ["conv2d"], "dtype": "bfloat16"},
            ListError,
            r"names 'conv2d', but Conv cannot run in bfloat16: no CUDA kernel for Conv at bfloat16.*Take it out",
        ),
        (
            {"custom_white_list": ["NonMaxSuppression"]},
            ListError,
            r"NonMaxSuppression cannot run in float16: no CUDA kernel",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        AutoMixedPrecisionLists(**arguments)
    assert isinstance(caught.value, AmpError)


def test_dtype_in_any_letter_case():
    assert AutoMixedPrecisionLists(dtype="BFLOAT16").dtype == "bfloat16"
    assert "bfloat16" in repr(AutoMixedPrecisionLists(dtype="bfloat16"))


def test_schemas_are_the_registry():
    assert schemas()["", "MatMul"].since_version == defs.get_schema("MatMul").since_version
