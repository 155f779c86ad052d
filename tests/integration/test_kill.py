"""200 SIGKILLs of server and trainer at drawn transitions of the ledger and of the trainer's checkpoints, an audit
after each; then aimed ones at the stages that none of them met, and the proof that the audit finds what it looks for.

The seed is kept. `KILL_SEED=… pytest tests/integration/test_kill.py` draws other fates, `TEST_SEEDS=new` each time; a
failure names its seed.
"""

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

KILLS = 200
STAGES = [
    *(("server", point) for point in ("taken", "mid_group", "before_commit", "committed", "answered")),
    *(("server", point) for point in ("migrate", "_claim", "abandon_interrupted", "expire")),
    *(("trainer", point) for point in ("asked", "in_flight", "got_answer", "remember", "stepped", "writing", "fsync")),
    *(("trainer", point) for point in ("renamed", "written", "forget", "prune", "discard")),
]

pytestmark = pytest.mark.timeout(1500)


@dataclass(frozen=True, slots=True)
class Ended:
    seed: int
    outcome: dict[str, Any]
    folder: Path


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    drawn = random.SystemRandom().randrange(1 << 32) if os.environ.get("TEST_SEEDS") == "new" else 7
    seed = int(os.environ.get("KILL_SEED") or drawn)
    folder = tmp_path_factory.mktemp("kill") / "campaign"
    argv = [sys.executable, "-m", "kill", str(folder), "--kills", str(KILLS), "--seed", str(seed)]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=1400, check=False)
    assert done.stdout.startswith("{"), f"seed {seed}: {done.stderr[-4000:]}"
    return Ended(seed, json.loads(done.stdout), folder)


def test_nothing_is_lost_and_nothing_trains_twice_whatever_is_killed(campaign: Ended) -> None:
    outcome, facts = campaign.outcome, campaign.outcome["facts"]
    assert outcome["findings"] == [], f"seed {campaign.seed}"
    assert sum(outcome["kills"].values()) >= KILLS
    assert outcome["audits"] >= KILLS
    # It was about something: replies were seen and trained on, versions made and computed again.
    assert facts["acknowledged"] > KILLS
    assert facts["turns"]["trained"] > 0
    assert facts["replayed_versions"] > 5
    assert facts["replayed_replies"] >= facts["acknowledged"]


def test_the_kills_met_every_stage_of_a_commit_and_of_a_checkpoint(campaign: Ended) -> None:
    """Not only moments between them. The campaign runs on until it has met each (`Campaign._run_on`)."""
    kills: dict[str, int] = campaign.outcome["kills"]
    assert sum(n for where, n in kills.items() if not where.endswith(" moment")) > KILLS / 3, campaign.seed
    met = {tuple(where.split()[:2]) for where in kills}
    for stage in STAGES:
        assert stage in met, f"seed {campaign.seed}: {sorted(met)}"
    assert campaign.outcome["both"] > 0


def lose_a_reply(db: sqlite3.Connection, row: int, data_dir: Path) -> None:
    """As if it had been acknowledged before it was written: nothing of it is there."""
    for table in ("lease_sample", "event"):
        db.execute(f"DELETE FROM {table} WHERE turn = ?", (row,))
    for table in ("sample", "verdict", "next_state", "reply", "turn", "request"):
        db.execute(f"DELETE FROM {table} WHERE id = ?", (row,))


def change_a_reply(db: sqlite3.Connection, row: int, data_dir: Path) -> None:
    content = b"\0" + json.dumps({"role": "assistant", "content": "something else"}).encode()
    message = db.execute("SELECT message FROM reply WHERE id = ?", (row,)).fetchone()[0]
    db.execute("UPDATE piece SET data = ? WHERE id = ?", (content, message))


def train_twice(db: sqlite3.Connection, row: int, data_dir: Path) -> None:
    """A version was trained on a sample of its parent, too."""
    fence, parent = db.execute(
        "SELECT fence, version.parent FROM version JOIN lease USING (lease_id) WHERE version.parent > 0"
        " ORDER BY weight_version DESC LIMIT 1"
    ).fetchone()
    (turn,) = db.execute(
        "SELECT min(turn) FROM lease_sample JOIN lease USING (fence) JOIN version USING (lease_id)"
        " WHERE weight_version = ? AND outcome = 'trained'",
        (parent,),
    ).fetchone()
    db.execute("INSERT INTO lease_sample VALUES (?, ?, 'trained')", (fence, turn))


def change_the_serving_weights(db: sqlite3.Connection, row: int, data_dir: Path) -> None:
    folder, name = db.execute("SELECT folder, weights_file FROM version WHERE state = 'serving'").fetchone()
    content = bytearray((data_dir / folder / name).read_bytes())
    content[-1] ^= 1
    (data_dir / folder / name).write_bytes(content)


def praise_instead_of_blame(db: sqlite3.Connection, row: int, data_dir: Path) -> None:
    """What the ledger says of a sample is not what its version was trained on."""
    db.execute("UPDATE sample SET reward = -reward WHERE id = ?", (row,))


def take_another_version_for_it(db: sqlite3.Connection, row: int, data_dir: Path) -> None:
    """A reply that the version which is said to have sampled it did not sample."""
    (first,) = db.execute("SELECT min(id) FROM turn WHERE oldest_version = 0").fetchone()
    (tokens,) = db.execute("SELECT response_tokens FROM turn WHERE id = ?", (first,)).fetchone()
    db.execute(
        "UPDATE reply SET versions = ? WHERE id = ?",
        ((1).to_bytes(4, "little") + tokens.to_bytes(4, "little"), first),
    )


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (lose_a_reply, "is not in the ledger"),
        (change_a_reply, "the ledger has 'something else'"),
        (train_twice, "samples of its own ancestors"),
        (change_the_serving_weights, "is serving: its row says"),
        (praise_instead_of_blame, "do not give its weights"),
        (take_another_version_for_it, "was not sampled by version 1"),
    ],
)
def test_a_broken_promise_would_have_been_found(
    campaign: Ended,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tamper: Callable[[sqlite3.Connection, int, Path], None],
    said: str,
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    from kill.chats import Seen
    from kill.replay import replay

    from openclaw_rl.testing import ToyPolicy
    from openclaw_rl.testing.ledger_audit import audit

    shutil.copytree(campaign.folder / "data", tmp_path / "data")
    ledger = tmp_path / "data" / "ledger.sqlite3"
    seen = [Seen(**reply) for reply in json.loads((campaign.folder / "seen.json").read_text())]
    assert audit(ledger, seen) == []
    with closing(sqlite3.connect(ledger, isolation_level=None)) as db:
        trained = dict(db.execute("SELECT turn_id, id FROM turn WHERE state = 'trained'").fetchall())
        tamper(db, next(trained[reply.turn_id] for reply in seen if reply.turn_id in trained), tmp_path / "data")
    findings = [*audit(ledger, seen), *replay(ledger, ToyPolicy()).findings]
    assert any(said in finding for finding in findings), findings


def test_a_reply_that_began_without_its_request_would_have_been_found(
    campaign: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    from kill.pairing import unrecorded

    ledger = campaign.folder / "data" / "ledger.sqlite3"
    replies = json.loads((campaign.folder / "seen.json").read_text())
    heard = Counter((reply["session_id"], reply["asked"]) for reply in replies)
    assert unrecorded(ledger, heard) == []
    assert len(unrecorded(ledger, heard | {(None, "asked of nobody"): 1})) == 1
