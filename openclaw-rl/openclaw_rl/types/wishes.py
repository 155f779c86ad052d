"""Wishes: what users asked for in words, and the practice replies that rehearse them."""

from dataclasses import dataclass
from enum import StrEnum

from openclaw_rl.types.samples import Sample
from openclaw_rl.types.turns import Request, Turn

HOLD_BACK_FROM = 4
"""Corrected prompts of one wish from which on every fourth is held back, to measure on."""


class WishState(StrEnum):
    ACTIVE = "active"
    """It is practised, and rehearsed while another wish is."""
    SUPERSEDED = "superseded"
    """A newer wish of the same user took its place."""
    REMOVED = "removed"
    """Its user withdrew it."""
    STOPPED = "stopped"
    """The server gave it up: the gate refused a version that practised it, say."""


class PracticeKind(StrEnum):
    WISH = "wish"
    """A new reply to a corrected prompt, under a teacher that reads the wish."""
    ANCHOR = "anchor"
    """A new reply to a prompt that nobody corrected, held to the base."""


@dataclass(frozen=True, slots=True)
class WishSource:
    """One turn that a user corrected, and the words of the correction."""

    turn_id: str
    text: str
    kind: str
    """Source of the hint: `judge`, `verbatim` or `feedback`."""
    practised: int = 0
    """Practice replies to this prompt so far."""
    is_over: bool = False
    """A newer wish corrected the same prompt: this one no longer holds there."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One wish of one user. Equal wishes in words are one, with a source for each corrected turn."""

    wish_id: int
    user: str
    policy: str
    created_at: float
    state: WishState
    sources: tuple[WishSource, ...]
    """Oldest first; never empty."""
    reason: str | None = None
    """The reason of a state other than `active`."""
    superseded_by: int | None = None
    is_general: bool = False
    """It holds for every prompt of its user: no anchor keeps it where it was asked."""
    rests: str | None = None
    """The reason why it is only rehearsed beside other wishes; None: it still needs practice."""
    learned_share: float | None = None
    """Share of the hint's effect that the policy has learned; 1 is where the hinted base stands. None: not measured."""
    kl: float | None = None
    """KL to the base of its newest practice replies, in nats a token."""
    measured_in: int | None = None
    """Version of both figures."""
    practised: int = 0
    """Practice replies that a living version trained on."""
    updates: int = 0
    """Living versions that practised it."""
    since: int | None = None
    """The first of these versions."""

    @property
    def text(self) -> str:
        """The user's newest words."""
        return self.sources[-1].text

    @property
    def practised_sources(self) -> list[WishSource]:
        """Sources whose prompts are practised: those on which no newer wish holds, without the held-back ones."""
        found = [source for source in self.sources if not source.is_over]
        return [source for place, source in enumerate(found) if not is_held_back(place, len(found))]

    @property
    def held_back(self) -> list[WishSource]:
        """Sources whose prompts are only measured on."""
        practised = {source.turn_id for source in self.practised_sources}
        return [source for source in self.sources if not source.is_over and source.turn_id not in practised]

    @property
    def is_open(self) -> bool:
        """True while the wish needs practice of its own."""
        return self.state is WishState.ACTIVE and self.rests is None


def is_held_back(place: int, count: int) -> bool:
    """Return True if the prompt at `place` of the `count` on which a wish holds is only measured on."""
    return count >= HOLD_BACK_FROM and place % HOLD_BACK_FROM == HOLD_BACK_FROM - 1


@dataclass(frozen=True, slots=True)
class PracticeReply:
    """A reply that nobody asked for, with its sample. `request` and `turn` have ids of their own."""

    kind: PracticeKind
    request: Request
    turn: Turn
    sample: Sample
    of: str | None = None
    """The user's turn whose prompt it answers; None: a built-in prompt of an anchor."""
    wish_id: int | None = None
    is_variant: bool = False
    """It answers a variant of that turn's prompt."""


@dataclass(frozen=True, slots=True)
class WishMeasure:
    """Figures of one wish under one version."""

    wish_id: int
    weight_version: int
    learned_share: float | None
    kl: float | None
    rests: str | None = None
    stopped: str | None = None
    """The reason to give the wish up."""


@dataclass(frozen=True, slots=True)
class PracticeRoom:
    """State of the ledger that decides whether practice may go on."""

    tip: int
    serving: int
    learning: bool
    is_pinned: bool
    running: int
    """Chat requests that are being answered."""
    in_flight: int
    """Leases that are live, and versions that are not decided on."""
    waiting: int
    """Practice samples that wait for a trainer."""
    real: int
    """Users' samples that wait for a trainer."""
    open_wishes: int
