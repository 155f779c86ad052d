"""The node's training loop, *tip → push → lease → step → commit*, in the place of slime's.

Promises: weights are sent right after their step, through the server's gate; no sample is trained twice in the
ancestry of what serves, and none is lost: a step that failed gives its batch back, and what was not checkpointed when
this process died is lost by the ledger's own account, its samples waiting again. On SIGTERM the step in hand is
finished and checkpointed. A step that came to nothing, weights that were not sent and a checkpoint that cannot be kept
are told to the server, which says so in `/healthz`; the checkpoint is tried again (`checkpoints`). A step in which
nobody gets on for as long as a lease lives hangs, and is told of.

Leaves to others: what a step is (slime and Megatron, behind `Node`), every decision about versions (the ledger), and
the process that this runs in (`driver`).
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from openclaw_rl.errors import CommitRefused, TrainerError
from openclaw_rl.methods.base import load_method
from openclaw_rl.trainer_protocol import Commit, LeaseBody, Manifest, Report, Tip
from openclaw_rl.trainers.client import ServerGone, TrainerClient, renewing
from openclaw_rl.types import DropReason, WeightKind
from openclaw_slime.checkpoints import Checkpoints, Due
from openclaw_slime.node import TRAINER, NodeConfig
from openclaw_slime.outcome import Outcome, RankShare, merged
from openclaw_slime.rollout import unusable

log = logging.getLogger(__name__)

LEASE_WAIT_S = 2.0
"""One long poll. Short: a stop, and an engine that wants the weights again, wait for it."""
PUSH_DEADLINE_S = 90.0
"""Less than the server holds chats (`engine.hold_s`)."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
GAP_ALERT = 0.15
"""Nats a token between what the engine said of its own tokens and what Megatron says of them, on the same version. Two
bfloat16 models differ by 0.003 to 0.05; weights that did not arrive whole by far more."""


class StartAgain(TrainerError):
    """What Megatron holds is no longer, or not surely, what the ledger says."""


class Node(Protocol):
    """slime, Ray and Megatron, as the loop sees them. Anything they raise means that their state is not known, but for
    `save`, which changes no weights."""

    def train(self, fence: int, moved: Callable[[], None]) -> Sequence[RankShare]:
        """moved: called whenever the step is seen to get on."""
        ...

    def push(self, weight_version: int, timeout_s: float) -> None: ...

    def save(self, iteration: int) -> None: ...


