"""A local trackio database in `tracking/trackio`. No data leaves the machine.

The figures go into trackio's SQLite store, and not through `trackio.init`. That call sends them to a Hugging Face Space
if `TRACKIO_SPACE_ID` is in the environment, and asks the hub for the user's name if a token lies on the machine.
Dashboard: `TRACKIO_DIR=<data directory>/tracking/trackio trackio show`.
"""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from openclaw_rl.telemetry.trackers.base import TrackedRun, Tracker


class Trackio(Tracker):
    needs, extra = "trackio", "trackio"

    def start(self, run: TrackedRun) -> None:
        store = _store(str(run.folder / "trackio"))
        self._run, self._write, self._config = run, store.bulk_log, dict(run.config)
        store.init_db(run.settings.project)

    def step(self, version: int, at: float, figures: Mapping[str, float]) -> None:
        when = datetime.fromtimestamp(at, UTC).isoformat()
        self._write(
            project=self._run.settings.project,
            run=self._run.id,
            run_id=self._run.id,
            metrics_list=[dict(figures)],
            steps=[version],
            timestamps=[when],
            config=self._config | {"_Created": when},
        )


def _store(folder: str) -> Any:
    """Return trackio's store in this folder."""
    os.environ["TRACKIO_DIR"] = folder  # trackio reads it while it is imported, and nowhere else
    from trackio import sqlite_storage, utils

    if str(utils.TRACKIO_DIR) != folder:
        raise RuntimeError(f"trackio was imported before, and writes to {utils.TRACKIO_DIR}")
    return sqlite_storage.SQLiteStorage
