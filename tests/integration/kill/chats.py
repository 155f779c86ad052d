"""People who chat while everything is killed around them.

Each holds one conversation after the other: a question, then corrections and thanks. A request that fails is sent
again,
as clients do, until it is answered. What a person saw finish is written down: the ledger owes it.
"""

import asyncio
import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

ANSWERS = (
    ("No, that is wrong. Try topic {} again.", -1),
    ("That is not what I asked for. Topic {} please.", -1),
    ("Thanks, that is perfect! Topic {} next.", 1),
    ("Great, exactly what I wanted, now {}.", 1),
    ("ok {}", 0),
)
"""What people say next, and what the rules judge makes of it."""
RETRY_S, TURNS = 0.03, 5


class Cut(Exception):
    """The reply did not come to its end; the same request again."""


class Refused(Exception):
    """An answer that no client should get."""


@dataclass(slots=True)
class Seen:
    """A reply whose finish the client saw."""

    turn_id: str
    text: str
    weight_version: int | None
    """None: the head went out while the request was held, and could not name it."""
    session_id: str | None
    asked: str
    """The user's message it replies to."""
    said_next: str | None = None
    """The user's next message, once its own reply was seen."""
    verdict: int | None = None
    """What the judge must say of this reply then."""


@dataclass(slots=True)
class Chats:
    """All people together. `stop` ends them between two requests."""

    url: str
    seed: int
    people: int = 4
    users: tuple[str, ...] = ()
    """Users that the people are, in turn, each with a key of its own; none: nobody has a key."""
    seen: list[Seen] = field(default_factory=list)
    heard: Counter[tuple[str | None, str]] = field(default_factory=Counter)
    """Requests of whose reply anything came, by session and message: the ledger owes those too, cut or not."""
    sides: int = 0
    """Background requests that were answered."""
    cut: Counter[str] = field(default_factory=Counter)
    """Requests that were not answered, by what the client saw."""
    faults: list[str] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for person in range(self.people):
                group.create_task(self._chat(person, random.Random(f"{self.seed}-{person}")))

    async def _chat(self, person: int, chance: random.Random) -> None:
        headers = {"authorization": f"Bearer {key_of(user)}"} if (user := self.user_of(person)) else {}
        limits = httpx.Limits(max_keepalive_connections=1)
        async with httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=20, trust_env=False, limits=limits
        ) as client:
            for number in itertools.count():
                if self.stop.is_set():
                    return
                session_id = f"session-{person}-{number}" if chance.random() < 0.7 else None
                await self._converse(client, f"{person}-{number}", session_id, chance)

    def user_of(self, person: int) -> str | None:
        return self.users[person % len(self.users)] if self.users else None

    async def _converse(
        self, client: httpx.AsyncClient, topic: str, session_id: str | None, chance: random.Random
    ) -> None:
        said, verdict = f"Tell me one thing about topic {topic} in a short line.", None
        messages: list[dict[str, str]] = []
        last: Seen | None = None
        for turn in range(TURNS):
            messages.append({"role": "user", "content": said})
            seen = await self._until_answered(client, messages, session_id, chance)
            if seen is None:
                return
            self.seen.append(seen)
            if last is not None:
                last.said_next, last.verdict = said, verdict
            if self.stop.is_set() or not seen.text.strip() or chance.random() < 0.1:
                return
            last = seen
            messages.append({"role": "assistant", "content": seen.text})
            template, verdict = chance.choice(ANSWERS)
            said = template.format(1000 * turn + chance.randrange(1000))  # nobody says the same twice in a row

    async def _until_answered(
        self, client: httpx.AsyncClient, messages: list[dict[str, str]], session_id: str | None, chance: random.Random
    ) -> Seen | None:
        """None: the client hung up, or nobody answered before the end."""
        hangs_up = chance.random() < 0.03
        if chance.random() < 0.05:
            await self._side(client, session_id)
        ask = self._whole if chance.random() < 0.1 else self._streamed
        while True:
            try:
                if hangs_up:
                    await self._hang_up(client, messages, session_id)
                    return None
                return await ask(client, messages, session_id)
            except (Cut, httpx.TransportError) as error:
                self.cut[str(error) if isinstance(error, Cut) else type(error).__name__] += 1
            except Refused as error:
                self.faults.append(str(error))
                return None
            if self.stop.is_set():
                return None
            await asyncio.sleep(RETRY_S)

    async def _streamed(
        self, client: httpx.AsyncClient, messages: list[dict[str, str]], session_id: str | None
    ) -> Seen:
        text, turn_id, finish = "", "", None
        async with client.stream(
            "POST", "/v1/chat/completions", json=_body(messages, stream=True), headers=_headers(session_id)
        ) as reply:
            if reply.status_code != 200:
                _refuse(reply.status_code, await reply.aread())
            try:
                is_heard = False
                async for line in reply.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    if not is_heard:
                        is_heard = True
                        self.heard[session_id, messages[-1]["content"]] += 1
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise Cut(f"error event {event['error'].get('code')}")
                    turn_id = event["id"]
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
                        finish = choice["finish_reason"] or finish
            except httpx.TransportError:
                if finish is None:  # else: the finish was seen, so the ledger has it
                    raise
        if finish is None:
            raise Cut("a stream without its finish")
        return _seen(reply, turn_id, text, messages, session_id)

    async def _whole(self, client: httpx.AsyncClient, messages: list[dict[str, str]], session_id: str | None) -> Seen:
        reply = await client.post("/v1/chat/completions", json=_body(messages), headers=_headers(session_id))
        if reply.status_code != 200:
            _refuse(reply.status_code, reply.content)
        self.heard[session_id, messages[-1]["content"]] += 1
        answer = reply.json()
        return _seen(reply, answer["id"], answer["choices"][0]["message"]["content"] or "", messages, session_id)

    async def _hang_up(self, client: httpx.AsyncClient, messages: list[dict[str, str]], session_id: str | None) -> None:
        """Leave after the first words."""
        async with client.stream(
            "POST", "/v1/chat/completions", json=_body(messages, stream=True), headers=_headers(session_id)
        ) as reply:
            async for _ in reply.aiter_lines():
                return

    async def _side(self, client: httpx.AsyncClient, session_id: str | None) -> None:
        messages = [{"role": "user", "content": "Give this chat a title."}]
        headers = {**_headers(session_id), "x-turn-type": "side"}
        try:
            reply = await client.post("/v1/chat/completions", json=_body(messages), headers=headers)
        except httpx.TransportError:
            return
        self.sides += reply.status_code == 200


def key_of(user: str) -> str:
    """The chat key of a user."""
    return f"sk-{user}-5up3r"


def _body(messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": messages, "max_tokens": 48, **fields}


def _headers(session_id: str | None) -> dict[str, str]:
    return {} if session_id is None else {"x-session-id": session_id}


def _refuse(status: int, content: bytes) -> None:
    if status == 503:
        raise Cut("503")
    raise Refused(f"a chat was answered {status}: {content[:300]!r}")


def _seen(
    reply: httpx.Response, turn_id: str, text: str, messages: list[dict[str, str]], session_id: str | None
) -> Seen:
    version = int(reply.headers["x-weight-version"])
    return Seen(turn_id, text, version, session_id, asked=messages[-1]["content"])
