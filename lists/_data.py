"""Reads the list files beside this module and checks every entry against the operator schemas of onnx."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

from onnx import defs

from amp_transpiler.errors import ListError, ListTypeError
from amp_transpiler.lists._kernels import runtime_operators
from amp_transpiler.lists._schemas import full_name, near_matches, read_text, schemas, split_name

#: Inputs and outputs that stay fp32, by operator; ``ops/`` fills it.
_KEPT_FP32: dict[str, tuple[frozenset[int], frozenset[int]]] = {}
_NONE_KEPT: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())


@dataclass(frozen=True)
class OpLists:
    """White, black and gray operators, named as ``Type`` for ai.onnx and ``domain::Type`` for other domains.

    ``reasons`` says for each of them why it is where it is.
    """

    white: frozenset[str]
    black: frozenset[str]
    gray: frozenset[str]
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)


def parse_lists(text: str, file: str, *, checked: bool = False) -> OpLists:
    """The operator lists in a TOML text.

    Args:
        text: tables ``[[white]]``, ``[[black]]`` and ``[[gray]]``, each with ``why`` and ``operators``.
        file: the file's name, for messages.
        checked: every operator is known to have an onnx schema, which takes a while to find out.

    Raises:
        ListError: a table other than these, an operator without an onnx schema, or one that stands twice.
    """
    sets: dict[str, set[str]] = {"white": set(), "black": set(), "gray": set()}
    reasons: dict[str, str] = {}
    for colour, groups in tomllib.loads(text).items():
        if colour not in sets:
            raise ListError(f"{file}: there is no list '{colour}'; the lists are white, black and gray.")
        for group in groups:
            for name in group["operators"]:
                if not checked:
                    check_operator(name, f"{file}, list {colour}")
                here = next((each for each, operators in sets.items() if name in operators), None)
                if here is not None:
                    raise ListError(f"{file}: '{name}' stands in list {here} and again in {colour}; keep one of them.")
                sets[colour].add(name)
                reasons[name] = group["why"]
    white, black, gray = (frozenset(sets[colour]) for colour in ("white", "black", "gray"))
    return OpLists(white, black, gray, MappingProxyType(reasons))


def parse_aliases(text: str, file: str) -> tuple[Mapping[str, tuple[str, ...]], Mapping[str, str]]:
    """The alias table, and the names without an ONNX counterpart with the reason, from a TOML text.

    Raises:
        ListError: an alias of an operator without an onnx schema, of none at all, or a name that stands in both tables.
    """
    data = tomllib.loads(text)
    aliases = {name: tuple(targets) for name, targets in data["aliases"].items()}
    missing: dict[str, str] = data["no_counterpart"]
    for name, targets in aliases.items():
        if not targets or name in missing:
            raise ListError(
                f"{file}: alias '{name}' needs either operators or a place in no_counterpart, and not both."
            )
        for target in targets:
            check_operator(target, f"{file}, alias {name}")
    return MappingProxyType(aliases), MappingProxyType(missing)


def check_operator(name: str, where: str) -> None:
    """ListError, with near matches, where neither onnx nor onnxruntime has an operator ``name``; a domain that neither
    defines passes."""
    domain, op_type = split_name(name)
    if defs.has(op_type, domain) or op_type in runtime_operators(domain):  # to list all schemas takes ten milliseconds
        return
    if domain != "com.microsoft" and domain not in {known for known, _ in schemas()}:
        return
    of_domain = {each for known, each in schemas() if known == domain} | runtime_operators(domain)
    raise ListError(f"{where}: onnx has no operator '{name}'.{near_matches(op_type, of_domain)}")


@cache
def default_lists() -> OpLists:
    """The default lists: PaddlePaddle's of September 2021, carried to ONNX operator types (``default.toml``)."""
    return parse_lists(read_text("default.toml"), "default.toml", checked=True)


@cache
def _aliases() -> tuple[Mapping[str, tuple[str, ...]], Mapping[str, str]]:
    return parse_aliases(read_text("aliases.toml"), "aliases.toml")


def known_aliases() -> Mapping[str, tuple[str, ...]]:
    """Paddle's operator names, and the ONNX operators that each stands for."""
    return _aliases()[0]


@cache
def written_as() -> Mapping[str, tuple[str, ...]]:
    """Paddle's operator names, and the ONNX operators that functions of this package make in their place."""
    table = tomllib.loads(read_text("aliases.toml"))["written_as"]
    for name, operators in table.items():
        for operator in operators:
            check_operator(operator, f"aliases.toml, written_as {name}")
    return MappingProxyType({name: tuple(operators) for name, operators in table.items()})


def keep_fp32(*names: str, inputs: Iterable[int], outputs: Iterable[int] = ()) -> None:
    """Declare which inputs and outputs of operators stay fp32 when the operator itself runs in 16 bit.

    Scale, bias and statistics of normalisations do; the first input and the first output carry the data and are never
    among them. Slots whose type the schema pins to float (roi and scales of Resize) need no declaration.
    """
    for name in names:
        _KEPT_FP32[name] = frozenset(inputs), frozenset(outputs)


def kept_fp32(op_type: str, domain: str = "") -> tuple[frozenset[int], frozenset[int]]:
    """Indices of the inputs and of the outputs that stay fp32 when the operator runs in 16 bit.

    They hold the scale, bias and statistics of a normalisation. Whether the operator's schema lets such a slot differ
    in type from the data is not said here: where it does not, the lowering casts the fp32 value at the slot.
    """
    return _KEPT_FP32.get(full_name(op_type, domain), _NONE_KEPT)


def resolve(name: str) -> tuple[str, ...]:
    """The ONNX operators that a name stands for.

    Args:
        name: an ONNX operator type (``MatMul``), one with its domain (``com.microsoft::FusedMatMul``), or one of
            Paddle's operator names (``pool2d``), which may stand for several types (``aliases.toml``). A domain that
            neither onnx nor onnxruntime defines cannot be checked and passes.

    Raises:
        ListTypeError: ``name`` is not a string.
        ListError: nothing has that name; the message lists near matches. Or Paddle's operator has no ONNX counterpart.
    """
    if not isinstance(name, str):
        raise ListTypeError(
            f"An operator list holds {name!r} ({type(name).__name__}); expected the name of an operator, a string."
        )
    aliases, missing = _aliases()
    if name in aliases:
        return aliases[name]
    if name in missing:
        raise ListError(
            f"Operator list: Paddle's operator '{name}' has no ONNX counterpart, {missing[name]}. "
            "Name ONNX operators instead."
        )
    domain, op_type = split_name(name)
    known = {each for of, each in schemas() if of == domain} | runtime_operators(domain)
    if op_type in known or (domain and not known):
        return (full_name(op_type, domain),)
    candidates = known | (set(aliases) if not domain else set())
    raise ListError(
        f"Operator list: no operator has the name '{name}'.{near_matches(op_type, candidates)} Expected an ONNX "
        "operator type such as 'MatMul', 'domain::Type' for another domain, or one of Paddle's operator names."
    )
