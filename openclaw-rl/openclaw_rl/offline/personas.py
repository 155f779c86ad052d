"""Simulated people with a preference: by rules, which are reproducible, or played by a model.

A person reads a reply and answers with thanks, or with a complaint in the words of a real user, which name the fault.
The learner gets these words only. With `reads_request` the person first checks that the reply is about the question (it
holds a word of the topic's list). A reply in the right form about another subject is then a complaint too.

The score of replies is the share that meets every rule of the preference. A reply that only repeats the hint's wording
fails.
"""

import random
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Protocol

from openclaw_rl.errors import OpenClawRLError

_LIST = re.compile(r"^[ \t\"']*(?:[-*•+]|\d{1,2}[.)])[ \t]", re.MULTILINE)
_NUMBERED = re.compile(r"\b1[.):]\s.*\b2[.):]\s", re.DOTALL)
"""A list within one line."""
_LEVELS = re.compile(r"\\boxed\{\s*([01](?:\.\d+)?)\s*\}")
_BOLD = re.compile(r"\*\*|__|^#", re.MULTILINE)
_WORD = re.compile(r"[^\W_]+(?:['’]\w+)?")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_ECHO_WORDS = 4
"""Number of words in a row from the hint or a complaint that make an echo."""
THANKS = ("Thank you, that is perfect.", "Thanks, just what I needed!", "Perfect, thank you.", "Great, thanks a lot!")


class ExperimentError(OpenClawRLError):
    """The experiment cannot go on: the server or the person's model does not answer as it must."""


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
    in_few_words: tuple[str, ...] = ()
    """Ways of a user who says the least that a person would understand."""

    def ways(self, *, in_few_words: bool) -> tuple[str, ...]:
        return (in_few_words and self.in_few_words) or self.said


@dataclass(frozen=True, slots=True)
class Preference:
    name: str
    form: str
    hint: str
    """The wish in one sentence, as a judge writes it."""
    too_long: Complaint | None
    has_list: Complaint | None
    off_topic: Complaint
    max_words: int
    min_words: int
    echo: re.Pattern[str]
    missing: Complaint | None = None
    needs: re.Pattern[str] | None = None
    """Pattern without which a reply is `missing`; read without regard to case."""

    @property
    def fault(self) -> Complaint:
        """The complaint of the preference itself, beside those of replies that miss the request."""
        found = self.too_long or self.has_list or self.missing
        assert found is not None
        return found

    @property
    def complaints(self) -> tuple[Complaint, ...]:
        every = (self.too_long, self.has_list, self.missing, self.off_topic)
        return tuple(complaint for complaint in every if complaint is not None)

    def question(self, topic: Topic) -> str:
        return self.form.format(topic.text)

    def complaint(self, topic: Topic, reply: str, *, has_ended: bool, reads_request: bool) -> Complaint | None:
        """Return the fault that the user finds in the reply, or None."""
        words = words_of(reply)
        if reads_request and not is_about(topic, reply):
            return self.off_topic
        if self.has_list is not None and (has_list(reply) or _BOLD.search(reply)):
            return self.has_list
        if self.too_long is not None and (not has_ended or len(words) > self.max_words):
            return self.too_long
        if self.missing is not None and self.needs is not None and not self.needs.search(reply.casefold()):
            return self.missing
        if len(words) < self.min_words or self.echoes(words):
            return self.off_topic
        return None

    def is_met(self, topic: Topic, reply: str, *, has_ended: bool) -> bool:
        """Return True if the reply meets the preference; the topic's words are measured separately."""
        return self.complaint(topic, reply, has_ended=has_ended, reads_request=False) is None

    def echoes(self, words: Sequence[str]) -> bool:
        text = " ".join(words)
        told = [self.hint, *(way for fault in self.complaints for way in (*fault.said, *fault.in_few_words))]
        heard = {" ".join(w[k : k + _ECHO_WORDS]) for w in map(words_of, told) for k in range(len(w) - _ECHO_WORDS + 1)}
        said = {" ".join(words[k : k + _ECHO_WORDS]) for k in range(len(words) - _ECHO_WORDS + 1)}
        return bool(self.echo.search(text)) or bool(heard & said)


def is_about(topic: Topic, reply: str) -> bool:
    return any(word.startswith(about) for word in words_of(reply) for about in topic.about)


