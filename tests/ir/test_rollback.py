"""What a change that is taken back copies first."""

from __future__ import annotations

from typing import Any

import pytest

from amp_transpiler.ir.rollback import unchanged_on_error


def test_what_grows_while_it_is_copied_is_put_back() -> None:
    """As the counters of names do, which other threads share: copying them ended in an error of the dictionary's."""

    class Holder:
        pass

    class Growing(list[int]):
        def copy(self) -> list[int]:
            vars(holder).setdefault("later", 1)
            return list(self)

    holder: Any = Holder()
    holder.numbers, holder.other = Growing([1]), 2
    with pytest.raises(KeyError, match="broken"), unchanged_on_error(holder):
        holder.numbers.append(3)
        holder.other = 4
        raise KeyError("broken")
    assert holder.numbers == [1] and holder.other == 2
