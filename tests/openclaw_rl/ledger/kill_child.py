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
from dataclasses import replace
from pathlib import Path

from ledger import IDENTITY, commit_of, judge_turn, sample_of, serve_version
from practising import practice
from turns import make_request, make_turn, serve_turn

from openclaw_rl.ledger import Ledger
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.types import HintTerm

HINT = HintTerm(text="shorter", source="verbatim")


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def chat(ledger: Ledger, name: str) -> None:
    version = (await ledger.tip()).weight_version
    request, turn = make_request(name, text=name), make_turn(name, version=version, reply="a" * 500)
    await serve_turn(ledger, request, turn)
    say("served", name)
    await judge_turn(ledger, name)
    await ledger.record_sample(replace(sample_of(turn, request.prompt_ids), hint=HINT))


async def practise(ledger: Ledger, name: str) -> None:
    """Record an update's practice of the newest wish, and now and then withdraw that wish."""
    wishes = await ledger.wishes(only_active=True)
    if not wishes:
        return
    wish, version = wishes[-1], (await ledger.tip()).weight_version
    replies = [
        practice(of, None if of is None else wish.wish_id, name=f"practice-{name}-{number}", version=version)
        for number, of in enumerate((wish.sources[-1].turn_id, wish.sources[0].turn_id, None))
    ]
    await ledger.record_practice(replies)
    if name.endswith("7"):
        await ledger.remove_wish(wish.wish_id)


async def train(ledger: Ledger, rng: random.Random) -> None:
    await ledger.revoke(reason="its trainer died with the last server")
    lease = await ledger.lease(trainer="t", n=rng.randint(1, 6), now=True)
    if lease is None:
        return
    number = await ledger.commit(commit_of(lease, durable=rng.random() < 0.7))
    say("trained", number, *(sample.sample_id for sample in lease.samples))
    fate = rng.random()
    if fate < 0.1:
        say("rejected", *await ledger.reject(number, "no"))
    elif fate < 0.8:
        await serve_version(ledger, number)
    elif fate < 0.9:
        to = await ledger.serving_version()
        if (await ledger.version(to)).durable:
            await ledger.rollback(to, requeue=rng.random() < 0.5)
    else:
        await ledger.lose_undurable("crash")


async def live(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    ledger = await Ledger.open(path, identity=IDENTITY, training=TrainingSettings())
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
