"""Typed HTTP client of the trainer API, and the lease session that both trainer loops share.

Every call has a deadline. An HTTP 409 raises `CommitRefused`: the lease is over, or the version is refused. A server
that cannot be reached or answers 5xx raises `ServerGone`: the call may be repeated. Every other refusal raises
`TrainerError`. `commit` is idempotent by its lease.

Needs httpx, pydantic and the standard library only: slime's environment has no structlog.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from openclaw_rl.backoff import Backoff
from openclaw_rl.errors import CommitRefused, TrainerError
from openclaw_rl.trainer_protocol import (
    Commit,
    Committed,
    Durable,
    Failed,
    LeaseBody,
    Leased,
    LeaseRef,
    LeaseReply,
    LeaseRequest,
    PushBegin,
    PushEnd,
    Release,
    Renewed,
    Start,
    Started,
    Tip,
    TipRequest,
)
from openclaw_rl.types import SHARED_POLICY, DropReason

Reply = TypeVar("Reply", bound=BaseModel)
Result = TypeVar("Result")

CONNECT_S, ANSWER_S = 5.0, 60.0
COMMIT_ATTEMPTS, COMMIT_PAUSE_S, LONGEST_COMMIT_PAUSE_S = 5, 1.0, 8.0
LEASE_WAIT_S = 2.0
"""Length of one long poll for a lease."""  # short, because a stop waits for it
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 4.0
"""Between two calls of a server that is away. After its engine's death the chats wait for this trainer's weights."""
LONGEST_RENEWAL_S = 60.0


class ServerGone(TrainerError):
    """The server did not answer, or is not ready: the call may be repeated later."""


class TrainerClient:
    def __init__(
        self,
        url: str,
        token: str,
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._sleep = sleep
        self._http = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            transport=transport,
            trust_env=False,  # the URL names the server itself; HTTP_PROXY must not redirect the call
        )

    def close(self) -> None:
        self._http.close()

    def tip(self, policy: str = SHARED_POLICY) -> Tip:
        """Return the version to train from. Raises CommitRefused for a policy that is not there, or no longer."""
        return self._call("tip", TipRequest(policy=policy), Tip)

    def lease(self, trainer: str, *, wait_s: float, n: int | None = None, most: int | None = None) -> LeaseBody | None:
        """Return a lease, or None if no batch becomes ready within `wait_s` on the server.

        most: samples of the largest step that the trainer makes; None: any number.
        """
        asked = LeaseRequest(trainer=trainer, wait_s=wait_s, n=n, most=most)
        return self._call("lease", asked, LeaseReply, extra_s=wait_s).lease

    def renew(self, lease: LeaseBody | LeaseRef, *, begins_step: bool = False) -> float:
        """Renew the lease and return its new end (Unix seconds). Raises CommitRefused when the lease is over.

        begins_step: the optimizer steps next; deletions wait for the commit.
        """
        body = LeaseRef(lease_id=lease.lease_id, fence=lease.fence, begins_step=begins_step)
        return self._call("renew", body, Renewed).expires_at

    def release(self, lease_id: str, fence: int, reason: str, drop: Mapping[str, DropReason] | None = None) -> None:
        body = Release(
            lease_id=lease_id, fence=fence, reason=reason, drop={k: v.value for k, v in (drop or {}).items()}
        )
        self._post("release", body)

    def commit(self, commit: Commit) -> int:
        """Commit the step and return the new weight version. Repeats the call while the server does not answer."""
        # A server that did not answer may have committed: only the repeated call tells.
        pauses = Backoff(COMMIT_PAUSE_S, max(COMMIT_PAUSE_S, LONGEST_COMMIT_PAUSE_S))
        for _ in range(COMMIT_ATTEMPTS - 1):
            try:
                return self._call("commit", commit, Committed).weight_version
            except ServerGone:
                self._sleep(pauses.next_s())
        return self._call("commit", commit, Committed).weight_version

    def durable(self, weight_version: int, failure: str | None = None) -> None:
        """Report that the version is on disk or, with `failure`, that its checkpoint could not be kept."""
        self._post("durable", Durable(weight_version=weight_version, failure=failure))

    def failed(self, trainer: str, reason: str) -> None:
        """Report that a step failed. The server shows the reason in `/healthz`."""
        self._post("failed", Failed(trainer=trainer, reason=reason[:1000]))

    def start(self, trainer: str, whole_fences: Iterable[int] = (), *, writes_files: bool = False) -> Started:
        """Report that this trainer holds no weights, and return what it has to load.

        whole_fences: of the versions that it holds whole on disk. The server marks these as durable, and then the
        undurable versions as lost. writes_files: it writes full weights into folders, for the server to give to the
        engines.
        """
        start = Start(trainer=trainer, whole_fences=list(whole_fences), writes_files=writes_files)
        return self._call("start", start, Started)

    def leased(self, fence: int) -> LeaseBody:
        """Return a live lease again. Raises CommitRefused when the lease is over."""
        lease = self._call("leased", Leased(fence=fence), LeaseReply).lease
        if lease is None:
            raise TrainerError(f"leased: the server knows no lease with fence {fence}")
        return lease

    def push_begin(
        self, weight_version: int, *, deadline_s: float, folder: str | None = None, wait_s: float = 120.0
    ) -> None:
        """Begin a push; return when the engine is empty and waits for the weights. folder: as in `PushBegin`.

        Raises CommitRefused when this version may not serve.
        """
        asked = PushBegin(weight_version=weight_version, deadline_s=deadline_s, folder=folder)
        self._post("push/begin", asked, extra_s=wait_s)

    def push_end(self, weight_version: int, failure: str | None = None, *, wait_s: float = 120.0) -> None:
        """End a push; return when the version serves. Raises CommitRefused when the version may not serve."""
        self._post("push/end", PushEnd(weight_version=weight_version, failure=failure), extra_s=wait_s)

    def _call(self, verb: str, body: BaseModel | None, reply: type[Reply], *, extra_s: float = 0.0) -> Reply:
        content = self._post(verb, body, extra_s=extra_s)
        try:
            return reply.model_validate_json(content)
        except ValidationError as error:
            raise TrainerError(f"{verb}: the server's answer is not a {reply.__name__}: {error}") from error

    def _post(self, verb: str, body: BaseModel | None, *, extra_s: float = 0.0) -> bytes:
        timeout = httpx.Timeout(ANSWER_S + extra_s, connect=CONNECT_S)
        try:
            answer = self._http.post(
                f"/v1/trainer/{verb}",
                content="{}" if body is None else body.model_dump_json(),
                headers={"content-type": "application/json"},
                timeout=timeout,
            )
        except httpx.TransportError as error:
            raise ServerGone(f"{verb}: {error!r}") from error
        if answer.is_success:
            return answer.content
        problem = f"{verb}: {answer.status_code} {_message(answer)}"
        if answer.status_code == httpx.codes.CONFLICT:
            raise CommitRefused(problem)
        if answer.is_server_error or answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            raise ServerGone(problem)
        raise TrainerError(problem)


def _message(answer: httpx.Response) -> str:
    """Return the error's text: from `error.message`, `error`, `detail`, or the body."""
    try:
        body = json.loads(answer.content)
    except ValueError:
        return answer.text[:200]
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


