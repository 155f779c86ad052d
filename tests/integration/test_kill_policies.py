"""SIGKILLs of server, trainer and engine while users with a policy each chat, at drawn transitions; each time an audit.

The engine holds two versions and the people are three users, so adapters come and leave all the time. At the end each
reply is computed again from its tokens and the weights of its version, and the version must be of the reply's own user.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

KILLS = 30
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("kill") / "campaign"
    argv = [sys.executable, "-m", "kill", str(folder), "--kills", str(KILLS), "--users", "3"]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    seed = os.environ.get("KILL_SEED", "7")
    done = subprocess.run(
        [*argv, "--seed", seed], env=environ, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.stdout.startswith("{"), done.stderr[-4000:]
    return folder, json.loads(done.stdout)


def test_no_reply_is_under_a_foreign_adapter_whatever_is_killed(campaign: tuple[Path, dict[str, Any]]) -> None:
    _, outcome = campaign
    facts = outcome["facts"]
    assert outcome["findings"] == []
    assert sum(outcome["kills"].values()) >= KILLS
    assert {where.split()[0] for where in outcome["kills"]} == {"server", "trainer", "engine"}
    assert sum(n for where, n in outcome["kills"].items() if not where.endswith(" moment")) > KILLS / 3
    assert facts["policies"] == 4
    assert facts["replayed_versions"] > 5
    assert facts["replayed_replies"] >= facts["acknowledged"] > KILLS


def test_a_foreign_adapter_would_have_been_found(
    campaign: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    from kill.replay import replay

    from openclaw_rl.testing import ToyPolicy

    shutil.copytree(campaign[0] / "data", tmp_path / "data")
    ledger = tmp_path / "data" / "ledger.sqlite3"
    with closing(sqlite3.connect(ledger, isolation_level=None)) as db:
        (first,) = db.execute("SELECT min(id) FROM turn WHERE response_tokens > 0").fetchone()
        tokens, policy = db.execute("SELECT response_tokens, policy FROM turn WHERE id = ?", (first,)).fetchone()
        (other,) = db.execute(
            "SELECT max(weight_version) FROM version WHERE policy NOT IN (?, 'policy') AND sha256 IS NOT NULL",
            (policy,),
        ).fetchone()
        runs = other.to_bytes(4, "little") + tokens.to_bytes(4, "little")
        db.execute("UPDATE reply SET versions = ? WHERE id = ?", (runs, first))
    findings = replay(ledger, ToyPolicy()).findings
    assert any(f"was sampled by version {other}, which is another's" in finding for finding in findings)
    assert any(f"was not sampled by version {other}" in finding for finding in findings)
