"""``python -m amp_transpiler.cli``."""

import sys

from .main import main

sys.exit(main())