class EventLog(Protocol):
    """A logger of event names with fields. A structlog logger is one."""

    def info(self, event: str, **fields: object) -> object: ...

    def warning(self, event: str, **fields: object) -> object: ...

    def error(self, event: str, **fields: object) -> object: ...


class StandardEventLog:
    """Event log on the standard `logging` module, for environments without structlog."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def info(self, event: str, **fields: object) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._log(logging.ERROR, event, fields)

    def _log(self, level: int, event: str, fields: Mapping[str, object]) -> None:
        self._logger.log(level, " ".join([event, *(f"{name}={value}" for name, value in fields.items())]))


@dataclass(slots=True, eq=False)
class LeaseSession:
    """One trainer's leases and its reports to the server.

    A loop takes a lease, holds it while its step runs, and commits or releases it. The session renews the held lease,
    finds a step that hangs, waits for a server that is away, and reports failed steps.
    """

    client: TrainerClient
    trainer: str
    """The trainer's name in the ledger: the same after a restart."""
    stop: threading.Event
    wait_s: float = LEASE_WAIT_S
    pauses: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S))
    """Pauses between failed attempts; the first success resets them."""
    on_hang: Callable[[], None] = lambda: None
    """Called from the renewal thread when a step made no progress for the length of a lease."""
    log: EventLog = field(default_factory=lambda: StandardEventLog(logging.getLogger(__name__)))
    _progress_at: float = field(default_factory=time.monotonic, init=False)
    _lost: threading.Event = field(default_factory=threading.Event, init=False)

    def take(self, *, most: int | None = None) -> LeaseBody | None:
        """Return the next lease, or None if no batch became ready within `wait_s`. most: samples of the largest one."""
        asked = time.monotonic()
        lease = self.client.lease(self.trainer, wait_s=self.wait_s, most=most)
        if lease is None and time.monotonic() - asked < self.wait_s / 2:
            self.stop.wait(self.wait_s / 2)  # a server that is closing answers at once: do not spin
        return lease

    @contextmanager
    def hold(self, lease: LeaseBody) -> Iterator[None]:
        """Renew the lease from a thread until the block ends.

        The thread renews at a third of the lease's length. It stops when the server refuses, and when the step made no
        `progress` for the length of the lease; the lease `is_lost` then.
        """
        self.progress()
        over, self._lost = threading.Event(), threading.Event()
        thread = threading.Thread(
            target=self._renew, args=(lease, over, self._lost), name=f"renew {lease.lease_id}", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(timeout=1.0)  # a renewal still in flight does no harm

    @property
    def is_lost(self) -> bool:
        """True once the lease held last is no longer renewed."""
        return self._lost.is_set()

    def progress(self) -> None:
        """Note that the step makes progress."""
        self._progress_at = time.monotonic()

    def release(self, lease: LeaseBody, reason: str, drop: Mapping[str, DropReason] | None = None) -> bool:
        """Give the batch back, without the samples in `drop`. Return False if the server did not take it."""
        try:
            self.client.release(lease.lease_id, lease.fence, reason, drop)
        except CommitRefused:
            pass  # the lease is over: the batch waits already
        except TrainerError as error:
            self.log.warning("lease_not_released", lease=lease.lease_id, reason=reason, error=str(error))
            return False
        self.log.info("lease_released", lease=lease.lease_id, reason=reason)
        return True

    def report(self, reason: str) -> None:
        """Report a failed step to the server."""
        try:
            self.client.failed(self.trainer, reason)
        except TrainerError as error:
            self.log.warning("failure_not_reported", reason=reason, error=str(error))

    def when_server_answers(self, call: Callable[[], Result]) -> Result | None:
        """Repeat the call while it raises ServerGone. Return its result, or None if `stop` is set meanwhile."""
        while True:
            self.progress()
            try:
                result = call()
            except ServerGone as error:
                pause_s = self.pauses.next_s()
                self.log.warning("server_away", error=str(error), retry_s=pause_s)
                if self.stop.wait(pause_s):
                    return None
            else:
                self.pauses.reset()
                return result

    def _renew(self, lease: LeaseBody, over: threading.Event, lost: threading.Event) -> None:
        # By the monotonic clock and the lease's length: a wall clock that is set has no effect. A step is silent for
        # the pauses that this thread waited, not for the time since its last word. A machine that stopped the whole
        # process for longer than the lease stopped this thread too: the server knows whether the lease is over.
        pause_s, silent_s, heard_at = min(max(0.5, lease.lease_s / 3), LONGEST_RENEWAL_S), 0.0, self._progress_at
        while not over.wait(pause_s):
            silent_s = silent_s + pause_s if self._progress_at == heard_at else 0.0
            heard_at = self._progress_at
            if silent_s >= lease.lease_s:
                lost.set()
                self.log.error("step_hangs", lease=lease.lease_id, silent_s=round(silent_s, 1))
                self.on_hang()
                return
            try:
                self.client.renew(lease)
            except CommitRefused:
                lost.set()
                return
            except TrainerError as error:
                self.log.warning("renew_failed", lease=lease.lease_id, error=str(error))
