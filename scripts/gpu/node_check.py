"""Stages of the check of the node on two GPUs; node_check.sh makes the environments and runs this.

python node_check.py --work DIR --out DIR STAGE[=SECONDS][+] …       (+: beside the stages that follow)

host         what the machine has, and how it differs from the pins
tp           one step at tensor parallelism 2 in the real Megatron with our spec and losses, beside a plain pass
checkpoint   a random-weight Qwen3 of the 0.6B's shape with the given tokenizer
binary       chats through the node with Binary RL, five updates; then a Megatron worker is killed in a step
combine      the same ledger and engine with hints and verdicts; then Ray's head is killed in a step
opd          the same with on-policy distillation; then the trainer is stopped
recorded     recorded log-probs against plain passes under what Megatron exported
ledger       the audit of the ledger
engine       SGLang on the second GPU, which the parts start by themselves; `stop` ends it
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"host": 60, "tp": 150, "checkpoint": 60, "engine": 200, "binary": 240, "opd": 200, "combine": 200}
WORTH = {"binary": 70, "combine": 70, "opd": 70}
"""Seconds without which a stage shows nothing."""
LIMITS |= {"recorded": 60, "ledger": 30, "stop": 30}


@dataclass(frozen=True, slots=True)
class Host:
    """Where things are on this machine."""

    work: Path
    out: Path
    is_tiny: bool
    streams: int
    gpus: int = 2
    fake: tuple[str, ...] = ()
    """To try the check on a CPU: a command in the driver's place; the engine is the embedded one then."""

    ends_at: float = float("inf")
    """When the stage's time is over, by the monotonic clock."""

    @property
    def device(self) -> str:
        return "cpu" if self.is_tiny else "cuda"

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


def host(host: Host) -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    look = "import torch, numpy, sys; print(sys.version[:7], torch.__version__, torch.version.cuda, numpy.__version__)"
    topology = ["nvidia-smi", "topo", "-m"]
    return {
        "gpus": _said(query).splitlines(),
        "python, torch, cuda, numpy": _said([host.slime_python, "-c", look]),
        "links": _said(topology).splitlines()[:4],
    }


def _said(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=40, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return repr(error)


# -- the step ----------------------------------------------------------------------------------------------------------


def tp(host: Host) -> dict[str, Any]:
    file = host.out / "tp.json"
    command = [host.slime_python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29555"]
    command += [str(ROOT / "scripts/gpu/node_tp.py"), "--out", str(file), *(["--tiny"] if host.is_tiny else [])]
    done = logged(host, command, host.out / "tp.log")
    figures = json.loads(file.read_text()) if file.is_file() else {}
    return {"exit": done, **figures}


# -- the whole node ----------------------------------------------------------------------------------------------------


def checkpoint(host: Host) -> dict[str, Any]:
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


def engine(host: Host) -> dict[str, Any]:
    import node_run

    running = node_run.Engine.of(host)
    return {"url": running.url, "start_s": running.start_s}


def stop(host: Host) -> dict[str, Any]:
    import node_run

    node_run.Engine.of(host, may_start=False).kill()
    return {"stopped": True}


def binary(host: Host) -> dict[str, Any]:
    return _part(host, "binary_rl", "actor")


def opd(host: Host) -> dict[str, Any]:
    return _part(host, "opd", "")


def combine(host: Host) -> dict[str, Any]:
    return _part(host, "combine", "head")


def _part(host: Host, method: str, ends_with: str) -> dict[str, Any]:
    import node_run

    part = node_run.Part(method, ends_with)
    return node_run.run_part(host, node_run.Engine.of(host), part)


def recorded(host: Host) -> dict[str, Any]:
    import node_run

    return node_run.recorded(host)


def ledger(host: Host) -> dict[str, Any]:
    import node_run

    return {"findings": node_run.audit(host)}


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


STAGES: dict[str, Callable[[Host], dict[str, Any]]] = {
    stage.__name__: stage for stage in (host, tp, checkpoint, engine, binary, opd, combine, recorded, ledger, stop)
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
        figures = STAGES[name](replace(host, ends_at=started + limit_s))
        is_good = not figures.get("findings") and not figures.get("exit")
    except (Exception, OutOfTime) as error:
        traceback.print_exc()
        figures, is_good = {"failed": repr(error)[:2000]}, False
    finally:
        signal.alarm(0)
    figures = {"stage seconds": round(time.monotonic() - started, 1), **figures}
    (host.out / f"{name}.json").write_text(json.dumps(figures, indent=1, default=str) + "\n")
    print(f"== {name}: {json.dumps(figures, default=str)[:4000]}", flush=True)
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", metavar="STAGE[=SECONDS][+]")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="small models, for a try on a CPU")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=2, help="1: one card for both, weights by disk")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="of all stages together")
    parser.add_argument("--go-on", action="store_true", help="the other methods too where the first failed")
    parser.add_argument("--fake", default="", help="'PYTHON MODULE' in the driver's place, on the embedded engine")
    options = parser.parse_args()
    host = Host(
        work=options.work.absolute(),
        out=options.out.absolute(),
        is_tiny=options.tiny,
        streams=options.streams,
        gpus=options.gpus,
        fake=tuple(options.fake.split()),
    )
    results: dict[str, bool | str] = {}
    end = time.monotonic() + options.budget_s
    beside: dict[str, subprocess.Popen[bytes]] = {}
    for stage in options.stages:
        name, _, limit = stage.removesuffix("+").partition("=")
        limit_s = min(int(limit or LIMITS[name]), int(end - time.monotonic()))
        if stage.endswith("+"):
            words = [sys.executable, __file__, "--work", str(host.work), "--out", str(host.out), f"{name}={limit_s}"]
            beside[name] = subprocess.Popen(words + ["--tiny"] * host.is_tiny, start_new_session=True)
        elif name in ("opd", "combine") and results.get("binary") is False and not options.go_on:
            results[name] = "skipped: binary failed"
        else:
            enough = WORTH.get(name, 5)
            results[name] = _run(host, name, limit_s) if limit_s > enough else "no time"
    for name, child in beside.items():
        try:
            results[name] = child.wait(max(5.0, end - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            results[name] = "no time"
    print(f"== all: {results}", flush=True)
    return 0 if all(result is True for result in results.values()) else 1


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "benchmarks"), str(ROOT / "tests" / "integration")]
    sys.exit(main())
