"""Pictures of a request: `data:` URLs become references, and their bytes go beside the messages.

A picture is a PNG, a JPEG or a WebP of one frame, within the limits of `pictures.*`. It is decoded once, so that the
engine gets none that it cannot read. A URL of the web is refused: this server fetches nothing that a client names.
"""

import asyncio
import hashlib
import re
import threading
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from openclaw_rl.errors import RequestError
from openclaw_rl.messages import ContentPart, Message
from openclaw_rl.settings import PictureSettings
from openclaw_rl.types.pictures import PICTURE_PARTS, PLACE, Picture

_FORMATS = ("PNG", "JPEG", "WEBP")
_JPEG = b"\xff\xd8"
_DATA_URL = re.compile(r"data:image/(?:png|jpeg|jpg|webp);base64,", re.IGNORECASE)
_KNOWN = 4096
"""Pictures whose size is remembered: a conversation sends all its pictures again with each request."""
_TEXT_ONLY = "this model reads text only"


class PictureReader:
    """Reads the pictures of requests, or refuses them. Thread-safe."""

    def __init__(self, settings: PictureSettings, refusal: str | None = _TEXT_ONLY) -> None:
        """refusal: the reason why this server takes no pictures; None: it does."""
        self._settings, self.refusal = settings, refusal
        self._known: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._lock = threading.Lock()

    async def referenced(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Mapping[str, Picture]]:
        """Return the messages with references for pictures, and the pictures by digest. Raises RequestError."""
        if not any(part.type in PICTURE_PARTS for said in messages for part in _parts(said)):
            return messages, {}
        return await asyncio.to_thread(self._referenced, messages)

    def _referenced(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Mapping[str, Picture]]:
        found: dict[str, Picture] = {}
        count = 0
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
                found[picture.digest] = picture
                parts[number] = picture.part()
            if any(part.type in PICTURE_PARTS for part in parts):
                done[index] = message.model_copy(update={"content": parts})
        return done, found

    def _read(self, url: str, at: str) -> Picture:
        """Return the picture of a `data:` URL."""
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
        digest = hashlib.sha256(data).hexdigest()
        key = hash(digest)  # with the process's own seed: a digest would tell of a picture that is forgotten
        with self._lock:
            size = self._known.get(key)
        if size is None:
            size = self._size(data, at)
            with self._lock:
                self._known[key] = size
                if len(self._known) > _KNOWN:
                    self._known.popitem(last=False)
        return Picture(digest, *size, data, _as_png(data) if data.startswith(_JPEG) else None)

    def _size(self, data: bytes, at: str) -> tuple[int, int]:
        """Decode the picture and return its width and height."""
        from PIL import Image  # at the first picture: most servers never see one

        try:
            with Image.open(BytesIO(data), formats=_FORMATS) as image:
                width, height = image.size
                if width * height > self._settings.max_pixels:
                    raise _refused(
                        at,
                        f"{width} x {height} pixels are more than pictures.max_pixels ({self._settings.max_pixels})",
                        "large",
                    )
                # Phones write a JPEG with a smaller copy behind it (MPO): the first frame is the picture.
                if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
                    raise _refused(at, "the picture has more than one frame", "parse_error")
                image.convert("RGB")
        except RequestError:
            raise
        except Exception as error:  # Pillow's plug-ins raise what they meet in a broken file, struct.error too
            raise _refused(at, "the picture is no PNG, JPEG or WebP that can be read", "parse_error") from error
        return width, height


def _as_png(data: bytes) -> bytes:
    """Return a readable picture as a PNG of the same pixels."""
    from PIL import Image

    out = BytesIO()
    with Image.open(BytesIO(data), formats=_FORMATS) as image:
        image.convert("RGB").save(out, "PNG", compress_level=1)
    return out.getvalue()


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
