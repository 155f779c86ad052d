"""Check of the node on one, two or four GPUs: our plugin in the real slime, Megatron, SGLang and Ray.

    node_check.sh STAGE[=SECONDS][+] …

`NAME+` runs beside the stages that follow. `node_check.sh` makes the environments and starts this module.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file

from gpu import models, node_kills, node_load, node_practice, node_run, node_scoring, node_script, node_weights
from gpu.engine_process import EngineProcess
from gpu.host import LAYOUTS, NodeHost
from gpu.node_processes import Engine, stop_prm
from gpu.stages import Figures, Stage, output_of, parser, run_stage, summarise, table
from openclaw_rl.testing.ledger_audit import audit

GPUS = "1: one card for all, weights by disk; 4: tensor parallelism 2, and a judge with a card of its own"
TP_FP32, TP_BF16 = 1e-4, 0.1
"""Largest relative error of the gradient against a plain fp32 pass, as whole vectors."""


# -- the machine and its processes -------------------------------------------------------------------------------------


def machine(host: NodeHost) -> Figures:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    look = "import torch, numpy, sys; print(sys.version[:7], torch.__version__, torch.version.cuda, numpy.__version__)"
    topology = ["nvidia-smi", "topo", "-m"]
    return {
        "gpus": output_of(query).splitlines(),
        "python, torch, cuda, numpy": output_of([host.slime_python, "-c", look]),
        "links": output_of(topology).splitlines()[:4],
    }


def engine(host: NodeHost) -> Figures:
    running = Engine.of(host).running
    return {"url": running.url, "start_s": running.start_s}


def prm(host: NodeHost) -> Figures:
    running = node_run.judge_engine(host)
    if running is None:
        raise ValueError(f"--gpus {host.gpus} has no card for a judge")
    return {"url": running.url, "start_s": running.start_s}


def stop(host: NodeHost) -> Figures:
    running = EngineProcess.known(host.work)
    if running is not None:
        running.kill()
    stop_prm(host.work)
    return {"stopped": True}


# -- the step ----------------------------------------------------------------------------------------------------------


def tp(host: NodeHost) -> Figures:
    file = host.out / "tp.json"
    command = [host.slime_python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29555"]
    command += ["-m", "gpu.node_tp", "--out", str(file), *(["--tiny"] if host.is_tiny else [])]
    exit_code = _run_logged(host, command, host.out / "tp.log")
    figures = json.loads(file.read_text()) if file.is_file() else {}
    far = {name: case["gradient, relative error"] for name, case in figures.items() if "relative error" in str(case)}
    findings = [
        f"{name}: gradients are {error} from the plain pass's"
        for name, error in far.items()
        if not error < (TP_FP32 if name.startswith("fp32") else TP_BF16)
    ]
    return {"exit": exit_code, **figures, "findings": findings + ["no case ran"] * (not far)}


def _run_logged(host: NodeHost, command: list[str], log: Path) -> int:
    """Run the command with its output in the log; its process group ends with the stage."""
    with log.open("wb") as out:
        child = subprocess.Popen(command, env=host.environ, stdout=out, stderr=out, start_new_session=True)
        try:
            return child.wait()
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


# -- the whole node ----------------------------------------------------------------------------------------------------


def checkpoint(host: NodeHost) -> Figures:
    folder = models.qwen3(host.work / "tokenizer", host.checkpoint, device=host.device, vocab_size=49152)
    _fill_padding_row(folder)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {"folder": str(folder), "mb": round(size / 1e6)}


def _fill_padding_row(folder: Path) -> None:
    # A random model has zeros in this row, and prompts may hold the token: RMSNorm multiplies its gradient by 1000.
    config = json.loads((folder / "config.json").read_text())
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if (rows := tensors.get("model.embed_tokens.weight")) is not None:
            rows[config["pad_token_id"]] = rows[config["pad_token_id"] + 1].flip(0)
            save_file(tensors, file, metadata={"format": "pt"})


def binary(host: NodeHost) -> Figures:
    return node_run.run_method(host, node_run.Part("binary_rl", "actor"))


def combine(host: NodeHost) -> Figures:
    return node_run.run_method(host, node_run.Part("combine", "head"))


def opd(host: NodeHost) -> Figures:
    return node_run.run_method(host, node_run.Part("opd", ""))


def engine_kill(host: NodeHost) -> Figures:
    return node_run.run_method(host, node_run.Part("binary_rl", "engine", updates=2))


def ledger(host: NodeHost) -> Figures:
    return {"findings": audit(host.data_dir / "ledger.sqlite3", [], is_deep=True)}


STAGES = table(
    Stage("host", 60, machine, "report the GPUs, the links between them and the versions of the packages"),
    Stage("tp", 150, tp, "one step at tensor parallelism 2 in the real Megatron, beside a plain pass"),
    Stage("checkpoint", 60, checkpoint, "make a random-weight Qwen3 of the 0.6B's shape with the given tokenizer"),
    Stage("binary", 240, binary, "five updates with Binary RL; then a Megatron worker is killed in a step", min_s=70),
    Stage("combine", 200, combine, "the same with hints and verdicts; then Ray's head is killed in a step", min_s=70),
    Stage("opd", 200, opd, "the same with on-policy distillation; then the trainer is stopped", min_s=70),
    Stage("script", 560, node_script.run, "a launch script as a user starts it; `stop` first", min_s=150),
    Stage("kills", 570, node_kills.run, "the launch script; each of its processes is killed in turn", min_s=150),
    Stage("practice", 400, node_practice.run, "the launch script practises corrections, taught by the base", min_s=150),
    Stage("scoring", 150, node_scoring.run, "score a reply of 8,192 tokens: memory, slices, logits in chunks, fp8"),
    Stage("engine_kill", 240, engine_kill, "two updates; then the policy's SGLang is killed and restarted", min_s=150),
    Stage("recorded", 60, node_load.recorded, "recorded log-probs against plain passes under Megatron's exports"),
    Stage("weights", 40, node_weights.run, "the engine's tensors after the pushes against Megatron's exports"),
    Stage("ledger", 30, ledger, "the deep audit of the ledger"),
    Stage("engine", 200, engine, "start the policy's SGLang; the parts above start it too"),
    Stage("prm", 200, prm, "start the judge's SGLang, on four GPUs; the parts above start it too"),
    Stage("stop", 30, stop, "end both SGLangs"),
)


def arguments() -> argparse.ArgumentParser:
    own = parser(__doc__, STAGES)
    own.add_argument("--gpus", type=int, choices=tuple(LAYOUTS), default=2, help=GPUS)
    own.add_argument("--engines", type=int, choices=(1, 2), default=1, help="policy engines of `script` and `kills`")
    own.add_argument("--push", choices=("nccl", "disk"), help="way of the weights in `script` and `kills`")
    own.add_argument("--budget-s", type=float, default=3600.0, help="time limit of all stages together")
    own.add_argument("--kills", nargs="+", default=(), choices=node_kills.NAMES, help="those of `kills`, in order")
    own.add_argument("--go-on", action="store_true", help="run `combine` and `opd` even if `binary` failed")
    return own


def main() -> int:
    options = arguments().parse_args()
    host = NodeHost(
        work=options.work,
        out=options.out,
        is_tiny=options.tiny,
        streams=options.streams,
        gpus=options.gpus,
        engines=options.engines,
        push=options.push,
        kills=tuple(options.kills),
    )
    results: dict[str, bool | str] = {}
    end = time.monotonic() + options.budget_s
    beside: dict[str, subprocess.Popen[bytes]] = {}
    for call in options.stages:
        name, limit_s = call.name, min(call.limit_s, int(end - time.monotonic()))
        if call.is_beside:
            beside[name] = _beside(host, name, limit_s)
        elif name in ("opd", "combine") and results.get("binary") is False and not options.go_on:
            results[name] = "skipped: binary failed"
        else:
            results[name] = _run(host, name, limit_s) if limit_s > STAGES[name].min_s else "no time"
    for name, child in beside.items():
        try:
            results[name] = child.wait(max(5.0, end - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            results[name] = "no time"
    return summarise(results)


def _run(host: NodeHost, name: str, limit_s: int) -> bool:
    timed = replace(host, ends_at=time.monotonic() + limit_s)
    return run_stage(name, lambda: STAGES[name].run(timed), limit_s, lambda: host.out / f"{name}.json")


def _beside(host: NodeHost, name: str, limit_s: int) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "gpu.node_check", "--work", str(host.work), "--out", str(host.out)]
    words += [f"{name}={limit_s}", "--gpus", str(host.gpus), *["--tiny"] * host.is_tiny]
    return subprocess.Popen(words, start_new_session=True)


if __name__ == "__main__":
    sys.exit(main())
