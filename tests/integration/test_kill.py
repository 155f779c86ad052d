"""200 SIGKILLs at drawn transitions of the ledger and of the trainer's checkpoint, and an audit after each."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 200


@pytest.mark.timeout(900)
def test_nothing_is_lost_and_nothing_trains_twice_whatever_is_killed(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    argv = [sys.executable, "-m", "kill", str(tmp_path / "run"), "--kills", str(KILLS), "--seed", str(seed)]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=880, check=False)
    assert done.stdout.startswith("{"), f"seed {seed}: {done.stderr[-4000:]}"
    outcome = json.loads(done.stdout)
    assert outcome["findings"] == [], f"seed {seed}: {outcome['findings']}"
    assert done.returncode == 0, done.stderr[-4000:]
    assert sum(outcome["kills"].values()) >= KILLS
    assert outcome["audits"] >= KILLS
    assert {point.split()[0] for point in outcome["kills"]} == {"server", "trainer"}
    # The campaign did what it is about: replies were acknowledged, cut, trained on; versions were made.
    facts = outcome["facts"]
    assert facts["acknowledged"] > KILLS
    assert facts["turns"]["trained"] > 0
    assert facts["versions"]["serving"] == 1
