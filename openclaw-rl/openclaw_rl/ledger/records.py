"""What the ledger tells about itself and its turns."""

from dataclasses import dataclass

from openclaw_rl.types import DropReason, JudgedTurn, NextState, Request, Sample, Turn, TurnState, Verdict, WeightKind


@dataclass(frozen=True, slots=True)
class Identity:
    """What a ledger belongs to: adapters load on no other base, ids mean nothing to another tokenizer."""

    base_hash: str
    tokenizer_hash: str
    model_name: str
    """For people; a model may be renamed or moved."""
    kind: WeightKind = WeightKind.LORA


@dataclass(frozen=True, slots=True)
class Event:
    """One state change of a turn."""

    at: float
    state: TurnState
    detail: str


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """All that is known of one turn: what was said, what became of it, and why."""

    request: Request
    turn: Turn
    state: TurnState
    reason: DropReason | None
    next_state: NextState | None
    answered_by: str | None
    """The request that brought the next state."""
    verdict: Verdict | None
    sample: Sample | None
    lease_id: str | None
    """The lease that has it, or the last one that had it."""
    trained_in: int | None
    events: tuple[Event, ...]

    @property
    def judged(self) -> JudgedTurn | None:
        return None if self.next_state is None else JudgedTurn(self.request, self.turn, self.next_state, self.verdict)


@dataclass(frozen=True, slots=True)
class TurnSummary:
    """One line of a list of turns; no content."""

    turn_id: str
    user: str
    session_id: str | None
    state: TurnState
    reason: DropReason | None
    finished_at: float
    prompt_tokens: int
    response_tokens: int
    oldest_version: int
    is_tool: bool
    verdict: int | None
    trained_in: int | None
