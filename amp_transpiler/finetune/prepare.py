"""From an exported inference model to a program that can be trained."""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from amp_transpiler.conversion.auto import margins, unsafe
from amp_transpiler.conversion.calibration.measure import measure
from amp_transpiler.conversion.calibration.samples import load_calibration
from amp_transpiler.conversion.fold_constants import fold_values
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, OrderError
from amp_transpiler.finetune.bags import sum_bags
from amp_transpiler.finetune.import_weights import (
    adopt_named,
    leave_input_scaling,
    restore_parameters,
    weights_from_constants,
)
from amp_transpiler.finetune.layer_names import restore_names
from amp_transpiler.finetune.left_out import (
    buffers_left,
    computed_of_several,
    counted_left,
    drawn_by_runtime,
    integers_left,
    named_numbers,
    numbers_left,
)
from amp_transpiler.finetune.nothing_left import check_trained
from amp_transpiler.finetune.recurrent_bias import one_bias
from amp_transpiler.finetune.repeated import once_for_all
from amp_transpiler.finetune.tied_weights import retie, shared_by_layers, untie
from amp_transpiler.finetune.train_mode import (
    check_batch_norm,
    insert_dropout,
    number_draws,
    set_batch_norm,
    train_dropout,
)
from amp_transpiler.ir.annotate import annotate
from amp_transpiler.ir.infer import differ
from amp_transpiler.ir.metadata import FULL, INITIALIZER
from amp_transpiler.ir.nodes import BACKWARD, FORWARD, OWN, Operator, Variable
from amp_transpiler.ir.parameter_names import names_of_parameter
from amp_transpiler.ir.patterns import matching_names
from amp_transpiler.ir.rollback import unchanged_on_error
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.ir.weights import become_constants, not_a_weight
from amp_transpiler.option_checks import shown
from amp_transpiler.passes.canonicalize.control_flow import expand_control_flow
from amp_transpiler.passes.canonicalize.fuse_batch_norm import fuse_batch_norms
from amp_transpiler.passes.canonicalize.fuse_gelu import fuse_gelus
from amp_transpiler.passes.canonicalize.fuse_hard_swish import fuse_hard_swishes
from amp_transpiler.passes.canonicalize.fuse_norm import fuse_layer_norms
from amp_transpiler.passes.canonicalize.fuse_rms import fuse_rms_norms, keep_root_mean_squares
from amp_transpiler.passes.canonicalize.fuse_rotary import fuse_rotations
from amp_transpiler.passes.canonicalize.fuse_softmax import fuse_softmaxes
from amp_transpiler.passes.canonicalize.fuse_swish import fuse_swishes
from amp_transpiler.passes.canonicalize.inlining import inline_functions
from amp_transpiler.passes.canonicalize.integer_places import write_integer_places
from amp_transpiler.passes.canonicalize.log_sigmoids import write_log_sigmoids
from amp_transpiler.passes.canonicalize.masked_writes import select_by_masks
from amp_transpiler.passes.canonicalize.nan_rows import free_nan_rows
from amp_transpiler.passes.canonicalize.opset import convert_opset
from amp_transpiler.passes.canonicalize.own_statistics import normalise_rows
from amp_transpiler.passes.canonicalize.roots import mark_lengths, write_roots
from amp_transpiler.passes.canonicalize.simplify import remove_identities
from amp_transpiler.passes.canonicalize.slice_writes import write_slices
from amp_transpiler.passes.canonicalize.triangles import invert_triangles
from amp_transpiler.passes.canonicalize.whole_splits import split_wholes
from amp_transpiler.passes.numerics.mask_constants import saturate_masks
from amp_transpiler.passes.precision.pure import cast_model_to_fp16
from amp_transpiler.passes.precision.widen import widen
from amp_transpiler.program import Program

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preparation:
    """What :func:`prepare_training` did: the names of trained and frozen parameters, and notes on each change."""

    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{len(self.trainable)} parameters are trained, {len(self.frozen)} are frozen"
        return "\n".join([head, *self.notes])


