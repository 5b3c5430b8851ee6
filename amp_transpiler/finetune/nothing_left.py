"""The error where nothing of a model is trained, and what it may lie in."""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.errors import ArgumentError
from amp_transpiler.finetune.left_out import integers_left
from amp_transpiler.program import Program

#: Trees, linear models and support vector machines, as converters of scikit-learn and others write them.
_ML, _LEARNED = "ai.onnx.ml", ("Linear", "SVM", "TreeEnsemble")


def check_trained(call: str, program: Program, trainable: Sequence[str] | None, freeze: Sequence[str]) -> None:
    """ArgumentError where no parameter is left to train."""
    if not program.parameters:
        said = "".join(f". {one}" for one in (*integers_left(program), *_learned_in_attributes(program)))
        raise ArgumentError(
            f"{call}: no parameter of program '{program.name}' is left to train (trainable={trainable!r}, "
            f"freeze={freeze!r}){said}"
        )


def _learned_in_attributes(program: Program) -> list[str]:
    """Say which operators hold what they learned in attributes."""
    learned = [op for op in program.walk() if op.domain == _ML and op.type.startswith(_LEARNED)]
    types = ", ".join(dict.fromkeys(op.type for op in learned))
    told = f"The weights of {types} are attributes, which are not trained: fit the model anew where it comes from"
    return [told] * bool(types)
