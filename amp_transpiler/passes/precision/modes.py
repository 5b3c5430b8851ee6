"""The precision passes of training as one, by mode."""

from __future__ import annotations

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.pipeline import Context, Pass, Property, Value, option
from amp_transpiler.passes.precision.pure import cast_model_to_fp16
from amp_transpiler.passes.precision.rewrite import rewrite_program
from amp_transpiler.passes.view.given import LISTS

#: A training program that has its precision already: what both have runs alike, and names may be missing.
LIKE: Value[Graph] = Value("like", Graph)
#: Names of the variables that enter the 16-bit part of a pure program.
NARROWED: Value[set[str]] = Value("narrowed", set)


class Precision(Pass):
    """Every operator gets a precision, by the lists or in pure 16 bit, and casts are inserted where types meet.

    ``guard``: in pure mode only operators that ``fp16_guard`` marks. ``numeric_guards``: what is known to leave the
    type stays fp32. The lists are the defaults, changed by the options.
    """

    name = "precision"
    needs = (Property.TYPED, Property.FORWARD)
    takes = (LISTS, LIKE)
    guarantees = (Property.PRECISION, NARROWED)

    mode: str = option("mixed", "mixed", "pure")
    dtype: str = option("float16", "float16", "bfloat16")
    guard: bool = False
    numeric_guards: bool = False
    white_list: tuple[str, ...] = ()
    black_list: tuple[str, ...] = ()
    black_varnames: tuple[str, ...] = ()

    def run(self, graph: Graph, context: Context) -> None:
        lists, like = self._lists(context), context.get(LIKE)
        context[NARROWED] = set()
        if self.mode == "mixed":
            rewrite_program(graph, lists, names_must_exist=like is None, numeric_guards=self.numeric_guards, like=like)
        else:
            context[NARROWED] = cast_model_to_fp16(
                graph, lists, self.guard, names_must_exist=like is None, numeric_guards=self.numeric_guards, like=like
            )

    def _lists(self, context: Context) -> AutoMixedPrecisionLists:
        given = context.get(LISTS)
        if given is None:
            return AutoMixedPrecisionLists(self.white_list, self.black_list, self.black_varnames, self.dtype)
        if self.white_list or self.black_list or self.black_varnames or self.dtype not in ("float16", given.dtype):
            raise ArgumentError(f"{LISTS.name}= says the type and the lists of precision; leave its options out")
        return given
