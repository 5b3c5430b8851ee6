"""Parameter groups: parameters of one optimizer with a rate, a decay or a clipping of their own."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.parameter_names import names_of_parameter
from amp_transpiler.ir.patterns import matching_names
from amp_transpiler.ir.settings import UpdateSettings, settings_of
from amp_transpiler.optimizer.gradient_clip import GradientClip
from amp_transpiler.option_checks import is_finite, listed
from amp_transpiler.passes.autodiff.backward import listed_parameters
from amp_transpiler.program import Program
from amp_transpiler.regularizer import Decay, L1Decay, L2Decay, checked_decay

_log = logging.getLogger(__name__)
_KEYS = ("params", "learning_rate", "weight_decay", "grad_clip")

Items = Sequence[Variable | str]


def number(owner: str, name: str, value: Any, low: float, high: float = 2.0**128, *, open_low: bool = False) -> float:
    """``value`` as a float in ``[low, high)``; ArgumentError that names the owner and the argument otherwise."""
    bad = not is_finite(value)
    if bad or not low <= value < high or (open_low and value == low):
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g})"
        raise ArgumentError(f"{owner}: {name} is {value!r}; expected a number in {bounds}")
    return float(value)


def checked_clip(owner: str, clip: Any) -> GradientClip | None:
    """``clip`` itself; ArgumentTypeError where it is no ``ClipGradBy…`` object."""
    if not isinstance(clip, (GradientClip, type(None))):
        raise ArgumentTypeError(f"{owner}: grad_clip is {clip!r}; expected a ClipGradBy… object")
    return clip


@dataclass(frozen=True, eq=False)
class Group:
    """One entry of ``parameter_list``, or all parameters where ``items`` is None.

    ``lr_factor`` multiplies the optimizer's learning rate. Groups with the same ``clip_set`` are clipped together:
    all that take the optimizer's clipping have None, one with its own clipping has its label.
    """

    label: str
    items: Items | None
    lr_factor: float
    weight_decay: Decay
    clip: GradientClip | None
    clip_set: str | None = None


def parsed(
    owner: str, parameter_list: Any, weight_decay: Decay, clip: GradientClip | None, penalties: bool
) -> list[Group]:
    """The groups that ``parameter_list`` stands for: one of all parameters (None), of a list, or one for each dict.

    ``penalties``: see ``checked_decay``.
    """
    if isinstance(parameter_list, (str, dict)) or not isinstance(parameter_list, (Iterable, type(None))):
        raise ArgumentTypeError(
            f"{owner}: parameter_list is {parameter_list!r}; expected a list of parameters, or of groups, as in "
            "[{'params': [...], 'learning_rate': 0.1}, ...]"
        )
    entries = None if parameter_list is None else thawed(list(parameter_list))
    if not entries or not any(isinstance(entry, dict) for entry in entries):
        return [Group("parameter_list", entries, 1.0, weight_decay, clip)]
    return [_group(owner, index, entry, weight_decay, clip, penalties) for index, entry in enumerate(entries)]


def _group(
    owner: str, index: int, entry: Any, weight_decay: Decay, clip: GradientClip | None, penalties: bool
) -> Group:
    where = f"{owner}: parameter_list[{index}]"
    if not isinstance(entry, dict):
        raise ArgumentTypeError(f"{where} is {entry!r}, and other entries are groups; put it into a group as well")
    unknown = [key for key in entry if key not in _KEYS]
    if unknown or "params" not in entry:
        what = f"has the key {unknown[0]!r}" if unknown else "has no 'params'"
        raise ArgumentError(f"{where} {what}; a group has {', '.join(map(repr, _KEYS))}")
    items = entry["params"]
    if isinstance(items, (str, Variable)):
        items = [items]
    if not isinstance(items, Iterable) or not (items := thawed(list(items))):
        raise ArgumentTypeError(f"{where}: params is {entry['params']!r}; expected variables, names or patterns")
    return Group(
        label=f"parameter_list[{index}] ({', '.join(repr(_name(item)) for item in items[:3])}"
        f"{', …' if len(items) > 3 else ''})",
        items=items,
        lr_factor=number(where, "learning_rate", entry.get("learning_rate", 1.0), 0),
        weight_decay=checked_decay(where, entry.get("weight_decay", weight_decay), penalties),
        clip=checked_clip(where, entry["grad_clip"]) if "grad_clip" in entry else clip,
        clip_set=str(index) if "grad_clip" in entry else None,
    )


def thawed(items: list[Any], program: Program | None = None) -> list[Any]:
    """The items without frozen parameters and statistics: a list of all parameters stands for those that train.

    Names of such variables go where their ``program`` is given; ArgumentError where nothing is left there.
    """

    def trains(item: Any) -> bool:
        if program is not None and isinstance(item, str) and program.has_var(item):
            item = program.var(item)
        return not isinstance(item, Variable) or item.is_parameter or not item.persistable

    left = [item for item in items if trains(item)]
    if program is not None and len(left) < len(items):
        names = listed([_name(item) for item in items if not trains(item)], 5)
        if not left:
            raise ArgumentError(
                f"parameter_list: {names} do not train: they have trainable=False or stop_gradient=True, or are "
                "running statistics; variable.trainable = True before minimize makes one train"
            )
        _log.info("parameter_list passes over what does not train: %s", names)
    return left


def _name(item: Any) -> Any:
    return item.name if isinstance(item, Variable) else item


def assigned(owner: str, groups: Sequence[Group], program: Program, given: Sequence[Variable]) -> dict[int, Group]:
    """The group of each given parameter, by key; parameters of no group are left out, with a log line.

    ArgumentError: a parameter in two groups, a pattern that matches nothing.
    """
    if len(groups) == 1 and groups[0].label == "parameter_list":
        return {parameter.key: groups[0] for parameter in given}
    found: dict[int, Group] = {}
    for group in groups:
        for parameter in listed_parameters(program, group.items or (), f"{owner}: {group.label}"):
            other = found.setdefault(parameter.key, group)
            if other is not group:
                raise ArgumentError(
                    f"{owner}: parameter '{parameter.name}' is in two groups, {other.label} and "
                    f"{group.label}; a parameter has one group"
                )
    left = dict.fromkeys(p.name for p in [*program.parameters, *given] if p.key not in found)
    if left:
        _log.info(
            "%s does not train %d parameters of program '%s' that are in none of its groups: %s",
            owner,
            len(left),
            program.name,
            listed(left, 5),
        )
    return {parameter.key: found[parameter.key] for parameter in given if parameter.key in found}


def with_own_settings(
    owner: str, groups: dict[int, Group], given: Sequence[Variable], penalties: bool
) -> dict[int, Group]:
    """The group of each parameter, by key, with what its ``ParamAttr`` asks for.

    ArgumentTypeError: a penalty of its own under an optimizer that decays in a way of its own (``penalties`` False).
    """
    found = dict(groups)
    for parameter in given:
        group, settings = groups.get(parameter.key), settings_of(parameter)
        if group is None or settings == UpdateSettings():
            continue
        decay = group.weight_decay
        if settings.penalty and (penalties or settings.coeff):  # one of 0 adds nothing to a gradient
            penalty = {"L1Decay": L1Decay, "L2Decay": L2Decay}[settings.penalty](settings.coeff)
            if not penalties:
                raise ArgumentTypeError(
                    f"{owner}: ParamAttr of '{parameter.name}' asks for {penalty!r}, a penalty that is added to the "
                    f"gradient, and {owner} decays apart from the gradient: leave regularizer out, and give the "
                    f"parameter a group of its own, parameter_list=[{{'params': ['{parameter.name}'], "
                    f"'weight_decay': {settings.coeff:g}}}, ...]"
                )
            decay = checked_decay(owner, penalty)
        clip, clip_set = (group.clip, group.clip_set) if settings.clipped else (None, "none")
        found[parameter.key] = replace(
            group, lr_factor=group.lr_factor * settings.rate, weight_decay=decay, clip=clip, clip_set=clip_set
        )
    return found


def without_decay(owner: str, patterns: Sequence[str], program: Program) -> set[int]:
    """Keys of the parameters that ``weight_decay_exclude`` names; ArgumentError for a pattern that matches none."""
    kind = f"parameter of program '{program.name}'"
    return {
        p.key
        for p in matching_names(
            program.parameters, patterns, f"{owner}: weight_decay_exclude", names_of_parameter, kind
        )
    }
