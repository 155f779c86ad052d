"""Stage `overhead`: time to first text and throughput of the proxy, beside SGLang's own `/v1/chat/completions`.

Each client asks both in turn, in one run. The prompts are alike: a system message that both have cached, and new text.
`with log-probs` asks SGLang for the log-probs that the proxy always needs: the fair comparison of throughput.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from benchmarks.chat_load import loop_delay, quantile
from gpu import load
from gpu.host import SglangHost
from gpu.server_files import set_flags
from openclaw_rl.testing.running_server import RunningServer

ROUNDS = {1: 40, 16: 10, 64: 5}
TINY_ROUNDS = {1: 3, 4: 2}
"""Number of streams → requests of each client."""
BURSTS = 5
BURST_S, TINY_BURST_S = 10.0, 0.1
"""Single bursts of a second or two differ by more than what the proxy costs."""
PROMPT_WORDS, TOKENS, LONG = 400, 32, 256
WORDS = ("time", "people", "water", "light", "house", "story", "world", "point", "hand", "night", "money", "paper")


def run(host: SglangHost, data_dir: Path) -> dict[str, Any]:
    settings = [*load.SETTINGS, "training.enabled=false"]
    if host.engine == "sglang":
        settings += ["model.context_length=4096"]
    flags = ["--engine-url", host.engine_url, "--model", str(host.model), "--judge", "rules"]
    flags += set_flags(settings)
    with RunningServer(data_dir, flags, start_s=120) as server:
        rounds, burst_s = (TINY_ROUNDS, TINY_BURST_S) if host.is_tiny else (ROUNDS, BURST_S)
        return asyncio.run(_measure(server.url, host.engine_url, rounds, burst_s))


async def _measure(proxy: str, engine: str, rounds: Mapping[int, int], burst_s: float) -> dict[str, Any]:
    await asyncio.gather(*(_ask(url, _body(n, 8)) for url in (proxy, engine) for n in range(max(rounds))))
    figures: dict[str, Any] = {f"{n} streams": await _first_texts(proxy, engine, n, rounds[n]) for n in rounds}
    figures["throughput"] = [await _throughput(proxy, engine, n, burst_s) for n in rounds]
    return figures


async def _first_texts(proxy: str, engine: str, streams: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"SGLang": [], "proxied": []}

    async def client(number: int) -> None:
        await asyncio.sleep(random.Random(number).random() * 0.2)
        for at in range(rounds):
            seed = 1000 * number + at + 100_000 * streams
            order = [("SGLang", engine), ("proxied", proxy)]
            for name, url in order if at % 2 else order[::-1]:
                found[name].append((await _ask(url, _body(seed + (name == "proxied") * 10**7, TOKENS)))[0])

    stop = asyncio.Event()
    own = asyncio.create_task(loop_delay(stop))
    await asyncio.gather(*(client(number) for number in range(streams)))
    stop.set()
    late = await own

    def row(values: list[float]) -> dict[str, float]:
        return {f"p{int(100 * q)} ms": round(1e3 * quantile(values, q), 2) for q in (0.5, 0.9, 0.99)}

    rows = {name: row(values) for name, values in found.items()}
    added = {key: round(rows["proxied"][key] - rows["SGLang"][key], 2) for key in rows["SGLang"]}
    return {"requests of each": len(found["SGLang"]), **rows, "added": added, "load generator's own delay": row(late)}


async def _throughput(proxy: str, engine: str, streams: int, burst_s: float) -> dict[str, Any]:
    """Return the tokens a second of each way over bursts in random order, and the ratios of the medians."""
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "SGLang": (engine, {}),
        "SGLang with log-probs": (engine, {"logprobs": True}),
        "proxied": (proxy, {}),
    }
    order = [*ways] * BURSTS
    random.Random(streams).shuffle(order)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number, name in enumerate(order):
        url, fields = ways[name]
        rates[name].append(await _burst(url, fields, streams, burst_s, seed=10**9 + 10**6 * number + 10**8 * streams))
    rows = {name: {"median": median(found), "least": min(found), "most": max(found)} for name, found in rates.items()}
    others = [name for name in ways if name != "proxied"]
    ratios = {f"proxied / {name}": round(rows["proxied"]["median"] / rows[name]["median"], 3) for name in others}
    tokens = {name: {key: round(value) for key, value in row.items()} for name, row in rows.items()}
    return {"streams": streams, "bursts of each": BURSTS, "tokens/s": tokens} | ratios


async def _burst(url: str, fields: dict[str, Any], streams: int, burst_s: float, *, seed: int) -> float:
    """Ask on so many streams for at least `burst_s`. Return the tokens a second until the last reply's end."""
    began, replies = time.perf_counter(), 0

    async def client(number: int) -> None:
        nonlocal replies
        at = 0
        while not at or time.perf_counter() - began < burst_s:
            await _ask(url, _body(seed + 1000 * at + number, LONG) | fields)
            at, replies = at + 1, replies + 1

    await asyncio.gather(*(client(number) for number in range(streams)))
    return replies * LONG / (time.perf_counter() - began)


def _body(seed: int, tokens: int) -> dict[str, Any]:
    def words(count: int, source: int) -> str:
        return " ".join(random.Random(source).choices(WORDS, k=count))

    messages = [
        {"role": "system", "content": words(PROMPT_WORDS, 0)},
        {"role": "user", "content": words(PROMPT_WORDS, seed)},
    ]
    fields = {"max_tokens": tokens, "temperature": 0.8, "ignore_eos": True}
    return {"model": "policy", "messages": messages, "stream": True, **fields}


async def _ask(url: str, body: dict[str, Any]) -> tuple[float, int]:
    """Return the seconds from sending to the first text, and the number of events."""
    # A plain socket: the cost of a client library would hide the difference.
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**20)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    sent, first, events = time.perf_counter(), None, 0
    writer.write(head.encode() + data)
    async for line in reader:
        if line.startswith(b"data: "):
            if line.startswith(b"data: [DONE]"):
                break
            events += 1
            if first is None and any(choice["delta"].get("content") for choice in json.loads(line[6:])["choices"]):
                first = time.perf_counter() - sent
        elif line.startswith(b"HTTP/1.1") and b" 200 " not in line:
            raise RuntimeError(line.decode())
    writer.close()
    if first is None:
        raise RuntimeError("no text came")
    return first, events
