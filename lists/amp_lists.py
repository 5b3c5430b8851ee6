"""The operator lists of one conversion: the defaults, changed by the user's own lists."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar, Protocol

from amp_transpiler.errors import ListError, ListTypeError
from amp_transpiler.lists._data import default_lists, known_aliases, resolve, written_as
from amp_transpiler.lists._kernels import USUAL_PLACE, lowering_gap, unsupported_operators
from amp_transpiler.lists._places import half_places, place_traits
from amp_transpiler.lists._presets import Preset, find_preset
from amp_transpiler.option_checks import shown
from amp_transpiler.spelling import TYPES, read_as

_NO_PRESET = Preset("", frozenset(), (), {})
_HALF = ("float16", "bfloat16")


class OfKind(Protocol):
    """A place, which is of a room above this one."""

    kind: ClassVar[str]


class OperatorSet(set[str]):
    """ONNX operator types. Paddle's names may be asked for, added and taken out: ``"conv2d" in lists.white_list``.

    A name that stands for several types is in the set where all of them are.
    """

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name) or not isinstance(name, str) or name[:1].isupper():  # Paddle's names are not
            return super().__contains__(name)
        return all(map(super().__contains__, known_aliases().get(name, ("",))))

    def add(self, name: str) -> None:
        """ListError for a name that no operator has."""
        super().update(resolve(name))

    def update(self, *names: Iterable[str]) -> None:
        """ListError for a name that no operator has."""
        super().update(*(resolve(name) for some in names for name in some))

    def discard(self, name: object) -> None:
        """ListError for a name that no operator has, ListTypeError for what is no string."""
        super().difference_update(resolve(name))  # type: ignore[arg-type]

    def remove(self, name: str) -> None:
        """KeyError where it is not in the set."""
        if name not in self:
            raise KeyError(name)
        self.discard(name)


class AutoMixedPrecisionLists:
    """White, black, gray and unsupported operators for one program.

    The merge rule is PaddlePaddle's (``AutoMixedPrecisionLists``, the same in all versions since 2020): the custom
    lists may not overlap; a custom white operator leaves black and gray and becomes white; a custom black operator
    leaves white and gray and becomes black **and** unsupported, so that it runs fp32 in pure 16 bit as well.

    Args:
        custom_white_list: operators to run in 16 bit: ONNX operator types (``MatMul``), ``domain::Type``, or Paddle's
            names (``pool2d``), of which one may stand for several types.
        custom_black_list: operators to run in fp32, by the same names; of Paddle's also what functions of this package
            make in their place (Sigmoid for ``silu``).
        custom_black_varnames: names of variables; an operator that reads or writes one of them runs fp32. A name
            that no variable has and that is a glob (``encoder/*``) or, after ``re:``, a regular expression stands for
            operators instead: by name or scope, by what they make, or by a parameter that they read.
        dtype: ``float16`` (also ``fp16``, ``half``) or ``bfloat16`` (``bf16``), in any letter case.
        preset: a recipe of ``presets.toml`` that the custom lists change further: ``"bert"`` for transformer encoders
            in mixed precision (layer norm, softmax, GELU, embeddings, logits in fp32), ``"bert_pure"`` for pure 16 bit.
        place: the place whose kernels count, or its kind ("cuda", "webgpu").

    Attributes:
        white_list, black_list, gray_list: sets of operators, copies of this instance's own; they know Paddle's names.
        black_varnames: set of variable names and patterns.
        black_patterns: patterns of the preset, which need not fit anything.
        dtype: ``float16`` or ``bfloat16``.
        place: the kind of place whose kernels count.

    Raises:
        ListTypeError: something other than a list of strings was given (a single string, most often).
        ListError: the custom lists overlap, a name or preset is unknown, a custom white operator has no lowering at
            this element type, or ``dtype`` is neither of the two.
    """

    def __init__(
        self,
        custom_white_list: Iterable[str] | None = None,
        custom_black_list: Iterable[str] | None = None,
        custom_black_varnames: Iterable[str] | None = None,
        dtype: str = "float16",
        *,
        preset: str | None = None,
        place: str | OfKind = USUAL_PLACE,
    ) -> None:
        self.place = self._checked_place(place)
        self.dtype: str = read_as(TYPES, dtype)
        if self.dtype not in _HALF:
            raise ListError(f"{self._called('dtype')} is {shown(dtype)}; expected 'float16' or 'bfloat16'.")
        if self.dtype not in place_traits(self.place).dtypes:
            raise ListError(
                f"{self._called('dtype')} is '{self.dtype}', which {place_traits(self.place).title} does not have; "
                "take 'float16'."
            )
        called_white, called_black = self._called("custom_white_list"), self._called("custom_black_list")
        white = _resolved(custom_white_list, called_white)
        black = _resolved(custom_black_list, called_black, {} if custom_black_list is None else written_as())
        overlap = sorted(white.keys() & black.keys())
        if overlap:
            given = "; ".join(f"{each}: white as '{white[each]}', black as '{black[each]}'" for each in overlap)
            raise ListError(
                f"{called_white} and {called_black.split()[-1]} overlap in {', '.join(overlap)} ({given}). "
                "Take each operator out of one of them."
            )
        for operator in white:
            reason = self._gap(operator)
            if reason:
                raise ListError(
                    f"{called_white} names '{white[operator]}', but {operator} cannot run in {self.dtype}: {reason}. "
                    "Take it out of that list."
                )
        recipe = _NO_PRESET if preset is None else find_preset(preset)
        blackened = (recipe.black - white.keys()) | black.keys()
        defaults = default_lists()
        self.white_list: set[str] = OperatorSet((set(defaults.white) | white.keys()) - blackened)
        self.black_list: set[str] = OperatorSet((set(defaults.black) - white.keys()) | blackened)
        self.gray_list: set[str] = OperatorSet(set(defaults.gray) - white.keys() - blackened)
        self.black_varnames: set[str] = set(_strings(custom_black_varnames, self._called("custom_black_varnames")))
        self.black_patterns: tuple[str, ...] = recipe.names
        self._custom_black, self._custom_white = frozenset(blackened), frozenset(white)

    def _checked_place(self, place: object) -> str:
        """The kind of a place with 16-bit kernels, given as such or by name."""
        kind = place.lower() if isinstance(place, str) else getattr(place, "kind", None)
        if isinstance(place, type) or kind not in half_places():
            raise ListError(
                f"{self._called('place')} is {shown(place)}; expected a place with kernels for 16 bit, "
                f"{' or '.join(map(repr, half_places()))}."
            )
        return str(kind)

    def _gap(self, operator: str) -> str | None:
        """Why an operator cannot run at ``dtype`` in a lowered program, or None."""
        return lowering_gap(operator, self.dtype, place=self.place)

    def _called(self, argument: str) -> str:
        """An argument as messages name it."""
        return f"AutoMixedPrecisionLists: {argument}"

    @property
    def amp_dtype(self) -> str:
        """``dtype``, by its name in Paddle."""
        return self.dtype

    @property
    def all_list(self) -> set[str]:
        """White, black and gray operators together: every float operator of ai.onnx."""
        return OperatorSet(self.white_list | self.black_list | self.gray_list)

    @property
    def unsupported_list(self) -> frozenset[str]:
        """Operators that run fp32 in every mode: without a lowering to ``dtype`` on the place, and the custom
        black ones.

        Computed when asked for, since lowerings are registered while the package is imported.
        """
        return unsupported_operators(self.dtype, place=self.place) | self._custom_black

    @property
    def custom_black_list(self) -> frozenset[str]:
        """The ONNX operators that ``custom_black_list`` or the preset named."""
        return self._custom_black

    @property
    def custom_white_list(self) -> frozenset[str]:
        """The ONNX operators that ``custom_white_list`` named."""
        return self._custom_white

    def __repr__(self) -> str:
        return (
            f"AutoMixedPrecisionLists(dtype={self.dtype!r}, {len(self.white_list)} white, "
            f"{len(self.black_list)} black, {len(self.gray_list)} gray, {len(self.black_varnames)} black variables)"
        )


def _strings(names: Iterable[str] | None, argument: str) -> list[str]:
    if names is None:
        return []
    if isinstance(names, str):
        raise ListTypeError(f"{argument} is the string {names!r}; expected a list, [{names!r}].")
    try:
        listed = list(names)
    except TypeError:
        raise ListTypeError(f"{argument} is {shown(names)}; expected a list of strings.") from None
    for name in listed:
        if not isinstance(name, str):
            raise ListTypeError(f"{argument} holds {shown(name)} ({type(name).__name__}); expected strings.")
    return listed


def _resolved(
    names: Iterable[str] | None, argument: str, more: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> dict[str, str]:
    """ONNX operators by the name under which the user gave them; ``more`` are others that a name takes in."""
    return {operator: name for name in _strings(names, argument) for operator in (*resolve(name), *more.get(name, ()))}
