"""Why an operator has its precision: reasons as data, and the one table of their texts.

Code asks a reason's kind, how the operator runs, whom it names; people read its text, which is made when it is shown.
A model file carries the text, and beside it the data where the text alone does not give the same reason back.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache
from typing import Any

from amp_transpiler.ir.types import SHORT
from amp_transpiler.lists import USUAL_PLACE, no_kernel

#: How an operator runs whose types stay as the program declares them; others by the short name of their type.
UNTOUCHED = "untouched"


class Kind(Enum):
    """The kinds of reasons with their texts.

    ``{subject}`` is the name of an operator, tensor, pattern or role. ``{detail}``, the next of the details, is part of
    the sort of a reason save for its measured numbers. ``{cause}`` is another reason.
    """

    # -- lists and marks ---------------------------------------------------------------------------
    WHITE_LIST = "white list"
    BLACK_LIST = "black list"
    CUSTOM_BLACK_LIST = "custom black list"
    NO_LIST = "in no list"
    PURE = "pure 16 bit"
    IN_GUARD = "inside fp16_guard"
    OUTSIDE_GUARD = "outside fp16_guard"
    OUTSIDE_ONLY = "outside --only"
    EXCEPTED = "matches --except {detail}"
    BLACK_NAME = "'{subject}' is in custom_black_varnames"
    PRESET = "'{subject}' is in the preset"
    LEARNING_RATE = "'{subject}' is a learning rate"
    TRAINABLE_TABLE = "Gather on the trainable table '{subject}'"
    # -- neighbours --------------------------------------------------------------------------------
    FOLLOWS_WIDENING = "follows {subject}, where the program itself goes to float32"
    FOLLOWS = "follows {subject}"
    NO_PRODUCER = "no 16-bit producer"
    NO_NEIGHBOUR = "no 16-bit neighbour"
    BETWEEN = "between 16-bit operators"
    FREE = "no constraint"
    CHEAPER = "not profitable: casts to 16 bit and back would move more bytes"
    MOVES_ROWS = "moves rows of the 16-bit table '{subject}'"
    TARGET_OF_READERS = "casts to what its readers take"
    # -- what no list decides ----------------------------------------------------------------------
    INSIDE_ROLE = "inside an operator of role {detail}"
    INSIDE = "inside '{subject}', {cause}"
    ROLE = "an operator of role {detail}"
    NESTED = "its nested graphs are rewritten inside"
    NO_FLOAT = "no floating-point tensor"
    NO_TENSOR = "it handles a sequence or an optional"
    SHAPE_ONLY = "it reads only a shape"
    CONSTANT = "a constant"
    OWN_CAST = "the program's own cast to {detail}"
    CAST = "cast: {subject} to {detail}"
    GRADIENT = "gradient of {subject}"
    RECOMPUTED = "recomputed for the gradients of {subject}"
    # -- kernels and schemas -----------------------------------------------------------------------
    NO_KERNEL = no_kernel(USUAL_PLACE) + "{detail}"
    NO_KERNEL_THERE = "no {subject} kernel for {detail}"
    ROUNDED_SUM = "{subject} adds it up in {detail}, an error worth {detail} roundings of the result"
    ROUNDED_INSIDE = "{subject} computes it in {detail}, an error worth {detail} roundings of the result"
    FAULT = "the kernel of {subject} fails on its operands ({detail}): {detail}"
    NO_CAST = "Cast does not know {detail} at opset {detail}"
    NOT_TAKEN = "{detail} does not take {detail} at opset {detail}"
    BY_ATTRIBUTE = "an attribute sets its element type"
    NO_INPUT = "no input sets its element type"
    OTHER_TYPE = "it computes in {detail}"
    KEPT_SLOTS = "its slots stay fp32"
    ONE_TYPE = "its kernels take '{subject}' in {detail} alone, and it is {detail}"
    QUANTISED = "onnxruntime makes one integer kernel of '{subject}' and what quantises it, whose scales are fp32"
    FAKE_QUANTISED = "quantises and brings back: the scale of the pair is fp32"
    # -- numbers -----------------------------------------------------------------------------------
    LOSS = "makes the loss"
    STATISTICS = "statistics of a normalisation"
    ATTENTION = "softmax of an attention"
    FOURIER = "a Fourier transform"
    RECURRENT = "recurrent: errors of the state add up over the steps"
    PLACES = "places in an image"
    ANGLE = "an angle of what is fed: 16 bit holds none of many turns"
    FED_LOGARITHM = "a logarithm or a root of what is fed, which is of any size"
    FED_SCORE = "the standard score of what is fed, whose mean has few digits in 16 bit beside its deviation"
    FED_SCALE = "scales down what is fed, or adds to it: it may be large, and float16 ends at 65504"
    FED_DIFFERENCE = "a difference of what is fed, which 16 bit rounds off before"
    FED_SHARE = "a share of a total of what is fed, which is of any size"
    FED_ORDER = "the order of what is fed, in which 16 bit makes ties"
    ORDER = "the order of what is computed in fp32, in which 16 bit makes ties"
    FED_BOUND = "tells on which side of a bound what is fed lies, which 16 bit rounds"
    FED_LEVEL = "brings what is computed back to the size of what is fed, which may be any"
    RUNNING_SUM = "a running sum, of which {subject} tells what 16 bit would lose"
    UNPROVED = "black list, and nothing proves that '{subject}' fits {detail}"
    AFTER = "after {subject}: {cause}"
    COUNTS = "integer-valued: it computes with the integers of '{subject}'"
    BECOMES_INTEGER = "becomes an integer in '{subject}'"
    FRACTION = "the fraction of what becomes an integer in '{subject}'"
    COMPARES = "compares elements of '{subject}' with each other"
    EQUALS = "asks what is equal to '{subject}', which {detail} rounds"
    MASK = "'{subject}' is a mask"
    MASKS = "adds masks in a sum of more than share the range of the format"
    PARAMETER_MASK = "parameter '{subject}' holds a mask beyond {detail}"
    CONSTANT_BEYOND = "constant '{subject}' holds {detail}, beyond {detail}"
    CONSTANT_VANISHES = "constant '{subject}' holds {detail}, which is 0 in {detail}"
    CONSTANT_OFF = "constant '{subject}' is {detail} off in {detail} (relative error)"
    SPARSE = "sparse constant '{subject}' is too large to be looked through"
    INTERVAL = "its values lie in [{detail}, {detail}], beyond {detail}"
    INPUT = "'{subject}': {cause}"
    SQUARE_RANGE = "x*x leaves fp16 beyond 255 and vanishes near 0"
    SQUARE_DIGITS = "x*x keeps too few digits in bf16"
    POWER_RANGE = "x**p leaves fp16 beyond 255 and vanishes near 0"
    POWER_DIGITS = "x**p keeps too few digits in bf16"
    SUMS_SQUARES = "sums squares: {cause}"
    SQUARE_BEFORE_LOG = "a square before a logarithm: {cause}"
    SQUARES_INSIDE = "sums squares inside: {cause}"
    POWERS_INSIDE = "sums powers inside: {cause}"
    SUBTRACTED_SQUARE = "the square that {subject} takes off a mean of squares"
    SPECTRUM = "the logarithm of its square '{subject}' shows the smallest numbers"
    SUMS = "sums {detail} elements"
    CARRIED = "adds to what '{subject}' carries from round to round"
    MULTIPLIES = "multiplies many elements"
    COMBINES = "combines in the element type of its result, in which CPUs have no kernel for that"
    ADDS_UP = "adds up in the element type of its sum"
    HYPERBOLIC = "an exponential leaves fp16 from 12 on"
    EXPONENTIAL = "an exponential leaves fp16 from 11.1 on"
    HIGHER_POWER = "a square on the way to a higher power"
    TIMES_SQUARE = "multiplies a number by its square"
    ANY_POWER = "raises to a power that is not constant"
    NEGATIVE_POWER = "a negative power leaves fp16 near 0"
    OVER_A_FLOOR = "a quotient by '{subject}', which may be {detail}, leaves fp16"
    ONTO_A_POLE = "a bound of {detail} is {detail} in {detail}, a pole of {subject}"
    NEAR_ONE = "{subject} brings out small numbers beside 1, where 16 bit keeps few digits of them"
    NEARS_A_POLE = "comes near {detail}, which it reaches in {detail}: a pole of {subject}"
    POWER = "raises to the power {detail}"
    GAIN = "weights of norm {detail} take inputs of {detail} out of fp16"
    REACHES = "measured: '{subject}' reaches {detail}, and {detail} ends at {detail}"
    SINKS = "measured: '{subject}' sinks below {detail}, which loses {detail} of it (largest {detail})"
    ADDS = "measured: adds {detail} to output '{subject}' {detail}"
    TOGETHER = "measured: all operators together miss the tolerance in 16 bit"
    HANDS_ON = "measured: hands numbers on between operators that stay float32"
    #: A text that no kind has: written by a user, or by another version of this package.
    TEXT = "{detail}"

    def __init__(self, text: str) -> None:
        #: What the text is made of: words at even places, names of fields at odd ones.
        self.parts = tuple(re.split(r"\{(\w+)\}", text))


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason. ``runs``: how the operator runs for it, a short type name or "untouched"; "" where nothing says."""

    kind: Kind
    subject: str = ""
    detail: tuple[str, ...] = ()
    cause: Reason | None = None
    runs: str = ""

    def running(self, runs: str) -> Reason:
        """The reason for which an operator runs in this way."""
        return self if self.runs == runs else Reason(self.kind, self.subject, self.detail, self.cause, runs)

    def __str__(self) -> str:
        return self._text(self.subject, self.detail, str(self.cause))

    def group(self) -> str:
        """The text without names and measured numbers, so that reasons of one sort have one."""
        if self.kind is Kind.FOLLOWS_WIDENING:
            return replace(self, kind=Kind.FOLLOWS).group()
        detail = tuple(_NUMBER.sub("…", each) for each in self.detail)
        return self._text("…", detail, self.cause.group() if self.cause is not None else "")

    def _text(self, subject: str, detail: tuple[str, ...], cause: str) -> str:
        details = iter(detail)
        parts = list(self.kind.parts)
        for i, field in enumerate(parts[1::2]):
            parts[2 * i + 1] = subject if field == "subject" else cause if field == "cause" else next(details)
        return (f"{self.runs}: " if self.runs else "") + "".join(parts)


