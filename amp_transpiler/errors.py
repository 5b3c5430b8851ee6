"""The errors of this package.

Every error derives from :class:`AmpError` and from the built-in exception it refines, so that both
``except amp.AmpError`` and ``except ValueError`` work. A message names the program, operator,
variable or file at fault, what was found, what was expected, and the way out.
"""


class AmpError(Exception):
    """Base class of every error that this package raises on purpose."""


class ArgumentError(AmpError, ValueError):
    """An argument has a value that cannot be used."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has a type that cannot be used."""


class MissingNameError(AmpError, AttributeError):
    """A module or an object has no such attribute; the message says what to use instead, where there is something."""


class MissingKeyError(AmpError, KeyError):
    """A mapping has no such key; the message says which ones it has."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ListError(AmpError, ValueError):
    """An operator list names an unknown operator, contradicts itself, or asks for the impossible."""


class ListTypeError(ListError, TypeError):
    """An operator list was given as something other than a list of strings."""


class GraphError(AmpError, ValueError):
    """A program is malformed: a cycle, a missing producer, a type clash, an untyped variable."""


class ModelFileError(AmpError, ValueError):
    """A file is not a model, is cut short, or lacks its external data."""


class ModelFileNotFoundError(ModelFileError, FileNotFoundError):
    """A model file, or a file that it refers to, does not exist."""


class ModelFileWriteError(ModelFileError, OSError):
    """A model file, or its external data, cannot be written; nothing is left behind."""


class CheckpointError(AmpError, ValueError):
    """A folder holds no checkpoint, a checkpoint is damaged, or it does not belong to the program."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint, or no file of weights, at a path."""


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint cannot be written; those that were there before are as they were."""


class CheckpointMismatchError(CheckpointError):
    """Stored tensors do not fit a program; nothing in the scope changed.

    ``missing``: names that the program needs; ``extra``: names that it has no use for; ``wrong``: name -> what is
    wrong with its shape or element type.
    """

    def __init__(
        self,
        message: str,
        missing: tuple[str, ...] = (),
        extra: tuple[str, ...] = (),
        wrong: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing, self.extra, self.wrong = missing, extra, wrong or {}


class PrecisionError(AmpError, ValueError):
    """A precision that was asked for cannot be given."""


class GradientError(AmpError, ValueError):
    """A gradient cannot be built: no rule, no path, a loss that is not a scalar."""


class OrderError(AmpError, RuntimeError):
    """Calls came in an order that cannot work; the message names the earlier call that is missing."""


class FeedError(AmpError, ValueError):
    """A fed value is missing, misnamed, or has another shape than the program declares."""


class FeedTypeError(FeedError, TypeError):
    """A fed value has another element type than the program declares."""


class ScopeError(AmpError, LookupError):
    """A variable that a program needs is not in the scope; usually the startup program never ran."""


class PlaceError(AmpError, RuntimeError):
    """The device that was asked for is not there, or cannot run the program.

    ``found``: the message without its last part, ``way``, which says what a caller of ``Executor`` can do about it.
    """

    def __init__(self, found: str, way: str = "") -> None:
        super().__init__(f"{found}. {way}" if way else found)
        self.found, self.way = found, way


class StepError(AmpError, ValueError):
    """A training program breaks the step protocol."""


class LossScaleError(AmpError, RuntimeError):
    """Steps are bad again and again; the message says whether the loss is at fault or only its scale."""


class NonFiniteError(AmpError, ArithmeticError):
    """A training step met NaN or infinity; ``culprit`` is the report that names where it came from.

    ``culprit`` is None where the step, run again, was good.
    """

    def __init__(self, message: str, culprit: object = None) -> None:
        super().__init__(message)
        self.culprit = culprit


class MissingPackageError(AmpError, ImportError):
    """An optional package is not installed; the message says how to get it."""


class ExecutionError(AmpError, RuntimeError):
    """onnxruntime refused a program or failed while it ran it; the message carries onnxruntime's own."""


class DistributedError(AmpError, RuntimeError):
    """Several ranks cannot go on together: one died, hangs, raised, or made another call than the others.

    ``ranks``: those at fault, where it is known; ``told``: it was they who said so, and raised an error of their own;
    ``differ``: they made another call.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), told: bool = False, differ: bool = False) -> None:
        super().__init__(message)
        self.ranks, self.told, self.differ = ranks, told, differ
