"""Overflows planted in single operators of training programs, and the operators named for them.

``python -m tests.tools.overflows 200`` plants 200 of them in random operators of the test programs and of random nets.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

import amp_transpiler as amp
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.monitor.culprit import called
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowered import needed
from tests.helpers import programs

LIMITS = {"float16": 60000.0, "bfloat16": 3e38, "float32": 3e38}


@dataclass
class Ready:
    """A training program whose startup program ran."""

    name: str
    main: amp.Program
    feeds: dict[str, np.ndarray]
    scope: amp.Scope
    executor: amp.Executor
    found_inf: str

    @cached_property
    def made(self) -> dict[str, np.ndarray]:
        """By name, the floating-point tensors of the step."""
        order = needed(self.main, [self.main.var(self.found_inf)])
        names = [v.name for op in order for v in op.outputs if v is not None and v.dtype in LIMITS]
        return dict(zip(names, self.values(self.main, names), strict=True))

    def values(self, program: amp.Program, names: list[str]) -> list[np.ndarray]:
        """Fetched by an executor of its own, from a copy of the scope."""
        scope = amp.Scope()
        for name in self.scope.var_names():
            scope.set_var(name, self.scope.find_var(name))
        return self.executor.run(program, self.feeds, names, scope)


def ready(net: object, name: str) -> Ready:
    """Run the startup program of a ``programs.Net``."""
    scope, executor = amp.Scope(), amp.Executor(amp.CPUPlace(), threads=1)
    executor.run(net.startup, scope=scope)
    net.optimizer.amp_init(amp.CPUPlace(), scope)
    return Ready(name, net.main, net.feeds, scope, executor, net.optimizer.get_found_inf().name)


def random_net(seed: int, mode: str) -> object:
    """Eight random layers and operators between a feed and a mean square."""
    from tests.helpers.programs import Net

    rng = np.random.default_rng(seed)
    main, startup = amp.Program(), amp.Program("startup")
    startup.seed = main.seed = seed
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [4, 12], "float32")
        with amp.fp16_guard():
            h, kept = amp.nn.fc(x, 12), []
            for _ in range(8):
                kept.append(h)
                other = kept[rng.integers(len(kept))]
                h = [
                    lambda h=h: amp.nn.fc(h, 12, act="tanh"),
                    lambda h=h, o=other: h + o,
                    lambda h=h, o=other: h * o,
                    lambda h=h: F.sigmoid(h),
                    lambda h=h: amp.nn.layer_norm(h),
                    lambda h=h: F.softmax(h),
                    lambda h=h: h * amp.create_parameter([12], "float32"),
                    lambda h=h, o=other: F.relu(h) - o,
                    lambda h=h: amp.nn.fc(h, 12, act="gelu"),
                ][rng.integers(9)]()
            loss = F.mean(h * h)
        opt = amp.optimizer.SGD(0.01, multi_precision=mode == "pure-fp16")
        opt = amp.decorate(opt, init_loss_scaling=128.0, use_pure_fp16=mode == "pure-fp16")
        opt.minimize(loss, startup)
    return Net(main, startup, loss, {"x": rng.standard_normal((4, 12)).astype(np.float32)}, opt, h)


def candidates(program: amp.Program, found_inf: str) -> list[str]:
    """Names of outputs: one for each operator of the step that makes a floating-point tensor of another."""
    order = needed(program, [program.var(found_inf)])
    return [
        made.name
        for op in order
        if op.type not in ("CheckFiniteAndUnscale", "Identity")
        for made in list(op.outputs)
        if made is not None and made.dtype in LIMITS and any(v is not None and v.dtype in LIMITS for v in op.inputs)
    ]


def planted(step: Ready, output: str) -> amp.Program | None:
    """A copy of the program in which the operator that makes ``output`` reads the same numbers, but so large that it
    overflows, and the step with it; None where none of the tried does that.

    That its inputs are finite and an output of it is not is read off by fetching them.
    """
    op = step.main.var(output).producer
    slots = [i for i, v in enumerate(op.inputs) if v is not None and v.dtype in LIMITS]
    tops = dict(zip(slots, _tops(step, [op.inputs[i] for i in slots]), strict=True))
    for chosen in ([s] for s in slots) if len(slots) > 1 else ():
        made = _scaled(step, output, {s: tops[s] for s in chosen})
        if made is not None:
            return made
    return _scaled(step, output, tops)


def _tops(step: Ready, variables: list[object]) -> list[float]:
    return [
        float(np.abs(np.asarray(v, np.float64)).max(initial=0))
        for v in (
            step.scope.find_var(v.name)
            if v.persistable
            else as_array(v.data)
            if v.is_constant
            else step.made[v.name]
            if v.producer is not None
            else step.feeds[v.name]
            for v in variables
        )
    ]


def _scaled(step: Ready, output: str, tops: dict[int, float]) -> amp.Program | None:
    copy = step.main.clone()
    op = copy.var(output).producer
    for slot, top in tops.items():
        read = op.inputs[slot]
        if not 0 < top < LIMITS[read.dtype] / 2:
            continue
        power = np.floor(np.log2(LIMITS[read.dtype] / top).clip(max=np.log2(LIMITS[read.dtype])))
        factor = copy.add_constant(f"planted.{slot}", np.array(2.0**power, amp.ir.types.numpy_dtype(read.dtype)))
        large = copy.add_variable(f"planted.{slot}.large", read.dtype, read.shape)
        large.grad_of = read.grad_of
        copy.add_operator("Mul", [read, factor], [large], role=op.role)
        op.set_input(slot, large)
    inputs = [v.name for v in op.inputs if v is not None and v.dtype in LIMITS and v.producer is not None]
    outputs = [v.name for v in op.outputs if v is not None and v.dtype in LIMITS]
    values = step.values(copy, [step.found_inf, *inputs, *outputs])
    finite = [bool(np.isfinite(np.asarray(v, np.float64)).all()) for v in values[1:]]
    overflows = values[0].any() and all(finite[: len(inputs)]) and not all(finite[len(inputs) :])
    return copy if overflows else None


def steps() -> Iterator[Ready]:
    """Training programs in mixed and pure 16 bit."""

    for seed in range(100):
        for mode in ("amp", "pure-fp16"):
            for name in ("transformer", "resnet", "use_case", "mlp"):
                yield ready(programs.build(name, mode, seed=seed), f"{name} {mode} {seed}")
            yield ready(random_net(seed, mode), f"random {mode} {seed}")
            yield ready(random_net(1000 + seed, mode), f"random {mode} {1000 + seed}")


def plant_many(count: int, each: int, seed: int = 0) -> Iterator[tuple[str, str, object]]:
    """(step, label of the operator, the culprit found) of ``count`` overflows, at most ``each`` in one program."""
    rng = np.random.default_rng(seed)
    done = 0
    for step in steps():
        names = candidates(step.main, step.found_inf)
        here = 0
        for name in rng.permutation(names):
            program = planted(step, str(name))
            if program is None:
                continue
            culprit = amp.find_culprit(program, step.feeds, step.scope, executor=step.executor, cures=False)
            yield step.name, called(program.var(str(name)).producer), culprit
            done, here = done + 1, here + 1
            if done == count:
                return
            if here == each:
                break


def main(count: int) -> None:
    right: dict[bool, int] = {True: 0, False: 0}
    roles: dict[str, int] = {}
    kinds: dict[str, int] = {}
    for step, label, culprit in plant_many(count, each=12):
        named = culprit.operator if culprit is not None else "nothing"
        right[named == label] += 1
        if culprit is not None:
            roles[culprit.role] = roles.get(culprit.role, 0) + 1
            kinds[culprit.type] = kinds.get(culprit.type, 0) + 1
        if named != label:
            print(f"{step}: planted in '{label}', named '{named}'")
    print(f"{right[True]} of {sum(right.values())} named right; by role {roles}; {len(kinds)} operator types: {kinds}")


if __name__ == "__main__":
    main(int(sys.argv[1]))


def culprit(step: Ready, feed: dict | None = None, **options: object) -> amp.Culprit | None:
    return amp.find_culprit(step.main, feed or step.feeds, step.scope, executor=step.executor, **options)
