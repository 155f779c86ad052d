"""The base model in the trainer: its precision, its device, and the policy that is trained on it.

Only the trainer's base is quantised, to save memory: the engine serves its own weights. The importance weights correct
for the difference, as for any difference between trainer and engine.

Leaves to others: finding the model (`models.resolve`), forward passes (`policy`).
"""

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from openclaw_rl.errors import SettingsError
from openclaw_rl.models import resolve, vision
from openclaw_rl.models.resolve import ResolvedModel
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.full import FullPolicy
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.trainers.pictures import Eyes
from openclaw_rl.trainers.policy import Policy
from openclaw_rl.types import WeightKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def make_policy(
    kind: WeightKind, resolved: ResolvedModel, settings: TrainerSettings, pictures: Path | None = None
) -> Policy:
    """Load the base and return the policy. Blocks for seconds or minutes. Raises SettingsError.

    pictures: folder of the pictures that samples name; an adapter of a model with a known vision tower is then trained
    on them too. None: on text alone.
    """
    if kind is WeightKind.LORA:
        base = load(resolved, settings)
        policy = LoraPolicy(base, settings)
        policy.eyes = None if pictures is None else Eyes.of(base, resolved.folder, pictures)
        return policy
    base = resolve.load_model(resolved, dtype_of(settings), settings.device)
    if vision.KNOWN.intersection(getattr(base.config, "architectures", None) or ()):
        raise SettingsError(
            f'training.weights "full": {resolved.name} has a vision tower, and only adapters of its language model are '
            "trained"
        )
    return FullPolicy(base, settings, load_base=lambda: resolve.load_model(resolved, dtype_of(settings)))


def load(resolved: ResolvedModel, settings: TrainerSettings) -> "PreTrainedModel":
    if settings.quantise == "none":
        return resolve.load_model(resolved, dtype_of(settings), settings.device)
    return _quantised(resolved, settings)


def dtype_of(settings: TrainerSettings) -> torch.dtype:
    if settings.dtype == "auto":
        return torch.float32 if settings.device == "cpu" else torch.bfloat16
    return torch.float32 if settings.dtype == "float32" else torch.bfloat16


def _quantised(resolved: ResolvedModel, settings: TrainerSettings) -> "PreTrainedModel":
    from transformers import BitsAndBytesConfig

    if torch.device(settings.device).type == "cpu":
        # On some CPUs bitsandbytes repacks weights for inference, and gradients are lost without an error.
        raise SettingsError(f'trainer.quantise "{settings.quantise}" needs a GPU: trainer.device is "cpu"')
    missing = [name for name in ("bitsandbytes", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError(
            f'trainer.quantise "{settings.quantise}" needs {" and ".join(missing)}: pip install "openclaw-rl[lowmem]"'
        )
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # a line for every matrix product
    dtype = dtype_of(settings)
    how: dict[str, Any] = (
        {"load_in_8bit": True}
        if settings.quantise == "8bit"
        else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    )
    quantisation = BitsAndBytesConfig(**how)
    where = {"": settings.device}
    return resolve.load_pretrained(
        resolved.folder, dtype=dtype, quantization_config=quantisation, device_map=where
    ).eval()
