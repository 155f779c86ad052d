"""The client: what each answer of the server means to a trainer."""

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from openclaw_rl.backoff import Backoff
from openclaw_rl.errors import CommitRefused, TrainerError
from openclaw_rl.trainer_protocol import Commit, LeaseBody, Manifest, Report
from openclaw_rl.trainers.client import LeaseSession, ServerGone, TrainerClient
from openclaw_rl.types import DropReason, WeightKind

Handler = Callable[[httpx.Request], httpx.Response]
LEASE = LeaseBody(lease_id="l", fence=3, parent=1, expires_at=100.0, samples=[])
COMMIT = Commit(
    lease_id="l",
    fence=3,
    parent=1,
    manifest=Manifest(folder="versions/l", kind=WeightKind.LORA, base_hash="b", sha256="s"),
    report=Report(metrics={"loss": 0.5}),
)


def client(handler: Handler, pauses: list[float] | None = None) -> TrainerClient:
    sleep = (lambda _: None) if pauses is None else pauses.append
    return TrainerClient("http://server", "secret", transport=httpx.MockTransport(handler), sleep=sleep)


def test_calls_carry_the_token_and_typed_bodies() -> None:
    seen: list[tuple[str, str, str]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, request.headers["authorization"], request.content.decode()))
        answers = {
            "lease": {"lease": None},
            "renew": {"expires_at": 7.5},
            "commit": {"weight_version": 2},
            "tip": {"weight_version": 1, "kind": "lora", "base_hash": "b", "folder": "versions/x"},
        }
        return httpx.Response(200, json=answers.get(request.url.path.rsplit("/", 1)[1], {}))

    api = client(handler)
    assert api.tip().folder == "versions/x"
    assert api.lease("me", wait_s=2.0) is None
    assert api.renew(LEASE) == 7.5
    api.release("l", 3, "why", {"s": DropReason.TOO_LONG})
    assert api.commit(COMMIT) == 2
    api.durable(2)
    assert [path for path, _, _ in seen] == [
        f"/v1/trainer/{verb}" for verb in ["tip", "lease", "renew", "release", "commit", "durable"]
    ]
    assert {token for _, token, _ in seen} == {"Bearer secret"}
    assert seen[1][2] == '{"trainer":"me","wait_s":2.0,"n":null,"most":null}'
    assert seen[3][2] == '{"lease_id":"l","fence":3,"reason":"why","drop":{"s":"too_long"}}'


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (409, CommitRefused),
        (500, ServerGone),
        (503, ServerGone),
        (429, ServerGone),
        (401, TrainerError),
        (422, TrainerError),
    ],
)
def test_what_a_status_means(status: int, error: type[Exception]) -> None:
    body = {"error": {"message": "because", "type": "x", "code": "y"}}
    with pytest.raises(error, match=f"renew: {status} because") as caught:
        client(lambda _: httpx.Response(status, json=body)).renew(LEASE)
    assert type(caught.value) is error


def test_an_answer_that_is_no_answer() -> None:
    with pytest.raises(TrainerError, match="not a Tip"):
        client(lambda _: httpx.Response(200, json={"weight_version": "many"})).tip()
    with pytest.raises(ServerGone, match="Bad Gateway"):
        client(lambda _: httpx.Response(502, text="Bad Gateway")).tip()


def test_a_commit_is_said_again_until_it_is_answered() -> None:
    answers = [None, 503, 200]
    pauses: list[float] = []

    def handler(request: httpx.Request) -> httpx.Response:
        answer = answers.pop(0)
        if answer is None:
            raise httpx.ReadTimeout("slow")
        return httpx.Response(answer, json={"weight_version": 4} if answer == 200 else {})

    assert client(handler, pauses).commit(COMMIT) == 4
    assert pauses == [1.0, 2.0]


def test_a_commit_gives_up_in_the_end_and_a_refusal_is_final() -> None:
    def unreachable(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("nobody")

    pauses: list[float] = []
    with pytest.raises(ServerGone, match="nobody"):
        client(unreachable, pauses).commit(COMMIT)
    assert len(pauses) == 4
    calls = []
    with pytest.raises(CommitRefused):
        client(lambda r: (calls.append(r), httpx.Response(409, json={}))[1]).commit(COMMIT)
    assert len(calls) == 1


def session(handler: Handler, **given: Any) -> LeaseSession:
    return LeaseSession(client(handler), "me", threading.Event(), **given)


def test_a_release_says_whether_the_server_took_it(caplog: pytest.LogCaptureFixture) -> None:
    assert session(lambda _: httpx.Response(200, json={})).release(LEASE, "why")
    assert session(lambda _: httpx.Response(409, json={})).release(LEASE, "why"), "the lease is over: the batch waits"
    with caplog.at_level("WARNING"):
        assert not session(lambda _: httpx.Response(503, text="closing")).release(LEASE, "why")
    assert caplog.messages == ["lease_not_released lease=l reason=why error=release: 503 closing"]


def test_a_call_waits_for_a_server_that_is_away_until_it_answers_or_the_trainer_stops() -> None:
    answers = [503, 503, 200]

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(answers.pop(0), json={"expires_at": 7.5})

    here = session(handler, pauses=Backoff(0.001, 0.002))
    assert here.when_server_answers(lambda: here.client.renew(LEASE)) == 7.5
    assert here.pauses.next_s() == 0.001, "a success resets the pauses"
    answers.append(503)
    here.stop.set()
    assert here.when_server_answers(lambda: here.client.renew(LEASE)) is None


def test_a_server_that_was_away_for_long_is_asked_again_within_seconds() -> None:
    here = session(lambda _: httpx.Response(503))
    assert max(here.pauses.next_s() for _ in range(20)) <= 5, "its engine's chats wait for this trainer's weights"


def test_a_poll_that_is_answered_at_once_does_not_spin() -> None:
    here, waits = session(lambda _: httpx.Response(200, json={"lease": None}), wait_s=60.0), []
    here.stop = type("Stop", (), {"wait": staticmethod(waits.append)})()  # type: ignore[assignment]
    assert here.take() is None
    assert waits == [30.0]


def test_a_refused_renewal_loses_the_lease_and_only_that_one() -> None:
    short = LEASE.model_copy(update={"lease_s": 1.5})
    here = session(lambda _: httpx.Response(409, json={}))
    with here.hold(short):
        assert not here.is_lost
        assert here._lost.wait(60)
        assert here.is_lost
    with here.hold(LEASE):
        assert not here.is_lost
