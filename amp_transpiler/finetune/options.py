"""What a run of :func:`~amp_transpiler.finetune.fit` is asked for, checked before anything is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypedDict

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.finetune.metrics import METRICS, default_metric, fits_loss
from amp_transpiler.finetune.train_mode import check_batch_norm
from amp_transpiler.ir.seeded import LARGEST_SEED
from amp_transpiler.option_checks import choice, flag, number, share, strings, switch, whole
from amp_transpiler.spelling import MODES as MODE_SPELLINGS, TYPES, near_options, read_as

LOSSES = ("cross_entropy", "mse", "bce_with_logits", "kl_div")
#: Classes of ``amp.optimizer`` by their names on the command line.
OPTIMIZERS = {kind.lower(): kind for kind in ("SGD", "Momentum", "Lars", "Adagrad", "RMSProp", "Adam", "AdamW", "Lamb")}
MODES = ("fp32", "mixed", "pure")
SCHEDULES = ("constant", "cosine", "linear")

_CHOICES: dict[str, Sequence[str]] = {
    "loss": LOSSES,
    "mode": MODES,
    "dtype": ("float16", "bfloat16"),
    "save": MODES,
    "optimizer": tuple(OPTIMIZERS),
    "schedule": SCHEDULES,
    "metric": METRICS,
    "allreduce_precision": ("float16", "bfloat16", "float32"),
}
#: Other spellings of an option's values, which are read in any letter case.
SPELLINGS: dict[str, Mapping[str, str]] = {
    "mode": MODE_SPELLINGS,
    "save": MODE_SPELLINGS,
    "dtype": TYPES,
    "allreduce_precision": TYPES,
    "optimizer": {},
}
#: Whole numbers, with the least that each may be.
_COUNTS = {
    "epochs": 1,
    "batch_size": 1,
    "accumulate": 1,
    "warmup_steps": 0,
    "seed": 0,
    "check_every": 0,
    "patience": 1,
}
#: Other numbers, above 0, and whether 0 itself is taken.
_NUMBERS = {"lr": False, "weight_decay": True, "clip_norm": False, "loss_scale": False, "min_delta": True}
_LISTS = ("black_list", "trainable", "freeze", "keep_tied")
_NAMES = ("label", "target", "monitor")
#: The command line's spelling, where it is not the field's.
_FLAGS = {"target": "--output", "values": "--value"}
#: What another value of which would make a checkpoint one of another training.
FIXED = (
    "label",
    "loss",
    "label_smoothing",
    "target",
    "mode",
    "dtype",
    "optimizer",
    "accumulate",
    "black_list",
    "trainable",
    "freeze",
    "keep_tied",
    "dropout",
    "values",
    "batch_norm",
)


@dataclass(frozen=True)
class FitOptions:
    """How to train; the keywords of :func:`fit`.

    Attributes:
        label: the name of the label's array, which an output of the model may have too.
        loss: "cross_entropy" (labels are classes), "mse", "bce_with_logits" or "kl_div" (labels are floats of the
            output's shape). One that applies the model's last activation itself reads what that reads, moved as the
            output is; kl_div reads the logarithms of what a Softmax gives.
        label_smoothing: e from 0 to below 1, with cross_entropy: a label's probability is 1 - e, and e is spread over
            all classes, in the test loss too.
        target: the output that the loss reads; the first float one where None.
        mode: the precision to train in: "fp32"; "mixed": the white list in 16 bit, the black list in fp32, what lies
            between follows; or "pure": whatever can run in 16 bit does, with 16-bit weights and fp32 masters.
        dtype: the 16-bit type, of training and of what is saved.
        save: the precision of the file; that of the training where None.
        black_list: operators to keep fp32, in training and in the file.
        loss_scale: the scale to begin with; the optimizer's default where None. Where the gradients of the first batch
            overflow at it, it is lowered before the first update and a line says so (with ``accumulate`` above 1 such
            steps are skipped instead, until it has come down). In float16 it goes below 1 where gradients ask for it.
        optimizer: "sgd", "momentum", "lars", "adagrad", "rmsprop", "adam", "adamw" or "lamb".
        lr, clip_norm: learning rate, limit of the global norm of the gradients.
        weight_decay: its coefficient; where None the optimizer's own (0.01 of AdamW and Lamb, 0.0005 of Lars, no decay
            of the others).
        schedule: of the learning rate: "constant", or "cosine" or "linear" down to 0 at the end of the last epoch.
        warmup_steps: updates in which the rate rises from 0.
        accumulate: batches to an update.
        epochs: passes over the data.
        batch_size: samples of a batch; what the model has, else 32, where None. A model with another fixed batch is
            freed of it where its operators let it.
        trainable, freeze, keep_tied, dropout, values, batch_norm: as ``prepare_training`` takes them.
        seed: of the order of samples and of dropout.
        allreduce_precision: the type in which gradients travel between ranks, "float16", "bfloat16" or "float32"; that
            of the training where None.
        check_every: steps from one comparison of the ranks' state, by hash, to the next; it is also compared at the end
            of an epoch, before a checkpoint is written. 0: never.
        shard_optimizer: of several ranks each holds and updates its part of masters and moments;
            ``amp.distributed.shard_optimizer``.
        metric: what is reported beside the loss: "accuracy", "top5", "f1", "mae", "mse" or "none"; None: by the loss.
        patience: epochs in a row without a better ``monitor`` after which the training ends; None: all ``epochs`` are
            trained. It needs test data, as ``restore_best_weights`` does.
        monitor: by what an epoch is the best one: "test_loss", or "test_" and the metric, such as "test_accuracy".
        min_delta: by how much an epoch has to be better than the best one to take its place.
        restore_best_weights: write the weights of the best epoch, and keep its checkpoint; else the last epoch's.
        flags: name options in messages as the command line spells them.

    Raises:
        ArgumentError, ArgumentTypeError: a value of another kind or out of range, or two that contradict each other.
    """

    label: str = "label"
    loss: str = "cross_entropy"
    label_smoothing: float = 0.0
    target: str | None = None
    mode: str = "mixed"
    dtype: str = "float16"
    save: str | None = None
    black_list: Sequence[str] = ()
    loss_scale: float | None = None
    optimizer: str = "adam"
    lr: float = 1e-4
    weight_decay: float | None = None
    clip_norm: float | None = None
    schedule: str = "constant"
    warmup_steps: int = 0
    accumulate: int = 1
    epochs: int = 1
    batch_size: int | None = None
    trainable: Sequence[str] | None = None
    freeze: Sequence[str] = ()
    keep_tied: Sequence[str] = ()
    dropout: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    batch_norm: str | Mapping[str, str] = "train"
    seed: int = 0
    allreduce_precision: str | None = None
    check_every: int = 1000
    shard_optimizer: bool = False
    metric: str | None = None
    patience: int | None = None
    monitor: str = "test_loss"
    min_delta: float = 0.0
    restore_best_weights: bool = False
    flags: bool = False

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None or one.default is not None:
                self._check(one.name, value)
        self._check_together()

    def called(self, name: str) -> str:
        """An option as the caller spells it."""
        return _FLAGS.get(name, flag(name)) if self.flags else name

    def said(self, name: str, value: Any = None) -> str:
        """An option with a value, its own where None, for messages: ``lr=0.1`` or ``--lr 0.1``."""
        return f"{self.called(name)}{' ' if self.flags else '='}{getattr(self, name) if value is None else value}"

    @property
    def saved(self) -> str:
        """The precision of the file."""
        return self.save or self.mode

    @property
    def measured(self) -> str:
        """The metric, by the loss where none was asked for."""
        return self.metric or default_metric(self.loss)

    @property
    def monitors(self) -> str:
        """The option, as the caller spells it, that asks for the best epoch; none where none does."""
        asking = [name for name in ("patience", "restore_best_weights") if getattr(self, name)]
        return self.called(asking[0]) if asking else ""

    def plain(self) -> dict[str, Any]:
        """The options as a checkpoint holds them."""
        plain = {name: value for name, value in asdict(self).items() if name != "flags"}
        return plain | {name: None if plain[name] is None else list(plain[name]) for name in _LISTS}

    def _check(self, name: str, value: Any) -> None:
        called = self.called(name)
        if name in _CHOICES:
            object.__setattr__(self, name, choice(called, value, _CHOICES[name], SPELLINGS.get(name)))
        elif name in _COUNTS:
            whole(called, value, _COUNTS[name], LARGEST_SEED if name == "seed" else None)
        elif name in _NUMBERS:
            number(called, value, taken=_NUMBERS[name])
        elif name == "label_smoothing":
            share(called, value)
        elif name in ("shard_optimizer", "restore_best_weights"):
            switch(called, value)
        elif name == "batch_norm":
            check_batch_norm(called, value)
        elif name in _LISTS:
            object.__setattr__(self, name, strings(called, value))
        elif name in _NAMES and (not isinstance(value, str) or not value):
            raise ArgumentTypeError(f"{called} is {value!r}; expected a name")
        elif name in ("dropout", "values") and not isinstance(value, Mapping):
            raise ArgumentTypeError(f"{called} is {value!r}; expected a mapping from names to numbers")
        if name == "dropout":
            for pattern, rate in value.items():
                share(f"{called}: the rate of {pattern!r}", rate)

    def _check_together(self) -> None:
        if self.mode == "fp32":
            own = {"loss_scale": self.loss_scale, "allreduce_precision": self.allreduce_precision}
            for name, value in {"accumulate": self.accumulate > 1, **own}.items():
                if value:
                    raise ArgumentError(
                        f"{self.called(name)} goes with {self.called('mode')} mixed or pure, "
                        "whose gradients are scaled, and added up in fp32"
                    )
            if self.black_list and self.saved == "fp32":
                raise ArgumentError(
                    f"{self.called('black_list')}: training and file are fp32 altogether; choose "
                    f"another {self.called('mode')} or {self.called('save')}"
                )
        both = sorted(set(self.trainable or ()) & set(self.freeze))
        if both:
            raise ArgumentError(f"{self.called('trainable')} and {self.called('freeze')} both name {both[0]!r}")
        if not fits_loss(self.measured, self.loss):
            raise ArgumentError(
                f"{self.said('metric')} does not go with {self.said('loss')}; "
                f"{', '.join(m for m in METRICS if fits_loss(m, self.loss))} do"
            )
        if self.label_smoothing and self.loss != "cross_entropy":
            raise ArgumentError(f"{self.called('label_smoothing')} goes with {self.said('loss', 'cross_entropy')}")
        known = ["test_loss", *([f"test_{self.measured}"] if self.measured != "none" else [])]
        choice(self.called("monitor"), self.monitor, known)
        for name, value in {"monitor": self.monitor != "test_loss", "min_delta": self.min_delta}.items():
            if value and not self.monitors:
                others = f"{self.called('patience')} or {self.called('restore_best_weights')}"
                raise ArgumentError(f"{self.said(name)} says which epoch is the best: give {others} with it")


class FitKeywords(TypedDict, total=False):
    """The keywords by which :func:`fit` takes :class:`FitOptions`, to type checkers."""

    label: str
    loss: str
    label_smoothing: float
    target: str | None
    mode: str
    dtype: str
    save: str | None
    black_list: Sequence[str]
    loss_scale: float | None
    optimizer: str
    lr: float
    weight_decay: float | None
    clip_norm: float | None
    schedule: str
    warmup_steps: int
    accumulate: int
    epochs: int
    batch_size: int | None
    trainable: Sequence[str] | None
    freeze: Sequence[str]
    keep_tied: Sequence[str]
    dropout: Mapping[str, float]
    values: Mapping[str, Any]
    batch_norm: str | Mapping[str, str]
    seed: int
    allreduce_precision: str | None
    check_every: int
    shard_optimizer: bool
    metric: str | None
    patience: int | None
    monitor: str
    min_delta: float
    restore_best_weights: bool
    flags: bool


def in_one_spelling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options with modes and types as this version writes them: an earlier one may have written a checkpoint."""
    return {name: read_as(SPELLINGS[name], value) if name in SPELLINGS else value for name, value in given.items()}


def options_of(given: Mapping[str, Any]) -> FitOptions:
    """Options of keywords. ArgumentTypeError for one that is unknown, with near names."""
    known = [one.name for one in fields(FitOptions)]
    for name in given:
        if name not in known:
            hint = near_options(name, known) or f"it takes {', '.join(known)}"
            raise ArgumentTypeError(f"fit takes no option '{name}'; {hint}")
    return FitOptions(**given)
