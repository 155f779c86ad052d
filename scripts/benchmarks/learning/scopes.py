"""Prompts outside the scope of a wish: near it, elsewhere, with one exact answer; and the anchors.

Near scope asks of held-out topics in other words. Elsewhere are five other kinds of prompt, a long neutral chat, and
questions that ask for a tool. The anchors are prompts that no user corrected: `like` are of the kinds that are measured
elsewhere, with other contents; `other` are of different kinds. C3PO (arXiv:2402.10893) has the same three scopes.
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SCOPES_FILE = Path(__file__).parent.parent / "data" / "scopes.toml"
ANCHORS = ("mixed", "like", "other")


@dataclass(frozen=True, slots=True)
class Exact:
    """Question with a short answer."""

    question: str
    answers: tuple[str, ...]
    """Lower case; each is right."""

    def is_right(self, reply: str) -> bool:
        """Return True if the reply holds an answer as a word."""
        return any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", reply.casefold()) for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Tool:
    """Tool with one argument, and the questions that ask for it."""

    name: str
    description: str
    argument: str
    question: str
    values: tuple[str, ...]
    """Values of the argument; the first is of an earlier call in the chat."""


def near_forms() -> tuple[str, ...]:
    return tuple(_file()["near"])


def elsewhere() -> dict[str, tuple[str, ...]]:
    """Return the prompts of each kind."""
    return {kind: tuple(prompts) for kind, prompts in _file()["elsewhere"].items()}


def chat() -> tuple[str, ...]:
    """Return the user's messages of the long neutral chat."""
    return tuple(_file()["chat"])


def tool() -> Tool:
    found = _file()["tool"]
    return Tool(**(found | {"values": tuple(found["values"])}))


def anchors(kind: str) -> tuple[str, ...]:
    """Return the anchors of `like`, `other`, or of both."""
    own = _file()["anchors"]
    return tuple(own["like"] + own["other"] if kind == "mixed" else own[kind])


def exact() -> tuple[Exact, ...]:
    return tuple(Exact(question, tuple(answers.split("|"))) for question, answers in _file()["exact"].items())


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(SCOPES_FILE.read_text())
