"""Sources of a turn's hints: the user's own comment, the user's next message, or a judge.

The order of the sources:

1. A comment through `/v1/feedback` is the hint as it is, without a judge.
2. With `hint_source = "verbatim"`, the user's next message is the hint (arXiv:2603.12273), if the verdict is negative.
3. With `hint_source = "judge"`, `hint_votes` judge answers run at once. Their majority decides if there is a hint; the
   vote stops once it is decided. The hints of the answers that said yes are the candidates.

A verbatim hint needs a negative verdict, because thanks hold no advice. Tool results are no user's words: an error
names the fault, not the remedy. A judge may make a hint of it.

No hint may give the reply away. A teacher that reads the very words it is to score would rate them high in any case. A
judge's hint may not repeat a long part of the next state either: that is the answer, or the user's next request.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openclaw_opd.hindsight import Absent
from openclaw_opd.hint_judge import HINT_CHARS, LEAST_CHARS, HintVote, hint_prompt, one_line, parse_hint
from openclaw_opd.settings import OpdSettings
from openclaw_rl.errors import JudgeError
from openclaw_rl.judge.judge import Outcome, count
from openclaw_rl.judge.llm import JudgeClient
from openclaw_rl.judge.prompt import is_request
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import ScoringTools
from openclaw_rl.sessions.conversation_key import conversation, own_words
from openclaw_rl.types import PRACTICE_SOURCES, JudgedTurn

if TYPE_CHECKING:
    from openclaw_rl.telemetry.health import Health

CUT_ANSWERS, MOST_CUT = "hint answers", 0.3
"""Part of `Health` that is out of order while a larger share of the judge's last answers was cut."""
UNREADABLE, MOST_UNREADABLE = "hint answers' form", 0.5
"""The same for answers that ended in time and hold no decision. Their turns get no hint, so that none is trained on."""
VERBATIM_CHARS = 1000
"""Longest verbatim hint. A correction is short; a longer message is the next task, or the answer itself."""
PRACTICE, ANCHOR = PRACTICE_SOURCES
"""Sources of a practice reply's hint: a wish of before, or the empty hint, with which the base holds the policy."""
REPLY_RUN, NEXT_STATE_RUN = 8, 20
"""Consecutive words that a hint may not share with the reply, and a judge's hint not with the next state."""
_RUN_CHARS = 24
"""Least letters of such a run: eight Chinese characters are a common phrase."""

_CODE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_QUOTED = re.compile(r"^\s*>.*$", re.MULTILINE)
_COMMAND = re.compile(r"/\w+")
_WORDS = re.compile(r"[぀-ヿ一-鿿가-힣]|[^\W_]+")


@dataclass(frozen=True, slots=True)
class Found:
    """Candidates from one source, best first where the source has an order; else the reason of their absence."""

    hints: tuple[str, ...] = ()
    source: str = ""
    """`judge`, `verbatim` or `feedback`; of a practice reply `practice` or `anchor`; empty without a source."""
    absent: Absent | None = None
    detail: str = ""

    @property
    def is_practice(self) -> bool:
        """True for the hint of a practice reply, which no user has read."""
        return self.source in PRACTICE_SOURCES


async def find_hints(judged: JudgedTurn, tools: ScoringTools[OpdSettings]) -> Found:
    comment = next((one_line(f.comment) for f in reversed(judged.feedback) if f.comment and f.comment.strip()), None)
    if comment is not None:
        return _checked([comment], "feedback", judged, VERBATIM_CHARS)
    if tools.settings.hint_source == "verbatim":
        return _verbatim(judged)
    if not judged.next_state.messages:
        return Found(absent=Absent.NO_HINT, detail="nothing was said next")
    if tools.ask is None:
        raise RuntimeError("hints from a judge need one to ask")
    return await _judge_hints(judged, tools, tools.ask)


def practice_hint(judged: JudgedTurn, hint: str | None) -> Found:
    """Return the given hint if it does not give this reply away. None: the empty hint of an anchor."""
    if hint is None:
        return Found(("",), ANCHOR)
    said = one_line(hint)
    if not said:
        return Found(absent=Absent.NO_HINT, detail="an empty hint", source=PRACTICE)
    return _checked([said], PRACTICE, judged, VERBATIM_CHARS)


def _verbatim(judged: JudgedTurn) -> Found:
    if judged.verdict is None or judged.verdict.value >= 0:
        return Found(absent=Absent.NO_HINT, detail="no correction")
    said = correction(judged.next_state.messages)
    if sum(map(str.isalnum, said)) < LEAST_CHARS:
        return Found(absent=Absent.NO_HINT, detail="no words of a user")
    if said.casefold() == _last_request(judged).casefold():
        return Found(absent=Absent.NO_HINT, detail="the request again")
    return _checked([said], "verbatim", judged, VERBATIM_CHARS)


