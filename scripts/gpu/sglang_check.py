"""Stages of the check on a GPU host; sglang_check.sh makes the environments and runs this.

python sglang_check.py --work DIR --out DIR --engine sglang|embedded [--tiny] STAGE[=SECONDS] …

random       a random-weight model with the given tokenizer, and two adapters far from it
qwen3_06b    a random-weight Qwen3-0.6B-shaped model in bf16, without adapters
qwen3_4b     the same, 4B-shaped
gguf         the bundled model, from --gguf, and two adapters far from it; the later stages use the model made last
engine       start the engine, to stay for later calls
conformance  tests/conformance against it
logprobs     what it samples under the base and two adapters, against plain forward passes in bf16 and fp32
weights      tests/conformance/test_weights.py against it: its own weights are replaced under running replies
full         our server beside it, full weights: ≥ --full-swaps swaps under streamed chats, many sent right into a swap
overhead     our server beside it: added time to first token and throughput against its own chat completions
latency      our server beside it: last feedback of a batch of 16 to serving, seconds per phase
attached     our server beside it: streamed chats, LoRA steps and adapter swaps under load
quirks       whether an adapter can be unloaded after requests under it were refused, aborted and dropped
stop         end the engine
child        our server that starts the engine itself: as `attached`, and the engine is killed in the middle
jit          pack the kernel caches into OUT/jit.tgz
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from openclaw_rl.engines.sglang import launch
from openclaw_rl.server.child_commands import free_port
from openclaw_rl.settings import EngineSettings

sys.path.insert(0, str(Path(__file__).parent))

import engine_alone
import quirks as quirks_of_sglang
from engine_process import EngineProcess, embedded_command, sglang_command
from stages import Figures, parser, run_stage, said, told

LIMITS = {"random": 60, "gguf": 90, "engine": 240, "conformance": 150, "logprobs": 100, "attached": 150, "quirks": 60}
LIMITS |= {"weights": 90, "full": 120, "overhead": 90, "latency": 150, "qwen3_06b": 60, "qwen3_4b": 90}
LIMITS |= {"stop": 60, "child": 330, "jit": 40}


@dataclass(frozen=True, slots=True)
class Host:
    """Where things are on this machine, and which engine is checked."""

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
    """Of the engine; our own choice when unset."""

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
        return json.loads((self.work / f"{name}.json").read_text())

    def keep(self, name: str, value: Any) -> None:
        (self.work / f"{name}.json").write_text(json.dumps(value))

    def so_far(self, stage: str, figures: Mapping[str, Any]) -> None:
        """What a stage that may yet run out of its time has measured."""
        print(f"-- {stage} so far: {json.dumps(figures, default=str)[:3000]}", flush=True)

    @property
    def model(self) -> Path:
        return Path(self.read("model")["folder"])

    @property
    def adapters(self) -> dict[str, Path]:
        return {name: Path(folder) for name, folder in self.read("model")["adapters"].items()}

    @property
    def engine_url(self) -> str:
        return self.read("engine")["url"]


# -- models ------------------------------------------------------------------------------------------------------------


def random(host: Host) -> Figures:
    import models

    changes = (
        {"hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 8} if host.is_tiny else {}
    )
    folder = models.random_model(host.work / "tokenizer", host.work / "random", 0.8, device=host.device, **changes)
    models.random_model(host.work / "tokenizer", host.work / "random-other", 0.8, device=host.device, seed=1, **changes)
    return _with_adapters(host, folder, nats=0.5)


def gguf(host: Host) -> Figures:
    from openclaw_rl.models.resolve import base_hash, resolve
    from openclaw_rl.settings import ModelSettings

    resolved = resolve(ModelSettings(path=str(host.gguf) if host.gguf else "bundled"), host.work / "cache")
    return {"base_hash": base_hash(resolved)} | _with_adapters(host, resolved.folder, nats=1.0)


def qwen3_06b(host: Host) -> Figures:
    return _qwen3(host, "qwen3-0.6b")


def qwen3_4b(host: Host) -> Figures:
    return _qwen3(host, "qwen3-4b")


def _qwen3(host: Host, name: str) -> Figures:
    import models

    tiny = {"hidden_size": 128, "intermediate_size": 96, "layers": 2, "heads": 8, "vocab_size": 50000}
    changes = tiny if host.is_tiny else {}
    folder = models.qwen3(host.work / "tokenizer", host.work / name, device=host.device, **changes)
    host.keep("model", {"folder": str(folder), "adapters": {}})
    return {"model": name, "mib": round(sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20)}


def _with_adapters(host: Host, folder: Path, nats: float) -> Figures:
    import models

    adapters = {}
    for seed, name in enumerate(("check-a", "check-b"), 1):
        where = host.work / f"{folder.name}-{name}"
        adapters[name] = str(models.synthetic_adapter(folder, where, seed, host.device, nats))
    host.keep("model", {"folder": str(folder), "adapters": adapters})
    return {"model": folder.name}


# -- the engine on its own ---------------------------------------------------------------------------------------------


def engine(host: Host) -> Figures:
    port = free_port()
    if host.engine == "sglang":
        targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        command = sglang_command(
            str(host.engine_python),
            EngineSettings(kind="sglang", args=tuple(host.engine_args), memory_fraction=0.3),
            folder=host.model,
            name="check",
            port=port,
            context_length=None,
            adapters=launch.Adapters(16, targets, 5),
        )
        environ = os.environ | launch.ENVIRON
    else:
        command = embedded_command(sys.executable, host.work, folder=host.model, port=port)
        environ = dict(os.environ)
    running = EngineProcess.start(host.work, command, environ, log=host.out / "engine.log", port=port)
    info = httpx.get(f"{running.url}/model_info").json()
    return {"start_s": running.start_s, "command": command, "model_info": info, **_gpu()}


def stop(host: Host) -> Figures:
    running = EngineProcess.known(host.work)
    if running is None:
        raise FileNotFoundError("no engine was started")
    return {"stopped": True, **_gpu()} if running.stop() else {"stopped": "killed"}


def conformance(host: Host) -> Figures:
    return engine_alone.conformance(host)


def weights(host: Host) -> Figures:
    return engine_alone.weights(host)


def logprobs(host: Host) -> Figures:
    return engine_alone.logprobs(host)


def quirks(host: Host) -> Figures:
    return quirks_of_sglang.run(host)


# -- the whole server --------------------------------------------------------------------------------------------------


def attached(host: Host) -> Figures:
    import load

    flags = ["--engine-url", host.engine_url]
    return load.run(host, _data_dir(host, "attached"), flags, kill=False)


def full(host: Host) -> Figures:
    import full_load

    return full_load.run(host, _data_dir(host, "full"))


def overhead(host: Host) -> Figures:
    import overhead

    return overhead.run(host, _data_dir(host, "overhead"))


def latency(host: Host) -> Figures:
    import latency

    return latency.run(host, _data_dir(host, "latency"))


def _data_dir(host: Host, stage: str) -> Path:
    return host.work / f"{stage}-{host.model.name}-{int(time.time())}"


def child(host: Host) -> Figures:
    import load

    flags = ["--engine", host.engine]
    if host.engine == "sglang":
        flags += ["--set", f'engine.python="{host.engine_python}"', "--set", "engine.memory_fraction=0.3"]
        flags += ["--set", f"engine.args={json.dumps(host.engine_args)}"]
    return load.run(host, _data_dir(host, "child"), flags, kill=True)


def jit(host: Host) -> Figures:
    caches = [name for name in (".cache/tvm-ffi", ".cache/flashinfer", ".triton") if (Path.home() / name).exists()]
    subprocess.run(["tar", "-czf", host.out / "jit.tgz", "-C", Path.home(), *caches], check=True)
    return {"packed": caches, "mib": round((host.out / "jit.tgz").stat().st_size / 2**20, 1)}


def _gpu() -> Figures:
    return {"gpu": said(["nvidia-smi", "--query-gpu=name,memory.used,memory.total", "--format=csv,noheader"])}


STAGES: dict[str, Callable[[Host], Figures]] = {
    stage.__name__: stage
    for stage in (
        random,
        qwen3_06b,
        qwen3_4b,
        gguf,
        engine,
        conformance,
        weights,
        logprobs,
        full,
        overhead,
        latency,
        attached,
        quirks,
        stop,
        child,
        jit,
    )
}


def arguments() -> argparse.ArgumentParser:
    own = parser(__doc__, LIMITS)
    own.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    own.add_argument("--gguf", type=Path)
    own.add_argument("--dtype", choices=("bfloat16", "float16"), help="of the engine; our own choice when unset")
    own.add_argument("--load-s", type=float, default=45.0, help="how long chats are streamed")
    own.add_argument("--swaps", type=int, default=10, help="adapter swaps to wait for")
    own.add_argument("--full-swaps", type=int, default=6, help="full-weight swaps to make beside the first two")
    return own


def main() -> int:
    options = arguments().parse_args()
    host = Host(
        options.work, options.out, options.engine, options.gguf, options.tiny,
        options.streams, options.load_s, options.swaps, options.full_swaps, options.dtype,
    )  # fmt: skip

    def file(name: str) -> Path:
        model = f"-{host.model.name}" if (host.work / "model.json").exists() else ""
        return host.out / f"{name}{model}.json"

    return told(
        {
            asked.name: run_stage(
                asked.name,
                lambda name=asked.name: STAGES[name](host),
                asked.limit_s,
                lambda name=asked.name: file(name),
            )
            for asked in options.stages
        }
    )


if __name__ == "__main__":
    sys.exit(main())
