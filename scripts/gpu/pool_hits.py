"""Prefix-cache hits of a pool: conversations that stay on their engine, meet one at random, or have one engine alone.

Chats of this module are not trained on.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.chat_load import chat
from gpu.stages import Figures
from openclaw_rl.testing.running_server import RunningServer

LEAST_SHARE = 0.9
"""Of one engine's hit rate, that a pool with affinity must have."""
SIDE = {"X-Turn-Type": "side"}


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations that run at once, turn by turn. The first turn of each has no prefix, and does not count."""

    url: str
    count: int
    turns: int = 6
    words: int = 160
    """Repetitions of each one's own system prompt; an eighth of them of each message."""
    tokens: int = 24

    def run(self, name: str) -> Figures:
        """Hold them; return the share of prompt tokens that engines had cached."""
        return asyncio.run(self._run(name))

    async def _run(self, name: str) -> Figures:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits, trust_env=False) as client:
            found = await asyncio.gather(*(self._one(client, f"{name}-{n}") for n in range(self.count)))
        rows = [row for rows, _ in found for row in rows]
        asked, cached = sum(row[0] for row in rows), sum(row[1] for row in rows)
        figures: Figures = {"prompt tokens": asked, "cached": cached, "hit rate": round(cached / max(1, asked), 4)}
        return figures | {"errors": [error for _, errors in found for error in errors]}

    async def _one(self, client: httpx.AsyncClient, name: str) -> tuple[list[tuple[int, int]], list[str]]:
        """Return the prompt's and the cached tokens of each turn after the first, and what was refused or cut."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": f"{name}. " * self.words}]
        rows, errors = list[tuple[int, int]](), list[str]()
        for turn in range(self.turns):
            said = f"Tell me of the number {turn}, please. " * (self.words // 8)
            messages.append({"role": "user", "content": said})
            reply = await chat(client, messages, session=name, headers=SIDE, max_tokens=self.tokens, ignore_eos=True)
            if reply.error:
                errors.append(reply.error)
            if turn and reply.usage:
                details = reply.usage.get("prompt_tokens_details") or {}
                rows.append((int(reply.usage["prompt_tokens"]), int(details.get("cached_tokens", 0))))
            messages.append({"role": "assistant", "content": reply.text or "."})
        return rows, errors


def findings(hits: Figures) -> list[str]:
    """hits: the figures of `with affinity`, `at random` and `one engine`."""
    found = [f"{name}: {row['errors']}" for name, row in hits.items() if row["errors"]]
    rates = {name: row["hit rate"] for name, row in hits.items()}
    if not rates["with affinity"] >= LEAST_SHARE * rates["one engine"] > 0:
        found.append(f"with affinity the pool finds too few prefixes: {rates}")
    if not rates["at random"] < rates["with affinity"]:
        found.append(f"affinity finds no more prefixes than chance: {rates}")
    return found


def homes(server: RunningServer, sessions: int = 8, turns: int = 3) -> Figures:
    """Chat in sessions that take turns, with no other chat; return each one's engines, by the pool's counts."""
    met: dict[str, list[int]] = {}
    for _ in range(turns):
        for name in (f"home-{number}" for number in range(sessions)):
            before = _calls(server)
            body = {"messages": [{"role": "user", "content": f"I am {name}. Hello."}], "max_tokens": 4}
            headers = {"X-Session-Id": name, **SIDE}
            httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=120).raise_for_status()
            met.setdefault(name, []).extend(
                number for number, calls in enumerate(_calls(server)) if calls > before[number]
            )
    first = [engines[0] for engines in met.values()]
    return {
        "sessions on each engine": [first.count(number) for number in range(len(_calls(server)))],
        "sessions that changed engine": sum(len(set(engines)) > 1 for engines in met.values()),
        "turns": sum(map(len, met.values())),
    }


def _calls(server: RunningServer) -> list[int]:
    return [int(engine["calls"]) for engine in server.status()["engines"]]
