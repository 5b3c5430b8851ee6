"""The training loop: epochs over the data, and the evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from amp_transpiler.distributed import all_reduce, broadcast_statistics, check_equal
from amp_transpiler.errors import NonFiniteError
from amp_transpiler.finetune.data import Samples, Share, batch_sizes
from amp_transpiler.finetune.diagnose import Feed, gradient_fault, model_fault, training_fault
from amp_transpiler.finetune.log import Log
from amp_transpiler.finetune.metrics import Metric
from amp_transpiler.finetune.options import FitOptions
from amp_transpiler.finetune.programs import LOWEST_SCALE, Programs
from amp_transpiler.finetune.training_record import EpochRecord
from amp_transpiler.monitor import Culprit, StepReports, find_culprit
from amp_transpiler.program import Program
from amp_transpiler.runtime import Executor, Scope
from amp_transpiler.runtime.report import StepReport

#: Batches on which the model is tried as it was given, where a loss is not finite.
_TRIED = 4
#: Losses in a row, within an epoch and at its end, that are not finite though each step was skipped: what the scale of
#: the loss cannot mend.
_LOST, _LOST_AT_END = 10, 3
#: How far below the scale at which the first batch just fits a training goes on: other batches differ.
_HEADROOM = 4


@dataclass
class Loop:
    """What the epochs of one run need. ``batch`` is fixed where ``whole``: samples that do not fill one are left out.

    ``steps`` counts the runs of the training program. ``progress`` is called with the steps done and all of an epoch.
    Of several ``ranks`` each runs its share of every batch, and all have the same numbers at the end of each step.
    """

    programs: Programs
    optimizer: Any
    options: FitOptions
    executor: Executor
    scope: Scope
    batch: int
    whole: bool
    log: Log | None = None
    progress: Callable[[int, int], None] | None = None
    say: Callable[[str], None] | None = None
    steps: int = 0
    rank: int = 0
    ranks: int = 1
    reported: bool = False
    _fetches: list[Any] = field(default_factory=list)
    _bad_in_a_row: int = 0
    #: What makes the gradients of the first batch not finite, whatever the scale of the loss is.
    _at_fault: Culprit | None = None

    def __post_init__(self) -> None:
        self._fetches = [self.programs.loss, self.programs.prediction]
        if self.options.mode != "fp32":
            found_inf = self.optimizer.get_found_inf()
            self._fetches += [self.optimizer.get_loss_scaling()] + ([found_inf] if found_inf is not None else [])
        if self.reported:
            self._fetches.append(StepReports(self.programs.program, self.programs.loss, step=self.steps))

    def sizes(self, samples: Samples) -> list[int]:
        """The batches of an epoch."""
        return batch_sizes(samples.count, self.batch, self.options.accumulate, whole=self.whole)

    def epoch(self, number: int, train: Samples) -> EpochRecord:
        """One pass over the data. NonFiniteError, with what is at fault, where the loss is not finite, or no gradient
        of the first epoch is."""
        options = self.options
        sizes = self.sizes(train)
        metric = Metric(options.measured, options.loss)
        total, seen, skipped, scale = 0.0, 0, 0, None
        rng = np.random.default_rng([options.seed, number])
        for step, share in enumerate(train.batches(sizes, rng, self.rank, self.ranks)):
            found, prediction, *rest = self._first_step(share) if self.steps == 0 else self._step(share)
            scale = float(np.ravel(rest[0])[0]) if rest else None
            bad = bool(np.ravel(rest[1])[0]) if len(rest) > 1 else False
            skipped += bad
            if share.size:  # else no label of the batch counts, and its loss is the mean of nothing
                self._bad_in_a_row = 0 if math.isfinite(found) else self._bad_in_a_row + 1
            if math.isfinite(found):
                total, seen = total + found * share.size, seen + share.size
                if metric.name != "none" and share.own:
                    metric.update(prediction, share.feed[options.label])
            elif share.size and (not bad or self._bad_in_a_row == _LOST or self.steps == 1):
                self._check(number, step, train, sizes, go_on=bad and self._bad_in_a_row < _LOST)
            if options.check_every and self.steps % options.check_every == 0:
                self.check_equal()
            if self.progress is not None:
                self.progress(step + 1, len(sizes))
        if self._at_fault is not None and skipped == len(sizes):
            raise gradient_fault(self._at_fault, options)
        self._at_fault = None
        if not seen or self._bad_in_a_row >= _LOST_AT_END:
            self._check(number, len(sizes) - 1, train, sizes, go_on=False)
        if self.ranks > 1:
            broadcast_statistics(self.programs.program, self.scope)
        value = self._value(metric)
        return EpochRecord(
            number, total / seen, value, loss_scale=scale, skipped_steps=None if scale is None else skipped
        )

    def evaluate(self, samples: Samples) -> tuple[float, float | None]:
        """The mean loss over the samples, or over the labels that count, and the metric."""
        metric = Metric(self.options.measured, self.options.loss)
        total, seen = 0.0, 0
        names = [self.programs.loss.name, self.programs.prediction.name]
        sizes = batch_sizes(samples.count, self.batch, 1, whole=self.whole)
        for share in samples.batches(sizes, None, self.rank, self.ranks):
            seen += share.size
            if not share.weight or not share.size:
                continue
            loss, prediction = self.executor.run(
                self.programs.evaluation, feed=share.feed, fetch_list=names, scope=self.scope
            )
            total += float(np.ravel(loss)[0]) * share.weight * share.size
            if metric.name != "none" and share.own:
                metric.update(prediction, share.feed[self.options.label])
        return self._mean(total) / seen, self._value(metric)

    def check_equal(self) -> None:
        """DistributedError where the ranks do not hold the same state."""
        if self.ranks > 1:
            check_equal(self.programs.program, self.scope)

    def _mean(self, value: float) -> float:
        """The mean over ranks."""
        return value if self.ranks == 1 else float(all_reduce(np.array([value]))[0])

    def _value(self, metric: Metric) -> float | None:
        """The metric over the samples of all ranks."""
        if metric.name == "none":
            return None
        if self.ranks > 1:
            metric.gather()
        return metric.value()

    def _first_step(self, share: Share) -> list[Any]:
        """The first step of a training: where only its gradients overflow, the loss scale is halved until they do not.

        A bad step changes no parameter, so the batch is not lost. Where no scale helps, the first one stands.
        """
        values = self._step(share)
        # over several batches found_inf comes with the last of a window, which would have to be run anew whole
        if len(values) < 4 or self.options.accumulate > 1 or not math.isfinite(values[0]):
            return values
        start = state = self.optimizer.get_loss_scale_state(self.scope)
        while np.ravel(values[3])[0] and state.scale > LOWEST_SCALE:
            state = state._replace(scale=max(state.scale / 2, LOWEST_SCALE), good=0, bad=0)
            self.optimizer.set_loss_scale_state(state, self.scope)
            values = self._step(share)
        if np.ravel(values[3])[0]:
            self._at_fault = self._culprit(share.feed, self.scope)
            self.optimizer.set_loss_scale_state(start, self.scope)
        elif state is not start:
            lower = max(state.scale / _HEADROOM, LOWEST_SCALE)
            self.optimizer.set_loss_scale_state(
                self.optimizer.get_loss_scale_state(self.scope)._replace(scale=lower), self.scope
            )
            values[2] = np.full_like(values[2], lower)
            if self.say is not None:
                scale = f"{self.options.called('loss_scale')}{' ' if self.options.flags else '='}{lower:g}"
                self.say(
                    f"the gradients of the first batch overflow at the loss scale {start.scale:g}, and no longer "
                    f"at {state.scale:g}: the training goes on at {lower:g}, and no sample is lost ({scale} "
                    "begins there)"
                )
        return values

    def _culprit(self, feed: Feed, scope: Scope) -> Culprit | None:
        """What makes gradients not finite on a batch; None where its loss is not, and of several ranks."""
        if self.ranks > 1:
            return None
        found = find_culprit(self.programs.program, dict(feed), scope, executor=self.executor, cures=False)
        return found if found is not None and found.loss_finite else None

    def _step(self, share: Share) -> list[Any]:
        """Run a step; its results without the report, which goes to the log, and with the loss of the whole batch."""
        feed = dict(share.feed)
        if self.programs.weight is not None:
            feed[self.programs.weight.name] = np.array(share.weight, np.float32)
        values: list[Any] = self.executor.run(
            self.programs.program, feed=feed, fetch_list=self._fetches, scope=self.scope
        )
        self.steps += 1
        values[0] = self._mean(float(np.ravel(values[0])[0]) * share.weight if share.weight else 0.0)
        if self.reported:
            report: StepReport = values.pop()
            if self.log is not None:
                self.log.step(report if self.ranks == 1 else report.with_loss(values[0]))
        return values

    def _check(self, number: int, step: int, train: Samples, sizes: list[int], *, go_on: bool) -> None:
        """Raise for a loss that is not finite; with ``go_on`` only where the model as it was given is at fault."""
        rng = np.random.default_rng([self.options.seed, number])
        ranks = self.ranks if self.whole else 1  # the same samples on every rank
        feeds = [share.feed for share in train.batches(sizes[:_TRIED], rng, 0, ranks) if share.size]
        error = model_fault(self.programs, feeds, self._first_loss)
        if error is None and not go_on:
            where = f"in epoch {number}, step {step + 1}"
            error = self._first_gradients(feeds[0]) or training_fault(
                self.programs, self.options, feeds, self._first_loss, where
            )
        if error is not None:
            raise error

    def _first_gradients(self, feed: Feed) -> NonFiniteError | None:
        """The error for gradients in fp32 that are not finite on a batch with the initial weights; None of others."""
        if self.options.mode != "fp32":
            return None
        scope = Scope()
        self.executor.run(self.programs.program.startup, scope=scope)
        culprit = self._culprit(feed, scope)
        return None if culprit is None else gradient_fault(culprit, self.options)

    def _first_loss(self, program: Program, feed: Feed) -> float:
        """The loss of an evaluation program with the initial weights."""
        scope = Scope()
        self.executor.run(self.programs.program.startup, scope=scope)
        if program is self.programs.evaluation and self.options.mode != "fp32":
            self.optimizer.amp_init(self.executor.place, scope=scope)
        (loss,) = self.executor.run(program, feed=dict(feed), fetch_list=[self.programs.loss.name], scope=scope)
        return float(np.ravel(loss)[0])
