"""The ledger: every turn in exactly one counted state, on disk, and the queue between serving, judging and training."""

from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.ledger.records import (
    Effect,
    Event,
    FeedbackOutcome,
    FeedbackTarget,
    Forgotten,
    Identity,
    Retained,
    TurnRecord,
    TurnSummary,
)
from openclaw_rl.ledger.store import LedgerLimits

__all__ = [
    "Effect",
    "Event",
    "FeedbackOutcome",
    "FeedbackTarget",
    "Forgotten",
    "Identity",
    "Ledger",
    "LedgerLimits",
    "Retained",
    "TurnRecord",
    "TurnSummary",
]
