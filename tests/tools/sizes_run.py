"""Feeds of random sizes, which may not fit together, through one executor, and through one with a session for each shape.

``python -m tests.tools.sizes_run [FEEDS] [SEED]`` (default 60, 0) trains four nets in fp32 and in pure fp16: attention,
convolutions with strides and pooling, one that joins two feeds and adds a third, and a recurrent one behind a large table,
of which the update takes the rows of a batch. Both executors must give the same
losses to the bit, refuse the same feeds, and end in the same state. It prints how many sessions either made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler.errors import AmpError
from amp_transpiler.nn import functional as F
from amp_transpiler.runtime import executor, open_steps

Feed = dict[str, np.ndarray]


def attention() -> Any:
    ids, label = amp.data("ids", [None, None], "int64"), amp.data("label", [None, 1], "int64")
    with amp.fp16_guard():
        x = F.dropout(amp.nn.layer_norm(amp.nn.embedding(ids, [50, 16])), 0.1)
        x = amp.nn.layer_norm(x + amp.nn.multi_head_attention(x, num_heads=2))
        x = x + amp.nn.fc(amp.nn.fc(x, 32, act="gelu", num_flatten_dims=2), 16, num_flatten_dims=2)
        logits = amp.nn.fc(F.mean(x, axis=[1]), 5)
    return F.cross_entropy(logits, label)


def pooled() -> Any:
    image, label = amp.data("image", [None, 1, None, None], "float32"), amp.data("label", [None, 1], "int64")
    with amp.fp16_guard():
        x = amp.nn.conv2d(image, 4, 3, stride=2, padding=1, act="relu")
        logits = amp.nn.fc(F.mean(amp.nn.batch_norm(F.max_pool2d(x, 2, 2)), axis=[2, 3]), 5)
    return F.cross_entropy(logits, label)


def joined() -> Any:
    x, y, z = (amp.data(name, [None, 8], "float32") for name in "xyz")
    label = amp.data("label", [None, 1], "int64")
    with amp.fp16_guard():
        both = F.concat([amp.nn.fc(x, 8, act="relu"), amp.nn.fc(y, 8)], 0)
        logits = amp.nn.fc(amp.nn.layer_norm(both + amp.nn.fc(z, 8)), 5)
    return F.cross_entropy(logits, label)


def recurrent() -> Any:
    ids, label = amp.data("ids", [None, None], "int64"), amp.data("label", [None, 1], "int64")
    with amp.fp16_guard():
        every, _, _ = amp.nn.lstm(amp.nn.embedding(ids, [40000, 16]), 8)
        logits = amp.nn.fc(F.mean(every, axis=[1]), 5)
    return F.cross_entropy(logits, label)


def feed(net: str, rng: np.random.Generator) -> Feed:
    """One that fits more often than not."""

    def rows(right: int) -> int:
        return right if rng.random() < 0.7 else int(rng.integers(1, 8))

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    batch, more = (int(n) for n in rng.integers(1, 6, 2))
    if net == "joined":
        fed, batch = {"x": floats(batch, 8), "y": floats(more, 8), "z": floats(rows(batch + more), 8)}, batch + more
    elif net == "pooled":
        fed = {"image": floats(batch, 1, *(int(n) for n in rng.integers(3, 14, 2)))}
    else:
        fed = {"ids": rng.integers(0, 50, (batch, more))}
    return fed | {"label": rng.integers(0, 5, (rows(batch), 1))}


def trained(build: Callable[[], Any], pure: bool, feeds: list[Feed]) -> tuple[list[bytes], dict[str, bytes], int]:
    """What every feed gave, the loss or the error, the state at the end, and how many sessions were made."""
    main, startup = amp.Program("net"), amp.Program("startup")
    main.random_seed = startup.random_seed = 5
    with amp.program_guard(main, startup), amp.unique_name.guard():
        loss, optimizer = build(), amp.optimizer.Adam(0.01, multi_precision=pure)
        optimizer = amp.decorate(optimizer, use_pure_fp16=True) if pure else optimizer
        optimizer.minimize(loss, startup)
    exe, scope = amp.Executor(threads=1, max_sessions=1000), amp.Scope()
    exe.run(startup, scope=scope)
    if pure:
        optimizer.amp_init(exe.place, scope)
    made, create, found = list[str](), executor.create_session, list[bytes]()
    executor.create_session = lambda *args, **more: made.append(args[3]) or create(*args, **more)  # type: ignore[func-returns-value]
    try:
        for each in feeds:
            try:
                found.append(exe.run(main, each, [loss], scope)[0].tobytes())
            except AmpError as error:
                found.append(type(error).__name__.encode())
    finally:
        executor.create_session = create
    return found, {name: scope.find_var(name).tobytes() for name in scope.var_names()}, made.count("net")


def main() -> None:
    """Run and print; ends with an error where anything differs."""
    count, seed = (int(text) for text in [*sys.argv[1:], *["60", "0"][len(sys.argv) - 1 :]])
    nets = {"attention": attention, "pooled": pooled, "joined": joined, "recurrent": recurrent}
    for net, build in nets.items():
        rng = np.random.default_rng(seed)
        feeds = [feed(net, rng) for _ in range(count)]
        for pure in (False, True):
            found, state, made = trained(build, pure, feeds)
            whole, open_steps.WHOLE = open_steps.WHOLE, 0  # then no model is kept for others that are like it
            expected, own_state, own = trained(build, pure, feeds)
            open_steps.WHOLE = whole
            refused = sum(each.endswith(b"Error") for each in expected)
            same = found == expected and state == own_state
            print(
                f"{net}, {'pure fp16' if pure else 'fp32'}: {made} sessions, not {own}, {refused} of {count} feeds refused"
            )
            if not same:
                sys.exit("losses, errors or state differ")


if __name__ == "__main__":
    main()
