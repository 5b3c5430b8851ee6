"""What to say where onnxruntime fails in a run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from amp_transpiler.option_checks import listed
from amp_transpiler.runtime.session import plain_message


def by_data(decided: Sequence[str]) -> str:
    """What to say where a run failed in which data decide the sizes of these tensors."""
    return f". Data decide the size of '{decided[0]}': what is fed to go with it has to fit" if decided else ""


def half_done(names: Sequence[str]) -> str:
    """What to say where a run failed that updates these variables in place."""
    if not names:
        return ""
    return f". Variables that are updated in place may have been updated before it failed: {listed(names)}"


def failure(error: Exception) -> str:
    """onnxruntime's message, with what usually is behind it."""
    text = plain_message(error)
    if re.search(r"out of (data )?bounds|out of range|invalid index", text, re.IGNORECASE):
        what = "the number of classes, or of a table's rows"
        text = f"{text.rstrip('.')}. Probably a fed label or index is below 0 or not below {what}"
    if "cuDNN is unavailable" in text:
        text = f"{text.rstrip('.')}. Install it: onnxruntime-gpu[cuda,cudnn]"
    if "Too many storage buffers" in text:
        text = f"{text.rstrip('.')}. A tensor of many MiB takes several; if one is, feed smaller batches"
    if re.search(r"device (was|is) lost", text, re.IGNORECASE):
        text = f"{text.rstrip('.')}. What lay on the GPU is gone with it: start anew, from the last checkpoint"
    return text
