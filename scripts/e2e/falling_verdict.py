"""Check that the server rolls back a method whose `score` returns the wrong sign, and never one with the true sign.

    scripts/e2e.sh falling_verdict FOLDER [--runs wrong:0 wrong:1 … true:2] [--out FILE.json] [--log FILE]

Real: the server as shipped (proxy, rules judge, ledger, Binary RL, gate, publisher, watch), the embedded 135M engine
and the local LoRA trainer. Their settings are the defaults for a third-party method, except the batch of 8 and the
gate's two bounds on distance, which are 10 nats. Here replies are a word or two and all alike in the end: they are
further from the base than the default bound of 3, and a step that turns them around is long. At the defaults the gate
may refuse the faulty versions before the watch sees them (one seed of three did); this check is about the watch alone.

Simulated: the users. Each asks "Yes or no: is it worth the effort to …?". It is content, in words that the judge reads,
when the reply begins with No, which the base does two times in three.

The fault is a method that is installed for these servers alone: Binary RL, with the sign of the reward reversed while a
file exists. The record of a turn, with the user's words and the judge's verdict, stays true. For HEALTHY turns users
talk to the base and the method makes no samples. Then it begins to learn, with the fault in a `wrong` run, without it
in a `true` run of as many turns. (A fault after some learning showed no effect where a policy already said No only: all
its rewards are alike then, and no sign changes it.)

The users are slower than training: they hold eight turns, four at a time, then wait until the version made of them
serves. With more turns meanwhile, the drop shows that many turns later.

The exit code is 1 if one of these does not hold. No request failed. Every recorded verdict follows the rule. The
rewards that the trainer got have the sign of the run. In a `wrong` run the watch rolls back within LIMIT turns after
the fault came, to a version that users like better. A `true` run is never rolled back and learns to its end, and users
like its last versions no less than the base. The log draws the curve of each run; the JSON has its figures.
"""

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from openclaw_rl.models.resolve import tokenizer_folder
from openclaw_rl.offline import personas
from openclaw_rl.settings import ModelSettings
from openclaw_rl.testing.running_server import RunningServer

BATCH, CHATS, HEALTHY, LIMIT, AFTERWARDS = 8, 4, 32, 100, 16
QUESTION = "Yes or no: is it worth the effort to {}?"
CONTENT, DISPLEASED = "Thanks, that is perfect!", "No, that is wrong."
MAX_TOKENS, STEP_S = 8, 400.0
METHOD = '''\
"""Binary RL that begins to learn once one file exists, with the reward's sign reversed while another exists."""

from dataclasses import replace
from pathlib import Path

from openclaw_rl.methods.base import Dropped
from openclaw_rl.methods.binary_rl import BinaryRL
from openclaw_rl.types import DropReason

BEGUN, FAULT = Path({begun!r}), Path({fault!r})


class WrongSign(BinaryRL):
    name = "wrong_sign"

    async def score(self, judged, tools):
        if not BEGUN.exists():
            return Dropped(DropReason.NEUTRAL, "learning has not begun")
        sample = await super().score(judged, tools)
        if isinstance(sample, Dropped) or sample.reward is None or not FAULT.exists():
            return sample
        return replace(sample, reward=-sample.reward)


METHOD = WrongSign()
'''


def likes(reply: str) -> bool:
    """Return True if the user's rule likes the reply."""
    return re.match(r"no\b", reply.strip().casefold()) is not None


def install(folder: Path, begun: Path, fault: Path) -> None:
    """Write the method as a package with an entry point, which servers find on PYTHONPATH."""
    info = folder / "wrong_sign-0.dist-info"
    info.mkdir(parents=True)
    (folder / "wrong_sign.py").write_text(METHOD.format(begun=str(begun), fault=str(fault)))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-sign\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[openclaw_rl.methods]\nwrong_sign = wrong_sign:METHOD\n")


