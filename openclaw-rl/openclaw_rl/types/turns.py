"""Turns: a request, the reply exactly as sampled, its next state, the verdict and the feedback.

Symbols: P prompt tokens, T response tokens.
"""

from dataclasses import dataclass
from enum import StrEnum

from openclaw_rl.errors import AlignmentError
from openclaw_rl.messages import Message
from openclaw_rl.types.pictures import Picture

Ids = tuple[int, ...]
LogProbs = tuple[float, ...]


class TurnType(StrEnum):
    MAIN = "main"
    """A turn of the conversation itself: recorded, paired, judged, trained."""
    SIDE = "side"
    """Titles, compactions, heartbeats …: served, counted, never recorded."""


class TurnState(StrEnum):
    """State of a turn; it ends in `TRAINED` or in `DROPPED` with a `DropReason`."""

    SERVED = "served"
    PAIRED = "paired"
    JUDGED = "judged"
    SAMPLED = "sampled"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"


class DropReason(StrEnum):
    NO_NEXT_STATE = "no_next_state"
    """The conversation ended, or no message followed within `sessions.pair_ttl_s`."""
    SUPERSEDED = "superseded"
    """A retry of the same turn was continued instead."""
    BRANCH = "branch"
    """Another continuation of the same reply came first."""
    CANCELLED = "cancelled"
    """The client disconnected before the end of the reply."""
    NEUTRAL = "neutral"
    """The verdict is 0: the turn has no training signal."""
    UNJUDGED = "unjudged"
    """The judge gave no verdict (never the same as 0)."""
    NOT_TRAINABLE_SAMPLING = "not_trainable_sampling"
    """Sampling was greedy, or the request reshaped the logits (penalties, bias, grammar, min_p)."""
    TRUNCATED_SAMPLING = "truncated_sampling"
    """top_p or top_k, under `sampling.truncated_sampling = "drop"`."""
    MISALIGNED = "misaligned"
    """The engine's ids and log-probs do not align, or an id is not in the vocabulary."""
    NON_FINITE = "non_finite"
    """A log-prob is NaN or infinite."""
    EMPTY = "empty"
    """No token to train on."""
    UNSUPPORTED_CONTENT = "unsupported_content"
    """The prompt has pictures, and the trainer or the method does not take them."""
    OPTED_OUT = "opted_out"
    """The key, the request or the session asked not to be trained on."""
    REDACTED = "redacted"
    """The turn has a secret: its text is stored with marks, its tokens are not."""
    RECORD_ONLY = "record_only"
    """Learning was switched off."""
    ENGINE_FAILED = "engine_failed"
    """The engine failed in the middle of the reply."""
    REFUSED = "refused"
    """The engine refused the request (an unknown grammar, say), or no longer serves the version that it named."""
    NOT_RECORDED = "not_recorded"
    """The client got the whole reply, but the ledger could not be written."""
    INTERRUPTED = "interrupted"
    """The server stopped before the reply ended."""
    STALE = "stale"
    """The sample is more than `training.max_staleness` versions old."""
    ROLLED_BACK = "rolled_back"
    """The version that sampled it is no ancestor of the tip."""
    GATE_REJECTED = "gate_rejected"
    """The gate refused the step that trained on it."""
    TOO_LONG = "too_long"
    """The sample is longer than the trainer's token budget."""
    METHOD = "method"
    """The method had no use for it."""
    BACKLOG = "backlog"
    """It was the oldest of more than `judge.max_waiting` or `training.max_waiting` waiting turns."""
    WISH_OVER = "wish_over"
    """A practice reply that waited while its wish was removed, superseded or stopped."""
    EVAL = "eval"
    """It belongs to an episode that only evaluates."""
    EPISODE_ABORTED = "episode_aborted"
    """The environment of its episode failed: no fault of the policy."""
    EPISODE_EXPIRED = "episode_expired"
    """Its episode got no outcome in time."""
    GROUP_TOO_SMALL = "group_too_small"
    """Fewer than two episodes of its group ended."""
    NO_CONTRAST = "no_contrast"
    """All that it is compared with got the same reward."""


SHARED_POLICY = "policy"
"""The one policy of a server that trains one for all."""
KEYLESS_USER = "user"
"""The one user of a server whose chats need no key."""


