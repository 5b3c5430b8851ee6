"""When ranks exchange what: the parts of a lowered step, and the exchanges between them.

A *send* is what leaves at the end of one part. What other exchanges wait for leaves as soon as it is made, what stands
equally deep together; what nothing waits for (gradients) leaves in buckets. Each part computes what the next send needs
and no earlier one did, and what gradients need as soon as it can be; the last one, what depends on exchanges that
nothing else depends on. So a send travels until the first part that reads of it. Where that is the very next part, and
much travels, a part in between takes what can be computed meanwhile.

All ranks send the same in the same order: it is decided by what stands before what, by the order of the nodes, and by
sizes that are those of all ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

#: Bytes of a bucket, about, as in torch's DistributedDataParallel; and buckets at most.
BUCKET, MOST = 25 * 2**20, 4
#: Bytes of a send, and nodes to be computed meanwhile, from which on a part of their own is worth its time.
MUCH, WORK = 2**18, 16


@dataclass(frozen=True)
class Rounds:
    """The part of each node; of an exchange (by its node) the number of its send, and the part after which it leaves.

    Parts are numbered from 0 on, and none is empty.
    """

    part: Sequence[int]
    send: Mapping[int, int]
    parts: int


def rounds(
    reads: Sequence[Sequence[int]],
    sizes: Mapping[int, int],
    uneven: Container[int] = (),
    late: Container[int] = (),
) -> Rounds:
    """``reads``: the nodes from which each node reads, all before it; ``sizes``: the bytes that those send which are
    exchanges, in the order of all ranks, ``uneven`` ones other bytes on each. An exchange reads what a node that is
    none has made.

    ``late``: nodes that wait for the last exchange, unless one needs them; new state may lie where the old one does,
    and where an exchange fails nothing is to have changed.
    """
    deep, feeds = _depths(reads, sizes), _feeding(reads, sizes)
    sends = _sends({i: 0 if i in uneven else size for i, size in sizes.items()}, deep, feeds)
    send = {i: number for number, members in enumerate(sends) for i in members}
    part = _parts(reads, send, feeds, len(sends), late)
    for number, members in enumerate(sends):
        if sum(sizes[i] for i in members) >= MUCH:
            _take_along(2 * number, members, reads, send, part)
    used = sorted({at for i, at in enumerate(part) if i not in sizes})
    return Rounds([bisect_right(used, at) - 1 for at in part], send, len(used))


def _depths(reads: Sequence[Sequence[int]], exchanges: Mapping[int, int]) -> list[int]:
    """How many exchanges stand one behind the other before each node."""
    deep: list[int] = []
    for of_node in reads:
        deep.append(max((deep[j] + (j in exchanges) for j in of_node), default=0))
    return deep


def _feeding(reads: Sequence[Sequence[int]], exchanges: Mapping[int, int]) -> list[bool]:
    """Whether an exchange depends on each node."""
    feeds = [False] * len(reads)
    for i in reversed(range(len(reads))):
        if feeds[i] or i in exchanges:
            for j in reads[i]:
                feeds[j] = True
    return feeds


def _sends(sizes: Mapping[int, int], deep: Sequence[int], feeds: Sequence[bool]) -> list[list[int]]:
    """What leaves together, in order. Of an operator's gradients the last ones are made first."""
    groups: dict[int, list[int]] = {}
    for i in reversed(list(sizes)):
        groups.setdefault(deep[i] if feeds[i] else -1, []).append(i)
    sends = [send for members in groups.values() for send in _buckets(members, sizes)]
    return sorted(sends, key=lambda send: (max(deep[i] for i in send), not feeds[send[0]]))


def _buckets(members: Sequence[int], sizes: Mapping[int, int]) -> list[list[int]]:
    """Exchanges in parts of about as many bytes."""
    total = sum(sizes[i] for i in members)
    share = max(1, -(-total // min(MOST, max(1, round(total / BUCKET)))))
    found: dict[int, list[int]] = {}
    for i, end in zip(members, accumulate(sizes[i] for i in members), strict=True):
        found.setdefault((end - sizes[i]) // share, []).append(i)
    return list(found.values())


def _parts(
    reads: Sequence[Sequence[int]],
    send: Mapping[int, int],
    feeds: Sequence[bool],
    sends: int,
    late: Container[int],
) -> list[int]:
    """The part of each node: 2 s where send s is the first one that needs it, 2 ``sends`` for the last part."""
    last = 2 * sends
    part = [2 * send[i] if i in send else last for i in range(len(reads))]
    first = dict.fromkeys(send, last)  # of an exchange: the first part that needs what it gives
    for i in reversed(range(len(reads))):
        for j in reads[i]:
            if j in send:
                first[j] = min(first[j], part[i])
            else:
                part[j] = min(part[j], part[i])
    urgent = {2 * number for i, number in send.items() if feeds[i]}
    for i, of_node in enumerate(reads):
        there = [first[j] if j in send else part[j] for j in of_node]
        if i in send:
            continue
        if not feeds[i]:  # no sooner than what it reads is there, and no later
            part[i] = last if i in late else max(there, default=0)
        elif there and part[i] not in urgent and max(there) in urgent:
            part[i] = max(there)  # of a gradient, whose bucket may leave much later: what it reads need not be kept
    return part


def _take_along(
    now: int, members: Sequence[int], reads: Sequence[Sequence[int]], send: Mapping[int, int], part: list[int]
) -> None:
    """Let the part behind ``now`` take what can be computed while these exchanges travel, if the next one waits."""
    travelling = set(members)
    asked = {j for i, of_node in enumerate(reads) if part[i] <= now for j in of_node if j in send}
    if now + 2 not in {part[i] for i, of_node in enumerate(reads) if not travelling.isdisjoint(of_node)}:
        return
    taken: set[int] = set()
    for i, of_node in enumerate(reads):
        if i not in send and part[i] > now + 1:
            if all(j in asked if j in send else part[j] <= now + 1 or j in taken for j in of_node):
                taken.add(i)
    if len(taken) >= WORK:
        for i in taken:
            part[i] = now + 1
