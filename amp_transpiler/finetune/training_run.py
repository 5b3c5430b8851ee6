"""One training of ``amp.fit``: what it reads, the programs, the epochs, the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from amp_transpiler.distributed import all_gather_object, rank, world_size
from amp_transpiler.errors import ArgumentError, DistributedError, FeedError
from amp_transpiler.files import stamp
from amp_transpiler.finetune import resume
from amp_transpiler.finetune.batch import fixed_batch, freed, with_hidden_batch
from amp_transpiler.finetune.best_epoch import best_epoch, stops
from amp_transpiler.finetune.data import (
    Samples,
    Source,
    batch_sizes,
    check_classes,
    check_has_samples,
    check_labels,
    largest,
    read,
)
from amp_transpiler.finetune.log import Log
from amp_transpiler.finetune.loop import Loop
from amp_transpiler.finetune.options import FitOptions
from amp_transpiler.finetune.programs import Programs, refuse_label
from amp_transpiler.finetune.trained_weights import TrainedWeights, write_trained
from amp_transpiler.finetune.training_record import EpochRecord, FitResult
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.program import Program
from amp_transpiler.runtime import Executor, Scope
from amp_transpiler.runtime.arrays import as_declared, as_ranked
from amp_transpiler.runtime.collective.current import by_rank_0, several
from amp_transpiler.runtime.collective.journal import last_step

#: Samples of a batch where neither the options nor the model say.
_BATCH = 32


class Told:
    """The lines that there are to say. They wait until everything is checked, so that a refusal comes alone."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.checked = say, False
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if self.checked:
            self.say(line)

    def begin(self) -> None:
        """Everything is checked: say what waits, and from now on each line at once."""
        for line in self.lines:
            self.say(line)
        self.checked = True


