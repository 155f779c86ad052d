"""Two preferences that the bundled base fails and its hinted self meets, and the simulated user who has them.

Rules simulate the user. It reads a reply and answers with thanks, or with a complaint in the words of a real user,
which name the fault. The learner gets these words only. With `reads_request` the user first checks that the reply is
about the question (it holds a word of the topic's list). A reply in the right form about another subject is then a
complaint too.

The score of held-out replies is the share that meets every rule of the preference. A reply that only repeats the hint's
wording fails.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TOPICS_FILE = Path(__file__).parent.parent / "data" / "topics.toml"
_LIST = re.compile(r"^[ \t\"']*(?:[-*•+]|\d{1,2}[.)])[ \t]", re.MULTILINE)
_NUMBERED = re.compile(r"\b1[.):]\s.*\b2[.):]\s", re.DOTALL)
"""A list within one line."""
_BOLD = re.compile(r"\*\*|__|^#", re.MULTILINE)
_WORD = re.compile(r"[^\W_]+(?:['’]\w+)?")
_ECHO_WORDS = 4
"""Number of words in a row from the hint or a complaint that make an echo."""
THANKS = ("Thank you, that is perfect.", "Thanks, just what I needed!", "Perfect, thank you.", "Great, thanks a lot!")


@dataclass(frozen=True, slots=True)
class Topic:
    text: str
    about: tuple[str, ...]
    """Stems; a reply on the topic holds one."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """Fault of a reply; `said` are the user's ways to complain of it."""

    name: str
    said: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Preference:
    name: str
    form: str
    hint: str
    """The wish in one sentence, as a judge writes it."""
    too_long: Complaint | None
    has_list: Complaint
    off_topic: Complaint
    max_words: int
    min_words: int
    echo: re.Pattern[str]

    def question(self, topic: Topic) -> str:
        return self.form.format(topic.text)

    def complaint(self, topic: Topic, reply: str, *, has_ended: bool, reads_request: bool) -> Complaint | None:
        """Return the fault that the user finds in the reply, or None."""
        words = words_of(reply)
        if reads_request and not is_about(topic, reply):
            return self.off_topic
        if has_list(reply) or _BOLD.search(reply):
            return self.has_list
        if self.too_long is not None and (not has_ended or len(words) > self.max_words):
            return self.too_long
        if len(words) < self.min_words or self.echoes(words):
            return self.off_topic
        return None

    def is_met(self, topic: Topic, reply: str, *, has_ended: bool) -> bool:
        """Return True if the reply meets the preference; the topic's words are measured separately."""
        return self.complaint(topic, reply, has_ended=has_ended, reads_request=False) is None

    def echoes(self, words: Sequence[str]) -> bool:
        text = " ".join(words)
        told = [self.hint, *(said for c in (self.too_long, self.has_list, self.off_topic) if c for said in c.said)]
        heard = {" ".join(w[k : k + _ECHO_WORDS]) for w in map(words_of, told) for k in range(len(w) - _ECHO_WORDS + 1)}
        said = {" ".join(words[k : k + _ECHO_WORDS]) for k in range(len(words) - _ECHO_WORDS + 1)}
        return bool(self.echo.search(text)) or bool(heard & said)


def is_about(topic: Topic, reply: str) -> bool:
    return any(word.startswith(about) for word in words_of(reply) for about in topic.about)


def has_list(reply: str) -> bool:
    return bool(_LIST.search(reply) or _NUMBERED.search(reply))


def topics(part: str) -> list[Topic]:
    """Return the topics of `train` or `held_out`; the two are disjoint."""
    found: dict[str, str] = tomllib.loads(TOPICS_FILE.read_text())[part]
    return [Topic(text, tuple(words.split())) for text, words in found.items()]


def words_of(text: str) -> list[str]:
    return [word.replace("’", "'") for word in _WORD.findall(text.casefold())]


SHORT = Preference(
    name="short",
    form="How do I {}?",
    hint="Answer in one or two short sentences.",
    too_long=Complaint(
        "too_long",
        (
            "No, that is far too long. Please answer in one or two short sentences.",
            "No, shorter please. One or two short sentences are enough for me.",
            "No, too long. Just say it in one or two short sentences.",
        ),
    ),
    has_list=Complaint(
        "has_list",
        (
            "Please don't give me a list. Just one or two short sentences.",
            "No list please, I want one or two short sentences.",
        ),
    ),
    off_topic=Complaint(
        "off_topic",
        (
            "That is not what I asked. Please answer my question in one or two short sentences.",
            "No, that does not answer my question. Tell me how to do it, in one or two short sentences.",
        ),
    ),
    max_words=40,
    min_words=4,
    echo=re.compile(r"\b(?:one|two|short) sentences?\b"),
)
NO_LISTS = Preference(
    name="no_lists",
    form="Give me three tips to {}.",
    hint="Do not use a list; write one short paragraph of plain sentences.",
    too_long=None,
    has_list=Complaint(
        "has_list",
        (
            "Please don't use lists. Write it as one short paragraph instead.",
            "No lists please, just one short paragraph.",
            "No, not a list. Please write plain sentences, in one short paragraph.",
        ),
    ),
    off_topic=Complaint(
        "off_topic",
        (
            "That is not what I asked. Please give me the tips, in one short paragraph.",
            "No, that does not answer my question. I want the tips, in one short paragraph.",
        ),
    ),
    max_words=10_000,
    min_words=12,
    echo=re.compile(r"\bno lists?\b|\b(?:one|short) paragraph\b"),
)
PREFERENCES = {preference.name: preference for preference in (SHORT, NO_LISTS)}
