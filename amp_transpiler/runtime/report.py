"""What one training step did: fetched beside the loss, copied to the host when it is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from amp_transpiler.ir.nodes import Variable
from amp_transpiler.option_checks import listed
from amp_transpiler.program import Program
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.collective.current import several
from amp_transpiler.runtime.collective.journal import NOTHING, StepExchanges, last_step

#: The scalars at the head of a summary; losses and learning rates follow.
SCALARS = ("found_inf", "loss_scaling", "next_loss_scaling", "num_good_steps", "num_bad_steps", "micro_batch")


@dataclass
class ReportRequest:
    """What to fetch for a report; see :class:`amp_transpiler.monitor.StepReports`, which makes it.

    ``variables`` are the summary and what ``InspectGradients`` gives; ``names``, ``sizes`` and ``groups`` describe the
    gradients' parameters; ``runs`` says how many runs are one step. ``step`` is the number of the next report,
    ``before`` what ranks exchanged last before the run.
    """

    program: Program
    variables: list[Variable]
    names: list[str]
    sizes: list[int]
    groups: list[str]
    losses: list[str]
    runs: int
    step: int = 0
    before: StepExchanges | None = None

    def asked(self) -> list[Variable]:
        """The variables to fetch, for a run that begins."""
        self.before = last_step(several())
        return self.variables

    def made(self, values: Sequence[Any]) -> StepReport:
        """The report of the step that gave these values for ``variables``."""
        engine = several()
        found = last_step(engine)
        exchanges = found if found is not self.before else None
        report = StepReport(self.step, self, list(values), exchanges, 1 if engine is None else engine.size)
        self.step += 1
        return report


@dataclass
class StepReport:
    """One step. Values stay where the step left them; reading an attribute copies what it needs, once.

    ``str(report)`` is one line for a log, ``to_dict()`` plain numbers. Gradients are meant unscaled and not clipped;
    where they accumulate over several runs, the sum so far is meant, and ``step`` counts runs. ``exchanges``: what this
    rank exchanged with others; None of one rank alone, and of a run that ends no window of accumulation.
    """

    step: int
    request: ReportRequest = field(repr=False)
    values: list[Any] = field(repr=False)
    exchanges: StepExchanges | None = None
    ranks: int = 1

    def _host(self, index: int) -> np.ndarray:
        if not isinstance(self.values[index], np.ndarray):
            self.values[index] = device_tensors.to_array(self.values[index])
        value: np.ndarray = self.values[index]
        return value

    @cached_property
    def _scalars(self) -> dict[str, float]:
        return dict(zip(SCALARS, (float(x) for x in self._host(0)), strict=False))

    # -- the loss and its scale ------------------------------------------------------------------------
    @property
    def losses(self) -> dict[str, float]:
        """Every loss, unscaled, by the name of its variable."""
        start = len(SCALARS)
        return {name: float(x) for name, x in zip(self.request.losses, self._host(0)[start:], strict=False)}

    @property
    def loss(self) -> float:
        """The loss, unscaled; the sum where there are several, NaN where it is not known."""
        return sum(self.losses.values()) if self.request.losses else math.nan

    def with_loss(self, loss: float) -> StepReport:
        """This report with another loss: the mean over several ranks."""
        scalars = self._host(0).copy()
        scalars[len(SCALARS)] = loss
        return replace(self, values=[scalars, *self.values[1:]])

    @property
    def found_inf(self) -> bool:
        """Found_inf: whether a gradient was not finite. Without a finite check: whether one is."""
        found_inf = self._scalars["found_inf"]
        return bool(found_inf) if not math.isnan(found_inf) else bool(self._host(1).any())

    @property
    def checked(self) -> bool:
        """Whether the program has a finite check; one without updates whatever the gradients are."""
        return not math.isnan(self._scalars["found_inf"])

    @property
    def skipped(self) -> bool:
        """Whether this was a bad step, which changes nothing but the scale and its counters."""
        return self.checked and self.found_inf and self.micro_batch == self.request.runs

    @property
    def micro_batch(self) -> int:
        """The number of this run among the ``request.runs`` over which gradients accumulate; the last one updates."""
        return int(self._optional("micro_batch") or 0) + 1

    @property
    def loss_scaling(self) -> float | None:
        """The loss scale that this step used; None without one."""
        return self._optional("loss_scaling")

    @property
    def next_loss_scaling(self) -> float | None:
        """The loss scale that the next step will use."""
        return self._optional("next_loss_scaling")

    @property
    def num_good_steps(self) -> int | None:
        """Good steps in a row after this one, as the scaler counts them; None without dynamic scaling."""
        return _whole(self._optional("num_good_steps"))

    @property
    def num_bad_steps(self) -> int | None:
        """Bad steps after this one, as the scaler counts them; None without dynamic scaling."""
        return _whole(self._optional("num_bad_steps"))

    def _optional(self, name: str) -> float | None:
        value = self._scalars[name]
        return None if math.isnan(value) else value

    # -- optimizer and gradients -----------------------------------------------------------------------
    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each update operator, in the order of the program."""
        return [float(x) for x in self._host(0)[len(SCALARS) + len(self.request.losses) :]]

    @property
    def learning_rate(self) -> float:
        """The first of ``learning_rates``."""
        return self.learning_rates[0]

    @property
    def found_inf_by_parameter(self) -> dict[str, bool]:
        """Whether the gradient of each parameter was not finite."""
        return dict(zip(self.request.names, map(bool, self._host(1)), strict=True))

    @property
    def found_inf_by_group(self) -> dict[str, bool]:
        """Whether a gradient of each parameter group was not finite."""
        found: dict[str, bool] = {}
        for group, bad in zip(self.request.groups, self._host(1), strict=True):
            found[group] = found.get(group, False) or bool(bad)
        return found

    @property
    def grad_norm(self) -> float:
        """The L2 norm over all gradients; infinite or NaN where one is not finite."""
        return math.sqrt(float(self._host(2).astype(np.float64).sum()))

    @property
    def grad_norms(self) -> dict[str, float]:
        """The L2 norm of each parameter's gradient."""
        return {name: math.sqrt(float(x)) for name, x in zip(self.request.names, self._host(2), strict=True)}

    @property
    def zero_share(self) -> float:
        """Share of gradient elements that are exactly zero, 0 to 1: what underflow flushed, and true zeros (of dead
        units, unused rows). ``amp.gradient_underflow`` tells the two apart."""
        return float(self._host(3).sum(dtype=np.float64)) / max(sum(self.request.sizes), 1)

    @property
    def zero_shares(self) -> dict[str, float]:
        """``zero_share`` of each parameter's gradient."""
        rows = zip(self.request.names, self._host(3), self.request.sizes, strict=True)
        return {name: float(zeros) / max(size, 1) for name, zeros, size in rows}

    # -- for logs and files ------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Plain Python numbers by name; ``overflow`` holds the groups with a gradient that is not finite.

        Of several ranks also what was exchanged: ``bytes_sent``, ``bytes_received``, ``exchange_seconds``,
        ``waited_seconds``, and ``overlap``, the share of the exchanges in which the rank computed meanwhile.
        """
        known = NOTHING if self.exchanges is None else self.exchanges.to_dict()
        return {
            "step": self.step,
            "loss": self.loss,
            "loss_scaling": self.loss_scaling,
            "next_loss_scaling": self.next_loss_scaling,
            "skipped": self.skipped,
            "found_inf": self.found_inf,
            "overflow": [group for group, bad in self.found_inf_by_group.items() if bad],
            "num_good_steps": self.num_good_steps,
            "num_bad_steps": self.num_bad_steps,
            "learning_rate": self.learning_rate,
            "grad_norm": self.grad_norm,
            "zero_share": self.zero_share,
            **(known if self.ranks > 1 else {}),
        }

    def __str__(self) -> str:
        parts = [f"loss {self.loss:.4g}"]
        if self.loss_scaling is not None:
            moved = self.next_loss_scaling not in (None, self.loss_scaling)
            parts.append(f"scale {self.loss_scaling:g}" + (f" -> {self.next_loss_scaling:g}" if moved else ""))
        if self.found_inf:
            outcome = "skipped" if self.skipped else "bad" if self.checked else "NOT skipped"
            parts.append(f"{outcome} (overflow in {self._where()})")
        parts += [f"lr {self.learning_rate:.3g}", f"|g| {self.grad_norm:.3g}"]
        if self.zero_share >= 0.005:
            parts.append(f"{self.zero_share:.0%} of gradients zero")
        if self.exchanges is not None:
            parts.append(self.exchanges.line())
        part = f" ({self.micro_batch} of {self.request.runs})" if self.request.runs > 1 else ""
        return f"step {self.step}{part}: {', '.join(parts)}"

    def _where(self) -> str:
        bad = [group for group, found in self.found_inf_by_group.items() if found]
        if len(bad) > 1 and len(bad) == len(self.found_inf_by_group):
            return "all gradients"
        return listed(bad, quote="") or "the sum"


def expanded(fetch_list: Any) -> list[Any]:
    """The fetches with the variables of report requests in their place."""
    flat: list[Any] = []
    for item in fetch_list:
        flat += item.asked() if isinstance(item, ReportRequest) else [item]
    return flat


def requested(fetch_list: Any) -> bool:
    """Whether a report is among the fetches."""
    return isinstance(fetch_list, Sequence) and any(isinstance(item, ReportRequest) for item in fetch_list)


def joined(results: Sequence[Any], fetch_list: Sequence[Any], to_numpy: bool) -> list[Any]:
    """One result for each item of ``fetch_list``, from those of :func:`expanded`.

    With ``to_numpy`` other fetches become arrays; what belongs to a report stays where it is.
    """
    final: list[Any] = []
    rest = iter(results)
    for item in fetch_list:
        if isinstance(item, ReportRequest):
            final.append(item.made([next(rest) for _ in item.variables]))
        else:
            value = next(rest)
            final.append(device_tensors.to_array(value) if to_numpy and hasattr(value, "device_name") else value)
    return final


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
