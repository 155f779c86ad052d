"""Megatron's own checkpoint of its distributed optimizer, without Transformer Engine and apex, on CPUs."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("checkpoint_child.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def path() -> str:
    """PYTHONPATH with Megatron-LM on it: `MEGATRON_ROOT`, or a checkout beside the project."""
    checkout = Path(os.environ.get("MEGATRON_ROOT", ROOT.parent / "Megatron-LM"))
    if not (checkout / "megatron/training").is_dir():
        pytest.skip("no Megatron-LM: set MEGATRON_ROOT")
    if find_spec("transformer_engine") is not None:
        pytest.skip("Transformer Engine has an Adam of its own")
    return os.pathsep.join((str(checkout), str(ROOT / "slime"), str(ROOT / "openclaw-rl")))


def run(path: str, folder: Path, ranks: int, kind: str, *flags: str) -> list[subprocess.CompletedProcess[str]]:
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONSAFEPATH": "1", "TORCHDYNAMO_DISABLE": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, CHILD, str(rank), str(ranks), kind, folder / "store", folder / "saved", *flags],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [(child, *child.communicate(timeout=550)) for child in started]
    finally:
        for child in started:
            child.kill()
    return [subprocess.CompletedProcess(child.args, child.returncode, out, err) for child, out, err in said]


@pytest.mark.parametrize(("ranks", "kind"), [(1, "dp"), (2, "dp"), (2, "tp")])
def test_what_is_loaded_goes_on_as_if_nothing_had_been(path, tmp_path, ranks, kind):
    for done in run(path, tmp_path, ranks, kind):
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert (found["iteration"], found["scheduler"]) == (2, 3)
        assert found["moved"] > 1e-3
        assert found["loaded"] == found["continued"] == 0
        assert (found["left_out"], found["steps"]) == (0, 0)  # a lease that ended
        assert found["made"] > 1e-3
        assert set(found["checkpoints_rates"]) == {1e-2}  # Megatron's override of the scheduler does not reach them
        assert set(found["rates"]) == {1e-3}
        assert found["moved_slower"] == pytest.approx(found["moved"] / 10, rel=1e-3)


def test_on_torchs_adam_megatron_cannot_save(path, tmp_path):
    """Once Megatron can, `GroupStepAdam` may go."""
    (done,) = run(path, tmp_path, 1, "dp", "--plain")
    assert done.returncode != 0
    assert "sharded_param_state_dp_reshardable" in done.stderr
