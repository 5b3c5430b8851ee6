"""Connectionist temporal classification: the loss, and the labels that are read off its probabilities."""

from __future__ import annotations

import numpy as np

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.nodes import OWN, Variable
from amp_transpiler.ir.types import ONNX_TYPES
from amp_transpiler.nn.building import FLOATING, INTEGER, LARGEST, appending, describe, fixed, fresh, variable, whole
from amp_transpiler.nn.calls import function
from amp_transpiler.nn.classification import check_reduction
from amp_transpiler.option_checks import switch
from amp_transpiler.program import default_main_program


@function()
def ctc_loss(
    log_probs: Variable,
    labels: Variable,
    input_lengths: Variable,
    label_lengths: Variable,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
    *,
    name: str | None = None,
) -> Variable:
    """Negative log-probability of ``labels`` under all their alignments (Graves et al. 2006), in fp32.

    ``log_probs``: float [T, N, C], time first: logits (as Paddle's ``ctc_loss`` takes them) or the log-probabilities of
    ``log_softmax`` (as torch's does). Log-softmax over the classes is applied here and changes log-probabilities by
    nothing but rounding, so both give the same loss, and the same gradient: softmax minus the probability of each
    class given the label. ``labels``: int64 or int32 [N, S], classes other than ``blank``; what lies beyond a
    label's length is not read. ``input_lengths`` (at most T) and ``label_lengths`` (at most S): int64 or int32 [N].
    A label length of 0 is a target without symbols.

    ``reduction``: "mean" divides each loss by its label's length (a length of 0 counts as 1) and takes the mean over
    the batch, "sum" adds them, both shape []; "none" gives [N]. A label that does not fit its input has the loss
    infinity and the gradient NaN, which loss scaling takes as a bad step; with ``zero_infinity`` both are 0.

    ArgumentError: element types, ranks or sizes that do not fit, a blank outside the classes. Labels and lengths out
    of range stop the run on CPU; on CUDA, where nothing can, their loss is NaN.
    """
    call = "ctc_loss"
    variable(call, "log_probs", log_probs, dtypes=FLOATING, rank=3)
    variable(call, "labels", labels, dtypes=INTEGER, rank=2)
    variable(call, "input_lengths", input_lengths, dtypes=INTEGER, rank=1)
    variable(call, "label_lengths", label_lengths, dtypes=INTEGER, rank=1)
    classes, blank = fixed(call, "log_probs", log_probs, 2), whole(call, "blank", blank, 0)
    if blank >= classes:
        raise ArgumentError(f"{call}: blank={blank}, but log_probs {describe(log_probs)} has {classes} classes")
    check_reduction(call, reduction)
    switch(f"{call}: zero_infinity", zero_infinity)
    batch = (log_probs.shape or ())[1]
    for name, value in (("labels", labels), ("input_lengths", input_lengths), ("label_lengths", label_lengths)):
        size = (value.shape or ())[0]
        if isinstance(size, int) and isinstance(batch, int) and size != batch:
            raise ArgumentError(
                f"{call}: log_probs {describe(log_probs)} has {batch} sequences (its dimension 1), but {name} "
                f"{describe(value)} has {size}"
            )
    program = default_main_program()
    loss = program.new_variable(fresh(call))
    loss.dtype, loss.shape = log_probs.dtype, (batch,) if reduction == "none" else ()
    attrs = {"blank": blank, "reduction": reduction, "zero_infinity": int(zero_infinity)}
    program.add_operator("CTCLoss", [log_probs, labels, input_lengths, label_lengths], [loss], attrs=attrs, domain=OWN)
    return loss


@function()
def ctc_greedy_decoder(
    x: Variable, blank: int, input_length: Variable | None = None, padding_value: int = 0, *, name: str | None = None
) -> tuple[Variable, Variable]:
    """The labels of the best path (Graves et al. 2006): the largest class of each step, repeated ones once, without
    blanks. Returns (labels int64 [N, T], filled up with ``padding_value``; their lengths int64 [N, 1]).

    ``x``: float [N, T, C], the batch first: probabilities, or any numbers of their order. ``input_length``: int64 or
    int32 [N] or [N, 1], steps that count of each; all where None. No gradient flows.
    """
    call = "ctc_greedy_decoder"
    classes = fixed(call, "x", variable(call, "x", x, dtypes=FLOATING, rank=3), 2)
    if whole(call, "blank", blank, 0) >= classes:
        raise ArgumentError(f"{call}: blank={blank}, but x {describe(x)} has {classes} classes")
    add = appending(call)
    one, along = np.ones(1, np.int64), np.array(1, np.int64)
    best = add("ArgMax", x, axis=2, keepdims=0)
    nothing = add("Sub", best, best)
    first = add("Sub", add("Slice", nothing, 0 * one, one, one), one)
    before = add("Concat", first, add("Slice", best, 0 * one, -one, one), axis=1)
    kept = add("And", add("Not", add("Equal", best, np.array(blank))), add("Not", add("Equal", best, before)))
    if input_length is not None:
        variable(call, "input_length", input_length, dtypes=INTEGER)
        lengths = add("Reshape", add("Cast", input_length, to=ONNX_TYPES["int64"]), np.array([-1, 1]))
        kept = add("And", kept, add("LessOrEqual", add("CumSum", add("Add", nothing, one), along), lengths))
    number = add("CumSum", add("Cast", kept, to=ONNX_TYPES["int64"]), along)
    padding = np.array(whole(call, "padding_value", padding_value, -(2**31)))
    # What is left out goes in front of the first label, where it is cut off.
    filled = add("Add", add("Concat", add("Sub", first, first), nothing, axis=1), padding)
    into, values = add("Where", kept, number, 0 * one), add("Where", kept, best, padding)
    labels = add("Slice", add("ScatterElements", filled, into, values, axis=1), one, np.array([LARGEST]), one)
    return labels, add("Slice", number, -one, np.array([LARGEST]), one)
