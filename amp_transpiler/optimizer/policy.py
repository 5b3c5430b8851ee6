"""The global precision policy: under it, a program that is built and minimised without ``decorate`` trains mixed.

The names are Keras's. Every optimizer that is not decorated is, when ``minimize`` is called, decorated with black/white
lists and the scaling of its type; parameters stay fp32, so that nothing else in a program changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from amp_transpiler.errors import ArgumentError

#: Policy -> the 16-bit type that operators run in, None for none.
POLICIES: dict[str, str | None] = {"float32": None, "mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}


class Policy(str):
    """A policy by its name, a string: ``Policy("mixed_float16").compute_dtype == "float16"``.

    ``name``: that of a policy, see :func:`set_global_policy`. ArgumentError for any other.
    """

    def __new__(cls, name: str) -> Policy:
        if not isinstance(name, str) or name not in POLICIES:
            raise ArgumentError(f"{name!r} is no policy; known are {', '.join(map(repr, POLICIES))}")
        return super().__new__(cls, name)

    @property
    def name(self) -> str:
        """The name."""
        return str(self)

    @property
    def compute_dtype(self) -> str:
        """The element type that operators of the white list run in."""
        return POLICIES[self] or self.variable_dtype

    @property
    def variable_dtype(self) -> str:
        """The element type of parameters."""
        return "float32"


_policy = Policy("float32")


def set_global_policy(name: str) -> None:
    """Let optimizers that are minimised from now on train in this precision.

    ``name``, or a :class:`Policy`: "float32" (the default), "mixed_float16" (dynamic loss scaling) or "mixed_bfloat16"
    (no scaling; gradients are checked). ArgumentError for any other.
    """
    global _policy
    _policy = Policy(name)


def get_global_policy() -> Policy:
    """The policy."""
    return _policy


@contextmanager
def policy_scope(name: str) -> Iterator[None]:
    """Another policy inside the block."""
    before = _policy
    set_global_policy(name)
    try:
        yield
    finally:
        set_global_policy(before)
