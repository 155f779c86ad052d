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
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
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

    @property
    def device(self) -> str:
        return "cuda" if self.engine == "sglang" else "cpu"

    @property
    def engine_python(self) -> str | None:
        return str(self.work / "sglang" / "bin" / "python") if self.engine == "sglang" else None

    @property
    def engine_args(self) -> list[str]:
        return ["--cuda-graph-max-bs-decode", "64", "--sampling-backend", "pytorch", "--context-length", "4096"]

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


def random(host: Host) -> dict[str, Any]:
    import models

    changes = (
        {"hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 8} if host.is_tiny else {}
    )
    folder = models.random_model(host.work / "tokenizer", host.work / "random", 0.8, device=host.device, **changes)
    models.random_model(host.work / "tokenizer", host.work / "random-other", 0.8, device=host.device, seed=1, **changes)
    return _with_adapters(host, folder, nats=0.5)


def gguf(host: Host) -> dict[str, Any]:
    from openclaw_rl.engines.bundled import base_hash, resolve
    from openclaw_rl.settings import ModelSettings

    resolved = resolve(ModelSettings(path=str(host.gguf) if host.gguf else "bundled"), host.work / "cache")
    return {"base_hash": base_hash(resolved)} | _with_adapters(host, resolved.folder, nats=1.0)


def qwen3_06b(host: Host) -> dict[str, Any]:
    return _qwen3(host, "qwen3-0.6b")


def qwen3_4b(host: Host) -> dict[str, Any]:
    return _qwen3(host, "qwen3-4b")


def _qwen3(host: Host, name: str) -> dict[str, Any]:
    import models

    tiny = {"hidden_size": 128, "intermediate_size": 96, "layers": 2, "heads": 8, "vocab_size": 50000}
    changes = tiny if host.is_tiny else {}
    folder = models.qwen3(host.work / "tokenizer", host.work / name, device=host.device, **changes)
    host.keep("model", {"folder": str(folder), "adapters": {}})
    return {"model": name, "mib": round(sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20)}


def _with_adapters(host: Host, folder: Path, nats: float) -> dict[str, Any]:
    import models

    adapters = {}
    for seed, name in enumerate(("check-a", "check-b"), 1):
        where = host.work / f"{folder.name}-{name}"
        adapters[name] = str(models.synthetic_adapter(folder, where, seed, host.device, nats))
    host.keep("model", {"folder": str(folder), "adapters": adapters})
    return {"model": folder.name}


# -- the engine on its own ---------------------------------------------------------------------------------------------


def engine(host: Host) -> dict[str, Any]:
    from openclaw_rl.children import free_port
    from openclaw_rl.engines.sglang import launch
    from openclaw_rl.settings import EngineSettings

    started, port = time.monotonic(), free_port()
    log = (host.out / "engine.log").open("ab")
    if host.engine == "sglang":
        installed = launch.look(host.engine_python)
        settings = EngineSettings(kind="sglang", args=tuple(host.engine_args), memory_fraction=0.3)
        arguments = launch.argv(
            installed,
            settings,
            folder=host.model,
            name="check",
            port=port,
            context_length=None,
            adapters=launch.Adapters(
                16, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 5
            ),
        )
        command = [str(host.engine_python), "-I", "-m", launch.MODULE, *arguments]
        environ = os.environ | launch.ENVIRON
    else:
        config = {"port": port, "model": {"path": str(host.model)}, "engine": {"threads": 1}}
        config |= {"cache_dir": str(host.work / "cache"), "port_file": str(host.work / "port.json")}
        host.keep("embedded", config)
        command = [sys.executable, "-m", "openclaw_rl.engines.embedded", "--config", str(host.work / "embedded.json")]
        environ = dict(os.environ)
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    host.keep("engine", {"url": url, "pid": process.pid})
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"the engine died with {process.returncode}")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                break
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    info = httpx.get(f"{url}/model_info").json()
    return {"start_s": round(time.monotonic() - started, 1), "command": command, "model_info": info, **_gpu()}


def stop(host: Host) -> dict[str, Any]:
    pid = host.read("engine")["pid"]
    os.killpg(pid, signal.SIGTERM)
    for _ in range(300):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # ours, when it was started in this call
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return {"stopped": True, **_gpu()}
        time.sleep(0.1)
    os.killpg(pid, signal.SIGKILL)
    return {"stopped": "killed"}


