"""Rehearsals of the GPU checks on a CPU: their first stages, and the stand-ins of `scripts/gpu/rehearse.sh`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Environments as a check makes them; their interpreters print their names and arguments."""
    (tmp_path / "ours" / "lib" / "python3.12" / "site-packages").mkdir(parents=True)
    for name in ("ours", "sglang", "slime"):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        python.chmod(0o755)
    for _ in range(2):  # a second time changes nothing
        command = ["bash", str(ROOT / "scripts" / "gpu" / "rehearse.sh")]
        subprocess.run(command, env=os.environ | {"WORK": str(tmp_path)}, check=True, capture_output=True, timeout=120)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("sglang -I -m sglang.launch_server --port 5", "ours -I -m sglang.launch_server --port 5"),
        (
            "sglang -I child_main.py --env A=b c sglang.launch_server",
            "ours -I child_main.py --env A=b c sglang.launch_server",
        ),
        ("sglang -I probe.py", "sglang -I probe.py"),
        (
            "slime -P child_main.py openclaw_slime.driver --data-dir d -- --spec a b",
            "ours -P child_main.py toy_driver --data-dir d -- --spec a b",
        ),
        ("slime -m torch.distributed.run -m gpu.node_tp", "slime -m torch.distributed.run -m gpu.node_tp"),
        ("ours -m gpu.node_check", "ours -m gpu.node_check"),
    ],
)
def test_only_what_needs_a_gpu_goes_to_a_stand_in(work: Path, words: str, says: str) -> None:
    name, *arguments = words.split()
    done = subprocess.run([work / name / "bin" / "python", *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == says


def test_our_environment_finds_the_stand_ins(work: Path) -> None:
    (line,) = (work / "ours/lib/python3.12/site-packages/stand_ins.pth").read_text().splitlines()
    assert (Path(line) / "sglang" / "launch_server.py").is_file()
    assert (Path(line) / "toy_driver.py").is_file()


def check(name: str, work: Path, *words: str, **environ: str) -> str:
    """Run a check with this interpreter as the host's python3, from another directory; return its last line."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = os.environ | {"PATH": path, "WORK": str(work), "OUT": str(work / "out")} | environ
    argv = ["bash", str(ROOT / "scripts" / "gpu" / f"{name}.sh"), "--tiny", *words]
    done = subprocess.run(argv, env=environment, cwd=work, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_the_sglang_check_starts_the_embedded_engine_on_a_random_model(bundled_cache: Path, tmp_path: Path) -> None:
    (model,) = (bundled_cache / "models").iterdir()
    (tmp_path / "tokenizer").mkdir()
    for file in (*model.glob("*.json"), *model.glob("*.jinja")):
        shutil.copy(file, tmp_path / "tokenizer")
    line = check("sglang_check", tmp_path, "random=120", "engine=120", "stop=60", ENGINE="embedded")
    assert line == "== all: {'random': True, 'engine': True, 'stop': True}"


def test_the_node_check_makes_environments_that_find_the_package(tmp_path: Path) -> None:
    assert check("node_check", tmp_path, "stop=60") == "== all: {'stop': True}"
    for name in ("ours", "slime"):
        command = [tmp_path / name / "bin" / "python", "-c", "import gpu.megatron_weights, openclaw_slime.layout"]
        subprocess.run(command, check=True, cwd=tmp_path, timeout=120)