def prepare_training(
    program: Program,
    *,
    trainable: Sequence[str] | None = None,
    freeze: Sequence[str] = (),
    batch_norm: str | Mapping[str, str] = "train",
    dropout: Mapping[str, float] | None = None,
    values: Mapping[str, Any] | None = None,
    feed_shapes: Mapping[str, Sequence[int | str | None]] | None = None,
    keep_tied: Sequence[str] = (),
    restore: bool = True,
    numeric_guards: bool = True,
    calibration: Any = None,
) -> Preparation:
    """Turn the program of an exported inference model into one to train, in place; add the loss afterwards.

    A model in 16 bit becomes the fp32 one that it stands for (inputs and outputs keep their types): training decides
    precision anew, from fp32 weights. Weights become what they were before the export: those in Constant operators and
    nested graphs become parameters, but no masks, positions told by waves, tensors to write into; parameters whose
    elements are all alike, which the exporter merged, are copied apart, but for calls of one layer; what it repeated
    for each example of a fixed batch is one parameter for all; matrices and filters are tied to their copies again (a
    matrix to a transposed one too), but for layers of one kind, which are equal until they are trained; what PyTorch's
    dynamo exporter merged is several parameters where it says that they were several, and biases that it left out,
    being zero, are parameters; the zeros beside the one bias of Keras's recurrent layers stay; anonymous parameters get
    the name of their module, and linear layers their layout [out, in] (``restore``); layer norms that were written out
    (before opset 17), RMS norms, GELUs, SiLUs, hard swishes, softmaxes and rotary positions are one operator again,
    slices that make up a tensor one Split, and Splits of a tensor into the same pieces one. Weights that are
    standardised by a batch norm of their own statistics are so by a layer norm. A batch norm whose slope is computed
    beside it, as a trained model in 16 bit has it, takes its scale and variance itself again.
    RMS norms, SiLUs and rotary positions are those which onnxruntime has at every opset (SimplifiedLayerNormalization,
    QuickGelu, RotaryEmbedding); what is saved for inference has them written out. What exports of attention put in the
    place of NaN is put in the place of rows that a mask forbids altogether, whose gradient is 0, and goes where there
    are none: NaN of the scores would be hidden from the loss scaling.
    Weights that pass a QuantizeLinear and a DequantizeLinear train; those that are stored as integers do not.
    BatchNormalization and Dropout train, an If on a constant is inlined, a loop over bags of rows (EmbeddingBag) is
    operators over all of them, other loops of known length are unrolled, what is computed of constants and of declared
    sizes is a constant, sequences of known pieces are tensors, what changes nothing (Identity, x + 0, x * 1) goes, and
    calls of the model's functions are inlined: variables of such a model are to be asked for by name again.

    Args:
        program: of ``Program.from_onnx``, without a backward pass.
        trainable: patterns (globs, or ``re:`` and a regular expression) of the parameters to train, by their own name
            or by the name or scope of an operator that reads them; all where None. A float constant that looks like
            no weight is trained where it stands here by its very name, no pattern: ``["*", "logit_scale"]``.
        freeze: patterns of parameters that are not trained; wins over ``trainable``. ``["*"]`` freezes a teacher, or
            what a head of your own stands on.
        batch_norm: "train" (batch statistics; running ones are updated), "synchronized" (likewise, over the batches of
            all ranks, where there are several), or "frozen" (running ones are used); or {pattern: one of these}, the
            last that fits: ``{"body.*": "frozen"}``. The others train.
        dropout: {pattern: rate}: a Dropout behind each operator whose name or scope matches. Those that the model
            still has are switched on in any case.
        values: {input: value}: inputs that get one value for good, such as a sampling rate, a trip count, or the edges
            of a graph: sizes that operators make of it (NonZero, Range) are known then, and not computed in each run.
        feed_shapes: {input: shape}: sizes of inputs for good, where something depends on them before the run, as the
            turns of a loop over time; None, or a name, leaves one open: ``{"x": [None, 7, 6]}``.
        keep_tied: patterns of such parameters that stay one for all their readers.
        restore: name anonymous parameters after their layers and turn linear weights back.
        numeric_guards: let training in 16 bit keep fp32 what is known to leave the type, as ``amp.convert`` does;
            False takes mode and lists literally. ``amp.decorate`` may say otherwise. What it goes by: constants and
            masks, the structure, declared types, and of weights, which training changes, that they do not fit now.
        calibration: feeds (a dict, or several), or files, as ``amp.convert`` takes them. Operators that make or read a
            tensor which on this data comes near the end of float16, or sinks below it, stay fp32 in every mode of
            training; ``op.reason`` says what was measured. bfloat16 needs none.

    Returns:
        A :class:`Preparation`; its notes are logged too.

    Raises:
        ArgumentError: a pattern that matches no parameter, an unknown input, a value or shape that does not fit.
        FeedError, FeedTypeError: calibration data that does not fit the program's inputs. OrderError: the program has
        a backward pass already. Where anything raises, the program is as before.
    """
    if not isinstance(program, Program):
        raise ArgumentTypeError(f"prepare_training takes a Program (Program.from_onnx), not {type(program).__name__}")
    if any(op.role == BACKWARD for op in program.operators):
        raise OrderError(
            f"prepare_training: program '{program.name}' has a backward pass already; prepare it before minimize"
        )
    check_batch_norm("prepare_training: batch_norm", batch_norm)
    with unchanged_on_error(program, program.startup):
        notes = ["the model's functions are inlined"] * inline_functions(program)
        notes += _fix(program, values or {}, feed_shapes or {})
        notes += widen(program)
        convert_opset(program)
        notes += fuse_batch_norms(program)
        notes += sum_bags(program)
        turns: dict[Operator, Hashable] = {}
        unrolled = expand_control_flow(program, turns=turns)
        notes += weights_from_constants(program)
        notes += restore_parameters(program)
        notes += leave_input_scaling(program)
        listed = trainable if isinstance(trainable, Iterable) and not isinstance(trainable, str) else ()
        named = adopt_named(program, listed)
        notes += [f"'{name}': trained, because named" for name in named]
        notes += once_for_all(program)
        notes += retie(program, _frozen(program, trainable, freeze))
        notes += untie(program, _matched(program, keep_tied, "keep_tied"), turns)
        notes += one_bias(program, listed)
        fold_values(program)
        if expand_control_flow(program):  # as loops whose end is folded
            unrolled = True
            fold_values(program)
        notes += ["control flow that is known before the run is straight-line now"] * unrolled
        numbers = named_numbers(program)
        notes += _drop_identities(program)
        gone = sorted(set(numbers).difference(named_numbers(program)), key=numbers.index)
        notes += select_by_masks(program)
        write_roots(program)
        mark_lengths(program)
        notes += invert_triangles(program)
        notes += fuse_layer_norms(program)
        notes += normalise_rows(program)
        notes += fuse_gelus(program)
        notes += fuse_swishes(program)
        notes += fuse_hard_swishes(program)
        notes += write_log_sigmoids(program)
        notes += fuse_softmaxes(program)
        notes += write_slices(program)
        notes += split_wholes(program)
        notes += fuse_rms_norms(program)
        notes += fuse_rotations(program)
        notes += free_nan_rows(program)
        notes += write_integer_places(program)
        notes += keep_root_mean_squares(program)
        notes += restore_names(program) if restore else []
        notes += shared_by_layers(program)
        notes += numbers_left(program, gone)
        notes += counted_left(program)
        notes += buffers_left(program)
        notes += computed_of_several(program)
        notes += integers_left(program)
        notes += number_draws(program)
        notes += drawn_by_runtime(program)
        notes += set_batch_norm(program, batch_norm)
        notes += train_dropout(program)
        notes += insert_dropout(program, dropout or {})
        _select(program, trainable, freeze, named)
        program.numeric_guards = numeric_guards
        _settle_startup(program)
        notes += _keep_measured(program, calibration) if calibration is not None else []
        notes += _unknown(program)
    kept = [
        v for v in program.variables if v.persistable and v.data is not None and (v.trainable or not not_a_weight(v))
    ]
    done = Preparation(
        tuple(v.name for v in kept if v.trainable), tuple(v.name for v in kept if not v.trainable), tuple(notes)
    )
    _log.info("program '%s': %s", program.name, done)
    return done


