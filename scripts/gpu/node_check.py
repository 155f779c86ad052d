"""Stages of the check of the node on two GPUs; node_check.sh makes the environments and runs this.

python node_check.py --work DIR --out DIR STAGE[=SECONDS] …

host         what the machine has, and how it differs from the pins
tp           one step at tensor parallelism 2 in the real Megatron with our spec and losses, beside a plain pass
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"host": 60, "tp": 150}


@dataclass(frozen=True, slots=True)
class Host:
    """Where things are on this machine."""

    work: Path
    out: Path
    is_tiny: bool

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


STAGES: dict[str, Callable[[Host], dict[str, Any]]] = {stage.__name__: stage for stage in (host, tp)}


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
    figures = {"stage seconds": round(time.monotonic() - started, 1), **figures}
    (host.out / f"{name}.json").write_text(json.dumps(figures, indent=1, default=str) + "\n")
    print(f"== {name}: {json.dumps(figures, default=str)[:4000]}", flush=True)
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", metavar="STAGE[=SECONDS]")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="small models, for a try on a CPU")
    options = parser.parse_args()
    host = Host(options.work.absolute(), options.out.absolute(), options.tiny)
    results = {}
    for stage in options.stages:
        name, _, limit = stage.partition("=")
        results[name] = _run(host, name, int(limit or LIMITS[name]))
    print(f"== all: {results}", flush=True)
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