def conformance(host: Host) -> dict[str, Any]:
    adapters = [word for name, folder in host.adapters.items() for word in ("--adapter", f"{name}={folder}")]
    words = ["tests/conformance", "-s", *adapters]
    if (other := host.work / f"{host.model.name}-other").exists():
        words += ["--other-weights", str(other)]
    return _suite(host, "conformance", words)


def weights(host: Host) -> dict[str, Any]:
    other = host.work / f"{host.model.name}-other"
    return _suite(host, "weights", ["tests/conformance/test_weights.py", "-s", "--other-weights", str(other)])


def _suite(host: Host, name: str, words: list[str]) -> dict[str, Any]:
    argv = [sys.executable, "-m", "pytest", *words, "-q", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore"]
    argv += ["--timeout", "75", "--engine-url", host.engine_url, "--engine-vocab", "10000"]
    file = host.out / f"{name}.log"
    with file.open("wb") as log:
        done = subprocess.run(argv, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
    lines = file.read_text(errors="replace").splitlines()
    told = ("FAILED", "ERROR", "SKIPPED", "E  ", "runs ", ".runs ")
    notable = [line[:600] for line in lines if line.startswith(told)]
    return {"exit": done.returncode, "result": lines[-1:], "notable": notable[:40]}


def logprobs(host: Host) -> dict[str, Any]:
    return asyncio.run(_log_probs(host, host.engine_url, host.adapters))


async def _log_probs(host: Host, url: str, adapters: Mapping[str, Path]) -> dict[str, Any]:
    import models

    from openclaw_rl.engines.base import Score
    from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest
    from openclaw_rl.engines.http import HttpEngine
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
    return figures


def quirks(host: Host) -> dict[str, Any]:
    return asyncio.run(_quirks(host))


async def _quirks(host: Host) -> dict[str, Any]:
    """Each on an adapter name of its own. An unload that does not come back holds up every later load, so what makes
    one is tried last, and nothing after it.
    """
    (_, folder), *_ = host.adapters.items()
    figures: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=host.engine_url, timeout=10) as http:

        async def body(name: str, ids: list[int], **more: Any) -> dict[str, Any]:
            loaded = await http.post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})
            assert loaded.status_code == 200, loaded.text
            params = {"max_new_tokens": 400, "temperature": 1.0, "ignore_eos": True}
            return {"input_ids": ids, "lora_path": name, "sampling_params": params, "rid": f"rid-{name}", **more}

        async def dropped(request: dict[str, Any], after_s: float) -> None:
            try:
                await http.post("/generate", json=request, timeout=after_s)
            except httpx.TimeoutException:
                await http.post("/abort_request", json={"rid": request["rid"]})

        async def stream_dropped(request: dict[str, Any]) -> None:
            async with http.stream("POST", "/generate", json=request | {"stream": True}) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data"):
                        break
            await http.post("/abort_request", json={"rid": request["rid"]})

        async def retracted_and_aborted(request: dict[str, Any]) -> None:
            events = []
            async with http.stream("POST", "/generate", json=request | {"stream": True, "return_logprob": True}) as got:
                lines = got.aiter_lines()
                events.append(await anext(lines))
                await http.post("/pause_generation", json={"mode": "retract"})
                await http.post("/abort_request", json={"rid": request["rid"]})
                await http.post("/continue_generation", json={})
                events += [line async for line in lines]
            rows = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
            figures["last events of an abort in the queue: ids, log-probs, tokens so far"] = [
                (
                    row["output_ids"],
                    len(row["meta_info"]["output_token_logprobs"]),
                    row["meta_info"]["completion_tokens"],
                )
                for row in rows[-2:]
            ]

        async def refused(request: dict[str, Any]) -> None:
            await http.post("/generate", json=request)

        for name, what, ids, act in (
            ("streamed", "a dropped stream", [5, 6, 7], stream_dropped),
            ("waited", "a dropped request", [5, 6, 7], lambda request: dropped(request, 0.3)),
            ("queued", "an abort in the queue", [5, 6, 7], retracted_and_aborted),
            ("refused", "a refused request", [5] * 9000, refused),
        ):
            key = f"unloads after {what}"
            try:
                await act(await body(name, ids))
                reply = await http.post("/unload_lora_adapter", json={"lora_name": name}, timeout=6)
                figures[key] = reply.status_code == 200
            except httpx.TimeoutException:
                figures[key] = "never; nothing after it was tried"
                break
        await http.post("/abort_request", json={"abort_all": True})
    return figures


