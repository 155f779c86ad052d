"""The method protocol, and the helpers that turn a judged turn into a sample.

A method is an object with a few hooks, which a package registers under the entry points `openclaw_rl.methods`. `score`
runs in the server: it is async and imports no torch. The other hooks run in the trainer. A new method is a new
`method.py` behind an entry point; it never changes the server.

`objective` holds the losses that methods share: the clipped objective and the loss on demonstrations.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.base import Engine
from openclaw_rl.errors import SettingsError
from openclaw_rl.judge.llm import JudgeClient
from openclaw_rl.messages import Message
from openclaw_rl.sessions.thoughts import has_answer
from openclaw_rl.settings import MethodSettings, TrainerSettings
from openclaw_rl.settings.method_settings import method_object
from openclaw_rl.types import ClosedGroup, DropReason, HintTerm, Ids, JudgedTurn, LogProbs, Sample, StepCredit

if TYPE_CHECKING:
    from torch import Tensor

    from openclaw_rl.telemetry.health import Health

S = TypeVar("S", bound=MethodSettings)
"""The settings class of one method."""
S_co = TypeVar("S_co", bound=MethodSettings, covariant=True)


def _new_health() -> "Health":
    # Imported late: what a trainer needs of a method imports in slime's environment too, which has no structlog.
    from openclaw_rl.telemetry.health import Health

    return Health()


HINT_JUDGE = "hint judge"
"""Name of the model that writes hints, as a part of the server."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Refusal of a turn by the method."""

    reason: DropReason
    detail: str = ""


Render = Callable[[Sequence[Message], str | None, str | None], Ids]
"""(messages, tools_json, template_kwargs_json) → the prompt's ids, by the front end that serves. It blocks: call it in
a thread."""


