"""Scoring of one long reply on the card: the engine's memory meanwhile, the same in slices, and a second engine at fp8.

The scoring calls are those of our server's teacher: the log-probs of a reply's ids behind a prompt. A thread makes them
beside the run of the kill check.
"""

import asyncio
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from gpu.engine_process import EngineProcess, sglang_command
from gpu.host import NodeHost
from gpu.stages import Figures, output_of
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.sglang import launch
from openclaw_rl.errors import EngineError
from openclaw_rl.processes.command import free_port
from openclaw_rl.settings import EngineSettings

PROMPT, REPLY, SLICE = 256, 8192, 1024
TINY_REPLY = 192
CONTEXT = 16384
FP8_CHUNK = 2048
"""Prefill chunk of the fp8 engine: its memory shows what smaller chunks save."""
FP8_ARGS = (
    "--quantization", "fp8", "--chunked-prefill-size", str(FP8_CHUNK), "--max-total-tokens", str(CONTEXT),
    "--cuda-graph-max-bs-decode", "8", "--sampling-backend", "pytorch",
)  # fmt: skip


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
        if not self.seen:
            return {"engine MiB": None}
        most = [self.seen[0], max(self.seen), self.seen[-1]]
        return {"engine MiB before, most, after": most, "looks": len(self.seen)}


@dataclass
class Scoring:
    """The thread, and its figures so far."""

    host: NodeHost
    judge_url: str
    judge_pid: Callable[[], int]
    figures: Figures = field(default_factory=dict)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self, wait_s: float) -> Figures:
        """Wait for the figures and return them; end the engine that may still be starting."""
        if self._thread is not None:
            self._thread.join(wait_s)
            if self._thread.is_alive():
                self.figures["cut"] = f"not over after {wait_s:g} s more"
            if (found := EngineProcess.known(self._fp8_work)) is not None and found.is_alive():
                found.kill()
        return dict(self.figures)

    @property
    def _fp8_work(self) -> Path:
        return self.host.work / "fp8"

    def _run(self) -> None:
        try:
            asyncio.run(self._score_all())
        except Exception as error:  # this thread's own failure must not end the run of the check
            self.figures["failed"] = repr(error)[:500]

    async def _score_all(self) -> None:
        tokens = TINY_REPLY if self.host.is_tiny else REPLY
        draw = random.Random(7)
        ids = [draw.randrange(1000, 40_000) for _ in range(PROMPT + tokens)]
        prompt, reply = ids[:PROMPT], ids[PROMPT:]
        plain = await self._scored("bf16", self.judge_url, self.judge_pid(), prompt, reply)
        engine = await asyncio.to_thread(self._start_fp8)
        if engine is None:
            return
        try:
            fp8 = await self._scored("fp8", engine.url, engine.pid, prompt, reply)
            self.figures["fp8 against bf16"] = _gap(fp8, plain)
        finally:
            engine.kill()

    def _start_fp8(self) -> EngineProcess | None:
        work, port = self._fp8_work, free_port()
        work.mkdir(exist_ok=True)
        settings = EngineSettings(kind="sglang", args=FP8_ARGS, memory_fraction=0.3)
        command = sglang_command(
            self.host.engine_python, settings, folder=self.host.checkpoint, name="fp8", port=port,
            context_length=CONTEXT, adapters=None,
        )  # fmt: skip
        environ = self.host.environ | launch.ENVIRON
        try:
            engine = EngineProcess.start(work, command, environ, log=self.host.out / "fp8.log", port=port)
        except RuntimeError as error:
            self.figures["fp8"] = {"refused": str(error), "log": _last_lines(self.host)}
            return None
        self.figures["fp8 start s"] = engine.start_s
        return engine

    async def _scored(
        self, name: str, url: str, pid: int, prompt: Sequence[int], reply: Sequence[int]
    ) -> tuple[float, ...]:
        """Score the reply in one call and in slices; return the log-probs of the one call."""
        engine = HttpEngine(url, settings=EngineSettings())
        figures: Figures = {"tokens": len(reply)}
        self.figures[name] = figures
        try:
            await engine.score(tuple(prompt), tuple(reply[:16]), lora_path=None, extra_key=f"warm-{name}")
            with Memory(pid) as memory:
                began = time.monotonic()
                whole = await engine.score(tuple(prompt), tuple(reply), lora_path=None, extra_key=f"whole-{name}")
                figures["one call s"] = round(time.monotonic() - began, 2)
                await asyncio.sleep(0.3)  # the memory stays with the engine's allocator
            figures |= memory.figures()
            sliced: list[float] = []
            began = time.monotonic()
            for at in range(0, len(reply), SLICE):
                before, part = (*prompt, *reply[:at]), tuple(reply[at : at + SLICE])
                sliced += (await engine.score(before, part, lora_path=None, extra_key=f"slices-{name}")).log_probs
            figures["slices s"] = round(time.monotonic() - began, 2)
            figures["one call against slices"] = _gap(whole.log_probs, sliced)
            return tuple(whole.log_probs)
        except EngineError as error:
            figures["failed"] = str(error)[:300]
            raise
        finally:
            await engine.aclose()


def _gap(ours: Sequence[float], theirs: Sequence[float]) -> Figures:
    gaps = sorted(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    return {
        "mean_abs": round(sum(gaps) / len(gaps), 5),
        "p99_abs": round(gaps[int(0.99 * (len(gaps) - 1))], 5),
        "max_abs": round(gaps[-1], 5),
    }


def _last_lines(host: NodeHost) -> list[str]:
    log = host.out / "fp8.log"
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return [line[-240:] for line in lines if "Error" in line][-3:] or lines[-2:]
