"""The engine on its own: the conformance suite, and its log-probs against plain forward passes."""

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_check import Host

ROOT = Path(__file__).resolve().parents[2]


def conformance(host: "Host") -> dict[str, Any]:
    adapters = [word for name, folder in host.adapters.items() for word in ("--adapter", f"{name}={folder}")]
    words = ["tests/conformance", "-s", *adapters]
    if (other := host.work / f"{host.model.name}-other").exists():
        words += ["--other-weights", str(other)]
    return _suite(host, "conformance", words)


def weights(host: "Host") -> dict[str, Any]:
    other = host.work / f"{host.model.name}-other"
    return _suite(host, "weights", ["tests/conformance/test_weights.py", "-s", "--other-weights", str(other)])


def _suite(host: "Host", name: str, words: list[str]) -> dict[str, Any]:
    argv = [sys.executable, "-m", "pytest", *words, "-q", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore"]
    argv += ["--timeout", "75", "--engine-url", host.engine_url, "--engine-vocab", "10000"]
    argv += ["--confcutdir", "tests/conformance"]  # the suite's own conftest wants what a GPU host does not have
    file = host.out / f"{name}.log"
    with file.open("wb") as log:
        done = subprocess.run(argv, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
    lines = file.read_text(errors="replace").splitlines()
    told = ("FAILED", "ERROR", "SKIPPED", "E  ", "runs ", ".runs ")
    notable = [line[:600] for line in lines if line.startswith(told)]
    return {"exit": done.returncode, "result": lines[-1:], "notable": notable[:40]}


def logprobs(host: "Host") -> dict[str, Any]:
    return asyncio.run(_log_probs(host, host.engine_url, host.adapters))


async def _log_probs(host: "Host", url: str, adapters: Mapping[str, Path]) -> dict[str, Any]:
    import models

    from openclaw_rl.engines.base import Score
    from openclaw_rl.engines.client import HttpEngine
    from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest
    from openclaw_rl.errors import EngineRefused
    from openclaw_rl.settings import EngineSettings

    settings = EngineSettings(kind="url", url=url)
    http = HttpEngine(url, settings=settings)
    figures: dict[str, Any] = {}
    try:
        for name, folder in adapters.items():
            try:
                await http.load_adapter(name, folder)
            except EngineRefused as error:
                figures[f"loading {name}"] = str(error)[:200]

        async def ask(number: int, adapter: str | None) -> models.Forced:
            prompt = [(17 * number + 31 * at) % 9000 + 10 for at in range(40 + 8 * number)]
            request = GenerateRequest(
                input_ids=prompt,
                sampling_params=EngineSampling(max_new_tokens=96, temperature=0.7, ignore_eos=True),
                return_logprob=True,
                rid=f"check-{adapter}-{number}",
                lora_path=adapter,
                extra_key=f"check-{adapter}",
            )
            ids: list[int] = []
            values: list[float] = []
            async for event in http.stream(request):
                ids += event.output_ids
                values += [float(entry[0] or 0) for entry in event.meta_info.output_token_logprobs or []]
            assert len(ids) == len(values) == 96, (len(ids), len(values))
            return models.Forced(prompt, ids, values, 0.7)

        for adapter in (None, *adapters):
            replies = list(await asyncio.gather(*(ask(number, adapter) for number in range(16))))
            base = str(adapter)
            where = adapters.get(adapter) if adapter else None
            figures[f"decode, {base}"] = await asyncio.to_thread(
                models.compare, replies, host.model, where, host.device
            )
            scores: list[Score] = await asyncio.gather(
                *(
                    http.score(
                        tuple(reply.prompt_ids),
                        tuple(reply.response_ids),
                        lora_path=adapter,
                        extra_key=f"score-{adapter}",
                    )
                    for reply in replies
                )
            )
            forced = [
                models.Forced(reply.prompt_ids, reply.response_ids, list(score.log_probs), 1.0)
                for reply, score in zip(replies, scores, strict=True)
            ]
            figures[f"prompt, {base}"] = await asyncio.to_thread(models.compare, forced, host.model, where, host.device)
    finally:
        await http.aclose()
    compared = {name: value for name, value in figures.items() if "," in name}
    return figures | {"findings": models.too_far(compared) + ["nothing was compared"] * (not compared)}
