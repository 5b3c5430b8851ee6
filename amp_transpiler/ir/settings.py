"""What a parameter asks of the optimizer that updates it; kept in the metadata of its variable, and by its clones."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from amp_transpiler.ir.nodes import Variable

_KEY = "amp_transpiler.update"


@dataclass(frozen=True)
class UpdateSettings:
    """``rate``: a factor of the learning rate. ``penalty``: "L1Decay" or "L2Decay" of ``coeff`` in place of the
    optimizer's; "" for that one. ``clipped``: whether its gradient is clipped, and counts in a norm for it."""

    rate: float = 1.0
    penalty: str = ""
    coeff: float = 0.0
    clipped: bool = True


def set_settings(variable: Variable, settings: UpdateSettings) -> None:
    """Keep ``settings`` with a parameter; the default ones leave no trace."""
    if settings != UpdateSettings():
        variable.metadata[_KEY] = json.dumps(asdict(settings))


def settings_of(variable: Variable) -> UpdateSettings:
    """What :func:`set_settings` kept."""
    text = variable.metadata.get(_KEY)
    return UpdateSettings() if text is None else UpdateSettings(**json.loads(text))
