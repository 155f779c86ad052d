"""Stages on the engine alone: the conformance suite, log-probs against plain forward passes, unloads of adapters."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from gpu import models
from gpu.host import ROOT, SglangHost
from gpu.stages import Figures
from openclaw_rl.engines.base import Score
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest
from openclaw_rl.errors import EngineRefused
from openclaw_rl.settings import EngineSettings

REPLIES, TOKENS = 16, 96
UNLOAD_S = 6.0


def conformance(host: SglangHost) -> Figures:
    """Run tests/conformance against the engine."""
    adapters = [word for name, folder in host.adapters.items() for word in ("--adapter", f"{name}={folder}")]
    words = ["tests/conformance", "-s", *adapters]
    if (other := host.work / f"{host.model.name}-other").exists():
        words += ["--other-weights", str(other)]
    return _suite(host, "conformance", words)


def weights(host: SglangHost) -> Figures:
    """Run tests/conformance/test_weights.py against the engine."""
    other = host.work / f"{host.model.name}-other"
    return _suite(host, "weights", ["tests/conformance/test_weights.py", "-s", "--other-weights", str(other)])


def _suite(host: SglangHost, name: str, words: list[str]) -> Figures:
    argv = [sys.executable, "-m", "pytest", *words, "-q", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore"]
    argv += ["--timeout", "75", "--engine-url", host.engine_url, "--engine-vocab", "10000"]
    argv += ["--confcutdir", "tests/conformance"]  # tests/conftest.py imports packages that a GPU host does not have
    file = host.out / f"{name}.log"
    with file.open("wb") as log:
        done = subprocess.run(argv, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
    lines = file.read_text(errors="replace").splitlines()
    wanted = ("FAILED", "ERROR", "SKIPPED", "E  ", "runs ", ".runs ")
    notable = [line[:600] for line in lines if line.startswith(wanted)]
    return {"exit": done.returncode, "result": lines[-1:], "notable": notable[:40]}


# -- log-probs ---------------------------------------------------------------------------------------------------------


def logprobs(host: SglangHost) -> Figures:
    """Compare the log-probs of the engine with plain forward passes, under the base and two adapters."""
    return asyncio.run(_log_probs(host, host.engine_url, host.adapters))


async def _log_probs(host: SglangHost, url: str, adapters: Mapping[str, Path]) -> Figures:
    engine = HttpEngine(url, settings=EngineSettings(kind="url", url=url), loses_adapter_count=True)
    figures: Figures = {}
    try:
        for name, folder in adapters.items():
            try:
                await engine.load_adapter(name, folder)
            except EngineRefused as error:
                figures[f"loading {name}"] = str(error)[:200]
        for adapter in (None, *adapters):
            where = adapters[adapter] if adapter else None
            replies = list(await asyncio.gather(*(_sample(engine, number, adapter) for number in range(REPLIES))))
            compared = await asyncio.to_thread(models.compare, replies, host.model, where, host.device)
            figures[f"decode, {adapter}"] = compared
            scores = await asyncio.gather(*(_score(engine, reply, adapter) for reply in replies))
            forced = [
                models.Forced(reply.prompt_ids, reply.response_ids, list(score.log_probs), 1.0)
                for reply, score in zip(replies, scores, strict=True)
            ]
            compared = await asyncio.to_thread(models.compare, forced, host.model, where, host.device)
            figures[f"prompt, {adapter}"] = compared
    finally:
        await engine.aclose()
    pairs = {name: value for name, value in figures.items() if "," in name}
    return figures | {"findings": models.too_far(pairs) + ["nothing was compared"] * (not pairs)}


async def _sample(engine: HttpEngine, number: int, adapter: str | None) -> models.Forced:
    prompt = [(17 * number + 31 * at) % 9000 + 10 for at in range(40 + 8 * number)]
    request = GenerateRequest(
        input_ids=prompt,
        sampling_params=EngineSampling(max_new_tokens=TOKENS, temperature=0.7, ignore_eos=True),
        return_logprob=True,
        rid=f"check-{adapter}-{number}",
        lora_path=adapter,
        extra_key=f"check-{adapter}",
    )
    ids: list[int] = []
    values: list[float] = []
    async for event in engine.stream(request):
        ids += event.output_ids
        values += [float(entry[0] or 0) for entry in event.meta_info.output_token_logprobs or []]
    assert len(ids) == len(values) == TOKENS, (len(ids), len(values))
    return models.Forced(prompt, ids, values, 0.7)


async def _score(engine: HttpEngine, reply: models.Forced, adapter: str | None) -> Score:
    return await engine.score(
        tuple(reply.prompt_ids), tuple(reply.response_ids), lora_path=adapter, extra_key=f"score-{adapter}"
    )


# -- unloads -----------------------------------------------------------------------------------------------------------

Request = dict[str, Any]


def quirks(host: SglangHost) -> Figures:
    """Unload an adapter after requests under it were refused, aborted or dropped; report which unloads returned."""
    return asyncio.run(_quirks(host))


async def _quirks(host: SglangHost) -> Figures:
    _, folder = next(iter(host.adapters.items()))
    figures: Figures = {}
    async with httpx.AsyncClient(base_url=host.engine_url, timeout=10) as http:
        cases = _UnloadCases(http, folder, figures)
        # An unload that does not return blocks every later load: the case that may cause one comes last, and the loop
        # ends with it. Each case loads the adapter under a name of its own.
        for name, what, ids, act in (
            ("streamed", "a dropped stream", [5, 6, 7], cases.drop_stream),
            ("waited", "a dropped request", [5, 6, 7], cases.drop_request),
            ("queued", "an abort in the queue", [5, 6, 7], cases.retract_and_abort),
            ("refused", "a refused request", [5] * 9000, cases.send),
        ):
            key = f"unloads after {what}"
            try:
                await act(await cases.loaded(name, ids))
                reply = await http.post("/unload_lora_adapter", json={"lora_name": name}, timeout=UNLOAD_S)
                figures[key] = reply.status_code == 200
            except httpx.TimeoutException:
                figures[key] = "never; nothing after it was tried"
                break
        await http.post("/abort_request", json={"abort_all": True})
    return figures


class _UnloadCases:
    """Requests under an adapter, and the ways in which they end."""

    def __init__(self, http: httpx.AsyncClient, folder: Path, figures: Figures) -> None:
        self._http, self._folder, self._figures = http, folder, figures

    async def loaded(self, name: str, ids: list[int]) -> Request:
        """Load the adapter under this name and return a request under it."""
        loaded = await self._http.post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(self._folder)})
        assert loaded.status_code == 200, loaded.text
        params = {"max_new_tokens": 400, "temperature": 1.0, "ignore_eos": True}
        return {"input_ids": ids, "lora_path": name, "sampling_params": params, "rid": f"rid-{name}"}

    async def send(self, request: Request) -> None:
        await self._http.post("/generate", json=request)

    async def drop_request(self, request: Request) -> None:
        try:
            await self._http.post("/generate", json=request, timeout=0.3)
        except httpx.TimeoutException:
            await self._abort(request)

    async def drop_stream(self, request: Request) -> None:
        async with self._http.stream("POST", "/generate", json=request | {"stream": True}) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data"):
                    break
        await self._abort(request)

    async def retract_and_abort(self, request: Request) -> None:
        events = []
        body = request | {"stream": True, "return_logprob": True}
        async with self._http.stream("POST", "/generate", json=body) as reply:
            lines = reply.aiter_lines()
            events.append(await anext(lines))
            await self._http.post("/pause_generation", json={"mode": "retract"})
            await self._abort(request)
            await self._http.post("/continue_generation", json={})
            events += [line async for line in lines]
        rows = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
        self._figures["last events of an abort in the queue: ids, log-probs, tokens so far"] = [
            (row["output_ids"], len(row["meta_info"]["output_token_logprobs"]), row["meta_info"]["completion_tokens"])
            for row in rows[-2:]
        ]

    async def _abort(self, request: Request) -> None:
        await self._http.post("/abort_request", json={"rid": request["rid"]})
