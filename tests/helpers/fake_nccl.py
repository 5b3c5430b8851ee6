"""A stand-in for nccl4py and CUDA streams: takes calls by nccl4py's recorded signatures, writes them down, and carries them
out between threads on values in memory, adding 16-bit floats in 16 bit from rank to rank as a ring does."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

import amp_transpiler as amp
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.collective.current import use_engine
from amp_transpiler.runtime.collective.nccl import NcclEngine
from amp_transpiler.runtime.collective.simulated import SimulatedEngine

RECORD = json.loads((Path(__file__).resolve().parents[1] / "data" / "nccl4py.json").read_text(encoding="utf-8"))
#: The streams on which sessions compute, and on which NCCL works.
COMPUTE, CHANNEL = 55, 77
Result = TypeVar("Result")
SIGNATURES = {
    name: inspect.Signature(
        [
            inspect.Parameter(n, inspect._ParameterKind[k], default=None if d else inspect.Parameter.empty)
            for n, k, d in ps
        ]
    )
    for name, ps in RECORD["calls"].items()
}


class Wire:
    """What joins the stand-ins of all ranks: where they meet, and what they have in hand."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.meeting = threading.Barrier(size)
        self.held: dict[int, Any] = {}

    def swap(self, rank: int, mine: Any) -> list[Any]:
        """What every rank has in hand."""
        self.meeting.wait(10)
        self.held[rank] = mine
        self.meeting.wait(10)
        found = [self.held[each] for each in range(self.size)]
        self.meeting.wait(10)
        return found


def memory(value: Any) -> np.ndarray:
    """The memory of an onnxruntime value as an array."""
    return device_tensors.shared_array(value)


class Stream:
    """A stream of cuda.core. ``log`` of the fake has what is asked of that on which sessions compute."""

    def __init__(self, fake: Fake, handle: int) -> None:
        self.fake, self.handle = fake, handle

    def record(self) -> Event:
        event = Event(self)
        if self.handle == COMPUTE:
            self.fake.log.append(("mark", event.number))
        return event

    def wait(self, event: Event) -> None:
        assert (self.handle, event.stream.handle) == (CHANNEL, COMPUTE), "what is computed waits for no exchange"
        self.fake.log.append(("follow", event.number))

    def sync(self) -> None:
        assert self.handle == COMPUTE, "an exchange that hangs is not waited for"
        self.fake.log.append(("finish",))


