"""Check of the server on a real SGLang, or on the embedded engine in its place.

    sglang_check.sh STAGE[=SECONDS] …

`sglang_check.sh` makes the environments and starts this module.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import httpx

from gpu import engine_alone, full_load, latency, load, models, overhead, pool_load, practice_check, users_load
from gpu.engine_process import EngineProcess, start_engine
from gpu.host import SglangHost
from gpu.stages import Figures, Stage, output_of, parser, run_stage, summarise, table
from openclaw_rl.models.resolve import base_hash, resolve
from openclaw_rl.settings import ModelSettings

TINY_RANDOM = {"hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 8}
TOP_K = 20
TINY_QWEN3 = {"hidden_size": 128, "intermediate_size": 96, "layers": 2, "heads": 8, "vocab_size": 50000}


# -- models ------------------------------------------------------------------------------------------------------------


def random(host: SglangHost) -> Figures:
    changes = TINY_RANDOM if host.is_tiny else {}
    folder = models.random_model(host.work / "tokenizer", host.work / "random", 0.8, device=host.device, **changes)
    models.random_model(host.work / "tokenizer", host.work / "random-other", 0.8, device=host.device, seed=1, **changes)
    return _with_adapters(host, folder, nats=0.5)


def gguf(host: SglangHost) -> Figures:
    resolved = resolve(ModelSettings(path=str(host.gguf) if host.gguf else "bundled"), host.work / "cache")
    return {"base_hash": base_hash(resolved)} | _with_adapters(host, resolved.folder, nats=1.0)


def qwen3_06b(host: SglangHost) -> Figures:
    return _qwen3(host, "qwen3-0.6b")


def qwen3_4b(host: SglangHost) -> Figures:
    return _qwen3(host, "qwen3-4b")


def _qwen3(host: SglangHost, name: str) -> Figures:
    changes = TINY_QWEN3 if host.is_tiny else {}
    folder = models.qwen3(host.work / "tokenizer", host.work / name, device=host.device, **changes)
    host.keep("model", {"folder": str(folder), "adapters": {}})
    return {"model": name, "mib": round(sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20)}


def _with_adapters(host: SglangHost, folder: Path, nats: float) -> Figures:
    adapters = {}
    for seed, name in enumerate(("check-a", "check-b"), 1):
        where = host.work / f"{folder.name}-{name}"
        adapters[name] = str(models.synthetic_adapter(folder, where, seed, host.device, nats))
    host.keep("model", {"folder": str(folder), "adapters": adapters})
    return {"model": folder.name}


# -- the engine on its own ---------------------------------------------------------------------------------------------


def engine(host: SglangHost) -> Figures:
    running, command = start_engine(host, host.work, slots=5, names_ids=True)
    info = httpx.get(f"{running.url}/model_info").json()
    return {"start_s": running.start_s, "command": command, "model_info": info, **_gpu()}


def stop(host: SglangHost) -> Figures:
    running = EngineProcess.known(host.work)
    if running is None:
        raise FileNotFoundError("no engine was started")
    return {"stopped": True, **_gpu()} if running.stop() else {"stopped": "killed"}


def _gpu() -> Figures:
    return {"gpu": output_of(["nvidia-smi", "--query-gpu=name,memory.used,memory.total", "--format=csv,noheader"])}


# -- the whole server --------------------------------------------------------------------------------------------------


def attached(host: SglangHost) -> Figures:
    return load.run(host, _data_dir(host, "attached"), ["--engine-url", host.engine_url], kill=False)


def full(host: SglangHost) -> Figures:
    return full_load.run(host, _data_dir(host, "full"))


def measure_overhead(host: SglangHost) -> Figures:
    return overhead.run(host, _data_dir(host, "overhead"))


def measure_latency(host: SglangHost) -> Figures:
    return latency.run(host, _data_dir(host, "latency"))


def child(host: SglangHost) -> Figures:
    flags = ["--engine", host.engine]
    if host.engine == "sglang":
        flags += ["--set", f'engine.python="{host.engine_python}"', "--set", "engine.memory_fraction=0.3"]
        flags += ["--set", f"engine.args={json.dumps(host.engine_args)}"]
    return load.run(host, _data_dir(host, "child"), flags, kill=True)


def users(host: SglangHost) -> Figures:
    return users_load.run(host, _data_dir(host, "users"))


def pool(host: SglangHost) -> Figures:
    return pool_load.run(host, _data_dir(host, "pool"))


def practice_opd(host: SglangHost) -> Figures:
    return practice_check.run(host, _data_dir(host, "practice_opd"), "opd", top_k=host.top_k or 0)


def practice_combine(host: SglangHost) -> Figures:
    top_k = TOP_K if host.top_k is None else host.top_k
    return practice_check.run(host, _data_dir(host, "practice_combine"), "combine", top_k=top_k)


def _data_dir(host: SglangHost, stage: str) -> Path:
    return host.work / f"{stage}-{host.model.name}-{int(time.time())}"


def jit(host: SglangHost) -> Figures:
    caches = [name for name in (".cache/tvm-ffi", ".cache/flashinfer", ".triton") if (Path.home() / name).exists()]
    subprocess.run(["tar", "-czf", host.out / "jit.tgz", "-C", Path.home(), *caches], check=True)
    return {"packed": caches, "mib": round((host.out / "jit.tgz").stat().st_size / 2**20, 1)}


STAGES = table(
    Stage("random", 60, random, "make a random-weight model with the given tokenizer, and two adapters far from it"),
    Stage("qwen3_06b", 60, qwen3_06b, "make a random-weight Qwen3 of the 0.6B's shape in bf16, without adapters"),
    Stage("qwen3_4b", 90, qwen3_4b, "the same with the 4B's shape"),
    Stage("gguf", 90, gguf, "take the model of --gguf, and make two adapters; later stages use the newest model"),
    Stage("engine", 240, engine, "start the engine, which stays for later calls"),
    Stage("conformance", 150, engine_alone.conformance, "tests/conformance against the engine"),
    Stage("weights", 90, engine_alone.weights, "tests/conformance/test_weights.py: its weights are replaced meanwhile"),
    Stage("logprobs", 100, engine_alone.logprobs, "its log-probs, with and without adapters, against bf16 and fp32"),
    Stage("full", 120, full, "our server: full weights are replaced under streamed chats, --full-swaps times"),
    Stage("overhead", 90, measure_overhead, "our server: added time to first token, beside the engine's own API"),
    Stage("latency", 150, measure_latency, "our server: last feedback of a batch of 16 to serving, by phase"),
    Stage("attached", 150, attached, "our server: streamed chats, LoRA steps and adapter swaps under load"),
    Stage("quirks", 60, engine_alone.quirks, "unloads of an adapter after refused, aborted and dropped requests"),
    Stage("stop", 60, stop, "end the engine"),
    Stage("child", 330, child, "as `attached`; our server starts the engine, which is killed in the middle"),
    Stage("users", 1100, users, "our server: --users with an adapter each, trained in turn under --minutes of chats"),
    Stage("pool", 560, pool, "our server before two engines on two cards: swaps, kill -9, prefix hits, no chat held"),
    Stage("practice_opd", 240, practice_opd, "our server practises corrections: guided OPD, token level"),
    Stage("practice_combine", 240, practice_combine, "the same: guided Combined over the teacher's top-k"),
    Stage("jit", 40, jit, "pack the kernel caches into OUT/jit.tgz"),
)


def arguments() -> argparse.ArgumentParser:
    own = parser(__doc__, STAGES)
    own.add_argument("--engine", choices=("sglang", "embedded"), default="sglang", help="engine that is checked")
    own.add_argument("--gguf", type=Path, metavar="FILE", help="model of the stage `gguf`; default: the bundled one")
    own.add_argument("--dtype", choices=("bfloat16", "float16"), help="dtype of the engine; default: as our server")
    own.add_argument("--load-s", type=float, default=45.0, help="seconds of streamed chats")
    own.add_argument("--swaps", type=int, default=10, help="least number of adapter swaps")
    own.add_argument("--top-k", type=int, metavar="K", help="of both practice stages; default: 0 and 20")
    own.add_argument("--users", type=int, default=32, help="of the stage `users`")
    own.add_argument("--minutes", type=float, default=10.0, help="of the chats of all users")
    own.add_argument("--places", type=int, default=8, help="adapters that the engine holds for users' requests")
    own.add_argument("--full-swaps", type=int, default=6, help="full-weight swaps after the first two")
    return own


def main() -> int:
    options = arguments().parse_args()
    host = SglangHost(
        options.work, options.out, options.engine, options.gguf, options.tiny,
        options.streams, options.load_s, options.swaps, options.full_swaps, options.dtype,
        options.top_k, options.users, options.minutes, options.places,
    )  # fmt: skip
    return summarise({call.name: _run(host, call.name, call.limit_s) for call in options.stages})


def _run(host: SglangHost, name: str, limit_s: int) -> bool:
    def file() -> Path:
        model = f"-{host.model.name}" if (host.work / "model.json").exists() else ""
        return host.out / f"{name}{model}.json"

    return run_stage(name, lambda: STAGES[name].run(host), limit_s, file)


if __name__ == "__main__":
    sys.exit(main())
