"""A policy for each user on the real parts: server, embedded engine and local trainer, with two places for adapters.

A reply's log-probs show the weights that gave it: the same prompt, greedily, under the same weights gives the same.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest

from openclaw_rl.testing.running_server import RunningServer

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

USERS = ("ann", "bob", "eve")
KEYS = ",".join(f"{{key='sk-{user}',user='{user}'}}" for user in USERS)
ARGUMENTS = (
    *("--batch-size", "2", "--set", f"server.api_keys=[{KEYS}]", "--set", "trainer.nice=0"),
    *("--set", "policies.mode=per_user", "--set", "policies.loaded=2", "--set", "practice.enabled=false"),
)


@pytest.fixture(scope="module")
def household(tmp_path_factory: pytest.TempPathFactory, short_model: Path) -> Iterator[RunningServer]:
    arguments = [*ARGUMENTS, "--set", f"model.path={short_model}"]
    with RunningServer(tmp_path_factory.mktemp("household") / "data", arguments) as server:
        yield server


def chat(server: RunningServer, user: str, messages: Sequence[Any], session: str, **more: Any) -> httpx.Response:
    body = {"model": "policy", "messages": list(messages), "max_tokens": 8, **more}
    headers = {"Authorization": f"Bearer sk-{user}", "X-Session-Id": session}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply


@dataclass(frozen=True)
class Said:
    """Log-probs of one reply. Two are equal where the same weights gave them: a cached prefix rounds otherwise."""

    log_probs: tuple[float, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Said) and self.log_probs == pytest.approx(other.log_probs, abs=1e-3)


def weights(server: RunningServer, user: str) -> tuple[int, Said]:
    """Return the version that answers a user, and what its weights say to a fixed prompt."""
    asked = [{"role": "user", "content": "Say a word."}]
    reply = chat(server, user, asked, "side", temperature=0, ignore_eos=True, logprobs=True, turn_type="side")
    said = reply.json()["choices"][0]["logprobs"]["content"]
    return int(reply.headers["x-weight-version"]), Said(tuple(entry["logprob"] for entry in said))


def teach(server: RunningServer, user: str) -> None:
    """Give the user's policy one batch, whose two turns are judged."""
    for number, answer in enumerate(("No, that is wrong. Shorter please.", "Thanks, that is perfect!")):
        asked = {"role": "user", "content": f"Tell me of the number {number}."}
        text = chat(server, user, [asked], f"{user}{number}").json()["choices"][0]["message"]["content"]
        again = [asked, {"role": "assistant", "content": text or "."}, {"role": "user", "content": answer}]
        chat(server, user, again, f"{user}{number}")


def of_policies(server: RunningServer) -> dict[int, str]:
    with closing(sqlite3.connect(f"file:{server.data_dir / 'ledger.sqlite3'}?mode=ro", uri=True)) as db:
        return dict(db.execute("SELECT weight_version, policy FROM version").fetchall())


def test_each_user_is_answered_by_what_that_user_taught(household: RunningServer) -> None:
    server = household
    before = {user: weights(server, user) for user in USERS}
    assert all(said == before["ann"][1] for _, said in before.values()), "each begins at the base"
    assert len({version for version, _ in before.values()} | {0}) == 4, "under a version of its own"
    taught: dict[str, tuple[int, Said]] = {}
    for user in USERS:
        teach(server, user)
        server.wait_for(
            f"{user}'s version serves", lambda _, user=user: weights(server, user)[0] != before[user][0], 300
        )
        taught[user] = weights(server, user)
        assert of_policies(server)[taught[user][0]] == f"user:{user}"
        for other in USERS:
            assert weights(server, other) == taught.get(other, before[other]), f"{other}, after {user} taught"
    for one, other in combinations([*taught.values(), before["ann"]], 2):
        assert one[1] != other[1], "all four differ"

    forgotten = server.admin("POST", "/v1/admin/forget", {"user": "ann", "everything": True})
    assert taught["ann"][0] in forgotten["removed"]
    version, said = weights(server, "ann")
    assert said == before["ann"][1], "the base's again, and nothing of what was taught"
    assert version > max(number for number, _ in taught.values())
    assert {user: weights(server, user) for user in ("bob", "eve")} == {user: taught[user] for user in ("bob", "eve")}
    assert b"user:ann" not in b"".join(
        policy.encode() for number, policy in of_policies(server).items() if number < version
    )
    kept = {folder.name for folder in (server.data_dir / "versions").iterdir()}
    assert len(kept) == 2, kept
    server.kill()
    server.start()
    assert {user: weights(server, user) for user in ("bob", "eve")} == {user: taught[user] for user in ("bob", "eve")}
