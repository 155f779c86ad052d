"""Growth: the server's and the engine's figures at one size and at ten times it, in one run.

    scripts/benchmarks.sh growth [--sessions 10000] [--history 128000] [--adapters 64] [--ledger FILE] [--out FILE.json]

Open sessions: short chats over the stub engine, first a tenth of them, then all, with the CPU of a request and the
memory after each. History: the next turn of a chat whose history is a tenth, then the whole. Adapters: decode of the
embedded engine with a few loaded, then all. `--ledger` reads the calls of a ledger of a million turns beside one of ten
thousand from the file of `ledger_scale`.

A column is *flat* where the larger value is at most 1.25 times the smaller one. Any other has an explanation here, or
its ratio is above the growth of its cause, and the output says so.
"""

import argparse
import asyncio
import json
import platform
import secrets
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.proxy import load
from benchmarks.proxy.load import Target
from benchmarks.proxy.targets import Targets

FLAT = 1.25
_NOT_EXPLAINED = "NOT EXPLAINED: more than its cause grew"
_LINEAR = "reads, renders and sends the whole history; linear in its length"
_HELD = "digests and open turns of every session stay in memory"
_STACKED = "each adapter's weights stay in memory"
_ASKS, _TURNS, _WARM = 400, 8, 4


@dataclass(frozen=True, slots=True)
class Column:
    """A figure at two sizes."""

    figure: str
    small: str
    small_value: float
    large: str
    large_value: float
    explained: str
    ratio: float
    flat: bool

    @classmethod
    def of(
        cls, figure: str, small: tuple[str, float], large: tuple[str, float], *, grew: float = 1.0, cause: str = ""
    ) -> "Column":
        """grew: how much larger the cause is at the large size; cause: the explanation, which holds up to there."""
        ratio = large[1] / small[1] if small[1] else float("inf")
        word = cause if cause and ratio <= FLAT * grew else _NOT_EXPLAINED
        return cls(figure, *small, *large, "" if ratio <= FLAT else word, ratio, ratio <= FLAT)

    def as_json(self) -> dict[str, Any]:
        return {name.replace("_", " "): value for name, value in asdict(self).items()}


