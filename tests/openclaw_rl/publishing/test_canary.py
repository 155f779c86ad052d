"""Canaries: read from a file or refused by line, and scored against the base."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from openclaw_rl.errors import SettingsError
from openclaw_rl.messages import Message
from openclaw_rl.publishing.canary import Canary, CanaryScore, read_canaries
from openclaw_rl.types import Ids

GOOD = '{"messages": [{"role": "user", "content": "hi"}], "reply": "hello"}\n'


def read(path: Path, text: str, *, context_length: int = 100) -> tuple[Canary, ...]:
    path.write_text(text, encoding="utf-8")

    def render(messages: Sequence[Message], tools: str | None, kwargs: str | None) -> Ids:
        return tuple(range(len(messages[0].text())))

    return read_canaries(path, render=render, reply_ids=lambda text: (7,) * len(text), context_length=context_length)


def test_prompt_and_reply_become_ids(tmp_path: Path) -> None:
    assert read(tmp_path / "c.jsonl", GOOD + "\n" + GOOD) == (Canary((0, 1), (7,) * 5),) * 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "0 canaries; 1 to 64"),
        (GOOD * 65, "65 canaries"),
        (GOOD + "{}\n", "canary 2"),
        (GOOD + "nonsense\n", "canary 2"),
        ('{"messages": [], "reply": "x"}', "canary 1"),
        ('{"messages": [{"role": "user", "content": "x"}], "reply": ""}', "canary 1"),
    ],
)
def test_a_bad_file_is_refused_and_its_line_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        read(tmp_path / "c.jsonl", text)


def test_a_canary_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="7 tokens are more than the context length 6"):
        read(tmp_path / "c.jsonl", GOOD, context_length=6)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nowhere"):
        read_canaries(tmp_path / "nowhere", render=lambda *_: (), reply_ids=lambda _: (), context_length=1)


async def test_the_drop_is_the_mean_over_all_tokens_against_the_base() -> None:
    asked: list[int] = []

    async def score(version: int, prompt: Ids, reply: Ids) -> tuple[float, ...]:
        asked.append(version)
        return tuple(-1.0 - version * (0.5 if len(reply) == 1 else 0.1) for _ in reply)

    canaries = CanaryScore([Canary((1,), (2,)), Canary((1,), (2, 3, 4))], score)
    assert await canaries.drop(1) is None, "nothing to compare with yet"
    for _ in range(2):
        await canaries.compare_with(partial(score, 0))
    # base: −1 a token; version 1: (−1.5 + 3 · −1.1) / 4 = −1.2
    assert await canaries.drop(1) == pytest.approx(0.2)
    assert await canaries.drop(2) == pytest.approx(0.4)
    assert asked == [0, 0, 1, 1, 2, 2]  # the base is scored once


async def test_without_canaries_nothing_is_asked() -> None:
    async def score(version: int, prompt: Ids, reply: Ids) -> tuple[float, ...]:
        raise AssertionError

    canaries = CanaryScore((), score)
    await canaries.compare_with(partial(score, 0))
    assert await canaries.drop(1) is None
