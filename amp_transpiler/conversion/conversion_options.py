"""What a conversion is asked for: checked once, when it is made, and passed whole to every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, ListError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.types import HALF
from amp_transpiler.lists import USUAL_PLACE, AutoMixedPrecisionLists, half_places, unsupported_reason
from amp_transpiler.option_checks import choice, flag, number, shown, strings, switch, whole
from amp_transpiler.passes.lowering.place import Place, check_place
from amp_transpiler.passes.pipeline import Context, Pass, Value, option
from amp_transpiler.spelling import MODES as SPELLINGS, TYPES, read_as

MODES = ("pure", "mixed", "auto")
#: Relative L2 error of an output that is allowed where the caller names none.
TOLERANCE = {"float16": 0.01, "bfloat16": 0.05}

#: Black in training, as their scales are calibrated in fp32; of a model that is converted the numeric guards look at
#: each scale, and what they pass follows its neighbours as data movement does.
_SCALED = frozenset({"QuantizeLinear", "DequantizeLinear"})
_PATTERNS = ("only", "exclude")
_SWITCHES = ("numeric_guards", "record", "check")
#: The command line's spelling, where it is not the field's.
_FLAGS = {"exclude": "--except", "input_ranges": "--input-range", "numeric_guards": "--no-numeric-guards"}


@dataclass(frozen=True, eq=False)
class ConversionOptions:
    """The keywords of :func:`.convert`, which says what each is, in one spelling.

    Attributes:
        flags: name options in messages as the command line spells them.
        lists: the operator lists that follow.

    Raises:
        ArgumentError, ArgumentTypeError: a value of another kind or out of range, or two that contradict each other.
        ListError, ListTypeError: ``dtype``, or an operator list, cannot be.
    """

    mode: str = "pure"
    dtype: str = "float16"
    place: Place | str = USUAL_PLACE
    keep_io: bool | Iterable[str] = True
    white_list: Iterable[str] | None = None
    black_list: Iterable[str] | None = None
    black_varnames: Iterable[str] | None = None
    only: Iterable[str] | None = None
    exclude: Iterable[str] | None = None
    calibration: Any = None
    tolerance: float | None = None
    input_ranges: Mapping[str, tuple[float, float]] | None = None
    numeric_guards: bool = True
    record: bool = False
    check: bool = False
    progress: Callable[[str], None] | None = None
    time_budget: float | None = None
    memory_budget: int | None = None
    flags: bool = False
    lists: AutoMixedPrecisionLists = field(init=False)

    def __post_init__(self) -> None:
        self._put("mode", choice(self.called("mode"), self.mode, MODES, SPELLINGS))
        dtype = read_as(TYPES, self.dtype)
        if not isinstance(dtype, str) or dtype not in HALF:
            raise ListError(f"{self.called('dtype')} is {shown(self.dtype)}; expected 'float16' or 'bfloat16'")
        self._put("dtype", dtype)
        self._put("place", check_place(self.place, self.called("place")).kind)
        for name in _SWITCHES:
            switch(self.called(name), getattr(self, name))
        for name in _PATTERNS:
            given = getattr(self, name)
            self._put(name, None if given is None else strings(self.called(name), given))
        if not isinstance(self.keep_io, bool):
            self._put("keep_io", strings(self.called("keep_io"), self.keep_io, "True, False or a list of names"))
        if self.progress is not None and not callable(self.progress):
            raise ArgumentTypeError(
                f"{self.called('progress')} is {shown(self.progress)}; expected a function of a line"
            )
        self._check_ranges()
        for name in ("time_budget", "memory_budget"):
            if getattr(self, name) is not None:
                number(self.called(name), getattr(self, name))
        if self.memory_budget is not None:
            whole(self.called("memory_budget"), self.memory_budget, 1)
        self._check_tolerance()
        self._put("lists", _Lists(self))

    def called(self, name: str) -> str:
        """An option as the caller spells it."""
        return _FLAGS.get(name, flag(name)) if self.flags else name

    def said(self, name: str, value: str = "") -> str:
        """An option with a value, its own where none is given: ``mode=auto`` or ``--mode auto``."""
        return f"{self.called(name)}{' ' if self.flags else '='}{value or getattr(self, name)}"

    def tell(self, line: str) -> None:
        """A stage begins."""
        if self.progress is not None:
            self.progress(line)

    @property
    def kind(self) -> str:
        """The kind of the place."""
        return str(self.place)

    def binds_full(self, operator: str) -> bool:
        """Whether a list binds operators of this name to fp32."""
        lists = self.lists
        return operator in (lists.black_list if self.mode == "mixed" else lists.custom_black_list)

    @property
    def searches(self) -> bool:
        """Whether operators return to fp32 until the outputs keep to the tolerance."""
        return self.mode == "auto" and self.calibration is not None

    @property
    def allowed(self) -> float | None:
        """The error of an output that the verdict allows; None where errors are measured, if at all, and not judged."""
        if not (self.searches or self.check):
            return None
        return TOLERANCE[self.dtype] if self.tolerance is None else float(self.tolerance)

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_ranges(self) -> None:
        called, ranges = self.called("input_ranges"), {} if self.input_ranges is None else self.input_ranges
        if not isinstance(ranges, Mapping) or not all(isinstance(name, str) for name in ranges):
            raise ArgumentTypeError(f"{called} is {shown(ranges)}; expected a mapping from inputs to pairs of numbers")
        for name, pair in ranges.items():
            try:
                low, high = map(float, pair)
            except (TypeError, ValueError, OverflowError):
                raise ArgumentTypeError(
                    f"{called}: the range of {name!r} is {shown(pair)}; expected two numbers"
                ) from None
            if not low <= high:  # NaN as well
                raise ArgumentError(f"{called}: the range of '{name}' is ({low}, {high}); give the least value first")

    def _check_tolerance(self) -> None:
        if self.tolerance is None:
            return
        called = self.called("tolerance")
        number(called, self.tolerance, taken=not self.searches)
        if self.allowed is None:
            raise ArgumentError(
                f"{self.said('tolerance')} needs what it is measured on: give {self.said('mode', 'auto')} and "
                f"{self.called('calibration')}, which keep to it, or {self.called('check')}, which judges by it"
            )


class _Lists(AutoMixedPrecisionLists):
    """The operator lists, whose messages name the options of the conversion."""

    def __init__(self, options: ConversionOptions) -> None:
        self._options = options
        super().__init__(
            options.white_list, options.black_list, options.black_varnames, options.dtype, place=options.kind
        )
        if options.numeric_guards:
            guarded = _SCALED - self.custom_black_list - self.custom_white_list
            self.black_list -= guarded
            self.gray_list |= guarded

    def _gap(self, operator: str) -> str | None:
        return unsupported_reason(operator, self.dtype, place=self.place)  # nothing lowers a file

    def _called(self, argument: str) -> str:
        return self._options.called(argument.removeprefix("custom_"))


#: The options of a conversion that is run as passes.
OPTIONS: Value[ConversionOptions] = Value("options", ConversionOptions)


class Options(Pass):
    """What a conversion is asked for is checked: its mode, type, lists and patterns."""

    name = "options"
    takes = (OPTIONS,)
    guarantees = (OPTIONS,)
    reads = True

    mode: str = option("pure", *MODES)
    dtype: str = option("float16", *sorted(HALF, reverse=True))
    place: str = option("cuda", *half_places())
    keep_io: bool = True
    white_list: tuple[str, ...] = ()
    black_list: tuple[str, ...] = ()
    black_varnames: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    numeric_guards: bool = True

    def run(self, graph: Graph, context: Context) -> bool:
        if OPTIONS in context and self != Options():
            raise ArgumentError(f"{OPTIONS.name}= says all that a conversion is asked for; leave {self} bare")
        if OPTIONS not in context:
            context[OPTIONS] = ConversionOptions(**vars(self))
        return False
