"""Whether a variable trains."""

from __future__ import annotations

from typing import Any

from amp_transpiler.warn import warn_user


class Trains:
    """What is a parameter, or is frozen."""

    __slots__ = ("_stop_gradient", "_trainable")

    persistable: bool
    _trainable: bool
    _stop_gradient: bool

    @property
    def is_parameter(self) -> bool:
        """Persistable and trainable: what an optimizer updates."""
        return self.persistable and self._trainable and not self._stop_gradient

    @property
    def trainable(self) -> bool:
        """Whether it is a parameter where it is persistable. What is set behind ``minimize``, that step does not see:
        AmpWarning."""
        return self._trainable

    @trainable.setter
    def trainable(self, trainable: bool) -> None:
        before = self.is_parameter
        self._trainable = trainable
        self._tell_late("trainable", before)

    @property
    def stop_gradient(self) -> bool:
        """Whether no gradient goes through it; a parameter is frozen by that. AmpWarning: as of ``trainable``."""
        return self._stop_gradient

    @stop_gradient.setter
    def stop_gradient(self, stop_gradient: bool) -> None:
        before = self.is_parameter
        self._stop_gradient = stop_gradient
        self._tell_late("stop_gradient", before)

    def _tell_late(self: Any, what: str, before: bool) -> None:
        """AmpWarning where a parameter is frozen, or no longer, of a program whose step is built."""
        updated = self in self.program.updates
        if before == self.is_parameter or not self.persistable or before != updated:
            return
        if updated or any(state.trainable for state in self.program.updates):
            warn_user(
                f"{what} of '{self.name}' is set after minimize: program '{self.program.name}' "
                f"{'updates it' if updated else 'does not update it'} all the same, for its step is built. Set it "
                "before minimize, or build the program anew"
            )
