"""The ``amp-transpile`` command from its first import on; a wheel has it as a package of its own, ``amp_transpile``.

Importing ``amp_transpiler`` takes a second, and nothing inside of it could end quietly on a Ctrl-C or a SIGTERM that
comes then (``stops.py`` has what they end with afterwards). Nor would it do to catch KeyboardInterrupt here: numpy
and others make an ImportError of it.
"""

import os
import signal
import sys

#: As in runtime/collective/mpi.py, which takes too long to import here.
_RANKS = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def _quit(number: int, frame: object) -> None:
    if next((os.environ[name] for name in _RANKS if name in os.environ), "0") == "0":  # of several ranks one speaks
        word = b"interrupted" if number == signal.SIGINT else b"terminated"
        os.write(2, b"amp-transpile: %s; nothing was written\n" % word)
    os._exit(128 + number)


_defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_usual = [each for each in _defaults if signal.getsignal(each) is _defaults[each]]  # else the caller has it ignored
for _signal in _usual:
    signal.signal(_signal, _quit)
from amp_transpiler.cli.main import COMMANDS, load, main
from amp_transpiler.ir.gc_pause import leave_at_exit

for _command in COMMANDS.keys() & sys.argv[1:2]:
    load(_command)
for _signal in _usual:
    signal.signal(_signal, _defaults[_signal])
leave_at_exit()

__all__ = ["main"]
