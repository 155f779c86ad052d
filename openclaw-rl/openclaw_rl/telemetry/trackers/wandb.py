"""A wandb run below `tracking/wandb`: offline, unless `tracking.wandb_mode` says `online`.

An offline run is files alone; `wandb sync` sends them when the owner calls it. The axis of all curves is the version,
which wandb's own step could not be: it drops a mark on an earlier version.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields

from openclaw_rl.telemetry.trackers.base import TrackedRun, TrackedSample, Tracker


class Wandb(Tracker):
    needs, extra = "wandb", "wandb"

    def start(self, run: TrackedRun) -> None:
        import wandb

        run.folder.mkdir(exist_ok=True)
        self._wandb, mode = wandb, run.settings.wandb_mode
        self._run = wandb.init(
            project=run.settings.project,
            id=run.id,
            name=run.id,
            mode=mode,
            dir=str(run.folder),
            resume="allow" if mode == "online" else None,  # an offline run is a new folder each time, with the same id
            config=dict(run.config),
            # Neither the host's name, its hardware, our source nor our log belongs to the figures.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                save_code=False,
                host="",
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
            ),
        )
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def step(self, version: int, at: float, figures: Mapping[str, float]) -> None:
        self._run.log({"version": version, "committed_at": at, **figures})

    def samples(self, version: int, at: float, rows: Sequence[TrackedSample]) -> None:
        names = [field.name for field in fields(TrackedSample)]
        table = self._wandb.Table(columns=names, data=[list(astuple(row)) for row in rows])
        self._run.log({"version": version, "samples": table})

    def close(self) -> None:
        self._run.finish()
