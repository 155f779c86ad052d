"""A trainer API in memory with faults to order, a learner that counts, and the loop between them."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from openclaw_rl.trainer_protocol import Commit, LeaseBody, SampleBody, Tip
from openclaw_rl.trainers import checkpoint
from openclaw_rl.trainers.base import NoStep, Step
from openclaw_rl.trainers.client import LeaseSession, TrainerClient
from openclaw_rl.trainers.loop import LEASE_FILE, TrainerLoop
from openclaw_rl.types import Sample, WeightKind


class Killed(BaseException):
    """The process is gone: no code after it runs."""


class FakeApi:
    """A ledger of versions and one lease at a time, behind the wire's bodies."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.waiting = [SampleBody.of(sample) for sample in samples]
        self.lease: LeaseBody | None = None
        self.fence = 0
        self.tip = Tip(weight_version=0, kind=WeightKind.LORA, base_hash="base", folder=None)
        self.commits: dict[str, int] = {}
        self.released: list[tuple[str, dict[str, str]]] = []
        self.failures: list[str] = []
        self.renewals = 0
        self.hooks: dict[str, Callable[[], httpx.Response | None]] = {}
        """Verb → what happens instead; None goes on as usual."""
        self.after: dict[str, Callable[[], None]] = {}
        """Verb → what happens once it is done, before it is answered."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        verb = request.url.path.rsplit("/", 1)[1]
        hook = self.hooks.get(verb)
        if hook is not None and (answer := hook()) is not None:
            return answer
        answer = getattr(self, f"_{verb}")(json.loads(request.content))
        if verb in self.after:
            self.after.pop(verb)()
        return answer

    def _tip(self, _: object) -> httpx.Response:
        return httpx.Response(200, content=self.tip.model_dump_json())

    def _lease(self, _: object) -> httpx.Response:
        if self.lease is not None or not self.waiting:
            return httpx.Response(200, json={"lease": None})
        self.fence += 1
        batch, self.waiting = self.waiting, []
        self.lease = LeaseBody(
            lease_id=f"lease-{self.fence}",
            fence=self.fence,
            parent=self.tip.weight_version,
            expires_at=0,
            lease_s=3.0,
            samples=batch,
        )
        return httpx.Response(200, json={"lease": self.lease.model_dump(mode="json")})

    def _failed(self, body: dict[str, object]) -> httpx.Response:
        self.failures.append(str(body["reason"]))
        return httpx.Response(200, json={})

    def _renew(self, body: dict[str, object]) -> httpx.Response:
        self.renewals += 1
        return httpx.Response(200, json={"expires_at": 0.0}) if self._is_live(body) else httpx.Response(409, json={})

    def _release(self, body: dict[str, object]) -> httpx.Response:
        if not self._is_live(body):
            return httpx.Response(409, json={})
        assert self.lease is not None
        drop = body["drop"]
        assert isinstance(drop, dict)
        self.released.append((str(body["reason"]), drop))
        self.waiting += [sample for sample in self.lease.samples if sample.sample_id not in drop]
        self.lease = None
        return httpx.Response(200, json={})

    def _commit(self, body: dict[str, object]) -> httpx.Response:
        commit = Commit.model_validate(body)
        if commit.lease_id in self.commits:
            return httpx.Response(200, json={"weight_version": self.commits[commit.lease_id]})
        if not self._is_live(body) or commit.parent != self.tip.weight_version:
            return httpx.Response(409, json={"error": {"message": "the lease is over"}})
        version = self.tip.weight_version + 1
        self.commits[commit.lease_id] = version
        self.tip = self.tip.model_copy(update={"weight_version": version, "folder": commit.manifest.folder})
        self.lease = None
        return httpx.Response(200, json={"weight_version": version})

    def expire(self) -> None:
        assert self.lease is not None
        self.waiting, self.lease = [*self.lease.samples], None

    def _is_live(self, body: dict[str, object]) -> bool:
        return self.lease is not None and (body["lease_id"], body["fence"]) == (self.lease.lease_id, self.lease.fence)


class CountingLearner:
    """Its weights are the number of steps and of samples it learned."""

    kind = WeightKind.LORA
    base_hash = "base"

    def __init__(self) -> None:
        self.state = {"steps": -1, "samples": -1}
        self.loads: list[tuple[str | None, bool]] = []
        self.during: Callable[[Callable[[], None]], Step | NoStep | None] = lambda between: None

    def load(self, folder: Path | None, *, fresh_moments: bool) -> None:
        self.loads.append((None if folder is None else folder.name, fresh_moments))
        self.state = {"steps": 0, "samples": 0} if folder is None else json.loads((folder / "weights").read_text())

    def step(self, samples: Sequence[Sample], between: Callable[[], None], parent: int | None = None) -> Step | NoStep:
        between()
        self.state = {"steps": self.state["steps"] + 1, "samples": self.state["samples"] + len(samples)}
        return self.during(between) or Step({"loss": 1.0})

    def write(self, folder: Path) -> str:
        (folder / "weights").write_text(json.dumps(self.state))
        (folder / checkpoint.OPTIMIZER_FILE).write_text("moments")
        return "weights"


class Bench:
    def __init__(self, data_dir: Path, api: FakeApi) -> None:
        self.data_dir, self.api, self.stop = data_dir, api, threading.Event()
        self.restart()

    def restart(self, *, on_hang: Callable[[], None] = lambda: None) -> None:
        self.learner = CountingLearner()
        client = TrainerClient("http://server", "t", transport=httpx.MockTransport(self.api), sleep=lambda _: None)
        session = LeaseSession(client, "test", self.stop, wait_s=0.0, on_hang=on_hang)
        self.loop = TrainerLoop(session, self.learner, self.data_dir)

    @property
    def folders(self) -> list[str]:
        return sorted(entry.name for entry in (self.data_dir / "versions").glob("*"))

    @property
    def tip_weights(self) -> dict[str, int]:
        assert self.api.tip.folder is not None
        weights: dict[str, int] = json.loads((self.data_dir / self.api.tip.folder / "weights").read_text())
        return weights

    @property
    def remembers_a_lease(self) -> bool:
        return (self.data_dir / LEASE_FILE).exists()
