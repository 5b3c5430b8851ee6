"""Ranks with a CUDA device each: NCCL, through nccl4py, carries and adds what lies on the devices.

Beside it goes an engine for memory, MPI's where there are several ranks. It starts the ranks, hands out NCCL's unique
id, compares what calls the ranks make, carries small objects and numpy arrays, and finds ranks that fail; so there is
one way to start, and one place that knows of faults.

NCCL adds 16-bit floats in 16 bit on most ways that it may take. Here each addend is first multiplied by
2^-ceil(log2 N), which is exact short of subnormal numbers, so that no partial sum leaves the range;
:meth:`NcclEngine.remaining_factor` is what is left to multiply by. Of a mean of wider floats each addend is multiplied
by 1 / N, and nothing is left.

Sessions compute on one stream and NCCL works on another, which waits for what stands before a mark on the first. The
first never waits for the second: what reads a sum is given to the device once the sum is known to be there. So a sum
that never comes, or that a fault has cut short, is read by nothing, and no state is updated with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, DistributedError, MissingPackageError, PlaceError
from amp_transpiler.ir.types import FLOATS, HALF, numpy_dtype
from amp_transpiler.option_checks import counted
from amp_transpiler.passes.lowering.place import CUDAPlace, Place
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.collective import arguments, headers
from amp_transpiler.runtime.collective.engine import Engine
from amp_transpiler.runtime.collective.ordered import OrderedEngine
from amp_transpiler.runtime.collective.thread import Work
from amp_transpiler.runtime.collective.transport import Pending, TransportError, done_in_time

_Result = TypeVar("_Result")
#: NCCL's results that are no errors: success, and a call that goes on.
_WELL = (0, 7)
#: Element types that NCCL knows.
_TYPES = FLOATS | {"int8", "uint8", "int32", "uint32", "int64", "uint64"}


def imported() -> tuple[Any, Any]:
    """nccl4py's module and that of CUDA devices. MissingPackageError where they are not installed."""
    try:
        import cuda.core  # noqa: PLC0415 - optional packages
        import nccl.core  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackageError(
            f"several ranks on CUDA need nccl4py and NCCL: pip install 'amp-transpiler[nccl,mpi]' ({error})"
        ) from None
    return nccl.core, cuda.core


class _OnStream(Pending):
    """What is on its way on a stream."""

    def __init__(self, communicator: Any, event: Any) -> None:
        self._communicator, self._event = communicator, event

    def wait(self, seconds: float) -> bool:
        return done_in_time(self._is_done, seconds)

    def _is_done(self) -> bool:
        if self._event.is_done:
            return True
        result = int(self._communicator.get_async_error())
        if result not in _WELL:
            raise TransportError(f"NCCL says {self._communicator.get_last_error() or result}")
        return False


