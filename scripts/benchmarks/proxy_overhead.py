"""Overhead of the proxy: added time to first token, and CPU time per streamed token.

    scripts/benchmarks.sh proxy_overhead [--rounds 100] [--out FILE.json]

The real server (with ledger and sessions) runs over the stub engine, which answers at once and then streams 25 tokens a
second. Bare and proxied requests alternate in one run: `POST /generate` with the ids of a 2k-token prompt straight to
the stub, and a chat with a prompt of that length through the proxy. In a `new` chat only the system message was seen
before; `next turn` continues a conversation. The time to first token is that of the first text, not of the role. With
16 streams each client holds its stream open for two seconds before the next request, so that 16 run at any time. Every
figure comes with the load generator's own delay: the lateness of its event loop.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.chat_load import loop_delay, quantile
from openclaw_rl.testing.running_server import RunningServer

WORDS = ["time", "people", "water", "light", "house", "story", "world", "point", "hand", "night", "money", "paper"]
PROMPT_TOKENS = 2000
TEXT = b'"delta":{"content":"'
ROLE = b'"role":"assistant"'


def words(count: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


async def first_token_s(url: str, path: str, body: dict[str, object]) -> tuple[float, int]:
    """Return the seconds from sending to the first text, and the number of events."""
    # A plain socket: the cost of a client library would hide the proxy's.
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
    sent = time.perf_counter()
    writer.write(request)
    first: float | None = None
    events = 0
    async for line in reader:
        if line.startswith(b"data: "):
            if line.startswith(b"data: [DONE]"):
                break
            events += 1
            is_text = path == "/generate" or (TEXT in line and ROLE not in line)
            if first is None and is_text:
                first = time.perf_counter() - sent
        elif line.startswith(b"HTTP/1.1") and b" 200 " not in line:
            raise RuntimeError(line.decode())
    writer.close()
    if first is None:
        raise RuntimeError("no text came")
    return first, events


def chat_body(turn: int, seed: int, tokens: int) -> dict[str, object]:
    """Return a chat of about PROMPT_TOKENS tokens; turn n + 1 continues turn n."""
    messages: list[dict[str, str]] = [{"role": "system", "content": words(PROMPT_TOKENS // 2, 0)}]
    messages.append({"role": "user", "content": words(PROMPT_TOKENS // 2, seed)})
    for number in range(turn):
        messages.append({"role": "assistant", "content": words(30, seed + 7 * number)})
        messages.append({"role": "user", "content": words(30, seed + 11 * number)})
    return {"model": "policy", "messages": messages, "stream": True, "max_tokens": tokens}


def generate_body(tokens: int) -> dict[str, object]:
    ids = [300 + i % 1500 for i in range(PROMPT_TOKENS)]
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": tokens},
        "stream": True,
        "return_logprob": True,
    }


async def time_to_first_token(server: str, engine: str, streams: int, rounds: int) -> dict[str, object]:
    found: dict[str, list[float]] = {"bare": [], "new": [], "next turn": []}
    tokens = 4 if streams == 1 else 50  # at 25 tokens a second
    pause = random.Random(streams)

    async def client(number: int) -> None:
        await asyncio.sleep(pause.random() * tokens / 25)
        for at in range(rounds):
            seed = 1000 * number + at + 100_000 * streams
            found["bare"].append((await first_token_s(engine, "/generate", generate_body(tokens)))[0])
            for kind, turn in (("new", 0), ("next turn", 1)):
                body = chat_body(turn, seed, tokens)
                found[kind].append((await first_token_s(server, "/v1/chat/completions", body))[0])

    stop = asyncio.Event()
    own = asyncio.create_task(loop_delay(stop))
    await asyncio.gather(*(client(number) for number in range(streams)))
    stop.set()
    late = await own
    bare = quantile(found["bare"], 0.5)

    def row(values: list[float]) -> dict[str, float]:
        return {f"p{int(100 * q)} ms": round(1e3 * quantile(values, q), 2) for q in (0.5, 0.9, 0.99)}

    return {
        "streams": streams,
        "requests of each kind": len(found["bare"]),
        **{kind: row(values) for kind, values in found.items()},
        **{f"added, {kind}": row([value - bare for value in found[kind]]) for kind in ("new", "next turn")},
        "ratio p50 next turn / bare": round(quantile(found["next turn"], 0.5) / bare, 2),
        "load generator's own delay": row(late),
    }


def cpu_s(pid: int) -> float:
    """Return the user and system time of a process, over all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


async def cpu_per_token(server: str, pid: int, engine: str, engine_pid: int, streams: int) -> dict[str, object]:
    """Return the CPU time of a token: the slope between two reply lengths; the rest is the cost of a request."""
    points = []
    for tokens in (20, 320):
        proxy, stub, began = cpu_s(pid), cpu_s(engine_pid), time.perf_counter()
        bodies = [chat_body(0, 9_000_000 + tokens * 1000 + i, tokens) for i in range(streams)]
        replies = await asyncio.gather(*(first_token_s(server, "/v1/chat/completions", body) for body in bodies))
        events = sum(events for _, events in replies)
        points.append((events, cpu_s(pid) - proxy, cpu_s(engine_pid) - stub, time.perf_counter() - began))
    (e0, c0, s0, _), (e1, c1, s1, seconds) = points
    return {
        "streams": streams,
        "tokens a second in sum": round(e1 / seconds),
        "proxy, us CPU per streamed token": round(1e6 * (c1 - c0) / (e1 - e0), 1),
        "proxy, us CPU per token, requests included": round(1e6 * c1 / e1, 1),
        "proxy, ms CPU per request": round(1e3 * (c0 - e0 * (c1 - c0) / (e1 - e0)) / streams, 2),
        "stub engine, us CPU per token": round(1e6 * (s1 - s0) / (e1 - e0), 1),
    }


def start_stub(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    where = folder / "engine.json"
    argv = [sys.executable, "-m", "openclaw_rl.testing", "--port-file", str(where), "--mean-tokens", "0"]
    process = subprocess.Popen([*argv, "--tokens-per-s", "25"], env=os.environ | {"PYTHONSAFEPATH": "1"})
    end = time.monotonic() + 60
    while not where.is_file():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError("the stub engine did not start")
        time.sleep(0.1)
    return process, json.loads(where.read_text())["url"]


async def measure(server: RunningServer, engine: str, engine_pid: int, rounds: int) -> dict[str, object]:
    assert server.process is not None
    pid = server.process.pid
    await asyncio.gather(*(first_token_s(server.url, "/v1/chat/completions", chat_body(0, i, 8)) for i in range(8)))
    return {
        "time to first token": [
            await time_to_first_token(server.url, engine, 1, rounds),
            await time_to_first_token(server.url, engine, 16, max(4, rounds // 10)),
        ],
        "CPU": await cpu_per_token(server.url, pid, engine, engine_pid, 64),
        "resident MB of the server": resident_mb(pid),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "proxy_overhead.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stub, engine = start_stub(folder)
        try:
            options = {"engine.kind": "url", "engine.url": engine, "trainer.kind": "external"}
            flags = [part for key, value in options.items() for part in ("--set", f"{key}={value}")]
            with RunningServer(folder / "data", flags) as server:
                figures = asyncio.run(measure(server, engine, stub.pid, args.rounds))
        finally:
            stub.terminate()
            stub.wait()
    figures["machine"] = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    text = json.dumps(figures, indent=2)
    print(text)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
