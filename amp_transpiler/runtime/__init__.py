"""Running programs: places, scopes, executors, and the parameters and models that live in them."""

from .executor import Executor, MemoryReport
from .place import CPUPlace, CUDAPlace
from .scope import Scope, global_scope, scope_guard

__all__ = ["CPUPlace", "CUDAPlace", "Executor", "MemoryReport", "Scope", "global_scope", "scope_guard"]
