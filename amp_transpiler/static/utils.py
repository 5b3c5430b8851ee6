"""``paddle.utils``, of which programs use ``unique_name``."""

from amp_transpiler.lists.paddle import paddle_attributes

__getattr__ = paddle_attributes("amp_transpiler.static.utils")
__all__: list[str] = []
