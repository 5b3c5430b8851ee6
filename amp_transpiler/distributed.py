"""Several ranks that train together: started by ``mpiexec -n N python train.py``, or one alone.

Every rank runs the same program and makes the same calls in the same order. Sums are exact in the order of ranks: all
ranks, and all runs, have the same bits. docs/distributed.md has the whole of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, DistributedError, OrderError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.types import element_type
from amp_transpiler.lists.paddle import add_paddle_names
from amp_transpiler.ops.training.exchange import meets
from amp_transpiler.optimizer.rank_means import holds_variables, reduced_by_hand
from amp_transpiler.option_checks import choice, number, shown
from amp_transpiler.passes.lowering.place import Place, check_place
from amp_transpiler.passes.lowering.planning import plan
from amp_transpiler.passes.lowering.rank_plan import PlanRow, RankPlan
from amp_transpiler.passes.view.training_step import training_step
from amp_transpiler.program import Program, program_of, split_embedding_parameters
from amp_transpiler.runtime.collective import nccl
from amp_transpiler.runtime.collective.arguments import apart
from amp_transpiler.runtime.collective.current import (
    current,
    get_engine,
    is_initialized,
    local_rank,
    of_process,
    rank,
    set_of_process,
    several_launched,
    use_engine,
    world_size,
)
from amp_transpiler.runtime.collective.engine import Engine
from amp_transpiler.runtime.collective.exits import guard
from amp_transpiler.runtime.collective.journal import Exchange, Span, StepExchanges, last_step
from amp_transpiler.runtime.collective.mpi import MPIEngine
from amp_transpiler.runtime.collective.nccl import NcclEngine
from amp_transpiler.runtime.collective.ordered import OrderedEngine
from amp_transpiler.runtime.collective.shares import Batch, batches, shard
from amp_transpiler.runtime.collective.simulated import SimulatedEngine, single_engine
from amp_transpiler.runtime.collective.thread import Work
from amp_transpiler.runtime.collective.trace import traced
from amp_transpiler.runtime.device_tensors import dtype_of
from amp_transpiler.runtime.scope import Scope, check_scope
from amp_transpiler.runtime.shards import found_var, open_sums, owned_state

add_paddle_names(globals())
_Result = TypeVar("_Result")
#: The environment variable for ``init``'s ``timeout``, and its value where neither says.
_TIMEOUT, _SECONDS = "AMP_DISTRIBUTED_TIMEOUT", 600.0


def init(engine: str | Engine = "auto", timeout: float | None = None, place: Place | str | None = None) -> Engine:
    """Makes this process one of several ranks. A second call gives the engine of the first.

    Args:
        engine: ``"mpi"``: the ranks that ``mpiexec`` started, with arrays in memory. ``"nccl"``: likewise, with values
            on a CUDA device each. ``"auto"``: ``"mpi"`` under ``mpiexec``, else one rank alone, for which nothing need
            be installed. An :class:`Engine`: that one.
        timeout: seconds after which a call that waits for other ranks ends with DistributedError; the environment
            variable ``AMP_DISTRIBUTED_TIMEOUT``, or 600, where None.
        place: with ``"nccl"``, the device of this rank: ``CUDAPlace(local_rank())`` where None or "cuda".

    The engine's ``place`` is where this rank trains: ``amp.Executor(engine.place)``. From here on an exception that
    nothing catches ends all ranks, with the message of the one that raised it.

    Raises:
        MissingPackageError: several ranks, and mpi4py or an MPI is missing.
        DistributedError: not all ranks came here in time; or the processes do not see one another.
        OrderError: another engine is there already; :func:`shutdown` ends it.
    """
    if not isinstance(engine, Engine):
        engine = choice("amp.distributed.init: engine", engine, ("auto", "mpi", "nccl"))
    if place is not None and (engine != "nccl" or check_place(place, "amp.distributed.init: place").kind != "cuda"):
        raise ArgumentError(f"amp.distributed.init: place is {place!r}; expected a CUDAPlace, with init('nccl') alone")
    known = of_process()
    if known is not None:
        if engine is not known and engine not in ("auto", known.name):
            named = engine if isinstance(engine, str) else engine.name
            raise OrderError(
                f"amp.distributed runs with the {known.name} engine; call shutdown() before init({named!r})"
            )
        return known
    seconds = _seconds(timeout)
    if isinstance(engine, Engine):
        beside = engine.beside if isinstance(engine, NcclEngine) else engine
        if isinstance(beside, MPIEngine):
            guard(beside)
        made: Engine = engine
    elif engine == "nccl":
        modules = nccl.imported()
        made = NcclEngine(_started(several_launched(), seconds), None if isinstance(place, str) else place, modules)
    else:
        made = _started(engine == "mpi" or several_launched(), seconds)
    set_of_process(made)
    return made


def _started(several: bool, seconds: float) -> OrderedEngine:
    if not several:
        return single_engine(seconds)
    made = MPIEngine(seconds)
    guard(made)
    return made


def _seconds(timeout: float | None) -> float:
    if timeout is None:
        said = os.environ.get(_TIMEOUT)
        try:
            timeout = _SECONDS if not said else float(said)
        except ValueError:
            raise ArgumentError(f"{_TIMEOUT} is {shown(said)}; expected seconds") from None
    number("amp.distributed.init: timeout", timeout)
    return float(timeout)


def shutdown() -> None:
    """Ends the engine of this process; :func:`init` may make another one. Nothing happens where there is none."""
    engine = of_process()
    set_of_process(None)
    if engine is not None:
        engine.close()


def simulate(size: int, function: Callable[[], _Result], timeout: float = 60.0) -> list[_Result]:
    """Calls ``function`` in ``size`` threads, each of which is a rank: for tests, and to try many ranks without MPI.

    Returns what they returned, in the order of ranks. Where one raises, the calls of the others end too, and its error
    is raised here.
    """

    def run(engine: SimulatedEngine) -> _Result:
        with use_engine(engine):
            return function()

    return SimulatedEngine.run(size, run, timeout)


# -- arrays --------------------------------------------------------------------------------------------------------
def all_reduce(array: Any, op: str = "mean", *, precision: str | None = None) -> Any:
    """The mean, sum or max over ranks, in place, of an array or of every array of a list. Returns what it was given.

    float16 and bfloat16 are added in fp32 in the order of ranks and rounded once: :meth:`Engine.all_reduce`.

    Of variables of a program it is appended to the program, and what is returned are new variables: of one, of each in
    a list, or of the gradients in [(parameter, gradient)], as ``optimizer.backward`` gives them. Gradients that are
    means already stay as they are, and ``apply_gradients`` does not reduce again what was reduced here, or was made of
    it. A parameter without a gradient in a list of pairs gets zeros where other ranks have one. ``precision``: the
    element type in which variables travel; for gradients by default that of the optimizer, else their own.

    Raises: ArgumentError: arrays share memory. GradientError: ranks have gradients of other parameters. OrderError: a
    value on a device of which the engine leaves a factor, :meth:`Engine.remaining_factor`.
    """
    engine = get_engine()
    arrays = list(array) if isinstance(array, list | tuple) else [array]
    if holds_variables(arrays):
        travels = None if precision is None else element_type(precision)
        made = reduced_by_hand(arrays, choice("all_reduce: op", op, ("mean", "sum", "max")), travels)
        return made if isinstance(array, list | tuple) else made[0]
    for each in apart("all_reduce", arrays):
        if hasattr(each, "data_ptr") and engine.remaining_factor(dtype_of(each), op) != 1.0:
            raise OrderError(
                f"all_reduce: the {engine.name} engine leaves a factor in {op}s of {dtype_of(each)} over {engine.size} "
                "ranks; call get_engine().all_reduce, and multiply by get_engine().remaining_factor(dtype, op)"
            )
        engine.all_reduce(each, op)
    return array


def all_gather(array: np.ndarray) -> list[np.ndarray]:
    """The arrays of all ranks, in the order of ranks. Their first dimensions may differ."""
    if not isinstance(array, np.ndarray):
        raise ArgumentTypeError(f"all_gather: expected a numpy array, got {type(array).__name__}")
    engine = get_engine()
    whole_array = np.ascontiguousarray(array) if array.ndim else array
    shapes = engine.all_gather_object(list(whole_array.shape))
    sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
    out = np.empty(sum(sizes), array.dtype)
    engine.all_gather(whole_array.reshape(-1), sizes, out)
    ends = np.cumsum([0, *sizes])
    return [out[ends[i] : ends[i + 1]].reshape(shape) for i, shape in enumerate(shapes)]


def broadcast(array: Any, root: int = 0) -> Any:
    """Copies an array, or every array of a list, from rank ``root`` into those of all ranks. Returns what it got."""
    engine = get_engine()
    for each in array if isinstance(array, list | tuple) else [array]:
        engine.broadcast(each, root)
    return array


def barrier() -> None:
    """Waits until every rank has come here."""
    get_engine().barrier()


def all_gather_object(value: Any) -> list[Any]:
    """What every rank gave, in the order of ranks: numbers, texts, lists and dictionaries of them."""
    return get_engine().all_gather_object(value)


# -- state that is dealt out ---------------------------------------------------------------------------------------
def shard_optimizer(optimizer: _Result) -> _Result:
    """Lets each rank keep its share of an optimizer's state: stage 1 of ZeRO (Rajbhandari et al., 2020).

    To be called before ``minimize``, with an optimizer, a decorated one, or a list. Master weights and accumulators
    (moments, velocity) of each parameter lie on one rank, which updates it and sends it to the others behind the step.
    Parameters are dealt out whole, the largest first, so that a rank holds about 1/N of the state. Losses, parameters
    and checkpoints are, bit for bit, what they are without. One rank alone keeps all.

    Returns the optimizer. Tables with sparse gradients, and what has no such state, are updated on every rank.

    Raises: ArgumentTypeError: no optimizer. OrderError: it is built into a program already.
    """
    several = optimizer if isinstance(optimizer, list | tuple) else getattr(optimizer, "optimizers", None)
    if several is not None:
        for each in several:
            shard_optimizer(each)
    elif not hasattr(optimizer, "shard_state"):
        raise ArgumentTypeError(f"shard_optimizer: expected an optimizer or a list of them, got {shown(optimizer)}")
    else:
        optimizer.shard_state = True
    return optimizer


def find_var(name: str, scope: Scope | None = None) -> np.ndarray:
    """A copy of a variable's value in ``scope`` (default: the current one), on whatever rank it lies.

    All ranks call it, and get the value: where it lies on several, that of the first of them; of a table whose rows are
    dealt out, all of it.

    Raises: ScopeError: no rank has it.
    """
    return found_var(name, check_scope(scope))


# -- tables --------------------------------------------------------------------------------------------------------
def shard_tables(tables: Sequence[Variable]) -> None:
    """Deals the rows of embedding tables out among the ranks: row r lies on rank r modulo their number.

    ``tables``: such as ``amp.split_embedding_parameters(program)`` gives. To be called before ``minimize``. Master
    weights and moments lie with their rows. A lookup asks the ranks for the rows that it names, each once; gradients go
    to the rank that has the row, are added up there in fp32 in the order of the ranks, and it alone takes the step. In
    fp32 losses and tables are, bit for bit, those of tables that every rank has whole; checkpoints are in any case. The
    tables are marked sparse (``program.mark_sparse``), and one rank alone keeps all.

    Raises:
        ArgumentError, ArgumentTypeError: no table, or one that something else than lookups of rows reads.
        OrderError: its program has gradients already.
    """
    given = list(tables) if isinstance(tables, Iterable) else tables
    if not isinstance(given, list) or not all(isinstance(table, Variable) for table in given):
        raise ArgumentTypeError(f"shard_tables takes a list of variables, got {shown(given)}; program.var(name) is one")
    known = {table for program in {*map(program_of, given)} for table in split_embedding_parameters(program)[0]}
    for table in given:
        if table not in known:
            raise ArgumentError(
                f"shard_tables: '{table.name}' is no parameter that lookups of rows alone read, as those are that "
                "amp.split_embedding_parameters(program) gives first"
            )
        if any(v.grad_of is not None for v in table.program.variables):
            raise OrderError(
                f"program '{table.program.name}' has gradients already; deal its tables out before minimize"
            )
    for table in given:
        table.sparse = True
        if world_size() > 1:
            table.dealt = world_size()
        table.program.touch()


# -- programs ------------------------------------------------------------------------------------------------------
def check_equal(program: Program, scope: Scope | None = None) -> None:
    """Finds out whether all ranks hold the same state of ``program`` in ``scope`` (default: the current one).

    Compared are hashes of parameters, master weights, moments and all that the training step writes, but not running
    statistics that each rank takes of its own examples, sums of an open window of accumulation, and state that one rank
    alone holds. To be called now and then, such as every 1,000 steps.

    Raises:
        DistributedError: a rank holds other values; variables and ranks are named.
    """
    engine, scope = get_engine(), check_scope(scope)
    apart = [*owned_state(program), *open_sums(program, scope)]
    own = {*_statistics(program), *(v.name for v in apart), *scope.dealt}
    states = [v.name for v in program.variables if v.persistable and v.name not in own and scope.has_var(v.name)]
    hashes = {name: hashlib.sha256(np.ascontiguousarray(scope.find_var(name)).tobytes()).hexdigest() for name in states}
    of_all = engine.all_gather_object(hashes)
    differ = {
        name: [number for number, of_rank in enumerate(of_all) if of_rank.get(name) != of_all[0].get(name)]
        for name in dict.fromkeys(name for of_rank in of_all for name in of_rank)
    }
    wrong = {name: ranks for name, ranks in differ.items() if ranks}
    if wrong:
        some = "; ".join(f"'{name}' on rank {', '.join(map(str, ranks))}" for name, ranks in list(wrong.items())[:5])
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise DistributedError(
            f"the ranks do not hold the same state of program '{program.name}': other than rank 0 is {some}{more}. "
            "Seed their startup programs alike, or load one checkpoint on all of them"
        )


def step_report() -> StepExchanges:
    """What the last step of this rank exchanged with other ranks: bytes, seconds, and how much of it while computing::

        exe.run(program, feed, [loss])
        print(amp.distributed.step_report())

    An ``amp.StepReports`` in the fetch list has the same in its reports, and in the lines and files of these.
    OrderError where this rank has not run a step that exchanges anything.
    """
    found = last_step(current())
    if found is None:
        raise OrderError("step_report: this rank has run no step that exchanges gradients with others")
    return found


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Writes what the steps inside do when, of all ranks, to one file: ``with amp.distributed.trace("trace.json"):``.

    All ranks enter and leave; rank 0 writes. The file has the format of onnxruntime's profiler, which
    https://ui.perfetto.dev and ``chrome://tracing`` draw: for each rank one row with the sessions that it runs and its
    waits, and one with its exchanges. Hosts are shown on their own clocks. Nothing is written where the block raises.

    Raises: OrderError before :func:`init`. ModelFileWriteError: the file cannot be written.
    """
    with traced(get_engine(), path):
        yield


