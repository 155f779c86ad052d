"""Nouns that the ledger returns, and their reading from rows."""

import sqlite3
from dataclasses import dataclass
from enum import StrEnum

import orjson

from openclaw_rl.ledger import blobs, pictures
from openclaw_rl.ledger.blobs import unpack_floats, unpack_ids, unpack_mask, unpack_runs
from openclaw_rl.types import (
    DropReason,
    Feedback,
    HintTerm,
    JudgedTurn,
    NextState,
    PastStep,
    PracticeKind,
    Request,
    Sample,
    SamplingParams,
    Scope,
    StepContext,
    Turn,
    TurnState,
    Verdict,
    VersionRun,
    WeightKind,
)
from openclaw_rl.types.pictures import with_pictures

STEPS_BEFORE = 8
"""Earlier steps of an episode that the judge of a step reads."""


def read_request(db: sqlite3.Connection, row: int) -> Request:
    found = db.execute("SELECT * FROM request WHERE id = ?", (row,)).fetchone()
    shown, prompt = pictures.of_request(db, row), blobs.get_prompt(db, found["prompt"])
    return Request(
        request_id=found["request_id"],
        scope=Scope(found["user"], found["session_id"], found["policy"]),
        received_at=found["received_at"],
        messages=blobs.get_messages(db, unpack_ids(found["messages"])),
        tools_json=blobs.get_text(db, found["tools"]),
        template_kwargs_json=blobs.get_text(db, found["template_kwargs"]),
        prompt_ids=with_pictures(prompt, shown) if prompt else (),  # no ids, if the prompt has a secret
        sampling=_sampling(blobs.get_text(db, found["sampling"]) or "{}"),
        episode=found["episode"],
        task=found["task"],
        step=found["step"],
        in_episode=found["in_episode"],
        pictures=shown,
    )


def _sampling(text: str) -> SamplingParams:
    fields = orjson.loads(text)
    return SamplingParams(**{**fields, "stop": tuple(fields["stop"])})


def read_turn(db: sqlite3.Connection, row: int) -> Turn:
    """Read a turn; its `drop` is the present reason, not the first."""
    found = db.execute(
        "SELECT reply.*, turn_id, turn.reason, request_id FROM reply JOIN turn USING (id) JOIN request USING (id)"
        " WHERE id = ?",
        (row,),
    ).fetchone()
    response_ids = unpack_ids(found["ids"])
    (reply,) = blobs.get_messages(db, [found["message"]])
    return Turn(
        turn_id=found["turn_id"],
        request_id=found["request_id"],
        finished_at=found["finished_at"],
        response_ids=response_ids,
        rollout_log_probs=unpack_floats(found["log_probs"]),
        loss_mask=unpack_mask(found["mask"], len(response_ids)),
        versions=unpack_runs(found["versions"]),
        finish_reason=found["finish_reason"],
        reply=reply,
        drop=None if found["reason"] is None else DropReason(found["reason"]),
        cached_tokens=found["cached_tokens"],
    )


def read_next_state(db: sqlite3.Connection, row: int) -> NextState | None:
    found = db.execute("SELECT messages, reactions FROM next_state WHERE id = ?", (row,)).fetchone()
    if found is None:
        return None
    messages = blobs.get_messages(db, unpack_ids(found["messages"]))
    return NextState(messages, tuple(orjson.loads(found["reactions"] or "[]")))


def read_verdict(db: sqlite3.Connection, row: int) -> Verdict | None:
    found = db.execute("SELECT value, votes, source, rationale FROM verdict WHERE id = ?", (row,)).fetchone()
    if found is None:
        return None
    value, votes, source, rationale = found
    return Verdict(value=value, votes=tuple(orjson.loads(votes)), source=source, rationale=rationale)


def read_feedback(db: sqlite3.Connection, row: int) -> tuple[Feedback, ...]:
    """Read the feedback on a turn, oldest first."""
    found = db.execute(
        "SELECT feedback_id, turn_id, at, value, comment, demonstration FROM feedback JOIN turn ON turn.id = turn"
        " WHERE turn = ? ORDER BY feedback.id",
        (row,),
    )
    return tuple(Feedback(*fields) for fields in found)


def read_judged(db: sqlite3.Connection, row: int) -> JudgedTurn:
    """Read a judged turn. Its next state is empty if the verdict came from feedback before any next state."""
    next_state = read_next_state(db, row) or NextState(())
    return JudgedTurn(
        read_request(db, row), read_turn(db, row), next_state, read_verdict(db, row), read_feedback(db, row)
    )


