"""Process that the test kills: it brings turns through a ledger without a pause and prints what the ledger
acknowledged.

It forks once per line on stdin, so that a new process costs milliseconds. A line of output is one fact: `pid N`,
`open`, then `served TURN`, `trained VERSION TURN…`, `rolled_back VERSION`, `rejected VERSION…`; after the fork's death
`ended`.
"""

import asyncio
import os
import random
import sys
from pathlib import Path

from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.trainer_protocol import Commit, Manifest, Report
from openclaw_rl.types import (
    HintTerm,
    NextState,
    PracticeKind,
    PracticeReply,
    Request,
    Sample,
    SamplingParams,
    Scope,
    Turn,
    TurnKey,
    Verdict,
    VersionRun,
    VersionState,
    WeightKind,
)

HINT = HintTerm(text="shorter", source="verbatim")


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def chat(ledger: Ledger, name: str) -> None:
    version = (await ledger.tip()).weight_version
    request = Request(
        name, Scope("u", "s"), 1.0, (Message(role="user", content=name),), None, None, (1, 2), SamplingParams(8)
    )
    await ledger.begin(request)
    reply = Message(role="assistant", content="a" * 500)
    runs = (VersionRun(version, 2),)
    await ledger.finish(
        Turn(name, name, 2.0, (3, 4), (-0.5, -0.25), (True, True), runs, "stop", reply), TurnKey("r", "b", "h")
    )
    say("served", name)
    await ledger.pair(name, NextState((Message(role="user", content="ok"),)), by_request_id="next")
    await ledger.record_verdict(name, Verdict(1, (1,), "rules"))
    await ledger.record_sample(
        Sample(name, (1, 2), (3, 4), (True, True), (-0.5, -0.25), runs, temperature=0.7, reward=1.0, hint=HINT)
    )


async def practise(ledger: Ledger, name: str) -> None:
    """Record an update's practice of the newest wish, and now and then withdraw that wish."""
    wishes = await ledger.wishes(only_active=True)
    if not wishes:
        return
    wish, version = wishes[-1], (await ledger.practice_room()).tip
    replies = []
    for number, kind in enumerate((PracticeKind.WISH, PracticeKind.WISH, PracticeKind.ANCHOR)):
        turn_id, runs = f"practice-{name}-{number}", (VersionRun(version, 2),)
        is_anchor = kind is PracticeKind.ANCHOR
        reply = Message(role="assistant", content="a" * 500)
        messages = (Message(role="user", content=name),)
        replies.append(
            PracticeReply(
                kind=kind,
                request=Request(turn_id, Scope("u", "s"), 1.0, messages, None, None, (1, 2), SamplingParams(8)),
                turn=Turn(turn_id, turn_id, 2.0, (3, 4), (-0.5, -0.25), (True, True), runs, "stop", reply),
                sample=Sample(turn_id, (1, 2), (3, 4), (True, True), (-0.5, -0.25), runs, temperature=0.7),
                of=None if is_anchor else wish.sources[-1].turn_id,
                wish_id=None if is_anchor else wish.wish_id,
            )
        )
    await ledger.record_practice(replies)
    if name.endswith("7"):
        await ledger.remove_wish(wish.wish_id)


async def train(ledger: Ledger, rng: random.Random) -> None:
    await ledger.revoke(reason="its trainer died with the last server")
    lease = await ledger.lease(trainer="t", n=rng.randint(1, 6), now=True)
    if lease is None:
        return
    manifest = Manifest(folder=f"v/{lease.lease_id}", kind=WeightKind.LORA, base_hash="base", sha256="x")
    step = Commit(
        lease_id=lease.lease_id,
        fence=lease.fence,
        parent=lease.parent,
        manifest=manifest,
        report=Report(metrics={}),
        durable=rng.random() < 0.7,
    )
    number = await ledger.commit(step)
    say("trained", number, *(sample.sample_id for sample in lease.samples))
    fate = rng.random()
    if fate < 0.1:
        say("rejected", *await ledger.reject(number, "no"))
    elif fate < 0.8:
        for state in (VersionState.GATED, VersionState.LOADING, VersionState.SERVING):
            await ledger.set_version_state(number, state)
    elif fate < 0.9:
        to = await ledger.serving_version()
        if (await ledger.version(to)).durable:
            await ledger.rollback(to, requeue=rng.random() < 0.5)
    else:
        await ledger.lose_undurable("crash")


async def live(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    ledger = await Ledger.open(path, identity=Identity("base", "tokenizer", "tiny"), training=TrainingSettings())
    say("open")
    for round_ in range(10_000):
        names = [f"{seed}-{round_}-{i}" for i in range(rng.randint(1, 8))]
        practice = practise(ledger, f"{seed}-{round_}")
        await asyncio.gather(train(ledger, rng), practice, *(chat(ledger, name) for name in names))


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            say("pid", os.getpid())
            asyncio.run(live(Path(sys.argv[1]), int(line)))
            os._exit(0)
        os.waitpid(pid, 0)
        say("ended")


main()
