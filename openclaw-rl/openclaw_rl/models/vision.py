"""Vision towers: the number of tokens that a model's processor puts into a prompt for a picture.

The processor of the Qwen-VL family scales a picture so that its sides are multiples of `factor` and its area is within
bounds. Each square of `factor` pixels then is one token of the prompt. `Vision.tokens` computes that number from the
picture's size and the model's files, without torch; a test holds it against transformers' own processor.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_rl.errors import RequestError, SettingsError
from openclaw_rl.types import Ids
from openclaw_rl.types.pictures import Picture

KNOWN = frozenset({"Qwen3VLForConditionalGeneration"})
"""Architectures whose processor and forward pass were checked."""
_MOST_RATIO = 200
"""Largest ratio of a picture's sides; the processor refuses more."""


@dataclass(frozen=True, slots=True)
class Vision:
    """The facts about a model's vision tower that a prompt depends on."""

    placeholder: int
    """Id of the token that a prompt repeats once for each square of a picture."""
    reserved: frozenset[int]
    """Ids that stand for pictures and videos: no text of a client may spell them beside a picture."""
    factor: int
    """Pixels of a square's side, after the scaling."""
    least_pixels: int
    most_pixels: int

    @classmethod
    def of(cls, folder: Path) -> "Vision":
        """Read the model's files. Raises SettingsError, which says why the model can read no pictures."""
        config = _json(folder / "config.json")
        if not isinstance(config.get("vision_config"), dict):
            raise SettingsError("has no vision tower: it reads text only")
        architectures = config.get("architectures") or []
        if not KNOWN.intersection(architectures):
            named = ", ".join(map(str, architectures)) or "unnamed"
            raise SettingsError(f"has a vision tower that this server does not know ({named})")
        processor = _json(folder / "preprocessor_config.json") or _json(folder / "processor_config.json").get(
            "image_processor", {}
        )
        size = processor.get("size") or {}
        try:
            return cls(
                placeholder=int(config["image_token_id"]),
                reserved=frozenset(
                    int(config[name]) for name in ("image_token_id", "video_token_id") if config.get(name) is not None
                ),
                factor=int(processor["patch_size"]) * int(processor["merge_size"]),
                least_pixels=int(processor.get("min_pixels") or size["shortest_edge"]),
                most_pixels=int(processor.get("max_pixels") or size["longest_edge"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SettingsError(f"has a vision tower, and files that do not say how it reads: {error!r}") from error

    def tokens(self, width: int, height: int) -> int:
        """Return the tokens of a picture of this size. Raises ValueError for a picture that is too narrow."""
        if max(width, height) > _MOST_RATIO * min(width, height):
            raise ValueError(f"one side is more than {_MOST_RATIO} times the other")
        across, down = (round(side / self.factor) for side in (width, height))
        area = across * down * self.factor**2
        if area > self.most_pixels:
            shrink = math.sqrt(width * height / self.most_pixels)
            across, down = (max(1, math.floor(side / shrink / self.factor)) for side in (width, height))
        elif area < self.least_pixels:
            grow = math.sqrt(self.least_pixels / (width * height))
            across, down = (math.ceil(side * grow / self.factor) for side in (width, height))
        return across * down

    def expanded(self, ids: Ids, pictures: Sequence[Picture]) -> Ids:
        """Return the ids with the k-th placeholder as often as the k-th picture has tokens. Raises RequestError."""
        if (shown := ids.count(self.placeholder)) != len(pictures):
            why = f"the model's template shows {shown} of the {len(pictures)} pictures"
            raise RequestError(why, code="unsupported_content", param="messages")
        expanded: list[int] = []
        left = iter(pictures)
        for token in ids:
            count = 1
            if token == self.placeholder:
                picture = next(left)
                try:
                    count = self.tokens(picture.width, picture.height)
                except ValueError as error:
                    why = f"a picture of {picture.width} x {picture.height} pixels: {error}"
                    raise RequestError(why, code="image_parse_error", param="messages") from error
            expanded += [token] * count
        return tuple(expanded)


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