async def sessions(ours: Target, key: str, count: int) -> list[Column]:
    """Open a tenth of the sessions, then all; each is one short chat."""
    found = []
    opened = 0
    for wanted in (count // 10, count):
        while opened < wanted:
            await asyncio.gather(*(load.ask(ours, load.short_chat(), key) for _ in range(16)))
            opened += 16
        await asyncio.sleep(2)
        before = load.cpu_s(ours.pid)
        firsts = [(await load.ask(ours, load.short_chat(), key)).first_s for _ in range(_ASKS)]
        await asyncio.sleep(1)
        found.append(((load.cpu_s(ours.pid) - before) / _ASKS, statistics.median(firsts), load.resident_mb(ours.pid)))
    sizes = [f"{wanted} sessions" for wanted in (count // 10, count)]
    (cpu, first, held), (cpu_10, first_10, held_10) = found
    return [
        Column.of("ms CPU a short request", (sizes[0], 1e3 * cpu), (sizes[1], 1e3 * cpu_10)),
        Column.of("ms to the first token of a short request", (sizes[0], 1e3 * first), (sizes[1], 1e3 * first_10)),
        Column.of("MB resident, server", (sizes[0], held), (sizes[1], held_10), grew=10.0, cause=_HELD),
    ]


async def history(ours: Target, key: str, tokens: int) -> list[Column]:
    """Ask the next turns of a chat with a tenth of the history, then with all of it."""
    found = []
    for wanted in (tokens // 10, tokens):
        messages: list[dict[str, str]] = [{"role": "system", "content": load.words(200, 0)}]
        for number in range(wanted // 400):  # a word is a token
            role = "assistant" if number % 2 else "user"
            messages.append({"role": role, "content": load.words(400, 1000 * wanted + number)})
        if messages[-1]["role"] == "assistant":
            messages.pop()
        body: dict[str, Any] = {"model": "policy", "messages": messages, "stream": True, "max_tokens": 8}
        firsts, costs = [], []
        for number in range(_WARM + _TURNS):
            before = load.cpu_s(ours.pid)
            reply = await load.ask(ours, body, key)
            await asyncio.sleep(0.5)
            if number >= _WARM:
                firsts.append(reply.first_s)
                costs.append(load.cpu_s(ours.pid) - before)
            body = load.next_turn(body, reply.text)
        found.append((statistics.median(firsts), statistics.median(costs)))
    sizes = [f"{wanted} tokens" for wanted in (tokens // 10, tokens)]
    (first, cost), (first_10, cost_10) = found
    return [
        Column.of("ms to the first token, next turn", (sizes[0], 1e3 * first), (sizes[1], 1e3 * first_10),
                  grew=10.0, cause=_LINEAR),
        Column.of("ms CPU of the server, next turn", (sizes[0], 1e3 * cost), (sizes[1], 1e3 * cost_10),
                  grew=10.0, cause=_LINEAR),
    ]  # fmt: skip


def adapters(count: int, folder: Path) -> list[Column]:
    """Decode one stream at the embedded engine, under one adapter, while a few or all are loaded."""
    # Here, because torch and PEFT take seconds to import: `--help` needs neither.
    from benchmarks.engine_speed import Engine, stream
    from benchmarks.swap_under_load import synthetic_adapter
    from openclaw_rl.engines.client import HttpEngine
    from openclaw_rl.models.resolve import load_model, resolve
    from openclaw_rl.settings import EngineSettings, ModelSettings

    synthetic_adapter(load_model(resolve(ModelSettings(), folder / "cache")), folder / "adapter", 1, 0.1)
    engine = Engine(folder, folder / "cache", 1)

    async def measure() -> list[tuple[float, int]]:
        client, found, loaded = HttpEngine(engine.url, settings=EngineSettings()), [], 0
        for wanted in (max(1, count // 10), count):
            while loaded < wanted:
                loaded += 1
                await client.load_adapter(f"a{loaded}", folder / "adapter")
            gaps = []
            for seed in range(_WARM):
                stamps = await stream(engine.url, [300 + seed + i % 1500 for i in range(64)], 64)
                gaps.append((stamps[-1] - stamps[0]) / (len(stamps) - 1))
            found.append((min(gaps), load.resident_mb(engine.process.pid)))
        return found

    try:
        (gap, held), (gap_10, held_10) = asyncio.run(measure())
    finally:
        engine.stop()
    sizes = [f"{wanted} adapters" for wanted in (max(1, count // 10), count)]
    return [
        Column.of("ms a decoded token, embedded engine", (sizes[0], 1e3 * gap), (sizes[1], 1e3 * gap_10)),
        Column.of("MB resident, engine", (sizes[0], held), (sizes[1], held_10), grew=10.0, cause=_STACKED),
    ]


def ledger(file: Path) -> list[Column]:
    """Return the hot calls of `ledger_scale`'s file, p50."""
    figures = json.loads(file.read_text())
    small, large = (f"{figures['turns'][name]} turns" for name in ("small", "large"))
    calls = figures["calls, ms p50 / p99"]
    hot = ("append (begin + finish)", "pair", "verdict", "sample", "lease", "commit", "status")
    return [
        Column.of(f"ledger: {call}, ms", (small, calls[call]["small"][0]), (large, calls[call]["large"][0]))
        for call in hot
        if call in calls
    ]


async def of_server(options: argparse.Namespace, targets: dict[str, Target], key: str) -> list[Column]:
    return [
        *await sessions(targets["ours"], key, options.sessions),
        *await history(targets["ours"], key, options.history),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--history", type=int, default=128_000, help="tokens of the longest history")
    parser.add_argument("--adapters", type=int, default=64, help="0: no engine is started")
    parser.add_argument("--ledger", type=Path, help="file of ledger_scale")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began, key = time.monotonic(), f"sk-{secrets.token_hex(16)}"
    more = {"model.context_length": str(2 * options.history)}
    with tempfile.TemporaryDirectory() as name:
        with Targets(Path(name), key, litellm=None, router=None, options=more) as targets:
            # Replies as fast as they go: the figures are the server's, and ten thousand chats take a minute.
            httpx.get(f"http://127.0.0.1:{targets['engine'].port}/pace/0").raise_for_status()
            columns = uvloop.run(of_server(options, targets, key))
        if options.adapters:
            columns += adapters(options.adapters, Path(name))
    if options.ledger and options.ledger.is_file():
        columns += ledger(options.ledger)
    for column in columns:
        word = "flat" if column.flat else column.explained
        sizes = f"{column.small_value:.3g} at {column.small}, {column.large_value:.3g} at {column.large}"
        print(f"{column.figure}: {sizes}; {column.ratio:.2f} ×, {word}")
    if options.out:
        about = {"machine": platform.machine(), "took, s": round(time.monotonic() - began)}
        whole = {"about": about, "columns": [column.as_json() for column in columns]}
        options.out.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
