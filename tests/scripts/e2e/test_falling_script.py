"""Method that `scripts/e2e/falling_verdict.py` installs by entry point: its reward has the wrong sign on demand."""

from dataclasses import replace
from pathlib import Path

import pytest
from turns import make_request, make_turn

from e2e import falling_verdict
from openclaw_rl.methods.base import Dropped, ScoringTools, load_method
from openclaw_rl.types import JudgedTurn, NextState, Verdict


async def test_the_reward_is_turned_around_while_the_file_is_there_and_no_verdict_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, fault = falling_verdict.Switch(tmp_path / "begun"), falling_verdict.Switch(tmp_path / "fault")
    falling_verdict.install(tmp_path / "plugin", tmp_path / "begun", tmp_path / "fault")
    monkeypatch.syspath_prepend(str(tmp_path / "plugin"))
    method = load_method("wrong_sign")
    judged = JudgedTurn(make_request("a"), make_turn("a"), NextState(()), Verdict(1, (1,), source="rules"))

    async def rewards() -> list[float | None]:
        found = []
        for value in (1, -1):
            turn = replace(judged, verdict=Verdict(value, (value,), source="rules"))
            sample = await method.score(turn, ScoringTools())
            assert not isinstance(sample, Dropped)
            assert turn.verdict is not None
            assert turn.verdict.value == value
            found.append(sample.reward)
        return found

    assert isinstance(await method.score(judged, ScoringTools()), Dropped)  # not yet
    begun.comes()
    assert await rewards() == [1.0, -1.0]
    fault.comes()
    assert await rewards() == [-1.0, 1.0]
    neutral = replace(judged, verdict=Verdict(0, (0,), source="rules"))
    assert isinstance(await method.score(neutral, ScoringTools()), Dropped)
    fault.goes()
    assert await rewards() == [1.0, -1.0]


def test_the_simulated_user_goes_by_the_first_word() -> None:
    replies = ("No.", " no, it is not", "NO", "Not sure", "Yes", "")
    assert [falling_verdict.likes(text) for text in replies] == [True] * 3 + [False] * 3
