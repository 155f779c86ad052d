"""Canonical form and digest of a message: a client sends our replies back, but not byte for byte.

Canonical are the role, the text as a reader sees it, and each tool call's name with its arguments as canonical JSON. A
user's text is without the client's wrapping; a reply's is without time stamps and thoughts before it. List content
equals the string that it spells. Ids are left out, because clients rewrite them. Reasoning is left out, wherever it
stands, because clients move it, shorten it or drop it. Pictures are left out, because clients of screenshots send the
last few alone. Digests are hex, 128 bits.

`as_seen` unifies what no reader can tell apart: line ends, Unicode's composed and decomposed forms, kinds of blanks,
blanks at line ends, and invisible characters.
"""

import json
import re
import unicodedata
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, TypeVar

from openclaw_rl.messages import DEEPEST, Message, in_call_order, is_deeper
from openclaw_rl.sessions.openclaw import is_ephemeral, strip_wrapping, unstamped
from openclaw_rl.sessions.thoughts import without_thoughts
from openclaw_rl.types import Place, TurnKey

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_DIGEST_SIZE = 16
_SHORT = 12
"""Hex digits of a digest that is one of several pieces of evidence."""
_MOST_REPLIES, _MOST_PARTS = 8, 64
"""Most replies and sentences of a `Place`: they bound the memory that an open turn takes (1 kB)."""
_MOST_BLOCKS = 16
"""Most decorations on each side of a message."""
_MOST_KNOWN_TEXTS, _MOST_KNOWN_PLACES = 10_000, 1000
"""Most digests of messages, and places, that `Known` keeps: at most 2 MB and 2 MB, as each has a bounded size."""
_DIGITS = re.compile(r"\d+")
_PARTS = re.compile(r"\n+|(?<=[.!?…。！？])\s+")
_FIRST_BRACKET = re.compile(r"\[[^\[\]\n]{1,200}\]\s*")
_FIRST_TAG = re.compile(r"<([A-Za-z][\w:.-]{0,60})(?:\s[^<>]*)?>")
_USERS_OWN = re.compile(
    r"p|b|i|u|s|em|strong|a|div|span|code|pre|ul|ol|li|h[1-6]|table|t[rdh]|blockquote|q|br|sub|sup|kbd|mark|del|ins|font|"
    r".*(?:task|query|question|message|feedback|request|prompt|answer|instruction|input).*",
    re.IGNORECASE,
)
"""Tags in which clients put the user's own words, and those of formatted text."""
_LAST_TAG = re.compile(r"</([A-Za-z][\w:.-]{0,60})>\Z")
_EXACT = 2**53
"""Integers beyond it are not exact in JavaScript, so a client that re-serialises arguments changes them."""
_LINE_ENDS = "\r\x0b\x0c\x85\u2028\u2029"
_BLANKS = "\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
"""Blanks of other widths, and those at which no line breaks."""
_HYPHENS = "\u2010\u2011"
_WITHOUT_WIDTH = "\xad\u200b\u2060\ufeff\ufe0e\ufe0f"
"""Soft hyphen, zero-width space, word joiner, byte order mark, and the selectors of an emoji's form."""
_LOOKS_ALIKE = str.maketrans(
    dict.fromkeys(_LINE_ENDS, "\n")
    | dict.fromkeys(_BLANKS, " ")
    | dict.fromkeys(_HYPHENS, "-")
    | dict.fromkeys(_WITHOUT_WIDTH)
)


def as_seen(text: str) -> str:
    """Return the text in one spelling for all texts that look equal, without blanks around it."""
    # Histories are long, and nearly all of their texts have nothing to change: to look for it costs little.
    is_ascii = text.isascii()
    if not is_ascii:
        text = unicodedata.normalize("NFC", text)
    if any(map(text.__contains__, _LINE_ENDS if is_ascii else _LINE_ENDS + _BLANKS + _HYPHENS + _WITHOUT_WIDTH)):
        text = text.replace("\r\n", "\n").translate(_LOOKS_ALIKE)
    if " \n" in text or "\t\n" in text:
        text = "\n".join(line.rstrip() for line in text.split("\n"))
    return text.strip()


