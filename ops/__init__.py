"""What each operator means: gradient rules and bodies. Importing this package fills the operator table."""

from . import (
    elementwise,
    evaluation,
    initializers,
    random,
)

__all__ = [
    "elementwise",
    "evaluation",
    "initializers",
    "random",
]
