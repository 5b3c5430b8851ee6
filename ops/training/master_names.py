"""What fp32 master weights are called: ``<parameter>_fp32_master_0``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_INFIX = "_fp32_master_"
_NAME = re.compile(rf"(.+){_INFIX}\d+")


def master_names(parameter: str) -> Iterator[str]:
    """The names for master weights of a parameter, the first one first; two programs in a scope may have one each."""
    return (f"{parameter}{_INFIX}{number}" for number in itertools.count())


def mastered(name: str) -> str | None:
    """The parameter whose master weight has this name; None where it is the name of no master weight."""
    found = _NAME.fullmatch(name)
    return None if found is None else found[1]
