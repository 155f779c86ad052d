"""Pictures of a request: `data:` URLs become references, and their files go beside the messages.

A picture is a PNG, a JPEG or a WebP of one frame, within the limits of `pictures.*`. The headers of all pictures are
checked before one pixel is decoded. Then each is decoded once, so that the engine gets none that it cannot read. A URL
of the web is refused: this server fetches nothing that a client names.

A request holds each of its pictures once, as the file. Its body is let go as soon as the files are out of it. The files
of all requests, and the threads' pixels, share one memory (`models.picture_files`): a request that waits too long for
its turn gets a 503. A chat of text alone waits for nothing here.
"""

import asyncio
import hashlib
import re
import threading
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from openclaw_rl.errors import RequestError
from openclaw_rl.messages import ContentPart, Message
from openclaw_rl.models.picture_files import PictureFault, check, size_of
from openclaw_rl.models.picture_memory import PictureMemory
from openclaw_rl.proxy.body import ParsedBody
from openclaw_rl.settings import PictureSettings
from openclaw_rl.types.pictures import PICTURE_PARTS, PLACE, Picture

T = TypeVar("T")

_DATA_URL = re.compile(
    r"data:image/(?:png|jpeg|jpg|webp)(?:;[\w.+-]{1,40}=[\w.+-]{1,100}){0,4};base64,", re.IGNORECASE | re.ASCII
)
_KNOWN = 4096
"""Pictures that are known to be readable: a conversation sends all its pictures again with each request."""
_TEXT_ONLY = "this model reads text only"
_CONVERSATION = ("messages", "input")
"""Fields of the dialects' bodies that hold pictures."""


def has_pictures(messages: Sequence[Message]) -> bool:
    return any(part.type in PICTURE_PARTS for said in messages for part in _parts(said))


@dataclass(frozen=True, slots=True)
class _Read:
    """The pictures of a request, as their headers say."""

    messages: Sequence[Message]
    pictures: Mapping[str, Picture]
    places: Mapping[str, str]
    """Place of each picture in the request, by digest."""


class PictureReader:
    """Reads the pictures of requests, or refuses them."""

    def __init__(
        self, settings: PictureSettings, refusal: str | None = _TEXT_ONLY, memory: PictureMemory | None = None
    ) -> None:
        """refusal: the reason why this server takes no pictures; None: it does. memory: None: one of its own."""
        self.settings, self.refusal = settings, refusal
        self.memory = PictureMemory(settings) if memory is None else memory
        self._known: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.Lock()

    def seat(self) -> "Seat":
        """Return the place of one request; it is the request's until its block ends."""
        return Seat(self)

    def headers(self, messages: Sequence[Message]) -> _Read:
        """Return the pictures of the messages by their headers; blocks. Raises RequestError."""
        found: dict[str, Picture] = {}
        places: dict[str, str] = {}
        count = pixels = 0
        done = list(messages)
        for index, message in enumerate(messages):
            parts = list(_parts(message))
            for number, part in enumerate(parts):
                if part.type not in PICTURE_PARTS:
                    continue
                place = _place_of(part)
                at = place or f"messages[{index}].content[{number}]"
                if self.refusal is not None:
                    what = "a picture" if place else f"a picture ({part.type})"
                    raise RequestError(f"{at}: {what}, and {self.refusal}", code="unsupported_content", param=at)
                count += 1
                if count > self.settings.max_per_request:
                    raise _refused(at, f"more than {self.settings.max_per_request} pictures in one request", "many")
                picture = self._read(_url_of(part, at), at)
                pixels += picture.width * picture.height
                if pixels > self.settings.max_pixels_per_request:
                    most = f"pictures.max_pixels_per_request ({self.settings.max_pixels_per_request})"
                    raise _refused(at, f"with this one the request's pictures have more pixels than {most}", "large")
                found.setdefault(picture.digest, picture)
                places.setdefault(picture.digest, at)
                parts[number] = picture.part()
            if any(part.type in PICTURE_PARTS for part in parts):
                done[index] = message.model_copy(update={"content": parts})
        return _Read(done, found, places)

    def _read(self, url: str, at: str) -> Picture:
        """Return the picture of a `data:` URL, by its headers."""
        begin = _DATA_URL.match(url)
        if begin is None:
            scheme = url.partition(":")[0][:20]
            if scheme.lower() in ("http", "https"):
                raise _refused(at, "this server fetches no URL: send the picture itself, as a data: URL", "url")
            raise _refused(at, "a picture is a data: URL of a PNG, JPEG or WebP in base64", "url")
        most = int(self.settings.max_mb * 2**20)
        if (len(url) - begin.end()) * 3 // 4 > most + 2:
            raise _refused(at, f"the picture is larger than pictures.max_mb ({self.settings.max_mb:g} MB)", "large")
        try:
            data = b64decode(url[begin.end() :], validate=True)
        except ValueError as error:
            raise _refused(at, "the data: URL is not base64", "parse_error") from error
        try:
            width, height = size_of(data)
        except PictureFault as error:
            raise _refused(at, str(error), "parse_error") from error
        if width * height > self.settings.max_pixels:
            most_pixels = f"pictures.max_pixels ({self.settings.max_pixels})"
            raise _refused(at, f"{width} x {height} pixels are more than {most_pixels}", "large")
        return Picture(hashlib.sha256(data).hexdigest(), width, height, data)

    def check(self, picture: Picture, at: str) -> None:
        """Decode the picture; blocks. Raises RequestError."""
        try:
            check(picture.data or b"", (picture.width, picture.height))
        except PictureFault as error:
            raise _refused(at, str(error), "parse_error") from error
        with self._lock:
            self._known[_key(picture.digest)] = None
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)

    def is_known(self, digest: str) -> bool:
        with self._lock:
            return _key(digest) in self._known


