"""Stage `scoring` of the node check: one reply of 8,192 tokens, scored as our server's teacher scores it.

Three engines of one checkpoint stand on one card: with the logits of a whole prefill chunk, with logits in slices as
our server starts SGLang, and at fp8. Each scores the reply in one call and in slices of its own. The figures are the
engine's memory meanwhile, and the distances of the log-probs.
"""

import asyncio
import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import psutil

from gpu import models
from gpu.engine_process import EngineProcess, sglang_command
from gpu.host import NodeHost
from gpu.stages import Figures, output_of
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.sglang import launch
from openclaw_rl.processes.command import free_port
from openclaw_rl.settings import EngineSettings

PROMPT, REPLY, SLICE = 256, 8192, 1024
TINY_REPLY = 192
CONTEXT = 16384
CHUNKED = "SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK"
ARGS = (
    "--chunked-prefill-size", "8192", "--max-total-tokens", str(CONTEXT), "--cuda-graph-max-bs-decode", "8",
    "--sampling-backend", "pytorch",
)  # fmt: skip
FAR = 0.05
"""Mean distance in nats of one call's log-probs to those of slices: several times bfloat16's noise."""


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    environ: Mapping[str, str]
    more: tuple[str, ...] = ()


VARIANTS = (
    Variant("plain", {CHUNKED: "0"}),
    Variant("chunked", {}),  # as our server starts SGLang
    Variant("fp8", {}, ("--quantization", "fp8")),
)


@dataclass
class Memory:
    """Memory of one process and of those below it on the card, in MiB."""

    pid: int
    seen: list[int] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "Memory":
        self._look()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self._look()

    def _look(self) -> None:
        with suppress(psutil.Error):
            ours = psutil.Process(self.pid)
            pids = {self.pid, *(process.pid for process in ours.children(recursive=True))}
            query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
            pairs = re.findall(r"^(\d+), (\d+)$", output_of(query), re.MULTILINE)
            if used := [int(mib) for pid, mib in pairs if int(pid) in pids]:
                self.seen.append(sum(used))

    def figures(self) -> Figures:
        """Return the memory; what the engine took once stays with its allocator, so that `after` shows a short peak."""
        if not self.seen:
            return {}
        return {"before": self.seen[0], "most": max(self.seen), "after": self.seen[-1], "looks": len(self.seen)}


def run(host: NodeHost) -> Figures:
    models.qwen3(host.work / "tokenizer", host.checkpoint, device=host.device)
    draw = random.Random(7)
    ids = [draw.randrange(1000, 40_000) for _ in range(PROMPT + (TINY_REPLY if host.is_tiny else REPLY))]
    figures: Figures = {}
    scored: dict[str, tuple[float, ...]] = {}
    # At once: the pools have a fixed size, so that no start takes another's memory for its own.
    with ThreadPoolExecutor() as pool:
        starts = {variant.name: pool.submit(_start, host, variant) for variant in VARIANTS}
        try:
            for name, start in starts.items():
                try:
                    engine = start.result()
                except RuntimeError as error:
                    figures[name] = {"refused": str(error), "log": _last_lines(host, name)}
                    continue
                figures[name], scored[name] = asyncio.run(_scored(engine, ids[:PROMPT], ids[PROMPT:]))
                if name != "plain" and "plain" in scored:
                    figures[name]["against plain"] = _gap(scored[name], scored["plain"])
                print(f"-- scoring, {name}: {figures[name]}", flush=True)
        finally:
            for work in (host.work / f"scoring-{variant.name}" for variant in VARIANTS):
                if (known := EngineProcess.known(work)) is not None:  # also one that still starts
                    known.kill()
    return figures | {"findings": findings(figures)}


def findings(figures: Figures) -> list[str]:
    found = [f"{name}: {row['refused']}" for name, row in figures.items() if "refused" in row and name != "fp8"]
    rows = [(name, row.get("one call against slices")) for name, row in figures.items() if name != "fp8"]
    rows += [("chunked against plain", figures.get("chunked", {}).get("against plain"))]
    return found + [f"{name}: {gap}" for name, gap in rows if gap is not None and not gap["mean_abs"] < FAR]


def _start(host: NodeHost, variant: Variant) -> EngineProcess:
    work, port = host.work / f"scoring-{variant.name}", free_port()
    work.mkdir(exist_ok=True)
    settings = EngineSettings(kind="sglang", args=(*ARGS, *variant.more), memory_fraction=0.3)
    command = sglang_command(
        host.engine_python, settings, folder=host.checkpoint, name=variant.name, port=port, context_length=CONTEXT,
        adapters=None,
    )  # fmt: skip
    environ = {**host.environ, **launch.ENVIRON, **variant.environ}
    return EngineProcess.start(work, command, environ, log=host.out / f"scoring-{variant.name}.log", port=port)


async def _scored(
    running: EngineProcess, prompt: Sequence[int], reply: Sequence[int]
) -> tuple[Figures, tuple[float, ...]]:
    """Score the reply in one call and in slices; return the figures, and the log-probs of the one call."""
    engine = HttpEngine(running.url, settings=EngineSettings())
    score = partial(engine.score, lora_path=None)
    figures: Figures = {"start s": running.start_s, "tokens": len(reply)}
    try:
        await score(tuple(prompt), tuple(reply[:16]), extra_key="warm")
        sliced: list[float] = []
        with Memory(running.pid) as memory:
            began = time.monotonic()
            for at in range(0, len(reply), SLICE):
                part = await score((*prompt, *reply[:at]), tuple(reply[at : at + SLICE]), extra_key="slices")
                sliced += part.log_probs
            figures["slices s"] = round(time.monotonic() - began, 2)
        figures["slices, MiB"] = memory.figures()
        with Memory(running.pid) as memory:
            began = time.monotonic()
            whole = await score(tuple(prompt), tuple(reply), extra_key="whole")
            figures["one call s"] = round(time.monotonic() - began, 2)
        figures["one call, MiB"] = memory.figures()
        figures["one call against slices"] = _gap(whole.log_probs, sliced)
        return figures, tuple(whole.log_probs)
    finally:
        await engine.aclose()


def _gap(ours: Sequence[float], theirs: Sequence[float]) -> Figures:
    gaps = sorted(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    return {
        "mean_abs": round(sum(gaps) / len(gaps), 5),
        "p99_abs": round(gaps[int(0.99 * (len(gaps) - 1))], 5),
        "max_abs": round(gaps[-1], 5),
    }


def _last_lines(host: NodeHost, name: str) -> list[str]:
    log = host.out / f"scoring-{name}.log"
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return [line[-240:] for line in lines if "Error" in line][-3:] or lines[-2:]
