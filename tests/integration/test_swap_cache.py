"""Case WS-2 as the case has it, on the real server, engine and trainer: a long prompt before and after a weight swap.

The adapter of one version is loaded and unloaded in between, so the last swap is under a known name. The model is the
bundled one's first layers: the reuse of a prefix does not depend on their number.
"""

import asyncio
import secrets
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.cases import CASES
from harness.checks import failures

from benchmarks.learning.served import embedded_engine
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.settings import EngineSettings, ModelSettings
from openclaw_rl.testing.running_server import RunningServer

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

CASE = CASES["WS-2"]


def asked(server: RunningServer, request: dict[str, Any], run: str) -> tuple[int, int, Any]:
    """Ask; return the version that answered, the prompt tokens found in the cache, and the turn's record."""
    (message,) = request["body"]["messages"]
    text, times = message["content"]["$repeat"]
    body = request["body"] | {
        "messages": [{"role": "user", "content": f"{run} {text * times}"}],
        "temperature": 1.0,  # as a fresh engine scores
    }
    headers = {"Authorization": "Bearer sk-test", "X-Session-Id": f"{run}-{secrets.token_hex(4)}"}
    answer = httpx.post(f"{server.url}{request['path']}", json=body, headers=headers, timeout=300)
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(answer.headers["x-weight-version"]), cached, server.admin("GET", f"/v1/turns/{reply['id']}")


def trained_version(server: RunningServer) -> int:
    """Return a version with its own weights: an existing one, or one that two chats make."""
    known = [
        row["weight_version"] for row in server.status()["versions"] if row["folder"] and row["state"] != "rejected"
    ]
    if known:
        return max(known)
    for number, said in enumerate(("No, that is wrong.", "Thanks, that is perfect!")):
        question = {"role": "user", "content": f"Name a colour, number {number}."}
        key = {"Authorization": "Bearer sk-test", "X-Session-Id": f"colour-{number}"}
        url, rest = f"{server.url}/v1/chat/completions", {"max_tokens": 8}
        reply = httpx.post(url, json={"messages": [question], **rest}, headers=key, timeout=300).json()
        history = [question, reply["choices"][0]["message"], {"role": "user", "content": said}]
        httpx.post(url, json={"messages": history, **rest}, headers=key, timeout=300).raise_for_status()
    return int(server.wait_for("a version serves", lambda now: now["serving"] > 0, 300)["serving"])


@pytest.fixture(scope="module")
def server(short_server: RunningServer) -> RunningServer:
    return short_server


async def fresh_log_probs(record: Any, folder: Path, model: Path, cache: Path) -> list[float]:
    """Score the reply's ids in an engine that never had other weights."""
    with embedded_engine(ModelSettings(path=str(model)), cache, device="cpu", threads=1) as url:
        engine = HttpEngine(url, settings=EngineSettings())
        try:
            await engine.load_adapter("fresh", folder)
            prompt, reply = tuple(record["request"]["prompt_ids"]), tuple(record["turn"]["response_ids"])
            return list((await engine.score(prompt, reply, lora_path="fresh", extra_key=None)).log_probs)
        finally:
            await engine.aclose()


def test_the_first_request_after_a_swap_reuses_nothing(
    server: RunningServer, short_model: Path, tmp_path: Path
) -> None:
    before, after = [request for request in CASE["requests"] if "path" in request]
    version, run = trained_version(server), secrets.token_hex(4)
    try:
        server.admin("POST", "/v1/admin/pin", {"weight_version": version})  # known once, so that its name comes again
        server.admin("POST", "/v1/admin/pin", {"weight_version": 0})
        served, _, _ = asked(server, before, run)
        again, cached, _ = asked(server, before, run)
        assert (served, again) == (0, 0)
        assert cached > 900, "the cache holds nothing that could survive"
        server.admin("POST", "/v1/admin/pin", {"weight_version": version})
        served, cached, record = asked(server, after, run)
    finally:
        server.admin("POST", "/v1/admin/pin", {"weight_version": None})
    assert served == version
    folder = server.admin("GET", f"/v1/admin/versions/{version}")["folder"]
    fresh = asyncio.run(fresh_log_probs(record, server.data_dir / folder, short_model, tmp_path))
    found = {"resp": [{}, {"cached_tokens": cached}], "turn": [{}, {"logprobs": record["turn"]["rollout_log_probs"]}]}
    checks = [check for check in CASE["expect"]["checks"] if check["op"] != "close_to"]
    assert failures(checks, found, said={}) == []
    assert found["turn"][1]["logprobs"] == pytest.approx(fresh, abs=1e-3)
