"""The engine's process: says when it can serve, drains on SIGTERM, and dies loudly with its model thread."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from openclaw_rl.engines.embedded import process
from openclaw_rl.engines.embedded.config import EngineConfig
from openclaw_rl.engines.embedded.llama_runner import LlamaRunner
from openclaw_rl.settings import EngineSettings, ModelSettings


@pytest.fixture
def config(make_tiny, tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelSettings(path=str(make_tiny("llama").folder)),
        engine=EngineSettings(threads=1),
        cache_dir=tmp_path / "cache",
        port_file=tmp_path / "run" / "port.json",
    )


async def url_of(config: EngineConfig, serving: asyncio.Task[None]) -> str:
    async with asyncio.timeout(120):
        while not config.port_file.exists():
            assert not serving.done(), serving.exception()
            await asyncio.sleep(0.01)
    announced = json.loads(config.port_file.read_text())
    assert announced["pid"] == os.getpid()
    return announced["url"]


REQUEST = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 150, "ignore_eos": True},
    "return_logprob": True,
    "stream": True,
}


async def test_sigterm_finishes_what_runs(config):
    serving = asyncio.create_task(process.serve(config))
    url = await url_of(config, serving)
    tokens = 0
    async with asyncio.timeout(120), httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/health")).status_code == 200
        async with client.stream("POST", "/generate", json=REQUEST) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    if tokens == 0:
                        os.kill(os.getpid(), signal.SIGTERM)
                    tokens += len(json.loads(line[6:])["output_ids"])
    assert tokens == 150
    async with asyncio.timeout(120):
        await serving


async def test_a_crash_of_the_model_thread_ends_the_process(config, monkeypatch):
    def crash(self, spans):
        raise MemoryError("no memory for the step")

    monkeypatch.setattr(LlamaRunner, "run", crash)
    serving = asyncio.create_task(process.serve(config))
    url = await url_of(config, serving)
    async with asyncio.timeout(120), httpx.AsyncClient(base_url=url) as client:
        with pytest.raises(httpx.HTTPError):
            await client.post("/generate", json=REQUEST | {"stream": False})
        with pytest.raises(ExceptionGroup) as ended:
            await serving
    assert ended.group_contains(MemoryError)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"cache_dir": "c", "engine": {"thread": 2}}', "thread"),
        ('{"cache_dir": "c", "model": {"path": "/no/such/folder"}}', "no such folder"),
        ("{", "JSON"),
    ],
)
def test_a_wrong_configuration_ends_it_with_a_message(tmp_path, content, message):
    (tmp_path / "engine.json").write_text(content)
    command = [sys.executable, "-m", "openclaw_rl.engines.embedded", "--config", str(tmp_path / "engine.json")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_help_reads_like_a_document():
    shown = subprocess.run(
        [sys.executable, "-m", "openclaw_rl.engines.embedded", "--help"], capture_output=True, text=True, check=True
    )
    assert "curl" in shown.stdout
    assert "--port-file" in shown.stdout
