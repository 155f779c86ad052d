"""Blocks of the same chats under different conditions, for benchmarks that compare neighbouring blocks of one run."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.chat_load import chat, loop_delay, quantile
from benchmarks.proxy.load import words
from openclaw_rl.testing.running_server import RunningServer

PROMPT_WORDS, REPLY_TOKENS, CHATS_EACH = 1000, 50, 3


@dataclass(slots=True)
class Block:
    """The chats of one block."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    """The load generator's own delay."""

    @property
    def figures(self) -> dict[str, float]:
        return {
            "first token p50": quantile(self.first, 0.5),
            "first token p90": quantile(self.first, 0.9),
            "first token p99": quantile(self.first, 0.99),
            "gap p50": quantile(self.gaps, 0.5),
            "gap p99": quantile(self.gaps, 0.99),
        }


async def block(server: RunningServer, streams: int, seed: int) -> Block:
    """Hold the chats of one block: each client has three turns of one conversation."""
    found, stop = Block(), asyncio.Event()
    delay = asyncio.create_task(loop_delay(stop))
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:

        async def talk(number: int) -> None:
            await asyncio.sleep(random.Random(number).random())
            messages: list[dict[str, Any]] = [{"role": "user", "content": words(PROMPT_WORDS, 1000 * seed + number)}]
            for turn in range(CHATS_EACH):
                reply = await chat(
                    client, messages, session=f"{seed}-{number}-{time.time_ns()}", max_tokens=REPLY_TOKENS
                )
                if reply.error is not None:
                    raise RuntimeError(reply.error)
                found.first.append(reply.token_times[0] - reply.started)
                found.gaps.extend(reply.gaps)
                messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": words(30, turn)}]

        await asyncio.gather(*(talk(number) for number in range(streams)))
    stop.set()
    found.late = await delay
    return found


def told(blocks: list[Block]) -> dict[str, float]:
    """Return the figures over all blocks, in milliseconds."""
    whole = Block([x for b in blocks for x in b.first], [x for b in blocks for x in b.gaps])
    late = quantile([x for b in blocks for x in b.late], 0.99)
    return {f"{name}, ms": round(1e3 * value, 2) for name, value in whole.figures.items()} | {
        "load generator's own delay p99, ms": round(1e3 * late, 2)
    }


def ratios(blocks: list[Block], without: list[Block]) -> dict[str, list[float]]:
    """Return the median, the least and the largest ratio of each figure, over pairs of neighbouring blocks."""
    found = {}
    for name in blocks[0].figures:
        each = sorted(one.figures[name] / other.figures[name] for one, other in zip(blocks, without, strict=True))
        found[name] = [round(value, 2) for value in (quantile(each, 0.5), each[0], each[-1])]
    return found
