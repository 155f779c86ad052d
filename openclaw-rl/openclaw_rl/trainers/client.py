"""The trainer API from the trainer's side: typed calls over HTTP.

Every call has a deadline. A refusal of what a lease says (409) is `CommitRefused`; a server that cannot be reached, or
answers 5xx, is `ServerGone` and worth a retry; anything else is a `TrainerError`. Calls may be repeated: `commit` is
idempotent by its lease.

Keeps a lease alive while its step runs, from a thread of its own.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

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
)
from openclaw_rl.types import DropReason

Reply = TypeVar("Reply", bound=BaseModel)

CONNECT_S, ANSWER_S = 5.0, 60.0
COMMIT_ATTEMPTS, COMMIT_PAUSE_S = 5, 1.0


class ServerGone(TrainerError):
    """The server did not answer, or is not ready: try again later."""


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
            trust_env=False,  # the server is named by its URL; a proxy of the environment has no part in this
        )

    def close(self) -> None:
        self._http.close()

    def tip(self) -> Tip:
        return self._call("tip", None, Tip)

    def lease(self, trainer: str, *, wait_s: float, n: int | None = None) -> LeaseBody | None:
        """Waits up to wait_s on the server; None when no batch is ready."""
        return self._call("lease", LeaseRequest(trainer=trainer, wait_s=wait_s, n=n), LeaseReply, extra_s=wait_s).lease

    def renew(self, lease: LeaseBody) -> float:
        """When the lease now ends (Unix seconds). Raises CommitRefused when it is over."""
        return self._call("renew", LeaseRef(lease_id=lease.lease_id, fence=lease.fence), Renewed).expires_at

    def release(self, lease_id: str, fence: int, reason: str, drop: Mapping[str, DropReason] | None = None) -> None:
        body = Release(
            lease_id=lease_id, fence=fence, reason=reason, drop={k: v.value for k, v in (drop or {}).items()}
        )
        self._post("release", body)

    def commit(self, commit: Commit) -> int:
        """The new weight version. Repeated when the server does not answer: it may have committed before it went."""
        for attempt in range(COMMIT_ATTEMPTS):
            try:
                return self._call("commit", commit, Committed).weight_version
            except ServerGone:
                if attempt == COMMIT_ATTEMPTS - 1:
                    raise
                self._sleep(COMMIT_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")

    def durable(self, weight_version: int, failure: str | None = None) -> None:
        """It is on disk; or, with a failure, no checkpoint of it could be kept."""
        self._post("durable", Durable(weight_version=weight_version, failure=failure))

    def failed(self, trainer: str, reason: str) -> None:
        """A step came to nothing, or there was none: for whoever asks the server how it goes."""
        self._post("failed", Failed(trainer=trainer, reason=reason[:1000]))

    def start(self, trainer: str) -> Started:
        """This trainer holds nothing: versions that were not durable are lost. What to load, and where things are."""
        return self._call("start", Start(trainer=trainer), Started)

    def leased(self, fence: int) -> LeaseBody:
        """A live lease once more. Raises CommitRefused when it is over."""
        lease = self._call("leased", Leased(fence=fence), LeaseReply).lease
        if lease is None:
            raise TrainerError(f"leased: the server knows no lease with fence {fence}")
        return lease

    def push_begin(self, weight_version: int, *, deadline_s: float, wait_s: float = 120.0) -> None:
        """Returns when the engine is empty and waits for the weights. Raises CommitRefused when this version may not
        serve."""
        self._post("push/begin", PushBegin(weight_version=weight_version, deadline_s=deadline_s), extra_s=wait_s)

    def push_end(self, weight_version: int, failure: str | None = None, *, wait_s: float = 120.0) -> None:
        """Returns when the version serves. Raises CommitRefused when it may not."""
        self._post("push/end", PushEnd(weight_version=weight_version, failure=failure), extra_s=wait_s)

    def _call(self, verb: str, body: BaseModel | None, reply: type[Reply], *, extra_s: float = 0.0) -> Reply:
        content = self._post(verb, body, extra_s=extra_s)
        try:
            return reply.model_validate_json(content)
        except ValidationError as error:
            raise TrainerError(f"{verb}: the server answered what is not a {reply.__name__}: {error}") from error

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
    """The error's text, in whichever form the server gave it."""
    try:
        body = json.loads(answer.content)
    except ValueError:
        return answer.text[:200]
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


LONGEST_PAUSE_S = 60.0


@contextmanager
def renewing(
    client: TrainerClient,
    lease: LeaseBody,
    on_failure: Callable[[LeaseBody, TrainerError], None],
    *,
    moved_at: Callable[[], float] = time.monotonic,
    on_hang: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[], bool]]:
    """Renew at a third of the lease's time; gives a function that says whether the lease is still ours. `on_failure` is
    told of calls that failed and will be made again. `moved_at`: when the step last made progress, by the monotonic
    clock; one that made none for as long as a lease lives is renewed no more, and `on_hang` is called, in the thread
    that does not hang."""
    over, lost = threading.Event(), threading.Event()

    def renew() -> None:
        # By a steady clock and the lease's own length: neither clock's hour matters.
        while not over.wait(min(max(0.5, lease.lease_s / 3), LONGEST_PAUSE_S)):
            if time.monotonic() - moved_at() > lease.lease_s:
                lost.set()
                on_hang()
                return
            try:
                client.renew(lease)
            except CommitRefused:
                lost.set()
                return
            except TrainerError as error:
                on_failure(lease, error)

    thread = threading.Thread(target=renew, name=f"renew {lease.lease_id}", daemon=True)
    thread.start()
    try:
        yield lambda: not lost.is_set()
    finally:
        over.set()
        thread.join(timeout=1.0)  # a renewal in flight may outlive us; it can do no harm
