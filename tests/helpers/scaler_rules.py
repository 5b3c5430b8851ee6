"""The published rules of loss scalers, each in plain Python as its source has it; oracles for ``test_scaler_presets``.

A rule has ``update(found_inf)`` and ``record()``: the scale and the counts as ``LossScale`` has them. Numbers are fp32
where the source keeps an fp32 variable, Python floats where it keeps those.
"""

from __future__ import annotations

from typing import Any

import numpy as np

F32 = np.float32

#: Every preset of ``amp.LossScaler``.
PRESETS = (
    "fixed",
    "paddle",
    "exponential",
    "torch",
    "keras",
    "tf_keras",
    "apex",
    "deepspeed",
    "deepspeed_fused",
    "megatron",
    "jmp",
    "mindspore",
    "oneflow",
)


class Paddle:
    """paddle/phi/kernels/impl/amp_kernel_impl.h, Update."""

    def __init__(self, scale: float, every: int = 1000, after: int = 2) -> None:
        self.scale, self.good, self.bad = F32(scale), 0, 0
        self.every, self.after = every, after

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.good = 0
            self.bad += 1
            if self.bad == self.after:
                new = self.scale * F32(0.8)
                self.scale = F32(1) if new < 1 else new
                self.bad = 0
        else:
            self.bad = 0
            self.good += 1
            if self.good == self.every:
                new = self.scale * F32(2)
                self.scale = new if np.isfinite(new) else self.scale
                self.good = 0

    def record(self) -> tuple[Any, int, int]:
        return self.scale, self.good, self.bad


class Exponential:
    """tensorflow/contrib/mixed_precision/python/loss_scale_manager.py, ExponentialUpdateLossScaleManager."""

    def __init__(self, scale: float, every: int = 1000, after: int = 2) -> None:
        self.scale, self.good, self.bad = F32(scale), 0, 0
        self.every, self.after = every, after

    def update(self, found_inf: bool) -> None:
        if not found_inf:
            if self.good + 1 >= self.every:
                new = self.scale * F32(2)
                self.scale = new if np.isfinite(new) else self.scale
                self.good = self.bad = 0
            else:
                self.good += 1
        elif self.bad + 1 >= self.after:
            self.scale = max(F32(1), self.scale * F32(0.8))
            self.good = self.bad = 0
        else:
            self.bad += 1
            self.good = 0

    def record(self) -> tuple[Any, int, int]:
        return self.scale, self.good, self.bad


class Counted:
    """A rule that decreases at every bad step and counts good ones."""

    start = 2.0**16
    window = 2000

    def __init__(self, scale: float, every: int = 2000) -> None:
        self.scale: Any = F32(scale)
        self.counter, self.every = 0, every

    def record(self) -> tuple[Any, int, int]:
        return self.scale, self.counter, 0


class Torch(Counted):
    """aten/src/ATen/native/cuda/AmpKernels.cu, amp_update_scale_cuda_kernel."""

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.scale = self.scale * F32(0.5)
            self.counter = 0
        else:
            successful = self.counter + 1
            if successful == self.every:
                new = self.scale * F32(2)
                if np.isfinite(new):
                    self.scale = new
                self.counter = 0
            else:
                self.counter = successful


class Keras(Counted):
    """keras/src/optimizers/loss_scale_optimizer.py (Keras 3)."""

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.counter = 0
            self.scale = self.scale / F32(2)
        elif self.counter == self.every - 1:
            self.counter = 0
            self.scale = self.scale * F32(2)
        else:
            self.counter += 1


class TfKeras(Counted):
    """tf_keras/mixed_precision/loss_scale_optimizer.py, _DynamicLossScaleState."""

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.counter = 0
            self.scale = max(self.scale / F32(2), F32(1))
        elif self.counter + 1 >= self.every:
            new = self.scale * F32(2)
            self.scale = new if np.isfinite(new) else self.scale
            self.counter = 0
        else:
            self.counter += 1


class Apex(Counted):
    """apex/amp/scaler.py, LossScaler.update_scale; the scale is a Python float."""

    def __init__(self, scale: float, every: int = 2000, lowest: float | None = None) -> None:
        super().__init__(scale, every)
        self.scale, self.lowest = scale, lowest

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.scale = max(self.lowest, self.scale / 2.0) if self.lowest else self.scale / 2.0
            self.counter = 0
        else:
            self.counter += 1
        if self.counter == self.every:
            self.scale = min(2.0**24, self.scale * 2.0)
            self.counter = 0


