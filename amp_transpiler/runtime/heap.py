"""Where tensors on the CPU lie: memory that was freed goes back to the system, and sessions have one arena."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import onnxruntime as ort

from amp_transpiler.passes.lowering.arena import FIRST_REGION, LARGEST_REGION, REGION, WASTE

try:
    _trim: Any = ctypes.CDLL(None).malloc_trim
except (AttributeError, OSError, TypeError):  # not glibc: the others give large blocks back by themselves
    _trim = None


def trim() -> None:
    """Give back the pages between what is in use.

    glibc takes a block that is larger than any it has seen freed from the system and gives it back, but from the first
    one freed on it takes blocks of that size, up to 32 MiB, from its heap: there the memory of replaced weights stays.
    """
    if _trim is not None:
        _trim(0)


@functools.cache
def make_arena() -> None:
    """Let every CPU session take its memory from one arena, which begins with one large region.

    A session's own begins with 1 MiB and doubles: what is free then lies in many pieces, and a training step takes 4
    to 50 % more than its tensors (measured). A page of a region takes memory only once something was written to it.
    onnxruntime never gives its first region back: so that is a small one, and those after a shrink are large, each
    twice as large as the last.
    """
    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    region = {"initial_chunk_size_bytes": FIRST_REGION, "initial_growth_chunk_size_bytes": REGION}
    growth = {"arena_extend_strategy": 0, "max_power_of_two_extend_bytes": LARGEST_REGION}
    settings = ort.OrtArenaCfg(region | growth | {"max_dead_bytes_per_chunk": WASTE})
    try:
        ort.create_and_register_allocator(place, settings)
    except Exception:  # another part of the process has registered one; then that serves
        return
