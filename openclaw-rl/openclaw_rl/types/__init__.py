"""Nouns of the system: frozen dataclasses that refuse wrong contents.

Functions pass these nouns to each other, never a dict.
"""

from openclaw_rl.types.samples import ROUNDING, HintTerm, Lease, Sample, TopK
from openclaw_rl.types.turns import (
    DropReason,
    Feedback,
    Ids,
    JudgedTurn,
    LogProbs,
    NextState,
    OpenTurn,
    Request,
    SamplingParams,
    Scope,
    SideCount,
    Turn,
    TurnKey,
    TurnState,
    TurnType,
    Verdict,
    VersionRun,
    WrittenReply,
)
from openclaw_rl.types.versions import StepProbe, StepReport, Version, VersionState, WeightKind
from openclaw_rl.types.wishes import (
    PracticeKind,
    PracticeReply,
    PracticeRoom,
    Wish,
    WishMeasure,
    WishSource,
    WishState,
)

__all__ = [
    "ROUNDING",
    "DropReason",
    "Feedback",
    "HintTerm",
    "Ids",
    "JudgedTurn",
    "Lease",
    "LogProbs",
    "NextState",
    "OpenTurn",
    "PracticeKind",
    "PracticeReply",
    "PracticeRoom",
    "Request",
    "Sample",
    "SamplingParams",
    "Scope",
    "SideCount",
    "StepProbe",
    "StepReport",
    "TopK",
    "Turn",
    "TurnKey",
    "TurnState",
    "TurnType",
    "Verdict",
    "Version",
    "VersionRun",
    "VersionState",
    "WeightKind",
    "Wish",
    "WishMeasure",
    "WishSource",
    "WishState",
    "WrittenReply",
]
