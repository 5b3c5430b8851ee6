"""The interface of engines: what several ranks do together, with arrays in memory or on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.runtime.collective.thread import Work
from amp_transpiler.runtime.collective.transport import Peer

_Result = TypeVar("_Result")


class Engine(ABC):
    """Carries arrays between ranks. Every rank makes the same calls, in the same order.

    The calls of one engine run one after the other in its own thread, in the order in which they were made or
    submitted; those that block wait for that. ``engine.submit(lambda: engine.all_reduce(a))`` returns at once, and the
    caller computes meanwhile; it must not touch the array before ``wait()``.

    Arrays are C-contiguous. Engines for CPU take numpy's (float16, ml_dtypes' bfloat16, float32, float64, integers,
    bool) and onnxruntime values in memory; what they make themselves is numpy's. :class:`NcclEngine` takes values on
    its CUDA device.

    Attributes:
        name: ``"mpi"``, ``"nccl"``, ``"simulated"`` or ``"single"``.
        rank: the number of this rank, from 0 on.
        size: the number of ranks.
        timeout: seconds after which a call that waits for other ranks ends with DistributedError.
        peers: host and process number of every rank.
        sent, received: bytes to and from other ranks so far; on NCCL those of rings.
        place: where its values lie: the place of this rank's executor.

    Raises (every call): DistributedError, where a rank died, hangs, raised, or made another call than the others; the
    engine can then do nothing more. ArgumentError, ArgumentTypeError: arrays that cannot be used.
    """

    name: str
    rank: int
    size: int
    timeout: float
    peers: tuple[Peer, ...]
    place: Place
    sent: int = 0
    received: int = 0

    @property
    def local_rank(self) -> int:
        """The number of this rank among those on its host, from 0 on."""
        host = self.peers[self.rank].host
        return sum(peer.host == host for peer in self.peers[: self.rank])

    @abstractmethod
    def all_reduce(self, array: Any, op: str = "sum") -> Any:
        """The sum, mean or max (``op``) over the ranks, in place. Returns the array.

        Floats of 16 bit are added in fp32 in the order of the ranks and rounded once; wider ones in their own type in
        the same order. So all ranks, and all runs, have the same bits. No partial sum overflows, and the mean of finite
        values is finite. Infinity and NaN of any rank show in the result. Integers wrap. bool takes ``max`` alone.

        Where :meth:`remaining_factor` is not 1, the result is still to be multiplied by it.
        """

    @abstractmethod
    def reduce_scatter(self, array: Any, sizes: Sequence[int], op: str = "sum") -> Any:
        """Reduces as :meth:`all_reduce`, but each rank gets its own part alone: ``sizes[rank]`` elements.

        The parts lie one behind the other in the array. Returns the view of the own one, reduced in place; what the
        other parts hold afterwards is not said.
        """

    @abstractmethod
    def all_gather(self, part: Any, sizes: Sequence[int], out: Any) -> Any:
        """Puts the parts of all ranks, ``sizes[rank]`` elements each, one behind the other into ``out``; returns it.

        ``part`` may be the view of ``out`` where it belongs.
        """

    @abstractmethod
    def all_to_all(self, parts: Sequence[Any]) -> list[Any]:
        """Sends ``parts[j]`` to rank j; returns new arrays with what each rank sent here.

        The parts have one element type and the same shape but for the first dimension, which may be 0; the ranks
        exchange these lengths first.
        """

    @abstractmethod
    def broadcast(self, array: Any, root: int = 0) -> Any:
        """Copies the array of rank ``root`` into that of every rank; returns it."""

    def broadcast_each(self, arrays: Sequence[Sequence[Any]]) -> None:
        """Copies ``arrays[r]``, those of rank r, into those of every rank; on a device as one call."""
        for root, of_rank in enumerate(arrays):
            for array in of_rank:
                self.broadcast(array, root)

    @abstractmethod
    def barrier(self) -> None:
        """Waits until every rank has come here."""

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """What every rank gave, in the order of ranks: small values that JSON can hold."""

    def agree(self, value: Any) -> bool:
        """Whether every rank gave the same value, which JSON can hold."""
        return all(each == value for each in self.all_gather_object(value))

    @abstractmethod
    def submit(self, call: Callable[[], _Result]) -> Work[_Result]:
        """Runs ``call``, which may use this engine, in the engine's thread, after all that was submitted before."""

    def remaining_factor(self, dtype: str, op: str) -> float:
        """By what a result of :meth:`all_reduce` or :meth:`reduce_scatter` is still to be multiplied.

        1 for engines on CPU. An engine that must keep 16-bit partial sums from overflowing makes them smaller by a
        power of two; whoever unscales gradients takes this factor along, in fp32 and at no cost.
        """
        return 1.0

    @abstractmethod
    def on(self, place: Place) -> Engine:
        """The engine for values on a place: this one, or one for memory beside it. PlaceError where there is none."""

    @property
    def stream(self) -> int:
        """The number of the CUDA stream on which sessions compute what this engine exchanges; 0: there is none."""
        return 0

    @abstractmethod
    def mark(self) -> Any:
        """An event behind all that sessions were given so far to compute on :attr:`stream`; None: it is computed."""

    @abstractmethod
    def follow(self, mark: Any) -> None:
        """Exchanges nothing, in the calls that come, before what stands before the mark is computed."""

    @abstractmethod
    def finish(self) -> None:
        """Waits until all that sessions were given to compute on :attr:`stream` is."""

    @abstractmethod
    def abort(self, message: str) -> None:
        """Tells every other rank that this one cannot go on: their calls end with an error that says ``message``."""

    @abstractmethod
    def close(self) -> None:
        """Waits for what was submitted and gives back what the engine holds. Nothing can be called after it."""
