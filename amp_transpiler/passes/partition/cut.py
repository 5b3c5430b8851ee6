"""The assignment of precisions with the least traffic, as a minimum cut. See :func:`solve`.

The source side of the cut is 16 bit, the sink side fp32. An operator hangs on both with what the other choice costs.
A tensor brings two auxiliary nodes, one a direction: "somebody reads it in fp32", to which its producer pays the cast
when that is 16 bit, and "somebody reads it in 16 bit", the same the other way. So a tensor with many readers pays one
cast a direction. Only what is contested goes into the network. This is the cut of Greig, Porteous and Seheult (1989)
with the auxiliary nodes of Kohli's robust potentials (2009).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads its parts where they are used: only a conversion needs them

HALF, FULL = True, False

#: Largest sum of capacities that goes into the solver: it counts in int32 and wraps silently.
_LIMIT = 2**30
#: Of how many units a capacity is decided anew, where it was rounded to a unit.
_FEW = 2**10


@dataclass(slots=True)
class Tensor:
    """A tensor that operators exchange.

    ``producer``: index of the free operator in whose precision it is made, or HALF or FULL where that is fixed.
    ``readers``: indices of the free operators that read it in their own precision. ``read_half``, ``read_full``:
    whether something fixed reads it in 16 bit, in fp32. ``cast``: bytes that one cast of it moves.
    """

    producer: int | bool
    readers: list[int]
    read_half: bool
    read_full: bool
    cast: int


@dataclass(frozen=True)
class Cut:
    """A least assignment: ``half`` by operator, its traffic in bytes, and whether it went unrounded to the solver.

    ``bound``: the traffic that no assignment goes below; ``value`` itself where ``exact``. ``rounding`` says how
    capacities were rounded.
    """

    half: list[bool]
    value: int
    bound: int
    exact: bool = True
    rounding: str = ""


def traffic(costs: Sequence[tuple[int, int]], tensors: Sequence[Tensor], half: Sequence[bool]) -> int:
    """Bytes that operators and casts move where ``half`` says which operators run in 16 bit."""
    total = sum(cost[not chosen] for cost, chosen in zip(costs, half, strict=True))
    for tensor in tensors:
        made = tensor.producer if isinstance(tensor.producer, bool) else half[tensor.producer]
        other = tensor.read_full if made else tensor.read_half
        if other or any(half[reader] != made for reader in tensor.readers):
            total += tensor.cast
    return total


def traffic_of(costs: Sequence[tuple[int, int]], tensors: Iterable[Tensor], side: bool) -> int:
    """:func:`traffic` where all operators run in 16 bit, or in fp32."""
    total = sum(cost[not side] for cost in costs)
    for tensor in tensors:
        fixed = isinstance(tensor.producer, bool)
        made = tensor.producer if fixed else side
        if (tensor.read_full if made else tensor.read_half) or (fixed and made != side and tensor.readers):
            total += tensor.cast
    return total


def solve(costs: Sequence[tuple[int, int]], tensors: Sequence[Tensor]) -> Cut:
    """The assignment of 16 bit or fp32 to operators that moves the fewest bytes; among equals, the most 16 bit.

    Args:
        costs: bytes that each free operator moves in 16 bit and in fp32.
        tensors: the tensors between them.

    Capacities are divided by their greatest common divisor. Where their sum is still beyond the solver's integers
    they are rounded down, and ``rounding`` gives the largest loss. What rounding leaves little or nothing of is decided
    anew then, the rest given: beside images, scalars would all be ties.
    """
    region, inside = _contested(costs, tensors)
    half = [True] * len(costs)
    if not region:
        value = traffic_of(costs, tensors, HALF)
        return Cut(half, value, value)
    network = _Network([costs[index] for index in region], inside)
    for index, chosen in zip(region, network.cut(), strict=True):
        half[index] = chosen
    if network.lost:
        small = _small(costs, tensors, region, _FEW * network.scale)
        if 0 < len(small) < len(costs):
            for index, chosen in zip(small, solve(*_given(costs, tensors, small, half)).half, strict=True):
                half[index] = chosen
    value = traffic(costs, tensors, half)
    if not network.lost:
        return Cut(half, value, value)
    rounding = f"capacities rounded down by less than {network.scale:,} bytes each, {network.lost:,} in all"
    return Cut(half, value, max(value - network.lost, 0), False, rounding)


def _contested(costs: Sequence[tuple[int, int]], tensors: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
    """The operators that may be better off in fp32, and the tensors among them in numbers of their own.

    All others run in 16 bit in a least assignment: those that no chain of tensors joins to anything that draws to fp32,
    and those that cost more in fp32 than all casts around them together, which end such chains.
    """
    draws = any(tensor.cast and (tensor.read_full or tensor.producer is FULL) for tensor in tensors)
    if not draws and all(half <= full for half, full in costs):
        return [], []
    around, meets = [0] * len(costs), [list[int]() for _ in costs]
    drawn: list[int] = []
    ends = [{*tensor.readers, *_free(tensor)} if tensor.cast else set() for tensor in tensors]
    for number, (tensor, free) in enumerate(zip(tensors, ends, strict=True)):
        for index in free:
            around[index] += tensor.cast
            meets[index].append(number)
        if tensor.read_full or tensor.producer is FULL:
            drawn += free
    found = {index for index in drawn if costs[index][1] - costs[index][0] < around[index]}
    found |= {index for index, (half, full) in enumerate(costs) if half > full}
    pending, met = list(found), set[int]()
    while pending:
        for number in meets[pending.pop()]:
            if number in met:
                continue
            met.add(number)
            near = {i for i in ends[number] - found if costs[i][1] - costs[i][0] < around[i]}
            found |= near
            pending += near
    region = sorted(found)
    place = {index: i for i, index in enumerate(region)}
    inside = []
    for tensor in (tensors[number] for number in sorted(met)):
        producer = tensor.producer if isinstance(tensor.producer, bool) else place.get(tensor.producer, HALF)
        readers = [place[reader] for reader in tensor.readers if reader in place]
        read_half = tensor.read_half or len(readers) < len(tensor.readers)
        inside.append(Tensor(producer, readers, read_half, tensor.read_full, tensor.cast))
    return region, inside


def _small(costs: Sequence[tuple[int, int]], tensors: Sequence[Tensor], region: list[int], below: int) -> list[int]:
    """Operators of the region that neither cost as much, nor meet a tensor of which a cast does."""
    large = {index for index in region if abs(costs[index][0] - costs[index][1]) >= below}
    for tensor in tensors:
        if tensor.cast >= below:
            large.update(tensor.readers, _free(tensor))
    return [index for index in region if index not in large]


def _given(
    costs: Sequence[tuple[int, int]], tensors: Sequence[Tensor], some: list[int], half: Sequence[bool]
) -> tuple[list[tuple[int, int]], list[Tensor]]:
    """The problem of some operators, where the others are as ``half`` says."""
    place = {index: i for i, index in enumerate(some)}
    inside = []
    for tensor in tensors:
        met = {*tensor.readers, *_free(tensor)}
        if place.keys().isdisjoint(met):
            continue
        fixed = isinstance(tensor.producer, bool)
        producer = tensor.producer if fixed else place.get(tensor.producer, half[tensor.producer])
        others = {half[reader] for reader in tensor.readers if reader not in place}
        readers = [place[reader] for reader in tensor.readers if reader in place]
        read_half, read_full = tensor.read_half or HALF in others, tensor.read_full or FULL in others
        inside.append(Tensor(producer, readers, read_half, read_full, tensor.cast))
    return [costs[index] for index in some], inside


def _free(tensor: Tensor) -> tuple[int, ...]:
    return () if isinstance(tensor.producer, bool) else (tensor.producer,)


class _Network:
    """The flow network: node 0 the source (16 bit), 1 the sink (fp32), then operators, then two nodes a tensor."""

    def __init__(self, costs: Sequence[tuple[int, int]], tensors: Sequence[Tensor]) -> None:
        self.operators = len(costs)
        self.nodes = 2 + len(costs)
        self.edges: list[tuple[int, int, int]] = []
        #: Edges that no cut may sever.
        self.binding: list[tuple[int, int]] = []
        for index, (half, full) in enumerate(costs, 2):  # the smaller of the two is paid in any case
            self._edge(0, index, full - min(half, full))
            self._edge(index, 1, half - min(half, full))
        for tensor in tensors:
            self._tensor(tensor)
        capacities = [capacity for _, _, capacity in self.edges]
        self.scale = _scale(capacities)
        scaled = [capacity // self.scale for capacity in capacities]
        self.lost = sum(capacities) - self.scale * sum(scaled)
        infinite = sum(scaled) + 1
        values = np.array(scaled + [infinite] * len(self.binding), np.int64)
        ends = np.array([edge[:2] for edge in self.edges] + self.binding, np.int64).reshape(-1, 2)
        graph = scipy.sparse.csr_array((values, (ends[:, 0], ends[:, 1])), shape=(self.nodes, self.nodes))
        graph.data = np.minimum(graph.data, infinite)  # parallel edges were added up
        self.graph = scipy.sparse.csr_array(
            (graph.data.astype(np.int32), graph.indices.astype(np.int32), graph.indptr.astype(np.int32)),
            shape=graph.shape,
        )

    def _edge(self, tail: int, head: int, capacity: int) -> None:
        if capacity > 0:
            self.edges.append((tail, head, capacity))

    def _tensor(self, tensor: Tensor) -> None:
        fixed = isinstance(tensor.producer, bool)
        producer = int(not tensor.producer) if fixed else tensor.producer + 2
        readers = [reader + 2 for reader in dict.fromkeys(tensor.readers) if reader + 2 != producer or fixed]
        if tensor.cast == 0:
            return
        if producer != 1:  # made in 16 bit, read in fp32
            self._direction(producer, readers, tensor.read_full, tensor.cast, up=True)
        if producer != 0:  # made in fp32, read in 16 bit
            self._direction(producer, readers, tensor.read_half, tensor.cast, up=False)

    def _direction(self, producer: int, readers: list[int], fixed: bool, cast: int, *, up: bool) -> None:
        """Edges that cost ``cast`` where the producer is on one side and any reader on the other."""

        def ordered(maker: int, reader: int) -> tuple[int, int]:
            return (maker, reader) if up else (reader, maker)

        if fixed:  # the free readers ride for nothing on the cast that the fixed one needs
            self._edge(*ordered(producer, 1 if up else 0), cast)
        elif len(readers) == 1:
            self._edge(*ordered(producer, readers[0]), cast)
        elif readers:
            node, self.nodes = self.nodes, self.nodes + 1
            self._edge(*ordered(producer, node), cast)
            self.binding.extend(ordered(node, reader) for reader in readers)

    def cut(self) -> list[bool]:
        """Operators that cannot reach the sink in the residual network: the largest 16-bit side."""
        flow = scipy.sparse.csgraph.maximum_flow(self.graph, 0, 1, method="dinic").flow
        residual = (self.graph - flow).tocsr()
        residual.eliminate_zeros()
        backwards = residual.T.tocsr()
        full = np.zeros(self.nodes, bool)
        reached = scipy.sparse.csgraph.breadth_first_order(backwards, 1, directed=True, return_predecessors=False)
        full[reached] = True
        return [not bool(side) for side in full[2 : 2 + self.operators]]


def _scale(capacities: list[int]) -> int:
    """What to divide capacities by: their common divisor where that is enough, else as much as makes them fit."""
    divisor, total = max(math.gcd(*capacities), 1), sum(capacities)
    return divisor if total // divisor < _LIMIT else -(-total // (_LIMIT - 1))
