"""Stages of the check of the node on one, two or four GPUs; node_check.sh makes the environments and runs this.

python node_check.py --work DIR --out DIR STAGE[=SECONDS][+] …       (+: beside the stages that follow)

host         what the machine has, and how it differs from the pins
tp           one step at tensor parallelism 2 in the real Megatron with our spec and losses, beside a plain pass
checkpoint   a random-weight Qwen3 of the 0.6B's shape with the given tokenizer
binary       chats through the node with Binary RL, five updates; then a Megatron worker is killed in a step
combine      the same ledger and engine with hints and verdicts; then Ray's head is killed in a step
opd          the same with on-policy distillation; then the trainer is stopped
script       a launch script as a user starts it, on one GPU or four: Combined and a judge; `stop` must come before
engine_kill  two updates with Binary RL; then the policy's SGLang is killed and started again, with the base's weights
recorded     recorded log-probs against plain passes under what Megatron exported
weights      what the engine held after the pushes against what Megatron exported, tensor by tensor
ledger       the audit of the ledger
engine       the policy's SGLang, which the parts start by themselves; `stop` ends it
prm          the judge's SGLang, where there are four GPUs; the parts start it too, `stop` ends it

`NAME+` runs beside the stages that follow.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "benchmarks"), str(ROOT / "tests" / "integration")]

from stages import Figures, parser, run_stage, said, told  # noqa: E402

from openclaw_slime.layout import Layout  # noqa: E402

LIMITS = {"host": 60, "tp": 150, "checkpoint": 60, "engine": 200, "prm": 200, "binary": 240, "opd": 200, "combine": 200}
LAYOUTS = {
    1: Layout(1, 1, 1, 0, actor_tp=1, engine_tp=1, is_shared=True),
    2: Layout(2, 1, 1, 0, actor_tp=1, engine_tp=1),
    4: Layout(4, 2, 1, 1, actor_tp=2, engine_tp=1, prm_tp=1),
}
"""By the number of GPUs."""
GPUS = "1: one card for both, weights by disk; 4: tensor parallelism 2, and a judge with a card of its own"
TP_FP32, TP_BF16 = 1e-4, 0.1
"""Largest relative error of the gradient against a plain fp32 pass, as whole vectors."""
WORTH = {"binary": 70, "combine": 70, "opd": 70, "engine_kill": 150, "script": 150}
"""Seconds without which a stage shows nothing."""
LIMITS |= {"engine_kill": 240, "script": 560, "recorded": 60, "weights": 40, "ledger": 30, "stop": 30}


@dataclass(frozen=True, slots=True)
class Host:
    """Where things are on this machine."""

    work: Path
    out: Path
    is_tiny: bool
    streams: int
    gpus: int = 2
    ends_at: float = float("inf")
    """When the stage's time is over, by the monotonic clock."""

    @property
    def device(self) -> str:
        return "cpu" if self.is_tiny else "cuda"

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.gpus]

    @property
    def engine_share(self) -> float:
        """Of its card's memory."""
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
        """Of the environment that holds slime, Megatron, Ray and SGLang."""
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


# -- what is there -----------------------------------------------------------------------------------------------------


def host(host: Host) -> Figures:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    look = "import torch, numpy, sys; print(sys.version[:7], torch.__version__, torch.version.cuda, numpy.__version__)"
    topology = ["nvidia-smi", "topo", "-m"]
    return {
        "gpus": said(query).splitlines(),
        "python, torch, cuda, numpy": said([host.slime_python, "-c", look]),
        "links": said(topology).splitlines()[:4],
    }


# -- the step ----------------------------------------------------------------------------------------------------------


