"""How operators at which ranks meet are written: what they call, and how a rule emits them.

::

    @exchange(own("AllGatherRows"), on_device=True)
    def all_gather(ranks, sent, received, attrs):
        ranks.all_gather(sent[0], [sent[0].size] * ranks.size, received[0])

    [everything] = exchanged(e, "AllGatherRows", [rows], [(ranks * count, width)])

Nothing else is to be done: a lowered step is cut into sessions at each node of such a type, wherever it stands, and
what does not wait for it runs meanwhile (``passes/lowering/exchanges.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.exchange_call import ORDER, Call, Exchange
from amp_transpiler.ir.metadata import BY_RANKS, SYNCHRONIZED
from amp_transpiler.ir.node_protos import emitted_node
from amp_transpiler.ir.nodes import OWN, Operator
from amp_transpiler.ir.opdef import entry, traits, traits_of
from amp_transpiler.ops.training.branches import as_tensor, emulating


def exchange(
    full_type: str,
    *,
    in_place: bool = False,
    joined: bool = False,
    uneven: bool = False,
    on_device: bool = False,
) -> Callable[[Call], Call]:
    """Register the decorated function as what ranks do at an operator of a lowered step: an engine's call, no more.

    Every rank has as many such nodes, in the same order. The rest: :class:`~amp_transpiler.ir.exchange_call.Exchange`.
    """

    def register(call: Call) -> Call:
        entry(full_type).exchange = Exchange(call, in_place, joined, uneven, on_device)
        traits(full_type, meets=True)
        return call

    return register


def meets(op: Operator) -> bool:
    """Whether ranks exchange something in an operator of a program."""
    return traits_of(op).meets or op.metadata.get(SYNCHRONIZED) == BY_RANKS


def exchanged(
    e: Emitter, type_: str, values: Sequence[Value], shapes: Sequence[Sequence[int]] | None = None, **attrs: Any
) -> list[Value]:
    """Emit one exchange: what is received for values of fixed shapes, each in the element type of its value.

    ``shapes``: of what is received for the first values; by default for all of them those that they have. A 16-bit
    value travels as such also where 16 bit is emulated.
    """
    held = [as_tensor(e, value) for value in values]
    with e.emulation(False):
        sent = [e.cast(tensor, value.dtype) for tensor, value in zip(held, values, strict=True)]
    sizes = [value.shape for value in values] if shapes is None else [tuple(shape) for shape in shapes]
    made = [Value(e.name(type_), value.dtype, shape) for value, shape in zip(values, sizes, strict=False)]
    attrs |= {ORDER: len(e.foreign)}  # grows with each exchange
    e.nodes.append(emitted_node(type_, [v.name for v in sent], [v.name for v in made], OWN, attrs))
    # A 16-bit tensor that is emulated has no shape of its own.
    e.foreign += (Value(each.name, each.dtype, value.shape) for each, value in zip(sent, values, strict=True))
    e.foreign += made
    e.domains.add(OWN)
    likes = [Value(value.name, value.dtype, each.shape) for value, each in zip(values, made, strict=False)]
    return [emulating(e, each, like) for each, like in zip(made, likes, strict=True)]
