"""Trainer API on the wire: JSON bodies of `/v1/trainer/*`, and their conversion from and to the nouns.

    POST /v1/trainer/tip      → Tip              the version to train from, of one policy
    POST /v1/trainer/lease    → LeaseReply       waits up to wait_s; `lease` is null without a batch
    POST /v1/trainer/renew    → Renewed          409 when the lease is over
    POST /v1/trainer/release  → {}               the samples wait again
    POST /v1/trainer/commit   → Committed        idempotent by lease_id; 409 with the reason when refused
    POST /v1/trainer/durable  → {}                a checkpoint is on disk, or cannot be: the version stays undurable
    POST /v1/trainer/failed   → {}                a step failed, or the process ended: for `/healthz`

For a trainer that cannot checkpoint each step and sends full weights to the engine itself (slime):

    POST /v1/trainer/start       → Started   no weights held: versions whole on disk are durable, the others lost
    POST /v1/trainer/leased      → LeaseReply  a live lease again, for a rank of the trainer that did not take it
    POST /v1/trainer/push/begin  → {}        the gate passed it, the chats wait, the engine is idle: send the weights
    POST /v1/trainer/push/end    → {}        the engine has the weights (or not): it is tested, and the chats continue

The checkpoint is the transaction. A trainer writes weights, optimizer, scheduler, RNG and `lease_id` to a new folder,
fsyncs and renames it, and only then commits. Auth: `Authorization: Bearer <trainer token>`.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from openclaw_rl.settings import AnyMethodSettings, TrainerSettings
from openclaw_rl.types import SHARED_POLICY, HintTerm, Lease, Sample, VersionRun, WeightKind


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TipRequest(_Body):
    policy: str = SHARED_POLICY
    """The lineage to train; a lease names it."""


class Tip(_Body):
    weight_version: int
    kind: WeightKind
    base_hash: str
    folder: str | None
    """Relative to the data directory; None: the base."""
    needs_fresh_moments: bool = False
    """The tip is a rollback target whose optimizer state is gone: start with fresh moments and `warmup_steps`."""
    needed: list[str] = []
    """Folders, in the data directory, of versions that may become the tip again: their optimizer states stay."""
    wants_push: bool = False
    """The trainer has these weights and the engine does not: the trainer calls `push/begin`."""
    engine: str = ""
    """Name of the engine's process. A new name: the engine restarted, and the trainer must connect to it again."""
    holds_chats: bool = False
    """Chats are held, and the trainer alone has these weights."""


class SampleBody(_Body):
    sample_id: str
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[bool]
    rollout_log_probs: list[float]
    versions: list[tuple[int, int]]
    """[weight_version, length] runs."""
    temperature: float
    is_tool_turn: bool = False
    reward: float | None = None
    teacher_log_probs: list[float] | None = None
    student_log_probs: list[float] | None = None
    scored_version: int | None = None
    extra: dict[str, Any] | None = None
    is_demonstration: bool = False
    advantage: float | None = None
    """Credit of every token of a step; its group gave it."""
    episode: int | None = None
    """Number of the step's episode."""
    pictures: list[str] = []
    """SHA-256 of each picture of the prompt, in its order: the name of its file in `ledger.sqlite3.pictures/`."""

    @classmethod
    def of(cls, s: Sample) -> "SampleBody":
        return cls(
            sample_id=s.sample_id,
            prompt_ids=list(s.prompt_ids),
            response_ids=list(s.response_ids),
            loss_mask=list(s.loss_mask),
            rollout_log_probs=list(s.rollout_log_probs),
            versions=[(run.weight_version, run.length) for run in s.versions],
            temperature=s.temperature,
            is_tool_turn=s.is_tool_turn,
            reward=s.reward,
            teacher_log_probs=None if s.teacher_log_probs is None else list(s.teacher_log_probs),
            student_log_probs=None if s.student_log_probs is None else list(s.student_log_probs),
            scored_version=s.scored_version,
            extra=None if s.hint is None else s.hint.to_dict(),
            is_demonstration=s.is_demonstration,
            advantage=s.advantage,
            episode=s.episode,
            pictures=list(s.pictures),
        )

    def to_sample(self) -> Sample:
        return Sample(
            sample_id=self.sample_id,
            prompt_ids=tuple(self.prompt_ids),
            response_ids=tuple(self.response_ids),
            loss_mask=tuple(self.loss_mask),
            rollout_log_probs=tuple(self.rollout_log_probs),
            versions=tuple(VersionRun(version, length) for version, length in self.versions),
            temperature=self.temperature,
            is_tool_turn=self.is_tool_turn,
            reward=self.reward,
            teacher_log_probs=None if self.teacher_log_probs is None else tuple(self.teacher_log_probs),
            student_log_probs=None if self.student_log_probs is None else tuple(self.student_log_probs),
            scored_version=self.scored_version,
            hint=None if self.extra is None else HintTerm.of(self.extra),
            is_demonstration=self.is_demonstration,
            advantage=self.advantage,
            episode=self.episode,
            pictures=tuple(self.pictures),
        )