def tp(host: Host) -> Figures:
    file = host.out / "tp.json"
    command = [host.slime_python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29555"]
    command += [str(ROOT / "scripts/gpu/node_tp.py"), "--out", str(file), *(["--tiny"] if host.is_tiny else [])]
    done = logged(host, command, host.out / "tp.log")
    figures = json.loads(file.read_text()) if file.is_file() else {}
    far = {name: case["gradient, relative error"] for name, case in figures.items() if "relative error" in str(case)}
    findings = [
        f"{name}: gradients are {error} from the plain pass's"
        for name, error in far.items()
        if not error < (TP_FP32 if name.startswith("fp32") else TP_BF16)
    ]
    return {"exit": done, **figures, "findings": findings + ["no case ran"] * (not far)}


# -- the whole node ----------------------------------------------------------------------------------------------------


def checkpoint(host: Host) -> Figures:
    import models

    models.QWEN3["qwen3-tiny"] = {"hidden_size": 64, "intermediate_size": 96, "layers": 2, "heads": 8}
    folder = models.qwen3(host.work / "tokenizer", host.checkpoint, device=host.device, vocab_size=49152)
    _fill_padding_row(folder)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {"folder": str(folder), "mb": round(size / 1e6)}


def _fill_padding_row(folder: Path) -> None:
    """Random models have zeros there, and the token may be in prompts: RMSNorm makes a thousandfold gradient of it."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if (rows := tensors.get("model.embed_tokens.weight")) is not None:
            rows[config["pad_token_id"]] = rows[config["pad_token_id"] + 1].flip(0)
            save_file(tensors, file, metadata={"format": "pt"})


def engine(host: Host) -> Figures:
    from node_engine import Engine

    running = Engine.of(host).running
    return {"url": running.url, "start_s": running.start_s}


def stop(host: Host) -> Figures:
    import node_prm
    from engine_process import EngineProcess

    running = EngineProcess.known(host.work)
    if running is not None:
        running.kill()
    node_prm.stop(host.work)
    return {"stopped": True}


def prm(host: Host) -> Figures:
    import node_run

    running = node_run.start_prm(host)
    if running is None:
        raise ValueError(f"--gpus {host.gpus} has no card for a judge")
    return {"url": running.url, "start_s": running.start_s}


def binary(host: Host) -> Figures:
    return _part(host, "binary_rl", "actor")


def opd(host: Host) -> Figures:
    return _part(host, "opd", "")


def combine(host: Host) -> Figures:
    return _part(host, "combine", "head")


def _part(host: Host, method: str, ends_with: str) -> Figures:
    import node_run
    from node_engine import Engine

    return node_run.run_part(host, Engine.of(host), node_run.Part(method, ends_with))


def engine_kill(host: Host) -> Figures:
    import node_run
    from node_engine import Engine

    return node_run.run_part(host, Engine.of(host), node_run.Part("binary_rl", "engine", updates=2))


def script(host: Host) -> Figures:
    import node_script

    return node_script.run(host)


def recorded(host: Host) -> Figures:
    import node_recorded

    return node_recorded.recorded(host)


def weights(host: Host) -> Figures:
    import node_weights
    from node_engine import Engine

    return node_weights.run(host, Engine.of(host).url)


def ledger(host: Host) -> Figures:
    import running

    return {"findings": running.audit(host.data_dir)}


def logged(host: Host, command: list[str], log: Path) -> int:
    """Runs it with its output in the log; the whole process group ends with the stage."""
    with log.open("wb") as out:
        child = subprocess.Popen(command, env=host.environ, stdout=out, stderr=out, start_new_session=True)
        try:
            return child.wait()
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


STAGES: dict[str, Callable[[Host], Figures]] = {
    stage.__name__: stage
    for stage in (
        host,
        tp,
        checkpoint,
        engine,
        prm,
        binary,
        opd,
        combine,
        engine_kill,
        script,
        recorded,
        weights,
        ledger,
        stop,
    )
}


def arguments() -> argparse.ArgumentParser:
    own = parser(__doc__, LIMITS)
    own.add_argument("--gpus", type=int, choices=tuple(LAYOUTS), default=2, help=GPUS)
    own.add_argument("--budget-s", type=float, default=3600.0, help="of all stages together")
    own.add_argument("--go-on", action="store_true", help="the other methods too where the first failed")
    return own


def main() -> int:
    options = arguments().parse_args()
    host = Host(
        work=options.work,
        out=options.out,
        is_tiny=options.tiny,
        streams=options.streams,
        gpus=options.gpus,
    )
    results: dict[str, bool | str] = {}
    end = time.monotonic() + options.budget_s
    beside: dict[str, subprocess.Popen[bytes]] = {}
    for asked in options.stages:
        name, limit_s = asked.name, min(asked.limit_s, int(end - time.monotonic()))
        if asked.is_beside:
            beside[name] = _beside(host, name, limit_s)
        elif name in ("opd", "combine") and results.get("binary") is False and not options.go_on:
            results[name] = "skipped: binary failed"
        else:
            results[name] = _run(host, name, limit_s) if limit_s > WORTH.get(name, 5) else "no time"
    for name, child in beside.items():
        try:
            results[name] = child.wait(max(5.0, end - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            results[name] = "no time"
    return told(results)


def _run(host: Host, name: str, limit_s: int) -> bool:
    timed = replace(host, ends_at=time.monotonic() + limit_s)
    return run_stage(name, lambda: STAGES[name](timed), limit_s, lambda: host.out / f"{name}.json")


def _beside(host: Host, name: str, limit_s: int) -> "subprocess.Popen[bytes]":
    words = [sys.executable, __file__, "--work", str(host.work), "--out", str(host.out), f"{name}={limit_s}"]
    words += ["--gpus", str(host.gpus), *["--tiny"] * host.is_tiny]
    return subprocess.Popen(words, start_new_session=True)


if __name__ == "__main__":
    sys.exit(main())
