"""SIGKILL of runner, server, engine, trainer and a sandbox, one each, while episodes run: nothing is lost, doubled,
mixed or left behind. `scripts/e2e.sh kill_agents` is the same for twenty kills.

The order and the moments follow from a seed. `KILL_SEED=…` draws others.
"""

import os
from pathlib import Path

import pytest

from e2e import kill_agents

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1200)]


def test_nothing_is_lost_doubled_mixed_or_left_whatever_is_killed(open_folder: Path, short_model: Path) -> None:
    seed, lines = int(os.environ.get("KILL_SEED") or 3), list[str]()
    found = kill_agents.campaign(
        open_folder, len(kill_agents.TARGETS), seed, lines.append, ["--set", f"model.path={short_model}"]
    )
    assert found == [], f"seed {seed}\n" + "\n".join(lines)
