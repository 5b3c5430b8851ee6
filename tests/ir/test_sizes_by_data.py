"""What numbers stand for sizes that data decide."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import GraphError
from amp_transpiler.ir.decided_sizes import TIMES, DecidedSizes
from amp_transpiler.nn import functional as F

Built = Callable[[amp.Variable, amp.Variable], object]


def sizes(build: Built) -> tuple[amp.Program, DecidedSizes]:
    main = amp.Program()
    with amp.program_guard(main, amp.Program()), amp.unique_name.guard():
        build(amp.data("x", [12, 4]), amp.data("mask", [12], "bool"))
    return main, DecidedSizes(main, {})


def of(found: DecidedSizes, variable: amp.Variable) -> list[tuple[int, ...]]:
    known = found.sizes(variable)
    assert known is not None
    return known


def test_equal_masks_find_as_much() -> None:
    made = []

    def build(x: amp.Variable, mask: amp.Variable) -> None:
        made.extend(
            [x[mask], F.masked_select(x[:, 0], mask), x[F.logical_not(mask)], F.nonzero(F.greater_than(x, 0.0))]
        )

    _, found = sizes(build)
    rows, elements, others, places = (of(found, v)[0] for v in made)
    assert rows == elements and len({rows, others, places}) == 3
    assert len(found.times) == TIMES == len(set(rows))
    assert of(found, made[0])[1] == (4, 4, 4)
    assert found.hangs(rows[0]) and found.hangs(4 * rows[0]) and not found.hangs(48)
    assert found.times[1].hangs(rows[1]) and not found.times[1].hangs(rows[0])


def test_they_are_at_least_what_there_can_be() -> None:
    main = amp.Program()
    with amp.program_guard(main, amp.Program()), amp.unique_name.guard():
        places = F.nonzero(amp.data("mask", [50, 40], "bool"))
    found = DecidedSizes(main, {})
    assert of(found, places) == [(2003, *of(found, places)[0][1:]), (2, 2, 2)]
    assert all(2000 <= number < 2400 for number in of(found, places)[0])
    assert all(2600 <= number < 3100 for number in of(DecidedSizes(main, {}, 1.3), places)[0])


@pytest.mark.parametrize("more", range(1, 30))
def test_none_is_another_size_by_chance(more: int) -> None:
    """Some of what is found and a few more may be as many as stand for something else: then others do."""
    made = []

    def build(x: amp.Variable, mask: amp.Variable) -> None:
        longer = F.concat([x[mask], F.zeros([more, 4], "float32")], 0)
        made.extend([longer, x[F.logical_not(mask)], F.zeros([67 + more], "float32")])

    _, found = sizes(build)
    for time in range(TIMES):
        assert len({of(found, v)[0][time] for v in made}) == 3


def test_what_has_to_fit_is_one_size() -> None:
    made = []

    def build(x: amp.Variable, mask: amp.Variable) -> None:
        joined = F.concat([x[mask], x[F.logical_not(mask)]], 0)
        made.extend([joined, joined * x, joined + 1.0])

    _, found = sizes(build)
    assert [of(found, v)[0] for v in made] == [(12,) * TIMES] * 3
    assert len(found.same) == 1


def test_a_part_of_what_is_found_may_be_shorter_than_it_says() -> None:
    made = []

    def build(x: amp.Variable, mask: amp.Variable) -> None:
        made.extend([x[mask], x[mask][:5], x[mask][:, :2], x[mask][0]])

    _, found = sizes(build)
    whole, part, columns, first = (of(found, v) for v in made)
    assert len({whole[0], part[0]}) == 2 and len(set(part[0])) == TIMES
    assert columns == [whole[0], (2, 2, 2)] and first == [(4, 4, 4)]


def test_what_does_not_fit_by_itself_is_an_error() -> None:
    def build(x: amp.Variable, mask: amp.Variable) -> None:
        main = x.program
        wrong = main.add_variable("wrong", "float32")
        main.add_operator("Add", [x[mask], main.add_constant("three", np.ones((1, 3), np.float32))], [wrong])

    with pytest.raises(GraphError, match=r"\(Add\) does not fit its inputs"):
        sizes(build)