class Switch:
    """File whose existence switches the method."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_there = False

    def comes(self) -> None:
        self._path.touch()
        self.is_there = True

    def goes(self) -> None:
        self._path.unlink(missing_ok=True)
        self.is_there = False


@dataclass(frozen=True, slots=True)
class Told:
    """Turn that its user has answered."""

    turn_id: str
    version: int
    verdict: int
    is_spoilt: bool
    """True if the user answered while the fault was on."""


@dataclass(slots=True)
class People:
    server: RunningServer
    client: httpx.AsyncClient
    dice: random.Random
    topics: Sequence[str]
    told: list[Told] = field(default_factory=list)
    begun: int = 0

    async def turns(self, count: int, *, is_spoilt: bool) -> None:
        """Hold `count` turns, CHATS at a time."""
        left = iter([self.dice.choice(self.topics) for _ in range(count)])
        async with asyncio.TaskGroup() as group:
            for _ in range(CHATS):
                group.create_task(self._chat(left, is_spoilt=is_spoilt))

    async def _chat(self, topics: Iterator[str], *, is_spoilt: bool) -> None:
        for topic in topics:
            self.begun += 1
            session = f"person-{self.begun}"
            messages = [{"role": "user", "content": QUESTION.format(topic)}]
            reply = await self._ask(session, messages, MAX_TOKENS)
            text = reply["choices"][0]["message"]["content"] or ""
            verdict = 1 if likes(text) else -1
            answer = {"role": "user", "content": CONTENT if verdict > 0 else DISPLEASED}
            await self._ask(session, [*messages, {"role": "assistant", "content": text}, answer], 1)
            self.told.append(Told(reply["id"], reply["version"], verdict, is_spoilt))

    async def _ask(self, session: str, messages: list[dict[str, str]], max_tokens: int) -> Any:
        body = {"messages": messages, "max_tokens": max_tokens}
        answer = await self.client.post("/v1/chat/completions", json=body, headers={"X-Session-Id": session})
        answer.raise_for_status()
        return answer.json() | {"version": int(answer.headers["x-weight-version"])}

    async def trained(self) -> None:
        """Wait until all answered turns are judged and trained on, and the version made of them serves."""

        def is_at_rest(now: Any) -> bool:
            counts = now["counts"]
            moving = any(counts[state] for state in ("running", "paired", "judged", "leased"))
            return not moving and counts["sampled"] < BATCH and now["serving"] == now["tip"]

        def is_done(now: Any) -> bool:
            return is_at_rest(now) or not now["learning"]

        await asyncio.to_thread(self.server.wait_for, "the batch is trained on", is_done, STEP_S)


def rollbacks(server: RunningServer) -> list[dict[str, Any]]:
    """Return the watch's alerts of rollbacks."""
    lines = (server.data_dir / "server.log").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return [event for event in events if event.get("event") == "rolled_back"]


def mean(told: Sequence[Told]) -> float:
    return round(sum(one.verdict for one in told) / len(told), 3)


async def campaign(
    server: RunningServer, begun: Switch, fault: Switch, *, is_wrong: bool, seed: int, say: Any
) -> dict[str, Any]:
    topics = [topic.text for topic in personas.topics("train")]
    started, fall_after, gone_back = time.monotonic(), None, None
    async with httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False) as client:
        people = People(server, client, random.Random(seed), topics)
        while len(people.told) < HEALTHY + LIMIT and gone_back is None:
            if len(people.told) >= HEALTHY and not begun.is_there:
                if is_wrong:
                    fault.comes()
                begun.comes()
            await people.turns(min(BATCH, HEALTHY + LIMIT - len(people.told)), is_spoilt=fault.is_there)
            await people.trained()
            newest = people.told[-BATCH:]
            learning = "true reward" if begun.is_there else "no learning yet"
            say(
                f"{time.monotonic() - started:5.0f} s  turn {len(people.told):3}"
                f"  {'reward turned around' if fault.is_there else learning:20}  version"
                f" {server.status()['serving']:2} serves, verdict of these turns {mean(newest):+.2f}"
                f" {bar(mean(newest))}"
            )
            gone_back = next(iter(rollbacks(server)), None)
        if gone_back is None:  # time for the watch to see the last answers
            await asyncio.sleep(12)
            gone_back = next(iter(rollbacks(server)), None)
        told = list(people.told)
        if gone_back is not None:
            fall_after = sum(one.is_spoilt for one in told)
            say(f"rolled back after {fall_after} turns: {gone_back}")
            fault.goes()
            await people.turns(AFTERWARDS, is_spoilt=False)
            await people.trained()
    return {
        "run": "wrong" if is_wrong else "true",
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "turns": len(told),
        "rolled back": gone_back,
        "turns from the fault to the rollback": fall_after,
        "of which by versions made of it": sum(one.version > 0 for one in told) if fall_after else None,
        "verdict of the base": mean([one for one in told if one.version == 0]),
        "verdict of the last 24 turns": mean(told[-24:]),
        "verdict after the rollback": mean(people.told[len(told) :]) if fall_after is not None else None,
        "verdicts by batch": [mean(told[at : at + BATCH]) for at in range(0, len(told), BATCH)],
        "versions": [
            {"version": row["weight_version"], "state": row["state"], "reason": row["reason"]}
            for row in server.status()["versions"]
        ],
        "failed": await asyncio.to_thread(failed, server, people.told, is_wrong=is_wrong, told=told, fall=gone_back),
    }