@dataclass(frozen=True, slots=True)
class Scope:
    """User, session and policy of a turn; turns of different scopes never pair."""

    user: str
    """The user id of the API key."""
    session_id: str | None
    """None when the client names no session: then the whole history must match."""
    policy: str = SHARED_POLICY


def own_policy(user: str) -> str:
    """Return the name of the policy that learns from this user alone."""
    return f"user:{user}"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """All sampling parameters that the engine got: the client's values, else the server's."""

    max_new_tokens: int
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    reshapes_logits: bool = False
    """True for other changes of the distribution: a grammar, a bias."""

    @property
    def is_trainable(self) -> bool:
        """Return True if tokens were sampled from log_softmax(logits / T), truncated at most by top-p or top-k."""
        return (
            self.temperature > 0
            and self.top_k != 1  # greedy; SGLang may report its log-probs at temperature 1
            and self.min_p == 0
            and self.frequency_penalty == 0
            and self.presence_penalty == 0
            and self.repetition_penalty == 1
            and not self.reshapes_logits
        )

    @property
    def is_truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, slots=True)
class VersionRun:
    """`length` consecutive response tokens sampled under `weight_version`."""

    weight_version: int
    length: int


@dataclass(frozen=True, slots=True)
class Request:
    """Main-line request as the proxy understood it, committed before the client gets a token of its reply."""

    request_id: str
    scope: Scope
    received_at: float
    """Unix seconds."""
    messages: tuple[Message, ...]
    tools_json: str | None
    """The tools with their keys in the client's order, for templates print them so. None: no tools."""
    template_kwargs_json: str | None
    prompt_ids: Ids  # [P]
    sampling: SamplingParams
    episode: str | None = None
    task: str | None = None
    step: int | None = None
    """In a registered episode its place among the main requests, from 1 on; else the client's number."""
    in_episode: int | None = None
    """The ledger's number of the registered episode; None: `episode` is a label of the client's alone."""
    pictures: tuple[Picture, ...] = ()
    """Pictures of the prompt in its order, each as often as it is there."""
    group: str | None = None
    """Name of the group of requests that this one belongs to (`prompt_cache_key`), when no session is named. Turns of
    different groups never pair. It is not stored: the key of an open turn contains it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply of the policy, exactly as sampled (T response tokens)."""

    turn_id: str
    """The reply's `id` on the wire; `POST /v1/feedback` and `GET /v1/turns/{id}` take it."""
    request_id: str
    finished_at: float
    response_ids: Ids  # [T], a sampled end token included
    rollout_log_probs: LogProbs  # [T], of the temperature-scaled distribution
    loss_mask: tuple[bool, ...]  # [T], False for tokens cut off by a stop string
    versions: tuple[VersionRun, ...]
    """Run lengths over the T tokens."""
    finish_reason: str
    """`stop`, `length`, `tool_calls` or `cancelled`."""
    reply: Message
    """The message that the client got, parsed from `response_ids`."""
    drop: DropReason | None = None
    """Set when the turn can never be trained on; it is still recorded."""
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        t = len(self.response_ids)
        if not (t == len(self.rollout_log_probs) == len(self.loss_mask) == sum(run.length for run in self.versions)):
            raise AlignmentError(
                f"turn {self.turn_id}: {t} ids, {len(self.rollout_log_probs)} log-probs, {len(self.loss_mask)} mask, "
                f"{sum(run.length for run in self.versions)} versions"
            )

    @property
    def oldest_version(self) -> int:
        return min((run.weight_version for run in self.versions), default=0)


@dataclass(frozen=True, slots=True)
class NextState:
    """All messages that answered a reply, in order, and the reactions that came with them."""

    messages: tuple[Message, ...]
    reactions: tuple[str, ...] = ()
    """Reactions of the chat surface, as emoji (`👍`)."""

    @property
    def is_tool(self) -> bool:
        """True when tool results, and no user message, answered."""
        roles = {message.role for message in self.messages}
        return "tool" in roles and "user" not in roles


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judge's verdict on a turn: +1, 0 or −1."""

    value: int
    votes: tuple[int | None, ...]
    """Each judge sample's vote; None where it held no vote."""
    source: str
    """`rules`, `llm`, `feedback`."""
    rationale: str = ""
    """The rule that fired, or the end of a judge's answer. Content: only its owner may see it."""

    def __post_init__(self) -> None:
        if self.value not in (-1, 0, 1):
            raise ValueError(f"a verdict is -1, 0 or 1, not {self.value}")


