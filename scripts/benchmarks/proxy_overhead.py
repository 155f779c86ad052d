"""Overhead of the proxy: added time to first token, CPU time per streamed token, short requests a second.

    scripts/benchmarks.sh proxy_overhead [--rounds 5] [--out FILE.json]
    scripts/benchmarks.sh proxy_overhead --litellm VENV/bin/litellm --router OTHER_VENV/bin/python

The real server (ledger, sessions, one API key) runs over a stub engine. The stub answers at once and then streams 25
tokens a second to each stream. Beside it run a bare asyncio relay of the engine's bytes, and the forwarders whose
programs are given: LiteLLM's proxy, and sglang-router in an interpreter that has it. Both only pass on. All get one
client, the same chats and the same key. Blocks of the programs take turns, and the order rotates with the rounds.

"Added" is a quantile through a program minus the median of its own upstream asked directly in that round. A *new* chat
has 2k tokens, of which only the system message was seen before. Its *next turn* goes on with the reply that came, so
the former turn is paired. Each figure is a median of the rounds, with the least and the most.
"""

import argparse
import asyncio
import json
import os
import platform
import secrets
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvloop

from benchmarks.chat_load import loop_delay, quantile
from benchmarks.proxy import load
from benchmarks.proxy.load import Target
from benchmarks.proxy.targets import Targets

PACE = 25.0
"""Tokens a second of one stream."""
BLOCK_S = 120.0
STREAMS = {1: (20, 4), 16: (2, 50), 64: (1, 50)}
"""Loops of each client, and tokens of a reply, by number of streams. Long replies keep all streams open."""
LENGTHS = (20, 170)
"""Tokens of the replies whose cost gives the slope."""
Rows = dict[str, dict[str, list[float]]]
"""Values of the rounds, by figure and by program."""


@dataclass(frozen=True, slots=True)
class Aim:
    """The aim of a figure of ours: on itself, or as a ratio to a program's."""

    figure: str
    limit: float
    beside: str | None = None
    """None: the figure itself."""
    at_least: bool = False

    def value(self, medians: Mapping[str, Mapping[str, float]]) -> float | None:
        found = medians.get(self.figure, {})
        if self.beside is None:
            return found.get("ours")
        return found["ours"] / found[self.beside] if self.beside in found else None

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


def added(streams: int, q: str, kind: str = "next turn") -> str:
    return f"ms added to the first token, {kind}, {streams} streams, {q}"


CPU, RATE, COST = "µs CPU a streamed token, 64 streams", "short requests a second, 16 clients", "ms CPU a short request"
AIMS = (
    Aim(added(1, "p50"), 1.5),
    Aim(added(16, "p50"), 2.0),
    Aim(added(1, "p99"), 6.0),
    Aim(added(16, "p99"), 6.0),
    Aim(added(64, "p50"), 5.0),
    Aim(added(1, "p50"), 3.0, "sglang-router"),
    Aim(added(16, "p50"), 3.0, "sglang-router"),
    Aim(added(1, "p50"), 0.1, "LiteLLM"),
    Aim(CPU, 1.3, "sglang-router"),
    Aim(RATE, 400.0, at_least=True),
)


async def measure(targets: Mapping[str, Target], rounds: int, key: str) -> Rows:
    """Run the blocks of all rounds. Each row gets one value a round."""
    rows: Rows = defaultdict(lambda: defaultdict(list))
    proxies = {name: target for name, target in targets.items() if not name.startswith("engine")}
    engine = targets["engine"]
    async with httpx.AsyncClient() as client:

        async def pace(tokens_per_s: float) -> None:
            (await client.get(f"http://127.0.0.1:{engine.port}/pace/{tokens_per_s}")).raise_for_status()

        for target in proxies.values():
            one = load.generate(8) if target.is_native else load.new_chat(8)
            for _ in range(3):
                await asyncio.gather(*(load.ask(target, one, key) for _ in range(16)))
        for number in range(rounds):
            await pace(PACE)
            for streams in STREAMS:
                await _first_tokens(rows, _rotated(targets, number), streams, key)
            for target in _rotated(proxies, number):
                cost = load.token_cost(target, key, streams=64, lengths=LENGTHS)
                token, _ = await asyncio.wait_for(cost, BLOCK_S)
                rows[CPU][target.name].append(1e6 * token)
            await pace(0)
            for target in _rotated(proxies, number):
                rate, cpu = await load.requests_a_second(target, key, clients=16, seconds=2.0)
                rows[RATE][target.name].append(rate)
                rows[COST][target.name].append(1e3 * cpu)
            for target in proxies.values():
                rows["MB resident"][target.name].append(load.resident_mb(target.pid))
    return rows


def _rotated(targets: Mapping[str, Target], by: int) -> list[Target]:
    order = list(targets.values())
    return order[by % len(order) :] + order[: by % len(order)]


async def _first_tokens(rows: Rows, order: list[Target], streams: int, key: str) -> None:
    loops, tokens = STREAMS[streams]
    found = {}
    stop = asyncio.Event()
    own = asyncio.create_task(loop_delay(stop))
    for target in order:
        work = load.first_tokens(target, key, streams=streams, loops=loops, tokens=tokens, pace=PACE)
        found[target.name] = await asyncio.wait_for(work, BLOCK_S)
    stop.set()
    rows[f"ms that the load generator itself was late, {streams} streams, p99"]["-"].append(
        1e3 * quantile(await own, 0.99)
    )
    for target in order:
        if target.name.startswith("engine"):
            continue
        upstream = found["engine" if target.is_native or target.name == "ours" else "engine, OpenAI"]
        base = quantile(upstream.new + upstream.next_turn, 0.5)
        for q, name in ((0.5, "p50"), (0.99, "p99")):
            rows[added(streams, name)][target.name].append(1e3 * (quantile(found[target.name].next_turn, q) - base))
        new = quantile(found[target.name].new, 0.5) - base
        rows[added(streams, "p50", "new")][target.name].append(1e3 * new)


def medians_of(rows: Rows) -> dict[str, dict[str, float]]:
    return {
        figure: {name: statistics.median(values) for name, values in found.items()} for figure, found in rows.items()
    }


def table(rows: Rows, say: Callable[[str], None] = print) -> None:
    """Print each figure: the median of the rounds, the least and the most; then the aims."""
    for figure, found in rows.items():
        say(figure)
        for name, values in found.items():
            say(f"    {name:14s} {statistics.median(values):9.2f}  ({min(values):.2f} - {max(values):.2f})")
    medians = medians_of(rows)
    for aim in AIMS:
        value = aim.value(medians)
        beside = "" if aim.beside is None else f", times {aim.beside}'s"
        if value is not None:
            word = "met    " if aim.holds(value) else "NOT MET"
            say(f"{word} {aim.figure}{beside}: {value:.2f} [{'>=' if aim.at_least else '<='} {aim.limit:g}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--litellm", type=Path, help="the program `litellm` of an environment of its own")
    parser.add_argument("--router", type=Path, help="a Python interpreter that has sglang-router")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "proxy_overhead.json")
    args = parser.parse_args()
    key = f"sk-{secrets.token_hex(16)}"
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        with Targets(Path(name), key, litellm=args.litellm, router=args.router) as targets:
            rows = uvloop.run(measure(targets, args.rounds, key))
    table(rows)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load before": load_before}
    rounded = {
        figure: {name: [round(v, 3) for v in values] for name, values in found.items()}
        for figure, found in rows.items()
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"rounds": args.rounds, "figures": rounded, "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
