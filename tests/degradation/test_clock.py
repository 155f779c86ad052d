"""A wall clock that is set while the server runs, ahead by a day and back by an hour, and again over a restart.

No turn is lost, trained twice or dropped too early, and no hold ends early or late.

Real: the server's process, in which every `time.time` is shifted. The machine's own clocks stay as they are, as a
steady clock does when the wall clock is set.
"""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

from harness.trainer import ToyTrainer

from openclaw_rl.ledger import audit
from openclaw_rl.ledger.open import connect
from openclaw_rl.trainer_protocol import LeaseBody

THANKS = "Thanks, that is perfect!"
DAY_S, HOUR_S = 86400.0, 3600.0
SETTINGS = {
    "judge__votes": 1,
    "judge__quorum": 1,
    "training__batch_size": 2,
    "training__min_batch": 1,
    "training__lease_s": 600.0,
    "sessions__pair_ttl_s": 40.0,  # looked at every 4 s
    "retention__max_age_days": 0.25,
    "retention__every_s": 0.2,
    "watch__check_every_s": 0.1,
    "watch__min_turns": 5,
    "engine__hold_s": 6.0,
}


class Open:
    """A conversation whose last reply has no next message yet."""

    def __init__(self, here: Any, session: str) -> None:
        self.headers = {"X-Session-Id": session}
        self.messages = [{"role": "user", "content": f"hello {session}"}]

    async def ask(self, here: Any) -> str:
        body = {"messages": self.messages, "max_tokens": 12}
        reply = (await here.http.post("/v1/chat/completions", json=body, headers=self.headers)).json()
        self.messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        return str(reply["id"])

    async def thank(self, here: Any) -> None:
        self.messages.append({"role": "user", "content": THANKS})
        await self.ask(here)


def toy(here: Any) -> ToyTrainer:
    return ToyTrainer(here.server.url, here.server.data_dir, here.engine.fake.policy)


async def leased(here: Any, name: str = "toy", wait_s: float = 120.0) -> LeaseBody | None:
    return await asyncio.to_thread(toy(here).client.lease, name, wait_s=wait_s)


async def committed(here: Any, lease: LeaseBody) -> int:
    trainer = toy(here)
    return await asyncio.to_thread(lambda: trainer.client.commit(trainer.checkpoint(lease)))


async def serves(here: Any, number: int) -> None:
    async def is_so() -> bool:
        return bool((await here.admin("/v1/admin/status"))["serving"] == number)

    await here.until(is_so)


async def test_a_wall_clock_that_is_set_loses_nothing_and_hurries_nobody(place: Any, tmp_path: Path) -> None:
    async with place(**SETTINGS) as here:
        first = [await here.turn(THANKS, "s1"), await here.turn(THANKS, "s2")]
        lease = await leased(here)
        assert lease is not None
        waiting = Open(here, "open")
        opened = await waiting.ask(here)

        # Ahead by a day: what is held goes on being held; leases, open turns and what was trained stay.
        await here.engine_port.down()
        held = asyncio.create_task(here.chat(session="held"))
        await asyncio.sleep(0.2)
        here.server.set_wall_clock(DAY_S)
        await asyncio.sleep(0.5)
        assert not held.done()
        await here.engine_port.up()
        assert (await held).status_code == 200
        assert await leased(here, "another", wait_s=0.0) is None, "the first one's lease is not over"
        assert await committed(here, lease) == 1
        await serves(here, 1)
        await asyncio.sleep(4.2)  # every round of everybody's has come
        assert {await here.state(turn) for turn in first} == {("trained", None)}
        assert await here.state(opened) == ("served", None)
        await waiting.thank(here)

        # Back by an hour: what is held is refused when its time is up, not an hour later.
        await here.engine_port.down()
        gone = asyncio.create_task(here.chat(session="gone"))
        await asyncio.sleep(0.2)
        here.server.set_wall_clock(-HOUR_S)
        async with asyncio.timeout(120):
            assert (await gone).status_code == 503
        await here.engine_port.up()
        await here.until_well()
        later = await here.turn(THANKS, "s3")
        lease = await leased(here)
        assert lease is not None
        assert [sample.sample_id for sample in lease.samples] == [opened, later], "the oldest first"
        assert await committed(here, lease) == 2
        await serves(here, 2)
        last = Open(here, "last")
        latest = await last.ask(here)
        unfinished = await here.turn(THANKS, "s4"), await here.turn(THANKS, "s5")
        lease = await leased(here)
        assert lease is not None

        rows = (await here.admin("/v1/turns?limit=100"))["turns"]
        by_time = sorted(rows, key=lambda row: -row["finished_at"])
        assert rows == by_time, "the ledger's time went on, and its order is the turns'"
        assert here.webhook.alerts == []

    # The next start reads the clock that is an hour behind what is written: a trainer goes on, a user answers.
    async with place(**SETTINGS) as here:
        assert await leased(here, "another", wait_s=0.0) is None
        assert await committed(here, lease) == 3
        await serves(here, 3)
        await last.thank(here)
        more = await here.turn(THANKS, "s6")
        lease = await leased(here)
        assert lease is not None
        assert {sample.sample_id for sample in lease.samples} == {latest, more}
        assert await committed(here, lease) == 4
        trained = {}
        for turn in (*first, opened, later, *unfinished, latest, more):
            trained[turn] = (await here.admin(f"/v1/turns/{turn}"))["trained_in"]
        assert list(trained.values()) == [1, 1, 2, 2, 3, 3, 4, 4]
        counts = (await here.admin("/v1/admin/status"))["counts"]
        assert (counts["trained"], counts["running"]) == (8, 0)
        assert here.webhook.alerts == []
    with closing(connect(tmp_path / "data" / "ledger.sqlite3", read_only=True)) as db:
        assert audit.audit(db, is_deep=True) == []
