"""What each operator means: gradient rules and bodies. Importing this package fills the operator table."""

from . import elementwise

__all__ = ["elementwise"]
