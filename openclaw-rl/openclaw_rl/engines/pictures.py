"""Pictures in an engine's request: ids with one placeholder for each picture, and the pictures beside them.

This is what SGLang 0.5.15.post1 does with `input_ids` and `image_data` of one `/generate` (read in its source, for the
processor of Qwen3-VL):

* `image_data` is a list with one entry for each picture, in the prompt's order. A `data:` URL is decoded; anything else
  would be fetched or opened, so nothing else is sent.
* It decodes `input_ids` to text, counts the pictures' marks in it, and gives text and pictures to transformers'
  processor. That one replaces each `<|image_pad|>` of the text, so the ids must hold **one** placeholder for a picture.
  Ids that are expanded already would be expanded again, and the call fails.
* The processor's ids are then thrown away (`SGLANG_MM_AVOID_RETOKENIZE`, on by default). The ids of the request stay as
  they are, and their k-th placeholder becomes as many as the k-th picture has tokens. So no text drifts.
* If the numbers do not agree, it logs a warning and takes the processor's ids after all. The prompt may then have other
  tokens. `meta_info.prompt_tokens` counts the expanded prompt: `generation` compares it with our own length, and a turn
  whose prompt has another length is never trained on.
* Log-probs of the prompt and `logprob_start_len` count expanded positions. The ids at a picture's positions are hashes
  of its content there, so their log-probs mean nothing.
* On a GPU it decodes a JPEG with the card. Pixels then differ from PIL's, and the picture is a tensor without a height:
  the count of its tokens fails, and with it the rule above. So a JPEG is sent as a PNG of the same pixels.
* Any other picture is decoded by PIL and converted to RGB, as the trainer does.

Our prompts are kept expanded everywhere else: in the ledger, for the trainer, in counts of tokens.
"""

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Self

from openclaw_rl.errors import AlignmentError
from openclaw_rl.models.picture_files import PictureFault, decoded, is_jpeg, scaled
from openclaw_rl.types import Ids
from openclaw_rl.types.pictures import Picture, pictures_of


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """A prompt with pictures, as an engine's request holds it."""

    ids: Sequence[int]
    """With one placeholder for each picture."""
    image_data: list[str] = field(repr=False)
    placeholder: int

    @classmethod
    def of(cls, prompt_ids: Ids, pictures: Sequence[Picture], placeholder: int) -> Self:
        """prompt_ids: expanded. Raises ValueError if the bytes of a picture are not here, or a picture has no place."""
        # Templates write a mark before and behind each picture, so that two pictures are never one run.
        ids = [
            token
            for at, token in enumerate(prompt_ids)
            if token != placeholder or at == 0 or prompt_ids[at - 1] != placeholder
        ]
        if ids.count(placeholder) != len(pictures):
            raise ValueError(f"{len(pictures)} pictures, and {ids.count(placeholder)} places in the prompt")
        return cls(ids, [data_url(picture) for picture in pictures], placeholder)

    def then(self, ids: Ids) -> "PicturePrompt":
        """Return the prompt with tokens of a reply behind it."""
        return replace(self, ids=[*self.ids, *ids])


class Album:
    """Pictures of recorded prompts, read from the ledger's files, for an engine that gets such a prompt again.

    Scores, practice and judges come here. No picture is kept in memory: one that is forgotten is gone at once. A single
    thread reads, for all of this is work that nobody waits for.
    """

    def __init__(self, folder: Path, placeholder: int) -> None:
        """folder: the ledger's folder of pictures."""
        self._folder, self.placeholder = folder, placeholder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="album")

    async def shown(self, prompt_ids: Ids) -> PicturePrompt | None:
        """Return the prompt as an engine gets it; None if it shows no picture. Raises AlignmentError without a file."""
        if not (pictures := pictures_of(prompt_ids)):
            return None
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._shown, prompt_ids, pictures)

    async def read(self, picture: Picture, most_pixels: int) -> Picture | None:
        """Return the picture with its bytes, smaller if it has more pixels; None if its file is not here."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._scaled, picture, most_pixels)
        except AlignmentError:
            return None

    def _shown(self, prompt_ids: Ids, pictures: Sequence[Picture]) -> PicturePrompt:
        read = {picture.digest: self._read(picture) for picture in dict.fromkeys(pictures)}
        try:
            return PicturePrompt.of(prompt_ids, [read[picture.digest] for picture in pictures], self.placeholder)
        except ValueError as error:
            raise AlignmentError(str(error)) from error

    def _read(self, picture: Picture) -> Picture:
        data = self._file(picture)
        try:
            lossless = decoded(data, (picture.width, picture.height)) if is_jpeg(data) else None
        except PictureFault as error:
            raise _gone(picture) from error
        return replace(picture, data=data, lossless=lossless)

    def _scaled(self, picture: Picture, most_pixels: int) -> Picture:
        if picture.width * picture.height <= most_pixels:
            return self._read(picture)
        try:
            data, size = scaled(self._file(picture), (picture.width, picture.height), most_pixels)
        except PictureFault as error:
            raise _gone(picture) from error
        return Picture(sha256(data).hexdigest(), *size, data)

    def _file(self, picture: Picture) -> bytes:
        try:
            # In hex it names a file of this folder alone.
            data = (self._folder / bytes.fromhex(picture.digest).hex()).read_bytes()
        except (OSError, ValueError) as error:
            raise _gone(picture) from error
        if sha256(data).hexdigest() != picture.digest:  # cut, or zeros
            raise _gone(picture)
        return data


def _gone(picture: Picture) -> AlignmentError:
    return AlignmentError(f"picture {picture.digest[:8]} of the prompt is not here")


def data_url(picture: Picture) -> str:
    """Return the picture as a `data:` URL, without loss. Raises ValueError if its bytes are not here."""
    data = picture.lossless or picture.data
    if data is None:
        raise ValueError(f"the bytes of picture {picture.digest} are not here")
    media = "image/webp" if data.startswith(b"RIFF") else "image/png"
    return f"data:{media};base64,{b64encode(data).decode()}"