class Run:
    """One training: programs and data that fit each other."""

    def __init__(
        self, program: Program, options: FitOptions, executor: Executor, data: Source, test: Source | None, tell: Told
    ) -> None:
        self.options, self.executor, self.tell, self.scope = options, executor, tell, Scope()
        self.rank, self.ranks, self.exchanges_told = rank(), world_size(), False
        self.identity: dict[str, Any] = {}
        self.found: resume.Resumed | None = None
        self.saves = False
        fed = [v for v in _fed(program) if v.name not in options.values]
        what = _named("data", data, options)
        arrays = read(data, [*(v.name for v in fed), options.label], what, options.called("label"))
        refuse_label(program, options, computed=False)
        self._check_kind(arrays, what)
        program, self.batch, self.whole = self._with_batch(program, fed, arrays, what)
        self.step_batch = self.batch * self.ranks if self.whole else self.batch
        self._check_batch()
        program.seed = options.seed
        if program.startup is not None:
            program.startup.seed = options.seed
        samples = Samples.of(arrays, [program.var(v.name) for v in fed], what)
        shapes = {name: array.shape for name, array in samples.arrays.items()}
        rows, labels = samples.rows(slice(0, self.batch)), arrays[options.label].shape
        reach = largest(arrays[options.label]) if options.loss == "mse" else 0.0
        self.programs = Programs.of(program, options, rows, shapes, labels, tell, reach)
        self.train_data = self._with_labels(samples, arrays)
        self.test_data = None
        if test is not None:
            what = _named("test", test, options)
            arrays = read(test, list(self.train_data.arrays), what)
            self._check_kind(arrays, what)
            self.test_data = self._with_labels(Samples.of(arrays, [program.var(v.name) for v in fed], what), arrays)
        self._check_counts()

    def _check_kind(self, arrays: Mapping[str, np.ndarray], what: str) -> None:
        options = self.options
        if options.loss == "cross_entropy":
            check_classes(
                arrays[options.label],
                f"{what}: label array '{options.label}'",
                f"For numbers to predict choose {options.said('loss', 'mse')}, for probabilities from 0 to 1 "
                f"{options.said('loss', 'bce_with_logits')}, for shares of classes {options.said('loss', 'kl_div')}",
            )

    def _with_batch(
        self, program: Program, fed: list[Variable], arrays: Mapping[str, np.ndarray], what: str
    ) -> tuple[Program, int, bool]:
        """The program, the batch, and whether the model fixes it."""
        options, wanted = self.options, self.options.batch_size

        def rows(count: int) -> dict[str, np.ndarray]:
            found = {}
            for variable in fed:
                check_has_samples(variable)
                array = as_ranked(arrays[variable.name], variable.shape)
                if not array.ndim or not len(array):
                    raise FeedError(f"{what}: array '{variable.name}' holds no samples")
                chosen = np.ascontiguousarray(array[np.arange(count) % len(array)])
                found[variable.name] = as_declared(chosen, str(variable.dtype), f"{what}: array '{variable.name}'")
            return found

        if fixed_batch(fed) is None:
            program = with_hidden_batch(program, fed, rows, options.values)
            fed = [program.var(v.name) for v in fed]
        fixed = fixed_batch(fed)
        if fixed is None:
            return program, wanted or _BATCH, False
        exported = f"the model was exported with a fixed batch of {fixed}"
        if wanted is None:
            larger = options.said("batch_size", _BATCH)
            self.tell(
                f"{exported}, and is trained in batches of {fixed}; {larger}, say, frees it where its operators let it"
            )
            return program, fixed, True
        result = freed(program, fed, rows(fixed + 1), options.values)
        if isinstance(result, Program):
            self.tell(f"{exported}: freed of it, and so will be what is written (tried on samples of the data)")
            return result, wanted, False
        if wanted != fixed:
            raise ArgumentError(
                f"{options.said('batch_size')}: {exported}, and cannot be freed of it: {result}. "
                "Export it with a dynamic batch, or leave the option out"
            )
        return program, fixed, True

    def _with_labels(self, samples: Samples, arrays: Mapping[str, np.ndarray]) -> Samples:
        samples = samples.with_label(arrays, self.programs.label, self.options.loss == "cross_entropy")
        prediction = self.programs.prediction
        check_labels(samples, self.options.label, self.options.loss, (prediction.shape or (None,))[-1])
        return samples

    def _check_batch(self) -> None:
        """ArgumentError where the batch is too small for the ranks; a note where a fixed one is that of each."""
        if self.step_batch < self.ranks:
            raise ArgumentError(
                f"{self.options.said('batch_size', self.batch)}: a batch is that of all ranks together, and there are "
                f"{self.ranks}; take a larger one, or fewer ranks"
            )
        if self.whole and self.ranks > 1:
            self.tell(
                f"each of the {self.ranks} ranks takes the batch of {self.batch} that the model fixes: "
                f"{self.step_batch} samples to a step"
            )

    def _check_counts(self) -> None:
        """FeedError where there are too few samples; a note where some are left out."""
        options, batch, window = self.options, self.step_batch, self.step_batch * self.options.accumulate
        train, least = self.train_data, window if self.whole else options.accumulate
        if train.count < least or (options.batch_size and not self.whole and train.count < batch):
            of = f"a batch of {batch}" if train.count < batch else "the batches of one update"
            added = f" ({options.said('accumulate')})" if options.accumulate > 1 else ""
            raise FeedError(f"{train.what} holds {train.count} samples, fewer than {of}{added}")
        if self.test_data is not None and self.whole and self.test_data.count < batch:
            raise FeedError(
                f"{self.test_data.what} holds {self.test_data.count} samples, fewer than the model's fixed "
                f"batch of {batch}"
            )
        if not self.whole:
            return
        for samples, size in ((train, window), (self.test_data, batch)):
            if samples is not None and samples.count % size:
                self.tell(
                    f"{samples.what}: {samples.count % size} of {samples.count} samples do not fill the model's "
                    f"fixed batch of {batch} and are left out"
                )

    def identify(self, checkpoint: Any, found: resume.Resumed | None) -> None:
        """Tell this training from others; ArgumentError where ``found`` is a checkpoint of another one."""
        if checkpoint is not None or self.ranks > 1:
            tested = None if self.test_data is None else self.test_data.identity()
            self.identity = resume.identity(self.programs.program, self.train_data.identity(), tested)
        if found is not None:
            resume.check_identity(found, self.identity, self.train_data.what)
            if self.options.monitors:
                resume.check_tested(found, self.identity, self.options)
        self.found, self.saves = found, checkpoint is not None

    def prepare(self) -> None:
        """Compile the training step, and set all state: that of the checkpoint, or as the model has it."""
        options, programs, found = self.options, self.programs, self.found
        runs = len(batch_sizes(self.train_data.count, self.step_batch, options.accumulate, whole=self.whole))
        updates = options.epochs * runs // options.accumulate
        if options.warmup_steps >= updates:
            self.tell(
                f"{options.said('warmup_steps')}: there are {updates} updates in all, so the learning rate does "
                f"not reach {options.lr:g}"
            )
        self.optimizer = optimizer = programs.compile(options, max(updates, 1))
        scope, executor = self.scope, self.executor
        executor.run(programs.program.startup, scope=scope)
        self.given = {v.name: scope.find_var(v.name) for v in programs.model.variables if v.persistable}
        if options.mode != "fp32":
            optimizer.amp_init(executor.place, scope=scope, test_program=programs.evaluation, use_fp16_test=True)
        if found is not None:
            resume.load(found.path, programs.program, scope)
            if options.loss_scale is not None and options.loss_scale != found.options.get("loss_scale"):
                state = optimizer.get_loss_scale_state(scope)
                optimizer.set_loss_scale_state(state._replace(scale=float(options.loss_scale)), scope)

    def agree(self) -> None:
        """DistributedError where other ranks are to train something else: files that differ from machine to machine."""
        if self.ranks == 1:
            return
        found = self.found
        own = {
            "model": self.identity["model"],
            "data": self.identity["data"],
            "test data": self.identity["test"],
            "options": {name: repr(value) for name, value in self.options.plain().items()},
            "checkpoint": [self.saves, *((found.epochs, found.steps) if found is not None else ())],
        }
        of_all = all_gather_object(own)
        for what in own:
            others = [rank for rank, said in enumerate(of_all) if said[what] != of_all[0][what]]
            if others:
                raise DistributedError(
                    f"rank {', '.join(map(str, others))} found other {what} than rank 0; let all ranks see the same "
                    "files, and give them the same arguments",
                    tuple(others),
                )

    def train(
        self, output: Path, checkpoint: Any, log: Log | None, progress: Callable[[int, int], None] | None, logged: bool
    ) -> FitResult:
        """Train and write. ``logged``: some rank has a log."""
        options, programs, scope, found = self.options, self.programs, self.scope, self.found
        loop = Loop(
            programs,
            self.optimizer,
            options,
            self.executor,
            scope,
            self.step_batch,
            self.whole,
            log,
            progress,
            self.tell,
            found.steps if found is not None else 0,
            self.rank,
            self.ranks,
            logged,
        )
        self.tell.begin()
        history = found.history if found is not None else ()
        before, done = stamp(output), found.epochs if found is not None else 0
        best = best_epoch(history, options) if options.monitors else None
        kept = self._best_so_far()
        if found is not None and done >= options.epochs:
            self.tell(
                f"{done} epochs are done, and {options.said('epochs')} asks for no more; what they came to is written"
            )
        try:
            if self.test_data is not None and found is None:
                history = (self._first(loop, log),)
            while done < options.epochs and not stops(history, options):
                done += 1
                history = (*history, self._epoch(loop, done, log))
                best = best_epoch(history, options) if options.monitors else None
                if options.restore_best_weights and best == done:
                    kept = self._weights(scope).kept()
                if checkpoint is not None:
                    resume.save(checkpoint, programs.program, scope, options, loop.steps, self.identity, history)
            weights = self._weights(scope) if kept is None else kept
            if options.monitors:
                self._tell_best(history, best)
            by_rank_0(lambda: self._write(output, weights))
        except KeyboardInterrupt as stopped:
            stopped.args = (_left(output, before, checkpoint),)
            raise
        except DistributedError as error:
            said = f"{error}; {_left(output, before, checkpoint)}"
            raise DistributedError(said, error.ranks, error.told) from error
        return FitResult(output, options, programs.preparation, history, tuple(self.tell.lines), best)

    def _best_so_far(self) -> TrainedWeights | None:
        """Where the best epoch is written, and was before the checkpoint to go on from, its weights."""
        found = self.found
        if found is None or found.best is None:
            return None
        scope = Scope()
        resume.load(found.best, self.programs.program, scope)
        return self._weights(scope).kept()

    def _tell_best(self, history: tuple[EpochRecord, ...], best: int | None) -> None:
        options, last = self.options, history[-1].epoch
        if stops(history, options) and last < options.epochs:
            than = "" if best is None else f" than that of epoch {best}"
            self.tell(f"{options.said('patience')}: ends after epoch {last}, without a better {options.monitor}{than}")
        if options.restore_best_weights and best is not None:
            self.tell(f"epoch {best} is the best by {options.monitor}: its weights are written")
        elif options.restore_best_weights:
            self.tell(f"{options.monitor} was finite in no epoch: the last weights are written")

    def _first(self, loop: Loop, log: Log | None) -> EpochRecord:
        """The record of the model before training."""
        assert self.test_data is not None
        loss, metric = loop.evaluate(self.test_data)
        return self._reported(EpochRecord(0, test_loss=loss, test_metric=metric), log)

    def _epoch(self, loop: Loop, number: int, log: Log | None) -> EpochRecord:
        record = loop.epoch(number, self.train_data)
        exchanged = last_step(several())
        if exchanged is not None and not self.exchanges_told:
            self.tell(f"a step of each of {self.ranks} ranks: {exchanged.line()}")
            self.exchanges_told = True
        if self.options.check_every:
            loop.check_equal()
        if self.test_data is not None:
            loss, metric = loop.evaluate(self.test_data)
            record = replace(record, test_loss=loss, test_metric=metric)
        return self._reported(record, log)

    def _reported(self, record: EpochRecord, log: Log | None) -> EpochRecord:
        self.tell(record.line(self.options.measured))
        if log is not None:
            log.epoch(record)
        return record

    def _weights(self, scope: Scope) -> TrainedWeights:
        return TrainedWeights(self.programs.program, scope, self.given)

    def _write(self, output: Path, weights: TrainedWeights) -> None:
        rows = self.train_data.rows(slice(0, self.batch))
        fed = {v.name: rows[v.name] for v in _fed(self.programs.model)}
        write_trained(output, self.programs.model, weights, self.options, fed, self.tell)


def _fed(program: Program) -> list[Variable]:
    """The inputs that have no value of their own."""
    return [v for v in program.inputs if v.data is None and not v.persistable]


def _named(option: str, source: Source, options: FitOptions) -> str:
    """A data set in messages."""
    if isinstance(source, str | os.PathLike):
        return f"'{os.fspath(source)}'"
    return options.called(option)


def _left(output: Path, before: Any, checkpoint: Any) -> str:
    """What stands of a training that was broken off, maybe while rank 0 was writing."""
    written = f"{output} is written" if stamp(output) != before else f"{output} was not written"
    if checkpoint is None:
        return written
    found = resume.find(checkpoint)
    if found is None:
        return f"{written}; there is no checkpoint in {checkpoint} yet, since no epoch was over"
    stands = f"the checkpoint of epoch {found.epochs} in {checkpoint} stands"
    return f"{written}; {stands}, and the same command goes on from it"
