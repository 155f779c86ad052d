"""Check of the ledger under SIGKILL of real processes, while real chats run: server, embedded engine, LoRA trainer.

    scripts/e2e.sh kill_real FOLDER [--kills 18] [--seed 0] [--log scripts/benchmarks/results/kill_real.log]
        [--practice] [--users 3] [any flag of `openclaw-rl serve`]

SIGKILL comes at a random moment, every other time while a training step runs. This script restarts the server; the
server restarts its children. After each kill the ledger is audited from its file alone, for a killed server before
another process opens it. Every reply that a client saw finish must be in it, word for word. No sample may be trained
twice. The serving weights must be those of their row. A kill of the engine or the trainer must not cut a chat: the
server holds it until it can finish. At the end the last samples are trained and the newest version serves. The exit
code is 1 if the audit has a finding.

With `--practice` the method is OPD, and one person pauses between chats. The kills come in turn while practice samples
and scores, waits for the trainer, is trained, and is published. No practice reply may be taken for a user's turn.

With `--users` each person is a user with a policy of the own, on an engine with two places. No reply, of a chat or of
practice, may be by a version of another user.
"""

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from openclaw_rl.testing.running_server import RunningServer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "integration"))
from openclaw_rl.ledger import records
from openclaw_rl.testing.ledger_audit import audit, open_read_only

ANSWERS = ("No, that is wrong. Shorter please.", "Thanks, that is perfect!")
STEP_WAIT_S, REST_S = 90.0, 300.0
PRACTICE = (
    *("--method", "opd", "--set", "practice.idle_s=0.5", "--set", "practice.replies=3"),
    *("--set", "practice.max_tokens=8", "--set", "practice.max_updates=1000", "--set", "practice.patience=1000"),
)
"""Flags of a server that practises whenever nobody chats."""


PHASES: dict[str, Callable[[Any], bool]] = {
    "samples": lambda now: now["practice"]["waits"] is None,
    "waits": lambda now: now["counts"].get("practice.sampled", 0) > 0,
    "is trained": lambda now: now["counts"].get("practice.leased", 0) > 0,
    "publishes": lambda now: now["tip"] > now["serving"],
}
"""Phases of practice, as `/v1/admin/status` tells them."""


class Household(RunningServer):
    """A server with a policy for each user."""

    def status(self) -> Any:
        """Return the status, with sums over the policies: equal where the newest version of each one serves."""
        policies = self.admin("GET", "/v1/admin/policies")["policies"]
        sums = {name: sum(row[name] for row in policies) for name in ("serving", "tip")}
        return super().status() | sums


def flags_of(users: Sequence[str]) -> list[str]:
    """Return the flags of a server with a policy for each of these users, and few places for their adapters."""
    keys = ",".join(f"{{key='{key_of(user)}',user='{user}'}}" for user in users)
    chosen = {"server.api_keys": f"[{keys}]", "policies.mode": "per_user", "policies.loaded": "2"}
    return [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")] if users else []


def key_of(user: str) -> str:
    return f"sk-{user}-5up3r"


def foreign(ledger: Path) -> Iterator[str]:
    """Yield the replies that are not of their own user's policy, by their row or by a version that sampled them."""
    with closing(open_read_only(ledger)) as db:
        policies = dict(db.execute("SELECT weight_version, policy FROM version").fetchall())
        rows = db.execute("SELECT id, turn.policy, user FROM turn JOIN request USING (id) ORDER BY id")
        for row, policy, user in rows.fetchall():
            turn = records.read_turn(db, row)
            of = {policy, *(policies[run.weight_version] for run in turn.versions)}
            if of != {f"user:{user}"}:
                yield f"{turn.turn_id} of {user} is of {sorted(of)}"


@dataclass(frozen=True, slots=True)
class Seen:
    """Reply whose finish a client saw."""

    turn_id: str
    text: str


@dataclass(slots=True)
class Chats:
    """Clients with two-turn sessions, one after the other, each in a thread."""

    server: RunningServer
    seen: list[Seen] = field(default_factory=list)
    cuts: list[tuple[float, float, str]] = field(default_factory=list)
    """Requests that did not finish: start, end, error."""
    stop: threading.Event = field(default_factory=threading.Event)
    pause_s: float = 0.0
    """Between two sessions of one person."""
    users: tuple[str, ...] = ()
    """The user that each person is; none: nobody has a key."""

    def start(self, people: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._chat, args=(person,), daemon=True) for person in range(people)]
        for thread in threads:
            thread.start()
        return threads

    def _chat(self, person: int) -> None:
        number = 0
        while not self.stop.is_set():
            number += 1
            session = f"chat-{person}-{number}"
            messages = [{"role": "user", "content": f"Give me one tip, number {number}."}]
            reply = self._until_answered(messages, session, person)
            answer = {"role": "user", "content": ANSWERS[number % 2]}
            self._until_answered([*messages, {"role": "assistant", "content": reply}, answer], session, person)
            self.stop.wait(self.pause_s)

    def _until_answered(self, messages: list[dict[str, str]], session: str, person: int) -> str:
        while not self.stop.is_set():
            begun = time.monotonic()
            try:
                return self._ask(messages, session, person)
            except (httpx.HTTPError, ConnectionError) as error:
                self.cuts.append((begun, time.monotonic(), repr(error)))
                time.sleep(0.5)
        return ""

    def _ask(self, messages: list[dict[str, str]], session: str, person: int) -> str:
        body = {"messages": messages, "stream": True, "max_tokens": 24}
        text, turn_id, is_finished = "", "", False
        url = f"{self.server.url}/v1/chat/completions"
        headers = {"X-Session-Id": session}
        if self.users:
            headers["Authorization"] = f"Bearer {key_of(self.users[person])}"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=300) as reply:
            if reply.status_code != 200:
                raise ConnectionError(f"{reply.status_code} {reply.read()[:200]!r}")
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ConnectionError(event["error"]["message"])
                    turn_id = event["id"]
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
                        if choice["finish_reason"] is not None and not is_finished:
                            is_finished = True
                            self.seen.append(Seen(turn_id, text))  # from here on the ledger must have it
        if not is_finished:
            raise ConnectionError("the stream ended without its finish")
        return text


