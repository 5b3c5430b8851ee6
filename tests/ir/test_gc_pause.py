"""The collector's rest: what is made in it counts as old, and is looked at in the end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import pytest

from amp_transpiler.ir import gc_pause
from amp_transpiler.ir.gc_pause import collector_paused
from tests.helpers.where import ROOT


class _Knot:
    """It holds itself, so that the collector alone can end it."""

    def __init__(self) -> None:
        self.knot = self


def test_what_is_made_in_a_pause_counts_as_old_but_is_looked_at_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_pause, "MANY", 1000)
    monkeypatch.setattr(gc_pause, "SOME", 1000)
    gc.collect()
    with collector_paused():
        made: list[object] = [[] for _ in range(2000)]
        dropped = weakref.ref(_Knot())
    assert not {id(each) for each in made} & {id(each) for youth in (0, 1) for each in gc.get_objects(youth)}
    assert dropped() is not None
    with collector_paused():
        made += [[] for _ in range(2000)]
    assert dropped() is None


def test_what_lasts_counts_as_old_however_few() -> None:
    with collector_paused(lasting=True):
        made: list[object] = [[] for _ in range(20)]
    assert not {id(each) for each in made} & {id(each) for youth in (0, 1) for each in gc.get_objects(youth)}
    assert gc.isenabled() and not gc.get_freeze_count()


def test_some_objects_count_as_old_once_and_are_left_to_the_collector_then() -> None:
    gc.collect()
    with collector_paused():
        first: list[object] = [[] for _ in range(5000)]
    with collector_paused():
        more: list[object] = [[] for _ in range(5000)]
    young = {id(each) for each in gc.get_objects(0)} | {id(each) for each in gc.get_objects(1)}
    assert id(first[-1]) not in young and id(more[-1]) in young


def test_what_a_program_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with collector_paused(lasting=True):
            pass
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


def test_few_objects_are_left_to_the_collector() -> None:
    gc.collect()
    with collector_paused():
        made = [[]]
    assert id(made[0]) in {id(each) for each in gc.get_objects(0)}
    assert gc.isenabled()


def test_a_process_of_its_own_ends_without_a_search() -> None:
    """And does all else that it does at its end."""
    code = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 1000))
from amp_transpiler.ir.gc_pause import leave_at_exit
leave_at_exit()
print(gc.get_freeze_count() > 1000)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
