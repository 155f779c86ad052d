"""Pictures in the trainer: the hidden states of a row whose prompt has pictures, by the model's own forward pass.

The files are those of the ledger, read by their SHA-256. transformers' processor makes patches of them, as the engine's
does, and the vision tower stays frozen: the adapter is of the language model alone, as SGLang applies it. A row with
pictures is computed alone and is never packed: its positions have three axes.

On a GPU SGLang scales a picture with torchvision. transformers takes torchvision here too where it is installed, else
PIL, whose pixels differ a little.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from openclaw_rl.errors import SettingsError, TrainerError
from openclaw_rl.models.vision import Vision
from openclaw_rl.types import Ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Eyes:
    """The vision tower of a base, and the pictures that it may see."""

    def __init__(self, base: "PreTrainedModel", model: Path, pictures: Path) -> None:
        """model: the folder of the base. pictures: the ledger's folder of pictures. Raises SettingsError without a
        vision tower that is known."""
        from transformers import AutoImageProcessor

        self.placeholder = Vision.of(model).placeholder
        self._pictures = pictures
        self._whole: Any = base.base_model
        self._processor: Any = AutoImageProcessor.from_pretrained(model, local_files_only=True)
        self._last: tuple[tuple[str, ...], dict[str, Tensor]] = ((), {})

    @classmethod
    def of(cls, base: "PreTrainedModel", model: Path, pictures: Path) -> "Eyes | None":
        """Return the eyes of a model; None for one that reads text only."""
        try:
            return cls(base, model, pictures)
        except SettingsError:
            return None

    def rest(self) -> None:
        """Let go of the last pictures: they may be forgotten before the next batch comes."""
        self._last = ((), {})

    def has(self, digests: Sequence[str]) -> bool:
        """Return True if the files of these pictures are here."""
        return all((self._pictures / digest).is_file() for digest in digests)

    def hidden(self, ids: Ids, digests: tuple[str, ...]) -> Tensor:
        """Return the hidden states [N, H] of these ids, whose placeholders are of these pictures, in order.

        Raises TrainerError when the placeholders are not as many as the pictures have tokens.
        """
        device = self._whole.device
        row = torch.tensor([ids], device=device)
        patches = self._patches(digests)
        is_picture = row == self.placeholder
        merge = self._processor.merge_size
        if int(is_picture.sum()) != int(patches["image_grid_thw"].prod(-1).sum()) // merge**2:
            raise TrainerError("the prompt's places are not as many as its pictures have tokens")
        seen: Tensor = self._whole(
            input_ids=row,
            mm_token_type_ids=is_picture.int(),
            use_cache=False,
            **{name: tensor.to(device) for name, tensor in patches.items()},
        ).last_hidden_state
        return seen.flatten(0, 1)

    def _patches(self, digests: tuple[str, ...]) -> dict[str, Tensor]:
        # Two passes of one step are of the same row: with the policy, and with the reference.
        if self._last[0] != digests:
            try:
                images = [Image.open(self._pictures / digest).convert("RGB") for digest in digests]
            except OSError as error:
                raise TrainerError(f"a picture of the batch cannot be read: {error}") from error
            made = self._processor(images=images, return_tensors="pt")
            self._last = digests, {name: made[name] for name in ("pixel_values", "image_grid_thw")}
        return self._last[1]