def conversation(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without system prompts, which change within a session, and without ephemeral messages.

    The results of parallel calls are in the order of their calls. A message of thoughts alone before its answer is left
    out: some clients send both apart.
    """
    ordered = [messages[at] for at in in_call_order(messages)]
    kept = [message for message in ordered if message.role not in ("system", "developer") and not is_ephemeral(message)]
    return [message for message, after in pairwise((*kept, None)) if message and not _is_thought_of(message, after)]


def _is_thought_of(message: Message, answer: Message | None) -> bool:
    if answer is None or not message.role == answer.role == "assistant" or message.tool_calls:
        return False
    return not canonical_text(message)


def canonical_text(message: Message) -> str:
    """Return the text of the message that pairing compares."""
    text = as_seen(message.text())
    match message.role:
        case "user":
            return strip_wrapping(text)
        case "assistant":
            return unstamped(without_thoughts(text))
        case _:
            return text


def digest(message: Message, text: str | None = None) -> str:
    """Return the digest of one message; `text` replaces its canonical text."""
    text = canonical_text(message) if text is None else text
    fields = [message.role, text]
    for call in message.tool_calls or ():
        fields += (call.function.name, canonical_arguments(call.function.arguments))
    return _digest(fields)


def grouped(reply_hash: str, group: str | None) -> str:
    """Return the digest of a reply in its group of requests; without a group it is unchanged."""
    return reply_hash if group is None else _digest([reply_hash, group])


class Known:
    """Digests of messages and places of histories that came last: every request brings its whole history again.

    It holds no text, but digests tell that a text was there: `clear` belongs to each deletion of turns.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[int, str] = OrderedDict()
        self._places: OrderedDict[str, Place] = OrderedDict()

    def clear(self) -> None:
        self._digests.clear()
        self._places.clear()

    def digest(self, message: Message) -> str:
        """Return `digest(message)`."""
        if message.tool_calls or not isinstance(message.content, str):
            return digest(message)
        key = hash((message.role, message.content))  # 64 bits with the process's own seed, for 10,000 of them
        return _recall(self._digests, key, _MOST_KNOWN_TEXTS, lambda: digest(message))

    def place(self, messages: Sequence[Message], digests: Sequence[str], whole: str) -> Place:
        """Return the place of a reply behind these messages. The digests of all messages determine it."""
        return _recall(self._places, whole, _MOST_KNOWN_PLACES, lambda: _place(messages, digests))


def _recall(kept: OrderedDict[K, V], key: K, most: int, compute: Callable[[], V]) -> V:
    """Return the value that is kept under `key`, else compute and keep it; the one unused for longest goes for it."""
    value = kept.get(key)
    if value is not None:
        kept.move_to_end(key)
        return value
    value = kept[key] = compute()
    if len(kept) > most:
        kept.popitem(last=False)
    return value


@dataclass(frozen=True, slots=True)
class History:
    """The messages before a reply, without system prompts and ephemeral messages, as digests."""

    whole: str
    """Digest of all of them."""
    before: str
    """Digest of the last one; empty without one."""
    place: Place

    @classmethod
    def of(cls, messages: Sequence[Message], known: Known | None = None) -> "History":
        """Return the digests of a `conversation`."""
        known = known or Known()
        digests = list(map(known.digest, messages))
        whole = _digest(digests)
        return cls(whole, digests[-1] if digests else "", known.place(messages, digests, whole))


def _place(messages: Sequence[Message], digests: Sequence[str]) -> Place:
    replies = [at for at, message in enumerate(messages) if message.role == "assistant"]
    asked = "\n".join(canonical_text(message) for message in messages[replies[-1] + 1 if replies else 0 :])
    parts = [part for part in _PARTS.split(asked) if part.strip()]
    if len(parts) > _MOST_PARTS:
        parts = parts[: _MOST_PARTS // 2] + parts[-_MOST_PARTS // 2 :]
    own = undecorated(asked)
    return Place(
        depth=len(replies),
        replies="".join(digests[at][:_SHORT] for at in replies[-_MOST_REPLIES:]),
        words=_short(own) if own else "",
        parts="".join(map(_short, parts)),
        shape=_short(_DIGITS.sub("0", asked)) if asked else "",
    )


def turn_key(
    messages: Sequence[Message], reply: Message, group: str | None = None, known: Known | None = None
) -> TurnKey:
    """Return the key of `reply` in its conversation; `messages` and `group` are the request's."""
    history = History.of(conversation(messages), known)
    return TurnKey(grouped(digest(reply), group), history.before, history.whole, history.place)


def undecorated(text: str, *, is_strict: bool = False) -> str:
    """Return a user's text without the blocks that stand in tags or brackets before it and behind it.

    A text of such blocks alone stays as it is. is_strict: a bracket counts only on a line of its own, for a user may
    write one.
    """
    for _ in range(_MOST_BLOCKS):
        before = text
        text = _without_last(text, is_strict=is_strict) or text
        text = _without_first(text, is_strict=is_strict) or text
        text = _unwrapped(text) or text
        if text == before:
            break
    return text


def own_words(message: Message) -> str:
    """Return what a user wrote, for readers of a reaction: without the client's wrapping and without decorations."""
    return undecorated(strip_wrapping(as_seen(message.text())), is_strict=True)


def is_decorated(one: Place, other: Place) -> bool:
    """Return True if the two texts before a reply differ by a client's decoration alone.

    Either their words are equal without blocks in tags or brackets, or the sentences of the one stand together, and in
    order, among those of the other.
    """
    if one.words and one.words == other.words:
        return True
    short, long = sorted((one.parts, other.parts), key=len)
    if len(long) >= _MOST_PARTS * _SHORT:  # the middle is unknown
        return len(set(_cut(short)) & set(_cut(long))) > _MOST_PARTS // 2
    places = range(0, len(long) - len(short) + 1, _SHORT) if short else ()
    return any(long.startswith(short, at) for at in places)


def is_renumbered(one: Place, other: Place) -> bool:
    """Return True if the two texts before a reply differ in numbers alone (a time, a count), and share sentences."""
    return bool(one.shape) and one.shape == other.shape and bool(set(_cut(one.parts)) & set(_cut(other.parts)))


def canonical_arguments(arguments: str | dict[str, Any]) -> str:
    """Return tool arguments as JSON with sorted keys; a string that is not JSON, or deep, stays as it is."""
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments.strip() or "{}", parse_int=_number, parse_float=_number)
            if isinstance(value, str):  # encoded twice
                value = json.loads(value.strip() or "{}", parse_int=_number, parse_float=_number)
        except (ValueError, RecursionError):
            return as_seen(arguments)
        if is_deeper(value, DEEPEST):  # as for templates; the depth that the writer below can take is unknown
            return as_seen(arguments)
    else:
        value = json.loads(json.dumps(arguments), parse_int=_number, parse_float=_number)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    if "\\" not in text:  # no character that could have another spelling
        return text
    return json.dumps(_as_seen_values(value), sort_keys=True, separators=(",", ":"))


def _as_seen_values(value: Any) -> Any:
    match value:
        case str():
            return as_seen(value)
        case dict():
            return {key: _as_seen_values(inner) for key, inner in value.items()}
        case list():
            return [_as_seen_values(inner) for inner in value]
        case _:
            return value


def _without_first(text: str, *, is_strict: bool) -> str:
    if (bracket := _FIRST_BRACKET.match(text)) and ("\n" in bracket[0] or not is_strict):
        return text[bracket.end() :]
    tag = _FIRST_TAG.match(text)
    end = -1 if tag is None or _USERS_OWN.fullmatch(tag[1]) else text.find(f"</{tag[1]}>", tag.end())
    return text if tag is None or end < 0 else text[end + len(tag[1]) + 3 :].lstrip()


def _without_last(text: str, *, is_strict: bool) -> str:
    if text.endswith("]") and (at := text.rfind("[")) >= 0 and "\n" not in text[at:]:
        rest = text[:at].rstrip()
        if not is_strict or "\n" in text[len(rest) : at]:
            return rest
    tag = _LAST_TAG.search(text, max(0, len(text) - 100))
    at = -1 if tag is None or _USERS_OWN.fullmatch(tag[1]) else text.rfind(f"<{tag[1]}", 0, tag.start())
    return text if at < 0 else text[:at].rstrip()


def _unwrapped(text: str) -> str:
    """Return the user's own words out of the one tag that a client put around them."""
    tag = _FIRST_TAG.match(text)
    end = f"</{tag[1]}>" if tag is not None and _USERS_OWN.fullmatch(tag[1]) else ""
    if tag is None or not end or not text.endswith(end) or text.find(end) < len(text) - len(end):
        return text
    return text[tag.end() : -len(end)].strip()


def _cut(digests: str) -> list[str]:
    return [digests[at : at + _SHORT] for at in range(0, len(digests), _SHORT)]


def _short(text: str) -> str:
    return _digest([text.strip()])[:_SHORT]


def _number(digits: str) -> int | float:
    """Return the number of a JSON literal; 1, 1.0 and 1e0 are equal, as in JavaScript."""
    value = float(digits)
    return int(value) if value.is_integer() and abs(value) <= _EXACT else value


def _digest(fields: Sequence[str]) -> str:
    state = blake2b(digest_size=_DIGEST_SIZE)
    for field in fields:
        data = field.encode("utf-8", "surrogatepass")
        state.update(b"%d:" % len(data))
        state.update(data)
    return state.hexdigest()