def has_list(reply: str) -> bool:
    return bool(_LIST.search(reply) or _NUMBERED.search(reply))


def topics(part: str) -> list[Topic]:
    """Return the topics of `train` or `held_out`; the two are disjoint."""
    file = resources.files(__package__).joinpath("topics.toml")
    found: dict[str, str] = tomllib.loads(file.read_text(encoding="utf-8"))[part]
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
        ("No, shorter please.", "No, that is too long.", "No, in fewer words please.", "That is wrong, keep it brief."),
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
        ("No lists, please.", "No, I don't like lists.", "No, plain text please.", "No, not as a list."),
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
PERSONAL = Preference(
    name="personal",
    form="What is the best way to {}?",
    hint="Tell me what you do yourself, in the first person.",
    too_long=None,
    has_list=None,
    off_topic=Complaint(
        "off_topic",
        (
            "That is not what I asked. Please answer my question, and tell me what you do yourself.",
            "No, that does not answer my question. Tell me what you do yourself, in the first person.",
        ),
    ),
    max_words=10_000,
    min_words=12,
    echo=re.compile(r"\bfirst person\b"),
    missing=Complaint(
        "impersonal",
        (
            "No, tell me what you do yourself, in the first person.",
            "No, in the first person please. Tell me what you do yourself.",
            'Please don\'t write "you". Tell me what you do yourself, in the first person.',
        ),
        ("No, tell me what you do yourself.", "No, in the first person please.", "No, I want to hear what you do."),
    ),
    needs=re.compile(r"\b(?:i|i'(?:d|ll|ve|m)|my)\b.*\b(?:i|i'(?:d|ll|ve|m)|my)\b", re.DOTALL),
)
LIVELY = Preference(
    name="lively",
    form="What is the best way to {}?",
    hint="Be enthusiastic and use exclamation marks!",
    too_long=None,
    has_list=None,
    off_topic=Complaint(
        "off_topic",
        (
            "That is not what I asked. Please answer my question. Be enthusiastic and use exclamation marks!",
            "No, that does not answer my question. Tell me how to do it, with enthusiasm and exclamation marks!",
        ),
    ),
    max_words=10_000,
    min_words=8,
    echo=re.compile(r"\bexclamation\b|\benthusias\w+\b"),
    missing=Complaint(
        "flat",
        (
            "No, that is too dry. Be enthusiastic and use exclamation marks!",
            "No, be more enthusiastic please! Use exclamation marks.",
            "Please do not be so dry. Be enthusiastic, with exclamation marks!",
        ),
        ("No, more enthusiasm please!", "No, that is too dry.", "No, with more energy please!"),
    ),
    needs=re.compile(r"!.*!", re.DOTALL),
)
FRIEND = Preference(
    name="friend",
    form="What is the best way to {}?",
    hint='Begin your answer with "My dear friend".',
    too_long=None,
    has_list=None,
    off_topic=Complaint(
        "off_topic",
        (
            'That is not what I asked. Please answer my question, and begin with "My dear friend".',
            'No, that does not answer my question. Tell me how to do it, and begin with "My dear friend".',
        ),
    ),
    max_words=10_000,
    min_words=12,
    echo=re.compile(r"\b(?:begin|start) (?:my|your|the|with) (?:answer|response|reply|my dear)\b"),
    missing=Complaint(
        "cold",
        (
            'No, please begin your answer with "My dear friend".',
            'No, that is too cold. Please begin with "My dear friend".',
            'No, be warmer please: start with the words "My dear friend".',
        ),
    ),
    needs=re.compile(r"^\W*my dear friend\b"),
)
PREFERENCES = {preference.name: preference for preference in (SHORT, NO_LISTS, LIVELY, FRIEND, PERSONAL)}
MEASURED = ("short", "no_lists")
"""Preferences of the tables in the README files of the three methods."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Word problem whose answer is a number."""

    question: str
    answer: str

    def is_right(self, reply: str) -> bool:
        """Return True if the last number of the reply is the answer."""
        numbers = _NUMBER.findall(reply)
        return bool(numbers) and _value(numbers[-1]) == _value(self.answer)


def _value(number: str) -> float:
    return float(number.replace(",", ""))


Ask = Callable[[str, str], str]
"""(system prompt, user's message) → answer of the model that plays the person."""


