"""What each operator means: gradient rules and bodies. Importing this package fills the operator table."""

from . import (
    activation,
    clip,
    conv,
    elementwise,
    evaluation,
    initializers,
    loss,
    matmul,
    movement,
    norm,
    pool,
    random,
    reduce,
    resize,
    scaling,
    update,
)

__all__ = [
    "activation",
    "conv",
    "elementwise",
    "evaluation",
    "initializers",
    "loss",
    "matmul",
    "movement",
    "norm",
    "pool",
    "random",
    "reduce",
    "resize",
    "scaling",
    "update",
    "clip",
]
