"""Tokenise prompts piece by piece, with a cache: a conversation is not tokenised again, and a client cannot type a
control token.

A prompt is cut at the control tokens that the *template* wrote, and nowhere else. Each piece between them is encoded
alone, and kept in a least-recently-used cache by its text. A tokenizer itself cuts there first, so the joined ids equal
those of the whole text. `is_exact` probes that; a tokenizer that fails the probe gets its prompts encoded whole.

While the template runs, control strings in the client's text are private-use characters (`protect`). In the pieces they
are plain text again, and are encoded by a copy of the tokenizer that knows no added tokens. So every control id comes
from the template.
"""

import asyncio
import itertools
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from tokenizers import Tokenizer

from openclaw_rl.types import Ids

T = TypeVar("T")

_THREADS = 2
_ESCAPE = "\U0010f000"
"""Escape before a private-use character that the client really sent."""
_FIRST = 0x10F001
"""Private-use character of the first control string; the next control string has the next character."""
_LAST = 0x10FFFD
_ENTRY_BYTES = 150
"""Memory of the cache itself for each text: a slot, and a link."""
_LONGEST_OPENING = 64
"""Characters at a prompt's end in which its last control string is looked for."""
_PROBE = ("Hello  world", " leading", "trailing ", "\n\nlines\n", "", "ünï 漢字 🙂", "a<b", "1234567", "    code\n\tx")