class NodeLoop:
    def __init__(
        self,
        client: TrainerClient,
        node: Node,
        config: NodeConfig,
        checkpoints: Checkpoints,
        tip: Tip,
        *,
        batch_size: int,
        stop: threading.Event,
        lease_wait_s: float = LEASE_WAIT_S,
        due: Due | None = None,
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        """tip: what `node` holds. on_hang: a step does not get on; called in another thread, since this one hangs."""
        self._client, self._node, self._config, self._checkpoints = client, node, config, checkpoints
        self._method = load_method(config.method.name)
        self._batch_size, self._stop, self._lease_wait_s = batch_size, stop, lease_wait_s
        self._held, self._engine = tip.weight_version, tip.engine
        self._fence: int | None = None
        """Of the held version, while it is on no disk."""
        self._due = due or Due(checkpoints.every)
        self._moved_at, self._on_hang = time.monotonic(), on_hang
        self._unexplained = 0
        """Steps in a row that were left out, and no sample to blame."""

    def run(self) -> None:
        """Train until `stop` is set. Raises StartAgain, and what is a bug."""
        self._when_server_is_there(self._meet_engine)
        while not self._stop.is_set():
            self._when_server_is_there(self.turn)
        self._save()

    def turn(self) -> int | None:
        """One poll, and one step when a batch came; the version it made."""
        tip = self._client.tip()
        self._check(tip)
        if tip.wants_push:
            self._push()
        if self._due.is_now:  # once more
            self._save()
        if self._due.is_too_far:
            self._stop.wait(self._lease_wait_s)
            return None
        lease = self._client.lease(TRAINER, wait_s=self._lease_wait_s)
        if lease is None:
            return None
        with self._renewing(lease) as still_ours:
            return self._step(lease, still_ours)

    def _renewing(self, lease: LeaseBody) -> AbstractContextManager[Callable[[], bool]]:
        self._moved()

        def hangs() -> None:
            silent_s = time.monotonic() - self._moved_at
            log.error("the step of lease %s hangs: nobody got on for %.0f s", lease.lease_id, silent_s)
            self._on_hang()

        return renewing(self._client, lease, _not_renewed, moved_at=lambda: self._moved_at, on_hang=hangs)

    def _moved(self) -> None:
        self._moved_at = time.monotonic()

    # -- one step ------------------------------------------------------------------------------------------------------

    def _step(self, lease: LeaseBody, still_ours: Callable[[], bool]) -> int | None:
        if lease.parent != self._held:
            self._give_back(lease, "the tip moved", {})
            raise StartAgain(f"the tip is version {lease.parent}, and Megatron holds {self._held}")
        drop = unusable(lease.samples, self._method, self._config.trainer)
        usable = len(lease.samples) - len(drop)
        if not usable:
            self._give_back(lease, "no sample of the batch can be trained on", drop)
            return None
        log.info("step: lease %s, %d samples on version %d", lease.lease_id, usable, self._held)
        try:
            outcome = merged(self._node.train(lease.fence, self._moved), samples=usable, batch_size=self._batch_size)
        except Exception as error:
            drop |= _too_long(lease, error)
            reason = f"{type(error).__name__}: {error}"[:300]
            self._give_back(lease, reason, drop)
            self._tell(reason)
            raise StartAgain(f"the step failed: {error!r}") from error
        if not outcome.stepped:
            self._left_out(lease, outcome, drop)
            return None
        if not still_ours():
            raise StartAgain(f"lease {lease.lease_id} is over, and its step is in the weights")
        return self._commit(lease, outcome, drop)

    def _left_out(self, lease: LeaseBody, outcome: Outcome, drop: dict[str, DropReason]) -> None:
        """A number was not finite, and the weights are as they were."""
        guilty = set(outcome.not_finite)
        if not guilty:
            self._unexplained += 1
            if self._unexplained > 1:  # not chance: it would come for ever
                guilty = {body.sample_id for body in lease.samples} - set(drop)
        log.warning("step left out: not finite, by %s", sorted(guilty) or "nobody")
        drop = drop | {sample_id: DropReason.NON_FINITE for sample_id in guilty}
        reason = "a number of the step is not finite"
        self._give_back(lease, reason, drop)
        self._tell(reason)

    def _commit(self, lease: LeaseBody, outcome: Outcome, drop: dict[str, DropReason]) -> int:
        manifest = Manifest(
            folder=self._checkpoints.folder(lease.fence),
            kind=WeightKind.FULL,
            base_hash=self._client.tip().base_hash,
            sha256="",  # of a file that may never be written
            weights_file="model.safetensors",
        )
        commit = Commit(
            lease_id=lease.lease_id,
            fence=lease.fence,
            parent=lease.parent,
            manifest=manifest,
            report=Report(metrics=dict(outcome.metrics)),
            durable=False,
            drop={sample_id: reason.value for sample_id, reason in drop.items()},
        )
        versions: list[int] = []
        try:  # a commit may be said again: a server that is away is waited for, with the step in the weights
            self._when_server_is_there(lambda: versions.append(self._client.commit(commit)))
        except TrainerError as error:
            raise StartAgain(f"the step is in the weights, and its commit was refused: {error}") from error
        if not versions:
            raise StartAgain("the step is in the weights, and the server was away when it was to be committed")
        (version,) = versions
        self._held, self._fence, self._unexplained = version, lease.fence, 0
        self._due.stepped()
        log.info("version %d: %s", version, json.dumps({k: round(v, 6) for k, v in outcome.metrics.items()}))
        gap = outcome.metrics.get("fresh_abs_log_ratio", 0.0)
        if gap > GAP_ALERT:
            log.error("engine and Megatron differ by %.3g nats a token on what version %d sampled", gap, lease.parent)
        # The checkpoint comes after the push: chats get the new weights first.
        tip = self._client.tip()
        self._check(tip)
        if tip.wants_push:
            self._push()
        if self._due.is_now:
            self._save()
        return version

    def _give_back(self, lease: LeaseBody, reason: str, drop: dict[str, DropReason]) -> None:
        try:
            self._client.release(lease.lease_id, lease.fence, reason, drop)
        except TrainerError as error:  # it runs out, or ends when we ask for the next
            log.warning("lease %s was not released: %s", lease.lease_id, error)

    def _tell(self, reason: str) -> None:
        """Nobody reads a driver's log."""
        try:
            self._client.failed(TRAINER, reason)
        except TrainerError as error:
            log.warning("the server was not told: %s", error)

    # -- weights -------------------------------------------------------------------------------------------------------

    def _meet_engine(self) -> None:
        """Send what the tip is: the way to the engine is there before the first step, or this fails now."""
        tip = self._client.tip()
        self._engine = tip.engine  # what happened to it while Megatron was loading is past: it is met now
        self._check(tip)
        self._push()

    def _check(self, tip: Tip) -> None:
        if tip.weight_version != self._held:
            raise StartAgain(f"the tip is version {tip.weight_version}, and Megatron holds {self._held}")
        if tip.engine != self._engine:  # the group that sends weights died with the old one
            self._save()
            raise StartAgain("the engine was started again")

    def _push(self) -> None:
        version = self._held
        try:
            self._client.push_begin(version, deadline_s=PUSH_DEADLINE_S)
        except CommitRefused as error:
            log.warning("version %d is not to be sent: %s", version, error)
            return
        failure = None
        try:
            self._node.push(version, PUSH_DEADLINE_S / 2)
        except Exception as error:
            failure = error
            self._tell(f"version {version} was not sent: {type(error).__name__}: {error}"[:300])
        try:
            self._client.push_end(version, None if failure is None else f"{type(failure).__name__}: {failure}"[:300])
        except TrainerError as error:
            raise StartAgain(f"version {version} was not taken by the engine: {error}") from failure or error
        if failure is not None:
            raise StartAgain(f"version {version} was not sent: {failure!r}") from failure
        log.info("version %d serves", version)

    def _save(self) -> None:
        """Checkpoint what is held, if it is on no disk; then the ledger calls it durable. One that cannot be kept is
        told to the server: until one is, a crash costs what was learned since the last."""
        if (fence := self._fence) is None:
            return
        self._moved()
        try:
            self._node.save(fence)
        except Exception as error:
            self._not_kept(fence, f"{type(error).__name__}: {error}"[:300])
            return
        self._client.durable(self._held)
        log.info("version %d is durable: iteration %d", self._held, fence)
        self._fence = None
        self._due.kept()
        self._checkpoints.prune()

    def _not_kept(self, fence: int, reason: str) -> None:
        pause_s = self._due.failed()
        self._checkpoints.discard(fence)
        then = "no more steps until one is" if self._due.is_too_far else "training goes on"
        log.error("version %d is not kept: %s; again in %.0f s, %s", self._held, reason, pause_s, then)
        try:
            self._client.durable(self._held, reason)
        except TrainerError as error:  # it is said with the next
            log.warning("the server was not told: %s", error)

    def _when_server_is_there(self, do: Callable[[], object]) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            self._moved()
            try:
                do()
                return
            except ServerGone as error:
                log.warning("the server is away: %s", error)
                if self._stop.wait(pause_s):
                    return
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)


def _not_renewed(lease: LeaseBody, error: TrainerError) -> None:
    log.warning("lease %s was not renewed: %s", lease.lease_id, error)


def _too_long(lease: LeaseBody, error: Exception) -> dict[str, DropReason]:
    """The longest sample, when memory ran out: the batch would come again as it is."""
    if "out of memory" not in str(error).lower():
        return {}
    longest = max(lease.samples, key=lambda body: len(body.prompt_ids) + len(body.response_ids))
    return {longest.sample_id: DropReason.TOO_LONG}
