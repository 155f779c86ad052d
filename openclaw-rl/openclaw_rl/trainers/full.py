"""Policy of full weights: all of the model's own weights are trained.

Promises: with 16-bit weights the optimizer works on fp32 masters, and gradients are summed in fp32 however many passes
a batch takes. Rounding never loses a step. `save` writes a Hugging Face folder in the served precision, so that an
engine holds exactly the weights of the trainer's forward pass. The masters go with the optimizer's state.

Leaves to others: the forward passes (`policy`), the loss, the optimizer.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from openclaw_rl.errors import SettingsError, TrainerError
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.policy import Policy
from openclaw_rl.types import WeightKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_FILE = "model.safetensors"
_MASTER = "master."


class FullPolicy(Policy):
    """A policy whose every parameter is trained."""

    kind = WeightKind.FULL
    weights_file: ClassVar[str] = MODEL_FILE

    def __init__(
        self,
        base: "PreTrainedModel",
        settings: TrainerSettings,
        *,
        load_base: "Callable[[], PreTrainedModel]",
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """load_base: loads the base again, for version 0 and as the reference; on any device."""
        if settings.quantise != "none":
            raise SettingsError(f'trainer.quantise "{settings.quantise}": full weights are trained in 16 or 32 bits')
        super().__init__(base, settings, between=between)
        self.model = base
        self._load_base = load_base
        self._reference: list[Tensor] | None = None
        self._own = dict(sorted(base.named_parameters()))  # a tied tensor once
        masters = {name: self._master_of(parameter) for name, parameter in self._own.items()}
        for name, parameter in self._own.items():
            parameter.requires_grad_(True)
            if masters[name] is not parameter:
                parameter.register_post_accumulate_grad_hook(_into(masters[name]))
        self.parameters = masters

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        self._take(dict(self._load_base().named_parameters()), "the base")

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder, max_shard_size="1000GB")

    def load(self, folder: Path, kept: Mapping[str, Tensor] | None = None) -> None:
        masters = {name.removeprefix(_MASTER): t for name, t in (kept or {}).items() if name.startswith(_MASTER)}
        written = _same_names(load_file(folder / MODEL_FILE), self._own)
        self._take(masters or written, str(folder))
        if not self.is_finite():
            raise TrainerError(f"{folder}: the weights hold values that are not finite")

    def state(self) -> dict[str, Tensor]:
        if all(self.parameters[name] is parameter for name, parameter in self._own.items()):
            return {}  # fp32 throughout: what is served is the master
        return {_MASTER + name: master.detach().cpu() for name, master in self.parameters.items()}

    @torch.no_grad()
    def updated(self) -> None:
        for name, parameter in self._own.items():
            if self.parameters[name] is not parameter:
                parameter.copy_(self.parameters[name])

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Compute with the base's tensors in place of the policy's. They stay on the device after the first use."""
        if self._reference is None:
            base = dict(self._load_base().named_parameters())
            self._reference = [base[name].detach().to(p.device, p.dtype) for name, p in self._own.items()]
        self._swap(self._reference)
        try:
            with torch.no_grad():
                yield
        finally:
            self._swap(self._reference)

    def _swap(self, others: list[Tensor]) -> None:
        for place, parameter in enumerate(self._own.values()):
            parameter.data, others[place] = others[place], parameter.data

    def _master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        return parameter if parameter.dtype == wide else nn.Parameter(parameter.detach().to(wide))

    @torch.no_grad()
    def _take(self, tensors: Mapping[str, Tensor], source: str) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name in self._own}
        if shapes != {name: tuple(parameter.shape) for name, parameter in self._own.items()}:
            raise TrainerError(f"{source}: these weights are of another model")
        for name, master in self.parameters.items():
            master.copy_(tensors[name])
        self.updated()


def _into(master: nn.Parameter) -> Callable[[Tensor], None]:
    """Return a hook that adds a pass's gradient to the master's, and frees it."""

    def add(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return add


def _same_names(tensors: Mapping[str, Tensor], own: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the tensors by the model's names. A tied tensor is written once, maybe under its other name."""
    found = {name: tensors[name] for name in own if name in tensors}
    missing, spare = [name for name in own if name not in found], [name for name in tensors if name not in own]
    if len(missing) == len(spare) == 1:
        found[missing[0]] = tensors[spare[0]]
    return found