@dataclass(frozen=True, slots=True)
class WrittenReply:
    """Tokens of a reply that a user wrote."""

    ids: Ids
    given: int = 0
    """Leading tokens that belong to the template and not to the user, such as the end of an empty thought. They are
    context: no loss trains them."""

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        return (False,) * self.given + (True,) * (len(self.ids) - self.given)


@dataclass(frozen=True, slots=True)
class Feedback:
    """Feedback of a user on one reply, from `POST /v1/feedback`. It wins over the judge."""

    feedback_id: str
    """The client's id, else the server's: the same id again is the same feedback."""
    turn_id: str
    at: float
    value: float | None = None
    """In [-1, 1]; a boolean is ±1. Its sign is the reward."""
    comment: str | None = None
    """A hint in the user's own words."""
    demonstration: str | None = None
    """The reply that the user wants: a supervised target."""

    def __post_init__(self) -> None:
        if self.value is None and self.comment is None and self.demonstration is None:
            raise ValueError("feedback says nothing: value, comment or demonstration is needed")
        if self.value is not None and not -1 <= self.value <= 1:
            raise ValueError(f"a feedback value is in [-1, 1], not {self.value}")


@dataclass(frozen=True, slots=True)
class PastStep:
    """An earlier step of an episode: the reply, and what the environment answered."""

    action: Message
    observation: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class StepContext:
    """The episode around a step, for the judge of steps."""

    task: str
    """The first message of role user: the environment's instruction."""
    before: tuple[PastStep, ...] = ()
    """The last steps before this one, oldest first."""


@dataclass(frozen=True, slots=True)
class JudgedTurn:
    """One turn with all that a judge, a method or a person needs to know of it."""

    request: Request
    turn: Turn
    next_state: NextState
    verdict: Verdict | None = None
    """None: the judge could not decide. A verdict of 0 is kept: the next state may still have a hint."""
    feedback: tuple[Feedback, ...] = ()
    """Oldest first."""
    episode: StepContext | None = None
    """Set for a step of a registered episode that waits for its judge."""

    @property
    def feedback_ids(self) -> tuple[str, ...]:
        return tuple(said.feedback_id for said in self.feedback)


@dataclass(frozen=True, slots=True)
class Place:
    """Further digests of the messages before a reply, short ones, for clients that change these messages."""

    depth: int = -1
    """Number of replies before; -1: nothing is known."""
    replies: str = ""
    """The last of these replies, oldest first; all digests have one length."""
    words: str = ""
    """Digest of the messages behind the last of these replies, without blocks in tags or brackets at their edges."""
    parts: str = ""
    """The sentences and lines of these messages, in order; all digests have one length."""
    shape: str = ""
    """Digest of these messages, whatever numbers stand in them."""


@dataclass(frozen=True, slots=True)
class TurnKey:
    """Place of a turn in its conversation, as hex digests that `sessions.pairing` makes.

    The ledger keeps them, so that a restart finds open turns without reading their messages.
    """

    reply_hash: str
    """Digest of the canonical reply."""
    before_hash: str
    """Digest of the last canonical non-ephemeral message before the reply."""
    history_hash: str
    """Digest of the canonical history before the reply, without system and ephemeral messages."""
    place: Place = Place()


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A turn that waits for its next state."""

    turn_id: str
    scope: Scope
    key: TurnKey
    finished_at: float


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A turn that waits for no next state any more, with the content that its key is made of."""

    turn_id: str
    scope: Scope
    messages: tuple[Message, ...]
    reply: Message
    finished_at: float


@dataclass(frozen=True, slots=True)
class SideCount:
    """Count of a side request, without content."""

    user: str
    session_id: str | None
    kind: str
    """`title`, `compaction`, `heartbeat` …"""
    prompt_tokens: int
    completion_tokens: int
    status: int
    at: float
