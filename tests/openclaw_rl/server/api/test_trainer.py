"""The trainer API over HTTP: the token, the refusals and their form, and the end of a waiting lease call."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from ledger import give_sample
from turns import make_request, make_turn

from openclaw_rl.errors import LedgerUnavailable
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.server.api.trainer import LeaseWait, build_trainer_router
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.telemetry import metrics
from openclaw_rl.telemetry.health import Health
from openclaw_rl.types import Scope

TOKEN = "secret-token"
MANIFEST = {"folder": "versions/x", "kind": "lora", "base_hash": "base-1", "sha256": "00"}


class ManualClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Api:
    """A ledger behind the router, and a client with the token."""

    def __init__(self, ledger: Ledger, clock: ManualClock) -> None:
        self.ledger, self.clock, self.wait, self.committed = ledger, clock, LeaseWait(), []
        self.app, self.health, self.words = FastAPI(), Health(), 0
        self.alerts: list[tuple[str, dict[str, Any]]] = []
        parts = {"token": TOKEN, "lease_wait": self.wait, "on_commit": self.committed.append, "health": self.health}
        self.app.include_router(build_trainer_router(ledger, on_word=self._word, alert=self._alert, **parts))
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://trainer",
            headers={"authorization": f"Bearer {TOKEN}"},
        )

    def _word(self) -> None:
        self.words += 1

    def _alert(self, event: str, **fields: Any) -> None:
        self.alerts.append((event, fields))

    async def call(self, verb: str, body: Any = None, *, status: int = 200, **kwargs: Any) -> Any:
        answer = await self.http.post(f"/v1/trainer/{verb}", json=body or {}, **kwargs)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def lease(self, wait_s: float = 0.0, trainer: str = "t") -> Any:
        return (await self.call("lease", {"trainer": trainer, "wait_s": wait_s}))["lease"]

    async def sample(self, name: str) -> None:
        turn = make_turn(name, ids=(3, 4), log_probs=(-0.5, -0.25))
        await give_sample(self.ledger, make_request(name, session=None), turn)


@pytest.fixture
async def api(tmp_path) -> AsyncIterator[Api]:
    clock = ManualClock()
    training = TrainingSettings(batch_size=2, min_batch=1, max_wait_s=100, lease_s=60)
    identity = Identity("base-1", "tokenizer-1", "tiny")
    ledger = await Ledger.open(tmp_path / "ledger.sqlite", identity=identity, training=training, clock=clock)
    api = Api(ledger, clock)
    yield api
    assert await ledger.audit() == []
    await api.http.aclose()
    await ledger.aclose()


async def test_a_step_from_tip_to_commit(api):
    tip = await api.call("tip")
    assert tip == {
        "weight_version": 0,
        "kind": "lora",
        "base_hash": "base-1",
        "folder": None,
        "needs_fresh_moments": False,
        "needed": [],
        "wants_push": False,
        "engine": "",
        "holds_chats": False,
    }
    await api.sample("one")
    await api.sample("two")
    lease = await api.lease()
    assert [sample["sample_id"] for sample in lease["samples"]] == ["one", "two"]
    assert lease["samples"][0]["rollout_log_probs"] == [-0.5, -0.25]
    ref = {"lease_id": lease["lease_id"], "fence": lease["fence"]}
    assert await api.call("renew", ref) == {"expires_at": 1060.0}
    step = {**ref, "parent": 0, "manifest": MANIFEST, "report": {"metrics": {"loss": 1.0}}, "durable": False}
    assert await api.call("commit", step) == {"weight_version": 1}
    assert await api.call("commit", step) == {"weight_version": 1}
    assert api.committed == [1, 1]
    assert await api.call("durable", {"weight_version": 1}) == {}
    assert api.committed == [1, 1, 1], "an engine that lacks the version can take it from the disk now"
    assert (await api.call("tip"))["weight_version"] == 1


async def test_a_trainer_asks_for_the_tip_of_the_policy_that_its_lease_names(api):
    root = await api.ledger.open_policy("user:ann")
    assert [(await api.call("tip", {"policy": name}))["weight_version"] for name in ("policy", "user:ann")] == [0, 1]
    refused = (await api.call("tip", {"policy": "user:bob"}, status=409))["error"]
    assert (refused["code"], refused["message"]) == ("refused", "there is no policy 'user:bob'")
    turn = make_turn("ann-1", ids=(3, 4), log_probs=(-0.5, -0.25), version=root.weight_version)
    request = replace(make_request("ann-1", session=None), scope=Scope("ann", None, "user:ann"))
    await give_sample(api.ledger, request, turn)
    api.clock.now += 200
    lease = await api.lease()
    assert (lease["policy"], lease["parent"]) == ("user:ann", root.weight_version)
    ref = {"lease_id": lease["lease_id"], "fence": lease["fence"]}
    step = {**ref, "parent": root.weight_version, "manifest": MANIFEST, "report": {"metrics": {"loss": 1.0}}}
    assert await api.call("commit", step) == {"weight_version": 2}
    assert [(await api.call("tip", {"policy": name}))["weight_version"] for name in ("policy", "user:ann")] == [0, 2]


async def test_the_duration_of_a_step_is_counted_once_whatever_the_trainer_repeats(api):
    await api.sample("one")
    await api.sample("two")
    lease = await api.lease()
    step = {"lease_id": lease["lease_id"], "fence": lease["fence"], "parent": 0, "manifest": MANIFEST}
    report = {
        "metrics": {"gradient_s": 2.0, "reference_s": 1.0, "optimizer_s": 0.5}
    }  # the reference is in the gradient
    for _ in range(2):
        await api.call("commit", {**step, "report": report})
    assert (api.health.step.cumulative()[-1], api.health.step.total_s) == (("+Inf", 1.0), 2.5)


async def test_a_trainer_whose_process_ends_at_each_start_is_a_problem_and_one_alert_until_it_asks_for_a_batch(api):
    reason = "it ended with 1 after 35 s: AssertionError: another shape (/data/logs/driver.log)"
    for times in range(1, 5):
        assert bool(api.alerts) == (times > 3)
        await api.call("failed", {"trainer": "driver", "reason": reason, "has_ended": True})
        await api.call("tip")  # its next start says something too
    assert api.health.problems() == [f"driver: failed 4 times in a row, last: {reason}"]
    assert api.alerts == [("trainer_fails", {"part": "driver", "failures": 3})]
    await api.lease()
    assert api.health.problems() == []


async def test_a_trainer_that_cannot_start_is_a_problem_and_an_alert_at_once(api):
    reason = "it cannot start: train.py: error: unrecognized arguments: --lr-decay (/data/logs/driver.log)"
    said = {"trainer": "driver", "reason": reason, "has_ended": True, "cannot_start": True}
    for _ in range(2):
        await api.call("failed", said)
    assert api.health.problems() == [f"driver: failed 2 times in a row, last: {reason}"]
    assert api.alerts == [("trainer_fails", {"part": "driver", "failures": 1})]
    await api.lease()
    assert api.health.problems() == []


async def test_a_trainer_whose_steps_fail_is_a_problem_until_one_is_committed(api):
    await api.sample("one")
    await api.sample("two")
    for _ in range(3):
        assert api.health.problems() == []
        assert await api.call("failed", {"trainer": "t", "reason": "No space left on device"}) == {}
    assert api.health.problems() == ["trainer: failed 3 times in a row, last: No space left on device"]
    lease = await api.lease()
    step = {"lease_id": lease["lease_id"], "fence": lease["fence"], "parent": 0, "manifest": MANIFEST}
    await api.call("commit", {**step, "report": {"metrics": {}}})
    assert api.health.problems() == []


async def test_engine_and_trainer_far_apart_are_a_problem_and_one_alert_until_they_agree(api):
    for n, gap in enumerate([0.05, 0.5, 0.4, None, 0.01]):  # None: a step without a token of its parent version
        for name in "ab":
            await api.sample(f"{n}{name}")
        lease = await api.lease()
        step = {"lease_id": lease["lease_id"], "fence": lease["fence"], "parent": n, "manifest": MANIFEST}
        report = {"metrics": {} if gap is None else {"fresh_abs_log_ratio": gap}}
        await api.call("commit", {**step, "manifest": {**MANIFEST, "folder": f"versions/{n}"}, "report": report})
        assert bool(api.health.problems()) == (n in (1, 2, 3))
        if n == 1:
            said = "log-probs: failed once: engine and trainer differ by 0.5 nats a token on the replies of version 1"
            assert api.health.problems() == [f"{said}: they compute different models"]
    assert api.alerts == [("log_probs_differ", {"version": 1, "nats_per_token": 0.5, "limit": 0.15})]


async def test_a_checkpoint_that_cannot_be_kept_is_a_problem_until_one_is(api):
    await api.sample("one")
    await api.sample("two")
    lease = await api.lease()
    step = {"lease_id": lease["lease_id"], "fence": lease["fence"], "parent": 0, "manifest": MANIFEST}
    await api.call("commit", {**step, "report": {"metrics": {}}, "durable": False})
    await api.call("durable", {"weight_version": 1, "failure": "OSError: no space left"})
    said = "checkpoints: failed once: the trainer cannot keep checkpoints: OSError: no space left"
    assert api.health.problems() == [said]
    assert 'openclaw_rl_out_of_order{part="checkpoints"} 1' in metrics.render({}, 1, api.health, [said])
    assert not (await api.ledger.version(1)).durable
    await api.call("durable", {"weight_version": 1})
    assert api.health.problems() == []
    assert (await api.ledger.version(1)).durable


@pytest.mark.parametrize(
    "header", [None, "", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer ü"]
)
@pytest.mark.parametrize("verb", ["tip", "lease", "renew", "release", "commit", "durable"])
async def test_nothing_goes_without_the_token(api, verb, header):
    headers = {"authorization": b"" if header is None else header.encode("latin-1")}
    answer = await api.call(verb, {"nonsense": 1}, status=401, headers=headers)
    assert answer["error"]["code"] == "unauthorized"
    assert api.words == 0, "a stranger's call is no word of the trainer"


def test_a_router_without_a_token_is_not_built():
    with pytest.raises(ValueError, match="an empty "):
        build_trainer_router(None, token="", lease_wait=None, on_commit=print)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("verb", "body", "names"),
    [
        ("lease", {"wait_s": 1}, "trainer"),
        ("lease", {"trainer": "t", "wait_s": 1e9}, "wait_s"),
        ("lease", {"trainer": "t", "n": 0}, "n"),
        ("renew", {"lease_id": "l", "fence": "x"}, "fence"),
        ("release", {"lease_id": "l", "fence": 1, "reason": "r", "drop": {"a": "boring"}}, "boring"),
        ("commit", {"lease_id": "l", "fence": 1, "parent": 0, "report": {"metrics": {}}}, "manifest"),
        ("durable", {"weight_version": 1, "more": 1}, "more"),
        ("tip_typo", {}, "Not Found"),
    ],
)
async def test_a_bad_body_is_named(api, verb, body, names):
    if verb == "tip_typo":
        assert (await api.call(verb, body, status=404))["detail"] == names
        return
    error = (await api.call(verb, body, status=422))["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_body")
    assert names in error["message"]
    assert error["param"] == ("drop" if names == "boring" else names)


async def test_every_call_is_a_word_of_the_trainer_when_it_comes(api):
    await api.call("tip")
    assert api.words == 1
    waiting = asyncio.create_task(api.lease(wait_s=120.0))
    async with asyncio.timeout(120):
        while api.words < 2:
            await asyncio.sleep(0.001)
    assert not waiting.done(), "it is heard when it asks, not when it is answered"
    api.wait.close()
    assert await waiting is None
    await api.call("renew", {"lease_id": "ghost", "fence": 1}, status=409)
    assert api.words == 3


async def test_a_body_that_is_no_json_is_a_422(api):
    answer = await api.http.post("/v1/trainer/commit", content=b"{")
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_json")


async def test_what_the_ledger_refuses_is_a_409_with_its_reason(api):
    error = (await api.call("renew", {"lease_id": "ghost", "fence": 1}, status=409))["error"]
    assert (error["code"], error["message"]) == ("refused", "no lease ghost")
    error = (await api.call("durable", {"weight_version": 9}, status=409))["error"]
    assert error["message"] == "no version 9"


async def test_a_ledger_that_cannot_write_is_a_503_worth_a_retry(api, monkeypatch):
    async def full(*args: object, **kwargs: object) -> None:
        raise LedgerUnavailable("database or disk is full")

    monkeypatch.setattr(api.ledger, "lease", full)
    answer = await api.http.post("/v1/trainer/lease", json={"trainer": "t"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_a_waiting_call_gets_the_batch_that_comes(api):
    await api.sample("one")
    waiting = asyncio.create_task(api.lease(wait_s=60))
    await _asked(api, waiting)
    await api.sample("two")
    api.wait.samples_came()
    assert len((await asyncio.wait_for(waiting, 120))["samples"]) == 2


async def test_train_now_takes_what_is_there_and_then_no_more(api):
    await api.sample("one")
    waiting = asyncio.create_task(api.lease(wait_s=60))
    await _asked(api, waiting)
    api.wait.train_now()
    lease = await asyncio.wait_for(waiting, 120)
    assert len(lease["samples"]) == 1
    await api.call("release", {"lease_id": lease["lease_id"], "fence": lease["fence"], "reason": "test"})
    assert await api.lease() is None


async def test_train_now_with_nothing_there_is_over_at_once(api):
    api.wait.train_now()
    assert await api.lease() is None
    await api.sample("one")
    assert await api.lease() is None


async def test_released_samples_wake_the_next_trainer(api):
    await api.sample("one")
    await api.sample("two")
    lease = await api.lease()
    waiting = asyncio.create_task(api.lease(wait_s=60, trainer="another"))
    await _asked(api, waiting)
    await api.call("release", {"lease_id": lease["lease_id"], "fence": lease["fence"], "reason": "test"})
    assert (await asyncio.wait_for(waiting, 120))["fence"] == 2


async def test_a_call_ends_without_a_lease_when_its_time_is_up_or_the_server_stops(api):
    assert await api.lease(wait_s=0.01) is None
    waiting = asyncio.create_task(api.lease(wait_s=300))
    await _asked(api, waiting)
    api.wait.close()
    assert await asyncio.wait_for(waiting, 120) is None
    await api.sample("one")
    await api.sample("two")
    assert await api.lease(wait_s=300) is None  # no new leases once we stop


async def test_a_call_whose_client_went_away_holds_no_batch(api):
    """The client leaves while the call waits: the call ends. It leaves while the batch is being granted: the batch is
    released.
    """
    call = _RawCall(api.app, b'{"trainer": "t", "wait_s": 300}')
    await _asked(api, call.task)
    call.hang_up()
    await asyncio.wait_for(call.task, 120)
    await api.sample("one")
    await api.sample("two")

    lease = api.ledger.lease

    async def lease_as_the_client_goes(**kwargs: Any) -> Any:
        granted = await lease(**kwargs)
        late.hang_up()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return granted

    api.ledger.lease = lease_as_the_client_goes
    late = _RawCall(api.app, b'{"trainer": "t", "wait_s": 300}')
    await asyncio.wait_for(late.task, 120)
    assert (await api.ledger.counts())["sampled"] == 2


async def _asked(api: Api, task: "asyncio.Task[Any]") -> None:
    """Wait until the call has asked the ledger once, and waits."""
    asked = asyncio.Event()
    lease = api.ledger.lease

    async def tell(**kwargs: Any) -> Any:
        granted = await lease(**kwargs)
        asked.set()
        return granted

    api.ledger.lease = tell  # type: ignore[method-assign]
    waiter = asyncio.create_task(asked.wait())
    await asyncio.wait((waiter, task), return_when=asyncio.FIRST_COMPLETED)
    api.ledger.lease = lease  # type: ignore[method-assign]


class _RawCall:
    """One ASGI call whose client can hang up."""

    def __init__(self, app: FastAPI, body: bytes) -> None:
        self._body: bytes | None = body
        self._gone = asyncio.Event()
        self.task = asyncio.create_task(self._run(app))

    def hang_up(self) -> None:
        self._gone.set()

    async def _run(self, app: FastAPI) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/trainer/lease",
            "raw_path": b"/v1/trainer/lease",
            "query_string": b"",
            "headers": [(b"authorization", f"Bearer {TOKEN}".encode()), (b"content-type", b"application/json")],
        }
        await app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None: ...
