"""Pictures in messages: a message holds a reference by digest and size, and never the picture's bytes.

A reference is a part of the message's content:

    {"type": "image_url", "image_url": {"url": "sha256:<64 hex digits>", "width": 640, "height": 480}}

The size stays beside the digest, because the number of a picture's tokens follows from the size alone.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from openclaw_rl.messages import ContentPart, Message

PICTURE_PARTS = frozenset({"image_url", "input_image"})
"""Types of parts that hold a picture."""
PLACE = "client_place"
"""Field of a picture's part with its place in the body of another dialect, for errors."""
_DATA = re.compile(r"(data:image/[\w.+-]+;base64,)[A-Za-z0-9+/=]+")
_URL = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of a prompt. Two of equal bytes are equal."""

    digest: str
    """SHA-256 of the file, in hex."""
    width: int
    height: int
    data: bytes | None = field(default=None, repr=False, compare=False)
    """The file as the client sent it; None for a reference alone."""

    def part(self) -> ContentPart:
        """Return the reference, as a part of a message."""
        url = {"url": f"sha256:{self.digest}", "width": self.width, "height": self.height}
        return ContentPart.model_validate({"type": "image_url", "image_url": url})


class PromptIds(tuple[int, ...]):
    """Ids of a prompt that shows pictures, with references to them in the prompt's order.

    It goes wherever the ids of a prompt go, so that no part that scores a prompt can lose its pictures. Two are equal
    only with equal pictures. A slice is a plain tuple: see `head`.
    """

    # A tuple of variable size takes no slots.
    pictures: tuple[Picture, ...]

    def __new__(cls, ids: Iterable[int], pictures: Iterable[Picture]) -> "PromptIds":
        made = super().__new__(cls, ids)
        made.pictures = tuple(pictures)
        return made

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple):
            return NotImplemented
        return tuple.__eq__(self, other) and pictures_of(other) == self.pictures

    def __ne__(self, other: object) -> bool:
        return NotImplemented if not isinstance(other, tuple) else not self == other

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.pictures))

    def __reduce__(self) -> tuple[object, ...]:
        return PromptIds, (tuple(self), self.pictures)


def with_pictures(ids: tuple[int, ...], pictures: Sequence[Picture]) -> tuple[int, ...]:
    """Return the ids of a prompt with its pictures; the ids themselves without any."""
    return PromptIds(ids, pictures) if pictures else ids


def pictures_of(ids: object) -> tuple[Picture, ...]:
    """Return the pictures that a prompt shows."""
    return ids.pictures if isinstance(ids, PromptIds) else ()


def head(ids: tuple[int, ...], end: int) -> tuple[int, ...]:
    """Return `ids[:end]` with the prompt's pictures, whose places are all before `end`."""
    return with_pictures(ids[:end], pictures_of(ids))


def picture_of(part: ContentPart) -> Picture | None:
    """Return the picture that a part refers to; None for any other part, such as one with a client's URL."""
    match part.type, (part.model_extra or {}).get("image_url"):
        case "image_url", {"url": str(url), "width": int(width), "height": int(height)} if found := _URL.fullmatch(url):
            return Picture(found[1], width, height)
    return None


def pictures_in(messages: Iterable[Message]) -> tuple[Picture, ...]:
    """Return the pictures that the messages refer to, in their order; a picture that comes twice is there twice."""
    parts = (part for said in messages if isinstance(said.content, list) for part in said.content)
    return tuple(found for part in parts if (found := picture_of(part)) is not None)


def without_data(text: str) -> str:
    """Return a text of another program with no picture in it: an error of its may quote the URL of one."""
    return _DATA.sub(r"\1…", text)


def mark_of(picture: Picture) -> str:
    """Return the words that stand for a picture where text is read; the same for the same picture."""
    return f"[picture {picture.digest[:8]}, {picture.width} x {picture.height}]"


def words_of(message: Message) -> str:
    """Return the text of the message as readers of texts see it: with a mark in the place of each picture.

    The mark tells whether two pictures are the same.
    """
    if not isinstance(message.content, list):
        return message.text()
    said = []
    for part in message.content:
        if (picture := picture_of(part)) is not None:
            said.append(mark_of(picture))
        elif part.type == "text":
            said.append(part.text or "")
    return "\n".join(said)