def read_context(db: sqlite3.Connection, request: Request) -> StepContext | None:
    """Read what the judge of a step needs to know of the episode before it; None outside of episodes."""
    if request.in_episode is None:
        return None
    (row,) = db.execute("SELECT id FROM request WHERE request_id = ?", (request.request_id,)).fetchone()
    first = db.execute(
        "SELECT messages FROM request WHERE in_episode = ? ORDER BY id LIMIT 1", (request.in_episode,)
    ).fetchone()
    asked = [message for message in blobs.get_messages(db, unpack_ids(first[0])) if message.role == "user"]
    before = db.execute(
        "SELECT id, message FROM turn JOIN reply USING (id) WHERE of_episode = ? AND id < ?"
        " AND (reason IS NULL OR reason <> 'cancelled') ORDER BY id DESC LIMIT ?",
        (request.in_episode, row, STEPS_BEFORE),
    ).fetchall()
    steps = []
    for turn, message in reversed(before):
        state = read_next_state(db, turn)
        steps.append(PastStep(blobs.get_messages(db, [message])[0], () if state is None else state.messages))
    return StepContext(asked[0].text() if asked else "", tuple(steps))


_SAMPLE = """
SELECT turn_id, is_tool, temperature, sample.reward, scored_version, extra, teacher_log_probs, student_log_probs,
    is_demonstration, advantage, of_episode,
    coalesce(sample.prompt, request.prompt) AS prompt, coalesce(sample.ids, reply.ids) AS ids,
    coalesce(sample.log_probs, reply.log_probs) AS log_probs, coalesce(sample.mask, reply.mask) AS mask,
    coalesce(sample.versions, reply.versions) AS versions
FROM sample JOIN turn USING (id) JOIN request USING (id) JOIN reply USING (id) LEFT JOIN credit USING (id) WHERE id = ?
"""


def read_sample(db: sqlite3.Connection, row: int) -> Sample | None:
    found = db.execute(_SAMPLE, (row,)).fetchone()
    if found is None:
        return None
    response_ids = unpack_ids(found["ids"])
    teacher, student = found["teacher_log_probs"], found["student_log_probs"]
    return Sample(
        sample_id=found["turn_id"],
        prompt_ids=blobs.get_prompt(db, found["prompt"]),
        response_ids=response_ids,
        loss_mask=unpack_mask(found["mask"] or None, len(response_ids)),
        rollout_log_probs=unpack_floats(found["log_probs"]),
        versions=unpack_runs(found["versions"]),
        temperature=found["temperature"],
        is_tool_turn=bool(found["is_tool"]),
        reward=found["reward"],
        teacher_log_probs=None if teacher is None else unpack_floats(teacher),
        student_log_probs=None if student is None else unpack_floats(student),
        scored_version=found["scored_version"],
        hint=None if found["extra"] is None else HintTerm.of_json(found["extra"]),
        is_demonstration=bool(found["is_demonstration"]),
        advantage=found["advantage"],
        episode=found["of_episode"],
        pictures=tuple(picture.digest for picture in pictures.of_request(db, row)),
    )


def read_versions_of(db: sqlite3.Connection, row: int) -> tuple[VersionRun, ...]:
    """Read the versions that sampled a sample's tokens."""
    (versions,) = db.execute(
        "SELECT coalesce(sample.versions, reply.versions) FROM sample JOIN reply USING (id) WHERE id = ?", (row,)
    ).fetchone()
    return unpack_runs(versions)


@dataclass(frozen=True, slots=True)
class Identity:
    """Model that a ledger belongs to: its adapters load on this base alone, its ids are this tokenizer's."""

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


BY_OPERATOR = "operator-"
"""Beginning of the `feedback_id` of a verdict that the operator gave in the user's place."""


class Effect(StrEnum):
    """Effect of a piece of feedback on its turn."""

    JUDGED = "judged"
    """The feedback is the turn's verdict, and the method scores the turn with it."""
    RESCORED = "rescored"
    """The turn had been scored: the method scores it again, with the feedback."""
    LATE = "late"
    """A trainer has the turn, or has trained on it. If that is undone, the feedback takes effect then."""
    RECORDED = "recorded"
    """The feedback is stored without effect. (A comment on a turn without a verdict waits with it.)"""


