"""The programs of one run: the model to write, the training step, the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amp_transpiler import optimizer as optimizers
from amp_transpiler.distributed import shard_optimizer, world_size
from amp_transpiler.errors import ArgumentError
from amp_transpiler.finetune.label_reach import keep_reach, reaches_beyond
from amp_transpiler.finetune.last_activation import Applied, probabilities
from amp_transpiler.finetune.nothing_left import check_trained
from amp_transpiler.finetune.options import OPTIMIZERS, FitOptions
from amp_transpiler.finetune.prepare import Preparation, control_flow_left, prepare_training
from amp_transpiler.ir import unique_name
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.nn import data, functional as F
from amp_transpiler.optimizer import LossScaler, decorate
from amp_transpiler.program import Program, program_guard

#: Where the loss scale ends: labels of 1e5 ask for less than 1, where Paddle's rule ends.
LOWEST_SCALE = 2.0**-24


def _log_softmax(op: Operator) -> Variable:
    assert op.inputs[0] is not None
    return F.log_softmax(op.inputs[0], op.attrs.get("axis", -1))


#: Loss by name: its function, and the activation at a model's end that it applies itself.
_CALLS: dict[str, tuple[Callable[..., Variable], Applied | None]] = {
    "cross_entropy": (F.cross_entropy, Applied("Softmax", rows=True, pair=True)),
    "mse": (F.mse_loss, None),
    "bce_with_logits": (F.bce_with_logits, Applied("Sigmoid")),
    "kl_div": (F.kl_div, Applied("Softmax", "logarithms of probabilities", _log_softmax, rows=True)),
}


@dataclass
class Programs:
    """``program`` trains once :meth:`compile` has run; ``model`` is for inference, ``evaluation`` has the loss too.

    ``reference`` is the evaluation in fp32, whatever the training's precision is. ``prediction`` is what the loss
    reads, under the same name in all of them. ``weight`` is what a rank's loss is multiplied by, fed with each step;
    None where a rank is alone.
    """

    program: Program
    preparation: Preparation
    model: Program
    evaluation: Program
    reference: Program
    loss: Variable
    prediction: Variable
    label: Variable
    weight: Variable | None = None

    @classmethod
    def of(
        cls,
        program: Program,
        options: FitOptions,
        rows: Mapping[str, Any] | Sequence[str],
        shapes: Mapping[str, Sequence[int]],
        labels: tuple[int, ...],
        say: Callable[[str], None],
        reach: float = 0.0,
    ) -> Programs:
        """Prepare an imported program and attach the loss.

        ``rows``, a batch or files of samples, tells what leaves the range of float16 (bfloat16 has that of fp32), where
        there are any; ``shapes`` of what inputs are fed, how long loops run that hang on them; ``labels``, the shape of
        the label's array, where the classes lie; ``reach``, how large numbers are that the prediction is to become.
        """
        sizes = _deciding_sizes(program, options, shapes, say)
        measured = options.mode != "fp32" and options.dtype == "float16"
        report = prepare_training(
            program,
            trainable=options.trainable,
            freeze=options.freeze,
            keep_tied=options.keep_tied,
            values=options.values,
            feed_shapes=sizes,
            batch_norm=options.batch_norm,
            dropout=options.dropout,
            calibration=rows if measured and rows else None,
        )
        check_trained("fit", program, options.trainable, options.freeze)
        say(str(report))
        model = program.clone(for_test=True)
        with program_guard(program, program.startup), unique_name.guard():
            prediction = _prediction(program, options, say)
            if measured and reaches_beyond(reach):
                keep_reach([prediction, model.var(prediction.name)], options.label, reach)
                say(f"labels reach {reach:.4g}, beyond float16: what makes '{prediction.name}' stays fp32")
            if options.loss == "cross_entropy":
                prediction = _classes_last(prediction, labels, say)
            label = _label(prediction, options)
            more = {"label_smoothing": options.label_smoothing} if options.label_smoothing else {}
            loss = _CALLS[options.loss][0](prediction, label, **more)
        evaluation, reference = program.clone(for_test=True), program.clone(for_test=True)
        return cls(program, report, model, evaluation, reference, loss, prediction, label)

    def compile(self, options: FitOptions, updates: int) -> Any:
        """Append the training step of so many updates in all; the optimizer."""
        kind = getattr(optimizers, OPTIMIZERS[options.optimizer])
        more: dict[str, Any] = {"multi_precision": options.mode != "fp32"}
        if options.clip_norm:
            more["grad_clip"] = optimizers.ClipGradByGlobalNorm(options.clip_norm)
        optimizer = kind(learning_rate=_rate(options, updates), **more)
        if options.weight_decay is not None:
            optimizer.weight_decay = options.weight_decay
        if options.mode != "fp32":
            lists = AutoMixedPrecisionLists(custom_black_list=list(options.black_list) or None, dtype=options.dtype)
            scaling: dict[str, Any] = {}
            if options.dtype == "float16":
                start = {"init_scale": float(options.loss_scale)} if options.loss_scale else {}
                scaling = {"scaler": LossScaler.paddle(floor=LOWEST_SCALE, **start)}
            elif options.loss_scale:
                scaling = {"init_loss_scaling": options.loss_scale}
            optimizer = decorate(
                optimizer,
                lists,
                use_pure_fp16=options.mode == "pure",
                use_fp16_guard=False,
                dtype=options.dtype,
                accumulate_steps=options.accumulate,
                allreduce_precision=options.allreduce_precision,
                **scaling,
            )
        if options.shard_optimizer:
            shard_optimizer(optimizer)
        with program_guard(self.program, self.program.startup), unique_name.guard():
            objective = self.loss
            if world_size() > 1:
                self.weight = data(self.program.unique("weight_of_this_rank"), [], str(self.loss.dtype))
                objective = self.loss * self.weight
            optimizer.minimize(objective, self.program.startup)
        return optimizer


def _deciding_sizes(
    program: Program, options: FitOptions, shapes: Mapping[str, Sequence[int]], say: Callable[[str], None]
) -> dict[str, tuple[int | str | None, ...]]:
    """Shapes of inputs whose open sizes, but for the batch, control flow hangs on; none where there are no such."""
    found = {}
    for variable in program.inputs:
        given, declared = shapes.get(variable.name, ()), variable.shape
        if len(given) > 1 and (declared is None or not all(isinstance(size, int) for size in declared[1:])):
            found[variable.name] = (declared[0] if declared else None, *given[1:])
    if not found or not (program.nesting or program.info.functions):
        return {}
    if control_flow_left(program, options.values, found) >= control_flow_left(program, options.values, {}):
        return {}
    for name, shape in found.items():
        sizes = ", ".join(str(size) if isinstance(size, int) else "?" for size in shape)
        say(f"input '{name}' is [{sizes}] for good, as it is fed: the model's control flow hangs on its sizes")
    return found


def _prediction(program: Program, options: FitOptions, say: Callable[[str], None]) -> Variable:
    """What the loss reads: the chosen output, or what stands before an activation that the loss applies itself."""
    floats = [v for v in program.outputs if v.dtype in FLOATS]
    found = [v for v in floats if v.name == options.target] if options.target else floats[:1]
    if not found:
        known = ", ".join(f"{v.name} ({v.dtype})" for v in program.outputs)
        wanted = options.said("target") if options.target else options.said("loss")
        raise ArgumentError(f"{wanted}: the model has no such float output; it has {known}")
    out = found[0]
    if len(floats) > 1 and not options.target:
        say(f"the model has {len(floats)} float outputs; the loss reads the first, '{out.name}'")
    while out.producer is not None and out.producer.inserted and out.producer.inputs[0] is not None:
        out = out.producer.inputs[0]  # a 16-bit output; the loss reads what it is rounded from
    out = _before_activation(out, options, say)
    if not out.shape:
        raise ArgumentError(
            f"the loss reads '{out.name}', whose shape is not known, or which is a single number; "
            f"choose another output ({options.called('target')})"
        )
    return out


def _before_activation(out: Variable, options: FitOptions, say: Callable[[str], None]) -> Variable:
    """What the loss takes where it applies the activation itself that an output ends in; else the output."""
    applied = _CALLS[options.loss][1]
    if applied is None:
        return out
    ending = applied.ending(out)
    if ending:
        then = f" (then {', '.join(ending[1:])})" if ending[1:] else ""
        say(f"the model ends in {ending[0]}{then}, and {options.loss} takes {applied.takes}: the loss reads those")
        return applied.before(out)
    if probabilities(out):
        others = [loss for loss, (_, other) in _CALLS.items() if other is not None and other.ending(out)]
        ways = [
            f"choose an output that has them ({options.called('target')})",
            "export the model without that activation",
        ]
        ways += [f"train with {options.said('loss', loss)}" for loss in (*others, "mse")]
        raise ArgumentError(
            f"{options.said('loss')} takes {applied.takes}, and '{out.name}', which it would read, lies between 0 "
            f"and 1, as probabilities do: what stands before the activation was not found. "
            f"{', '.join(ways[:-1]).capitalize()}, or {ways[-1]}"
        )
    return out


def _classes_last(prediction: Variable, labels: tuple[int, ...], say: Callable[[str], None]) -> Variable:
    """Predictions [N, classes, …], as of pixels, with the classes last, where labels of this shape ask for it."""
    shape = prediction.shape or ()

    def fit(sizes: Sequence[Any]) -> bool:
        given = labels[:-1] if len(labels) == len(sizes) + 1 and labels[-1] == 1 else labels
        return len(given) == len(sizes) and all(
            not isinstance(size, int) or size == one for size, one in zip(sizes[1:], given[1:], strict=True)
        )

    if len(shape) < 3 or fit(shape[:-1]) or not fit((shape[0], *shape[2:])):
        return prediction
    say(f"the classes of '{prediction.name}' lie along its second dimension, as the labels show")
    return F.transpose(prediction, [0, *range(2, len(shape)), 1])


def refuse_label(program: Graph, options: FitOptions, *, computed: bool) -> None:
    """ArgumentError where a tensor has the label's name, unless the program computes it and ``computed`` is False."""
    if program.has_var(options.label) and (computed or program.var(options.label).producer is None):
        raise ArgumentError(
            f"{options.said('label')}: the model has a tensor of that name; give the label's array another"
        )