def control_flow_left(
    program: Program, values: Mapping[str, Any], feed_shapes: Mapping[str, Sequence[int | str | None]]
) -> int:
    """How many operators with nested graphs :func:`prepare_training` would leave in the program, which stays."""
    tried = program.clone()
    inline_functions(tried)
    _fix(tried, values, feed_shapes)
    convert_opset(tried)
    sum_bags(tried)
    expand_control_flow(tried)
    fold_values(tried)
    expand_control_flow(tried)
    return len(tried.nesting)


def _unknown(program: Program) -> list[str]:
    """What stands in the way of gradients where they go through it."""
    return [
        f"nothing tells the element type of '{v.name}', which '{v.producer.label}' ({v.producer.full_type}) makes: no "
        f"gradient goes through it before program.var('{v.name}').dtype is set"
        for v in map(program.var, filter(program.has_var, program.untyped()))
        if v.producer is not None
    ]


def _drop_identities(program: Program) -> list[str]:
    """Take out what changes nothing (Paddle's exporter writes much of it), but for Dropout, which is to train."""
    dropouts = frozenset(op for op in program.walk() if op.type == "Dropout")
    count = remove_identities(program, frozenset(), dropouts)
    return [f"{count} operators that change nothing are gone"] if count else []


def _fix(
    program: Program, values: Mapping[str, Any], feed_shapes: Mapping[str, Sequence[int | str | None]]
) -> list[str]:
    """Give inputs their value or shape for good."""
    notes = []
    for called, given in (("values", values), ("feed_shapes", feed_shapes)):
        if not isinstance(given, Mapping):
            raise ArgumentTypeError(f"prepare_training: {called} is {given!r:.80}; expected a mapping from input names")
    for name, shape in feed_shapes.items():
        variable = _input(program, name, "feed_shapes")
        if isinstance(shape, str) or not isinstance(shape, Iterable):
            raise ArgumentTypeError(
                f"feed_shapes: the shape of input '{name}' is {shown(shape)}; expected a list of sizes"
            )
        sizes = tuple(shape)
        declared = variable.shape
        if declared is not None and differ(declared, sizes):
            raise ArgumentError(f"feed_shapes: {list(sizes)} does not fit input '{name}' of shape {list(declared)}")
        known = declared or (None,) * len(sizes)
        variable.shape = tuple(s if isinstance(s, int) else d or s for s, d in zip(sizes, known, strict=True))
    if feed_shapes:
        annotate(program)
    for name, value in values.items():
        variable = _input(program, name, "values")
        try:
            array = np.asarray(value, numpy_dtype(variable.dtype or "float32"))
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(f"values: {shown(value)} does not fit input '{name}': {error}") from None
        if variable.shape is not None and len(variable.shape) != array.ndim:
            raise ArgumentError(f"values: {value!r} does not fit input '{name}' of shape {list(variable.shape)}")
        program.inputs = [v for v in program.inputs if v is not variable]
        variable.is_input, variable.data, variable.shape = False, array, array.shape
        notes.append(f"input '{name}' is {value} for good")
    program.touch()
    return notes


