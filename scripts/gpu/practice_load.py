"""A user of a check who corrects a few replies and goes away, and what the server makes of it: versions, shares, marks.

The stages `practice_opd`, `practice_combine` and the node's `practice` share these parts.
"""

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chat_load import Reply, chat, quantile
from gpu.guided_teacher import Reading
from gpu.stages import Figures
from openclaw_rl.testing.running_server import RunningServer

QUESTIONS = (
    "How do I boil an egg?",
    "How do I keep bread fresh?",
    "How do I store potatoes?",
    "How do I fall asleep on a hot night?",
)
CORRECTION = "No, that is far too long. Shorter, in one or two short sentences."
READING = Reading(guidance=2.0, neutral="Thank you.")
SETTINGS = (
    f"method.guidance={READING.guidance:g}", "method.request_guidance=0", f'method.neutral_hint="{READING.neutral}"',
    "method.hint_source=verbatim", "method.teacher=base", "practice.idle_s=1", "publisher.keep_versions=100",
    # No figure may end the practice: chats are to meet it.
    "practice.stop_share=1000", "practice.max_kl=1000", "practice.patience=1000", "practice.max_updates=1000",
)  # fmt: skip
NEWEST = 200
LEAST_LEARNED = 0.02
PROBES = 6
PROBE_TOKENS = 64
CUT = "a chat runs"
"""Reason of practice to wait."""
QUICK_S = 0.02


def correct(server: RunningServer, *, max_tokens: int) -> None:
    """Hold one short chat for each question, at once; its second message corrects the first reply."""

    async def talk(client: httpx.AsyncClient, question: str) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        for said in (CORRECTION, None):
            reply = await chat(client, messages, session=question, max_tokens=max_tokens)
            if reply.error is not None:
                raise RuntimeError(f"a chat failed: {reply.error}")
            if said is not None:
                messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": said}]

    async def all_of_them() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            await asyncio.gather(*(talk(client, question) for question in QUESTIONS))

    asyncio.run(all_of_them())


@dataclass
class Progress:
    """Shares of the wish, and practised versions, as the server tells of them."""

    began: float = field(default_factory=time.monotonic)
    shares: dict[int, float | None] = field(default_factory=dict)
    """By the version that was measured."""
    practised: dict[int, int] = field(default_factory=dict)
    """Practice replies of each version."""
    serving: int = 0
    ready_s: dict[int, float] = field(default_factory=dict)
    """Seconds from the last correction until the version served."""
    wish: dict[str, Any] = field(default_factory=dict)

    def look(self, server: RunningServer) -> None:
        self.serving = int(server.status()["serving"])
        self.ready_s.setdefault(self.serving, round(time.monotonic() - self.began, 1))
        wishes = httpx.get(f"{server.url}/v1/wishes", timeout=30).json()["wishes"]
        if wishes:
            (self.wish,) = wishes  # equal words are one wish
            if self.wish["measured_in"] is not None:
                self.shares[self.wish["measured_in"]] = self.wish["learned_share"]
        for row in server.admin("GET", "/v1/admin/history?versions=50&verdicts=1")["versions"]:
            if row["batch"] is not None and row["batch"]["practice"]:
                self.practised[row["weight_version"]] = row["batch"]["practice"]

    @property
    def served(self) -> list[int]:
        """Versions that practised and have served, or were passed by a newer one."""
        return sorted(version for version in self.practised if version <= self.serving)

    def figures(self) -> Figures:
        return {
            "practised versions that served": self.served,
            "practice replies of each": self.practised,
            "s from the last correction to serving, by version": self.ready_s,
            "learned share by version": {version: share and round(share, 3) for version, share in self.shares.items()},
            "the wish": {
                key: self.wish.get(key) for key in ("text", "state", "rests", "practised", "updates", "since", "kl")
            },
        }

    def findings(self, updates: int, *, must_learn: bool) -> list[str]:
        """must_learn: False where the share need not rise: a table of 20 ids holds little of random weights' mass."""
        found = [f"only {len(self.served)} practised versions served"] * (len(self.served) < updates)
        measured = [share for _, share in sorted(self.shares.items()) if share is not None]
        if len(measured) < 2:
            found.append(f"the learned share was not measured: {measured}")
        elif must_learn and not (measured[-1] > measured[0] and max(measured) > LEAST_LEARNED):
            found.append(f"the learned share does not rise: {measured}")
        said = [] if not self.wish else [str(self.wish["text"])]
        return found + ["the wish is not the user's words"] * (said != [CORRECTION])


def practised(server: RunningServer, *, updates: int, timeout_s: float, measures: bool = True) -> Progress:
    """Wait until so many practised versions have served, and the share was measured under the last of them."""
    progress, end = Progress(), time.monotonic() + timeout_s
    while time.monotonic() < end:
        progress.look(server)
        is_measured = not measures or max(progress.shares, default=0) >= max(progress.served, default=1)
        if len(progress.served) >= updates and is_measured:
            break
        time.sleep(0.3)
    return progress


# -- chats that meet practice ------------------------------------------------------------------------------------------


