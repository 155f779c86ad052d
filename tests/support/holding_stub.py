"""The stub engine as a process whose replies stand still while a file exists.

Called as `holding_stub.py FILE` with the stub's own flags.

A long prompt then gets no first token, and another reply gets no second one. So a test may look and kill meanwhile,
however slow the machine is.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from openclaw_rl.testing import FakeEngine
from openclaw_rl.testing import __main__ as stub

LONG_PROMPT = 500


class HoldingEngine(FakeEngine):
    hold: Path

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._begun: list[object] = []
        """Replies that were let through once, which is before their first token."""

    async def _unpaused_or_aborted(self, running: Any) -> None:
        await super()._unpaused_or_aborted(running)
        is_long = len(running.request.input_ids) >= LONG_PROMPT
        if is_long or any(one is running for one in self._begun):
            while self.hold.exists() and not running.aborted.is_set():
                await asyncio.sleep(0.01)
        self._begun.append(running)


if __name__ == "__main__":
    HoldingEngine.hold = Path(sys.argv.pop(1))
    stub.FakeEngine = HoldingEngine  # type: ignore[misc]
    stub.main()
