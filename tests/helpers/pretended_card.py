"""Shows onnxruntime a graphics card where only software Vulkan is.

A plugin gets the devices that onnxruntime finds in ``/sys/class/drm``, and software Vulkan has none there. A process in a
mount namespace of its own sees a card, and the plugin then runs on whatever Vulkan device there is:
``python -m tests.helpers.pretended_card COMMAND ...`` runs a command there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
at=/sys/class; [ -d /sys/class/drm ] && at=/sys/class/drm
mount -t tmpfs none $at && mkdir -p /sys/class/drm/card0/device || exit 125
echo 0x1002 > /sys/class/drm/card0/device/vendor
echo 0x73bf > /sys/class/drm/card0/device/device
exec "$@"
"""


def real_card() -> bool:
    """Whether the machine has a graphics card of its own."""
    return any(Path("/sys/class/drm").glob("card*/device/vendor"))


def with_card(command: list[str]) -> list[str] | None:
    """A command that runs ``command`` where a card is to be seen; None where the machine allows no such thing."""
    if real_card():
        return command
    if shutil.which("unshare") is None:
        return None
    flags = "-m" if os.geteuid() == 0 else "-rm"
    shown = ["unshare", flags, "sh", "-c", _SCRIPT, "sh"]
    if subprocess.run([*shown, "true"], capture_output=True).returncode:
        return None
    return [*shown, *command]


if __name__ == "__main__":
    command = with_card(sys.argv[1:])
    if command is None:
        sys.exit("This machine lets no card be pretended: unshare -m needs root, or user namespaces.")
    os.execvp(command[0], command)
