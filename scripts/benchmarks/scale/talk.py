"""Conversations as clients hold them: each request repeats the conversation so far.

Words and token ids are drawn from Zipf's law over vocabularies of 20,000 words and 151,936 ids, so that most stretches
of a prompt need four bytes a token before compression, as with today's tokenizers. Four agents have system prompts of 2
to 8 k tokens and tools; every session belongs to one of them.
"""

import json
from dataclasses import dataclass

import numpy as np

from openclaw_rl.messages import Message
from openclaw_rl.types import Request, SamplingParams, Scope, Turn, TurnKey, VersionRun

VOCABULARY = 151_936
SYSTEM_TOKENS = (2048, 4096, 6144, 8192)
TURNS, REPLY_TOKENS, SAID_TOKENS = 20, 100, 60
FIRST = "c00000"
"""Mark in the name of every request, turn and session of a filled ledger."""
SAMPLING = SamplingParams(max_new_tokens=1024)


@dataclass(slots=True)
class Session:
    number: int
    user: str
    name: str
    tools: str
    messages: list[Message]
    ids: list[int]
    turns: int = 0
    request: Request | None = None
    turn: Turn | None = None
    """Newest turn, still open."""


class Talk:
    """Sessions that take turns; equal seeds give equal words."""

    def __init__(self, seed: int, *, prefix: str, at_once: int = 64) -> None:
        self._random = np.random.default_rng(seed)
        self._words = [f"w{n:x}" for n in range(20_000)]
        self._word_pool = self._random.zipf(1.3, 1_000_000) % len(self._words)
        self._id_pool = self._random.zipf(1.2, 2_000_000) % VOCABULARY
        self._log_probs = (-self._random.exponential(0.6, 500_000)).astype(np.float32)
        self._systems = [(self.text(4 * n // 5), self.ids(n)) for n in SYSTEM_TOKENS]
        self._tools = [json.dumps([{"name": f"tool_{k}", "about": self.text(30)} for k in range(12)]) for _ in range(4)]
        self._prefix, self._sessions, self._turns = prefix, 0, 0
        self._live = [self._new() for _ in range(at_once)]
        for place, session in enumerate(self._live):  # as if the sessions had begun one after the other
            session.turns = place % TURNS

    def text(self, words: int) -> str:
        start = int(self._random.integers(len(self._word_pool) - words))
        return " ".join(self._words[word] for word in self._word_pool[start : start + words])

    def ids(self, n: int) -> list[int]:
        start = int(self._random.integers(len(self._id_pool) - n))
        found: list[int] = self._id_pool[start : start + n].tolist()
        return found

    def chance(self) -> float:
        return float(self._random.random())

    def next(self) -> tuple[Session, Session | None]:
        """Return the session of the next turn, and the session that ended before it with an unanswered reply."""
        place = self._turns % len(self._live)
        self._turns += 1
        session, ended = self._live[place], None
        if session.turns >= TURNS:
            ended, session = session, self._new()
            self._live[place] = session
        return session, ended

    def open(self) -> list[Session]:
        return [session for session in self._live if session.turn is not None]

    def ask(self, session: Session, at: float) -> Request:
        """Return the session's next request: new words of the user or a tool, after the conversation so far."""
        session.turns += 1
        role = "tool" if session.turn is not None and session.turns % 4 == 0 else "user"
        said = Message(role=role, content=self.text(SAID_TOKENS * 4 // 5))
        session.messages.append(said)
        session.ids += self.ids(SAID_TOKENS)
        session.request = Request(
            request_id=f"req-{self._random.integers(1 << 62):016x}-{self._prefix}",
            scope=Scope(session.user, session.name),
            received_at=at,
            messages=tuple(session.messages),
            tools_json=session.tools,
            template_kwargs_json=None,
            prompt_ids=tuple(session.ids),
            sampling=SAMPLING,
        )
        return session.request

    def reply(self, session: Session, version: int, at: float) -> tuple[Turn, TurnKey]:
        assert session.request is not None
        n = int(self._random.integers(REPLY_TOKENS // 2, REPLY_TOKENS * 3 // 2))
        ids, message = self.ids(n), Message(role="assistant", content=self.text(n * 4 // 5))
        session.turn = Turn(
            turn_id=f"chatcmpl-{self._random.integers(1 << 62):016x}-{self._prefix}",
            request_id=session.request.request_id,
            finished_at=at,
            response_ids=tuple(ids),
            rollout_log_probs=self.floats(n),
            loss_mask=(True,) * n,
            versions=(VersionRun(version, n),),
            finish_reason="stop",
            reply=message,
        )
        session.messages.append(message)
        session.ids += ids
        digest = f"{self._random.integers(1 << 62):032x}"
        return session.turn, TurnKey(digest, digest[::-1], digest)

    def floats(self, n: int) -> tuple[float, ...]:
        start = int(self._random.integers(len(self._log_probs) - n))
        return tuple(self._log_probs[start : start + n].tolist())

    def _new(self) -> Session:
        self._sessions += 1
        number = self._sessions
        text, ids = self._systems[number % len(self._systems)]
        return Session(
            number=number,
            user=f"user-{number % 50}",
            name=f"{self._prefix}-s{number}",
            tools=self._tools[number % len(self._tools)],
            messages=[Message(role="system", content=text)],
            ids=list(ids),
        )
