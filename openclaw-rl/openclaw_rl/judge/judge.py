r"""The judge protocol, and the way from a judge's answers to a verdict.

A vote is the last complete `\boxed{1}`, `\boxed{-1}` or `\boxed{0}` of an answer, behind any reasoning, in the judge's
own words: not one in a quotation. An answer without such a vote is invalid; it never counts as 0. The verdict is the
majority of several votes.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

from openclaw_rl.errors import JudgeError
from openclaw_rl.sessions.thoughts import is_open_thought, without_thoughts
from openclaw_rl.types import JudgedTurn, Verdict


class Undecided(JudgeError):
    """The judge answered and did not decide. Asking again until it decides would bias the verdict."""


class Unasked(Undecided):
    """No judge is asked for this turn: it has a reward without one."""


class Judge(Protocol):
    async def verdict(self, judged: JudgedTurn) -> Verdict:
        """Return the verdict on the turn. Raises JudgeError when a later attempt may work, else Undecided."""
        ...


_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_VALUE = re.compile(
    r"\s*\$?\s*(?:\\(?:text|textbf|mathbf|mathrm|bf|bm)\s*\{)?[\s*]*([+\-−–—‐‑]?)\s*([01])(?:\.0+)?[\s*]*\}?\s*\$?\s*"
)
_QUOTED_LINE = re.compile(r"^[ \t]*[|>].*$", re.MULTILINE)
"""The prompt puts a bar in front of every line of the conversation."""
_FENCED = re.compile(r"^[ \t]*(```|~~~)[^\n]*\n(.*?)(?:^[ \t]*\1[`~]*[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_SAID = re.compile(r'"[^"\n]*"|“[^“”\n]*”|„[^„“”\n]*[“”]|«[^«»\n]*»|「[^「」\n]*」|『[^『』\n]*』')
_CODE = re.compile(r"`[^`\n]*`")
_OWN_LINE = re.compile(
    r"^[^\w\n]*(?:(?:so|thus|final|my|the|overall|grade|verdict|vote|answer|decision|rating|score|is)\b[^\w\n]*)*"
    r"(\\boxed\s*\{(?:[^{}\n]|\{[^{}\n]*\})*\})[^\w\n]*$",
    re.MULTILINE | re.IGNORECASE,
)
"""A line that holds nothing but the vote, as the judge was told to write it, in whatever marks."""
_THOUGHT_MARK = re.compile(r"<(/?)think(?:ing)?>")


def parse_vote(answer: str, *, is_cut: bool = False) -> int | None:
    """Return the vote in one answer; None without a vote. `is_cut`: the answer ended at its token limit."""
    if is_cut:
        return None  # the judge had not finished: its last box may not be its vote
    proper = answer_proper(answer)
    boxes = _own_boxes(proper) if proper is not None else ()
    value = _VALUE.fullmatch(unicodedata.normalize("NFKC", boxes[-1])) if boxes else None
    if value is None:
        return None
    return int(value[2]) * (1 if value[1] in ("", "+") else -1)


def _own_boxes(text: str) -> list[str]:
    """Return the contents of the boxes that the judge did not quote; of those in code only if it has no others."""
    text = _FENCED.sub(lambda block: "\n".join(_OWN_LINE.findall(block[2])) + "\n", text)
    text = _OWN_LINE.sub(r"\1", text)
    text = _SAID.sub(lambda said: "" if "\\boxed" in said[0] else said[0], text)
    return _BOX.findall(_CODE.sub("", text)) or _BOX.findall(text)


def answer_proper(answer: str) -> str | None:
    """Return the text behind the reasoning, without lines that are quoted; None when the reasoning has no end."""
    proper, at, is_thinking = "", 0, False
    for mark in _THOUGHT_MARK.finditer(answer):
        if not mark[1]:
            proper += "" if is_thinking else answer[at : mark.start()]
            is_thinking = True
        elif is_thinking:
            is_thinking = False
        else:
            proper = ""  # some templates open the thought themselves
        at = mark.end()
    if is_thinking:
        return None
    proper = without_thoughts((proper + answer[at:]).strip())
    return None if is_open_thought(proper) else _QUOTED_LINE.sub("", proper)


class Outcome(Enum):
    """State of a ballot without a winner."""

    OPEN = auto()
    TIE = auto()
    NO_QUORUM = auto()


def count(votes: Sequence[int | None], *, outstanding: int, quorum: int) -> int | Outcome:
    """Return the value with more than half of the valid votes, the outstanding ones included; else the ballot's
    state."""
    valid = Counter(vote for vote in votes if vote is not None)
    total = valid.total()
    if total >= quorum:
        winner, its_votes = valid.most_common(1)[0]
        if 2 * its_votes > total + outstanding:
            return winner
    if outstanding:
        return Outcome.OPEN if total + outstanding >= quorum else Outcome.NO_QUORUM
    return Outcome.TIE if total >= quorum else Outcome.NO_QUORUM
