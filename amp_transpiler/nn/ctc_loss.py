"""The loss of connectionist temporal classification."""

from __future__ import annotations

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.nodes import OWN, Variable
from amp_transpiler.nn.building import FLOATING, INTEGER, describe, fixed, fresh, variable, whole
from amp_transpiler.nn.calls import function
from amp_transpiler.nn.classification import check_reduction
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
    if not isinstance(zero_infinity, bool):
        raise ArgumentTypeError(f"{call}: zero_infinity must be True or False, not {zero_infinity!r}")
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