def broadcast_statistics(program: Program, scope: Scope | None = None) -> None:
    """Running statistics of each rank's own become those of rank 0 on all ranks, as checkpoints have them.

    To be called before an evaluation that the ranks share, or where a training is to end as one that was resumed.
    """
    engine, scope = get_engine(), check_scope(scope)
    for name in _statistics(program):
        value = np.array(scope.find_var(name))
        engine.broadcast(value)
        scope.set_var(name, value)


def _statistics(program: Program) -> list[str]:
    """The names of running statistics of each rank's own, and of what they were before a window, in their order."""
    apart = [op for op in program.operators if not meets(op)]
    found = {v for op in apart for slot in traits_of(op).statistics if (v := op.input(slot)) is not None}
    before = training_step(program).before_window
    return [v.name for v in program.variables if v in found or before.get(v) in found]


__all__ = [
    "Batch",
    "Engine",
    "Exchange",
    "MPIEngine",
    "NcclEngine",
    "PlanRow",
    "RankPlan",
    "SimulatedEngine",
    "Span",
    "StepExchanges",
    "Work",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "batches",
    "broadcast",
    "broadcast_statistics",
    "check_equal",
    "find_var",
    "get_engine",
    "init",
    "is_initialized",
    "local_rank",
    "plan",
    "rank",
    "shard",
    "shard_optimizer",
    "shard_tables",
    "shutdown",
    "simulate",
    "step_report",
    "trace",
    "use_engine",
    "world_size",
]
