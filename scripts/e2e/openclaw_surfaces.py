"""Two ways to talk to OpenClaw: the methods of its WebChat, and Telegram. Each holds one chat of one user."""

import json
import subprocess
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar

from e2e.fake_telegram import USER, FakeTelegram

T = TypeVar("T")
ANSWER_S, POLL_S, SETTLED_S = 300.0, 0.5, 2.0
PRAISE = "/rl good"


class Surface(Protocol):
    name: str

    def say(self, text: str) -> str:
        """Send a message; return the agent's answer. Raises TimeoutError."""

    def praise(self) -> None:
        """Praise the newest answer, as this surface lets a user do it."""


class WebChat:
    """The gateway's methods that the WebChat calls. It has no reactions: the thumb is a command in the chat."""

    def __init__(self, client: Mapping[str, str]) -> None:
        self.name, self._client, self._key = "WebChat", client, "agent:main:webchat"

    def say(self, text: str) -> str:
        had = len(self._answers())
        sent = {"sessionKey": self._key, "message": text, "idempotencyKey": str(uuid.uuid4())}
        self._call("chat.send", sent)
        return str(waited(lambda: self._answers()[had:], f"WebChat: an answer to {text!r}")[-1])

    def praise(self) -> None:
        print(f"{self.name}: {PRAISE!r} → {self.say(PRAISE)!r}", flush=True)

    def _answers(self) -> list[str]:
        messages = self._call("chat.history", {"sessionKey": self._key, "limit": 100}).get("messages") or []
        return [text_of(one) for one in messages if one.get("role") == "assistant" and text_of(one)]

    def _call(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        argv = ["openclaw", "gateway", "call", method, "--json", "--timeout", "60000", "--params", json.dumps(params)]
        done = subprocess.run(argv, env=self._client, capture_output=True, text=True, timeout=180, check=False)
        if done.returncode:
            raise RuntimeError(f"{method} failed: {done.stderr or done.stdout}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found


class Telegram:
    """A user of the fake Telegram; the thumb is a reaction, which the client tells with the next message."""

    def __init__(self, api: FakeTelegram) -> None:
        self.name, self._api = "Telegram", api
        self._answer: list[int] = []

    def say(self, text: str) -> str:
        had = set(self._api.said)
        self._api.write(text)
        waited(lambda: set(self._api.said) - had, f"Telegram: an answer to {text!r}")
        shown, since = self._texts(had), time.monotonic()
        while time.monotonic() - since < SETTLED_S:  # a streamed answer is edited, and a long one is several messages
            if (now := self._texts(had)) != shown:
                shown, since = now, time.monotonic()
            time.sleep(POLL_S)
        self._answer = sorted(shown)
        return "\n".join(shown[message] for message in self._answer)

    def praise(self) -> None:
        self._api.react(self._answer[0], "👍")
        print(f"{self.name}: 👍 on {self._api.said[self._answer[0]]!r}", flush=True)
        time.sleep(SETTLED_S)  # the client polls for it

    def _texts(self, had: Collection[int]) -> dict[int, str]:
        return {message: text for message, text in self._api.said.items() if message not in had}


def telegram_config(api_root: str) -> dict[str, Any]:
    """Return the client's channel for this Bot API, open to its user."""
    return {
        "enabled": True,
        "botToken": "42:FAKE",
        "apiRoot": api_root,
        "dmPolicy": "allowlist",
        "allowFrom": [str(USER["id"])],
    }


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    return "\n".join(parts).strip()


def waited(look: Callable[[], T], what: str) -> T:
    """Return the first result that is not empty. Raises TimeoutError."""
    end = time.monotonic() + ANSWER_S
    while not (found := look()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {ANSWER_S:g} s: {what}")
        time.sleep(POLL_S)
    return found