class Seat:
    """The pictures of one request, and their part of the memory. `async with`; `take`, then `check`."""

    def __init__(self, reader: PictureReader) -> None:
        self._reader, self._memory = reader, reader.memory
        self._in_line = self._held = 0
        self._give_up_at = 0.0
        self._places: Mapping[str, str] = {}
        self.pictures: Mapping[str, Picture] = {}
        """By digest."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._memory.leave_line(self._in_line)
        self._memory.give_back(files=self._held)
        self._in_line = self._held = 0

    async def take(self, body: ParsedBody) -> ParsedBody:
        """Return the body with references for pictures: the caller lets go of its own. Raises RequestError."""
        if not has_pictures(body.chat.messages):
            return body
        self._give_up_at = asyncio.get_running_loop().time() + self._reader.settings.decode_timeout_s
        urls = (_length_of(part) for said in body.chat.messages for part in _parts(said))
        self._join_line(sum(urls))
        read = await self._before(self._memory.in_thread(partial(self._reader.headers, body.chat.messages)))
        self.pictures, self._places = read.pictures, read.places
        self._memory.leave_line(self._in_line - self._size)
        self._in_line = self._size
        chat = body.chat.model_copy(update={"messages": list(read.messages)})
        # What is recorded and answered of the body as it came is beside the conversation.
        raw = {name: value for name, value in body.raw.items() if name not in _CONVERSATION}
        return replace(body, chat=chat, raw=raw)

    async def check(self) -> None:
        """Wait for room for the files; then decode those that are new. Raises RequestError."""
        if not self.pictures:
            return
        await self._before(self._memory.take(self._size))
        self._held = self._size
        self._memory.leave_line(self._in_line)
        self._in_line = 0
        for digest, picture in self.pictures.items():
            if not self._reader.is_known(digest):
                await self._before(self._check(picture))

    async def _check(self, picture: Picture) -> None:
        async with self._memory.work(picture.width * picture.height) as work:
            await work.run(partial(self._reader.check, picture, self._places[picture.digest]))

    def _join_line(self, size: int) -> None:
        self._memory.join_line(size)
        self._in_line = size

    @property
    def _size(self) -> int:
        return sum(len(picture.data or b"") for picture in self.pictures.values())

    async def _before(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a part of the work, until the deadline of all of it."""
        try:
            async with asyncio.timeout_at(self._give_up_at):
                return await work
        except TimeoutError as error:
            waited = f"the pictures were not decoded within {self._reader.settings.decode_timeout_s:g} s; try again"
            raise RequestError(waited, status=503, code="overloaded") from error


def _key(digest: str) -> int:
    return hash(digest)  # with the process's own seed: a digest would tell of a picture that is forgotten


def _parts(message: Message) -> Sequence[ContentPart]:
    return message.content if isinstance(message.content, list) else ()


def _place_of(part: ContentPart) -> str | None:
    """Return the place of a picture that another dialect's body had."""
    place = (part.model_extra or {}).get(PLACE)
    return place if isinstance(place, str) else None


def _length_of(part: ContentPart) -> int:
    value: Any = (part.model_extra or {}).get("image_url") if part.type in PICTURE_PARTS else None
    url = value.get("url") if isinstance(value, dict) else value
    return len(url) if isinstance(url, str) else 0


def _url_of(part: ContentPart, at: str) -> str:
    """Return the URL of a picture; both forms of OpenAI's dialects are known."""
    value: Any = (part.model_extra or {}).get("image_url")
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        raise _refused(at, "image_url.url: a data: URL is needed", "url")
    return url


_CODES = {
    "url": "invalid_image_url",
    "large": "image_too_large",
    "many": "too_many_images",
    "parse_error": "image_parse_error",
}


def _refused(at: str, why: str, kind: str) -> RequestError:
    return RequestError(f"{at}: {why}", code=_CODES[kind], param=at)
