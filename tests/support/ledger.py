"""A turn's way to a waiting sample, and a step's commit, through a real ledger. A test names only what it is about."""

from collections.abc import Sequence

from turns import KEY, serve_turn

from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.trainer_protocol import Commit, LeaseBody, Manifest, Probe, Report
from openclaw_rl.types import (
    Ids,
    Lease,
    LogProbs,
    NextState,
    Request,
    Sample,
    Turn,
    TurnKey,
    Verdict,
    VersionState,
    WeightKind,
)

IDENTITY = Identity("base", "tokenizer", "tiny")
FULL_IDENTITY = Identity("base", "tokenizer", "tiny", WeightKind.FULL)


async def judge_turn(ledger: Ledger, turn_id: str, *, answer: str = "ok") -> None:
    """Pair a served turn with the user's answer, and vote +1."""
    message = Message(role="user", content=answer)
    await ledger.pair(turn_id, NextState((message,)), by_request_id=f"after-{turn_id}")
    await ledger.record_verdict(turn_id, Verdict(1, (1,), "rules"))


def sample_of(turn: Turn, prompt_ids: Ids, *, reward: float | None = 1.0) -> Sample:
    """Return the sample that Binary RL makes of a judged turn."""
    return Sample(
        turn.turn_id,
        prompt_ids,
        turn.response_ids,
        turn.loss_mask,
        turn.rollout_log_probs,
        turn.versions,
        0.7,
        reward=reward,
    )


async def score_turn(ledger: Ledger, turn: Turn, prompt_ids: Ids) -> None:
    """Judge a served turn and make its sample, which waits for a trainer then."""
    await judge_turn(ledger, turn.turn_id)
    await ledger.record_sample(sample_of(turn, prompt_ids))


async def give_sample(ledger: Ledger, request: Request, turn: Turn, key: TurnKey = KEY) -> str:
    """Serve, judge and score one turn: its sample waits for a trainer then. Return the turn's id."""
    await serve_turn(ledger, request, turn, key)
    await score_turn(ledger, turn, request.prompt_ids)
    return turn.turn_id


def commit_of(
    lease: Lease | LeaseBody,
    folder: str | None = None,
    *,
    kind: WeightKind = WeightKind.LORA,
    metrics: dict[str, float] | None = None,
    probes: Sequence[Probe] = (),
    durable: bool = True,
    weights_file: str = "adapter_model.safetensors",
) -> Commit:
    """Return the commit of the lease's step. folder: of the weights; the lease's own when None."""
    folder = folder or f"versions/{lease.lease_id}"
    return Commit(
        lease_id=lease.lease_id,
        fence=lease.fence,
        parent=lease.parent,
        manifest=Manifest(folder=folder, kind=kind, base_hash="base", sha256="x", weights_file=weights_file),
        report=Report(metrics=metrics or {"loss": 0.1}, probes=list(probes)),
        durable=durable,
    )


def probe_of(
    prompt_ids: Ids, response_ids: Ids, engine: LogProbs, *, error: float = 0.0, parent_error: float = 0.0
) -> Probe:
    """Return a trainer's probe: what the engine will answer, and what it answers now, each less an error."""
    return Probe(
        prompt_ids=list(prompt_ids),
        response_ids=list(response_ids),
        log_probs=[value + error for value in engine],
        parent_log_probs=[value + parent_error for value in engine],
    )


async def serve_version(ledger: Ledger, number: int) -> None:
    """Take a version past the gate to the place of the one that serves."""
    for state in (VersionState.GATED, VersionState.LOADING, VersionState.SERVING):
        await ledger.set_version_state(number, state)
