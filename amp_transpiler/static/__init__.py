"""``paddle.static`` by its own names: a Paddle script runs with ``import amp_transpiler as paddle``.

Every name is one of this package, by the table ``lists/paddle_names.toml``; one that is not offered says what to use.
"""

from amp_transpiler.lists.paddle import paddle_attributes
from amp_transpiler.static import amp, utils

__getattr__ = paddle_attributes("amp_transpiler.static")
__all__ = ["amp", "utils"]
