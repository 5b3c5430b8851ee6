"""Checkpoints gone wrong: forged with checksums that fit, or damaged byte by byte; loading changes all or nothing."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path

import amp_transpiler as amp
from tests.fuzz.bytes import damaged
from tests.fuzz.commands import raised
from tests.helpers.checkpoints import build, state
from tests.helpers.forgeries import forgeries


def wrong(rng: random.Random, folder: Path) -> str:
    """What is wrong with how a bad checkpoint is loaded; "" where nothing is. ``folder`` is made and removed."""
    net = build()
    scope = net.start()
    good = amp.save_checkpoint(folder / "good", net.main, scope)
    net.train(scope, 0, 1)
    before = state(net.main, scope)
    made = forgeries(good, seed=rng.randrange(1000))
    found = ""
    for number in range(20):
        bad = shutil.copytree(good, folder / str(number))
        if rng.random() < 0.6:
            rng.choice(made).make(bad)
        else:
            file = rng.choice(sorted(path for path in bad.iterdir() if path.is_file()))
            file.write_bytes(damaged(file.read_bytes(), rng))
        loaded: list[object] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = raised(lambda bad=bad, into=loaded: into.append(amp.load_checkpoint(bad, net.main, scope)))  # type: ignore[misc]
        if not found and not loaded and state(net.main, scope) != before:
            found = "the scope changed though loading failed"
        if found:
            break
        before = state(net.main, scope)
    shutil.rmtree(folder)
    return found
