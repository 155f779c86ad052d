"""When a reply is over: an end token, a stop string, or no room left."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from openclaw_rl.engines.dialect import FinishReason

if TYPE_CHECKING:
    from openclaw_rl.engines.embedded.job import Job

Decode = Callable[[Sequence[int]], str]


class StopMatcher:
    """Finds stop strings in a growing reply; they may begin in one token and end in another."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = [stop for stop in stops if stop]
        self._decode = decode
        self._longest = max(map(len, self._stops), default=0)
        self._tail = ""
        self._begin, self._read = 0, 0
        """ids[begin:read] are in the text already, and are decoded again with what follows: a piece's text depends on
        its left.
        """

    def match(self, ids: Sequence[int]) -> str | None:
        """The stop string that the reply holds now, given all its ids so far."""
        known, text = self._decode(ids[self._begin : self._read]), self._decode(ids[self._begin :])
        if text.endswith("\ufffd"):
            return None  # in the middle of a character
        self._begin, self._read = self._read, len(ids)
        text = self._tail + text[len(known) :]
        self._tail = text[-self._longest :]
        return next((stop for stop in self._stops if stop in text), None)


def finish_after(job: "Job") -> FinishReason | None:
    """Whether the reply ends with its last token. An end token counts before the limit: such a reply is complete."""
    last = job.output[-1]
    if last in job.end_ids:
        return FinishReason(type="stop", matched=last)
    if job.stops is not None and (matched := job.stops.match(job.output)) is not None:
        return FinishReason(type="stop", matched=matched)
    if len(job.output) >= job.max_new_tokens:
        return FinishReason(type="length", length=len(job.output))
    return None


def load_decode(folder: Path) -> Decode | None:
    """The tokenizer's decode, special tokens left out; None when the folder holds no tokenizer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)