def latency(server: RunningServer, timeout_s: float) -> Figures:
    """Begin chats while replies are practised, then while learning is paused; compare the times to the first token.

    Learning is paused at the return.
    """
    began: list[Reply] = []
    said = Counter[str]()
    end = time.monotonic() + timeout_s
    while len(began) < PROBES and _until_practising(server, end):
        reply, waits = asyncio.run(_probe(server, f"met-{sum(said.values())}"))
        said[waits] += 1
        if waits == CUT or reply.error is not None:  # else its round was over before the chat began
            began.append(reply)
    server.admin("POST", "/v1/admin/learning", {"on": False})
    _until_quiet(server, 60)
    calm = [asyncio.run(_probe(server, f"calm-{number}"))[0] for number in range(PROBES)]
    errors = [reply.error for reply in (*began, *calm) if reply.error is not None]
    first = {"met": _firsts(began), "calm": _firsts(calm)}
    findings = [f"a chat failed: {error}" for error in errors[:2]]
    findings += [f"only {len(began)} chats ended a round of practice"] * (len(began) < PROBES // 2)
    return {
        "time to first token of chats that ended a round, s": first["met"],
        "of the same chats while learning is paused, s": first["calm"],
        "added, median s": round(quantile(first["met"], 0.5) - quantile(first["calm"], 0.5), 4),
        "added, largest s": round(max(first["met"], default=0.0) - max(first["calm"], default=0.0), 4),
        "practice says beside them": dict(said),
        "findings": findings,
    }


def _firsts(replies: Sequence[Reply]) -> list[float]:
    return sorted(round(reply.token_times[0] - reply.started, 4) for reply in replies if reply.token_times)


def _until_practising(server: RunningServer, end: float) -> bool:
    """Wait until replies are being practised; return False at `end`."""
    while time.monotonic() < end:
        if server.status()["practice"]["waits"] is None:
            return True
        time.sleep(QUICK_S)
    return False


def _until_quiet(server: RunningServer, timeout_s: float) -> None:
    """Wait until the trainer has no batch and the newest version serves."""

    def is_so(now: Any) -> bool:
        return (
            not now["counts"].get("leased")
            and not now["counts"].get("practice.leased")
            and now["serving"] == now["tip"]
        )

    server.wait_for("the last step is over", is_so, timeout_s)


async def _probe(server: RunningServer, session: str) -> tuple[Reply, str]:
    """Chat once; return the reply, and the reason why practice waited while it ran."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        asked = [{"role": "user", "content": f"Name a colour, and say why you like it ({session})."}]
        running = asyncio.create_task(chat(client, asked, session=session, max_tokens=PROBE_TOKENS, ignore_eos=True))
        waits: set[str] = set()
        while not running.done():
            status = await asyncio.to_thread(server.status)
            waits.add(str(status["practice"]["waits"]))
            await asyncio.sleep(QUICK_S)
        return await running, CUT if CUT in waits else " / ".join(sorted(waits))


# -- marks -------------------------------------------------------------------------------------------------------------


def marks(server: RunningServer, records: Sequence[dict[str, Any]], out: Path) -> Figures:
    """Return how practice replies are marked in the turns' API, on the command line and in exports."""
    kinds = Counter(str(row["practice"]) for row in records)
    findings = [
        f"{row['turn_id']}: a practice reply has a user's verdict or next state"
        for row in records
        if row["practice"] is not None and (row["next_state"] is not None or row["verdict"] is not None)
    ]
    listed = _says(server, "turns", "--limit", "40")
    exported = {}
    for what in ("turns", "samples"):
        file = out / f"export-{what}-{time.time_ns()}.jsonl"
        _says(server, "export", str(file), "--what", what)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        file.unlink()
        exported[what] = dict(Counter(str(row["practice"]) for row in rows))
    shown = server.admin("GET", "/v1/turns?limit=100&practice=true")["turns"]
    findings += ["the turns that are asked for as practice are others"] * any(row["practice"] is None for row in shown)
    findings += ["`turns` names no practice"] * ("practice: wish" not in listed)
    for name, found in (("records", kinds), *exported.items()):
        findings += [f"no reply to a wish is marked in the {name}: {dict(found)}"] * (not found.get("wish"))
    return {
        "records": dict(kinds),
        "export": exported,
        "`turns` names": listed.count("practice: "),
        "findings": findings,
    }


def _says(server: RunningServer, *words: str) -> str:
    argv = [sys.executable, "-m", "openclaw_rl", *words, "--data-dir", str(server.data_dir)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{words[0]}: {(done.stdout + done.stderr)[-500:]}")
    return done.stdout


def chosen(records: Sequence[dict[str, Any]], versions: Sequence[int], *, of_each: int) -> list[dict[str, Any]]:
    """Return so many records with a sample of each kind, of these versions."""
    found: list[dict[str, Any]] = []
    for version, kind in itertools.product(versions, ("wish", "anchor", None)):
        rows = [
            row
            for row in records
            if row["practice"] == kind and row["sample"] is not None and row["sample"]["scored_version"] == version
        ]
        found += rows[: of_each if kind == "wish" else max(1, of_each // 2)]
    return found
