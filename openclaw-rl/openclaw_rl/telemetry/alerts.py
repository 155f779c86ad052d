"""What an owner must hear of although chats go on: one log line at `error`, and a POST to `alerts.webhook_url`.

Promises: raising an alert never blocks and never fails; a webhook that does not take one is out of order in `/healthz`
until it takes the next, and the newest `ROOM` wait for it. It is asked and nobody else: a redirect is not followed. Its
address is told nowhere. The body is {"event", "at" (seconds since 1970), "server", "fields"}: numbers and names, no
text of a chat.
"""

import asyncio
import time
from typing import Protocol

import httpx
import structlog

from openclaw_rl.settings import AlertSettings
from openclaw_rl.telemetry.health import Health

log = structlog.get_logger()


class Alert(Protocol):
    def __call__(self, event: str, **fields: str | float | None) -> object: ...


ROOM = 64
TRIES = 3
PART = "alert webhook"


class Alerts:
    def __init__(
        self,
        settings: AlertSettings,
        client: httpx.AsyncClient,
        *,
        server: str = "openclaw-rl",
        health: Health | None = None,
    ) -> None:
        self._settings, self._client, self._server = settings, client, server
        self._health = health or Health()
        self._waiting: asyncio.Queue[dict[str, object]] = asyncio.Queue(ROOM)

    def raise_alert(self, event: str, **fields: str | float | None) -> None:
        log.error(event, **fields)
        if self._settings.webhook_url is None:
            return
        if self._waiting.full():
            self._waiting.get_nowait()
        self._waiting.put_nowait({"event": event, "at": time.time(), "server": self._server, "fields": fields})

    async def run(self) -> None:
        """Send what waits, forever. Owned by the app."""
        while True:
            body = await self._waiting.get()
            problem = await self._send(body)
            for attempt in range(TRIES - 1):
                if problem is None:
                    break
                await asyncio.sleep(self._settings.retry_s * 2**attempt)
                problem = await self._send(body)
            if problem is None:
                self._health.ok(PART)
            else:
                log.warning("alert_not_delivered", alert=body["event"], error=problem)
                self._health.failed(PART, problem, at_once=True)

    async def _send(self, body: dict[str, object]) -> str | None:
        """What went wrong, in words that do not hold the address: httpx's own would."""
        url = self._settings.webhook_url
        assert url is not None  # nothing is queued without
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                response = await self._client.post(url.get_secret_value(), json=body, follow_redirects=False)
        except (httpx.HTTPError, TimeoutError) as error:
            return f"it did not answer: {type(error).__name__}"
        return None if response.is_success else f"it answered {response.status_code}"
