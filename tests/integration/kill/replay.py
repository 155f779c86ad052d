"""What every version and every reply must be, computed again from the ledger's rows alone.

The weights of each version follow from those of its parent and from its samples, so their hash proves that just these
samples were trained, each once, and that the optimizer went on where it had stopped. The log-probs of each reply follow
from its tokens and from the hash of the version that sampled them, so they prove which weights served it.
"""

import hashlib
import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from kill.toy import KEEP_OPTIMIZERS, ToyLearner, seed_of
from openclaw_rl.ledger import records
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.testing.ledger_audit import open_read_only
from openclaw_rl.testing.toy_policy import BASE_SEED


@dataclass(slots=True)
class Replayed:
    findings: list[str]
    versions: int
    fresh: int
    """Versions that went on with fresh moments: after a rollback to one so old that its moments had been pruned."""
    replies: int


def replay(ledger: Path, policy: ToyPolicy) -> Replayed:
    with closing(open_read_only(ledger)) as db:
        done = Replayed([], 0, 0, 0)
        done.findings += _weights(db, policy, done)
        done.findings += _log_probs(db, policy, done)
        done.findings += _foreign(db)
        return done


def _weights(db: sqlite3.Connection, policy: ToyPolicy, done: Replayed) -> Iterator[str]:
    learner = ToyLearner(policy)
    held: dict[int, tuple[bytes | None, dict[str, torch.Tensor] | None]] = {0: (None, None)}
    versions = db.execute(
        "SELECT weight_version, version.parent, sha256, fence FROM version JOIN lease USING (lease_id)"
        " ORDER BY weight_version"
    )
    roots = "SELECT weight_version, same_weights_as FROM version WHERE parent IS NULL AND same_weights_as IS NOT NULL"
    for root, start in db.execute(roots).fetchall():  # a policy's first version, at the base
        held[root] = (held[start][0], None)
    for number, parent, sha256, fence in versions.fetchall():
        done.versions += 1
        turns = db.execute(
            "SELECT turn FROM lease_sample WHERE fence = ? AND outcome = 'trained' ORDER BY turn", (fence,)
        )
        samples = [sample for (turn,) in turns.fetchall() if (sample := records.read_sample(db, turn)) is not None]
        weights, moments = held[parent]
        for tried in (moments, None):
            learner.hold(weights, tried)
            learner.step(samples, lambda: None)
            if hashlib.sha256(learner.weights()).hexdigest() == sha256:
                break
        else:
            yield f"version {number}: {len(samples)} samples on version {parent} do not give its weights"
            return
        held[number] = (learner.weights(), learner.moments())
        if tried is None and moments is not None:
            done.fresh += 1
            if number - parent < KEEP_OPTIMIZERS:
                yield f"version {number} forgot the moments of version {parent}, which were there"


def _foreign(db: sqlite3.Connection) -> Iterator[str]:
    """Each reply is of the policy of its user, and so is each version that sampled a token of it."""
    policies = dict(db.execute("SELECT weight_version, policy FROM version").fetchall())
    is_shared = set(policies.values()) == {"policy"}
    rows = db.execute("SELECT id, turn.policy, user FROM turn JOIN request USING (id) ORDER BY id")
    for row, policy, user in rows.fetchall():
        turn = records.read_turn(db, row)
        if policy != ("policy" if is_shared else f"user:{user}"):
            yield f"{turn.turn_id} of {user} is of {policy}"
        for run in turn.versions:
            if policies[run.weight_version] != policy:
                yield f"{turn.turn_id} of {policy} was sampled by version {run.weight_version}, which is another's"


def _log_probs(db: sqlite3.Connection, policy: ToyPolicy, done: Replayed) -> Iterator[str]:
    hashes = db.execute("SELECT weight_version, sha256 FROM version").fetchall()
    seeds = {number: BASE_SEED if sha256 is None else seed_of(sha256) for number, sha256 in hashes}
    # What an engine garbled is recorded as it came, and never trained on.
    rows_of = db.execute("SELECT id FROM turn WHERE reason IS NOT 'misaligned' ORDER BY id")
    for (row,) in rows_of.fetchall():
        request, turn = records.read_request(db, row), records.read_turn(db, row)
        if any(map(math.isnan, turn.rollout_log_probs)):  # garbled, and given up for another reason
            (state,) = db.execute("SELECT state FROM turn WHERE id = ?", (row,)).fetchone()
            if state != "dropped":
                yield f"{turn.turn_id}: {state}, and has tokens without log-probs"
            continue
        done.replies += 1
        ids, position = (*request.prompt_ids, *turn.response_ids), len(request.prompt_ids)
        start = position
        for run in turn.versions:
            for _ in range(run.length):
                expected = policy.log_prob(ids, position, seeds[run.weight_version])
                if not abs(turn.rollout_log_probs[position - start] - expected) < 1e-5:
                    yield f"{turn.turn_id}: token {position - start} was not sampled by version {run.weight_version}"
                    break
                position += 1
