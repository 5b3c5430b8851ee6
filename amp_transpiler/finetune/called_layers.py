"""Which readers of a parameter are calls of one layer, where no names tell.

A layer that is called several times reads the same weights each time. Those that have a content of their own are shared
by nobody else: the bias beside them is one for all calls, and so are the scale and shift of a norm that stands between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping

from amp_transpiler.finetune.layer_names import called, is_vector, uniform
from amp_transpiler.ir.copies import only_moves, unmoved
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.program import Program

Use = tuple[Operator, int]
#: What is equal for all calls of a layer, and the products beside it, of which each call has its own.
_Told = tuple[Hashable, frozenset[Operator]]
#: Operators between a norm and the weights before or behind it: a norm that is written out has ten.
_BETWEEN = 16


class Calls:
    """The products of a program by weights that several of them read, and what stands beside them.

    ``turns``: what is equal for the copies of an operator in all turns of a loop that was unrolled, as
    ``expand_control_flow`` gives it.
    """

    def __init__(self, program: Program, turns: Mapping[Operator, Hashable]) -> None:
        weights = {op: held for op in program.operators if (held := _weights(op)) is not None}
        self._times = Counter(weights.values())
        several = {held for held, times in self._times.items() if times > 1 and not uniform(held)}
        self._weights = {op: held for op, held in weights.items() if held in several}
        self._turns = turns

    def joined(self, layers: list[list[Use]]) -> list[list[Use]]:
        """The readers of a parameter, those together that are known to be calls of one layer, with more put together:
        what all turns of a loop read, what stands beside the same weights, and what stands before or behind them."""
        modules = called(op for layer in layers for op, _ in layer)
        direct = {use: told for layer in layers for use in layer if (told := self._beside(use, modules[use[0]]))}

        def between(ahead: bool) -> Callable[[Use], _Told | None]:
            return lambda use: None if use in direct else self._nearest(use, ahead, modules[use[0]])

        for tells in (self._turn, direct.get, between(True), between(False)):
            layers = self._join(layers, tells)
        return layers

    def _join(self, layers: list[list[Use]], tells: Callable[[Use], _Told | None]) -> list[list[Use]]:
        """Put layers together of which the same is told, but for what stands beside one product several times, or
        would be called more often than the weights beside it."""
        layer_of = {use: layer for layer in layers for use in layer}
        alike: dict[Hashable, dict[Use, frozenset[Operator]]] = {}
        for use in layer_of:
            if (found := tells(use)) is not None:
                alike.setdefault(found[0], {})[use] = found[1]
        for products in alike.values():
            together = list({id(layer_of[use]): layer_of[use] for use in products}.values())
            uses = [use for layer in together for use in layer]
            beside = frozenset[Operator]().union(*products.values())
            times = min((self._times[self._weights[op]] for op in beside), default=len(uses))
            if len(together) > 1 and sum(map(len, products.values())) == len(beside) and len(uses) <= times:
                layer_of |= dict.fromkeys(uses, uses)
        return list({id(layer): layer for layer in layer_of.values()}.values())

    def _turn(self, use: Use) -> _Told | None:
        turn = self._turns.get(use[0])
        return None if turn is None else ((turn, use[1]), frozenset())

    def _beside(self, use: Use, module: str) -> _Told | None:
        """The weights of the product that reads the parameter too, or that made what it meets."""
        op, slot = _user(*use)
        product: Operator | None = op
        if op not in self._weights:
            others = [v for place, v in enumerate(op.inputs) if place != slot and v is not None]
            product = unmoved(others[0]).producer if traits_of(op).elementwise and len(others) == 1 else None
        weights = None if product is None else self._weights.get(product)
        return None if weights is None or product is None else ((weights, module), frozenset([product]))

    def _nearest(self, use: Use, ahead: bool, module: str) -> _Told | None:
        """The weights of the first products that read what is made with the parameter, or that made what meets it."""
        op, slot = _user(*use)
        level, seen = [op], {op}
        for hops in range(_BETWEEN if self._weights else 0):
            beyond = [near for each in level for near in (_readers(each) if ahead else _makers(each))]
            beyond = [near for near in dict.fromkeys(beyond) if near not in seen]
            seen.update(beyond)
            if found := frozenset(near for near in beyond if near in self._weights):
                place = slot if slot in traits_of(op).weights else -1
                return (hops, op.type, place, module, frozenset(self._weights[near] for near in found)), found
            level = [near for near in beyond if not traits_of(near).product]
        return None


def _weights(op: Operator) -> Variable | None:
    """What a product reads of parameters beside a bias, perhaps moved."""
    if not traits_of(op).product:
        return None
    roots = [unmoved(v) for v in op.inputs if v is not None]
    held = [v for v in roots if v.persistable and v.data is not None and not is_vector(v)]
    return held[0] if len(held) == 1 else None


def _user(op: Operator, slot: int) -> Use:
    """The operator that computes with a parameter, past those that move it."""
    while only_moves(op, slot):
        readers = op.outputs[0].readers if op.outputs[0] is not None else []
        if len(readers) != 1 or isinstance(readers[0][1], str):
            break
        op, slot = readers[0][0], int(readers[0][1])
    return op, slot


def _makers(op: Operator) -> Iterable[Operator]:
    return [v.producer for v in op.inputs if v is not None and v.producer is not None]


def _readers(op: Operator) -> Iterable[Operator]:
    return [reader for v in op.outputs if v is not None for reader, _ in v.readers]
