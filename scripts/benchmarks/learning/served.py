"""The real embedded engine in a process of its own: scoring pairs over the product's client, dialect and adapters.

`worst_difference` compares them with the plain forward of `engine.ForwardEngine`, pair by pair.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from openclaw_rl.engines.base import Score
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.settings import EngineSettings, ModelSettings
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Ids, Sample

START_S = 300.0


@contextmanager
def embedded_engine(model: ModelSettings, cache: Path, *, device: str, threads: int) -> Iterator[str]:
    """Run an embedded engine of this model; yield its URL."""
    with tempfile.TemporaryDirectory(prefix="openclaw-pairs-") as folder:
        port_file = Path(folder) / "port.json"
        config = {
            "model": model.model_dump(mode="json"),
            "engine": {"device": device, "threads": threads},
            "cache_dir": str(cache),
            "port_file": str(port_file),
            "log_level": "warning",
        }
        (Path(folder) / "engine.json").write_text(json.dumps(config))
        process = subprocess.Popen(
            [sys.executable, "-m", "openclaw_rl.engines.embedded", "--config", str(Path(folder) / "engine.json")],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        try:
            end = time.monotonic() + START_S
            while not port_file.exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("the engine did not start")
                time.sleep(0.05)
            yield json.loads(port_file.read_text())["url"]
        finally:
            process.terminate()
            process.wait(60)


class ServedEngine:
    """Scoring by the real engine: the policy is written as an adapter, loaded, and scored over HTTP."""

    def __init__(self, policy: LoraPolicy, url: str, *, name: str) -> None:
        self._policy, self._url, self._name = policy, url, name
        self._client: HttpEngine | None = None

    @asynccontextmanager
    async def serves(self, version: int) -> AsyncIterator[str | None]:
        name = f"{self._name}-v{version}" if version else None
        async with contextlib.AsyncExitStack() as stack:
            client = HttpEngine(self._url, settings=EngineSettings())
            stack.push_async_callback(client.aclose)
            if name is not None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="openclaw-pairs-")))
                self._policy.save(folder)
                await client.load_adapter(name, folder)
                stack.push_async_callback(client.unload_adapter, name)
            self._client = client
            yield name

    async def score(
        self, prompt_ids: Ids, response_ids: Ids, *, lora_path: str | None, extra_key: str | None, top_k: int = 0
    ) -> Score:
        assert self._client is not None
        return await self._client.score(prompt_ids, response_ids, lora_path=lora_path, extra_key=extra_key, top_k=top_k)

    async def score_ids(
        self, prompt_ids: Ids, response_ids: Ids, ids: Sequence[Ids], *, lora_path: str | None, extra_key: str | None
    ) -> Score:
        assert self._client is not None
        return await self._client.score_ids(prompt_ids, response_ids, ids, lora_path=lora_path, extra_key=extra_key)


def worst_difference(some: Sequence[Sample], others: Sequence[Sample]) -> float:
    """Return the largest |difference| of two engines' log-probs on the same pairs, teacher's and student's, by token.

    Raises ValueError if the turns differ.
    """
    worst = 0.0
    for one, other in zip(some, others, strict=True):
        if (one.sample_id, one.response_ids) != (other.sample_id, other.response_ids):
            raise ValueError(f"{one.sample_id} and {other.sample_id} are not the same turn")
        sides = (
            (one.teacher_log_probs, other.teacher_log_probs),
            (one.student_log_probs, other.student_log_probs),
        )
        for own, theirs in sides:
            if own is None or theirs is None:
                raise ValueError(f"{one.sample_id}: a side of the pair is missing")
            worst = max(worst, *(abs(a - b) for a, b in zip(own, theirs, strict=True)))
    return worst if math.isfinite(worst) else math.inf
