"""What an owner must hear of although chats go on: one log line at `error`, and a POST to `alerts.webhook_url`.

Promises: raising an alert never blocks and never fails; what the webhook cannot take is logged, and the newest `ROOM`
wait for it. The body is {"event", "at" (seconds since 1970), "server", "fields"}: numbers and names, no text of a chat.
"""

import asyncio
import time
from typing import Protocol

import httpx
import structlog

from openclaw_rl.settings import AlertSettings

log = structlog.get_logger()


class Alert(Protocol):
    def __call__(self, event: str, **fields: str | float | None) -> object: ...


ROOM = 64
TRIES = 3


class Alerts:
    def __init__(self, settings: AlertSettings, client: httpx.AsyncClient, *, server: str = "openclaw-rl") -> None:
        self._settings, self._client, self._server = settings, client, server
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
            for attempt in range(TRIES):
                try:
                    await self._send(body)
                    break
                except (httpx.HTTPError, TimeoutError) as error:
                    if attempt + 1 == TRIES:
                        log.warning("alert_not_delivered", alert=body["event"], error=repr(error))
                    else:
                        await asyncio.sleep(self._settings.retry_s * 2**attempt)

    async def _send(self, body: dict[str, object]) -> None:
        url = self._settings.webhook_url
        assert url is not None  # nothing is queued without
        async with asyncio.timeout(self._settings.timeout_s):
            response = await self._client.post(url.get_secret_value(), json=body, follow_redirects=False)
            response.raise_for_status()
