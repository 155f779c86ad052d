"""Alerts: faults that the owner must hear of although chats go on.

An alert is one log line at `error`, and a POST to `alerts.webhook_url` where that is set. The body is {"event", "at"
(seconds since 1970), "server", "fields"}: numbers and names, no text of a chat.

Raising an alert never blocks and never fails. A webhook that refuses an alert is out of order in `/healthz` until it
takes the next one; the newest `ROOM` alerts wait for it. The client follows no redirect, and no log line and no error
holds the webhook's address.
"""

import asyncio
import time
from typing import Protocol

import httpx
import structlog

from openclaw_rl.backoff import Backoff
from openclaw_rl.settings import AlertSettings
from openclaw_rl.telemetry.health import Health

log = structlog.get_logger()


class Alert(Protocol):
    def __call__(self, event: str, **fields: str | float | None) -> object: ...


ROOM = 64
TRIES = 3
PART = "alert webhook"
_SHORTEST_PAUSE_S = 0.001  # `alerts.retry_s` may be 0


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
        """Send the waiting alerts, forever. The server's task group owns this task."""
        while True:
            body = await self._waiting.get()
            problem = await self._deliver(body)
            if problem is None:
                self._health.ok(PART)
            else:
                log.warning("alert_not_delivered", alert=body["event"], error=problem)
                self._health.failed(PART, problem, at_once=True)

    async def _deliver(self, body: dict[str, object]) -> str | None:
        """Send one alert, up to `TRIES` times. Return the last problem, or None."""
        first_s = max(self._settings.retry_s, _SHORTEST_PAUSE_S)
        pauses = Backoff(first_s, first_s * 2**TRIES)
        problem = await self._send(body)
        for _ in range(TRIES - 1):
            if problem is None:
                break
            await asyncio.sleep(pauses.next_s())
            problem = await self._send(body)
        return problem

    async def _send(self, body: dict[str, object]) -> str | None:
        """Send it once. Return the problem in words that do not hold the address, as httpx's own words would."""
        url = self._settings.webhook_url
        assert url is not None  # without a URL the queue stays empty
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                response = await self._client.post(url.get_secret_value(), json=body, follow_redirects=False)
        except (httpx.HTTPError, TimeoutError) as error:
            return f"it did not answer: {type(error).__name__}"
        return None if response.is_success else f"it answered {response.status_code}"