def correction(messages: Sequence[Message]) -> str:
    """Return the users' words in one line, without the client's wrapping, commands, quotations and code."""
    said = [own_words(message) for message in conversation(messages) if is_request(message)]
    said = [text for text in said if not _COMMAND.fullmatch(text)]
    return one_line(" ".join(_QUOTED.sub(" ", _CODE.sub(" ", text)) for text in said))


def _last_request(judged: JudgedTurn) -> str:
    asked = [message for message in conversation(judged.request.messages) if is_request(message)]
    return one_line(own_words(asked[-1])) if asked else ""


async def _judge_hints(judged: JudgedTurn, tools: ScoringTools[OpdSettings], ask: JudgeClient) -> Found:
    settings, health = tools.settings, tools.health
    prompt = await asyncio.to_thread(hint_prompt, judged)
    budget = settings.hint_max_tokens or tools.judge_tokens
    votes: list[HintVote] = []
    errors: list[JudgeError] = []
    outcome: int | Outcome = Outcome.OPEN
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_vote(prompt, ask, budget)) for _ in range(settings.hint_votes)]
        for done in asyncio.as_completed(tasks):
            vote = await done
            if isinstance(vote, JudgeError):
                errors.append(vote)
                vote = HintVote(None, problem="not_asked")
            else:
                _note_answer(vote, health)
            votes.append(vote)
            if vote.problem:
                health.count(f"hint_answer_{vote.problem}")
            cast = [None if vote.has_hint is None else 1 if vote.has_hint else -1 for vote in votes]
            outcome = count(cast, outstanding=settings.hint_votes - len(votes), quorum=settings.hint_votes // 2 + 1)
            if outcome is not Outcome.OPEN:
                break
        for task in tasks:
            task.cancel()
    if isinstance(outcome, Outcome):
        if errors:
            return Found(source="judge", absent=Absent.JUDGE_FAILED, detail=str(errors[0]))
        problems = ", ".join(sorted({vote.problem for vote in votes if vote.problem}))
        return Found(source="judge", absent=Absent.HINT_UNDECIDED, detail=problems or "as many for as against")
    if outcome == -1:
        return Found(source="judge", absent=Absent.NO_HINT, detail="the judge finds none")
    candidates = list(dict.fromkeys(vote.hint for vote in votes if vote.hint is not None))
    return _checked(candidates, "judge", judged, HINT_CHARS)


def _note_answer(vote: HintVote, health: "Health") -> None:
    """Count the answer. While many end at the judge's token budget, or cannot be read, report it."""
    health.count("hint_answers")
    advice = "ended at their token limit: raise judge.max_new_tokens"
    health.answered(CUT_ANSWERS, is_bad=vote.problem == "cut", limit=MOST_CUT, error=advice)
    advice = 'hold no decision: name a larger judge (judge.url), or set method.hint_source = "verbatim"'
    is_unreadable = vote.has_hint is None and vote.problem != "cut"
    health.answered(UNREADABLE, is_bad=is_unreadable, limit=MOST_UNREADABLE, error=advice)


async def _vote(prompt: Sequence[Message], ask: JudgeClient, budget: int) -> HintVote | JudgeError:
    try:
        answer = await ask(prompt, max_new_tokens=budget)
        if answer.is_cut:
            answer = await ask(prompt, max_new_tokens=2 * budget)
    except JudgeError as error:
        return error
    return parse_hint(answer.text, is_cut=answer.is_cut)


def _checked(candidates: Sequence[str], source: str, judged: JudgedTurn, limit: int) -> Found:
    """Remove the candidates that are too long or give the reply or the next state away."""
    reply = _reply_words(judged)
    after = [_words(message.text()) for message in judged.next_state.messages] if source == "judge" else []
    hints, why = [], "too long"
    for hint in candidates:
        words = _words(hint)
        if len(hint) > limit:
            why = "too long"
        elif _shares_run(words, reply, REPLY_RUN):
            why = "quotes the reply"
        elif any(_shares_run(words, text, NEXT_STATE_RUN) for text in after):
            why = "retells what came next"
        else:
            hints.append(hint)
    if hints:
        return Found(tuple(hints), source)
    return Found(absent=Absent.HINT_REJECTED, detail=why, source=source)


def _reply_words(judged: JudgedTurn) -> list[str]:
    reply = judged.turn.reply
    calls = " ".join(str(call.function.arguments) for call in reply.tool_calls or ())
    return _words(f"{reply.text()} {calls}")


def _words(text: str) -> list[str]:
    return _WORDS.findall(text.casefold())


def _shares_run(words: Sequence[str], others: Sequence[str], length: int) -> bool:
    """Return True when both texts share a run of `length` words."""
    runs = {tuple(others[k : k + length]) for k in range(len(others) - length + 1)}
    return any(
        tuple(words[k : k + length]) in runs and _spans(words, k, length) for k in range(len(words) - length + 1)
    )


def _spans(words: Sequence[str], start: int, length: int) -> bool:
    return sum(map(len, words[start : start + length])) >= _RUN_CHARS
