"""Pipelines: their text, what they refuse, what they say of themselves, and that they are what the package runs."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GraphError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.passes import pipeline as passes
from amp_transpiler.passes.canonicalize.control_flow import ExpandControlFlow
from amp_transpiler.passes.canonicalize.inlining import InlineFunctions
from amp_transpiler.passes.lowering.lowering import Emit, lowering
from amp_transpiler.passes.pipeline import PASSES, Pipeline, Property
from tests.helpers.exported import exported

IF = """<ir_version: 10, opset_import: ["" : 13]>
g (float[2] x) => (float[2] y) <bool c = {1}> {
  y = If (c) <then_branch = t () => (float[2] a) { a = Neg (x) }, else_branch = e () => (float[2] b) { b = Abs (x) }>
}"""
FUNCTION = """<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
g (float[2] x) => (float[2] y) { y = own.Twice (x) }
<domain: "own", opset_import: ["" : 21]>
Twice (a) => (b) { b = Add (a, a) }"""

HEAD = '<ir_version: 10, opset_import: ["" : 21]>'


def program(text: str) -> amp.Program:
    return amp.Program.from_onnx(onnx.parser.parse_model(text))


# -- text ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        "opset",
        "inline-functions,opset,expand-control-flow",
        "emit{place=cuda}",
        "inline-functions,runtime-opset{place=cuda},expand-control-flow{place=cuda},mixed-norms{place=cuda},emit{place=cuda}",
    ],
)
def test_text_is_read_and_written(text: str) -> None:
    assert str(Pipeline(text)) == text
    assert Pipeline(text).passes == Pipeline(list(Pipeline(text))).passes


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (" opset ,  emit { place = cuda } ", "opset,emit{place=cuda}"),
        ("emit{place=cpu}", "emit"),
        ("emit{}", "emit"),
        ("precision{guard}", "precision{guard=true}"),
        ('emit{place="cuda"}', "emit{place=cuda}"),
    ],
)
def test_other_spellings_of_a_text(text: str, plain: str) -> None:
    assert str(Pipeline(text)) == plain


@pytest.mark.parametrize(
    ("text", "character", "words"),
    [
        ("", 1, "expected the name of a pass, found the end"),
        ("opset,", 7, "expected the name of a pass, found the end"),
        ("opset emit", 7, "expected ',' or the end, found 'e'"),
        ("opset,emitt", 7, "there is no pass 'emitt'; did you mean emit"),
        ("opset,qqq", 7, "there is no pass 'qqq'; known are "),
        ("emit{place=cuda", 16, "expected the name of an option, or '}', found the end"),
        ("emit{place=}", 12, "expected a value, found '}'"),
        ("emit{plac=cuda}", 6, "emit has no option 'plac'; did you mean place?"),
        ("opset,opset{target=13}", 13, "opset has no option 'target'; its options are none"),
        ("emit{place=tpu}", 6, "option place of emit is 'tpu'; expected cpu or cuda"),
        ("precision{guard=1}", 11, "option guard of precision is '1'; expected true or false"),
        ("emit{place=cuda place=cpu}", 17, "option 'place' of emit is given twice"),
    ],
)
def test_wrong_text_is_refused_with_its_place(text: str, character: int, words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Pipeline(text)
    assert f"character {character}: " in str(caught.value) and words in str(caught.value)


# -- what passes say of themselves -----------------------------------------------------------------------
@pytest.mark.parametrize("name", PASSES)
def test_every_pass_says_what_it_does(name: str) -> None:
    each = PASSES[name]
    assert "__doc__" in vars(each) and each.sentence().endswith("."), name
    assert inspect.getmodule(each).__name__.startswith("amp_transpiler.")
    assert str(Pipeline(name)) == name, "a pass stands alone with its defaults"
    assert all(option.name != "name" for option in fields(each))


# -- running ---------------------------------------------------------------------------------------------
def test_a_run_says_what_changed() -> None:
    branching = program(IF)
    pipeline = amp.Pipeline("inline-functions,opset,expand-control-flow")
    assert [changed for _, changed in pipeline.run(branching).changes] == [False, True, True]
    assert [op.type for op in branching.operators] == ["Neg", "Identity"] and branching.opset() == 21
    assert [changed for _, changed in pipeline.run(branching).changes] == [False, False, False]


def test_where_a_pass_raises_the_program_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PASSES", dict(PASSES))

    class Refuses(passes.Pass):
        """It raises."""

        name = "refuses"

        def run(self, graph: Graph, context: passes.Context) -> bool:
            raise GraphError("refused")

    calling = program(FUNCTION)
    before, version, variable = calling.to_onnx(), calling.version, calling.var("x")
    with pytest.raises(GraphError, match="refused"):
        Pipeline([InlineFunctions(), Refuses()]).run(calling)
    assert calling.to_onnx() == before and calling.version == version
    assert calling.var("x") is variable and variable.program is calling
    calling.verify()


def test_a_need_that_nothing_guarantees_is_refused_before_anything_runs() -> None:
    calling = program(FUNCTION.replace(': 21, "own"', ': 13, "own"'))
    with pytest.raises(GraphError, match=r"pass 2 .*emit needs functions inlined.*put inline-functions before it"):
        Pipeline("opset,emit").run(calling)
    assert calling.opset() == 13
    calling = program(FUNCTION)
    assert Pipeline("inline-functions,emit").run(calling)["lowered"].model.graph.node[0].op_type == "Add"
    Pipeline("emit").run(calling)  # the program has it now


def test_a_value_that_no_pass_takes_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no pass takes 'feedshapes'; did you mean feed_shapes"):
        Pipeline("emit").run(program(IF), feedshapes={})


@pytest.mark.parametrize(
    ("text", "values", "said"),
    [
        ("canonicalize,autodiff", {"loss": 3}, "loss is 3; expected a variable, its name, or a list of several"),
        ("canonicalize,autodiff", {"loss": []}, r"loss is \[\]; expected a variable"),
        ("precision", {"amp_lists": ["Neg"]}, r"amp_lists is \['Neg'\]; expected amp.AutoMixedPrecisionLists"),
        ("scale-loss", {"training": 3}, "training is 3; expected `training` of a decorated optimizer"),
        ("scale-loss", {"startup_program": 3}, "startup_program is 3; expected a value of the type Program"),
        ("constraints", {"options": {}}, "options is {}; expected a value of the type ConversionOptions"),
        ("emit", {"wanted": 3}, "wanted is 3; expected a value of the type Wanted"),
        ("emit", {"feed_shapes": 3}, "feed_shapes is 3; expected a mapping"),
        ("emit", {"feed_shapes": {"zz": (1,)}}, "'zz' is no feed of program 'g'; its feeds are x"),
    ],
)
def test_a_value_of_another_kind_is_refused(text: str, values: dict[str, Any], said: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=f"pipeline '{text}': {said}"):
        Pipeline(text).run(program(FUNCTION.replace("own.Twice", "Neg")), **values)


def test_a_value_of_none_is_left_out() -> None:
    ran = Pipeline("inline-functions,emit").run(program(FUNCTION), feed_shapes=None, wanted=None)
    assert ran["lowered"] and "wanted" not in ran.values


@pytest.fixture
def _passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PASSES", dict(PASSES))


@pytest.mark.usefixtures("_passes")
def test_whole_numbers_are_options() -> None:
    class Counts(passes.Pass):
        """It counts."""

        name = "counts"
        most: int = 1

        def run(self, graph: Graph, context: passes.Context) -> None: ...

    text = str(Pipeline([Counts(most=-2)]))
    assert text == "counts{most=-2}" and Pipeline(text).passes == (Counts(most=-2),)
    with pytest.raises(ArgumentError, match="option most of counts is 'few'; expected a whole number"):
        Pipeline("counts{most=few}")


@pytest.mark.usefixtures("_passes")
def test_an_option_without_text_is_named() -> None:
    class Weighs(passes.Pass):
        """It weighs."""

        name = "weighs"
        by: float = 1.0

        def run(self, graph: Graph, context: passes.Context) -> None: ...

    for call in (lambda: str(Pipeline([Weighs(2.0)])), lambda: Pipeline("weighs{by=2}")):
        with pytest.raises(
            ArgumentTypeError, match="option by of pass .*Weighs is of type .*float.*; expected bool, int"
        ):
            call()


@pytest.mark.usefixtures("_passes")
@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({}, "has the name None; give it one, as in name = 'fold-constants'"),
        ({"name": "two words"}, "has the name 'two words'"),
        ({"name": "autodiff"}, "is called 'autodiff', and so is amp_transpiler.passes.autodiff.differentiate.Autodiff"),
    ],
)
def test_a_pass_has_a_name_of_its_own(named: dict[str, str], said: str) -> None:
    with pytest.raises(ArgumentError, match=r"pass .*\.Mine " + said):
        type("Mine", (passes.Pass,), {"run": lambda self, graph, context: None, **named})
    assert passes.PASSES == PASSES


def test_lowering_works_on_a_copy_that_is_made_where_something_changes() -> None:
    for place in ("cpu", "cuda"):
        kinds = [type(each) for each in lowering(place)]
        assert kinds[0] is InlineFunctions and kinds[-1] is Emit and ExpandControlFlow in kinds
    plain = program(HEAD + "g (float[2] x) => (float[2] y) { y = Neg (x) }")
    assert {op.program for op in plain.lower(amp.CPUPlace()).origins if op} == {plain}
    calling = program(FUNCTION)
    assert calling not in {op.program for op in calling.lower(amp.CPUPlace()).origins if op}
    assert [op.type for op in calling.operators] == ["Twice"] and calling.var("x").program is calling


def test_lowering_as_text_gives_the_model_of_lower() -> None:
    branching = program(IF)
    expected = branching.lower(amp.CUDAPlace(0)).model
    assert Pipeline(str(lowering("cuda"))).run(branching)["lowered"].model == expected


@pytest.mark.parametrize("what", Property)
def test_a_property_is_guaranteed_by_a_pass_or_holds_of_an_import(what: Property) -> None:
    made = [name for name, each in PASSES.items() if what in each.guarantees]
    assert made or what.holds(program(FUNCTION.replace("own.Twice (x)", "Neg (x)")))


ALONE = [name for name, each in PASSES.items() if not any(isinstance(need, passes.Value) for need in each.needs)]


@pytest.mark.parametrize("name", sorted(set(ALONE) - {"autodiff", "check-step"}))
@pytest.mark.parametrize("model", ["cnn_dynamo", "encoder_torchscript"])
def test_a_pass_changes_nothing_twice(model: str, name: str) -> None:
    imported = amp.Program.from_onnx(exported(model))
    if Property.TARGET_OPSET in PASSES[name].needs:
        imported.convert_opset()
    before = imported.to_onnx()
    ((_, changed),) = Pipeline(name).run(imported).changes
    after = imported.to_onnx()
    assert changed or after == before, "what changed a file says so"
    assert Pipeline(name).run(imported).changes[0][1] is False and imported.to_onnx() == after


@pytest.mark.parametrize("text", ["precision{mode=pure-fp16 dtype=fp16}", "precision{mode=PURE dtype=half}"])
def test_modes_and_types_are_read_in_other_spellings(text: str) -> None:
    assert str(amp.Pipeline(text)) == str(amp.Pipeline("precision{mode=pure dtype=float16}"))