def _label(prediction: Variable, options: FitOptions) -> Variable:
    """The input for the label, in the shape that the loss takes.

    What the model computes under its name, as an output ``y`` beside labels ``y``, has another in the training program.
    """
    shape, program = list(prediction.shape or ()), prediction.program
    refuse_label(program, options, computed=False)
    if program.has_var(options.label):
        program.rename_variable(program.var(options.label), program.unique(f"{options.label}.computed"))
    if options.loss == "cross_entropy":
        if len(shape) < 2:
            others = [v.name for v in program.outputs if v.dtype in FLOATS and len(v.shape or ()) > 1]
            choose = f"; for that of another output choose {options.said('target', others[0])}" if others else ""
            raise ArgumentError(
                f"{options.said('loss')}: output '{prediction.name}' of shape {shape} has no classes; "
                f"bce_with_logits takes one logit a sample{choose}"
            )
        return data(options.label, shape[:-1], "int64")
    return data(options.label, shape, str(prediction.dtype))


def _rate(options: FitOptions, updates: int) -> Any:
    """The schedule of the learning rate over so many updates; a constant one too, so that the rate is no state."""
    rest = max(updates - options.warmup_steps, 1)
    rate: Any = optimizers.lr.Constant(options.lr)
    if options.schedule == "cosine":
        rate = optimizers.lr.CosineAnnealingDecay(options.lr, rest)
    elif options.schedule == "linear":
        rate = optimizers.lr.PolynomialDecay(options.lr, rest, end_lr=0.0)
    if options.warmup_steps:
        rate = optimizers.lr.LinearWarmup(rate, options.warmup_steps, 0.0, options.lr)
    return rate
