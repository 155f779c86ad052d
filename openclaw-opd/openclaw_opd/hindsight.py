"""The nouns of hindsight: the distillation term of a turn, or the counted reason why it has none.

The teacher's top-k table as it travels in `Sample.extra_json`: {"top_k": {"ids": [T, K], "log_probs": [T, K]}}.
"""

import json
import math
from dataclasses import dataclass
from enum import StrEnum

from openclaw_rl.errors import AlignmentError
from openclaw_rl.types import Ids, LogProbs, Sample


class Absent(StrEnum):
    """Why a turn has no distillation term."""

    NO_HINT = "no_hint"
    """The next state tells nothing that would have helped: the judge's majority, or no words to quote."""
    HINT_UNDECIDED = "hint_undecided"
    """The judge's answers hold no majority, or cannot be read."""
    HINT_REJECTED = "hint_rejected"
    """Every hint was too long, or gave the reply away."""
    JUDGE_FAILED = "judge_failed"
    """No judge could be asked. May work later."""
    NO_USER_MESSAGE = "no_user_message"
    """There is nothing to append a hint to."""
    PROMPT_CHANGED = "prompt_changed"
    """The messages no longer render to the prompt that was served (another template, a date in it)."""
    HINT_OVERFLOWS = "hint_overflows"
    """Prompt, hint and response exceed the context."""
    TEACHER_FAILED = "teacher_failed"
    """The engine gave no log-probs. May work later."""
    NON_FINITE = "non_finite"
    """A log-prob is NaN or infinite. May work later."""

    @property
    def may_work_later(self) -> bool:
        """The cause is an outage. A turn of which nothing else can be made should be tried again: raise
        TeacherError."""
        return self in (Absent.JUDGE_FAILED, Absent.TEACHER_FAILED, Absent.NON_FINITE)


@dataclass(frozen=True, slots=True)
class Hindsight:
    """The term, or `absent` and why. T response tokens, K of the top-k."""

    absent: Absent | None = None
    detail: str = ""
    hint: str | None = None
    source: str | None = None
    """`judge`, `verbatim` or `feedback`."""
    gain: float | None = None
    """By which the hint was chosen (`teacher.gain`)."""
    teacher_log_probs: LogProbs | None = None  # [T], temperature 1, hint in the prompt
    student_log_probs: LogProbs | None = None  # [T], the same engine and temperature; None: the trainer's own
    scored_version: int | None = None
    """The version whose adapter gave the student's term (and the teacher's, unless `method.teacher` says otherwise)."""
    top_ids: tuple[Ids, ...] | None = None  # [T, K], the teacher's
    top_log_probs: tuple[LogProbs, ...] | None = None  # [T, K], the teacher's

    def extra_json(self) -> str:
        """For `Sample.extra_json`: {"hint": {…}} and, with a top-k, {"top_k": {"ids": [T, K], "log_probs": [T, K]}}."""
        hint: dict[str, object] = {"text": self.hint, "source": self.source, "gain": self.gain}
        if self.absent is not None:
            hint |= {"absent": self.absent.value, "detail": self.detail}
        extra: dict[str, object] = {"hint": {key: value for key, value in hint.items() if value is not None}}
        if self.top_ids is not None and self.top_log_probs is not None:
            extra["top_k"] = {"ids": self.top_ids, "log_probs": self.top_log_probs}
        return json.dumps(extra, sort_keys=True)


ROUNDING = 1e-3
"""By which an engine's probabilities may exceed 1 in sum."""


@dataclass(frozen=True, slots=True)
class TopK:
    """What the teacher, hint in the prompt, finds likeliest in each response token's place, at temperature 1."""

    ids: tuple[Ids, ...]  # [T, K], distinct in a row
    log_probs: tuple[LogProbs, ...]  # [T, K]

    def check(self, tokens: int) -> None:
        """Raises AlignmentError where the table is none of a reply of so many tokens."""
        widths = {len(row) for row in (*self.ids, *self.log_probs)}
        if not tokens == len(self.ids) == len(self.log_probs) or len(widths) != 1 or 0 in widths:
            raise AlignmentError(
                f"top-k: {tokens} tokens, {len(self.ids)} rows of ids and {len(self.log_probs)} of log-probs, "
                f"{sorted(widths)} wide"
            )
        if any(len(set(row)) != len(row) for row in self.ids):
            raise AlignmentError("top-k: an id stands twice in a row")
        if any(not math.fsum(map(math.exp, row)) <= 1 + ROUNDING for row in self.log_probs):  # a nan too
            raise AlignmentError("top-k: what stands there is no distribution")


def top_k_of(sample: Sample) -> TopK | None:
    """The sample's table, None without one. Raises AlignmentError when it does not fit the response."""
    if sample.extra_json is None:
        return None
    table = json.loads(sample.extra_json).get("top_k")
    if table is None:
        return None
    found = TopK(
        tuple(tuple(row) for row in table["ids"]),
        # An engine's -inf is null in JSON.
        tuple(tuple(-math.inf if value is None else value for value in row) for row in table["log_probs"]),
    )
    found.check(len(sample.response_ids))
    return found
