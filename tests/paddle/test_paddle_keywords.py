"""Every keyword of Paddle's signatures of mixed precision, optimizers, schedules and running is taken, by name.

The signatures are those of 2.0 (2021) and 2.6, with their default values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import optimizer as optim
from amp_transpiler.optimizer import lr
from amp_transpiler.static.amp import bf16

SCALING_2021 = {
    "init_loss_scaling": 2.0**15,
    "incr_every_n_steps": 1000,
    "decr_every_n_nan_or_inf": 2,
    "incr_ratio": 2.0,
    "decr_ratio": 0.8,
    "use_dynamic_loss_scaling": True,
}
SCALING_26 = {
    "init_loss_scaling": 2.0**16,
    "incr_every_n_steps": 2000,
    "decr_every_n_nan_or_inf": 1,
    "incr_ratio": 2.0,
    "decr_ratio": 0.5,
    "use_dynamic_loss_scaling": None,
}
COMMON = {"parameters": None, "grad_clip": None, "multi_precision": False, "name": None}
BETAS = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
SCHEDULE = {"last_epoch": -1, "verbose": False}


class Step:
    """A small program and what calls are made on: @loss, @startup, @place … stand for its parts."""

    def __init__(self) -> None:
        self.main, self.startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(self.main, self.startup), amp.unique_name.guard():
            self.x = amp.data("x", [2, 3])
            with amp.fp16_guard():
                self.loss = amp.nn.functional.mean(amp.nn.fc(self.x, 2))
        self.test = self.main.clone(for_test=True)
        self.place, self.scope = amp.CPUPlace(), amp.Scope()
        self.executor = amp.Executor(place=self.place)
        self.executor.run(self.startup, scope=self.scope)
        self.feed = {"x": np.ones((2, 3), np.float32)}
        self.optimizer = amp.decorate(optim.SGD(0.1, multi_precision=True), use_pure_fp16=True)

    def minimized(self) -> Any:
        self.optimizer.minimize(self.loss, self.startup)
        self.executor.run(self.startup, scope=self.scope)
        return self.optimizer


#: name -> (what is called, Paddle's keywords).
CALLS: dict[str, tuple[Callable[[Step], Callable[..., Any]], dict[str, Any]]] = {
    "decorate 2021": (
        lambda s: amp.decorate,
        {
            "optimizer": optim.SGD(0.1),
            "amp_lists": None,
            **SCALING_2021,
            "use_pure_fp16": False,
            "use_fp16_guard": None,
        },
    ),
    "decorate 2.6, older": (
        lambda s: amp.decorate,
        {
            "optimizer": optim.SGD(0.1),
            "amp_lists": None,
            **SCALING_2021,
            "use_pure_fp16": False,
            "use_fp16_guard": None,
            "use_bf16": False,
            "use_promote": False,
        },
    ),
    "decorate 2.6": (
        lambda s: amp.decorate,
        {
            "optimizer": optim.SGD(0.1),
            "amp_lists": None,
            "level": "O1",
            "dtype": "float16",
            "master_weight": None,
            "master_grad": False,
            **SCALING_26,
            "use_amp_guard": False,
            "use_promote": False,
        },
    ),
    "lists": (
        lambda s: amp.CustomOpLists,
        {"custom_white_list": None, "custom_black_list": None, "custom_black_varnames": None, "dtype": "float16"},
    ),
    "minimize": (
        lambda s: s.optimizer.minimize,
        {"loss": "@loss", "startup_program": "@startup", "parameter_list": None, "no_grad_set": None},
    ),
    "minimize 2.6": (
        lambda s: optim.SGD().minimize,
        {"loss": "@loss", "startup_program": "@startup", "parameters": None, "no_grad_set": None},
    ),
    "backward": (
        lambda s: s.optimizer.backward,
        {
            "loss": "@loss",
            "startup_program": "@startup",
            "parameter_list": None,
            "no_grad_set": None,
            "callbacks": None,
        },
    ),
    "backward 2.6": (
        lambda s: optim.SGD().backward,
        {"loss": "@loss", "startup_program": "@startup", "parameters": None, "no_grad_set": None, "callbacks": None},
    ),
    "amp_init": (
        lambda s: s.minimized().amp_init,
        {
            "place": "@place",
            "scope": "@scope",
            "test_program": "@test",
            "use_fp16_test": False,
            "rewrite_master_weight": False,
        },
    ),
    "amp_init of bf16": (
        lambda s: s.minimized().amp_init,
        {"place": "@place", "scope": "@scope", "test_program": None, "use_bf16_test": False},
    ),
    "cast_model_to_fp16": (
        lambda s: amp.cast_model_to_fp16,
        {
            "program": "@main",
            "amp_lists": None,
            "use_fp16_guard": True,
            "dest_type": None,
            "level": "O2",
            "use_promote": False,
        },
    ),
    "cast_parameters_to_fp16": (
        lambda s: amp.cast_parameters_to_fp16,
        {
            "place": "@place",
            "program": "@main",
            "scope": "@scope",
            "to_fp16_var_names": None,
            "dest_type": None,
            "rewrite_master_weight": False,
        },
    ),
    "cast_parameters_to_bf16": (
        lambda s: bf16.cast_parameters_to_bf16,
        {"place": "@place", "program": "@main", "scope": "@scope", "to_bf16_var_names": None},
    ),
    "rewrite_program": (lambda s: amp.rewrite_program, {"program": "@main", "amp_lists": None}),
    "decorate_bf16": (
        lambda s: bf16.decorate_bf16,
        {"optimizer": optim.SGD(0.1), "amp_lists": None, "use_pure_bf16": False, "use_bf16_guard": None},
    ),
    "lists for bf16": (
        lambda s: bf16.AutoMixedPrecisionListsBF16,
        {"custom_bf16_list": None, "custom_fp32_list": None, "custom_fp32_varnames": None},
    ),
    "rewrite_program_bf16": (lambda s: bf16.rewrite_program_bf16, {"main_prog": "@main", "amp_lists": None}),
    "cast_model_to_bf16": (
        lambda s: bf16.cast_model_to_bf16,
        {"program": "@main", "startup_prog": None, "amp_lists": None, "use_bf16_guard": True},
    ),
    "SGD": (lambda s: optim.SGD, {"learning_rate": 0.001, "weight_decay": None, **COMMON}),
    "Momentum": (
        lambda s: optim.Momentum,
        {
            "learning_rate": 0.001,
            "momentum": 0.9,
            "use_nesterov": False,
            "weight_decay": None,
            "rescale_grad": 1.0,
            "use_multi_tensor": False,
            **COMMON,
        },
    ),
    "Adam": (
        lambda s: optim.Adam,
        {
            "learning_rate": 0.001,
            **BETAS,
            "weight_decay": None,
            "lazy_mode": False,
            "use_multi_tensor": False,
            **COMMON,
        },
    ),
    "AdamW": (
        lambda s: optim.AdamW,
        {
            "learning_rate": 0.001,
            **BETAS,
            "weight_decay": 0.01,
            "lr_ratio": None,
            "apply_decay_param_fun": None,
            "lazy_mode": False,
            **COMMON,
        },
    ),
    "Lamb": (
        lambda s: optim.Lamb,
        {
            "learning_rate": 0.001,
            "lamb_weight_decay": 0.01,
            **BETAS,
            "exclude_from_weight_decay_fn": None,
            "always_adapt": False,
            **COMMON,
        },
    ),
    "LarsMomentumOptimizer": (
        lambda s: optim.LarsMomentumOptimizer,
        {
            "learning_rate": 0.001,
            "momentum": 0.9,
            "lars_coeff": 0.001,
            "lars_weight_decay": 0.0005,
            "parameter_list": None,
            "regularization": None,
            "grad_clip": None,
            "name": None,
            "exclude_from_weight_decay": None,
            "epsilon": 0,
            "multi_precision": False,
            "rescale_grad": 1.0,
        },
    ),
    "AdamOptimizer": (
        lambda s: optim.AdamOptimizer,
        {
            "learning_rate": 0.001,
            **BETAS,
            "parameter_list": None,
            "regularization": None,
            "grad_clip": None,
            "name": None,
            "lazy_mode": False,
        },
    ),
    "ClipGradByGlobalNorm": (
        lambda s: amp.nn.ClipGradByGlobalNorm,
        {"clip_norm": 1.0, "group_name": "default_group", "auto_skip_clip": False},
    ),
    "ClipGradByNorm": (lambda s: amp.nn.ClipGradByNorm, {"clip_norm": 1.0}),
    "ClipGradByValue": (lambda s: amp.nn.ClipGradByValue, {"max": 1.0, "min": None}),
    "L1Decay": (lambda s: amp.regularizer.L1Decay, {"coeff": 0.0}),
    "L2Decay": (lambda s: amp.regularizer.L2Decay, {"coeff": 0.0}),
    "ExponentialMovingAverage": (lambda s: amp.static.ExponentialMovingAverage, {"decay": 0.999}),
    "NoamDecay": (lambda s: lr.NoamDecay, {"d_model": 8, "warmup_steps": 4, "learning_rate": 1.0, **SCHEDULE}),
    "ExponentialDecay": (lambda s: lr.ExponentialDecay, {"learning_rate": 0.1, "gamma": 0.9, **SCHEDULE}),
    "NaturalExpDecay": (lambda s: lr.NaturalExpDecay, {"learning_rate": 0.1, "gamma": 0.9, **SCHEDULE}),
    "InverseTimeDecay": (lambda s: lr.InverseTimeDecay, {"learning_rate": 0.1, "gamma": 0.9, **SCHEDULE}),
    "PolynomialDecay": (
        lambda s: lr.PolynomialDecay,
        {"learning_rate": 0.1, "decay_steps": 5, "end_lr": 0.0001, "power": 1.0, "cycle": False, **SCHEDULE},
    ),
    "LinearWarmup": (
        lambda s: lr.LinearWarmup,
        {"learning_rate": 0.1, "warmup_steps": 5, "start_lr": 0.0, "end_lr": 0.1, **SCHEDULE},
    ),
    "PiecewiseDecay": (lambda s: lr.PiecewiseDecay, {"boundaries": [3], "values": [0.1, 0.2], **SCHEDULE}),
    "CosineAnnealingDecay": (
        lambda s: lr.CosineAnnealingDecay,
        {"learning_rate": 0.1, "T_max": 5, "eta_min": 0, **SCHEDULE},
    ),
    "StepDecay": (lambda s: lr.StepDecay, {"learning_rate": 0.1, "step_size": 5, "gamma": 0.1, **SCHEDULE}),
    "MultiStepDecay": (
        lambda s: lr.MultiStepDecay,
        {"learning_rate": 0.1, "milestones": [5], "gamma": 0.1, **SCHEDULE},
    ),
    "LinearLR": (
        lambda s: lr.LinearLR,
        {"learning_rate": 0.1, "total_steps": 5, "start_factor": 1 / 3, "end_factor": 1.0, **SCHEDULE},
    ),
    "OneCycleLR": (
        lambda s: lr.OneCycleLR,
        {
            "max_learning_rate": 0.1,
            "total_steps": 30,
            "divide_factor": 25.0,
            "end_learning_rate": 0.0001,
            "phase_pct": 0.3,
            "anneal_strategy": "cos",
            "three_phase": False,
            **SCHEDULE,
        },
    ),
    "Executor.run": (
        lambda s: s.executor.run,
        {
            "program": "@main",
            "feed": "@feed",
            "fetch_list": None,
            "feed_var_name": "feed",
            "fetch_var_name": "fetch",
            "scope": "@scope",
            "return_numpy": True,
            "use_program_cache": False,
            "use_prune": False,
        },
    ),
    "program_guard": (lambda s: amp.static.program_guard, {"main_program": "@main", "startup_program": "@startup"}),
    "append_backward": (
        lambda s: amp.static.append_backward,
        {"loss": "@loss", "parameter_list": None, "no_grad_set": None, "callbacks": None, "checkpoints": None},
    ),
    "clone": (lambda s: s.main.clone, {"for_test": False}),
    "name_scope": (lambda s: amp.static.name_scope, {"prefix": "encoder"}),
    "scope_guard": (lambda s: amp.static.scope_guard, {"scope": "@scope"}),
    "data": (lambda s: amp.static.data, {"name": "y", "shape": [1], "dtype": None, "lod_level": 0}),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_keyword_is_taken(name: str) -> None:
    step = Step()
    of, keywords = CALLS[name]
    given = {
        key: getattr(step, value[1:]) if isinstance(value, str) and value[0] == "@" else value
        for key, value in keywords.items()
    }
    with amp.program_guard(step.main, step.startup), amp.unique_name.guard():
        of(step)(**given)


def test_the_scaling_functions_by_paddles_keywords() -> None:
    """check_finite_and_unscale and update_loss_scaling of a loop of the user's own."""
    main = amp.Program()
    with amp.program_guard(main):
        grad, scale = amp.data("g", [2]), amp.data("scale", [1])
        good, bad = amp.data("good", [1], "int32"), amp.data("bad", [1], "int32")
        (grad,), found = amp.static.amp.check_finite_and_unscale(x=[grad], scale=scale, name="find_infinite_scale")
        _, new, *_ = amp.static.amp.update_loss_scaling(
            x=[grad],
            found_inf=found,
            prev_loss_scaling=scale,
            num_good_steps=good,
            num_bad_steps=bad,
            incr_every_n_steps=2,
            decr_every_n_nan_or_inf=2,
            incr_ratio=2.0,
            decr_ratio=0.8,
            stop_update=False,
            name="update_loss_scaling",
        )
    count = np.array([1], np.int32)
    feed = {"g": np.array([4.0, 8.0], np.float32), "scale": np.array([4.0], np.float32), "good": count, "bad": count}
    values = amp.Executor().run(main, feed, [grad, found, new], amp.Scope())
    assert [v.tolist() for v in values] == [[1.0, 2.0], [False], [8.0]]
