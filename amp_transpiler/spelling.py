"""One word for each mode and element type, and the other spellings that are read as it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

#: Element types by their short names, and by those of C and torch.
TYPES = {
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "bf16": "bfloat16",
    "half": "float16",
    "float": "float32",
    "double": "float64",
}
#: Modes by the words of earlier versions.
MODES = {"pure-fp16": "pure", "pure_fp16": "pure", "amp": "mixed", "float32": "fp32"}

#: Options by the words that other tools have for them.
OPTIONS = {
    "learning_rate": "lr",
    "grad_clip": "clip_norm",
    "max_grad_norm": "clip_norm",
    "accumulate_steps": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    "num_train_epochs": "epochs",
    "bs": "batch_size",
    "device": "place",
    "provider": "place",
    "precision": "mode",
    "early_stopping_patience": "patience",
    "early_stopping": "patience",
    "early_stopping_threshold": "min_delta",
    "metric_for_best_model": "monitor",
    "load_best_model_at_end": "restore_best_weights",
    "save_best_only": "restore_best_weights",
    "keep_best": "restore_best_weights",
    "label_smoothing_factor": "label_smoothing",
    "smoothing": "label_smoothing",
}


def read_as(spellings: Mapping[str, str], word: Any) -> Any:
    """The one word that ``word`` is a spelling of, in any letter case; what is no string as it is."""
    return spellings.get(word.lower(), word.lower()) if isinstance(word, str) else word


def near_names(name: object, known: Iterable[str], before: str = "") -> str:
    """``did you mean 'x'?`` for a misspelt name, behind what comes ``before``; "" where no known one comes near."""
    by_case = {other.casefold().lstrip("-"): other for other in known}  # what options begin with is no likeness
    near = [by_case[match] for match in difflib.get_close_matches(str(name).casefold().lstrip("-"), by_case, 3)]
    return f"{before}did you mean {', '.join(map(repr, near))}?" if near else ""


def near_options(name: str, known: Iterable[str], before: str = "") -> str:
    """:func:`near_names` for an option; the one that another tool calls so, where there is one."""
    by_word = {other.lstrip("-").replace("-", "_"): other for other in known}
    meant = by_word.get(OPTIONS.get(name.casefold().lstrip("-").replace("-", "_"), ""))
    return near_names(name, by_word.values(), before) if meant is None else f"{before}did you mean {meant!r}?"