class NcclEngine(Engine):
    """Ranks with a CUDA device each. Arrays are onnxruntime values on it; numpy's go through the engine beside it.

    Every call ends when its work on the device has, so that the next session may read what came. Integers other than
    int32, int64, uint32 and uint64 are not reduced. All ranks get the same bits of a sum.

    Args:
        beside: the engine that starts the ranks and finds faults.
        place: the device; where None, the one whose number is that of this rank among those on its host, counted round
            where a rank sees fewer.
        modules: nccl4py's and cuda.core, where they shall not be imported.

    Raises: MissingPackageError without nccl4py.
    """

    name = "nccl"

    def __init__(
        self, beside: OrderedEngine, place: Place | None = None, modules: tuple[Any, Any] | None = None
    ) -> None:
        self._nccl, self._cuda = modules or imported()
        self.beside, self.rank, self.size = beside, beside.rank, beside.size
        self.timeout, self.peers = beside.timeout, beside.peers
        self.place = self._checked_place(place)
        self._scaled: dict[tuple[str, float], Any] = {}
        beside.on_thread(self._connect)

    def _checked_place(self, place: Place | None) -> Place:
        me = f"rank {self.rank} of the nccl engine"
        try:
            count = len(self._cuda.Device.get_all_devices())
        except Exception as error:  # of several packages, which load NVIDIA's libraries when they are first used
            raise PlaceError(f"{me} finds no CUDA device: {error}") from None
        place = place or CUDAPlace(self.local_rank % max(1, count))
        if place.device_id >= count:
            raise PlaceError(f"{me} is to be on {place!r}, and finds {counted(count, 'CUDA device')}")
        return place

    def _connect(self) -> None:
        device = self._device()
        self._compute, self._travel = device.create_stream(), device.create_stream()
        self._channel = int(self._travel.handle)
        mine = bytes(self._nccl.get_unique_id()).hex() if self.rank == 0 else ""
        unique = self._nccl.UniqueId.from_bytes(bytes.fromhex(self.beside.all_gather_object(mine)[0]))
        self._communicator: Any = self._nccl.Communicator.init(self.size, self.rank, unique)

    def _device(self) -> Any:
        """The device, as that on which the calling thread works."""
        device = self._cuda.Device(self.place.device_id)
        device.set_current()
        return device

    # -- calls -------------------------------------------------------------------------------------------------
    def all_reduce(self, array: Any, op: str = "sum") -> Any:
        if isinstance(array, np.ndarray):
            return self.beside.all_reduce(array, op)
        dtype, length = self._checked("all_reduce", array)
        arguments.operation("all_reduce", op, dtype)
        self._run(
            headers.Call(0, "all_reduce", op, dtype, length=length),
            lambda to: length and to.allreduce(array, array, self._operator(dtype, op), stream=self._channel),
        )
        return array

    def reduce_scatter(self, array: Any, sizes: Sequence[int], op: str = "sum") -> Any:
        if isinstance(array, np.ndarray):
            return self.beside.reduce_scatter(array, sizes, op)
        dtype, length = self._checked("reduce_scatter", array)
        arguments.operation("reduce_scatter", op, dtype)
        given = arguments.sizes_of("reduce_scatter", sizes, self.size, length)
        parts = _split(array, given)

        def issue(to: Any) -> None:
            operator = self._operator(dtype, op)
            if len(set(given)) == 1 and length:
                to.reduce_scatter(array, parts[self.rank], operator, stream=self._channel)
                return
            with self._nccl.group():
                for root, part in enumerate(parts):
                    if given[root]:
                        to.reduce(part, part, operator, root, stream=self._channel)

        check = headers.check_sum(given)
        self._run(headers.Call(0, "reduce_scatter", op, dtype, length=length, check=check), issue)
        return parts[self.rank]

    def all_gather(self, part: Any, sizes: Sequence[int], out: Any) -> Any:
        if isinstance(out, np.ndarray):
            return self.beside.all_gather(part, sizes, out)
        dtype, length = self._checked("all_gather: out", out)
        given = arguments.sizes_of("all_gather", sizes, self.size, length)
        if self._checked("all_gather: part", part) != (dtype, given[self.rank]):
            raise ArgumentError(
                f"all_gather: the part of rank {self.rank} is {device_tensors.dtype_of(part)}{list(part.shape())}; "
                f"sizes and out say {dtype}[{given[self.rank]}]"
            )
        places = _split(out, given)

        def issue(to: Any) -> None:
            if len(set(given)) == 1 and length:
                to.allgather(part, out, stream=self._channel)
                return
            with self._nccl.group():
                for root, place in enumerate(places):
                    if given[root]:
                        to.broadcast(part if root == self.rank else place, place, root, stream=self._channel)

        check = headers.check_sum(given)
        self._run(headers.Call(0, "all_gather", "", dtype, length=given[self.rank], check=check), issue)
        return out

    def all_to_all(self, parts: Sequence[Any]) -> list[Any]:
        if all(isinstance(part, np.ndarray) for part in parts):
            return self.beside.all_to_all(parts)
        shapes = [list(part.shape()) for part in parts]
        kinds = {(self._checked("all_to_all", part)[0], tuple(part.shape()[1:])) for part in parts}
        if len(parts) != self.size or len(kinds) != 1 or not all(shapes):
            raise ArgumentError(
                f"all_to_all: expected {self.size} parts of one type and one shape but for the first dimension; "
                f"got {len(parts)} of {sorted(map(str, kinds))}"
            )
        ((dtype, tail),) = kinds

        def run() -> list[Any]:
            lengths = self.beside.all_gather_object([shape[0] for shape in shapes])
            come = [device_tensors.empty([row[self.rank], *tail], dtype, self.place) for row in lengths]

            def issue(to: Any) -> None:
                with self._nccl.group():
                    for peer in range(self.size):
                        if math.prod(shapes[peer]):
                            to.send(parts[peer], peer, stream=self._channel)
                        if math.prod(come[peer].shape()):
                            to.recv(come[peer], peer, stream=self._channel)

            check = headers.check_sum(tail)
            own = math.prod(shapes[self.rank])
            self._run(headers.Call(0, "all_to_all", "", dtype, length=own, check=check), issue)
            return come

        return self.beside.on_thread(run)

    def broadcast(self, array: Any, root: int = 0) -> Any:
        if isinstance(array, np.ndarray):
            return self.beside.broadcast(array, root)
        dtype, length = self._checked("broadcast", array)
        root = arguments.rank_of("broadcast", root, self.size)
        self._run(
            headers.Call(0, "broadcast", "", dtype, root, length),
            lambda to: length and to.broadcast(array, array, root, stream=self._channel),
        )
        return array

    def broadcast_each(self, arrays: Sequence[Sequence[Any]]) -> None:
        pairs = [(root, array) for root, of_rank in enumerate(arrays) for array in of_rank]
        if any(isinstance(array, np.ndarray) for _, array in pairs):
            super().broadcast_each(arrays)
            return
        sizes = [
            numpy_dtype(dtype).itemsize * count
            for dtype, count in (self._checked("broadcast", array) for _, array in pairs)
        ]

        def issue(to: Any) -> None:
            with self._nccl.group():
                for (root, array), size in zip(pairs, sizes, strict=True):
                    if size:
                        to.broadcast(array, array, root, stream=self._channel)

        check = headers.check_sum(sizes)
        self._run(headers.Call(0, "broadcast", "", "uint8", length=sum(sizes), check=check), issue)

    def barrier(self) -> None:
        self.beside.barrier()

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.beside.all_gather_object(value)

    def agree(self, value: Any) -> bool:
        return self.beside.agree(value)

    def submit(self, call: Callable[[], _Result]) -> Work[_Result]:
        return self.beside.submit(call)

    def remaining_factor(self, dtype: str, op: str) -> float:
        return 1.0 if op == "max" else 1 / self._factor(dtype, op) / (self.size if op == "mean" else 1)

    # -- beside sessions ---------------------------------------------------------------------------------------
    def on(self, place: Place) -> Engine:
        if place == self.place:
            return self
        if place.kind == "cpu":
            return self.beside
        raise PlaceError(
            f"rank {self.rank} of the nccl engine is on {self.place!r}, and trains on no other device: give the "
            "executor amp.distributed.get_engine().place, or init('nccl', place=...) another one"
        )

    @property
    def stream(self) -> int:
        return int(self._compute.handle)

    def mark(self) -> Any:
        self._device()
        return self._compute.record()

    def follow(self, mark: Any) -> None:
        if mark is not None:
            self._travel.wait(mark)

    def finish(self) -> None:
        self._compute.sync()

    # -- in the thread -----------------------------------------------------------------------------------------
    def _run(self, call: headers.Call, issue: Callable[[Any], object]) -> None:
        """Has all ranks agree on the call, issues it, and waits for its end on the device."""

        def run() -> None:
            try:
                made = self.beside.begin(call)[self.rank]
                issue(self._communicator)
                self.beside.wait(_OnStream(self._communicator, self._travel.record()), made)
                volume = self._volume(call)
                self.beside.count(volume, volume)
            except Exception as error:
                if not isinstance(error, DistributedError):  # NCCL's, of this rank alone: the others would wait
                    self.beside.abort(f"raised {type(error).__name__}: {error}")
                self._communicator.abort()
                raise

        self.beside.on_thread(run)

    def _volume(self, call: headers.Call) -> int:
        """Bytes that a rank sends in a call, and as many that it receives, where NCCL goes along rings."""
        size, others = call.length * numpy_dtype(call.dtype).itemsize, self.size - 1
        if call.kind in ("all_reduce", "reduce_scatter"):
            return size * others // self.size * (2 if call.kind == "all_reduce" else 1)
        return size * others if call.kind == "all_gather" else size

    @property
    def sent(self) -> int:  # type: ignore[override]
        return self.beside.sent

    @property
    def received(self) -> int:  # type: ignore[override]
        return self.beside.received

    def _factor(self, dtype: str, op: str) -> float:
        """By what each addend is multiplied."""
        if dtype in HALF:
            return 2.0 ** -math.ceil(math.log2(self.size))
        return 1 / self.size if op == "mean" else 1.0

    def _operator(self, dtype: str, op: str) -> Any:
        if op == "max":
            return self._nccl.MAX
        factor = self._factor(dtype, op)
        if factor == 1.0:
            return self._nccl.SUM
        if (dtype, factor) not in self._scaled:
            kind = getattr(self._nccl, dtype.upper())
            self._scaled[dtype, factor] = self._communicator.create_pre_mul_sum(factor, kind)
        return self._scaled[dtype, factor]

    def _checked(self, called: str, value: Any) -> tuple[str, int]:
        """Element type and number of elements of a value on the device."""
        if not hasattr(value, "data_ptr"):
            raise ArgumentTypeError(
                f"{called}: expected an onnxruntime value or a numpy array, got {type(value).__name__}"
            )
        if value.device_name() != self.place.kind:
            raise ArgumentError(f"{called}: the value is on {value.device_name()}; this engine has {self.place}")
        dtype = device_tensors.dtype_of(value)
        if dtype not in _TYPES:
            raise ArgumentTypeError(f"{called}: NCCL does not know {dtype}; give floats, int32 or int64")
        return dtype, math.prod(value.shape())

    # -- the end -----------------------------------------------------------------------------------------------
    def abort(self, message: str) -> None:
        self.beside.abort(message)

    def close(self) -> None:
        if self.beside.fault() is None and not self.beside.closed:
            self.beside.submit(self._communicator.destroy).wait()
        self.beside.close()


def _split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Views of the parts of a value; the value itself stands for one without elements."""
    ends = np.cumsum([0, *sizes])
    return [device_tensors.view(value, int(ends[i]), [size]) if size else value for i, size in enumerate(sizes)]
