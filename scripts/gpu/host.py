"""Host of a check: its folders, its interpreters and the options of the command line."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_slime.layout import Layout

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""
LAYOUTS = {
    1: Layout(1, 1, 1, 0, actor_tp=1, engine_tp=1, is_shared=True),
    2: Layout(2, 1, 1, 0, actor_tp=1, engine_tp=1),
    4: Layout(4, 2, 1, 1, actor_tp=2, engine_tp=1, prm_tp=1),
}
"""Layout of the node by its number of GPUs."""


@dataclass(frozen=True, slots=True)
class SglangHost:
    """Host of the SGLang check, and the engine that is checked."""

    work: Path
    out: Path
    engine: str
    gguf: Path | None
    is_tiny: bool
    streams: int
    load_s: float
    swaps: int
    full_swaps: int
    dtype: str | None = None
    """Dtype of the engine; None: the one that our server would choose."""
    top_k: int | None = None
    """Teacher's top-k of the practice stages; None: of each stage's own."""
    users: int = 32
    minutes: float = 10.0
    places: int = 8
    """Of the stage `users`: users, minutes of all their chats, adapters that the engine holds for requests."""

    @property
    def device(self) -> str:
        return "cuda" if self.engine == "sglang" and not self.is_tiny else "cpu"

    @property
    def engine_python(self) -> str | None:
        return str(self.work / "sglang" / "bin" / "python") if self.engine == "sglang" else None

    @property
    def engine_args(self) -> list[str]:
        args = ["--cuda-graph-max-bs-decode", "64", "--sampling-backend", "pytorch", "--context-length", "4096"]
        return args if self.dtype is None else [*args, "--dtype", self.dtype]

    def read(self, name: str) -> Any:
        """Return the value that an earlier stage kept under this name."""
        return json.loads((self.work / f"{name}.json").read_text())

    def keep(self, name: str, value: Any) -> None:
        """Write a value for the stages that follow, in this call or a later one."""
        (self.work / f"{name}.json").write_text(json.dumps(value))

    def so_far(self, stage: str, figures: Mapping[str, Any]) -> None:
        """Print and write the figures of a stage that may still run out of time."""
        (self.out / f"{stage}.partial.json").write_text(json.dumps(figures, indent=1, default=str) + "\n")
        print(f"-- {stage} so far: {json.dumps(figures, default=str)[:3000]}", flush=True)

    @property
    def model(self) -> Path:
        return Path(self.read("model")["folder"])

    @property
    def has_random_weights(self) -> bool:
        """True for a model whose replies make no sense."""
        return self.model.name.startswith(("random", "qwen3"))

    @property
    def adapters(self) -> dict[str, Path]:
        return {name: Path(folder) for name, folder in self.read("model")["adapters"].items()}

    @property
    def engine_url(self) -> str:
        return str(self.read("engine")["url"])


@dataclass(frozen=True, slots=True)
class NodeHost:
    """Host of the node check."""

    work: Path
    out: Path
    is_tiny: bool
    streams: int
    gpus: int = 2
    ends_at: float = float("inf")
    """End of the stage's time, on the monotonic clock."""
    engines: int = 1
    """Policy engines of a launch script: 2 are a pool."""
    push: str | None = None
    """Way of the weights in a launch script; None: the usual one of its layout (`node_script.cards`)."""
    kills: tuple[str, ...] = ()
    """Processes that the stage `kills` kills, in this order; empty: all."""

    @property
    def device(self) -> str:
        return "cpu" if self.is_tiny else "cuda"

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.gpus]

    @property
    def engine_share(self) -> float:
        """Share of its card's memory that the policy's engine gets."""
        return 0.6 if self.gpus > 1 else 0.3

    @property
    def checkpoint(self) -> Path:
        return self.work / ("qwen3-tiny" if self.is_tiny else "qwen3-0.6b")

    @property
    def data_dir(self) -> Path:
        return self.work / "data"

    @property
    def ours_python(self) -> str:
        return sys.executable

    @property
    def slime_python(self) -> str:
        """Interpreter of the environment that holds slime, Megatron, Ray and SGLang."""
        return str(self.work / "slime" / "bin" / "python")

    @property
    def engine_python(self) -> str:
        return str(self.work / "sglang" / "bin" / "python")

    @property
    def environ(self) -> dict[str, str]:
        return os.environ | {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONWARNINGS": "ignore",
            "NCCL_NVLS_ENABLE": "0",
            "OMP_NUM_THREADS": "4",
        }
