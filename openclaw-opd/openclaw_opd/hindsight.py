"""Nouns of hindsight: the distillation term of a turn, or the counted reason of its absence."""

from dataclasses import dataclass
from enum import StrEnum

from openclaw_rl.types import HintTerm, LogProbs, Sample, TopK


class Absent(StrEnum):
    """Reason of a turn without a distillation term."""

    NO_HINT = "no_hint"
    """The next state holds no advice: by the judge's majority, or for want of words to quote."""
    HINT_UNDECIDED = "hint_undecided"
    """The judge's answers hold no majority, or are not readable."""
    HINT_REJECTED = "hint_rejected"
    """Every hint was too long, or gave the reply away."""
    JUDGE_FAILED = "judge_failed"
    """The judge did not answer. May work later."""
    NO_USER_MESSAGE = "no_user_message"
    """The prompt has no user message for a hint."""
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
        """True when the cause is an outage. For a turn without another term the method then raises TeacherError."""
        return self in (Absent.JUDGE_FAILED, Absent.TEACHER_FAILED, Absent.NON_FINITE)


@dataclass(frozen=True, slots=True)
class Hindsight:
    """The term, or `absent` and the detail. T response tokens, K ids of the top-k."""

    absent: Absent | None = None
    detail: str = ""
    hint: str | None = None
    source: str | None = None
    """`judge`, `verbatim` or `feedback`; of a practice reply `practice` or `anchor`."""
    gain: float | None = None
    """The number by which the hint was chosen (`teacher.gain`)."""
    guidance: float | None = None
    """The w of a guided teacher; None: the teacher that read the hint, as it is."""
    hinted_gap: float | None = None
    """With guidance: the mean gap of the trained tokens before it, of the teacher that only read the hint."""
    teacher_log_probs: LogProbs | None = None  # [T], temperature 1, hint in the prompt; guided: not normalised
    student_log_probs: LogProbs | None = None  # [T], the same engine and temperature; None: the trainer's own
    scored_version: int | None = None
    """The version whose adapter gave the student's term (and the teacher's, unless `method.teacher` says otherwise)."""
    top_k: TopK | None = None  # [T, K], the teacher's

    def term(self) -> HintTerm:
        """Return the part that is kept with the sample."""
        return HintTerm(
            text=self.hint,
            source=self.source,
            gain=self.gain,
            guidance=self.guidance,
            hinted_gap=self.hinted_gap,
            absent=None if self.absent is None else self.absent.value,
            detail=self.detail,
            top_k=self.top_k,
        )


def top_k_of(sample: Sample) -> TopK | None:
    """Return the sample's table, None without one. Raises AlignmentError when it does not fit the response."""
    table = None if sample.hint is None else sample.hint.top_k
    if table is not None:
        table.check(len(sample.response_ids))
    return table