class CachedTokenizer:
    """Tokenizer of rendered prompts. Thread-safe."""

    def __init__(
        self,
        backend: Tokenizer,
        backend_json: str,
        *,
        assistant_may_write: Iterable[str] = (),
        cache_bytes: int = 2**25,
        words: int = 4000,
    ) -> None:
        """backend_json: `backend.to_str()`, which is slow.

        assistant_may_write: control strings that keep their meaning inside replayed assistant messages (`<think>`).

        cache_bytes: memory of the cache; the default holds some ten million characters of English.

        words: size of the library's own cache of words and their tokens, for each thread of `TokenizerThreads`.
        """
        config = orjson.loads(backend_json)
        tokens = {token["content"]: token for token in config["added_tokens"] if token["content"]}
        self._ids = {text: int(token["id"]) for text, token in tokens.items()}
        self.special_ids = frozenset(int(token["id"]) for token in tokens.values() if token["special"])
        self._control_ids = frozenset(self._ids.values())
        self._strips = {text: (token["lstrip"], token["rstrip"]) for text, token in tokens.items()}
        # Longest first, as the tokenizer itself matches.
        controls = sorted(tokens, key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, controls)) or r"(?!)")
        if len(controls) > _LAST - _FIRST:
            raise ValueError(f"{len(controls)} added tokens: more than the private-use characters that replace them")
        self._stand_in = {text: chr(_FIRST + i) for i, text in enumerate(controls)}
        self._stood_for = {mark: text for text, mark in self._stand_in.items()}
        private = f"[{_ESCAPE}-{chr(_LAST)}]"
        self._hide = re.compile("|".join([*map(re.escape, controls), private]))
        allowed = set(assistant_may_write)
        rest = [text for text in controls if text not in allowed]
        self._hide_in_reply = re.compile("|".join([*map(re.escape, rest), private]))
        # A cheap test first: almost no text holds even the first characters of a control string (`<|`, `<t` …).
        self._firsts = tuple(sorted({text[0] for text in controls}))
        self._start = re.compile("|".join(sorted({re.escape(text[:2]) for text in controls})) or r"(?!)")
        self._show = re.compile(f"{_ESCAPE}(.)|{private}", re.DOTALL)
        config["added_tokens"] = []
        config["post_processor"] = None
        config["truncation"] = config["padding"] = None
        self._threads = TokenizerThreads()
        self._plain = Tokenizer.from_str(orjson.dumps(config).decode())
        for tokenizer in (backend, self._plain):
            _keep_words(tokenizer, words)
        self._cache: OrderedDict[str, Ids] = OrderedDict()
        self._cached_bytes, self._cache_bytes = 0, cache_bytes
        self._shared_ints = tuple(range(backend.get_vocab_size()))
        """One shared object for each id: a cached token takes 8 bytes instead of 40."""
        self._lock = threading.Lock()
        self.is_exact = True
        self.is_exact = self._probe(backend, controls)
        self._backend = backend

    def protect(self, value: Any, *, is_reply: bool = False) -> Any:
        """Replace every control string in `value` (a string, or lists and dicts of strings) by a stand-in."""
        pattern = self._hide_in_reply if is_reply else self._hide

        def hide(text: str) -> str:
            if text.isascii() and not (any(first in text for first in self._firsts) and self._start.search(text)):
                return text
            return pattern.sub(self._hidden, text)

        return _map_text(value, hide)

    def encode(self, rendered: str) -> Ids:
        """Return the ids of a rendered template over protected strings."""
        if not self.is_exact:
            # A zero-width space inside a typed control string keeps it plain text.
            text = self._show.sub(
                lambda match: _broken(match.group(1) or self._stood_for.get(match.group(), "")), rendered
            )
            return self._threads.run(lambda: tuple(self._backend.encode(text, add_special_tokens=False).ids))
        return self._joined(self._split(rendered))

    def encode_if_short(self, rendered: str, new_chars: int) -> Ids | None:
        """Return the ids, or None if more than `new_chars` characters are not in the cache (`encode` is slow then)."""
        if not self.is_exact:
            return self.encode(rendered) if len(rendered) <= new_chars else None
        pairs = self._split(rendered)
        return self._joined(pairs) if self._new_chars(pairs) <= new_chars else None

    def opening(self, rendered: str) -> str:
        """Return the text behind the last control string, with which the next turn's piece of the reply will begin."""
        return self._split(rendered[-_LONGEST_OPENING:])[-1][0]

    def is_typed(self, rendered: str, tokens: Iterable[int]) -> bool:
        """Return True if a client's text in a rendered template spells one of these control tokens."""
        return any(mark in rendered for text, mark in self._stand_in.items() if self._ids[text] in tokens)

    def controls(self, rendered: str) -> list[int]:
        """Return the control ids of a rendered text, in their order."""
        return [self._ids[match.group()] for match in self._cut.finditer(rendered)]

    def _joined(self, pairs: list[tuple[str, int | None]]) -> Ids:
        parts: list[Ids] = []
        for text, control in pairs:
            if text:
                parts.append(self._piece(text))
            if control is not None:
                parts.append((control,))
        return tuple(itertools.chain.from_iterable(parts))

    def new_chars(self, rendered: str) -> int:
        """Return the number of characters that are not in the cache: the cost of `encode`."""
        return self._new_chars(self._split(rendered))

    def _new_chars(self, pairs: list[tuple[str, int | None]]) -> int:
        with self._lock:
            return sum(len(text) for text, _ in pairs if text not in self._cache)

    def _split(self, rendered: str) -> list[tuple[str, int | None]]:
        """Return pairs of a piece and the control id behind it; None behind the last piece."""
        pairs: list[tuple[str, int | None]] = []
        position, strip_left = 0, False
        for match in self._cut.finditer(rendered):
            token = match.group()
            text = rendered[position : match.start()]
            left, right = self._strips[token]
            text = text.lstrip() if strip_left else text
            pairs.append((text.rstrip() if left else text, self._ids[token]))
            position, strip_left = match.end(), right
        tail = rendered[position:]
        pairs.append((tail.lstrip() if strip_left else tail, None))
        return pairs

    def _piece(self, text: str) -> Ids:
        with self._lock:
            ids = self._cache.get(text)
            if ids is not None:
                self._cache.move_to_end(text)
                return ids
        ints, known = self._shared_ints, len(self._shared_ints)
        shown = self._shown(text)
        found = self._threads.run(lambda: self._encode_plain(shown))
        ids = tuple([ints[i] if i < known else i for i in found])
        with self._lock:
            if text not in self._cache:
                self._cache[text] = ids
                self._cached_bytes += _bytes(text, ids)
                while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                    self._cached_bytes -= _bytes(*self._cache.popitem(last=False))
        return ids

    def _encode_plain(self, text: str) -> Ids:
        # `encode_batch_fast` keeps no offsets, and needs a quarter less time.
        ids = tuple(self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        if self._control_ids.isdisjoint(ids):
            return ids
        # The model's own vocabulary holds a control string and encoded it whole: encode it in two halves.
        out: list[int] = []
        position = 0
        for match in self._cut.finditer(text):
            middle = match.start() + 1
            out += self._plain.encode(text[position:middle], add_special_tokens=False).ids
            position = middle
        out += self._plain.encode(text[position:], add_special_tokens=False).ids
        return tuple(token for token in out if token not in self._control_ids)

    def _hidden(self, match: re.Match[str]) -> str:
        found = match.group()
        return self._stand_in.get(found, _ESCAPE + found)

    def _shown(self, text: str) -> str:
        if text.isascii():
            return text  # stand-ins are not ASCII
        return self._show.sub(lambda match: match.group(1) or self._stood_for.get(match.group(), ""), text)

    def _probe(self, backend: Tokenizer, controls: list[str]) -> bool:
        marks = controls[:8] or [""]
        text = "".join(f"{piece}{marks[i % len(marks)]}" for i, piece in enumerate(_PROBE * 2)) + _PROBE[0]
        return self.encode(text) == tuple(backend.encode(text, add_special_tokens=False).ids)


class TokenizerThreads:
    """Two threads that tokenise for all others; they start with the first call and end with this object.

    The main thread and the threads of event loops tokenise themselves.
    """

    # The tokenizer library keeps a cache of words for each thread that ever tokenised, until that thread ends (4 MB of
    # English by its default, 80 MB at most). In a large thread pool the memory would grow for hours, by one cache for
    # each thread that gets its first long text.

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")

    def run(self, work: Callable[[], T]) -> T:
        """Run `work`, which must not call this method, and return its result."""
        return work() if _may_stay() else self._pool.submit(work).result()


def _may_stay() -> bool:
    if threading.current_thread() is threading.main_thread():
        return True
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _keep_words(tokenizer: Tokenizer, most: int) -> None:
    """Bound the library's own cache of words."""
    # The library's default bound counts words, not bytes: 10,000 words of up to 256 characters took 80 MB.
    resize = getattr(tokenizer.model, "_resize_cache", None)
    if resize is not None:  # some kinds of models have no cache
        resize(most)


def _bytes(text: str, ids: Ids) -> int:
    """Return the memory of one entry of the cache."""
    return sys.getsizeof(text) + sys.getsizeof(ids) + _ENTRY_BYTES


def _broken(text: str) -> str:
    return text if len(text) < 2 else f"{text[0]}\u200b{text[1:]}"


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_text(key, change): _map_text(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_text(item, change) for item in value]
    return value