#: Numbers with a point or an exponent or of three digits at least; shorter ones count, and are no measurement.
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+|\d{3,})(?![\w.])")

#: Wordings of earlier versions, which stand in files.
_FORMER = {
    "nothing measured or known speaks against it": Kind.FREE.value,
    "moves fewer bytes than casting to 16 bit and back": Kind.CHEAPER.value,
    "counts: it computes with the integers of '": "integer-valued: it computes with the integers of '",
}

#: Texts that are longer, or name more causes of causes, are taken as they are: matching would take long.
_LONGEST, _CAUSES = 1000, 2


@cache
def _pattern(kind: Kind) -> re.Pattern[str]:
    """The form of the whole text of a kind."""
    return re.compile("".join("(.+?)" if i % 2 else re.escape(part) for i, part in enumerate(kind.parts)), re.DOTALL)


@lru_cache(maxsize=65536)
def parse(text: str) -> Reason:
    """The reason of which this is the text: where several could be, the first kind of the table."""
    text = _today(text)
    runs, colon, rest = text.partition(": ")
    if colon and rest and runs in (*SHORT.values(), UNTOUCHED):
        return _parsed(rest, _CAUSES).running(runs)
    return _parsed(text, _CAUSES)


def _today(text: str) -> str:
    for former, wording in _FORMER.items():
        text = text.replace(former, wording)
    return text


