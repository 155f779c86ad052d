"""Dependencies of the practice loop; large parts are protocols. `ledger.Ledger` implements `PracticeLedger`."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from openclaw_rl.methods.base import Method, ScoringTools
from openclaw_rl.practice.measuring import Meter
from openclaw_rl.practice.relevance import Relevance
from openclaw_rl.practice.sampling import ReplySampler
from openclaw_rl.practice.variants import Variants
from openclaw_rl.proxy.activity import ChatActivity
from openclaw_rl.telemetry.health import Health
from openclaw_rl.types import JudgedTurn, PracticeReply, PracticeRoom, Request, Verdict, Wish, WishMeasure

Vote = Callable[[JudgedTurn, str], Awaitable[Verdict | None]]
"""Judge a practice reply with the wish in view; None: no verdict."""
Contradicts = Callable[[str, str], Awaitable[bool]]
"""Return True if the newer wish (second) contradicts the older one."""


class PracticeLedger(Protocol):
    """Methods of the ledger that practice uses."""

    async def practice_policies(self) -> list[str]: ...

    async def practice_room(self, policy: str) -> PracticeRoom: ...

    async def wishes(self, *, user: str | None = None, only_active: bool = False) -> list[Wish]: ...

    async def anchor_turns(self, *, user: str, policy: str, limit: int) -> list[str]: ...

    async def practice_request(self, turn_id: str) -> Request | None: ...

    async def record_practice(self, replies: Sequence[PracticeReply]) -> int: ...

    async def record_measures(self, measures: Sequence[WishMeasure]) -> None: ...

    async def supersede_wish(self, wish_id: int, *, by: int, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class PracticeDeps:
    """Parts of the server that practice works with."""

    ledger: PracticeLedger
    activity: ChatActivity
    method: Method
    tools: ScoringTools
    sampler: ReplySampler
    meter: Meter
    health: Health
    on_batch: Callable[[], None]
    """A batch of practice waits for the trainer."""
    trainer_lives: Callable[[], bool]
    batch_size: int
    """`training.batch_size`: practice leaves room in it for users' samples."""
    aim: float
    """Learned share at which a wish is learned."""
    share_of: Callable[[str], float | None] = lambda _: None
    """Largest share of an update's replies that a user may have; None: all of them."""
    vote: Vote | None = None
    contradicts: Contradicts | None = None
    relevance: Relevance | None = None
    """None: practice never asks whether a reply answers its request."""
    variants: Variants | None = None
    """None: corrected prompts are practised alone."""

    def why_wait(self, room: PracticeRoom, policy: str, *, idle_s: float) -> str | None:
        """Return the reason for which other parts keep practice waiting; None: none of them does."""
        if not room.learning:
            return "learning is paused"
        if room.is_pinned:
            return "a version is pinned"
        if not self.activity.is_idle or room.running:
            return "a chat runs"
        if self.activity.idle_s < idle_s:
            return "a chat ran a moment ago"
        if room.in_flight or room.waiting or room.serving != room.tip:
            return "the last update is on its way"
        serving = self.sampler.serving
        # A policy that nobody asked for since the start has no version there: the first reply brings the ledger's.
        if not serving.is_open or serving.currents.get(policy, room.serving) != room.serving:
            return "the engine is on its way to the version"
        if room.real >= self.batch_size:
            return "users' samples fill a batch"
        if not self.trainer_lives():
            return "the trainer is silent"
        return None