class LeaseRequest(_Body):
    trainer: str
    """Name of the trainer, the same after a restart. A trainer that asks for a lease holds no other: a live lease in
    its name is revoked."""
    wait_s: float = Field(default=30.0, ge=0, le=300)
    n: int | None = Field(default=None, ge=1)
    """Number of samples; None: the server's `training.batch_size`."""
    most: int | None = Field(default=None, ge=1)
    """Most samples that a step of this trainer takes; None: any number. A batch of groups is cut there."""


class LeaseBody(_Body):
    lease_id: str
    fence: int
    parent: int
    expires_at: float
    """Deadline by the server's clock; the trainer's clock may differ."""
    lease_s: float = 900.0
    """Seconds that it lives from now, or from a renewal."""
    policy: str = SHARED_POLICY
    """The lineage that the step continues. Its weights and optimizer state are those of `tip` of this policy."""
    samples: list[SampleBody]

    @classmethod
    def of(cls, lease: Lease) -> "LeaseBody":
        return cls(
            lease_id=lease.lease_id,
            fence=lease.fence,
            parent=lease.parent,
            expires_at=lease.expires_at,
            lease_s=lease.lease_s,
            policy=lease.policy,
            samples=[SampleBody.of(sample) for sample in lease.samples],
        )


class LeaseReply(_Body):
    lease: LeaseBody | None


class LeaseRef(_Body):
    lease_id: str
    fence: int
    begins_step: bool = False
    """The optimizer steps next and cannot be undone: a deletion of a sample waits for the commit."""


class Renewed(_Body):
    expires_at: float


class Release(_Body):
    lease_id: str
    fence: int
    reason: str
    drop: dict[str, str] = {}
    """sample_id → DropReason for samples that can never train (`too_long`, `non_finite`); the rest wait again."""


class Manifest(_Body):
    """Weights that a commit publishes."""

    folder: str
    """Relative to the data directory."""
    kind: WeightKind
    base_hash: str
    sha256: str
    """Hash of the weights file."""
    weights_file: str = "adapter_model.safetensors"


GAP_ALERT = 0.15
"""Nats a token between the log-probs of engine and trainer, of the engine's own tokens on the trainer's version.

It equals the default of the self-test's bound (`publisher.self_test_tolerance`): the same figure, on replies instead of
probes. Two fp32 models differ by 1e-5, two bfloat16 ones by 0.003 to 0.05. A dropped attention window or soft cap, or
weights that did not arrive whole, made 0.4 to 0.7. At 0.15 the importance weights (mean e^0.15) still correct the step.
"""


class Probe(_Body):
    """Forced reply with the trainer's log-probs under the new weights, for the publisher's self-test."""

    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]
    """At temperature 1."""
    parent_log_probs: list[float]
    """Before the step, at temperature 1."""


class Report(_Body):
    """Measurements of a step. `metrics` are flat finite numbers for logs, `/healthz` and plots."""

    metrics: dict[str, float]
    probes: list[Probe] = []


class Commit(_Body):
    lease_id: str
    fence: int
    parent: int
    manifest: Manifest
    report: Report
    durable: bool = True
    drop: dict[str, str] = {}
    """sample_id → DropReason for leased samples the step left out."""


class Committed(_Body):
    weight_version: int


class Durable(_Body):
    weight_version: int
    failure: str | None = None
    """The reason that its checkpoint could not be written; None: it is on disk, whole."""


class Failed(_Body):
    trainer: str
    reason: str = Field(max_length=1000)
    has_ended: bool = False
    """The trainer's process ended; its launcher reports it. False: a step failed in a trainer that goes on."""
    cannot_start: bool = False
    """The process says that its next start would end like this one: a problem at once."""


class Start(_Body):
    trainer: str
    """Name that the trainer leases under."""
    whole_fences: list[int] = []
    """Fences of leases whose versions this trainer holds whole on disk, also those that it could not report. They
    become durable before the undurable versions are lost."""
    writes_files: bool = False
    """It writes full weights into folders, and the server gives them to the engines; False: it sends them itself."""


class Started(_Body):
    tip: Tip
    engine_urls: list[str]
    """URLs of the engines that full weights are sent to, all in one transfer."""
    engines: int = Field(default=1, ge=1)
    """Number of the engines that take weights which the trainer writes: also of those that are away now."""
    trainer: TrainerSettings
    method: AnyMethodSettings


class Leased(_Body):
    fence: int


class PushBegin(_Body):
    weight_version: int
    deadline_s: float = Field(default=90.0, ge=1, le=600)
    """Time until `push/end`; after it the trainer counts as dead and the engine as torn."""
    folder: str | None = None
    """Folder, relative to the data directory, that the trainer writes before `push/end`. The server then gives it to
    the engines, and holds no chat before. None: the trainer sends the weights itself, while chats are held."""


class PushEnd(_Body):
    weight_version: int
    failure: str | None = None
    """The reason that the engine may have half of the weights; None: all were sent."""
