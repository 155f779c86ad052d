"""What a judge is: it looks at a turn with its next state and says +1, 0 or −1, or fails and says so."""

from typing import Protocol

from openclaw_rl.errors import JudgeError
from openclaw_rl.types import JudgedTurn, Verdict


class Undecided(JudgeError):
    """The judge was asked, answered, and did not decide. To ask until it does would be fishing for a verdict."""


class Judge(Protocol):
    async def verdict(self, judged: JudgedTurn) -> Verdict:
        """Raises JudgeError when no verdict could be had (worth another try later), Undecided when none will come."""
        ...
