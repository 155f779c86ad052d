"""A fake engine that scores, and remembers each call."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from openclaw_rl.engines.base import Score
from openclaw_rl.errors import AlignmentError, EngineGone, EngineRefused
from openclaw_rl.testing import FakeEngine
from openclaw_rl.types import Ids

SHORT = "Answer in one sentence."
FAILURES = [
    EngineGone("gone"),
    EngineRefused("no such adapter", status=400),
    AlignmentError("3 tokens to score, 2 scored"),
]


@dataclass
class Scorer(FakeEngine):
    """Remembers its calls. `values(prompt text)` gives the log-prob of every token; `script` fails the first calls."""

    values: Callable[[str], float] = lambda text: -1.0
    script: list[Exception | asyncio.Event] = field(default_factory=list)
    seen: list[tuple[str, Ids, str | None, str | None, int]] = field(default_factory=list)
    users: Callable[[], int] = lambda: 0
    held: list[int] = field(default_factory=list)

    async def score(
        self, prompt_ids: Ids, response_ids: Ids, *, lora_path: str | None, extra_key: str | None, top_k: int = 0
    ) -> Score:
        text = "".join(map(chr, prompt_ids))
        self.seen.append((text, response_ids, lora_path, extra_key, top_k))
        self.held.append(self.users())
        if self.script:
            said = self.script.pop(0)
            if isinstance(said, Exception):
                raise said
            await said.wait()
        value = self.values(text)
        row = tuple(value - k for k in range(top_k))
        return Score(
            (value,) * len(response_ids),
            (row,) * len(response_ids) if top_k else None,
            (tuple(range(top_k)),) * len(response_ids) if top_k else None,
        )