def _parsed(text: str, causes: int) -> Reason:
    for kind in Kind if len(text) <= _LONGEST else ():
        found = _pattern(kind).fullmatch(text) if text.startswith(kind.parts[0]) else None
        if found is None:
            continue
        fields = list(zip(kind.parts[1::2], found.groups(), strict=True))
        cause = next((value for field, value in fields if field == "cause"), "")
        if causes or not cause:
            subject = next((value for field, value in fields if field == "subject"), "")
            detail = tuple(value for field, value in fields if field == "detail")
            return Reason(kind, subject, detail, _parsed(cause, causes - 1) if cause else None)
    return Reason(Kind.TEXT, detail=(text,))


@lru_cache(maxsize=65536)  # a program has few reasons, and thousands of operators for each
def written(reason: Reason) -> tuple[str, str]:
    """The text of a reason, and what :func:`pack` says of it."""
    return str(reason), pack(reason)


def pack(reason: Reason) -> str:
    """The data of a reason as text; "" where :func:`parse` finds them in its own."""
    return "" if parse(str(reason)) == reason else json.dumps(_packed(reason))


def unpack(text: str, packed: str) -> Reason | None:
    """The reason of a text, with data from :func:`pack` where they are its; None for no text."""
    try:
        reason = _unpacked(json.loads(packed)) if packed else None
        if reason is not None and str(reason) == _today(text):
            return reason
    except (KeyError, RecursionError, TypeError, ValueError):
        pass  # not as this package writes it: the text says what can be known
    return parse(text) if text else None


def _packed(reason: Reason) -> list[Any]:
    cause = None if reason.cause is None else _packed(reason.cause)
    return [reason.kind.name, reason.subject, list(reason.detail), cause, reason.runs]


def _unpacked(data: Any) -> Reason:
    name, subject, detail, cause, runs = data
    if not all(isinstance(each, str) for each in (name, subject, runs, *detail)):
        raise TypeError("a field that is no text")
    kind = Kind[name]
    if ("cause" in kind.parts[1::2]) != (cause is not None) or kind.parts[1::2].count("detail") != len(detail):
        raise ValueError("other fields than those of its text")
    return Reason(kind, subject, tuple(detail), None if cause is None else _unpacked(cause), runs)
