"""What the ledger tells about itself and its turns."""

from dataclasses import dataclass
from enum import StrEnum

from openclaw_rl.types import (
    DropReason,
    Feedback,
    JudgedTurn,
    NextState,
    Request,
    Sample,
    Turn,
    TurnState,
    Verdict,
    WeightKind,
)


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


class Effect(StrEnum):
    """What came of a piece of feedback."""

    JUDGED = "judged"
    """It is the turn's verdict, and the method scores the turn with it."""
    RESCORED = "rescored"
    """The turn had been scored: it is scored again, with what was said."""
    LATE = "late"
    """A trainer has the turn, or has trained on it. Should that come to nothing, the feedback takes effect then."""
    RECORDED = "recorded"
    """Kept; it changes nothing now. (A comment on a turn that has yet to be judged waits with it.)"""


@dataclass(frozen=True, slots=True)
class FeedbackOutcome:
    feedback_id: str
    turn_id: str
    state: TurnState
    """The turn's, after it."""
    effect: Effect
    demonstration_id: str | None = None
    """The turn that the demonstration became."""


@dataclass(frozen=True, slots=True)
class FeedbackTarget:
    """The turn that somebody wants to say something of."""

    turn_id: str
    prompt_tokens: int
    reason: DropReason | None


@dataclass(frozen=True, slots=True)
class Retained:
    """What one round of retention let go of."""

    turns: int
    pieces: int
    used_bytes: int
    is_full: bool
    """The file is over its limit, and what is left in it still waits for something."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a forgotten session took with it, a conversation without an id, or a user."""

    user: str
    session_id: str | None
    turns: int
    pieces: int
    """Messages, stretches of prompts and the like that nobody else referred to."""
    trained_in: tuple[int, ...]
    """Versions that trained on it, dead ones too: their weights stay."""
    is_scrubbed: bool = True
    """No byte of it is left in the ledger's files; else some may be, until `openclaw-rl compact`."""


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
    feedback: tuple[Feedback, ...]
    """Oldest first."""
    sample: Sample | None
    lease_id: str | None
    """The lease that has it, or the last one that had it."""
    trained_in: int | None
    events: tuple[Event, ...]

    @property
    def judged(self) -> JudgedTurn | None:
        """None while nobody has said anything of it."""
        if self.next_state is None and not self.feedback:
            return None
        return JudgedTurn(self.request, self.turn, self.next_state or NextState(()), self.verdict, self.feedback)


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
    feedback: float | None = None
    """The newest value a user gave. Another sign than the verdict's: it came too late."""
    demonstration_of: str | None = None
    """The turn whose better reply this is; nobody sampled it."""
