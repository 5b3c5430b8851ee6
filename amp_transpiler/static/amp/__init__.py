"""``paddle.static.amp`` by its own names, all of them names of this package; ``bf16`` holds those for bfloat16."""

from amp_transpiler.lists.paddle import paddle_attributes
from amp_transpiler.static.amp import bf16

__getattr__ = paddle_attributes("amp_transpiler.static.amp")
__all__ = ["bf16"]
