"""``python -m amp_transpiler.cli``."""

import sys

from amp_transpiler.cli.main import main
from amp_transpiler.ir.gc_pause import leave_at_exit

leave_at_exit()
sys.exit(main())
