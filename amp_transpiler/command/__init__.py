"""The ``amp-transpile`` command from its first import on; a wheel has it as a package of its own, ``amp_transpile``.

Importing ``amp_transpiler`` takes a second, and nothing inside of it could catch a Ctrl-C that comes meanwhile.
"""

import sys

try:
    from amp_transpiler.cli import main
except KeyboardInterrupt:
    print("amp-transpile: interrupted; nothing was written", file=sys.stderr)
    sys.exit(130)

__all__ = ["main"]