class Campaign:
    def __init__(
        self, server: RunningServer, chats: Chats, dice: random.Random, say: Callable[[str], None], *, in_practice: bool
    ) -> None:
        self._server, self._chats, self._dice, self._say = server, chats, dice, say
        self._in_practice = in_practice
        self._outages: list[tuple[float, float]] = []
        """Intervals without a server."""
        self._judged = 0
        self._started = time.monotonic()
        self.findings: list[str] = []

    def kill(self, number: int, target: str) -> None:
        during = "idle"
        if self._in_practice:
            during = list(PHASES)[number // 3 % len(PHASES)]  # each target meets each phase
            during = during if self._comes(PHASES[during]) else f"no {during}"
        elif number % 2:
            during = "in a step" if self._comes(lambda now: _leased(now["counts"]) > 0) else "no step came"
        time.sleep(self._dice.uniform(0, 1.0) if self._in_practice else self._dice.uniform(1, 8))
        killed = time.monotonic()
        if target == "server":
            self._server.kill()
            found = self._audit()
            self._server.start()
            self._outages.append((killed, time.monotonic()))
        else:
            self._server.kill_child(target, 300)
            found = self._audit()
        back_s = time.monotonic() - killed
        found += self._cut_without_cause()
        self.findings += found
        status = self._server.status()
        self._say(
            f"{killed - self._started:6.1f} s: kill {number:2} {target:7} ({during:12}) whole again after"
            f" {back_s:5.1f} s, {len(self._chats.seen):4} replies finished, {len(self._chats.cuts):3} requests cut,"
            f" {status['counts']['trained']:3} trained, version {status['serving']} serves,"
            f" {status['counts'].get('practice', 0):3} practice replies, findings {found}"
        )

    def rest(self) -> None:
        """Wait until the last samples are trained and the newest version serves; audit the ledger."""

        def is_so(now: Any) -> bool:
            moving = sum(now["counts"][state] for state in ("running", "paired", "judged", "sampled", "leased"))
            if now["counts"]["sampled"]:
                self._server.admin("POST", "/v1/admin/train", {})
            return not moving and now["serving"] == now["tip"] and not now["problems"]

        status = self._server.wait_for("everything came to rest", is_so, REST_S)
        found = self._audit()
        with closing(open_read_only(self._server.data_dir / "ledger.sqlite3")) as db:
            folders = db.execute("SELECT folder FROM version WHERE folder IS NOT NULL").fetchall()
        named = {Path(folder).name for (folder,) in folders}
        left = {folder.name for folder in (self._server.data_dir / "versions").iterdir()}
        if left - named:
            found.append(f"no version names the folders {sorted(left - named)}")
        found += self._cut_without_cause()
        self.findings += found
        self._say(
            f"at rest: {len(self._chats.seen)} acknowledged replies, version {status['serving']} serves and is the"
            f" newest, {status['counts']}, findings {found}"
        )

    def _comes(self, is_so: Callable[[Any], bool]) -> bool:
        try:
            self._server.wait_for("the moment of the kill", is_so, STEP_WAIT_S)
        except TimeoutError:
            return False
        return True

    def _audit(self) -> list[str]:
        ledger = self._server.data_dir / "ledger.sqlite3"
        found = audit(ledger, list(self._chats.seen), is_deep=True)
        return [*found, *(foreign(ledger) if self._chats.users else ())]

    def _cut_without_cause(self) -> list[str]:
        """Return findings for requests that were cut while the server ran."""
        cuts: Sequence[tuple[float, float, str]] = self._chats.cuts[self._judged :]
        self._judged += len(cuts)
        return [
            f"a chat was cut while the server was there: {why}"
            for begun, ended, why in cuts
            if not any(begun <= back and ended >= gone for gone, back in self._outages)
        ]


def _leased(counts: Any) -> int:
    return int(counts["leased"] + counts.get("practice.leased", 0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=18)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--practice", action="store_true", help="OPD, and pauses in which it practises")
    parser.add_argument("--users", type=int, default=0, help="users with a policy each; 0: one policy for three people")
    options, more = parser.parse_known_args()
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    flags = ["--batch-size", "4", *PRACTICE] if options.practice else ["--batch-size", "2"]
    users = tuple(f"user-{number}" for number in range(options.users))
    kind = Household if users else RunningServer
    with kind(options.folder.absolute(), [*flags, *flags_of(users), *more]) as server:
        chats = Chats(server, pause_s=20.0 if options.practice else 0.0, users=users)
        people = chats.start(len(users) or (1 if options.practice else 3))
        campaign = Campaign(server, chats, random.Random(options.seed), say, in_practice=options.practice)
        for number in range(1, options.kills + 1):
            campaign.kill(number, ("server", "engine", "trainer")[number % 3])
        chats.stop.set()
        for person in people:
            person.join(300)
        campaign.rest()
    say(f"{options.kills} kills, {len(chats.seen)} acknowledged replies, {len(campaign.findings)} findings")
    if options.log:
        options.log.write_text("\n".join(lines) + "\n")
    return 1 if campaign.findings else 0


if __name__ == "__main__":
    sys.exit(main())
