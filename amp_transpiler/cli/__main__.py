"""``python -m amp_transpiler.cli``."""

import sys

from amp_transpiler.cli.main import main

sys.exit(main())