class Jmp(Counted):
    """jmp/_src/loss_scale.py, DynamicLossScale.adjust."""

    def __init__(self, scale: float, every: int = 2000, lowest: float = 1.0) -> None:
        super().__init__(scale, every)
        self.lowest = F32(lowest)

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.scale = max(self.lowest, self.scale / F32(2))
        elif self.counter == self.every - 1:
            new = self.scale * F32(2)
            self.scale = new if np.isfinite(new) else self.scale
        self.counter = ((self.counter + 1) % self.every) * (not found_inf)


class OneFlow(Counted):
    """oneflow/user/kernels/dynamic_loss_scale_schedule_kernel.cpp; double arithmetic on an fp32 scale."""

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.counter = 0
            self.scale = F32(max(float(self.scale) / 2.0, 1.0))
        elif self.counter + 1 >= self.every:
            self.scale = F32(min(float(self.scale) * 2.0, float(np.finfo(F32).max)))
            self.counter = 0
        else:
            self.counter += 1


class Iterations:
    """A rule that compares the number of this iteration with that of the last overflow; the scale is a Python float."""

    def __init__(self, scale: float, every: int = 1000, first: int = 0) -> None:
        self.scale: float = scale
        self.every, self.iteration, self.last_overflow = every, first, first - 1
        self.error = False

    @property
    def since(self) -> int:
        """Good steps up to now since the overflow."""
        return self.iteration - 1 - self.last_overflow


class DeepSpeed(Iterations):
    """deepspeed/runtime/fp16/loss_scaler.py, DynamicLossScaler.update_scale (ZeRO)."""

    def __init__(self, scale: float, every: int = 1000, shift: int = 2, consecutive: bool = False) -> None:
        super().__init__(scale, every)
        self.shift = self.hysteresis = shift
        self.consecutive = consecutive

    def update(self, found_inf: bool) -> None:
        self.error = False
        if found_inf:
            if self.shift == 1 or self.hysteresis == 1:
                self.error = self.scale == 1.0  # it raises here
                self.scale = max(self.scale / 2.0, 1.0)
            else:
                self.hysteresis -= 1
            self.last_overflow = self.iteration
        else:
            if self.consecutive:
                self.hysteresis = self.shift
            if (self.iteration - self.last_overflow) % self.every == 0:
                if not self.consecutive:
                    self.hysteresis = self.shift
                self.scale *= 2.0
        self.iteration += 1

    def record(self) -> tuple[float, int, int]:
        return self.scale, self.since % self.every, self.shift - self.hysteresis


class DeepSpeedFused(Iterations):
    """deepspeed/runtime/fp16/fused_optimizer.py, FP16_Optimizer._update_scale."""

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.scale = max(self.scale / 2.0, 1.0)
            self.last_overflow = self.iteration
        else:
            stable = (self.iteration - self.last_overflow) - 1
            if stable > 0 and stable % self.every == 0:
                self.scale *= 2.0
        self.iteration += 1

    def record(self) -> tuple[float, int, int]:
        return self.scale, (self.since - 1) % self.every if self.since else -1, 0


class MindSpore(Iterations):
    """mindspore/train/loss_scale_manager.py, DynamicLossScaleManager."""

    def __init__(self, scale: float, every: int = 2000, most: int = 1000) -> None:
        super().__init__(scale, every, first=1)
        self.bad_steps, self.most = 0, most

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.scale = max(self.scale * 0.5, 1)
            self.last_overflow = self.iteration
            self.bad_steps += 1
        else:
            if (self.iteration - self.last_overflow) % self.every == 0:
                self.scale *= 2
            self.bad_steps = 0
        self.error = self.bad_steps > self.most  # it raises here
        self.iteration += 1

    def record(self) -> tuple[float, int, int]:
        return self.scale, self.since % self.every, 0


class Megatron:
    """megatron/core/optimizer/grad_scaler.py, DynamicGradScaler.update."""

    def __init__(self, scale: float, every: int = 1000, hysteresis: int = 2) -> None:
        self.scale, self.tracker, self.left = F32(scale), 0, hysteresis
        self.every, self.hysteresis = every, hysteresis

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.tracker = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale * F32(0.5), F32(1))
        else:
            self.tracker += 1
            if self.tracker == self.every:
                self.tracker = 0
                self.left = self.hysteresis
                self.scale = self.scale * F32(2)

    def record(self) -> tuple[Any, int, int]:
        return self.scale, self.tracker, self.hysteresis - max(self.left, 1)