@dataclass(frozen=True, slots=True)
class FeedbackOutcome:
    feedback_id: str
    turn_id: str
    state: TurnState
    """State of the turn after the feedback."""
    effect: Effect
    demonstration_id: str | None = None
    """Id of the turn that the demonstration became."""


@dataclass(frozen=True, slots=True)
class FeedbackTarget:
    """Turn that a user wants to give feedback on."""

    turn_id: str
    prompt_tokens: int
    reason: DropReason | None


@dataclass(frozen=True, slots=True)
class Retained:
    """Result of one round of retention."""

    turns: int
    pieces: int
    used_bytes: int
    is_full: bool
    """The file is over its limit, and the turns left in it still wait for a next state, a judge or a trainer."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Result of a deletion of a session, of a conversation without an id, or of a user."""

    user: str
    session_id: str | None
    turns: int
    pieces: int
    """Messages, parts of prompts and other contents that no other request referred to."""
    trained_in: tuple[int, ...]
    """Versions that trained on the turns, dead ones too: their weights stay."""
    removed: tuple[int, ...] = ()
    """Versions of the user's own policy: their weights are deleted, and nothing is to be rebuilt."""
    began_with: tuple[int, ...] = ()
    """First versions of users' policies that began with weights trained on the turns: a rebuild leaves them."""
    is_scrubbed: bool = True
    """No deleted byte is left in the ledger's files; False: some may be, until `openclaw-rl compact`."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn with its content, its state, and every change of its state."""

    request: Request
    turn: Turn
    state: TurnState
    reason: DropReason | None
    next_state: NextState | None
    answered_by: str | None
    """Id of the request that brought the next state."""
    verdict: Verdict | None
    feedback: tuple[Feedback, ...]
    """Oldest first."""
    sample: Sample | None
    lease_id: str | None
    """Id of the lease that has it, or of the last lease that had it."""
    trained_in: int | None
    events: tuple[Event, ...]
    practice: PracticeKind | None = None
    """Kind of a practice reply, which no user asked for; None: a turn of a user."""
    practice_of: str | None = None
    """Id of the turn whose prompt this practice reply answers; None for a built-in prompt."""
    wish_id: int | None = None
    """The wish that this practice reply rehearses."""
    outcome: float | None = None
    """Outcome of the registered episode that it is a step of."""
    step_reward: float | None = None
    """R, once its group has its credit; the sample has the advantage."""

    @property
    def judged(self) -> JudgedTurn | None:
        """The turn for the judge and the method; None without a next state and without feedback."""
        if self.next_state is None and not self.feedback:
            return None
        return JudgedTurn(self.request, self.turn, self.next_state or NextState(()), self.verdict, self.feedback)


@dataclass(frozen=True, slots=True)
class TurnSummary:
    """Line of a list of turns, without content."""

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
    """Newest value from a user. If its sign differs from the verdict's, it came too late."""
    demonstration_of: str | None = None
    """Id of the turn that this demonstration corrects; no policy sampled it."""
    practice: PracticeKind | None = None
    """Kind of a practice reply, which no user asked for; None: a turn of a user."""
    practice_of: str | None = None
    """Id of the turn whose prompt this practice reply answers; None for a built-in prompt."""
    wish_id: int | None = None
    """The wish that this practice reply rehearses."""
    source: str | None = None
    """Source of the verdict."""
    asked: str | None = None
    """Start of what the request asks: its newest message, without a client's own context; where the list has texts."""
    said: str | None = None
    """Start of the reply, where the list has texts."""


def read_summary(row: sqlite3.Row) -> TurnSummary:
    """Read a line of a list of turns."""
    return TurnSummary(
        turn_id=row["turn_id"],
        user=row["user"],
        session_id=row["session_id"],
        state=TurnState(row["state"]),
        reason=None if row["reason"] is None else DropReason(row["reason"]),
        finished_at=row["finished_at"],
        prompt_tokens=row["prompt_tokens"],
        response_tokens=row["response_tokens"],
        oldest_version=row["oldest_version"],
        is_tool=bool(row["is_tool"]),
        verdict=row["value"],
        trained_in=row["trained_in"],
        feedback=row["feedback"],
        demonstration_of=row["demonstration_of"],
        practice=None if row["practice"] is None else PracticeKind(row["practice"]),
        practice_of=row["practice_of"],
        wish_id=row["wish"],
        source=row["source"],
    )
