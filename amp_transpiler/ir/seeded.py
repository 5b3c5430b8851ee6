"""The seed of a program."""

from __future__ import annotations

from amp_transpiler.option_checks import whole

#: Seeds are words of 32 bits.
LARGEST_SEED = (1 << 32) - 1


class Seeded:
    """What has a seed, and changes with it."""

    def __init__(self) -> None:
        self._seed = 0

    def touch(self) -> None:
        """Say that it has changed."""
        raise NotImplementedError

    @property
    def seed(self) -> int:
        """What a startup program's random initialisers and its main program's masks follow from, 0 … 2**32 - 1.

        Setting it to anything else: ArgumentTypeError, ArgumentError.
        """
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        whole("seed", seed, 0, LARGEST_SEED)
        self._seed = int(seed)
        self.touch()  # a startup program that ran with another seed is compiled anew