class Person(Protocol):
    """A simulated user: questions, an answer to each reply, and a score."""

    name: str
    wish: str
    """The wish in one sentence."""

    def questions(self, part: str) -> list[str]:
        """Return the questions of `train` or `held_out`, which are disjoint."""
        ...

    def answer(self, question: str, reply: str, *, has_ended: bool, said: Sequence[str]) -> str | None:
        """Return the complaint about a reply; None if the person is content. said: the earlier complaints."""
        ...

    def score(self, question: str, reply: str, *, has_ended: bool) -> float:
        """Return how well a reply meets the wish, in [0, 1]."""
        ...


class RulePerson:
    """Person with a preference of `personas`."""

    def __init__(self, preference: Preference, seed: int) -> None:
        self.name, self.wish, self._preference = preference.name, preference.hint, preference
        self._dice = random.Random(seed)
        self._topics = {preference.question(topic): topic for part in ("train", "held_out") for topic in topics(part)}

    def questions(self, part: str) -> list[str]:
        return [self._preference.question(topic) for topic in topics(part)]

    def answer(self, question: str, reply: str, *, has_ended: bool, said: Sequence[str]) -> str | None:
        topic = self._topics[question]
        fault = self._preference.complaint(topic, reply, has_ended=has_ended, reads_request=True)
        if fault is None:
            return None
        return self._dice.choice([way for way in fault.said if way not in said] or list(fault.said))

    def score(self, question: str, reply: str, *, has_ended: bool) -> float:
        topic = self._topics[question]
        return float(self._preference.complaint(topic, reply, has_ended=has_ended, reads_request=True) is None)


@dataclass(frozen=True, slots=True)
class Role:
    """Role of a person whom a model plays."""

    name: str
    asks: str
    """Form of a question: `{question}` and `{answer}` of a word problem."""
    wish: str
    persona: str


STUDENT = Role(
    "student",
    "Solve this problem of my homework, and show how: {question}",
    "Write like a person, not like an AI: casual plain sentences without bold, headings or numbered steps, with the "
    "whole reasoning.",
    "You are a student who hands in what the assistant writes. It must not look as if an AI had written it: natural, "
    "casual sentences, no bold, no headings, no numbered steps, no 'Final answer', and the whole reasoning.",
)
TEACHER = Role(
    "teacher",
    "Write a comment on a student's solution. Problem: {question} Correct answer: {answer}. The student's answer: "
    "{answer}.",
    "Write comments as a kind teacher: name the right and wrong steps, be warm, in flowing sentences without lists.",
    "You are a teacher who wants comments for students: they name specific right and wrong steps, are patient and "
    "warm, and flow as prose without bold, headings, bullets or numbers.",
)
ROLES = {role.name: role for role in (STUDENT, TEACHER)}


class ModelPerson:
    """Person whom a model plays, behind an OpenAI-compatible URL; it asks about word problems."""

    def __init__(self, role: Role, posed: Sequence[Problem], ask: Ask) -> None:
        """posed: word problems; the first half is held out."""
        self.name, self.wish, self._role, self._ask = role.name, role.wish, role, ask
        asked = [role.asks.format(question=one.question, answer=one.answer) for one in posed]
        self._parts = {"held_out": asked[: len(asked) // 2], "train": asked[len(asked) // 2 :]}

    def questions(self, part: str) -> list[str]:
        return list(self._parts[part])

    def answer(self, question: str, reply: str, *, has_ended: bool, said: Sequence[str]) -> str | None:
        system = (
            f"{self._role.persona} You only care about style, not about the result. Answer the assistant's reply as "
            "this person in one or two sentences that say what to change. If the reply is as you want it, answer DONE "
            "alone."
        )
        text = self._ask(system, f"You asked:\n{question}\n\nThe assistant replied:\n{reply}").strip()
        return None if text.strip(".! ").upper() == "DONE" else text

    def score(self, question: str, reply: str, *, has_ended: bool) -> float:
        system = (
            f"Rate how well a reply meets this preference: {self._role.persona} Think in a few sentences, then finish "
            "with one of \\boxed{0}, \\boxed{0.25}, \\boxed{0.5}, \\boxed{0.75}, \\boxed{1}."
        )
        for _ in range(3):
            found = _LEVELS.findall(self._ask(system, f"Request:\n{question}\n\nReply:\n{reply}"))
            if found:
                return round(4 * float(found[-1])) / 4
        raise ExperimentError("the person's model gives no rating in \\boxed{}")