@dataclass(frozen=True, slots=True)
class ScoringTools(Generic[S_co]):
    """The server's parts that `Method.score` may use. Binary RL uses no part."""

    settings: S_co = field(default_factory=MethodSettings)  # type: ignore[assignment]
    teacher: Engine | None = None
    """The policy's engine. A scoring call runs inside `serving.use(version)`, which keeps the adapter loaded."""
    serving: VersionAdmission | None = None
    render: Render | None = None
    ask: JudgeClient | None = None
    """One judge sample."""
    judge_tokens: int = 4096
    """Token budget of one judge answer, reasoning included: `judge.max_new_tokens`."""
    context_length: int = 0
    """Of the engine: prompt and response together."""
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(4))
    """Places of scoring calls on the engine; each call takes one. Chats and the hint judge have places of their own."""
    health: "Health" = field(default_factory=_new_health)
    """Counters of the method's failures, for `/metrics` and `/healthz`."""
    base_teacher: Engine | None = None
    """Another engine, which serves the base alone (`teacher = "base"`); None: `teacher` with its adapter off."""


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Tensors of one sample at its T response positions, from one forward pass: fp32, or float64 in tests. Log-probs
    are at the sample's temperature where the field does not name another.
    """

    log_probs: "Tensor"  # [T], with graph
    old_log_probs: "Tensor"  # [T], detached
    rollout_log_probs: "Tensor"  # [T]; meaningless zeros for a demonstration
    ref_log_probs: "Tensor | None"  # [T], None unless kl_coef > 0
    advantages: "Tensor"  # [T]
    loss_mask: "Tensor"  # [T] bool
    unscaled_log_probs: "Tensor | None" = None
    """[T], at temperature 1, detached: the student's side of the gap where the sample has no such term (`student_term =
    "trainer"`)."""
    gathered_log_probs: "Tensor | None" = None
    """[T, K], at temperature 1, with graph: of the ids in `Method.gathered_ids`."""


class Tally(NamedTuple):
    """A mean to report over the batch: a sum, and its number of tokens or samples."""

    total: float
    over: float


@dataclass(frozen=True, slots=True)
class SampleLoss:
    """Loss of one sample, *summed* over its trained tokens, with the figures to report. The caller divides it by the
    sample's token count and by the batch's number of samples, both known before the first micro-batch."""

    loss_sum: "Tensor"  # scalar with graph
    token_count: int
    tallies: Mapping[str, Tally]


class Method(Protocol[S]):
    """One way to learn from judged turns. It has no state: the hooks get the method's settings as an argument."""

    name: str
    settings: type[S]
    """Class of the `method` table. `load` validates the table with it, and asks an instance what the method needs."""

    async def score(self, judged: JudgedTurn, tools: ScoringTools[S]) -> Sample | Dropped:
        """Make the turn's sample: reward, teacher terms. Raises TeacherError when an outage leaves no term at all."""
        ...

    def can_train(self, sample: Sample) -> bool:
        """Return True when the sample holds a term of this method. Another method may have made the sample."""
        ...

    def advantages(self, batch: Sequence[Sample], settings: S, state: dict[str, float]) -> list[list[float]]:
        """Return the credit per response token [T] of each sample; zeros for demonstrations. The checkpoint keeps
        `state` (a baseline's mean)."""
        ...

    def gathered_ids(self, sample: Sample) -> Sequence[Ids] | None:
        """Return the ids [T, K] whose log-probs `loss` reads besides the sampled ones, if there are any."""
        ...

    def loss(self, sample: Sample, terms: TokenTerms, trainer: TrainerSettings, method: S) -> SampleLoss: ...

    practises: bool
    """True when `practise` makes samples. A method of another package may leave out both: `can_practise` is False."""

    async def practise(self, judged: JudgedTurn, hint: str | None, tools: ScoringTools[S]) -> Sample | Dropped:
        """Make the sample of a practice reply: a new reply of the policy to a prompt that it has answered before.

        hint: the wish in words, which the teacher reads; no judge is asked for another. None: an anchor, which holds
        the policy to the base on a prompt that nobody corrected. `judged.verdict` is the verdict on the practice reply
        itself, where a judge gave one. Raises TeacherError in an outage: the practice reply may be scored again later.
        """
        ...


class GroupMethod(Method[S], Protocol[S]):
    """A method that gives credit to the steps of a closed group of episodes. Its settings say so: `credits_groups`."""

    def credit(self, group: ClosedGroup, settings: S) -> Sequence[StepCredit]:
        """Return the credit of each step of the group that waits for it: an advantage, or a reason to drop the step.

        A pure function: it runs in the server, once for each group, and again after a restart before its result is on
        disk.
        """
        ...


def can_practise(method: Method, settings: MethodSettings) -> bool:
    """Return True when the method has the hook `practise` and these settings of it leave a teacher to practise with."""
    # A method of another package may be older than the hook.
    return bool(getattr(method, "practises", False)) and settings.can_practise


def load_method(name: str) -> Method:
    """Return the method registered under `name`: `binary_rl`, `opd`, `combine`, or one of another installed package.

    Imports the method's module, which imports no torch. Raises SettingsError that lists the known names.
    """
    try:
        method: Method = method_object(name)
    except SettingsError as error:
        raise SettingsError(f"method.name: {error}") from error
    return method


def unusable(judged: JudgedTurn) -> DropReason | None:
    """Return the reason why no method can train on this turn; None when one can."""
    turn = judged.turn
    if turn.drop is not None:
        return turn.drop
    if not judged.request.sampling.is_trainable:
        return DropReason.NOT_TRAINABLE_SAMPLING
    if not any(turn.loss_mask) or not judged.request.prompt_ids:
        return DropReason.EMPTY
    if not all(math.isfinite(value) for value in turn.rollout_log_probs):
        return DropReason.NON_FINITE
    return None


def reward_of(judged: JudgedTurn) -> float | None:
    """Return ±1; None for a verdict of 0, for an unjudged turn, and for praise of a reply that holds no answer."""
    if judged.verdict is None or not judged.verdict.value:
        return None
    if judged.verdict.value > 0 and not has_answer(judged.turn.reply):
        return None  # to praise a thought that the token limit cut would teach to think without end
    return float(judged.verdict.value)


def sample_of(
    judged: JudgedTurn,
    *,
    reward: float | None,
    teacher_log_probs: LogProbs | None = None,
    student_log_probs: LogProbs | None = None,
    scored_version: int | None = None,
    hint: HintTerm | None = None,
) -> Sample:
    """Return the turn exactly as sampled, with the method's terms. Raises AlignmentError where they do not fit."""
    turn, request = judged.turn, judged.request
    return Sample(
        sample_id=turn.turn_id,
        prompt_ids=tuple(request.prompt_ids),
        pictures=tuple(picture.digest for picture in request.pictures),
        response_ids=turn.response_ids,
        loss_mask=turn.loss_mask,
        rollout_log_probs=turn.rollout_log_probs,
        versions=turn.versions,
        temperature=request.sampling.temperature,
        is_tool_turn=judged.next_state.is_tool,
        reward=reward,
        teacher_log_probs=teacher_log_probs,
        student_log_probs=student_log_probs,
        scored_version=scored_version,
        hint=hint,
    )