def _input(program: Program, name: str, what: str) -> Variable:
    found = next((v for v in program.inputs if v.name == name), None)
    if found is None:
        known = ", ".join(v.name for v in program.inputs) or "none"
        raise ArgumentError(f"{what}: program '{program.name}' has no input '{name}'; its inputs are {known}")
    return found


def _matched(program: Program, patterns: Sequence[str], what: str, *, required: bool = True) -> Collection[Variable]:
    """Persistable variables with content whose name, or a reader's name or scope, fits a pattern."""
    if not patterns:
        return ()
    candidates = [v for v in program.variables if v.persistable and v.data is not None]
    kind = f"parameter of program '{program.name}'"
    return matching_names(candidates, patterns, what, names_of_parameter, kind, required=required)


def _frozen(program: Program, trainable: Sequence[str] | None, freeze: Sequence[str]) -> set[Variable]:
    """The parameters that these patterns freeze, by the names that they have already."""
    chosen = None if trainable is None else _matched(program, trainable, "trainable", required=False)
    kept = set() if chosen is None else {v for v in program.parameters if v not in chosen}
    return kept | {*_matched(program, freeze, "freeze", required=False)}


def _select(
    program: Program, trainable: Sequence[str] | None, freeze: Sequence[str], named: Mapping[str, Variable]
) -> None:
    """``named`` are found already, and may be called otherwise by now."""
    chosen = None
    if trainable is not None:
        rest = [pattern for pattern in trainable if pattern not in named] if named else trainable
        chosen = {*_matched(program, rest, "trainable"), *named.values()}
    frozen = _matched(program, freeze, "freeze")
    for variable in program.parameters:
        if (chosen is not None and variable not in chosen) or variable in frozen:
            variable.trainable = False
    program.touch()
    if trainable is not None or not frozen:  # a teacher, or a body below a new head, is frozen altogether
        check_trained("prepare_training", program, trainable, freeze)


def _keep_measured(program: Program, calibration: Any) -> list[str]:
    """Let operators run in fp32 around tensors that the data shows not to fit float16."""
    batches = load_calibration(calibration, program)
    reference = program.clone(for_test=True)
    become_constants(reference)
    special = margins(reference, "float16")
    saturate_masks(reference, "float16")
    narrow = reference.clone()
    cast_model_to_fp16(narrow, use_fp16_guard=False, numeric_guards=True)
    found = unsafe(measure(reference, narrow, batches, "float16"), "float16", special)
    for name, why in found.items():
        variable = program.var(name)
        for op in (variable.producer, *(reader for reader, _ in variable.readers)):
            if op is not None:
                op.metadata.setdefault(FULL, str(why))
    if not found:
        return []
    tensors = "1 tensor does" if len(found) == 1 else f"{len(found)} tensors do"
    return [f"{tensors} not fit float16 on the calibration data: what makes and reads such stays fp32"]


def _settle_startup(program: Program) -> None:
    """Let the startup program set what the program keeps now, and nothing that it no longer has."""
    startup = program.startup
    if startup is None:
        startup = program.startup = Program(f"{program.name}_startup")
    kept = {v.name: v for v in program.variables if v.persistable and v.producer is None and v.data is not None}
    for op in startup.operators:
        out = op.output(0)
        if op.type == INITIALIZER and op.domain == OWN and out is not None and _differs(out, kept.get(out.name)):
            startup.remove_operator(op)
            startup.remove_variable(out)
    for name, variable in kept.items():
        if not startup.has_var(name):
            out = startup.add_variable(name, variable.dtype, variable.shape, persistable=True, data=variable.data)
            startup.add_operator(INITIALIZER, [], [out], domain=OWN, role=FORWARD)


def _differs(out: Variable, kept: Variable | None) -> bool:
    return kept is None or kept.data is not out.data
