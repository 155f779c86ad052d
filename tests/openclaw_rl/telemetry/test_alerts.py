"""Alerts reach a webhook, in order, and a webhook that fails never costs more than its alerts."""

import asyncio
import json

import httpx
from pydantic import SecretStr

from openclaw_rl.settings import AlertSettings
from openclaw_rl.telemetry.alerts import ROOM, TRIES, Alerts

SETTINGS = AlertSettings(webhook_url=SecretStr("http://hook.test/a?token=secret"), retry_s=0.0)


async def sent(count: int, answer: httpx.Response, *, want: int) -> list[dict[str, object]]:
    """Raise `count` alerts and wait until the hook was called `want` times."""
    bodies, done = [], asyncio.Event()

    def hook(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        if len(bodies) >= want:
            done.set()
        return answer

    async with httpx.AsyncClient(transport=httpx.MockTransport(hook)) as client:
        alerts = Alerts(SETTINGS, client, server="tiny")
        for i in range(count):
            alerts.raise_alert("rolled_back", serving=i)
        task = asyncio.create_task(alerts.run())
        async with asyncio.timeout(120):
            await done.wait()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return bodies


async def test_an_alert_is_posted_with_its_fields() -> None:
    (body,) = await sent(1, httpx.Response(204), want=1)
    assert (body["event"], body["server"], body["fields"]) == ("rolled_back", "tiny", {"serving": 0})
    assert isinstance(body["at"], float)


async def test_a_hook_that_fails_is_tried_again_and_the_next_alert_still_goes() -> None:
    bodies = await sent(2, httpx.Response(500), want=2 * TRIES)
    assert [body["fields"] for body in bodies] == [{"serving": 0}] * TRIES + [{"serving": 1}] * TRIES


async def test_the_newest_alerts_wait_and_raising_never_blocks() -> None:
    bodies = await sent(ROOM + 5, httpx.Response(200), want=ROOM)
    assert [body["fields"] for body in bodies] == [{"serving": i} for i in range(5, ROOM + 5)]


async def test_without_a_webhook_nothing_is_kept() -> None:
    async with httpx.AsyncClient() as client:
        alerts = Alerts(AlertSettings(), client)
        for _ in range(3 * ROOM):
            alerts.raise_alert("rolled_back")
        assert alerts._waiting.empty()


def test_the_hook_s_address_is_never_shown() -> None:
    assert "secret" not in repr(SETTINGS) + SETTINGS.model_dump_json()
