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

A picture lives as the file that came, once for each digest. Its URL is made when the engine's request is written, one
picture at a time, within the memory of all pictures (`models.picture_files`).

Our prompts are kept expanded everywhere else: in the ledger, for the trainer, in counts of tokens.
"""

import asyncio
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncGenerator, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Self, overload
from weakref import WeakValueDictionary

from openclaw_rl.errors import AlignmentError
from openclaw_rl.models.picture_files import PictureFault, as_png, is_jpeg, scaled
from openclaw_rl.models.picture_memory import Kept, PictureMemory
from openclaw_rl.settings import PictureSettings
from openclaw_rl.types import Ids
from openclaw_rl.types.pictures import Picture, pictures_of


def _own_file(picture: Picture) -> bytes:
    if picture.data is None:
        raise ValueError(f"the bytes of picture {picture.digest} are not here")
    return picture.data


class PictureUrls(Sequence[str]):
    """The `data:` URLs of a prompt's pictures, each made when it is asked for. Two are equal with equal pictures."""

    def __init__(
        self,
        pictures: Sequence[Picture],
        memory: PictureMemory,
        file: Callable[[Picture], bytes] = _own_file,
        shared: MutableMapping[str, Kept] | None = None,
    ) -> None:
        """file: reads a picture's file; blocks. shared: URLs that others have made, by digest, for work in which the
        same pictures come in many requests: then those made here are kept as long as this object."""
        self._pictures, self._memory, self._file = tuple(pictures), memory, file
        self._shared = shared
        self._kept: dict[str, Kept] = {}

    def __len__(self) -> int:
        return len(self._pictures)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            return [self._url(picture).decode() for picture in self._pictures[at]]
        return self._url(self._pictures[at]).decode()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PictureUrls) and self._pictures == other._pictures

    def __hash__(self) -> int:
        return hash(self._pictures)

    async def made(self) -> AsyncGenerator[bytes, None]:
        """Yield the URLs in order. Whoever has written one asks for the next, and its memory is given back.

        A picture that comes again is made once, if there is room to keep it. Raises what `file` raises.
        """
        left = Counter(picture.digest for picture in self._pictures)
        try:
            for picture in self._pictures:
                digest = picture.digest
                left[digest] -= 1
                kept = self._kept.get(digest) or (self._shared or {}).get(digest)
                if kept is not None:
                    self._kept[digest] = kept
                    yield kept.data
                    continue
                async with self._memory.work(picture.width * picture.height) as work:
                    url = await work.run(partial(self._url, picture))
                    work.shrink(len(url))
                    if self._shared is not None or left[digest]:
                        self._keep(digest, url)
                    yield url
                    del url
        finally:
            if self._shared is None:
                self._kept.clear()

    def _keep(self, digest: str, url: bytes) -> None:
        if (kept := self._memory.keep(url)) is not None:
            self._kept[digest] = kept
            if self._shared is not None:
                self._shared[digest] = kept

    def _url(self, picture: Picture) -> bytes:
        return _url_of(self._file(picture), (picture.width, picture.height))


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """A prompt with pictures, as an engine's request holds it."""

    ids: Sequence[int]
    """With one placeholder for each picture."""
    image_data: Sequence[str] = field(repr=False)
    placeholder: int
    reserved: frozenset[int] = frozenset()
    """Ids of places of pictures and videos: no pass can read a reply that has one."""

    @classmethod
    def of(
        cls, prompt_ids: Ids, image_data: Sequence[str], placeholder: int, reserved: frozenset[int] = frozenset()
    ) -> Self:
        """prompt_ids: expanded. Raises ValueError if a picture has no place."""
        # Templates write a mark before and behind each picture, so that two pictures are never one run.
        ids = [
            token
            for at, token in enumerate(prompt_ids)
            if token != placeholder or at == 0 or prompt_ids[at - 1] != placeholder
        ]
        if ids.count(placeholder) != len(image_data):
            raise ValueError(f"{len(image_data)} pictures, and {ids.count(placeholder)} places in the prompt")
        return cls(ids, image_data, placeholder, reserved | {placeholder})

    def then(self, ids: Ids) -> "PicturePrompt":
        """Return the prompt with tokens of a reply behind it."""
        return replace(self, ids=[*self.ids, *ids])


class Album:
    """Pictures of recorded prompts, read from the ledger's files, for an engine that gets such a prompt again.

    Scores, practice and judges come here. A prompt holds no file: each request reads it anew, and one that is forgotten
    is gone. What a request has made of a file stays for the other requests of the same prompt, and for prompts that are
    in use with it, within a bound; it goes with the last of them. A single thread reads for `shown`, for all of this is
    work that nobody waits for.
    """

    def __init__(self, folder: Path, placeholder: int, memory: PictureMemory | None = None) -> None:
        """folder: the ledger's folder of pictures. memory: that of chats too; None: one of its own."""
        self._folder, self.placeholder = folder, placeholder
        self.memory = PictureMemory(PictureSettings()) if memory is None else memory
        self._made: WeakValueDictionary[str, Kept] = WeakValueDictionary()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="album")

    async def shown(self, prompt_ids: Ids) -> PicturePrompt | None:
        """Return the prompt as an engine gets it; None if it shows no picture. Raises AlignmentError without a file."""
        if not (pictures := pictures_of(prompt_ids)):
            return None
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._shown, prompt_ids, pictures)

    async def read(self, picture: Picture, most_pixels: int) -> Picture | None:
        """Return the picture as a PNG or a WebP, smaller if it has more pixels; None if its file is not here."""
        try:
            async with self.memory.work(picture.width * picture.height) as work:
                return await work.run(partial(self._scaled, picture, most_pixels))
        except AlignmentError:
            return None

    def _shown(self, prompt_ids: Ids, pictures: Sequence[Picture]) -> PicturePrompt:
        for picture in dict.fromkeys(pictures):
            self._file(picture)
        urls = PictureUrls(pictures, self.memory, self._file, self._made)
        try:
            return PicturePrompt.of(prompt_ids, urls, self.placeholder)
        except ValueError as error:
            raise AlignmentError(str(error)) from error

    def _scaled(self, picture: Picture, most_pixels: int) -> Picture:
        data, size = self._file(picture), (picture.width, picture.height)
        try:
            if size[0] * size[1] > most_pixels:
                data, size = scaled(data, size, most_pixels)
            elif is_jpeg(data):
                data = as_png(data, size)
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
    """Return the picture as a `data:` URL, without loss; blocks for a JPEG. Raises ValueError without its bytes."""
    return _url_of(_own_file(picture), (picture.width, picture.height)).decode()


def _url_of(data: bytes, size: tuple[int, int]) -> bytes:
    """Return a file as a `data:` URL: a JPEG as a PNG of the same pixels."""
    if is_jpeg(data):
        try:
            data = as_png(data, size)
        except PictureFault as error:
            raise AlignmentError(f"a picture of the prompt cannot be read: {error}") from error
    kind = b"webp" if data.startswith(b"RIFF") else b"png"
    return b"data:image/" + kind + b";base64," + b64encode(data)
