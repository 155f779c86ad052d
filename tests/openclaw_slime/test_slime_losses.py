"""Our losses through slime's own hooks in the real Megatron, on CPUs: tensor and context parallelism of two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openclaw_rl.trainer_protocol import SampleBody

PARTS = ("partial", "verdicts", "fresh", "stale")
CHILD = Path(__file__).with_name("losses_child.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def path() -> str:
    """PYTHONPATH with slime and Megatron-LM: `SLIME_ROOT` and `MEGATRON_ROOT`, or checkouts beside the project."""
    slime = Path(os.environ.get("SLIME_ROOT", ROOT.parent / "slime"))
    megatron = Path(os.environ.get("MEGATRON_ROOT", ROOT.parent / "Megatron-LM"))
    if not (slime / "slime/ray/rollout.py").is_file():
        pytest.skip("no checkout of slime: set SLIME_ROOT")
    if not (megatron / "megatron/core").is_dir():
        pytest.skip("no Megatron-LM: set MEGATRON_ROOT")
    return os.pathsep.join(
        (str(slime), str(megatron), *(str(ROOT / f"openclaw-{k}") for k in ("rl", "opd", "combine")))
    )


@pytest.mark.parametrize("kind", ["tp", "cp"])
def test_loss_and_gradient_are_those_of_plain_torch_and_of_slime(
    path, kind, tmp_path, node_config, every_kind, verdicts
):
    batch = {
        "samples": [SampleBody.of(sample).model_dump(mode="json") for sample in (*every_kind, *verdicts)],
        "config": {**node_config("combine", 0.2).model_dump(mode="json"), "token": "t"},
    }
    (tmp_path / "batch.json").write_text(json.dumps(batch))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((path, str(ROOT / "slime"))),
        "PYTHONSAFEPATH": "1",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    argv = [[sys.executable, CHILD, str(n), "2", kind, tmp_path / "store", tmp_path / "batch.json"] for n in range(2)]
    ranks = [
        subprocess.Popen(a, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for a in argv
    ]
    try:
        answers = [rank.communicate(timeout=550) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for out, err in answers:
        assert out, err[-3000:]
        found = json.loads(out.splitlines()[-1])
        assert found["partial"].keys() == {"loss", "gradient"}
        assert {part for part in PARTS if "slime_loss" in found[part]} == {"verdicts", "fresh"}
        assert all(value < 2e-6 for part in PARTS for value in found[part].values()), found
