"""Episodes on real parts: scripted harnesses over HTTP, the server, the embedded engine and the trainer's process, to a
trained batch with the advantages of a group worked by hand. Then a server that is killed between each of the calls."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.host import Host
from harness.model import Vocabulary

from openclaw_rl.ledger import audit
from openclaw_rl.ledger import open as ledger_open
from openclaw_rl.testing.running_server import RunningServer, running_stub

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1200)]

LETTERS = 90
"""Ids below this one are letters and signs, in the small model of words."""
KEY = {"Authorization": "Bearer sk-test"}
ARGUMENTS = (
    *("--method", "agent", "--set", "trainer.nice=0", "--set", "episodes.groups_per_step=1"),
    *("--set", "server.api_keys=[{key='sk-test', user='uma'}, {key='sk-bob', user='bob'}]"),
    *("--set", "publisher.max_step_kl=1000", "--set", "publisher.max_base_kl=1000"),
)


class Forked(RunningServer):
    """A server that is forked from a process with everything imported: many starts of it cost little."""

    def __init__(self, host: Host, folder: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(folder / "data")
        self._host, self._folder, self._settings = host, folder, settings
        self._running = ExitStack()

    def start(self) -> None:
        self._forked = self._running.enter_context(self._host.running(self._folder, self._settings))
        self.url = self._forked.url

    def kill(self) -> None:
        self._forked.kill()
        self._running.close()

    def stop(self) -> None:
        self._running.close()


class Harness:
    """A client that can set nothing but a base URL. It keeps its own history."""

    def __init__(self, server: RunningServer, opened: Any, *, task: str = "Do it.") -> None:
        self.server, self.name = server, opened["episode_id"]
        self.history: list[Any] = [{"role": "system", "content": "You act."}, {"role": "user", "content": task}]

    def act(self, observation: str, *, max_tokens: int = 6, keeps_reply: bool = True) -> str:
        """Ask for an action; the next request will bring the observation. Return the turn's id.

        A reply of one token is cut, whatever the model samples.
        """
        body = {"model": "policy", "messages": self.history, "max_tokens": max_tokens, "temperature": 1}
        body["ignore_eos"] = max_tokens == 1
        base_url = f"{self.server.url}/v1/episodes/{self.name}/v1"
        reply = httpx.post(f"{base_url}/chat/completions", json=body, headers=KEY, timeout=300)
        assert reply.status_code == 200, reply.text
        if keeps_reply:
            self.history.append(reply.json()["choices"][0]["message"])
        self.history.append({"role": "user", "content": observation})
        return str(reply.json()["id"])


def call(server: RunningServer, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
    reply = httpx.request(method, f"{server.url}{path}", json=body, headers=KEY, timeout=120)
    assert reply.status_code == status, reply.text
    return reply.json()


def opened(server: RunningServer, name: str, **more: Any) -> Any:
    return call(server, "POST", "/v1/episodes", {"episode_id": name, "task": "t", **more}, status=201)


def ended(server: RunningServer, name: str, reward: float) -> Any:
    return call(server, "POST", f"/v1/episodes/{name}/outcome", {"reward": reward})


def findings(server: RunningServer) -> list[str]:
    db = ledger_open.connect(server.data_dir / "ledger.sqlite3", read_only=True)
    try:
        return audit.audit(db, is_deep=True)
    finally:
        db.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, short_model: Path) -> Iterator[RunningServer]:
    arguments = [*ARGUMENTS, "--set", f"model.path={short_model}"]
    with RunningServer(tmp_path_factory.mktemp("episodes") / "data", arguments) as server:
        yield server
        assert findings(server) == []


def test_scripted_episodes_become_a_trained_batch_with_the_advantages_of_their_group(server: RunningServer) -> None:
    names = ("two", "one", "other")
    agents = {name: Harness(server, opened(server, name, group="g", group_size=3)) for name in names}
    # As mini-swe-agent: a reply that `max_tokens` cut is not in the next request, which says only what was wrong.
    cut = agents["two"].act("Your reply was cut.", max_tokens=1, keeps_reply=False)
    last = agents["two"].act("unseen")
    turns = [agents[name].act("unseen") for name in ("one", "other")]
    record = server.wait_for_turn(cut, "judged", 60)
    assert [message["content"] for message in record["next_state"]["messages"]] == ["Your reply was cut."]
    assert (record["turn"]["finish_reason"], record["answered_by"]) == ("length", server_request(server, last))
    assert (record["verdict"]["value"], record["verdict"]["rationale"]) == (-1, "the reply was cut")
    for name, reward in (("two", 1.0), ("one", -1.0), ("other", 0.0)):
        assert ended(server, name, reward)["state"] == "ended"
    server.wait_for("the batch is trained on", lambda now: now["serving"] >= 1, 300)

    # R: 0 and 1; -1; 0. Step 1 has mean -1/3 and variance 2/9, step 2 has one member: its outcome among 1, -1 and 0.
    spread, alone = math.sqrt(2) / 3, 1 / math.sqrt(2 / 3)
    expected = {cut: (0.0, 1 / 3 / spread), last: (1.0, alone), turns[0]: (-1.0, -2 / 3 / spread)}
    expected[turns[1]] = (0.0, 1 / 3 / spread)
    found = {
        turn["id"]: (turn["reward"], turn["advantage"])
        for name in names
        for turn in call(server, "GET", f"/v1/episodes/{name}")["turns"]
    }
    assert found == {name: (pytest.approx(r), pytest.approx(a)) for name, (r, a) in expected.items()}
    for turn_id in expected:
        record = server.wait_for_turn(turn_id, "trained", 60)
        assert record["sample"]["advantage"] == found[turn_id][1]
        assert record["request"]["step"] == (2 if turn_id == last else 1)
    admin = {"Authorization": f"Bearer {(server.data_dir / 'keys' / 'admin.key').read_text().strip()}"}
    metrics = httpx.get(f"{server.url}/metrics", headers=admin, timeout=60).text
    figures = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("openclaw_rl_step{"))
    assert float(figures['openclaw_rl_step{figure="advantage_max"}']) == pytest.approx(alone)
    assert float(figures['openclaw_rl_step{figure="samples"}']) == 4


def server_request(server: RunningServer, turn_id: str) -> str:
    return str(server.admin("GET", f"/v1/turns/{turn_id}")["request"]["request_id"])


def test_what_has_no_contrast_or_was_given_up_or_evaluates_trains_nothing_and_is_counted(server: RunningServer) -> None:
    trained = server.status()["counts"]["trained"]
    for name in ("flat-1", "flat-2"):
        Harness(server, opened(server, name, group="flat", group_size=2)).act("unseen")
    for name in ("flat-1", "flat-2"):
        ended(server, name, 1.0)
    for name in ("small-1", "small-2"):
        Harness(server, opened(server, name, group="small", group_size=2)).act("unseen")
    ended(server, "small-1", 1.0)
    call(server, "POST", "/v1/episodes/small-2/abort", {"reason": "no container"})
    watched = Harness(server, call(server, "POST", "/v1/episodes", {"task": "held out", "split": "eval"}, status=201))
    watched.act("seen")
    watched.act("unseen")
    ended(server, watched.name, 0.5)
    wanted = {"no_contrast": 2, "group_too_small": 1, "episode_aborted": 1, "eval": 2}
    server.wait_for(
        "all are counted",
        lambda now: all(now["counts"].get(f"dropped.{reason}") == n for reason, n in wanted.items()),
        60,
    )
    assert server.status()["counts"]["trained"] == trained
    admin = {"Authorization": f"Bearer {(server.data_dir / 'keys' / 'admin.key').read_text().strip()}"}
    metrics = httpx.get(f"{server.url}/metrics", headers=admin, timeout=60).text
    for reason, n in wanted.items():
        assert f'openclaw_rl_ledger{{what="dropped.{reason}"}} {n}.0\n' in metrics
    call(server, "POST", "/v1/episodes", {"task": "held out"}, status=409)


def test_a_foreign_or_ended_episode_takes_no_chat(server: RunningServer) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for key, name, status in (("sk-bob", "two", 404), ("sk-test", "two", 409), ("sk-test", "x" * 10_000, 404)):
        url, headers = f"{server.url}/v1/episodes/{name}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == status


def test_a_server_killed_between_any_two_calls_loses_nothing_and_doubles_nothing(
    host: Host, model_folder: Path, tmp_path: Path
) -> None:
    token = {"Authorization": "Bearer trainer-token-of-a-test"}
    (end,) = Vocabulary.of(model_folder).ids(["<eos>"])
    ids = ("--low-id", "0", "--high-id", str(LETTERS), "--end-id", str(end))
    with running_stub(tmp_path, "--tokens-per-s", "0", "--mean-tokens", "4", *ids) as engine:
        settings = {
            "method.name": "agent",
            "episodes.groups_per_step": 1,
            "server.api_keys": [{"key": "sk-test", "user": "uma"}],
            "server.trainer_token": "trainer-token-of-a-test",
            "engine.kind": "url",
            "engine.url": engine,
            "trainer.kind": "external",
        }
        with Forked(host, tmp_path, settings) as server:

            def killed() -> None:
                server.kill()
                server.start()
                assert findings(server) == []

            agents = {}
            for name in ("a", "b"):
                first = opened(server, name, group="g", group_size=2)
                killed()
                assert opened(server, name, group="g", group_size=2) | {"base_url": ""} == first | {"base_url": ""}
                agents[name] = Harness(server, first)
            turns = []
            for name in ("a", "a", "b"):
                turns.append(agents[name].act("seen"))
                killed()
            for name, reward in (("a", 1.0), ("b", -1.0)):
                before = ended(server, name, reward)
                killed()
                after = ended(server, name, reward)
                assert after["outcome"] == before["outcome"]
            server.wait_for("the group has its credit", lambda now: now["counts"].get("groups.scored") == 1, 60)
            killed()
            for _ in range(2):  # the answer to the first is lost
                asked = {"trainer": "test", "wait_s": 30}
                reply = httpx.post(f"{server.url}/v1/trainer/lease", json=asked, headers=token, timeout=60)
                lease = reply.json()["lease"]
                killed()
            samples = {sample["sample_id"]: sample["advantage"] for sample in lease["samples"]}
            assert samples == {turns[0]: 1.0, turns[1]: 1.0, turns[2]: -1.0}
            steps = [turn for name in ("a", "b") for turn in call(server, "GET", f"/v1/episodes/{name}")["turns"]]
            assert [(turn["id"], turn["step"]) for turn in steps] == [(turns[0], 1), (turns[1], 2), (turns[2], 1)]
            assert {turn["id"]: turn["advantage"] for turn in steps} == samples
            assert server.status()["counts"]["episodes.ended"] == 2
