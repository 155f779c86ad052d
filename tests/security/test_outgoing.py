"""Requests leave for the URLs in the settings, and for no others."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import structlog
from files import contents
from harness.trainer import ToyTrainer

from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest
from openclaw_rl.errors import EngineError, JudgeError, SettingsError
from openclaw_rl.judge.client import HttpJudgeClient
from openclaw_rl.log import configure as configure_log
from openclaw_rl.messages import Message
from openclaw_rl.publishing.publication import REJECTIONS_IN_A_ROW
from openclaw_rl.settings import EngineSettings, JudgeSettings, load
from openclaw_rl.telemetry.alerts import TRIES, Alerts
from openclaw_rl.telemetry.health import Health
from openclaw_rl.testing import ToyPolicy


@contextmanager
def listening(status: int = 200, headers: dict[str, str] | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield the URL of a server with one answer to every request, and the requests that it got."""
    came: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            came.append(f"{self.command} {self.path} {self.headers.get('authorization', '')}")
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            for name, value in {"content-length": "2", **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"{}")

        do_GET = do_POST = do_CONNECT = answer

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", came
        finally:
            server.shutdown()
            thread.join()


HOOK = "/hook?token=h00k-5up3r"
GENERATE = GenerateRequest(input_ids=[1], sampling_params=EngineSampling(max_new_tokens=1), stream=True)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_an_engines_redirect_is_not_followed(status):
    with listening() as (target, came), listening(status, {"location": target}) as (url, asked):
        engine = HttpEngine(url, settings=EngineSettings())
        try:
            with pytest.raises(EngineError):
                async for _ in engine.stream(GENERATE):
                    pass
            with pytest.raises(EngineError):
                await engine.generate(GENERATE)
            with pytest.raises(EngineError):
                await engine.model_info()
        finally:
            await engine.aclose()
    assert asked
    assert came == []


async def test_a_judges_redirect_is_not_followed_and_its_key_stays_with_it():
    with listening() as (target, came), listening(307, {"location": target}) as (url, asked):
        settings = JudgeSettings(kind="llm", url=f"{url}/v1", model="judge", api_key="sk-judge")
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(JudgeError, match="307"):
                await HttpJudgeClient(client, settings)([Message(role="user", content="?")], max_new_tokens=1)
    assert any("sk-judge" in request for request in asked)
    assert came == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("where", ["{}/elsewhere", "http://localhost:{port}/elsewhere", "//other.invalid/elsewhere"])
async def test_an_alerts_redirect_is_not_followed_and_its_address_is_told_to_nobody(status, where, capsys):
    configure_log("debug", "console")
    with listening() as (target, came):
        location = where.format(target, port=target.rpartition(":")[2])
        with listening(status, {"location": location}) as (url, asked):
            settings, health = load(None, {"alerts.webhook_url": f"{url}{HOOK}", "alerts.retry_s": 0}, {}), Health()
            async with httpx.AsyncClient(trust_env=False, follow_redirects=True) as client:
                alerts = Alerts(settings.alerts, client, health=health)
                alerts.raise_alert("rolled_back", serving=1)
                task = asyncio.create_task(alerts.run())
                async with asyncio.timeout(120):
                    while not health.problems():
                        await asyncio.sleep(0.005)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
    structlog.reset_defaults()
    assert asked == [f"POST {HOOK} "] * TRIES
    assert came == []
    assert health.problems() == [f"alert webhook: failed once: it answered {status}"]
    said = capsys.readouterr()
    assert "alert_not_delivered" in said.err
    assert "h00k-5up3r" not in said.err + said.out


