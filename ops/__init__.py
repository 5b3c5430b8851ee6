"""What each operator means: gradient rules and lowering rules. Importing this package fills the operator table."""

from importlib import import_module
from pkgutil import walk_packages

for _module in walk_packages(__path__, f"{__name__}."):  # each registers what it has rules for
    import_module(_module.name)
