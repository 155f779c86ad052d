"""Our layer spec in the real Megatron, on CPUs, beside a plain Hugging Face forward and backward pass."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("spec_child.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def path() -> str:
    """PYTHONPATH with Megatron-LM on it: `MEGATRON_ROOT`, a checkout beside the project, or installed."""
    checkout = Path(os.environ.get("MEGATRON_ROOT", ROOT.parent / "Megatron-LM"))
    if not (checkout / "megatron/core").is_dir() and find_spec("megatron") is None:
        pytest.skip("no Megatron-LM: set MEGATRON_ROOT")
    return os.pathsep.join((str(checkout), str(ROOT / "slime"), str(ROOT / "scripts")))


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_and_gradients_are_those_of_a_plain_pass(path, tp, tmp_path):
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, CHILD, str(rank), str(tp), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(tp)
    ]
    try:
        answers = [rank.communicate(timeout=550) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for out, err in answers:
        assert out, err[-2000:]
        found = json.loads(out.splitlines()[-1])
        assert found["logits"] < 1e-5
        assert found["gradients"] < 1e-5
        assert found["llama3 rope"] < 1e-5
