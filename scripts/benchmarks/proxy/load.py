"""Load of `proxy_overhead`: one client for all targets, on a bare socket, with a connection for each request."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

WORDS = ["time", "people", "water", "light", "house", "story", "world", "point", "hand", "night", "money", "paper"]
PROMPT_TOKENS = 2000
_PAUSE_S = 0.08
"""Longest pause of a client between two requests: a user does not answer at once."""
_SETTLE_S = 1.0
"""Time after a load in which its records and judgements still cost CPU, which counts."""
_seeds = random.Random()


@dataclass(frozen=True, slots=True)
class Target:
    """A program under load."""

    name: str
    port: int
    pid: int
    path: str = "/v1/chat/completions"

    @property
    def is_native(self) -> bool:
        """True if it takes the engine's own dialect: the engine itself, and the relay."""
        return self.path == "/generate"


@dataclass(frozen=True, slots=True)
class Answer:
    first_s: float
    """Seconds from sending to the first text, not to the role."""
    end_s: float
    pieces: int
    text: str


@dataclass(slots=True)
class FirstTokens:
    """Seconds to the first text: of chats whose system message alone was seen before, and of their next turns."""

    new: list[float] = field(default_factory=list)
    next_turn: list[float] = field(default_factory=list)


def words(count: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def new_chat(tokens: int) -> dict[str, Any]:
    """Return a chat of about PROMPT_TOKENS tokens; its system message is the same in all chats."""
    system, user = words(PROMPT_TOKENS // 2, 0), words(PROMPT_TOKENS // 2, _seeds.getrandbits(40))
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"model": "policy", "messages": messages, "stream": True, "max_tokens": tokens}


def next_turn(body: dict[str, Any], reply: str) -> dict[str, Any]:
    """Return the chat with the reply that came, and a short answer to it."""
    answer = words(30, _seeds.getrandbits(40))
    more = [{"role": "assistant", "content": reply}, {"role": "user", "content": answer}]
    return {**body, "messages": [*body["messages"], *more]}


def short_chat() -> dict[str, Any]:
    said = f"Say hello to number {_seeds.getrandbits(40)}."
    return {"model": "policy", "messages": [{"role": "user", "content": said}], "stream": True, "max_tokens": 8}


def generate(tokens: int, prompt_tokens: int = PROMPT_TOKENS) -> dict[str, Any]:
    """Return the engine's own request, with as many ids as a chat has tokens."""
    ids = [300 + i % 1500 for i in range(prompt_tokens)]
    sampling = {"max_new_tokens": tokens}
    return {"input_ids": ids, "sampling_params": sampling, "stream": True, "return_logprob": True}


async def ask(target: Target, body: dict[str, Any], key: str) -> Answer:
    """Send one request and read the stream to its end. Raises RuntimeError for another answer."""
    # A plain socket: the cost of a client library would hide the proxy's.
    data = orjson.dumps(body)
    head = f"POST {target.path} HTTP/1.1\r\nhost: 127.0.0.1:{target.port}\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {key}\r\ncontent-length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    lines: list[bytes] = []
    first: float | None = None
    sent = time.perf_counter()
    writer.write(head.encode() + data)
    async for line in reader:
        if line.startswith(b"data: "):
            if line.startswith(b"data: [DONE]"):
                break
            lines.append(line)
            if first is None and (target.is_native or _text_of(line)):
                first = time.perf_counter() - sent
        elif line.startswith(b"HTTP/1.1") and b" 200 " not in line:
            raise RuntimeError(f"{target.name}: {line.decode().strip()} {(await reader.read(500))!r}")
    end = time.perf_counter() - sent
    writer.close()
    if first is None:
        raise RuntimeError(f"{target.name}: no text came")
    texts = ["" if target.is_native else _text_of(line) for line in lines]
    pieces = len(lines) if target.is_native else sum(map(bool, texts))
    return Answer(first, end, pieces, "".join(texts))


def _text_of(line: bytes) -> str:
    choices = orjson.loads(line[6:]).get("choices") or []
    return (choices[0]["delta"].get("content") or "") if choices else ""


async def first_tokens(target: Target, key: str, *, streams: int, loops: int, tokens: int, pace: float) -> FirstTokens:
    """Return the times to the first text of `streams` clients: each asks a new chat, then goes on with it."""
    found = FirstTokens()

    async def client() -> None:
        await asyncio.sleep(_seeds.random() * tokens / pace if streams > 1 else 0)
        for _ in range(loops):
            body = generate(tokens) if target.is_native else new_chat(tokens)
            reply = await ask(target, body, key)
            found.new.append(reply.first_s)
            await asyncio.sleep(_seeds.random() * _PAUSE_S)
            body = body if target.is_native else next_turn(body, reply.text)
            found.next_turn.append((await ask(target, body, key)).first_s)
            await asyncio.sleep(_seeds.random() * _PAUSE_S)

    await asyncio.gather(*(client() for _ in range(streams)))
    return found


async def token_cost(target: Target, key: str, *, streams: int, lengths: tuple[int, int]) -> tuple[float, float]:
    """Return the CPU seconds of a streamed token and of a request: the slope between two lengths of replies."""
    points = []
    for tokens in lengths:  # each has chats of its own
        bodies = [generate(4) if target.is_native else new_chat(4) for _ in range(streams)]
        replies = await asyncio.gather(*(ask(target, body, key) for body in bodies))
        if target.is_native:
            bodies = [generate(tokens)] * streams
        else:
            bodies = [
                {**next_turn(body, reply.text), "max_tokens": tokens}
                for body, reply in zip(bodies, replies, strict=True)
            ]
        await asyncio.sleep(_SETTLE_S)
        before = cpu_s(target.pid)
        await asyncio.gather(*(ask(target, body, key) for body in bodies))
        await asyncio.sleep(_SETTLE_S)
        points.append((streams * tokens, cpu_s(target.pid) - before))
    (few, cost_of_few), (many, cost_of_many) = points
    slope = (cost_of_many - cost_of_few) / (many - few)
    return slope, (cost_of_few - few * slope) / streams


async def requests_a_second(target: Target, key: str, *, clients: int, seconds: float) -> tuple[float, float]:
    """Return the short requests a second of clients that never wait, and the CPU seconds of one."""
    done, end, before, began = 0, time.perf_counter() + seconds, cpu_s(target.pid), time.perf_counter()

    async def client() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await ask(target, generate(8, 12) if target.is_native else short_chat(), key)
            done += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    wall = time.perf_counter() - began
    await asyncio.sleep(_SETTLE_S)
    return done / wall, (cpu_s(target.pid) - before) / done


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of the living threads of a process, from the scheduler's own clock."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def resident_mb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) // 1024
