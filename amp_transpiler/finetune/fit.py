"""``amp.fit``: train an imported model on arrays, and write it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Unpack

import onnx

from amp_transpiler.distributed import rank
from amp_transpiler.errors import ArgumentError, CheckpointWriteError, ModelFileWriteError, PlaceError
from amp_transpiler.finetune import resume
from amp_transpiler.finetune.checks import check_files, check_folder, chosen_place, remarks
from amp_transpiler.finetune.claims import Claims
from amp_transpiler.finetune.data import Source
from amp_transpiler.finetune.log import Log
from amp_transpiler.finetune.options import FitKeywords, FitOptions, options_of
from amp_transpiler.finetune.training_record import FitResult
from amp_transpiler.finetune.training_run import Run, Told
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.program import Program
from amp_transpiler.runtime import Executor
from amp_transpiler.runtime.collective.current import by_all

_log = logging.getLogger(__name__)
Say = Callable[[str], None]


def fit(
    model: onnx.ModelProto | str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    data: Source,
    test: Source | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    log: str | os.PathLike[str] | None = None,
    place: Place | str = "cpu",
    cache_dir: str | os.PathLike[str] | None = None,
    say: Say | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[FitKeywords],
) -> FitResult:
    """Train a model on arrays and write it for inference; ``amp-transpile train`` is this.

    All of the arguments and of the data is checked before the first step. Every sample counts: an epoch's last batch
    is shorter where the data does not fill it, and epochs and test data are averaged over samples. Where ``accumulate``
    batches make an update, what is left makes one update more, of shorter batches. A model whose batch is fixed, and
    that was not freed of it, leaves out what does not fill one; a note says so.
    What leaves the range of 16 bit on the first batch of the data stays fp32, in training and in the file, and so does
    what makes a prediction whose labels (of the loss mse) leave it.
    Where control flow hangs on sizes that the model leaves open, the length of a sequence say, they are those of the
    data for good, in the file too; a note says so.

    Of several ranks (``amp.distributed.init()``, which the command calls by itself under ``mpiexec``) all call it. A
    batch is then one of all ranks together, each of which takes its share, so that the training is that of one rank,
    whatever their number is: losses and metrics are over all samples, rank 0 says and writes what there is, and a
    checkpoint is gone on with on any number of ranks. Where the model fixes the batch, it is that of each rank.

    Args:
        model: what to train, in fp32 or in 16 bit: its weights become fp32, or fp32 masters.
        output: the file to write, whole or not at all. It may not be the model, its external data, or a data file.
        data: an npz file, a folder of npy files (mapped, not read) or a mapping: one array for each input and one for
            the label, whose first dimension counts samples. Other arrays are left alone.
        test: the same for what is evaluated before the training and after each epoch.
        checkpoint: a folder: all state is saved there after each epoch, and a training that lies there is gone on with,
            to end bit for bit where one in a single run ends. Options given here win over those of the checkpoint, as
            far as it stays the same training; the others are the checkpoint's. One training at a time writes there, and
            into ``log``.
        log: a folder for ``steps.csv``, ``epochs.csv`` and TensorBoard.
        place: "cpu", "cuda", "webgpu" or a place.
        cache_dir: a folder in which optimised models are kept, so that a training of the same model starts sooner; see
            ``Executor``.
        say: called with each line that there is to say; logged where None.
        progress: called after each step with its number in the epoch and the epoch's steps.
        options: the fields of :class:`FitOptions`.

    Returns:
        A :class:`FitResult`, with the record of each epoch.

    Raises:
        ArgumentError, ArgumentTypeError: an option out of range, or that contradicts another or the checkpoint.
        FeedError: data that does not fit, is not finite, or has labels that the output has no class for.
        NonFiniteError: the loss is not finite, with what is at fault. ModelFileWriteError: ``output`` cannot be
        written. CheckpointWriteError, ModelFileWriteError: another training that has not ended writes to ``checkpoint``
        or ``log``. KeyboardInterrupt: with a text that says what stands. ``output`` is as it was in all these cases.
    """
    first = rank() == 0
    named = FitOptions(flags=options.get("flags", False))  # for messages: the others may go with a checkpoint's alone
    tell = Told((say or _log.info) if first else lambda line: None)

    claims = Claims() if first else None

    def claim(name: str, folder: str | os.PathLike[str] | None, *, make: bool = False) -> None:
        """Keep other trainings out of a folder of this one, where it is there or is to be made."""
        if claims is not None and folder is not None:
            if make:
                with suppress(OSError):  # whoever writes there says what is wrong
                    os.mkdir(folder)
            claims.take(
                folder, named.called(name), CheckpointWriteError if name == "checkpoint" else ModelFileWriteError
            )

    def checked() -> Run:
        found = None
        if checkpoint is not None:
            check_folder(checkpoint, output, named.called("checkpoint"))
            claim("checkpoint", checkpoint)
            found = resume.find(checkpoint)
        if found is None:
            chosen = options_of(options)
        else:
            chosen, overridden = resume.merged(found, options)
            tell(f"{found.path}: going on after epoch {found.epochs}")
            for line in overridden:
                tell(line)
            found = resume.with_best(found, chosen)
        check_files(model, output, data, test, log, chosen)
        claim("log", log)
        if chosen.monitors and test is None:
            raise ArgumentError(f"{chosen.monitors} goes by {chosen.monitor}: give {chosen.called('test')} data")
        if cache_dir is not None:
            check_folder(cache_dir, output, chosen.called("cache_dir"))
        program = Program.from_onnx(model)
        executor = Executor(chosen_place(place, chosen), cache_dir=cache_dir)
        for line in remarks([executor.place], chosen):
            tell(line)
        run = Run(program, chosen, executor, data, test, tell)
        run.identify(checkpoint, found)
        return run

    def begun() -> None:
        """Nothing is refused any more: make the folders that are written into."""
        claim("checkpoint", checkpoint, make=True)
        claim("log", log, make=True)

    try:
        with claims or nullcontext():
            run = by_all(checked)
            run.agree()
            run.prepare()  # where the ranks talk to one another
            by_all(begun)
            epochs, steps = (run.found.epochs, run.found.steps) if run.found is not None else (0, 0)
            with (
                Log(log, run.options.measured, epochs, steps, tell) if log is not None and first else nullcontext()
            ) as book:
                return run.train(Path(output), checkpoint, book, progress if first else None, log is not None)
    except PlaceError as error:
        if not error.way:
            raise
        way = (
            f"keep the operator in fp32 ({named.called('black_list')}), or all of them ({named.said('mode', 'fp32')}); "
        )
        way += f"else train with {named.said('place', 'cpu')}"
        raise PlaceError(error.found, f"Where only 16 bit is missing, {way}") from None
