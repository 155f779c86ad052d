"""After `kill -9` at any moment all acknowledged changes are in the file, and the audit is clean."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from ledger import IDENTITY

from openclaw_rl.ledger import Ledger
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.types import TurnState

KILLS = 25
CHILD = Path(__file__).with_name("kill_child.py")
SUPPORT = Path(__file__).parents[2] / "support"


async def test_a_ledger_survives_kills_at_random_moments(tmp_path):
    path = tmp_path / "ledger.sqlite"
    rng = random.Random(7)
    served: set[str] = set()
    practised: set[str] = set()
    trained: dict[int, set[str]] = {}
    with subprocess.Popen(
        [sys.executable, CHILD, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SUPPORT)},
    ) as child:
        for seed in range(KILLS):
            for words in _one_life(child, seed, facts=rng.randint(0, 120)):
                if words[0] == "served":
                    served.add(words[1])
                elif words[0] == "trained":
                    trained[int(words[1])] = set(words[2:])
            ledger = await Ledger.open(path, identity=IDENTITY, training=TrainingSettings())
            assert await ledger.audit(is_deep=True) == []
            listed = {turn.turn_id: turn for turn in await ledger.turns(limit=1_000_000)}
            practised |= {turn.turn_id for turn in listed.values() if turn.practice is not None}
            assert served <= listed.keys()
            versions = {version.weight_version: version for version in await ledger.versions()}
            assert trained.keys() <= versions.keys()
            for number, turns in trained.items():
                if versions[number].state not in ("rejected", "rolled_back", "lost"):
                    assert {listed[turn].trained_in for turn in turns} == {number}
                    assert {listed[turn].state for turn in turns} == {TurnState.TRAINED}
            await ledger.aclose()
        child.stdin.close()
    assert len(served) > 100
    assert len(practised) > 20
    assert not practised & served
    assert len(trained) > 20


def _one_life(child: "subprocess.Popen[str]", seed: int, *, facts: int) -> list[list[str]]:
    """Return all lines of the process; it is killed once it has opened the ledger and printed `facts` facts."""
    child.stdin.write(f"{seed}\n")
    child.stdin.flush()
    told: list[list[str]] = []
    pid = 0
    while (words := child.stdout.readline().split()) != ["ended"]:
        assert words, "the child died"
        if words[0] == "pid":
            pid = int(words[1])
        told.append(words)
        if len(told) == 2 + facts:
            os.kill(pid, signal.SIGKILL)
    return told