class Event:
    """What was recorded on a stream; of that on which sessions compute, they are numbered."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.number = 1 + sum(entry[0] == "mark" for entry in stream.fake.log)

    @property
    def is_done(self) -> bool:
        """Whether all work before it is."""
        return not self.stream.fake.stuck

    def sync(self) -> None:
        """Waits for that."""
        self.stream.fake.log.append(("sync", self.number))


class Fake:
    """The two modules of one rank. ``log`` has each call: its name, and each array as its bytes' offset and count."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank = wire, rank
        self.log: list[tuple[Any, ...]] = []
        self.stuck, self.error = False, 0
        self.grouped: list[tuple[Any, ...]] | None = None
        self.bases: dict[int, str] = {}
        fake = self

        class Communicator:
            """Calls by the recorded signatures alone."""

            def __getattr__(self, name: str) -> Any:
                return lambda *a, **k: fake.call(f"Communicator.{name}", *a, **k)

            @staticmethod
            def init(*arguments: Any, **named: Any) -> Any:
                fake.call("Communicator.init", *arguments, **named)
                return Communicator()

        constants = {name: name for name in RECORD["constants"]}
        self.nccl = SimpleNamespace(
            get_unique_id=lambda *a, **k: self.call("get_unique_id", *a, **k),
            UniqueId=SimpleNamespace(from_bytes=lambda *a, **k: self.call("UniqueId.from_bytes", *a, **k)),
            Communicator=Communicator,
            group=lambda *a, **k: self.call("group", *a, **k),
            **constants,
        )
        handles = iter((COMPUTE, CHANNEL))

        class Device(SimpleNamespace):
            """One of two."""

            def __init__(self, number: int) -> None:
                super().__init__(device_id=number, set_current=lambda: None)

            def create_stream(self) -> Stream:
                return Stream(fake, next(handles))

            @staticmethod
            def get_all_devices() -> tuple[Any, ...]:
                return Device(0), Device(1)

        self.cuda = SimpleNamespace(Device=Device)

    def watch(self, name: str, value: Any) -> Any:
        """Names a value in the log."""
        self.bases[value.data_ptr()] = name
        return value

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        bound = SIGNATURES[name].bind(*arguments, **named).arguments
        short = name.rpartition(".")[2]
        if short != "get_async_error":
            self.log.append((short, *(self.shown(value) for value in bound.values())))
        if short in ("allreduce", "reduce_scatter", "reduce", "allgather", "broadcast", "send", "recv"):
            assert bound.pop("stream") == CHANNEL
            if self.grouped is None:
                self.carry([(short, bound)])
            else:
                self.grouped.append((short, bound))
            return None
        return getattr(self, f"_{short}")(**bound)

    def shown(self, value: Any) -> Any:
        if not hasattr(value, "data_ptr"):
            return value
        base = max((b for b in self.bases if b <= value.data_ptr()), default=None)
        if base is None or value.data_ptr() - base > 1 << 12:
            return f"{device_tensors.dtype_of(value)}{list(value.shape())}"
        size = memory(value).itemsize
        return f"{self.bases[base]}[{(value.data_ptr() - base) // size}:+{memory(value).size}]"

    # -- what the calls do ---------------------------------------------------------------------------------------
    def _get_unique_id(self) -> bytes:
        return b"unique" * 3

    def _from_bytes(self, b: bytes) -> bytes:
        assert b == b"unique" * 3
        return b

    def _init(self, nranks: int, rank: int, unique_id: bytes) -> None:
        assert (nranks, rank, unique_id) == (self.wire.size, self.rank, b"unique" * 3)

    @contextmanager
    def _group(self) -> Iterator[None]:
        self.grouped = []
        yield
        calls, self.grouped = self.grouped, None
        self.carry(calls)

    def _create_pre_mul_sum(self, scalar: float, datatype: str) -> tuple[float, str]:
        return scalar, datatype

    def _get_async_error(self) -> int:
        return self.error

    def _get_last_error(self) -> str:
        return "unhandled system error"

    def _abort(self) -> None:
        self.wire.meeting.abort()

    def _destroy(self) -> None:
        pass

    def carry(self, calls: list[Any]) -> None:
        if self.stuck:
            return
        sends = [(b["peer"], memory(b["sendbuf"]).copy()) for kind, b in calls if kind == "send"]
        if any(kind in ("send", "recv") for kind, _ in calls):
            rows = self.wire.swap(self.rank, sends)
            for kind, bound in calls:
                if kind == "recv":
                    ((found),) = [array for peer, array in rows[bound["peer"]] if peer == self.rank]
                    memory(bound["recvbuf"])[...] = found
            return
        for kind, bound in calls:
            rows = self.wire.swap(self.rank, memory(bound["sendbuf"]).copy())
            target = memory(bound["recvbuf"])
            if kind == "broadcast":
                target[...] = rows[bound["root"]]
            elif kind == "allgather":
                target[...] = np.concatenate(rows)
            elif kind == "reduce_scatter":
                target[...] = self.added(rows, bound["op"]).reshape(self.wire.size, -1)[self.rank]
            elif kind == "allreduce" or bound["root"] == self.rank:
                target[...] = self.added(rows, bound["op"])

    def added(self, rows: list[np.ndarray], op: Any) -> np.ndarray:
        """In the type itself, as a ring's hops do."""
        with np.errstate(all="ignore"):
            if op == "MAX":
                return np.maximum.reduce(rows)
            factor = rows[0].dtype.type(1 if op == "SUM" else op[0])
            total = rows[0] * factor
            for row in rows[1:]:
                total = (total + row * factor).astype(rows[0].dtype)
            return total


class FakeDevice(amp.CPUPlace):
    """A device whose memory is that of the host, so that sessions compute on it; another place than ``CPUPlace()``."""

    def __repr__(self) -> str:
        return "FakeDevice()"


def on_devices(
    ranks: int, function: Callable[[NcclEngine, Fake], Result], timeout: float = 30, place: Place | None = None
) -> list[Result]:
    """What ``function`` gives on every rank of an NCCL engine over the stand-in, which trains there."""
    wire = Wire(ranks)

    def run(beside: SimulatedEngine) -> Result:
        fake = Fake(wire, beside.rank)
        engine = NcclEngine(beside, place or FakeDevice(), (fake.nccl, fake.cuda))
        with use_engine(engine):
            return function(engine, fake)

    return SimulatedEngine.run(ranks, run, timeout)
