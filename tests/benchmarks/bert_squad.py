"""The question answering demo on several ranks, in one table.

    python -m tests.benchmarks.bert_squad --ranks 1,2,4 --dtype float16 --loss-scale dynamic [options of demo/bert_squad.py]

starts ``mpiexec`` for each number of ranks; the batch is that of all ranks together, so that each line is the same training.
Without SQuAD beside the checkout (``AMP_TEST_DATA``), or ``--data`` and ``--vocab``, the text is synthetic. ``--mode`` is
pure where it is not given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.helpers.where import DATA, ROOT
from tests.tools.ranks_run import mpiexec

sys.path.insert(0, str(ROOT / "demo"))
import bert_squad
import squad
import training

import amp_transpiler as amp


def rank(given: list[str]) -> int:
    """One rank of a run; rank 0 prints a line of JSON for each mode."""
    options = bert_squad.checked(bert_squad.arguments().parse_args(given))
    train_set, test_set, pieces = bert_squad.load(options)
    data = squad.windows(train_set, pieces, options.seq_len, options.doc_stride)
    data = data.pick(data.start >= 0)
    test = squad.windows(test_set, pieces, options.seq_len, options.doc_stride)
    for mode in bert_squad.MODES if options.mode == "all" else (options.mode,):
        run = bert_squad.prepare(mode, options, pieces)
        bert_squad.train(run, data, options, lambda *_: None)
        match, f1 = squad.score(bert_squad.answers(run, test, test_set, options), test_set)
        amp.distributed.check_equal(run.model.main, run.scope)  # of one rank too: the demo's guard calls init
        several = amp.distributed.world_size() > 1
        row = {
            "mode": mode,
            "steps": len(run.loss),
            "loss": float(np.mean(run.loss[-20:])),
            "match": match,
            "f1": f1,
            "skipped": run.skipped,
            "seconds": run.seconds / max(len(run.loss) - 1, 1),
            "sent": amp.distributed.step_report().sent if several else 0,
            "waited": amp.distributed.step_report().waited if several else 0.0,
        }
        print(json.dumps(row), flush=True)
    return 0


def main() -> int:
    """Run them all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks, such as 1,2,4")
    parser.add_argument("--one-of-them", action="store_true", help=argparse.SUPPRESS)
    chosen, given = parser.parse_known_args()
    if chosen.one_of_them:
        return training.guarded(lambda: rank(given))
    if not chosen.ranks.replace(",", "").isdecimal():
        parser.error(f"--ranks is {chosen.ranks!r}; expected numbers of ranks, such as 1,2,4")
    if "--mode" not in given:
        given += ["--mode", "pure"]
    if "--data" not in given and "--synthetic" not in given:
        real = [("--data", DATA / "squad_v1_dev"), ("--vocab", DATA / "bert_vocab")]
        there = all(path.is_dir() for _, path in real)
        given += [str(part) for pair in real for part in pair] if there else ["--synthetic"]
    print(
        "| ranks | mode | steps | loss | exact match | F1 | skipped steps | seconds per step | sent per rank and step, MB "
        "| of these seconds, waited |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    command = [sys.executable, "-m", "tests.benchmarks.bert_squad", "--one-of-them", *given]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for ranks in map(int, chosen.ranks.split(",")):
        launcher = mpiexec()
        if launcher is None and ranks > 1:
            raise SystemExit("several ranks need mpi4py and mpiexec: pip install 'amp-transpiler[mpi]'")
        prefix = [str(Path(launcher)), "-n", str(ranks)] if launcher and ranks > 1 else []
        done = subprocess.run([*prefix, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            return done.returncode
        for line in done.stdout.splitlines():
            row = json.loads(line)
            print(
                f"| {ranks} | {row['mode']} | {row['steps']} | {row['loss']:.4f} | {row['match']:.2f} | {row['f1']:.2f} | "
                f"{row['skipped']} | {row['seconds']:.3f} | {row['sent'] / 1e6:.2f} | {row['waited']:.3f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
