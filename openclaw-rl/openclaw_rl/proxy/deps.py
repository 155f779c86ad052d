"""Dependencies of the proxy, as protocols. `sessions.store.Sessions` and `ledger.Ledger` implement them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.base import Engine
from openclaw_rl.messages import Message
from openclaw_rl.proxy.activity import ChatActivity
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.proxy.pictures import PictureReader
from openclaw_rl.sessions.commands import Command, CommandedChat
from openclaw_rl.settings import PictureSettings, SamplingSettings, ServerSettings, SessionSettings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.types import SHARED_POLICY, DropReason, Episode, OpenTurn, Request, Scope, SideCount, Turn
from openclaw_rl.web.auth import Caller, Keys


class SessionsPort(Protocol):
    """Sessions, as the proxy calls them. No method fails a chat."""

    def last_turn(self, scope: Scope, messages: Sequence[Message], group: str | None = None) -> OpenTurn | None: ...

    async def observe(self, request: Request) -> str | None: ...

    async def observe_side(self, scope: Scope, messages: Sequence[Message], group: str | None = None) -> str | None: ...

    async def served(self, request: Request, turn: Turn) -> bool: ...

    async def abandon(self, request_id: str, reason: DropReason, detail: str = "") -> None: ...

    async def done(self, scope: Scope) -> None: ...


class LedgerPort(Protocol):
    """The ledger, as the proxy calls it. Raises LedgerError if it cannot write."""

    async def begin(self, request: Request) -> None: ...

    async def count_side(self, side: SideCount) -> None: ...

    async def tokens_since(self, user: str, since: float) -> int: ...

    async def find_episode(self, user: str, episode_id: str) -> Episode | None: ...


class CommandsPort(Protocol):
    """Commands in a chat, carried out. No method fails a chat."""

    async def answer(self, command: Command, caller: Caller, chat: CommandedChat) -> str: ...


@dataclass(frozen=True, slots=True)
class ProxyDeps:
    """Components and settings that the proxy is built from."""

    frontend: FrontEnd
    engine: Engine
    serving: VersionAdmission
    sessions: SessionsPort
    ledger: LedgerPort
    server: ServerSettings
    sampling: SamplingSettings
    session: SessionSettings
    model_name: str
    """The name in `/v1/models`."""
    has_grammars: bool = False
    """The engine can hold a reply to a JSON schema."""
    pictures: PictureReader = field(default_factory=lambda: PictureReader(PictureSettings()))
    """Reads the pictures of requests, or refuses them."""
    trains_pictures: bool = False
    """Trainer and method take turns whose prompt has pictures."""
    trains: bool = False
    """Turns are meant to be trained on: a run of turns that cannot be is a problem."""
    longest_sample: int | None = None
    """Tokens of prompt and reply that the trainer takes; None: it is not known."""
    health: Health = field(default_factory=Health)
    """Gets each success and failure of the engine, and of its log-probs."""
    clock: Callable[[], float] = time.time
    """The ledger's clock."""
    activity: ChatActivity = field(default_factory=ChatActivity)
    """Learns of each reply that runs."""
    keys: Keys | None = None
    """None: the keys of `server`."""
    policy_of: Callable[[str], str] = lambda _: SHARED_POLICY
    """The policy that answers a user's chats."""
    commands: CommandsPort | None = None
    """None: `/rl` messages go to the model."""
