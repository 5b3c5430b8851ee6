"""The startup program of a program: it sets the persistable variables, and is made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self


class HasStartup:
    """What has a startup program of its own class."""

    name: str

    def __init__(self, startup: Self | None) -> None:
        self._startup: Self | None = startup
        self._make_startup: Callable[[], Self] | None = None

    @property
    def startup(self) -> Self | None:
        """The program that initialises the persistable variables."""
        make = self._make_startup
        if make is not None:
            self._startup, self._make_startup = make(), None
        return self._startup

    @startup.setter
    def startup(self, startup: Self | None) -> None:
        self._startup, self._make_startup = startup, None

    def defer_startup(self, make: Callable[[], Self]) -> None:
        """Let ``make`` give the startup program when it is asked for; a conversion never asks."""
        self._make_startup = make
