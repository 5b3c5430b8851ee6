"""The errors of this package.

Every error derives from :class:`AmpError` and from the built-in exception it refines, so that both
``except amp.AmpError`` and ``except ValueError`` work. A message names the program, operator,
variable or file at fault, what was found, what was expected, and the way out.
"""


class AmpError(Exception):
    """Base class of every error that this package raises on purpose."""


class ArgumentError(AmpError, ValueError):
    """An argument has a value that cannot be used."""


class ArgumentTypeError(AmpError, TypeError):
    """An argument has a type that cannot be used."""


class ListError(AmpError, ValueError):
    """An operator list names an unknown operator, contradicts itself, or asks for the impossible."""


class ListTypeError(AmpError, TypeError):
    """An operator list was given as something other than a list of strings."""


class GraphError(AmpError, ValueError):
    """A program is malformed: a cycle, a missing producer, a type clash, an untyped variable."""


class ModelFileError(AmpError, ValueError):
    """A file is not a model, is cut short, or lacks its external data."""


class ModelFileNotFoundError(ModelFileError, FileNotFoundError):
    """A model file, or a file that it refers to, does not exist."""


class ModelFileWriteError(ModelFileError, OSError):
    """A model file, or its external data, cannot be written; nothing is left behind."""


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

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class PlaceError(AmpError, RuntimeError):
    """The device that was asked for is not there, or cannot run the program."""


class StepError(AmpError, ValueError):
    """A training program breaks the step protocol."""


class ExecutionError(AmpError, RuntimeError):
    """onnxruntime refused a program or failed while it ran it; the message carries onnxruntime's own."""
