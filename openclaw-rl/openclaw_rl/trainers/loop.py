"""Training loop of the local trainer: *tip → load → lease → step → checkpoint → commit*, for any learner.

Promises:

- The checkpoint alone publishes a step. A crash loses at most the running step, and never a sample or a version.
- The next start settles a crash: it commits a whole checkpoint, and releases the lease of any other at once.
- A refused commit, numbers that are not finite or a full disk cost that step only. The loop deletes the folder, loads
  the tip again, and the samples wait again.
- The loop waits for a server that is away.
- A lease names its policy. The learner holds the weights, moments and method state of that policy alone.

Leaves to others: the step itself (`base.Learner`), leases and reports (`client.LeaseSession`), every decision about
versions (the ledger).
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from openclaw_rl.errors import CommitRefused, TrainerError
from openclaw_rl.trainer_protocol import Commit, LeaseBody, Manifest, Report, Tip
from openclaw_rl.trainers import checkpoint
from openclaw_rl.trainers.base import Interrupted, Learner, NoStep, Step
from openclaw_rl.trainers.client import LeaseSession, ServerGone
from openclaw_rl.types import SHARED_POLICY, DropReason

log = structlog.get_logger()

LEASE_FILE = "trainer.lease.json"


class WrongBase(TrainerError):
    """The trainer's base model is not the server's: the server could not serve what it learns."""


class _NoStepMade(TrainerError):
    """The learner made no step of the batch."""

    def __init__(self, result: NoStep) -> None:
        super().__init__(result.reason)
        self.result = result


class TrainerLoop:
    """Drives one learner from lease to commit until the session's `stop` is set."""

    def __init__(self, session: LeaseSession, learner: Learner, data_dir: Path, *, keep_optimizers: int = 4) -> None:
        """keep_optimizers: how many optimizer states stay on disk, newest first."""
        self._session, self._client, self._learner = session, session.client, learner
        self._data_dir, self._versions = data_dir, data_dir / "versions"
        self._keep_optimizers = keep_optimizers
        self._loaded: tuple[int, str | None] | None = None
        """Version and folder that the learner holds; None if the ledger knows no version with these weights."""
        self._policy = SHARED_POLICY
        """The policy of the last lease. Its weights stay loaded until a lease of another comes."""
        self._needed: set[Path] = set()
        """Folders whose optimizer states a rollback may need."""
        self._settled = False
        """True once no lease of an earlier turn or process is left to settle."""
        self._seconds: dict[str, float] = {}
        """Durations of the current turn's phases."""

    def run(self) -> None:
        """Train until `stop` is set. Raises WrongBase, and exceptions that are bugs."""
        session = self._session
        while not session.stop.is_set():
            try:
                session.when_server_answers(self.turn)
            except WrongBase:
                raise
            except (TrainerError, OSError) as error:
                self._loaded = None
                retry_s = session.pauses.next_s()
                log.error("step_failed", error=str(error), retry_s=retry_s)
                session.report(str(error))
                session.stop.wait(retry_s)

    def turn(self) -> int | None:
        """Poll once, and make one step if a batch is ready. Return the new version, or None without one."""
        self._settle()
        self._load_tip()
        lease = self._session.take()
        if lease is None:
            return None
        with self._session.hold(lease):
            try:
                self._remember(lease)
                self._load_parent(lease)
                step = self._step(lease)
                commit = self._checkpoint(lease, step)
            except BaseException as error:
                self._give_back(lease, error)
                return None
            return self._commit(commit, step)

    # -- one step ------------------------------------------------------------------------------------------------------

    def _step(self, lease: LeaseBody) -> Step:
        """Make one optimizer step on the batch. Raises _NoStepMade when the learner could not."""

        def between() -> None:
            self._session.progress()
            if self._session.stop.is_set():
                raise Interrupted("the trainer was asked to stop")
            if self._session.is_lost:
                raise CommitRefused(f"lease {lease.lease_id} is over")

        log.info("step_started", lease=lease.lease_id, parent=lease.parent, samples=len(lease.samples))
        with self._timed("step_s"):
            result = self._learner.step([body.to_sample() for body in lease.samples], between, lease.parent)
        if isinstance(result, NoStep):
            raise _NoStepMade(result)
        self._session.progress()
        return result

    def _checkpoint(self, lease: LeaseBody, step: Step) -> Commit:
        """Write the checkpoint of the step, and return the commit that publishes it."""
        commits: list[Commit] = []

        def fill(folder: Path) -> None:
            weights_file = self._learner.write(folder)
            commit = Commit(
                lease_id=lease.lease_id,
                fence=lease.fence,
                parent=lease.parent,
                manifest=Manifest(
                    folder=f"{self._versions.name}/{lease.lease_id}",
                    kind=self._learner.kind,
                    base_hash=self._learner.base_hash,
                    sha256=checkpoint.sha256(folder / weights_file),
                    weights_file=weights_file,
                ),
                report=Report(metrics=dict(step.metrics), probes=list(step.probes)),
                drop={sample_id: reason.value for sample_id, reason in step.drop.items()},
            )
            (folder / checkpoint.COMMIT_FILE).write_text(commit.model_dump_json())
            commits.append(commit)

        with self._timed("checkpoint_s"):
            checkpoint.write(self._versions, lease.lease_id, fill)
        return commits[0]

    def _commit(self, commit: Commit, step: Step) -> int | None:
        """Commit the step. Return the new version, or None if the server refused it."""
        folder = self._data_dir / commit.manifest.folder
        # Only a refusal may delete the folder: a commit without an answer may have happened.
        self._loaded = None
        try:
            with self._timed("commit_s"):
                version = self._client.commit(commit)
        except CommitRefused as error:
            log.warning("step_discarded", lease=commit.lease_id, reason=str(error))
            checkpoint.discard(folder)
            self._forget()
            return None
        self._loaded = (version, commit.manifest.folder)
        self._forget()
        with suppress(OSError):
            checkpoint.prune(self._versions, self._keep_optimizers, {folder, *self._needed})
        metrics = {name: round(value, 6) for name, value in (self._seconds | dict(step.metrics)).items()}
        log.info("step_committed", weight_version=version, parent=commit.parent, **metrics)
        return version

    def _give_back(self, lease: LeaseBody, error: BaseException) -> None:
        """Release a batch of which no checkpoint was made. Raises the error again if it is not an expected one."""
        self._loaded = None  # the learner may hold half a step
        match error:
            case CommitRefused():
                log.warning("step_discarded", lease=lease.lease_id, reason=str(error))
                self._forget()
            case Interrupted():
                self._release(lease, str(error))
            case _NoStepMade(result=result):
                log.warning("no_step", lease=lease.lease_id, reason=result.reason, dropped=dict(result.drop))
                self._release(lease, result.reason, result.drop)
                self._session.report(result.reason)
            case _:
                self._release(lease, f"{type(error).__name__}: {error}"[:300])
                raise error

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[phase] = time.perf_counter() - started

    # -- versions ------------------------------------------------------------------------------------------------------

    def _load(self, tip: Tip) -> None:
        """Load the tip if the learner holds another version. Raises WrongBase."""
        if tip.base_hash != self._learner.base_hash or tip.kind is not self._learner.kind:
            raise WrongBase(
                f"the server trains {tip.kind} on base {tip.base_hash[:12]}…, "
                f"this trainer {self._learner.kind} on {self._learner.base_hash[:12]}…"
            )
        self._needed = {self._data_dir / folder for folder in tip.needed}
        wanted = (tip.weight_version, tip.folder)
        if self._loaded == wanted:
            return
        self._loaded = None
        folder = None if tip.folder is None else self._data_dir / tip.folder
        if folder is not None:
            checkpoint.verify(folder)
        self._learner.load(folder, fresh_moments=tip.needs_fresh_moments)
        self._loaded = wanted
        log.info("tip_loaded", weight_version=tip.weight_version, fresh_moments=tip.needs_fresh_moments)

    def _load_tip(self) -> None:
        """Load the tip of the policy that was trained last. Files that are damaged stop no other policy's training."""
        try:
            self._load(self._tip())
        except (TrainerError, OSError) as error:
            if self._policy == SHARED_POLICY or isinstance(error, (WrongBase, ServerGone)):
                raise
            log.error("tip_not_loaded", policy=self._policy, error=str(error))
            self._policy = SHARED_POLICY
            self._load(self._tip())

    def _tip(self) -> Tip:
        """Return the tip of the policy that was trained last, or the shared one's when that policy was removed."""
        try:
            return self._client.tip(self._policy)
        except CommitRefused:
            if self._policy == SHARED_POLICY:
                raise
            self._policy = SHARED_POLICY
            return self._client.tip(self._policy)

    def _load_parent(self, lease: LeaseBody) -> None:
        """Load the lease's parent if the tip changed between the calls. Raises Interrupted if it changed again."""
        # The lease may be of another policy, and a rollback or a rejection may come between the tip and the lease.
        self._policy = lease.policy
        if self._loaded is None or self._loaded[0] != lease.parent:
            self._load(self._client.tip(lease.policy))
        if self._loaded is None or self._loaded[0] != lease.parent:
            raise Interrupted("the tip moved")

    # -- the lease file: settles a crash -------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Settle the lease that an earlier turn or process left.

        Commits its checkpoint if that is whole, and releases the batch otherwise. Raises ServerGone.
        """
        if self._settled:
            return
        try:
            left = json.loads((self._data_dir / LEASE_FILE).read_text())
            lease_id, fence = str(left["lease_id"]), int(left["fence"])
        except FileNotFoundError:
            self._settled = True
            return
        except (ValueError, KeyError, TypeError):  # torn, or of another program: the lease runs out by itself
            self._forget()
            return
        folder = self._versions / lease_id
        checkpoint.discard(checkpoint.partial(self._versions, lease_id))
        try:
            if checkpoint.is_whole(folder):
                commit = Commit.model_validate_json((folder / checkpoint.COMMIT_FILE).read_bytes())
                log.info("left_step_committed", lease=lease_id, weight_version=self._client.commit(commit))
            else:
                self._client.release(lease_id, fence, "the trainer was restarted")
                log.info("left_lease_released", lease=lease_id)
        except ServerGone:
            raise
        except CommitRefused as error:
            log.info("left_step_discarded", lease=lease_id, reason=str(error))
            checkpoint.discard(folder)
        except (TrainerError, ValueError) as error:
            # The folder stays: at its start the server removes folders that the ledger does not name.
            log.warning("left_step_unsettled", lease=lease_id, error=str(error))
            with suppress(
                CommitRefused
            ):  # the lease is over; a live one would keep its samples for a quarter of an hour
                self._client.release(lease_id, fence, "its step cannot be committed")
        self._forget()

    def _remember(self, lease: LeaseBody) -> None:
        """Write the lease file, so that a process that starts after a crash can settle the lease."""
        self._settled = False
        file = self._data_dir / LEASE_FILE
        temporary = file.with_name(f".{file.name}")
        temporary.write_text(json.dumps({"lease_id": lease.lease_id, "fence": lease.fence}))
        temporary.replace(file)

    def _forget(self) -> None:
        (self._data_dir / LEASE_FILE).unlink(missing_ok=True)
        self._settled = True

    def _release(self, lease: LeaseBody, reason: str, drop: Mapping[str, DropReason] | None = None) -> None:
        """Give the batch back. If the server is away the lease file stays, and `_settle` does it later."""
        if self._session.release(lease, reason, drop):
            self._forget()
