"""Speed and size of a ledger of a million turns beside one of ten thousand, and copies of it during writes.

    scripts/benchmarks.sh ledger_scale [--turns 1000000] [--folder FOLDER] [--out FILE.json]

The public calls of the ledger fill one of 10,000 turns, as server, judge, method and trainer make them. Sessions have
20 turns whose requests repeat the conversation so far, system prompts of 2 to 8 k tokens, and replies of about 100
tokens; batches have 16 samples, and a quarter of the turns waits. The large ledger is that history a hundred times
(`scale/copies.py`). As a check, a smaller ledger is written twice, by the fast way and by a ledger with its own threads
and fsyncs: the rows must be equal.

Then both are open in one process. The same sessions continue in both, call by call in turns, so that a disturbance hits
both, and each ratio is of one run. The delay of the event loop is measured beside each read. At the end the large
ledger is copied while turns are written to it, the copy gets the deep audit, and a session is forgotten.

`--folder` keeps the ledgers; a second run measures them again in their state then.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.chat_load import quantile
from benchmarks.scale.copies import copies
from benchmarks.scale.drive import Clock, Drive
from benchmarks.scale.fill import IDENTITY, START, TRAINING, by_api, fill, same_rows
from benchmarks.scale.lag import lag
from benchmarks.scale.talk import Talk
from openclaw_rl.ledger import Ledger
from openclaw_rl.ledger.snapshot import backup
from openclaw_rl.types import TurnState

SMALL, CHECKED = 10_000, 500
REPEATS = 5
"""Times that each read runs in a round: a p99 of sixty values would be the worst of sixty, which is chance."""
Times = dict[str, list[float]]
HOT = ("begin", "finish", "pair", "verdict", "sample", "lease", "commit", "counts", "status")
"""Calls that the aim of 1.5 × is for; the others are only reported."""


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def make(folder: Path, turns: int, stop_at: float) -> dict[str, object]:
    """Make both ledgers. A run trains most of the small one, which is always new; the large one may exist."""
    small, large = folder / "small.sqlite3", folder / "large.sqlite3"
    fast, slow = folder / "fast.sqlite3", folder / "slow.sqlite3"
    for old in (fast, slow, small):
        for left in folder.glob(f"{old.name}*"):
            left.unlink()
    fill(fast, CHECKED, seed=2, say=say)
    findings = asyncio.run(by_api(slow, CHECKED, seed=2))
    rows = same_rows(fast, slow)
    say(f"{CHECKED} turns twice: equal rows, audit {findings or 'clean'}")
    fill(small, SMALL, seed=1, say=say)
    if not large.exists():
        copies(small, large, max(turns // SMALL, 1), stop_at=stop_at, say=say)
    return {"turns": CHECKED, "audit": findings, "equal rows": rows}


def reads(ledger: Ledger, session: str, turn_id: str) -> dict[str, Callable[[], Awaitable[object]]]:
    async def status() -> None:
        """Make the reads of `GET /v1/admin/status`."""
        await ledger.versions(newest=20)
        await ledger.pinned()
        await ledger.tip()
        await ledger.learning()
        await ledger.counts()

    return {
        "counts": ledger.counts,
        "status": status,
        "turns": lambda: ledger.turns(limit=50),
        "turns of a session": lambda: ledger.turns(limit=50, session_id=session),
        "turns of a user": lambda: ledger.turns(limit=50, user="user-7"),
        "turns of a state": lambda: ledger.turns(limit=50, state=TurnState.TRAINED),
        "turns of a user in a state": lambda: ledger.turns(limit=50, user="user-7", state=TurnState.SAMPLED),
        "one turn": lambda: ledger.turn(turn_id),
        "refill": lambda: ledger.open_turns(20_000),
        "to judge": lambda: ledger.to_judge(8),
        "user verdicts": lambda: ledger.user_verdicts(limit=400),
        "recent replies": lambda: ledger.recent_replies(sampled_by=None, limit=64),
        "recent prompts": lambda: ledger.recent_prompts(8),
        "unfinished versions": ledger.unfinished_versions,
        "needed versions": lambda: ledger.needed_versions(20),
    }


async def measure(ledgers: dict[str, Ledger], drives: dict[str, Drive], times: dict[str, Times], rounds: int) -> Times:
    """Time both ledgers, call by call, and the lateness of the event loop beside the reads."""
    late: Times = defaultdict(list)
    names = list(ledgers)
    for number in range(rounds):
        if number % 50 == 0:
            say(f"round {number} of {rounds}")
        names.reverse()
        sessions = {name: await drives[name].step() for name in names}
        if number < 128:  # warm-up: the sessions have no history yet
            continue
        if number % 8 == 0:
            for name in 2 * names:
                await drives[name].train()
        asked = {}
        for name in names:
            turn = sessions[name].turn
            assert turn is not None
            asked[name] = reads(ledgers[name], sessions[name].name, turn.turn_id)
        if number % 6:
            continue
        for what in list(asked[names[0]]) * REPEATS:
            for name in names:
                async with lag() as overdue:
                    await asyncio.sleep(0.005)
                    start = time.perf_counter()
                    await asked[name][what]()
                    times[name][what].append(time.perf_counter() - start)
                    await asyncio.sleep(0)
                late[name] += overdue
        async with lag() as overdue:
            await asyncio.sleep(0.03)
        late["nothing"] += overdue
    return late


async def copy_while_writing(path: Path, ledger: Ledger, drive: Drive, times: Times) -> dict[str, object]:
    """Back up the ledger while turns are written; open and audit the copy."""
    copy = path.with_name("copy.sqlite3")
    copy.unlink(missing_ok=True)
    before, start = (await ledger.counts())["requests"], time.perf_counter()
    copying = asyncio.create_task(asyncio.to_thread(backup, path, copy))
    async with lag() as late:
        while not copying.done():
            await drive.step()
            await asyncio.sleep(0.02)
    took, after = time.perf_counter() - start, (await ledger.counts())["requests"]
    say(f"copied in {took:.0f} s, {after - before} turns written meanwhile; auditing the copy")
    opened = await Ledger.open(copy, identity=IDENTITY, training=TRAINING)
    try:
        start = time.perf_counter()
        findings = await opened.audit(is_deep=True)
        counts = await opened.counts()
    finally:
        await opened.aclose()
    size = copy.stat().st_size
    copy.unlink()
    return {
        "MB": round(size / 2**20, 1),
        "s": round(took, 1),
        "requests before / in the copy / after": [before, counts["requests"], after],
        "deep audit of the copy": findings or "clean",
        "the audit took, s": round(time.perf_counter() - start, 1),
        "append meanwhile p50 / p99, ms": spread(appended(times)),
        "loop late meanwhile p50 / p99, ms": spread(late),
    }


async def forget_while_writing(ledger: Ledger, drive: Drive, times: Times) -> dict[str, object]:
    """Forget a trained session while turns are written. (The server does not rewrite a file of this size.)"""
    (found,) = await ledger.turns(limit=1, state=TurnState.TRAINED)
    assert found.session_id is not None
    start = time.perf_counter()
    forgetting = asyncio.create_task(ledger.forget(found.session_id))
    async with lag() as late:
        while not forgetting.done():
            await drive.step()
            await asyncio.sleep(0.02)
    return {
        "turns": forgetting.result().turns,
        "s": round(time.perf_counter() - start, 1),
        "append meanwhile p50 / p99 / longest, ms": spread(appended(times), 0.5, 0.99, 1),
        "loop late meanwhile p50 / p99 / longest, ms": spread(late, 0.5, 0.99, 1),
    }


def appended(times: Times) -> list[float]:
    return [begin + finish for begin, finish in zip(times["begin"], times["finish"], strict=True)]


def spread(values: list[float], *quantiles: float) -> list[float]:
    return [round(1e3 * quantile(values, q), 2) for q in quantiles or (0.5, 0.99)] if values else []


async def run(folder: Path, rounds: int) -> dict[str, object]:
    paths = {"small": folder / "small.sqlite3", "large": folder / "large.sqlite3"}
    ledgers, drives, clocks = {}, {}, {}
    times: dict[str, Times] = {name: defaultdict(list) for name in paths}
    prefix = f"m{os.getpid()}x{int(time.time())}"
    for name, path in paths.items():
        clocks[name] = Clock(START + 20 * 2_000_000)
        ledgers[name] = await Ledger.open(path, identity=IDENTITY, training=TRAINING, clock=clocks[name])

        def note(what: str, seconds: float, name: str = name) -> None:
            times[name][what].append(seconds)

        # No training on the way: it is asked for.
        drives[name] = Drive(ledgers[name], Talk(3, prefix=prefix), clocks[name], on_time=note)
    try:
        counts = {name: await ledger.counts() for name, ledger in ledgers.items()}
        late = await measure(ledgers, drives, times, rounds)
        for by_name in times.values():
            by_name["append (begin + finish)"] = appended(by_name)
        calls = {
            what: {name: spread(times[name][what]) for name in paths}
            | {"ratio p50 / p99": [round(quantile(times["large"][what], q) / quantile(times["small"][what], q), 2)
                                   for q in (0.5, 0.99)], "n": len(times["small"][what])}
            for what in times["small"]
        }  # fmt: skip
        size = paths["large"].stat().st_size
        figures: dict[str, object] = {
            "turns": {name: sum(found[state] for state in TurnState) for name, found in counts.items()},
            "open turns": {name: found["served"] for name, found in counts.items()},
            "waiting for a trainer": {name: found["sampled"] for name, found in counts.items()},
            "versions": {name: (await ledger.tip()).weight_version for name, ledger in ledgers.items()},
            "file, GB": round(size / 1e9, 2),
            "bytes a turn": round(size / counts["large"]["requests"]),
            "calls, ms p50 / p99": calls,
            "worst ratio of the hot calls, p50 / p99": [
                max(calls[what]["ratio p50 / p99"][at] for what in HOT)  # type: ignore[index]
                for at in (0, 1)
            ],
            "loop late, ms p50 / p99": {name: spread(values) for name, values in late.items()},
        }
        fresh: Times = defaultdict(list)
        times["large"] = fresh
        say(json.dumps(figures, indent=2))
        ledger, drive = ledgers["large"], drives["large"]
        figures["copy while writing"] = await copy_while_writing(paths["large"], ledger, drive, fresh)
        fresh.clear()
        figures["forget while writing"] = await forget_while_writing(ledger, drive, fresh)
        return figures
    finally:
        for ledger in ledgers.values():
            await ledger.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=1_000_000, help="turns of the large ledger")
    parser.add_argument("--rounds", type=int, default=900, help="measured turns of each ledger")
    parser.add_argument(
        "--minutes", type=float, default=20, help="time limit of the filling; the output names the size that it reached"
    )
    parser.add_argument("--folder", type=Path, help="folder that keeps the ledgers, or has those of an earlier run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        folder = options.folder or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        same = make(folder, options.turns, time.monotonic() + 60 * options.minutes)
        figures = {"both ways of filling": same} | asyncio.run(run(folder, options.rounds))
    figures["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
    print(json.dumps(figures, indent=2))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
