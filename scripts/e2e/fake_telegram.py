"""A fake Telegram on loopback: the Bot API that a real client polls, and the one user who writes to the bot.

The user writes, reacts to a message of the bot with an emoji, and reads. The client needs `channels.telegram.apiRoot`.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

USER = {"id": 777, "is_bot": False, "first_name": "Uma", "username": "uma"}
CHAT = {"id": USER["id"], "type": "private", "first_name": USER["first_name"]}
BOT = {"id": 42, "is_bot": True, "first_name": "Bot", "username": "a_bot"}
_ANSWERS: dict[str, Any] = {
    "getMe": BOT | {"can_join_groups": True, "can_read_all_group_messages": False, "supports_inline_queries": False},
    "getWebhookInfo": {"url": "", "has_custom_certificate": False, "pending_update_count": 0},
    "getMyCommands": [],
    "getChat": CHAT,
}
_LONGEST_POLL_S = 5.0
_POLL_S = 0.1


@dataclass
class FakeTelegram:
    """The Bot API's state: updates that the client has not taken, and the texts of the bot's messages."""

    said: dict[int, str] = field(default_factory=dict)
    """The bot's messages by their id, oldest first; an edit replaces the text."""
    _updates: list[dict[str, Any]] = field(default_factory=list)
    _ids: Iterator[int] = field(default_factory=lambda: count(1001))
    _lock: Lock = field(default_factory=Lock)

    def write(self, text: str) -> None:
        """Send a message of the user to the bot."""
        self._update("message", message_id=next(self._ids), **{"from": USER}, text=text)

    def react(self, message_id: int, emoji: str) -> None:
        """React to a message of the bot, as the user."""
        new = [{"type": "emoji", "emoji": emoji}]
        self._update("message_reaction", message_id=message_id, user=USER, old_reaction=[], new_reaction=new)

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/bot{token}/{method}", self._call, methods=["GET", "POST"])])

    def _update(self, kind: str, **what: Any) -> None:
        with self._lock:
            update = {"update_id": next(self._ids), kind: {"chat": CHAT, "date": int(time.time()), **what}}
            self._updates.append(update)

    async def _call(self, request: Request) -> JSONResponse:
        method = request.path_params["method"]
        if request.headers.get("content-type", "").startswith("application/json"):
            body = await request.json()
        else:
            body = dict(await request.form()) if request.method == "POST" else dict(request.query_params)
        if method == "getUpdates":
            result: Any = await self._waiting(int(body.get("offset") or 0), float(body.get("timeout") or 0))
        elif method in ("sendMessage", "sendRichMessage", "editMessageText"):
            result = self._kept(int(body.get("message_id") or next(self._ids)), str(body.get("text") or ""))
        else:
            result = _ANSWERS.get(method, True)
        return JSONResponse({"ok": True, "result": result})

    async def _waiting(self, offset: int, timeout_s: float) -> list[dict[str, Any]]:
        end = time.monotonic() + min(timeout_s, _LONGEST_POLL_S)
        while True:
            with self._lock:
                self._updates = [update for update in self._updates if update["update_id"] >= offset]
                found = list(self._updates)
            if found or time.monotonic() >= end:
                return found
            await asyncio.sleep(_POLL_S)

    def _kept(self, message_id: int, text: str) -> dict[str, Any]:
        self.said[message_id] = text
        return {"message_id": message_id, "date": int(time.time()), "chat": CHAT, "from": BOT, "text": text}
