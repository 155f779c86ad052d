"""Staleness of a waiting sample: the depth of the tip less the depth of the version that sampled its oldest token.

Depth counts the commits since the base. A lost version keeps its depth, and samples of it stay as valid as they were.
Its samples may be deeper than the tip: their staleness is then below 0.
"""

import sqlite3

from openclaw_rl.ledger import versions
from openclaw_rl.ledger.records import read_versions_of
from openclaw_rl.types import DropReason


def why_unfit(db: sqlite3.Connection, row: int, *, tip: int, max_staleness: int) -> DropReason | None:
    """Return the reason to drop a waiting sample, or None. No version sampled a demonstration: it is always fit."""
    if db.execute("SELECT is_demonstration FROM sample WHERE id = ?", (row,)).fetchone()[0]:
        return None
    sampled_by = {run.weight_version for run in read_versions_of(db, row)}
    depths = [depth for version in sampled_by if (depth := versions.sound_depth(db, version)) is not None]
    if len(depths) < len(sampled_by):
        return DropReason.ROLLED_BACK
    return DropReason.STALE if (versions.sound_depth(db, tip) or 0) - min(depths) > max_staleness else None
