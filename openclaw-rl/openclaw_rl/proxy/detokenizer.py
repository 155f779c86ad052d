"""Convert ids to text, one at a time, never with half a character: O(1) per token.

Byte-level vocabularies (Qwen, Llama 3, SmolLM2, GPT-2 …) use a table of bytes and an incremental UTF-8 decoder. Other
vocabularies are decoded over a small window of the last tokens; the window waits while a character is incomplete.
Stop strings are found in the text, and the tokens that they cut are counted.
"""

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

import orjson
from tokenizers import Tokenizer

_WINDOW = 8
"""Most tokens of one character; beyond that the character counts as invalid."""


class Detokenizer(Protocol):
    """Text of one reply."""

    def feed(self, token: int) -> str:
        """Take one token; return the text that is complete now."""
        ...

    def finish(self) -> str:
        """Return the text held back; a broken character becomes U+FFFD."""
        ...


class TokenTable:
    """The text behind the ids of one tokenizer; shared by all replies."""

    def __init__(self, backend: Tokenizer, backend_json: str, *, hidden_ids: Collection[int]) -> None:
        """backend_json: `backend.to_str()`, which is slow. hidden_ids: tokens without text (end and special tokens)."""
        self._backend, self._hidden = backend, frozenset(hidden_ids)
        config = orjson.loads(backend_json)
        self._bytes = _byte_table(config, self._hidden) if _is_byte_level(config.get("decoder")) else None

    def detokenizer(self) -> Detokenizer:
        """Return a new detokenizer for one reply."""
        if self._bytes is not None:
            return _ByteDetokenizer(self._bytes)
        return _WindowDetokenizer(self._backend, self._hidden)


class _ByteDetokenizer:
    __slots__ = ("_decode", "_size", "_table")

    def __init__(self, table: list[bytes]) -> None:
        self._table, self._size = table, len(table)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token: int) -> str:
        return self._decode(self._table[token]) if 0 <= token < self._size else ""

    def finish(self) -> str:
        return self._decode(b"", True)


class _WindowDetokenizer:
    __slots__ = ("_backend", "_hidden", "_ids", "_read", "_seen")

    def __init__(self, backend: Tokenizer, hidden: frozenset[int]) -> None:
        self._backend, self._hidden = backend, hidden
        self._ids: list[int] = []
        """The last tokens that were released, then the tokens still held."""
        # Released tokens stay in the window because they decide about the space before the next token.
        self._read = 0
        self._seen = ""
        """The text of the first `_read` tokens of the window."""

    def feed(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._ids.append(token)
        text = self._backend.decode(self._ids, skip_special_tokens=False)
        if text.endswith("�") and len(self._ids) - self._read < _WINDOW:
            return ""
        return self._release(text)

    def finish(self) -> str:
        if self._read == len(self._ids):
            return ""
        return self._release(self._backend.decode(self._ids, skip_special_tokens=False))

    def _release(self, text: str) -> str:
        new = text[len(self._seen) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._seen = self._backend.decode(self._ids, skip_special_tokens=False)
        return new


def _is_byte_level(decoder: object) -> bool:
    return isinstance(decoder, dict) and (
        decoder.get("type") == "ByteLevel"
        or (decoder.get("type") == "Sequence" and [_is_byte_level(d) for d in decoder["decoders"]] == [True])
    )


def _byte_table(config: dict[str, object], hidden: frozenset[int]) -> list[bytes]:
    """Return the bytes of each id. GPT-2's alphabet writes each byte as one printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + i): byte for i, byte in enumerate(b for b in range(256) if b not in set(printable))}
    model, added = config["model"], config["added_tokens"]
    assert isinstance(model, dict)
    assert isinstance(added, list)
    vocab: dict[str, int] = model["vocab"]
    contents = {int(token["id"]): str(token["content"]) for token in added}
    table = [b""] * (max([*vocab.values(), *contents]) + 1)
    for text, token in vocab.items():
        if all(char in alphabet for char in text):
            table[token] = bytes(alphabet[char] for char in text)
        else:
            table[token] = text.encode()
    for token, text in contents.items():
        table[token] = text.encode()
    for token in hidden:
        if token < len(table):
            table[token] = b""
    return table


class TextStops:
    """Stop strings in a stream of text, and the tokens that they cut off. O(1) per token.

    No text of a stop string or behind it is ever released. Text that may still become a stop string is held back.
    """

    __slots__ = ("_ends", "_held", "_out", "_stops", "is_stopped", "kept", "matched", "shown")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._out = 0
        """Characters released."""
        self._ends: list[int] = []
        """Count of characters decoded, after each token."""
        self.is_stopped = False
        self.matched: str | None = None
        """The stop string that ended the text."""
        self.kept = 0
        """Tokens before the first token that the match cut; valid once `is_stopped`."""
        self.shown = 0
        """The same, and the token whose beginning is shown, if there is one."""

    def feed(self, text: str) -> str:
        """Take one token's text; return the text that may be shown."""
        if not self._stops:
            return text
        if self.is_stopped:
            return ""
        buffer = self._held + text
        self._ends.append(self._out + len(buffer))
        found = [(at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            cut, self.matched = min(found)
            self.is_stopped = True
            self.kept = self._tokens_before(self._out + cut)
            self.shown = self.kept + (_before(self._ends, self.kept) < self._out + cut)
            self._held = ""
            return buffer[:cut]
        hold = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - hold :]
        self._out += len(buffer) - hold
        return buffer[: len(buffer) - hold]

    def finish(self) -> str:
        """End the text; return the part held back."""
        held, self._held = self._held, ""
        return held

    def _tokens_before(self, position: int) -> int:
        """Return the number of tokens whose text ends before `position`."""
        count = next(i for i, end in enumerate(self._ends) if end > position)
        # A token without text holds the first bytes of the next token's character, and is cut with it.
        while (
            count > 0 and self._ends[count - 1] == position and self._ends[count - 1] == _before(self._ends, count - 1)
        ):
            count -= 1
        return count


def _before(ends: list[int], index: int) -> int:
    return ends[index - 1] if index else 0


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