# -- the whole server --------------------------------------------------------------------------------------------------


def attached(host: Host) -> dict[str, Any]:
    import load

    flags = ["--engine-url", host.engine_url]
    return load.run(host, _data_dir(host, "attached"), flags, kill=False)


def full(host: Host) -> dict[str, Any]:
    import full_load

    return full_load.run(host, _data_dir(host, "full"))


def overhead(host: Host) -> dict[str, Any]:
    import overhead

    return overhead.run(host, _data_dir(host, "overhead"))


def latency(host: Host) -> dict[str, Any]:
    import latency

    return latency.run(host, _data_dir(host, "latency"))


def _data_dir(host: Host, stage: str) -> Path:
    return host.work / f"{stage}-{host.model.name}-{int(time.time())}"


def child(host: Host) -> dict[str, Any]:
    import load

    flags = ["--engine", host.engine]
    if host.engine == "sglang":
        flags += ["--set", f'engine.python="{host.engine_python}"', "--set", "engine.memory_fraction=0.3"]
        flags += ["--set", f"engine.args={json.dumps(host.engine_args)}"]
    return load.run(host, _data_dir(host, "child"), flags, kill=True)


def jit(host: Host) -> dict[str, Any]:
    caches = [name for name in (".cache/tvm-ffi", ".cache/flashinfer", ".triton") if (Path.home() / name).exists()]
    subprocess.run(["tar", "-czf", host.out / "jit.tgz", "-C", Path.home(), *caches], check=True)
    return {"packed": caches, "mib": round((host.out / "jit.tgz").stat().st_size / 2**20, 1)}


def _gpu() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,memory.used,memory.total", "--format=csv,noheader"]
    try:
        return {"gpu": subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()}
    except (OSError, subprocess.SubprocessError):
        return {"gpu": None}


STAGES: dict[str, Callable[[Host], dict[str, Any]]] = {
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


class OutOfTime(BaseException):
    """The stage's limit came; not an Exception, so that no stage takes it for its own."""


def _run(host: Host, name: str, limit_s: int) -> bool:
    def on_alarm(*_: object) -> None:
        raise OutOfTime

    started = time.monotonic()
    signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(limit_s)
    print(f"-- {name} (at most {limit_s} s)", flush=True)
    try:
        figures = STAGES[name](host)
        is_good = not figures.get("findings") and not figures.get("exit")
    except (Exception, OutOfTime) as error:
        traceback.print_exc()
        figures, is_good = {"failed": repr(error)[:2000]}, False
    finally:
        signal.alarm(0)
    figures = {"seconds": round(time.monotonic() - started, 1), **figures}
    made = host.work / "model.json"
    model = f"-{host.model.name}" if made.exists() else ""
    (host.out / f"{name}{model}.json").write_text(json.dumps(figures, indent=1, default=str) + "\n")
    print(f"== {name}: {json.dumps(figures, default=str)[:2500]}", flush=True)
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", metavar="STAGE[=SECONDS]")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers, for a try on a CPU")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--load-s", type=float, default=45.0, help="how long chats are streamed")
    parser.add_argument("--swaps", type=int, default=10, help="adapter swaps to wait for")
    parser.add_argument("--full-swaps", type=int, default=6, help="full-weight swaps to make beside the first two")
    options = parser.parse_args()
    host = Host(
        options.work.absolute(), options.out.absolute(), options.engine, options.gguf, options.tiny,
        options.streams, options.load_s, options.swaps, options.full_swaps,
    )  # fmt: skip
    results = {}
    for stage in options.stages:
        name, _, limit = stage.partition("=")
        results[name] = _run(host, name, int(limit or LIMITS[name]))
    print(f"== all: {results}", flush=True)
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
