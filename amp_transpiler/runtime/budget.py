"""Limits of time and memory for running models that nobody has run before: calibration, and the check of a conversion.

Inside ``with within(budget):`` every run of a session ends with OverBudget once it takes longer or needs more::

    with within(Budget(seconds=10, memory=700 << 20)):
        measure(...)

The time is that of one run of the model. A run is ended between two operators, by onnxruntime's own flag.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import onnxruntime as ort

from amp_transpiler.errors import ExecutionError
from amp_transpiler.ir.tensors import byte_size, tensor_type
from amp_transpiler.program import Program

try:
    import resource
except ImportError:  # Windows, where the watch alone looks at memory
    resource = None  # type: ignore[assignment]

#: Seconds for one run of a model without weights: of the check on a synthetic sample, and of calibration data.
CHECK_SECONDS, CALIBRATION_SECONDS = 8.0, 60.0
#: Bytes of weights (and of calibration data) that are worth another second.
_SECOND = 2_000_000
#: Bytes for the check of a model without weights, and how often weights may be held: twice as fp32, by two sessions
#: each of which copies them four times while it is made.
CHECK_BYTES, COPIES = 700 << 20, 16
#: Address space that each thread of a session takes before it holds anything.
_THREAD = 32 << 20
_POLL = 0.02  # seconds


class OverBudget(ExecutionError):
    """A run that took longer or needed more than its budget."""


@dataclass(frozen=True)
class Budget:
    """``seconds``: of one run. ``memory``: bytes beyond what the process holds when the block begins, None: any."""

    seconds: float
    memory: int | None = None


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


def check_budget(program: Program, seconds: float | None = None, memory: int | None = None) -> Budget:
    """The budget for running ``program`` on a synthetic sample; ``seconds`` and ``memory`` win over what it says."""
    weights = _weights(program)
    return Budget(
        CHECK_SECONDS + weights / _SECOND if seconds is None else seconds,
        CHECK_BYTES + COPIES * weights if memory is None else memory,
    )


def calibration_budget(
    program: Program, batches: Sequence[Mapping[str, Any]], seconds: float | None = None, memory: int | None = None
) -> Budget:
    """The budget for running ``program`` on data that its user gave."""
    data = max((sum(getattr(v, "nbytes", 0) for v in batch.values()) for batch in batches), default=0)
    least = CALIBRATION_SECONDS + (_weights(program) + data) / _SECOND
    return Budget(least if seconds is None else seconds, memory)


def _weights(program: Program) -> int:
    return sum(byte_size(*tensor_type(v.data)) for v in program.variables if v.data is not None)


@contextmanager
def within(budget: Budget) -> Iterator[None]:
    """Runs inside keep to the budget; OverBudget where what is done with their results does not.

    The memory is a limit of the whole process (RLIMIT_DATA, where the system knows it), so that allocations fail
    rather than succeed and take the machine down. Of blocks in several threads the widest counts, and the last that
    ends lifts the limit.
    """
    around = _current.get()
    if around is not None and budget.memory is None:
        budget = Budget(budget.seconds, around.memory)
    with ExitStack() as limited:
        if budget.memory is not None:
            limited.enter_context(_limits.lowered(budget.memory))
        token = _current.set(budget)
        try:
            yield
        except MemoryError:
            if budget.memory is None:
                raise
            raise _over("measuring", _needs(budget.memory)) from None
        finally:
            _current.reset(token)


def unbounded_optimizers() -> list[str]:
    """Optimizers that sessions under a budget do without: folding runs operators while a session is made, where nothing
    can end it."""
    return [] if _current.get() is None else ["ConstantFolding"]


class _Limits:
    """The soft limit of this process' private memory: of the blocks that want one the widest, then what it was."""

    def __init__(self) -> None:
        self.lock, self.open = threading.Lock(), list[int]()
        self.before = -1

    @contextmanager
    def lowered(self, extra: int) -> Iterator[None]:
        """No more than what is in use when the block begins, and ``extra`` bytes."""
        used = _data_size()
        if resource is None or used is None or used + extra >= 2**62:
            yield
            return
        limit = used + extra + _THREAD * (os.cpu_count() or 1)
        with self.lock:
            if not self.open:
                self.before = resource.getrlimit(resource.RLIMIT_DATA)[0]
            self.open.append(limit)
            self._put()
        try:
            yield
        finally:
            with self.lock:
                self.open.remove(limit)
                self._put()

    def _put(self) -> None:
        assert resource is not None
        wanted = [max(self.open)] if self.open else []
        bounds = [limit for limit in (self.before, *wanted) if limit != resource.RLIM_INFINITY]
        soft = min(bounds, default=resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, resource.getrlimit(resource.RLIMIT_DATA)[1]))


_limits = _Limits()


def _data_size() -> int | None:
    """Bytes of private memory of this process, None where the system does not tell."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
    except (OSError, StopIteration, ValueError):
        return None


def available_memory() -> int:
    """Bytes that the machine can still hand out."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 1 << 33


class watched:
    """One run under the current budget: gives its RunOptions, None where there is no budget.

    OverBudget, at the end of the block, where the budget was exceeded; ``what`` is what ran.
    """

    def __init__(self, what: str) -> None:
        self.what, self.budget, self.exceeded = what, _current.get(), ""

    def __enter__(self) -> Any:
        if self.budget is None:
            return None
        self.options = ort.RunOptions()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="budget", daemon=True)
        self.thread.start()
        return self.options

    def _watch(self) -> None:
        assert self.budget is not None
        end = time.monotonic() + self.budget.seconds
        while not self.done.wait(min(_POLL, max(end - time.monotonic(), 0.001))):
            if time.monotonic() >= end:
                self.exceeded = f"it takes longer than {self.budget.seconds:.3g} seconds"
                self.options.terminate = True
                return

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.budget is None:
            return
        self.done.set()
        self.thread.join()
        memory = self.budget.memory
        if error is not None and memory is not None and _out_of_memory(error):
            self.exceeded = _needs(memory)
        if self.exceeded and (error is None or isinstance(error, Exception)):
            raise _over(self.what, self.exceeded) from None


def _needs(memory: int) -> str:
    return f"it needs more than {memory >> 20} MiB of memory"


def _over(what: str, exceeded: str) -> OverBudget:
    return OverBudget(
        f"{what} was ended: {exceeded}, the budget of one run; time_budget and memory_budget "
        "(--time-budget, --memory-budget) raise it"
    )


_NO_MEMORY = ("bad_alloc", "bad allocation", "failed to allocate", "out of memory", "alloc_result")


def _out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY)
