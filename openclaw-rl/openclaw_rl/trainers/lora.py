"""The LoRA policy: a frozen base with one adapter (PEFT), and its EMA teacher.

Promises: equal seeds give equal first adapters. The adapter's files are a PEFT folder that PEFT and SGLang load, in
fp32. Training never changes the base.

The EMA teacher is a slow mean of the policy's versions, as an adapter of the same shape:

    W̄_v = d · W̄_{v−1} + (1 − d) · s B_v A_v,   W̄_0 = 0: the base, which is the policy's start

The mean is taken of the *product*. A mean of the factors is another adapter: B̄ Ā has the cross terms B_u A_w of
versions that were never one policy, and the same product in other factors (B R)(R⁻¹ A) would give another mean. The
mean of two products of rank r has rank 2r at most. Its best approximation of rank r (Eckart–Young) is kept, by a QR of
the stacked factors and an SVD of a 2r × 2r core, never of a matrix of the model's size. `ema_truncation` is the share
of W̄ that this leaves out; versions that follow each other differ little, so it is small.

A restart continues the mean. A version from before the teacher starts one with that version.

Leaves to others: the forward passes (`policy`), the loss, the optimizer, folders that must survive a crash
(`checkpoint.py`).
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from openclaw_rl.errors import SettingsError, TrainerError
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.checkpoint import EMA_FOLDER, adapter_conflicts
from openclaw_rl.trainers.fused import fuse_lora
from openclaw_rl.trainers.policy import Policy
from openclaw_rl.types import WeightKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_FILE = "adapter_model.safetensors"
_A, _B = ".lora_A.", ".lora_B."
_OF_VISION = r".*\bvisual\..*"
_DEFAULT_TARGETS = TrainerSettings.model_fields["target_modules"].default


class LoraPolicy(Policy):
    """A policy whose adapter is trained."""

    kind = WeightKind.LORA
    weights_file: ClassVar[str] = ADAPTER_FILE

    def __init__(
        self, base: "PreTrainedModel", settings: TrainerSettings, *, between: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(base, settings, between=between)
        alpha = int(settings.alpha) if settings.alpha.is_integer() else settings.alpha
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=alpha,  # scaling is alpha / rank; a fraction is fine
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            fan_in_fan_out=any(_is_conv1d(module) for module in self._decoder.modules()),
            target_modules=sorted(target_modules(self._decoder, settings.target_modules)),
            # A vision tower may have layers of the same names, and SGLang adapts the language model alone.
            exclude_modules=_OF_VISION if hasattr(base.config, "vision_config") else None,
        )
        self._modules = frozenset(config.target_modules or ())
        self.model: PeftModel = get_peft_model(base, config).eval()
        for module in self.model.modules():
            if isinstance(module, LoraLayer):
                module.cast_input_dtype_enabled = False  # `_precision` decides; PEFT would copy each input in fp32
        fuse_lora(self.model)
        self.parameters = {
            name: parameter for name, parameter in sorted(self.model.named_parameters()) if parameter.requires_grad
        }

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Become version 0: A drawn from `seed` in the order of names, B zero, so the base's outputs are unchanged."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.parameters.items():
            if _A in name:
                drawn = torch.empty(parameter.shape, dtype=torch.float32)
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
                parameter.copy_(drawn)
            else:
                parameter.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """Return a copy of the adapter on the CPU, by PEFT's names."""
        tensors = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}

    def save(self, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Write the adapter, or `tensors` of its shape, as a PEFT folder.

        The files are `adapter_config.json` and `adapter_model.safetensors`.
        """
        save_file(dict(tensors or self.tensors()), folder / ADAPTER_FILE, metadata={"format": "pt"})
        config = copy.copy(self.model.peft_config["default"])
        config.inference_mode = True
        config.base_model_name_or_path = None  # a local path; the ledger keeps `base_hash`
        config.save_pretrained(str(folder))

    def load(self, folder: Path, kept: Mapping[str, Tensor] | None = None) -> None:
        set_peft_model_state_dict(self.model, self.read(folder))

    def read(self, folder: Path) -> dict[str, Tensor]:
        """Return the adapter of a PEFT folder. Raises TrainerError when it is of another form, or not finite."""
        # The tensors have a rank and modules. Alpha, which scales their product, stands in the config alone.
        if conflicts := list(adapter_conflicts(folder, self._settings, self._modules)):
            raise TrainerError(f"{folder}: this adapter is of another form: {'; '.join(conflicts)}")
        tensors = load_file(folder / ADAPTER_FILE)
        expected = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        if {n: tuple(t.shape) for n, t in tensors.items()} != {n: tuple(t.shape) for n, t in expected.items()}:
            raise TrainerError(
                f"{folder}: this adapter has other modules or another rank than trainer.target_modules and "
                f"trainer.rank = {self._settings.rank} say"
            )
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
            raise TrainerError(f"{folder}: the adapter holds values that are not finite")
        return tensors

    @property
    def is_base(self) -> bool:
        return not any(bool(tensor.any()) for name, tensor in self.parameters.items() if _B in name)

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        with self.model.disable_adapter(), torch.no_grad():
            yield


def target_modules(decoder: nn.Module, wanted: Sequence[str]) -> set[str]:
    """Return the names of the modules that PEFT adapts. Raises SettingsError if a name of the user does not exist.

    Default names that a model lacks (GPT-2, Phi-3 …) are replaced by all its linear layers.
    """
    linear = {name.rsplit(".", 1)[-1] for name, module in decoder.named_modules() if _is_linear(module)}
    missing = set(wanted) - linear
    if not missing:
        return set(wanted)
    if tuple(wanted) == _DEFAULT_TARGETS and linear:
        return linear
    raise SettingsError(
        f"trainer.target_modules: the model has no {', '.join(sorted(missing))}; its linear layers are "
        f"{', '.join(sorted(linear)) or 'none'}"
    )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """Return True for GPT-2's linear layer, whose weight is transposed."""
    return type(module).__name__ == "Conv1D"


class EmaTeacher:
    """The slow mean of a policy's versions."""

    def __init__(self, policy: LoraPolicy, decay: float) -> None:
        """decay: the share of the old mean that each new mean keeps."""
        self._policy, self._decay = policy, decay
        self._mean: dict[str, Tensor] = {}

    def load(self, version: Path | None) -> None:
        """Load the mean of this version, whose adapter the policy holds; None: the base. Raises TrainerError."""
        if version is None:
            self._mean = {name: torch.zeros_like(tensor) for name, tensor in self._policy.tensors().items()}
        elif (version / EMA_FOLDER).is_dir():
            self._mean = self._policy.read(version / EMA_FOLDER)
        else:
            self._mean = self._policy.tensors()

    def follow(self) -> float:
        """Add the policy's new adapter to the mean. Return the share that the rank leaves out."""
        old, new = self._mean, self._policy.tensors()
        self._mean, left_out, whole = {}, 0.0, 0.0
        for a_name in (name for name in new if _A in name):
            b_name = a_name.replace(_A, _B)
            found = _mean((old[a_name], old[b_name]), (new[a_name], new[b_name]), self._decay)
            self._mean |= {a_name: found.a, b_name: found.b}
            left_out, whole = left_out + found.left_out, whole + found.whole
        return math.sqrt(left_out / whole) if whole else 0.0

    def write(self, version: Path) -> None:
        folder = version / EMA_FOLDER
        folder.mkdir(mode=0o700)
        self._policy.save(folder, self._mean)


@dataclass(frozen=True, slots=True)
class _Mean:
    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    left_out: float
    whole: float
    """Squared norm of the mean; `left_out` is that of the part beyond the rank."""


def _mean(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], decay: float) -> _Mean:
    """Return the product of rank r nearest to decay · B_old A_old + (1 − decay) · B_new A_new.

    Shapes: A [r, in], B [out, r].
    """
    (a_old, b_old), (a_new, b_new) = old, new
    rank = a_new.shape[0]
    q_out, r_out = torch.linalg.qr(torch.cat([decay * b_old, (1 - decay) * b_new], 1).double())  # of [out, 2r]
    q_in, r_in = torch.linalg.qr(torch.cat([a_old, a_new]).double().T)  # of [in, 2r]
    u, s, v = torch.linalg.svd(r_out @ r_in.T, full_matrices=False)
    root = s[:rank].sqrt()
    a, b = root[:, None] * (v[:rank] @ q_in.T), q_out @ u[:, :rank] * root
    missing = rank - len(root)  # in a layer narrower than the rank
    a, b = functional.pad(a, (0, 0, 0, missing)), functional.pad(b, (0, missing))
    return _Mean(a.float(), b.float(), float(s[rank:].square().sum()), float(s.square().sum()))