def test_a_servers_alert_reaches_its_webhook_alone(host, tmp_path, engine_settings, key_settings, doors_of):
    """The engine's numbers differ from those of three versions: learning pauses, and the owner gets an alert. A webhook
    that redirects gets the alert three times, its target never, and `/healthz` reports the webhook.
    """
    with listening() as (target, came), listening(307, {"location": target}) as (url, asked):
        settings = engine_settings | key_settings | {"training.batch_size": 1, "training.min_batch": 1}
        settings |= {"alerts.webhook_url": f"{url}{HOOK}", "alerts.retry_s": 0.01}
        with host.running(tmp_path, settings) as server:
            doors = doors_of(server)
            for _ in range(REJECTIONS_IN_A_ROW):
                turn = doors.chat("ann").json()["id"]
                doors.ask("POST", "/v1/feedback", "ann", json={"turn_id": turn, "value": True})
                trainer = ToyTrainer(server.url, server.data_dir, ToyPolicy(), token=doors.keys["trainer"])
                lease = trainer.lease()
                assert lease is not None
                number = trainer.client.commit(trainer.checkpoint(lease))
                wait_for(lambda n=number: version(doors, n)["state"] == "rejected")
            wait_for(lambda: problems(doors))
            assert problems(doors) == ["alert webhook: failed once: it answered 307"]
            told = doors.ask("GET", "/healthz").text + doors.ask("GET", "/healthz", "admin").text + server.log
            told += doors.ask("GET", "/v1/admin/status", "admin").text + doors.ask("GET", "/metrics", "admin").text
            written = b"".join(contents(server.data_dir).values())
            assert doors.chat("ann").status_code == 200
    assert asked == [f"POST {HOOK} "] * TRIES
    assert came == []
    assert "alert_not_delivered" in server.log
    assert "h00k-5up3r" not in told + server.log
    assert b"h00k-5up3r" not in written


def version(doors, number):
    return doors.ask("GET", f"/v1/admin/versions/{number}", "admin").json()


def problems(doors):
    return doors.ask("GET", "/healthz", "admin").json()["problems"]


def wait_for(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


async def test_a_proxy_of_the_environment_gets_nothing(monkeypatch, open_server):
    """The proxy gets neither prompts nor keys: not the engine's, not the judge's, not the command line's."""
    with listening() as (proxy, came), listening() as (url, asked):
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        engine = HttpEngine(url, settings=EngineSettings())
        await engine.generate(GENERATE)
        await engine.aclose()
        argv = [sys.executable, "-m", "openclaw_rl", "status", "--json", "--data-dir", str(open_server.server.data_dir)]
        said = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=False)
        assert json.loads(said.stdout)["model"], said.stderr
    assert asked
    assert came == []


@pytest.mark.parametrize("url", ["{}/cat.png", "file:///etc/passwd", "http://169.254.169.254/latest/meta-data"])
def test_what_a_message_points_to_is_not_fetched(open_server, url):
    with listening() as (target, came):
        where = url.format(target)
        parts = [{"type": "text", "text": where}, {"type": "image_url", "image_url": {"url": where}}]
        refused = open_server.chat(messages=[{"role": "user", "content": parts}])
        assert refused.status_code == 400
        tool = {"type": "function", "function": {"name": "get", "parameters": {"$ref": where, "type": "object"}}}
        served = open_server.chat(
            messages=[{"role": "user", "content": f"![x]({where})"}],
            tools=[tool],
            response_format={"type": "json_schema", "json_schema": {"schema": {"$ref": where}}},
            metadata={"webhook": where},
        )
        assert served.status_code == 200
        assert came == []


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "ftp://host/", "//host", "http://", "http://u:p@host/", "gopher://a"),
        *("http://host:99999/", "http://host:x/", "http://[::1/", "http://host /", "http://host\0/"),
    ],
)
def test_a_configured_url_is_http_and_holds_no_password(url):
    for key in ("judge.url", "engine.url", "method.teacher_url"):
        with pytest.raises(SettingsError, match=key):
            load(None, {"method.name": "opd", key: url}, {})


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "ftp://host/", "//host", "http://", "gopher://a", "host/path"),
        *("http://host:99999/", "http://host:t0ken/", "http://[t0ken/", "http://host /", "http://host\0/"),
    ],
)
def test_alerts_go_to_an_http_address_which_no_error_shows(url):
    with pytest.raises(SettingsError, match=r"alerts\.webhook_url") as wrong:
        load(None, {"alerts.webhook_url": url}, {})
    assert url not in str(wrong.value)
    assert "t0ken" not in str(wrong.value)
