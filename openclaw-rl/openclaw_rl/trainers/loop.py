"""The loop of a trainer: *tip → load → lease → step → checkpoint → commit*, whatever the learner is.

Promises: a step is published by its checkpoint alone, so a crash anywhere loses at most the step in hand, never a
sample and never a version. What a crash left is settled at the next start: a whole checkpoint is committed, anything
else goes back to the ledger at once and not when its lease runs out. A lease is renewed by a thread while its step
runs, as long as that makes progress. A refused commit, numbers that are not finite or a full disk cost that step: the
folder goes, the tip is loaded again, the samples wait again. A server that is away is waited for.

Leaves to others: what a step is (`base.Learner`), and every decision about versions (the ledger's).
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import structlog

from openclaw_rl.errors import CommitRefused, TrainerError
from openclaw_rl.trainer_protocol import Commit, LeaseBody, Manifest, Report, Tip
from openclaw_rl.trainers import checkpoint
from openclaw_rl.trainers.base import Interrupted, Learner, NoStep, Step
from openclaw_rl.trainers.client import ServerGone, TrainerClient, renewing
from openclaw_rl.types import DropReason

log = structlog.get_logger()

LEASE_WAIT_S = 2.0
"""One long poll. Short, because a stop waits for it; a batch that comes is still answered at once."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
LEASE_FILE = "trainer.lease.json"


