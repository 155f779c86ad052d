"""Episodes of agents: episodes a minute at 64 at once, memory over 1,000 of them, and what chats notice of them.

    scripts/benchmarks.sh agents [--episodes 1000] [--at-once 64] [--blocks 5] [--streams 8] [--out FILE.json]

The real server runs over the stub engine, and the real runner plays `terminal_find`: three chats and three commands in
bubblewrap each. First it plays all episodes at full speed, while the memory of runner and server is read. The slope is
that of a line through the last three quarters. Then short blocks of the same chats alternate, without episodes and
beside them. The figures of a block with episodes are divided by those of the block without beside it; the table has the
median of the ratios, and the least and the largest.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

from benchmarks.chat_blocks import Block, block, ratios, told
from benchmarks.proxy.load import resident_mb
from openclaw_rl.agents.journal import Records
from openclaw_rl.testing.running_server import RunningServer, running_stub

GROUP, START_S, PLAY_S = 8, 300.0, 3600.0


class Play:
    """A runner in its own process, on a folder of its own."""

    def __init__(self, server: RunningServer, folder: Path, *, groups: int, at_once: int) -> None:
        folder.mkdir(mode=0o755)
        self._server, self._folder = server, folder
        (folder / "plan.toml").write_text(
            f'environment = "terminal_find"\nfolder = "run"\nserver = "{server.url}"\n'
            "sampling = { temperature = 1.0, max_tokens = 16 }\n[options]\nsteps = 3\n"
            f"[train]\ngroups = {groups}\ngroup_size = {GROUP}\nconcurrency = {at_once}\n"
            '[sandbox]\nkind = "bubblewrap"\n'
        )
        argv = [sys.executable, "-m", "openclaw_rl", "agents", "run", str(folder / "plan.toml")]
        with (folder / "runner.log").open("ab") as out:
            self.process = subprocess.Popen(argv, stdout=out, stderr=out, env=os.environ | {"PYTHONSAFEPATH": "1"})

    def ended(self) -> int:
        return int(self._server.status()["counts"].get("episodes.ended", 0))

    def wait_for_speed(self, at_once: int) -> None:
        """Return when so many episodes have ended since now: the run is at its full number."""
        before, end = self.ended(), time.monotonic() + START_S
        while self.ended() < before + at_once:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no episodes: {(self._folder / 'runner.log').read_text()[-2000:]}")
            time.sleep(0.5)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)  # nothing, if it has ended
        self.process.wait(120)

    def outcomes(self) -> int:
        records = Records.of_folder(self._folder / "run", "terminal_find")
        return sum(1 for group in records.groups.values() for _ in group.outcomes())


def alone(server: RunningServer, folder: Path, *, episodes: int, at_once: int) -> dict[str, Any]:
    """Play all episodes; return their pace and the memory of runner and server meanwhile."""
    assert server.process is not None
    began, play = time.monotonic(), Play(server, folder, groups=-(-episodes // GROUP), at_once=at_once)
    readings: list[tuple[int, int, int]] = []
    try:
        while play.process.poll() is None:
            if time.monotonic() > began + PLAY_S:
                raise RuntimeError("the episodes did not end in time")
            try:
                readings.append((play.ended(), resident_mb(play.process.pid), resident_mb(server.process.pid)))
            except (OSError, StopIteration):
                break  # it ended in between
            time.sleep(1)
    finally:
        play.stop()
    seconds, played = time.monotonic() - began, play.outcomes()
    late = readings[len(readings) // 4 :]
    return {
        "episodes": played,
        "episodes a minute": round(60 * played / seconds, 1),
        "seconds": round(seconds, 1),
        **{
            f"{name}, MB": {
                "first quarter": round(fmean(row[at] for row in readings[: len(readings) // 4 or 1]), 1),
                "last quarter": round(fmean(row[at] for row in readings[-(len(readings) // 4 or 1) :]), 1),
                "slope per 1,000 episodes": round(1000 * slope([(row[0], row[at]) for row in late]), 2),
            }
            for at, name in ((1, "runner"), (2, "server"))
        },
    }


def slope(points: Sequence[tuple[int, int]]) -> float:
    """Return the slope of the line through the points; 0 where they have one place."""
    places = [x for x, _ in points]
    return linear_regression(places, [y for _, y in points]).slope if len(set(places)) > 1 else 0.0


@contextmanager
def beside(server: RunningServer, folder: Path, at_once: int) -> Iterator[Play]:
    """Episodes that go on until the block ends."""
    play = Play(server, folder, groups=0, at_once=at_once)
    try:
        play.wait_for_speed(at_once)
        yield play
    finally:
        play.stop()


def chats(server: RunningServer, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Hold the blocks in turns; return the figures, the ratios and the pace of the episodes beside chats."""
    blocks: dict[bool, list[Block]] = {False: [], True: []}
    paces = []
    asyncio.run(block(server, options.streams, 0))  # warm
    for number in range(options.blocks):
        for with_episodes in random.Random(number).sample([False, True], 2):
            if not with_episodes:
                blocks[False].append(asyncio.run(block(server, options.streams, number + 1)))
                continue
            with beside(server, folder / f"block-{number}", options.at_once) as play:
                before, began = play.ended(), time.monotonic()
                blocks[True].append(asyncio.run(block(server, options.streams, number + 1)))
                paces.append(60 * (play.ended() - before) / (time.monotonic() - began))
    return {
        "chats at once": options.streams,
        "chats of each kind": sum(len(one.first) for one in blocks[False]),
        "episodes a minute beside chats": round(fmean(paces), 1),
        "without episodes": told(blocks[False]),
        "beside episodes": told(blocks[True]),
        "beside / without": ratios(blocks[True], blocks[False]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=5, help="blocks of each kind")
    parser.add_argument("--streams", type=int, default=8, help="chats at once")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "agents.json")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_stub(folder, "--mean-tokens", "0", "--tokens-per-s", "25") as engine:
            chosen = {
                "method.name": "agent",
                "judge.kind": "rules",
                "engine.kind": "url",
                "engine.url": engine,
                "trainer.kind": "external",
                "training.enabled": "false",  # no trainer takes the groups, and their number would end the run
            }
            flags = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
            with RunningServer(folder / "data", flags) as server:
                found: dict[str, Any] = {
                    "at once": options.at_once,
                    "alone": alone(server, folder / "alone", episodes=options.episodes, at_once=options.at_once),
                }
                print(json.dumps(found, indent=2), file=sys.stderr, flush=True)
                if options.blocks:
                    found["chats"] = chats(server, folder, options)
    found["machine"] = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load before": round(before, 1),
        "load after": round(os.getloadavg()[0], 1),
    }
    text = json.dumps(found, indent=2)
    print(text)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
