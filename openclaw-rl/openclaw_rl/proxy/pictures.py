"""Pictures of a request: `data:` URLs become references, and their bytes go beside the messages.

A picture is a PNG, a JPEG or a WebP of one frame, within the limits of `pictures.*`. The headers of all pictures are
checked before one pixel is decoded. Then each is decoded once, so that the engine gets none that it cannot read. A few
threads of their own decode, and take the waiting requests' pictures in turn; a request that waits too long gets a 503.
A URL of the web is refused: this server fetches nothing that a client names.
"""

import asyncio
import hashlib
import re
import threading
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from openclaw_rl.errors import RequestError
from openclaw_rl.messages import ContentPart, Message
from openclaw_rl.models.picture_files import PictureFault, decoded, is_jpeg, size_of
from openclaw_rl.settings import PictureSettings
from openclaw_rl.types.pictures import PICTURE_PARTS, PLACE, Picture

T = TypeVar("T")

AT_ONCE = 2
"""Pictures that are decoded at once, of all requests: each takes some hundred MB at most, and the cores serve chats."""
_DATA_URL = re.compile(r"data:image/(?:png|jpeg|jpg|webp);base64,", re.IGNORECASE)
_KNOWN = 4096
"""Pictures that are known to be readable: a conversation sends all its pictures again with each request."""
_TEXT_ONLY = "this model reads text only"


@dataclass(frozen=True, slots=True)
class _Read:
    """The pictures of a request, as their headers say."""

    messages: Sequence[Message]
    pictures: Mapping[str, Picture]
    places: Mapping[str, str]
    """Place of each picture in the request, by digest."""


class PictureReader:
    """Reads the pictures of requests, or refuses them. Thread-safe."""

    def __init__(self, settings: PictureSettings, refusal: str | None = _TEXT_ONLY) -> None:
        """refusal: the reason why this server takes no pictures; None: it does."""
        self._settings, self.refusal = settings, refusal
        self._known: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.Lock()
        # Threads of their own: a thread goes on when its request has been given up, and still counts. What waits for
        # one is bounded by `server.max_streams`: a request has one picture there at a time.
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="pictures")

    async def referenced(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Mapping[str, Picture]]:
        """Return the messages with references for pictures, and the pictures by digest. Raises RequestError."""
        if not any(part.type in PICTURE_PARTS for said in messages for part in _parts(said)):
            return messages, {}
        try:
            async with asyncio.timeout(self._settings.decode_timeout_s):
                read = await self._in_thread(partial(self._headers, messages))
                found = dict(read.pictures)
                for digest, picture in read.pictures.items():
                    if self._is_known(digest) and not is_jpeg(picture.data or b""):
                        continue
                    found[digest] = await self._in_thread(partial(self._decoded, picture, read.places[digest]))
        except TimeoutError as error:
            waited = f"the pictures were not decoded within {self._settings.decode_timeout_s:g} s; try again"
            raise RequestError(waited, status=503, code="overloaded") from error
        return read.messages, found

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _headers(self, messages: Sequence[Message]) -> _Read:
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
                if count > self._settings.max_per_request:
                    raise _refused(at, f"more than {self._settings.max_per_request} pictures in one request", "many")
                picture = self._read(_url_of(part, at), at)
                pixels += picture.width * picture.height
                if pixels > self._settings.max_pixels_per_request:
                    most = f"pictures.max_pixels_per_request ({self._settings.max_pixels_per_request})"
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
        most = int(self._settings.max_mb * 2**20)
        if (len(url) - begin.end()) * 3 // 4 > most + 2:
            raise _refused(at, f"the picture is larger than pictures.max_mb ({self._settings.max_mb:g} MB)", "large")
        try:
            data = b64decode(url[begin.end() :], validate=True)
        except ValueError as error:
            raise _refused(at, "the data: URL is not base64", "parse_error") from error
        try:
            width, height = size_of(data)
        except PictureFault as error:
            raise _refused(at, str(error), "parse_error") from error
        if width * height > self._settings.max_pixels:
            most_pixels = f"pictures.max_pixels ({self._settings.max_pixels})"
            raise _refused(at, f"{width} x {height} pixels are more than {most_pixels}", "large")
        return Picture(hashlib.sha256(data).hexdigest(), width, height, data)

    def _decoded(self, picture: Picture, at: str) -> Picture:
        """Decode the picture; return it with its pixels as a PNG where it is a JPEG."""
        try:
            lossless = decoded(picture.data or b"", (picture.width, picture.height))
        except PictureFault as error:
            raise _refused(at, str(error), "parse_error") from error
        with self._lock:
            self._known[_key(picture.digest)] = None
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        return replace(picture, lossless=lossless)

    def _is_known(self, digest: str) -> bool:
        with self._lock:
            return _key(digest) in self._known


def _key(digest: str) -> int:
    return hash(digest)  # with the process's own seed: a digest would tell of a picture that is forgotten


def _parts(message: Message) -> Sequence[ContentPart]:
    return message.content if isinstance(message.content, list) else ()


def _place_of(part: ContentPart) -> str | None:
    """Return the place of a picture that another dialect's body had."""
    place = (part.model_extra or {}).get(PLACE)
    return place if isinstance(place, str) else None


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
