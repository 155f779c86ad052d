"""Training loop of the node, *tip → push → lease → step → commit*, in place of slime's own loop.

Promises:

- The loop sends the weights right after their step, through the server's hold on chats.
- The ancestry of the serving version holds each sample once, and loses none. A step that failed gives its batch back.
  When this process dies, the ledger marks the versions without a checkpoint as lost, and their samples wait again.
- A step whose lease ends before the optimizer moves a weight is left out. The process goes on.
- The loop writes a checkpoint after some steps or minutes, flushes it to the disk, and then reports it.
- On SIGTERM the loop finishes the running step and writes its checkpoint.
- The server learns of failed steps, of weights that were not sent and of checkpoints that could not be kept, and shows
  them in `/healthz`. The loop tries such a checkpoint again (`checkpoints`).
- Chats that wait for a checkpoint wait for `SAVES_OF_HELD_CHATS` attempts at most. Then the loop gives its steps up: a
  version that is on disk serves, and the samples wait again.
- A step without progress for the length of a lease hangs, and so does a checkpoint that is not over after half an hour:
  the loop calls the session's `on_hang`.

Leaves to others: the step itself (slime and Megatron, behind `Node`), leases and reports (`LeaseSession`), every
decision about versions (the ledger), and the process (`driver`).
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from openclaw_rl.errors import CommitRefused, TrainerError
from openclaw_rl.methods.base import load_method
from openclaw_rl.trainer_protocol import GAP_ALERT, Commit, LeaseBody, Manifest, Report, Tip
from openclaw_rl.trainers.client import LeaseSession, ServerGone
from openclaw_rl.types import DropReason, WeightKind
from openclaw_slime.checkpoints import Checkpoints, Due
from openclaw_slime.deadline import deadline
from openclaw_slime.node import NodeConfig
from openclaw_slime.outcome import LeftOut, Outcome, RankShare, merged, reason_of
from openclaw_slime.rollout import unusable
from openclaw_slime.weight_push import PushFailed, send_weights

log = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 1800.0
"""Longest time of a checkpoint; a process whose checkpoint takes longer hangs."""


SAVES_OF_HELD_CHATS = 3
"""Checkpoints that may fail in a row while chats wait for one."""


class StartAgain(TrainerError):
    """Megatron's weights are not, or not surely, the version that the ledger names: the process must start again."""


class Node(Protocol):
    """slime, Ray and Megatron, as the loop uses them.

    After any exception their state is unknown. `save` is the exception to that: it changes no weights.
    """

    batch_size: int

    def train(self, fence: int, moved: Callable[[], None], may_step: Callable[[], None]) -> Sequence[RankShare]:
        """Train on the lease's batch. Calls `moved` whenever the step is seen to make progress.

        may_step: called when the batch is there and no weight has changed yet; raises CommitRefused if the lease is
        over. Raises LeftOut then.
        """
        ...

    def push(self, weight_version: int, timeout_s: float) -> None:
        """Send the weights to the engines, or write them where `NodeConfig.folder_of` says."""
        ...

    def save(self, iteration: int) -> None: ...


