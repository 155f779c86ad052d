"""People who chat over bare sockets (64 streams through a client library would be most of the load), send again what
was not answered, and remember what they saw and when.
"""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import orjson
from kill.chats import ANSWERS, Cut, Refused, Seen

RETRY_S, PATIENCE_S = 0.25, 180.0


@dataclass(slots=True)
class Timing:
    """Of one reply, in seconds of the machine's monotonic clock."""

    turn_id: str
    sent: float
    first: float
    finished: float


@dataclass(frozen=True, slots=True)
class Manners:
    """How people behave."""

    streams: int
    """How many of them there are; each has one conversation at a time."""
    session_s: float
    """A conversation's length, on average."""
    think_s: float
    """Before the next message, on average."""
    max_tokens: int
    hangs_up: float = 0.02


@dataclass(slots=True)
class People:
    """All who chat with one server. `stop` ends them between two requests."""

    port: int
    manners: Manners
    seed: str
    seen: list[Seen] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    cut: list[tuple[float, float, str]] = field(default_factory=list)
    """Requests that were not answered to their end: begun, ended, what the client saw."""
    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    running: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for person in range(self.manners.streams):
                group.create_task(self._live(person, random.Random(f"{self.seed}-{person}")))

    async def _live(self, person: int, chance: random.Random) -> None:
        await self._think(chance, self.manners.session_s / 10)
        for number in itertools.count():
            if self.stop.is_set():
                return
            session_id = f"{self.seed}-{person}-{number}" if chance.random() < 0.8 else None
            ends_at = time.monotonic() + self.manners.session_s * chance.uniform(0.5, 1.5)
            self.counts["sessions"] += 1
            await self._converse(f"{self.seed}-{person}-{number}", session_id, chance, ends_at)

    async def _converse(self, topic: str, session_id: str | None, chance: random.Random, ends_at: float) -> None:
        said, verdict = f"Tell me one thing about topic {topic} in a short line.", None
        messages: list[dict[str, str]] = []
        last: Seen | None = None
        for turn in itertools.count():
            messages.append({"role": "user", "content": said})
            hangs_up = chance.random() < self.manners.hangs_up
            seen = await self._until_answered(messages, session_id, hangs_up=hangs_up)
            if seen is None:
                return
            self.seen.append(seen)
            if last is not None:
                last.said_next, last.verdict = said, verdict
            if self.stop.is_set() or not seen.text.strip() or time.monotonic() > ends_at:
                return
            last = seen
            messages.append({"role": "assistant", "content": seen.text})
            template, verdict = chance.choice(ANSWERS)
            said = template.format(1000 * turn + chance.randrange(1000))  # nobody says the same twice in a row
            await self._think(chance, self.manners.think_s)

    async def _think(self, chance: random.Random, mean_s: float) -> None:
        try:
            async with asyncio.timeout(chance.expovariate(1 / mean_s)):
                await self.stop.wait()
        except TimeoutError:
            return

    async def _until_answered(
        self, messages: list[dict[str, str]], session_id: str | None, *, hangs_up: bool
    ) -> Seen | None:
        """None: the client hung up, or nobody answered before the end."""
        while True:
            begun = time.monotonic()
            self.running += 1
            try:
                async with asyncio.timeout(PATIENCE_S):
                    return await self._ask(messages, session_id, hangs_up=hangs_up)
            except TimeoutError:
                self.cut.append((begun, time.monotonic(), "no end"))
            except (Cut, OSError, EOFError) as error:
                self.cut.append((begun, time.monotonic(), str(error) or type(error).__name__))
            except Refused as error:
                self.faults.append(str(error))
                return None
            finally:
                self.running -= 1
            if self.stop.is_set():
                return None
            await asyncio.sleep(RETRY_S)

    async def _ask(self, messages: list[dict[str, str]], session_id: str | None, *, hangs_up: bool) -> Seen | None:
        body = {"model": "policy", "messages": messages, "max_tokens": self.manners.max_tokens, "stream": True}
        data = orjson.dumps(body)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(data)}\r\n"
        head += "connection: close\r\ncontent-type: application/json\r\n"
        head += f"x-session-id: {session_id}\r\n\r\n" if session_id else "\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            sent = time.monotonic()
            writer.write(head.encode() + data)
            version = await _head(reader)
            return await self._read(reader, sent, version, messages, session_id, hangs_up=hangs_up)
        finally:
            writer.transport.abort()

    async def _read(
        self,
        reader: asyncio.StreamReader,
        sent: float,
        version: int | None,
        messages: list[dict[str, str]],
        session_id: str | None,
        *,
        hangs_up: bool,
    ) -> Seen | None:
        text, turn_id, first = "", "", 0.0
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            event = orjson.loads(line[6:])
            if "error" in event:
                raise Cut(f"error event {event['error'].get('code')}")
            turn_id, choice = event["id"], event["choices"][0]
            if content := choice["delta"].get("content"):
                first = first or time.monotonic()
                text += content
                if hangs_up:
                    self.counts["hung up"] += 1
                    return None
            if choice["finish_reason"] is not None:
                self.timings.append(Timing(turn_id, sent, first or time.monotonic(), time.monotonic()))
                return Seen(turn_id, text, version, session_id, asked=messages[-1]["content"])
        raise Cut("a stream without its finish")


async def _head(reader: asyncio.StreamReader) -> int | None:
    """The version that answers. Raises Cut for a 503, Refused for anything else but 200."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status = int(head[9:12])
    fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
    if status == 503:
        if "retry-after" not in fields:
            raise Refused("a 503 without Retry-After")
        raise Cut("503")
    if status != 200:
        raise Refused(f"a chat was answered {status}: {(await reader.read(300))!r}")
    return int(fields["x-weight-version"]) if "x-weight-version" in fields else None


def cut_without_cause(cut: list[tuple[float, float, str]], excused: Callable[[float, float], bool]) -> list[str]:
    """Requests that were not answered though the server was there all the time."""
    return [
        f"a chat was not answered though the server was there: {why}"
        for begun, ended, why in cut
        if not excused(begun, ended)
    ]
