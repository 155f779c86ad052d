"""AdamW on the trainable parameters with a linear warm-up after fresh moments, and its state as named tensors.

Promises: saving and loading the state gives the same next step, bit for bit. State is tensors and numbers, no pickle.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from openclaw_rl.errors import TrainerError
from openclaw_rl.settings import TrainerSettings

_MOMENTS = ("exp_avg", "exp_avg_sq")


class PolicyOptimizer:
    """AdamW with a warm-up, and its state by the parameters' names."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: TrainerSettings) -> None:
        self._parameters, self._settings = parameters, settings
        self._is_fused = all(parameter.is_cuda for parameter in parameters.values())
        self.fresh()

    def fresh(self) -> None:
        """Forget the moments; the warm-up starts again."""
        self.steps = 0
        self._adamw = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=self._settings.learning_rate,
            betas=(self._settings.beta1, self._settings.beta2),
            weight_decay=self._settings.weight_decay,
            fused=self._is_fused,
        )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step: warm-up step k of n takes (k + 1) / (n + 1) of the full rate."""
        share = min(1.0, (self.steps + 1) / (self._settings.warmup_steps + 1))
        return self._settings.learning_rate * share

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def scale_gradients(self, factor: float) -> None:
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def clip_gradients(self) -> float:
        """Clip the gradients to `max_grad_norm`. Return their norm before; not finite if they are not."""
        return float(nn.utils.clip_grad_norm_(list(self._parameters.values()), self._settings.max_grad_norm))

    def step(self) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate
        self._adamw.step()
        self.steps += 1

    def state(self) -> dict[str, Tensor]:
        """Return `<parameter>.exp_avg`, `.exp_avg_sq` and `.step` of each parameter; the caller keeps `steps`."""
        tensors = {}
        for name, parameter in self._parameters.items():
            kept = self._adamw.state.get(parameter, {})
            for key in (*_MOMENTS, "step"):
                if key in kept:
                    tensors[f"{name}.{key}"] = kept[key].detach().cpu().contiguous()
        return tensors

    def load(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Load the state. Raises TrainerError when it is of other parameters."""
        self.fresh()
        self.steps = steps
        for name, parameter in self._parameters.items():
            kept = {key: tensors.get(f"{name}.{key}") for key in (*_MOMENTS, "step")}
            if all(value is None for value in kept.values()):
                continue  # a parameter that never had a gradient
            if any(value is None or (key != "step" and value.shape != parameter.shape) for key, value in kept.items()):
                raise TrainerError(f"the optimizer state of {name} is missing or of another shape")
            self._adamw.state[parameter] = {
                key: self._step_of(value, parameter)
                if key == "step"
                else value.to(parameter.device, parameter.dtype, copy=True)
                for key, value in kept.items()
                if value is not None
            }

    def _step_of(self, value: Tensor, parameter: nn.Parameter) -> Tensor:
        return value.to(parameter.device, copy=True) if self._is_fused else value.clone()
