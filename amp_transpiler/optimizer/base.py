"""``Optimizer``: a training step in the precision that the program has, or in that of the global policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.lists.paddle import paddle_arguments, paddle_attributes
from amp_transpiler.optimizer.amp_optimizer import OptimizerWithMixedPrecision
from amp_transpiler.optimizer.decorating import decorate
from amp_transpiler.optimizer.groups import thawed
from amp_transpiler.optimizer.pairs import (
    Callback,
    GivenGrads,
    Names,
    ParamsGrads,
    called,
    checked_pairs,
    without_none,
)
from amp_transpiler.optimizer.policy import POLICIES, get_global_policy
from amp_transpiler.optimizer.rank_agreement import appended
from amp_transpiler.optimizer.rank_means import all_reduced
from amp_transpiler.optimizer.state import appending
from amp_transpiler.optimizer.step_pieces import Losses, checked_losses, summed
from amp_transpiler.optimizer.update_rule import UpdateRule
from amp_transpiler.passes.autodiff.backward import append_gradients, check_loss, wanted_gradients
from amp_transpiler.passes.canonicalize.standard_form import standardize
from amp_transpiler.program import Program, program_guard, program_of
from amp_transpiler.runtime.collective.current import several


class Optimizer(UpdateRule):
    """Base of SGD, Momentum, Lars, Adagrad, RMSProp, Adam, AdamW and Lamb.

    What it was made with may be changed until ``minimize`` builds it into a program; later, the learning rate alone
    (``set_lr``, or ``optimizer.learning_rate = 0.1``), and OrderError for the rest.

    Args:
        learning_rate: a number >= 0, kept in the fp32 scalar variable ``learning_rate_<n>``, or a schedule of
            ``amp.optimizer.lr``, by which the program computes this variable.
        parameter_list: parameters to update (variables, names or patterns); every trainable parameter by default.
            Frozen parameters are passed over, so that ``program.all_parameters()``, or their names, may be given.
            Or groups, ``[{"params": [...], "learning_rate": factor, "weight_decay": ..., "grad_clip": ...}, ...]``:
            the first is a factor on this optimizer's rate, the others default to this optimizer's, and a group
            with a ``grad_clip`` of its own is clipped by itself. Parameters of no group are not trained.
        weight_decay: coefficient of an L2 penalty, added to the gradient after clipping; or ``amp.regularizer.L2Decay``
            or ``L1Decay``.
        grad_clip: a ``ClipGradBy…`` object; a global norm is that of all groups together.
        multi_precision: keep an fp32 master weight for every 16-bit parameter and update that.
        name: prefix of this optimizer's own state (beta powers); the class name in lower case by default.
        weight_decay_exclude: names and patterns, as in ``["*.b_0", "*norm*"]``, of parameters without decay. A
            pattern is tried on the name of a parameter, and on names and scopes of the operators that read it.

    Raises:
        ArgumentError, ArgumentTypeError: a value out of range or of the wrong kind.
    """

    _mixed_precision: OptimizerWithMixedPrecision | None = None

    if not TYPE_CHECKING:  # to a type checker an unknown name is an error
        __getattr__ = paddle_attributes("amp_transpiler.optimizer.Optimizer")

    @property
    def mixed_precision(self) -> OptimizerWithMixedPrecision | None:
        """What ``minimize`` decorated this optimizer to under a global policy; None in fp32."""
        return self._mixed_precision

    @paddle_arguments("optimizer.minimize")
    def minimize(
        self,
        loss: Losses,
        startup_program: Program | None = None,
        parameter_list: Sequence[Variable | str] | None = None,
        no_grad_set: Names | None = None,
        *,
        pre_allreduce_callbacks: Sequence[Callback] | None = None,
        post_allreduce_callbacks: Sequence[Callback] | None = None,
    ) -> tuple[list[Operator], ParamsGrads]:
        """Append the backward pass of ``loss`` (a float scalar, or a list of them, whose gradients add up) and the
        update of every parameter that it depends on.

        New state is initialised in ``startup_program`` (default: that of the loss's program). Callbacks get
        [(parameter, gradient)] and return such a list: ``pre_allreduce_callbacks`` of this rank's gradients,
        ``post_allreduce_callbacks`` of the means over all ranks, before they are clipped. Returns the
        update operators and [(parameter, gradient)]. Under a global policy other than "float32" the program trains in
        mixed precision, and ``self.mixed_precision`` is the decorated optimizer that did it. GradientError: see
        ``append_backward``. A warning names the trainable parameters that the loss does not depend on. Where anything
        raises, the programs and this optimizer are as before.
        """
        dtype = POLICIES[get_global_policy()]
        if dtype is not None:
            mixed = decorate(self, dtype=dtype)
            done = mixed.minimize(
                loss,
                startup_program,
                parameter_list,
                no_grad_set,
                pre_allreduce_callbacks=pre_allreduce_callbacks,
                post_allreduce_callbacks=post_allreduce_callbacks,
            )
            self._mixed_precision = mixed
            return done
        losses = checked_losses(loss)
        with appending(program_of(losses[0]), startup_program, *self.parts) as startup:
            self._mixed_precision = None
            params_grads = self._gradients(losses, parameter_list, no_grad_set)
            with program_guard(program_of(losses[0]), startup):
                params_grads = called(pre_allreduce_callbacks, params_grads, "pre_allreduce_callbacks")
                means = called(post_allreduce_callbacks, _of_all_ranks(params_grads), "post_allreduce_callbacks")
            return self.append_updates(means, startup), params_grads

    @paddle_arguments("optimizer.minimize", "optimizer.backward")
    def backward(
        self,
        loss: Losses,
        startup_program: Program | None = None,
        parameter_list: Sequence[Variable | str] | None = None,
        no_grad_set: Names | None = None,
    ) -> ParamsGrads:
        """Append the gradients of ``loss``, or of the sum of a list of losses; returns [(parameter, gradient)].

        A warning names the trainable parameters that the losses do not depend on.
        """
        losses = checked_losses(loss)
        with appending(program_of(losses[0]), startup_program):
            return self._gradients(losses, parameter_list, no_grad_set)

    def _gradients(
        self, losses: Sequence[Variable], parameter_list: Sequence[Variable | str] | None, no_grad_set: Names | None
    ) -> ParamsGrads:
        program = program_of(losses[0])
        for each in losses:
            check_loss(each)
        listed = self.parameter_list if parameter_list is None else parameter_list
        wanted = wanted_gradients(program, thawed(listed, program) if isinstance(listed, list) else listed, no_grad_set)
        standardize(program)
        loss = summed(losses)
        return appended(losses, wanted, lambda some: append_gradients(loss, some, losses), lambda: None, no_grad_set)

    def apply_optimize(self, loss: Losses, startup_program: Program | None, params_grads: GivenGrads) -> list[Operator]:
        """``apply_gradients``, with new state initialised in ``startup_program``."""
        checked_losses(loss)
        return self._apply(params_grads, startup_program)

    def apply_gradients(self, params_grads: GivenGrads) -> list[Operator]:
        """Append clipping and the update of [(parameter, gradient)]; returns the update operators, one for each group.

        A parameter whose gradient is None is left out, with a warning. ArgumentError: all are None, the list is empty,
        a parameter comes twice.
        """
        return self._apply(params_grads, None)

    def _apply(self, params_grads: GivenGrads, startup_program: Program | None) -> list[Operator]:
        given = without_none(params_grads)
        with appending(checked_pairs(given), startup_program, *self.parts) as startup:
            return self.append_updates(_of_all_ranks(given), startup)


def _of_all_ranks(params_grads: ParamsGrads) -> ParamsGrads:
    """The pairs; with several ranks, of the means of the gradients."""
    if several() is None:
        return params_grads
    grads = all_reduced([grad for _, grad in params_grads], "float32")
    return [(parameter, grad) for (parameter, _), grad in zip(params_grads, grads, strict=True)]