def failed(
    server: RunningServer, all_told: Sequence[Told], *, is_wrong: bool, told: Sequence[Told], fall: Any
) -> list[str]:
    """Return the conditions that do not hold."""
    found = []
    for one in all_told:
        record = server.admin("GET", f"/v1/turns/{one.turn_id}")
        if record["verdict"]["value"] != one.verdict:
            found.append(f"{one.turn_id}: the rule says {one.verdict}, the ledger {record['verdict']['value']}")
        wanted = -one.verdict if one.is_spoilt else one.verdict
        if record["sample"] is not None and record["sample"]["reward"] != wanted:
            found.append(f"{one.turn_id}: the trainer got {record['sample']['reward']}, not {wanted}")
    if is_wrong:
        if fall is None:
            found.append(f"no rollback within {LIMIT} turns of the fault")
        elif mean(all_told[len(told) :]) <= fall["after"]:
            found.append("what serves again is liked no better than what fell")
    else:
        if fall is not None:
            found.append("the true sign was rolled back")
        if not server.status()["learning"]:
            found.append("learning was paused")
        if mean(told[-24:]) < mean([one for one in told if one.version == 0]):
            found.append("the last versions are liked less than the base")
    return found


def bar(value: float) -> str:
    """Draw a value of −1 … 1 as a row of marks, with a colon at 0."""
    at = round((value + 1) * 20)
    row = ["·"] * 41
    row[20], row[at] = ":", "#"
    return "".join(row)


def run(options: argparse.Namespace, kind: str, seed: int, say: Any) -> dict[str, Any]:
    folder = options.folder.absolute() / f"{kind}-{seed}-{int(time.time())}"
    begun, fault, plugin, data_dir = folder / "begun", folder / "fault", folder / "plugin", folder / "data"
    install(plugin, begun, fault)
    cache = options.folder.absolute() / "cache"
    tokenizer_folder(ModelSettings(), cache)  # converts the bundled model, once for all runs
    shutil.copytree(cache, data_dir / "cache", copy_function=os.link)
    kept = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(plugin), kept)))
    settings = (
        "method.name=wrong_sign",
        "publisher.max_base_kl=10",
        "publisher.max_step_kl=10",
        "log_format=json",
        f"trainer.seed={seed}",
        *options.set,
    )
    say(f"{kind} sign, seed {seed}")
    try:
        with RunningServer(
            data_dir, ["--batch-size", str(BATCH), *(word for one in settings for word in ("--set", one))]
        ) as server:
            found = asyncio.run(
                campaign(server, Switch(begun), Switch(fault), is_wrong=kind == "wrong", seed=seed, say=say)
            )
            return found | {"settings": [f"training.batch_size={BATCH}", *settings]}
    finally:
        os.environ.pop("PYTHONPATH")
        if kept is not None:
            os.environ["PYTHONPATH"] = kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for data directories and the converted model")
    parser.add_argument(
        "--runs",
        nargs="+",
        default=[f"{kind}:{seed}" for kind in ("wrong", "true") for seed in range(3)],
        metavar="KIND:SEED",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="setting of the servers; may be repeated"
    )
    parser.add_argument("--out", type=Path, help="JSON file of figures; the runs in it stay")
    parser.add_argument("--log", type=Path, help="file to which progress is appended")
    options = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        if options.log:
            with options.log.open("a") as log:
                log.write(line + "\n")

    found: list[dict[str, Any]] = []
    for word in options.runs:
        kind, _, seed = word.partition(":")
        if kind not in ("wrong", "true"):
            parser.error(f"--runs: {word!r} is neither wrong:SEED nor true:SEED")
        found.append(run(options, kind, int(seed or 0), say))
        say(f"{word}: {'failed: ' + '; '.join(found[-1]['failed']) if found[-1]['failed'] else 'holds'}")
        if options.out:
            kept = json.loads(options.out.read_text()) if options.out.exists() else []
            same = [(one["run"], one["seed"]) == (found[-1]["run"], found[-1]["seed"]) for one in kept]
            kept = [one for one, is_same in zip(kept, same, strict=True) if not is_same] + [found[-1]]
            options.out.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(found, indent=1, ensure_ascii=False))
    return 1 if any(one["failed"] for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