class TrainerLoop:
    def __init__(
        self,
        client: TrainerClient,
        learner: Learner,
        data_dir: Path,
        *,
        name: str,
        stop: threading.Event,
        keep_optimizers: int = 4,
        lease_wait_s: float = LEASE_WAIT_S,
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        """on_hang: a step made no progress for as long as a lease lives; called in another thread, since this one
        hangs."""
        self._on_hang = on_hang
        self._beat = time.monotonic()
        self._client, self._learner, self._data_dir, self._name, self._stop = client, learner, data_dir, name, stop
        self._keep_optimizers, self._lease_wait_s = keep_optimizers, lease_wait_s
        self._versions = data_dir / "versions"
        self._loaded: tuple[int, str | None] | None = None
        """Version and folder that the learner holds; None when it holds nothing that the ledger knows."""
        self._needed: set[Path] = set()
        """Folders whose optimizer states may be gone back to."""
        self._settled = False
        """Whether no lease of an earlier turn or process is left to settle."""

    def run(self) -> None:
        """Train until `stop` is set. Raises only what is a bug, or a base that is not the server's."""
        pause_s = FIRST_PAUSE_S
        while not self._stop.is_set():
            try:
                self.turn()
                pause_s = FIRST_PAUSE_S
            except WrongBase:
                raise
            except ServerGone as error:
                log.warning("server_away", error=str(error), retry_s=pause_s)
            except (TrainerError, OSError) as error:
                self._loaded = None
                log.error("step_failed", error=str(error), retry_s=pause_s)
                self._tell(str(error))
            else:
                continue
            self._stop.wait(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def turn(self) -> int | None:
        """One poll, and one step when a batch came; the version it made."""
        if not self._settled:
            self._settle()
        tip = self._client.tip()
        self._load(tip)
        asked = time.monotonic()
        lease = self._client.lease(self._name, wait_s=self._lease_wait_s)
        if lease is None:
            if time.monotonic() - asked < self._lease_wait_s / 2:
                self._stop.wait(self._lease_wait_s / 2)  # a server that is closing answers at once: do not spin
            return None
        self._settled = False
        with self._renewing(lease) as still_ours:
            made = self._make(lease, still_ours)
            return None if made is None else self._publish(lease, *made)

    # -- one step ------------------------------------------------------------------------------------------------------

    def _make(self, lease: LeaseBody, still_ours: Callable[[], bool]) -> tuple[Commit, Mapping[str, float]] | None:
        """The checkpoint of one step, on disk, and its commit; None when the batch went back."""
        try:
            self._remember(lease)
            if self._loaded is None or self._loaded[0] != lease.parent:  # a rollback or a rejection came in between
                self._load(self._client.tip())
            if self._loaded is None or self._loaded[0] != lease.parent:
                self._release(lease, "the tip moved")
                return None
            started = time.perf_counter()
            log.info("step_started", lease=lease.lease_id, parent=lease.parent, samples=len(lease.samples))
            result = self._learner.step([body.to_sample() for body in lease.samples], self._between(lease, still_ours))
            if isinstance(result, NoStep):
                self._loaded = None
                log.warning("no_step", lease=lease.lease_id, reason=result.reason, dropped=dict(result.drop))
                self._release(lease, result.reason, result.drop)
                self._tell(result.reason)
                return None
            stepped, self._beat = time.perf_counter(), time.monotonic()
            commit = self._checkpoint(lease, result)
            times = {"step_s": stepped - started, "checkpoint_s": time.perf_counter() - stepped}
            return commit, times | dict(result.metrics)
        except CommitRefused as error:
            log.warning("step_discarded", lease=lease.lease_id, reason=str(error))
            self._loaded = None
            self._forget()
        except Interrupted as error:
            self._loaded = None
            self._release(lease, str(error))
        except BaseException as error:
            self._loaded = None
            with suppress(TrainerError):
                self._release(lease, f"{type(error).__name__}: {error}"[:300])
            raise
        return None

    def _publish(self, lease: LeaseBody, commit: Commit, metrics: Mapping[str, float]) -> int | None:
        """Commit. From here on only a refusal may remove the folder: an unanswered commit may have happened."""
        folder = self._data_dir / commit.manifest.folder
        committing = time.perf_counter()
        try:
            version = self._client.commit(commit)
        except CommitRefused as error:
            log.warning("step_discarded", lease=lease.lease_id, reason=str(error))
            self._loaded = None
            checkpoint.discard(folder)
            self._forget()
            return None
        except BaseException:
            self._loaded = None
            raise
        self._loaded = (version, commit.manifest.folder)
        self._forget()
        with suppress(OSError):
            checkpoint.prune(self._versions, self._keep_optimizers, {folder, *self._needed})
        log.info(
            "step_committed",
            weight_version=version,
            parent=lease.parent,
            commit_s=round(time.perf_counter() - committing, 3),
            **{name: round(value, 6) for name, value in metrics.items()},
        )
        return version

    def _tell(self, reason: str) -> None:
        """The server says it in `/healthz`: nobody reads a trainer's log."""
        with suppress(TrainerError):
            self._client.failed(self._name, reason)

    def _between(self, lease: LeaseBody, still_ours: Callable[[], bool]) -> Callable[[], None]:
        def between() -> None:
            self._beat = time.monotonic()
            if self._stop.is_set():
                raise Interrupted("the trainer was asked to stop")
            if not still_ours():
                raise CommitRefused(f"lease {lease.lease_id} is over")

        return between

    @staticmethod
    def _not_renewed(lease: LeaseBody, error: TrainerError) -> None:
        log.warning("renew_failed", lease=lease.lease_id, error=str(error))

    def _checkpoint(self, lease: LeaseBody, step: Step) -> Commit:
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

        checkpoint.write(self._versions, lease.lease_id, fill)
        return commits[0]

    def _renewing(self, lease: LeaseBody) -> AbstractContextManager[Callable[[], bool]]:
        self._beat = time.monotonic()

        def hangs() -> None:
            log.error("step_hangs", lease=lease.lease_id, silent_s=round(time.monotonic() - self._beat, 1))
            self._on_hang()

        return renewing(self._client, lease, self._not_renewed, moved_at=lambda: self._beat, on_hang=hangs)

    # -- versions ------------------------------------------------------------------------------------------------------

    def _load(self, tip: Tip) -> None:
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

    # -- leases, and what a crash leaves -------------------------------------------------------------------------------

    def _settle(self) -> None:
        """What an earlier turn or process left: commit its checkpoint when it is whole, else give the batch back."""
        try:
            left = json.loads((self._data_dir / LEASE_FILE).read_text())
            lease_id, fence = str(left["lease_id"]), int(left["fence"])
        except FileNotFoundError:
            self._settled = True
            return
        except (ValueError, KeyError, TypeError):  # not ours, or torn: the lease runs out by itself
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
            # The folder stays: what the ledger does not name, the server removes at its start.
            log.warning("left_step_unsettled", lease=lease_id, error=str(error))
        self._forget()

    def _remember(self, lease: LeaseBody) -> None:
        file = self._data_dir / LEASE_FILE
        temporary = file.with_name(f".{file.name}")
        temporary.write_text(json.dumps({"lease_id": lease.lease_id, "fence": lease.fence}))
        temporary.replace(file)

    def _forget(self) -> None:
        (self._data_dir / LEASE_FILE).unlink(missing_ok=True)
        self._settled = True

    def _release(self, lease: LeaseBody, reason: str, drop: Mapping[str, DropReason] | None = None) -> None:
        """Give the batch back. When the server is away the lease file stays, and `_settle` does it later."""
        with suppress(CommitRefused):
            self._client.release(lease.lease_id, lease.fence, reason, drop)
        log.info("lease_released", lease=lease.lease_id, reason=reason)
        self._forget()


class WrongBase(TrainerError):
    """The trainer's base model is not the one the server serves: nothing it learns could be served."""