class NodeLoop:
    """Drives slime from lease to commit until the session's `stop` is set."""

    def __init__(
        self,
        session: LeaseSession,
        node: Node,
        config: NodeConfig,
        checkpoints: Checkpoints,
        tip: Tip,
        *,
        due: Due | None = None,
    ) -> None:
        """tip: the version whose weights `node` holds."""
        self._session, self._client, self._node = session, session.client, node
        self._config, self._method = config, load_method(config.method.name)
        self._checkpoints, self._due = checkpoints, due or Due(checkpoints.every, checkpoints.every_s)
        self._base_hash, self._held, self._engine = tip.base_hash, tip.weight_version, tip.engine
        self._fence: int | None = None
        """Fence of the held version's lease, until the version is on disk."""
        self._failed_saves = 0
        """Checkpoints in a row that failed while chats waited for one."""
        self._unexplained = 0
        """Steps in a row that were left out without a sample to blame."""
        self.save_timeout_s = SAVE_TIMEOUT_S

    def run(self) -> None:
        """Train until `stop` is set. Raises StartAgain, and exceptions that are bugs."""
        self._session.when_server_answers(self._meet_engine)
        while not self._session.stop.is_set():
            self._session.when_server_answers(self.turn)
        try:
            self._save()
        except ServerGone as error:  # the next start names the checkpoint
            log.warning("version %d is on disk, and the server is away: %s", self._held, error)

    def turn(self) -> int | None:
        """Poll once, and make one step if a batch is ready. Return the new version, or None without one."""
        is_sent = self._follow_tip()
        if self._due.is_too_far or not is_sent:  # steps that the engines do not get make the replies of today stale
            self._session.stop.wait(self._session.wait_s)
            return None
        lease = self._session.take(most=self._node.batch_size)  # slime trims what is more
        if lease is None:
            return None
        with self._session.hold(lease):
            commit = self._step(lease)
            version = None if commit is None else self._commit(commit)
        if version is not None:
            self._follow_tip()
        return version

    def _follow_tip(self) -> bool:
        """Send the weights if the engines lack them, then write a checkpoint that is due. Raises StartAgain.

        Returns False if the server wants the weights, and cannot take them now.
        """
        tip = self._client.tip()
        if not self._check(tip):
            return False
        is_sent = not tip.wants_push or self._push()
        # The checkpoint comes after the push: chats get the new weights first.
        if self._due.is_now:
            self._save()
        return is_sent

    # -- one step ------------------------------------------------------------------------------------------------------

    def _step(self, lease: LeaseBody) -> Commit | None:
        """Train on the batch. Return the commit of the step, or None if the batch went back. Raises StartAgain."""
        if lease.parent != self._held:
            self._session.release(lease, "the tip moved")
            raise StartAgain(f"the tip is version {lease.parent}, and Megatron holds {self._held}")
        drop = unusable(lease.samples, self._method, self._config.trainer)
        usable = len(lease.samples) - len(drop)
        if not usable:
            self._session.release(lease, "no sample of the batch can be trained on", drop)
            return None
        log.info("step: lease %s, %d samples on version %d", lease.lease_id, usable, self._held)
        started = time.monotonic()
        try:
            shares = self._node.train(lease.fence, self._session.progress, lambda: self._check_lease(lease))
            outcome = merged(shares, samples=usable, batch_size=self._node.batch_size)
        except LeftOut as error:
            log.warning("step left out: %s", error)
            return None
        except Exception as error:
            reason = reason_of(error)
            self._session.release(lease, reason, drop | _too_long(lease, error))
            self._session.report(reason)
            raise StartAgain(f"the step failed: {error!r}") from error
        if outcome.is_lease_over:
            log.warning("step left out: lease %s ended while the step was computed", lease.lease_id)
            return None
        if not outcome.stepped:
            self._left_out(lease, outcome, drop)
            return None
        if self._session.is_lost:
            raise StartAgain(f"lease {lease.lease_id} is over, and its step is in the weights")
        outcome = replace(outcome, metrics={**outcome.metrics, "step_s": time.monotonic() - started})
        return self._commit_of(lease, outcome, drop)

    def _check_lease(self, lease: LeaseBody) -> None:
        """Raise CommitRefused if the lease is over: a user has deleted a sample of it, or the tip moved."""
        try:
            self._client.renew(lease)
        except ServerGone:  # the commit will tell
            log.warning("the server is away; the step is made all the same")

    def _left_out(self, lease: LeaseBody, outcome: Outcome, drop: dict[str, DropReason]) -> None:
        """Release a batch whose step had a number that is not finite; the weights did not change."""
        guilty = set(outcome.not_finite)
        if not guilty:
            self._unexplained += 1
            if self._unexplained > 1:  # twice is not chance: the same batch would come again for ever
                guilty = {body.sample_id for body in lease.samples} - set(drop)
        log.warning("step left out: not finite, by %s", sorted(guilty) or "no sample")
        reason = "a number of the step is not finite"
        self._session.release(lease, reason, drop | {sample_id: DropReason.NON_FINITE for sample_id in guilty})
        self._session.report(reason)

    def _commit_of(self, lease: LeaseBody, outcome: Outcome, drop: dict[str, DropReason]) -> Commit:
        manifest = Manifest(
            folder=self._checkpoints.folder(lease.fence),
            kind=WeightKind.FULL,
            base_hash=self._base_hash,
            sha256="",  # of a file that may never be written
            weights_file="model.safetensors",
        )
        return Commit(
            lease_id=lease.lease_id,
            fence=lease.fence,
            parent=lease.parent,
            manifest=manifest,
            report=Report(metrics=dict(outcome.metrics)),
            durable=False,
            drop={sample_id: reason.value for sample_id, reason in drop.items()},
        )

    def _commit(self, commit: Commit) -> int:
        """Commit the step, which the weights already hold. Return the new version. Raises StartAgain."""
        try:  # `commit` is idempotent, so the call can be repeated until the server answers
            version = self._session.when_server_answers(lambda: self._client.commit(commit))
        except TrainerError as error:
            raise StartAgain(f"the step is in the weights, and its commit was refused: {error}") from error
        if version is None:
            raise StartAgain("the step is in the weights, and the server was away when it was to be committed")
        self._held, self._fence, self._unexplained = version, commit.fence, 0
        self._due.stepped()
        metrics = commit.report.metrics
        log.info("version %d: %s", version, json.dumps({k: round(v, 6) for k, v in metrics.items()}))
        gap = metrics.get("fresh_abs_log_ratio", 0.0)
        if gap > GAP_ALERT:
            log.error("engine and Megatron differ by %.3g nats a token on what version %d sampled", gap, commit.parent)
        return version

    # -- weights -------------------------------------------------------------------------------------------------------

    def _meet_engine(self) -> None:
        """Send the tip's weights before the first step, so that a broken way to the engine fails now."""
        tip = self._client.tip()
        self._engine = tip.engine  # an engine that started again while Megatron was loading is met here first
        self._check(tip)
        self._push()

    def _check(self, tip: Tip) -> bool:
        """Raise StartAgain if Megatron does not hold the tip, or if the engine started again.

        Returns False while it waits with the start for a checkpoint that failed: the weights are nowhere else. It waits
        without end while chats go on; held ones wait for a few attempts.
        """
        if tip.weight_version != self._held:
            raise StartAgain(f"the tip is version {tip.weight_version}, and Megatron holds {self._held}")
        if tip.engine != self._engine:  # the NCCL group died with the old engine, or another one waits outside it
            if self._fence is None or self._due.may_try or tip.holds_chats:
                self._save()
            if self._fence is not None and not self._gives_up(tip):
                return False
            raise StartAgain("the engines to send weights to are others now")
        return True

    def _gives_up(self, tip: Tip) -> bool:
        """Return True if chats have waited for this checkpoint long enough. Call it after an attempt that failed."""
        self._failed_saves = self._failed_saves + 1 if tip.holds_chats else 0
        if self._failed_saves < SAVES_OF_HELD_CHATS:
            return False
        reason = f"version {self._held} is given up: it cannot be kept, and chats wait for it"
        log.error("%s", reason)
        self._session.report(reason)
        return True

    def _push(self) -> bool:
        """Send the held weights to the engines. Return False if the server does not take this version now.

        Raises StartAgain when the push failed.
        """
        try:
            return send_weights(
                self._client,
                self._node,
                self._held,
                folder=self._config.folder_of(self._held),
                engines=self._config.engines,
                report=self._session.report,
            )
        except PushFailed as error:
            raise StartAgain(str(error)) from error

    def _save(self) -> None:
        """Write a checkpoint of the held version, if it is on no disk, and report the version as durable.

        A checkpoint that cannot be kept is reported too: until the next one, a crash costs the steps since the last.
        Raises StartAgain if the version was rolled back meanwhile.
        """
        if (fence := self._fence) is None:
            return
        self._session.progress()
        if not self._checkpoints.is_whole(fence):  # it is, if the server was away when it was to be reported
            try:
                with deadline(self.save_timeout_s, lambda: self._hangs(fence)):
                    self._node.save(fence)
                    self._checkpoints.seal(fence)
            except Exception as error:
                self._not_kept(fence, reason_of(error))
                return
        try:
            self._client.durable(self._held)
        except CommitRefused as error:
            self._checkpoints.discard(fence)
            raise StartAgain(f"version {self._held} was abandoned while it was written: {error}") from error
        log.info("version %d is durable: iteration %d", self._held, fence)
        self._fence = None
        self._due.kept()
        self._checkpoints.prune()

    def _hangs(self, fence: int) -> None:
        """End a process whose checkpoint does not come to an end; called from another thread."""
        reason = f"the checkpoint of iteration {fence} took more than {self.save_timeout_s:.0f} s"
        log.error("%s: to be started again", reason)
        self._session.report(reason)
        self._session.on_hang()

    def _not_kept(self, fence: int, reason: str) -> None:
        pause_s = self._due.failed()
        self._checkpoints.discard(fence)
        then = "no more steps until one is" if self._due.is_too_far else "training goes on"
        log.error("version %d is not kept: %s; again in %.0f s, %s", self._held, reason, pause_s, then)
        try:
            self._client.durable(self._held, reason)
        except TrainerError as error:  # the next attempt reports again
            log.warning("the failed checkpoint was not reported: %s", error)


def _too_long(lease: LeaseBody, error: Exception) -> dict[str, DropReason]:
    """Return the longest sample, to drop, if memory ran out: the same batch would come again otherwise."""
    if "out of memory" not in str(error).lower():
        return {}
    longest = max(lease.samples, key=lambda body: len(body.prompt_ids) + len(body.response_ids))
    return {longest.sample_id: DropReason.TOO_LONG}
