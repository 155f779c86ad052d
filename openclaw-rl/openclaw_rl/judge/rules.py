"""Judge without a model: it reads a table of phrases from top to bottom, and the first rule that matches decides.

Reactions come first, because they are the user's plainest sign. Then comes the user's text. A correction beats praise
("thanks, but shorter"). A repeat of the request is a complaint. A message that goes on to another subject counts as
content with the reply. Without a user's message the tools' results decide. The table is small on purpose: turns that
need understanding are for the LLM judge.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from openclaw_rl.judge.phrases import TEXT_RULES, TOOL_RULES, TextRule
from openclaw_rl.judge.prompt import is_request
from openclaw_rl.messages import Message
from openclaw_rl.sessions.conversation_key import conversation, own_words
from openclaw_rl.sessions.reactions import is_taken_back
from openclaw_rl.types import JudgedTurn, Verdict

_GOOD = frozenset("👍❤🔥🎉👏💯🙏🥰😍😁🤩👌😇🤗🫡🏆⭐✅💪") | {
    "thumbsup",
    "+1",
    "heart",
    "tada",
    "fire",
    "clap",
    "100",
    "pray",
}
_BAD = frozenset("👎💩🤮😡🤬😠😢🤦🖕🥱😴🙄❌") | {"thumbsdown", "-1"}
_TONE = re.compile("[\ufe0f\U0001f3fb-\U0001f3ff\u200d♀♂]")
"""Skin tones and presentation, which do not change the meaning of an emoji."""

_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_QUOTED = re.compile(r"^\s*>.*$", re.MULTILINE)
_WORDS = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]|[^\W_]+(?:'\w+)?")
"""Words; Chinese and Japanese by character."""
_RESULT_CHARS = 4000
"""Characters of a tool result's head and tail that the judge searches: tools report errors at the ends."""
_TEXT_CHARS = 4000
"""Characters of a user's message that the judge looks at. The bound is needed on the event loop."""
_READ_WORDS = 30
"""Words of a user's message that the judge reads: feedback comes first, then the next task."""
_TALK_WORDS = 3
"""A message of fewer words ("ok", "yes") is an answer, not a new request: it is neutral."""
_PRAISE_WORDS = 6
"""Praise of no more words holds no request. The same praise twice in a row ("Thanks!") is praise twice."""


@dataclass(frozen=True, slots=True)
class Ruling:
    value: int
    rule: str


class RulesJudge:
    """Judge that never fails and never waits."""

    async def verdict(self, judged: JudgedTurn) -> Verdict:
        ruling = rule_on(judged)
        return Verdict(ruling.value, (ruling.value,), source="rules", rationale=ruling.rule)


def rule_on(judged: JudgedTurn) -> Ruling:
    state = judged.next_state
    said = [own_words(message)[:_TEXT_CHARS] for message in state.messages if is_request(message)]
    said = [
        text for text in said if text and not re.fullmatch(r"/\w+", text)
    ]  # a command to the client, such as /compact
    results = [message.text() for message in state.messages if message.role == "tool"]
    rulings = (
        rule_on_reactions(state.reactions),
        _by_text("\n".join(said), _last_request(judged.request.messages)) if said else None,
        _by_results(results),
    )
    decided = [ruling for ruling in rulings if ruling is not None]
    return next((ruling for ruling in decided if ruling.value), decided[0] if decided else Ruling(0, "nothing said"))


def rule_on_reactions(reactions: Sequence[str]) -> Ruling | None:
    """Return the verdict of the user's reactions; None without a known one, or with contrary ones."""
    marks = {_TONE.sub("", reaction.strip(":")) for reaction in reactions if not is_taken_back(reaction)}
    good, bad = marks & _GOOD, marks & _BAD
    if bool(good) == bool(bad):
        return None  # none that we know, or both
    return Ruling(1, f"reaction: {min(good)}") if good else Ruling(-1, f"reaction: {min(bad)}")


def _by_text(text: str, request: str) -> Ruling:
    tokens = _QUOTED.sub(" ", _CODE.sub(" ", text)).casefold().replace("’", "'").split()
    plain, words = " ".join(tokens[:_READ_WORDS]), len(_WORDS.findall(" ".join(tokens)))
    matches = ((rule, found) for rule in TEXT_RULES if (found := _matches(rule, plain, words)))
    rule, found = next(matches, (None, ""))
    is_all_praise = rule is not None and rule.value > 0 and words <= _PRAISE_WORDS
    if (rule is None or rule.value > 0) and not is_all_praise and _repeats(text, request):
        return Ruling(-1, "the request again")  # whatever praise the request itself may hold
    if rule is not None:
        return Ruling(rule.value, f"{rule.name}: {found}")
    return Ruling(1, "moves on") if words >= _TALK_WORDS else Ruling(0, "says nothing of the reply")


def _matches(rule: TextRule, plain: str, words: int) -> str | None:
    if rule.max_words is not None and words > rule.max_words:
        return None
    found = rule.pattern.search(plain)
    return found[0].strip() if found else None


def _by_results(results: Sequence[str]) -> Ruling | None:
    for text in results:
        ends = text if len(text) <= 2 * _RESULT_CHARS else f"{text[:_RESULT_CHARS]}\n{text[-_RESULT_CHARS:]}"
        for name, value, pattern in TOOL_RULES:
            if pattern.search(ends):
                if value < 0:
                    return Ruling(-1, f"tool error: {name}")
                break  # it says itself that all went well
    return Ruling(1, "tool result") if results else None


def _last_request(messages: Sequence[Message]) -> str:
    return next((own_words(m)[:_TEXT_CHARS] for m in reversed(conversation(messages)) if is_request(m)), "")


def _repeats(text: str, request: str) -> bool:
    """Return True for the former request again: unchanged, with more words, or most of it with some left out."""
    new, old = (set(_WORDS.findall(t.casefold().replace("’", "'"))) for t in (text, request))
    if len(old) < 3 or len(new) < 3:
        return bool(new) and new == old
    shared = len(new & old)
    return shared > 0.9 * len(old) or (shared > 0.9 * len(new) and len(new) >= 0.6 * len(old))
