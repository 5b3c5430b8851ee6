"""``python -m amp_transpiler.cli``."""

import atexit
import gc
import sys

from amp_transpiler.cli.main import main

atexit.register(gc.freeze)  # as in amp_transpiler/command
sys.exit(main())
