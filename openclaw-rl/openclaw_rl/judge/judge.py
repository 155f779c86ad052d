"""What a judge is: it looks at a turn with its next state and says +1, 0 or −1, or fails and says so.

From a judge's answers to a verdict: the vote in one answer, and the majority of several.

A vote is the last complete `\boxed{1}`, `\boxed{-1}` or `\boxed{0}` of the answer proper, behind any reasoning.
What holds no such vote is no vote; it is never a 0.
"""

import re
from collections import Counter
from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

from openclaw_rl.errors import JudgeError
from openclaw_rl.types import JudgedTurn, Verdict


class Undecided(JudgeError):
    """The judge was asked, answered, and did not decide. To ask until it does would be fishing for a verdict."""


class Judge(Protocol):
    async def verdict(self, judged: JudgedTurn) -> Verdict:
        """Raises JudgeError when no verdict could be had (worth another try later), Undecided when none will come."""
        ...


_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_VALUE = re.compile(r"\s*\$?\s*(?:\\(?:text|textbf|mathbf|mathrm)\s*\{)?\s*([+\-−–]?)\s*([01])(?:\.0+)?\s*\}?\s*\$?\s*")
_THOUGHT_MARK = re.compile(r"<(/?)think(?:ing)?>")


def parse_vote(answer: str, *, is_cut: bool = False) -> int | None:
    """The vote in one answer; None when there is none. `is_cut`: the answer ended at its token limit."""
    if is_cut:
        return None  # what stands last is not what the judge would have said last
    proper = answer_proper(answer)
    boxes = _BOX.findall(proper) if proper is not None else ()
    value = _VALUE.fullmatch(boxes[-1]) if boxes else None
    if value is None:
        return None
    return int(value[2]) * (1 if value[1] in ("", "+") else -1)


def answer_proper(answer: str) -> str | None:
    """What stands behind the reasoning; None when the judge never came out of its thoughts."""
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
    return None if is_thinking else proper + answer[at:]


class Outcome(Enum):
    """How a ballot can stand without a winner."""

    OPEN = auto()
    TIE = auto()
    NO_QUORUM = auto()


def count(votes: Sequence[int | None], *, outstanding: int, quorum: int) -> int | Outcome:
    """The winner: more than half of the valid votes, whatever the outstanding ones will say; else how the ballot
    stands."""
    valid = Counter(vote for vote in votes if vote is not None)
    total = valid.total()
    if total >= quorum:
        winner, its_votes = valid.most_common(1)[0]
        if 2 * its_votes > total + outstanding:
            return winner
    if outstanding:
        return Outcome.OPEN if total + outstanding >= quorum else Outcome.NO_QUORUM
    return Outcome.TIE if total >= quorum else Outcome.NO_QUORUM
