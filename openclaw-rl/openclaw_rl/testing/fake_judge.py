"""Fake judge with scripted verdicts."""

from collections import deque
from collections.abc import Iterable

from openclaw_rl.types import JudgedTurn, Verdict


class FakeJudge:
    """Gives the scripted verdicts in order, then `default`. A scripted exception is raised. `seen` lists its calls."""

    def __init__(self, verdicts: Iterable[int | Exception] = (), *, default: int = 1) -> None:
        self._verdicts = deque(verdicts)
        self._default = default
        self.seen: list[JudgedTurn] = []

    async def verdict(self, judged: JudgedTurn) -> Verdict:
        self.seen.append(judged)
        value = self._verdicts.popleft() if self._verdicts else self._default
        if isinstance(value, Exception):
            raise value
        return Verdict(value=value, votes=(value,), source="fake")
