"""Stand-in for the driver on a machine without GPUs: the driver itself, over weights that a step changes a little.

It replaces slime's part (`slime_node.SlimeNode`). The command line, the loop, leases, checkpoints and resume are the
real ones. By disk it writes a version's folder. In the place of NCCL it gives files to all engines itself, at once.
Two idle processes have the names of Ray's, so that a check can kill them: without its worker a step fails, without the
head this process ends.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import httpx
import torch
from safetensors.torch import load_file, save_file

from openclaw_slime import driver
from openclaw_slime.node import NodeConfig
from openclaw_slime.outcome import RankShare
from openclaw_slime.rollout import LeasedBatches

STEP_S, NOISE = 1.0, 1e-3
IDLE = "import sys; sys.stdin.read()"


class ToyNode:
    def __init__(self, arguments: Sequence[str], config: NodeConfig) -> None:
        def given(flag: str) -> str:
            return arguments[arguments.index(flag) + 1]

        source = Path(given("--load"))
        if "--ckpt-step" in arguments:
            source = source / f"iter_{int(given('--ckpt-step')):07d}"
        print(f"toy weights of {source}", flush=True)
        self._base, self._weights = Path(given("--hf-checkpoint")), load_file(source / "model.safetensors")
        at = arguments.index("--rollout-external-engine-addrs") + 1
        self._engines = list(takewhile(lambda word: not word.startswith("--"), arguments[at:]))
        self._config, self._save = config, Path(given("--save"))
        self._export = given("--save-hf")
        self.batch_size = int(given("--global-batch-size"))
        args = SimpleNamespace(openclaw=config, global_batch_size=self.batch_size, save=str(self._save))
        self._batches = LeasedBatches(args)  # type: ignore[arg-type]
        self._head, self._worker = _idle("gcs_server"), _idle("ray::PolicyActor")

    @classmethod
    @contextmanager
    def started(
        cls, arguments: Sequence[str], config: NodeConfig, *, ray_address: str | None, resumed: int | None
    ) -> Iterator["ToyNode"]:
        node = cls(arguments, config)
        try:
            yield node
        finally:
            for process in (node._head, node._worker):
                process.kill()

    def train(self, fence: int, moved: Callable[[], None], may_step: Callable[[], None]) -> list[RankShare]:
        rows = [row for row in self._batches.batch(fence) if not row.is_filler]
        may_step()
        end = time.monotonic() + STEP_S
        while time.monotonic() < end:
            if self._head.poll() is not None:
                os._exit(1)
            if self._worker.poll() is not None:
                raise RuntimeError("the worker is gone")
            time.sleep(0.02)
            moved()
        torch.manual_seed(fence)
        for name, weight in self._weights.items():
            if "proj" in name:
                weight += torch.randn(weight.shape).to(weight.dtype) * NOISE
        hints = sum(row.sample.teacher_log_probs is not None for row in rows)
        tokens = sum(sum(row.sample.loss_mask) for row in rows)
        return [RankShare(True, True, 0.1, tokens, {"hint_share": (float(hints), float(len(rows)))})]

    def push(self, version: int, timeout_s: float) -> None:
        if (place := self._config.folder_of(version)) is not None:
            self._write(self._save.parent / place)
            return
        folder = self._write(self._save.parent / "sent" / f"toy-{version}")
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}

        def send(url: str) -> None:
            httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=timeout_s).raise_for_status()

        with ThreadPoolExecutor(len(self._engines)) as threads:
            list(threads.map(send, self._engines))

    def save(self, iteration: int) -> None:
        self._write(Path(self._export.format(rollout_id=iteration)))
        self._write(self._save / f"iter_{iteration:07d}")

    def _write(self, folder: Path) -> Path:
        shutil.copytree(self._base, folder, dirs_exist_ok=True)
        save_file(self._weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


def _idle(name: str) -> "subprocess.Popen[bytes]":
    """Start a process that ends with this one."""
    return subprocess.Popen([sys.executable, "-c", IDLE, name], stdin=subprocess.PIPE)


if __name__ == "__main__":
    module = ModuleType("openclaw_slime.slime_node")
    module.SlimeNode = ToyNode  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    sys.exit(driver.main())
