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

from ledger import IDENTITY, commit_of, score_turn, serve_version
from turns import make_request, make_turn, serve_turn

from openclaw_rl.ledger import Ledger
from openclaw_rl.settings import TrainingSettings


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def chat(ledger: Ledger, name: str) -> None:
    version = (await ledger.tip()).weight_version
    request, turn = make_request(name, text=name), make_turn(name, version=version, reply="a" * 500)
    await serve_turn(ledger, request, turn)
    say("served", name)
    await score_turn(ledger, turn, request.prompt_ids)


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
        await asyncio.gather(train(ledger, rng), *(chat(ledger, name) for name in names))


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
