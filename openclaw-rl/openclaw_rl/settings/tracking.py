"""Settings of trackers: the figures of each step, written to files and to the user's own tools."""

from importlib.metadata import EntryPoint
from typing import Literal

from pydantic import Field, field_validator

from openclaw_rl.settings.base import Branch, registered

TRACKERS = "openclaw_rl.trackers"
"""Entry-point group of the trackers."""
_FOLDER = "openclaw_rl.telemetry.trackers"
_SHIPPED = {
    "jsonl": f"{_FOLDER}.json_lines:JsonLines",
    "tensorboardx": f"{_FOLDER}.tensorboard:TensorBoard",
    "trackio": f"{_FOLDER}.trackio:Trackio",
    "wandb": f"{_FOLDER}.wandb:Wandb",
}
ALWAYS = "jsonl"
"""The tracker that runs without being named: it needs no package."""


def tracker_kinds() -> dict[str, EntryPoint]:
    """Return the entry point of each tracker by name."""
    return registered(TRACKERS, _SHIPPED)


class TrackingSettings(Branch):
    """Figures of each step in files of the data directory, and in the trackers that are named here."""

    trackers: tuple[str, ...] = ()
    """`tensorboardx`, `trackio`, `wandb`, or those of installed packages. JSON lines are always kept."""
    project: str = Field(default="openclaw-rl", pattern=r"^[A-Za-z0-9][\w.-]{0,63}$")
    """Name under which trackio and wandb list the run."""
    samples: int = Field(default=0, ge=0, le=1000)
    """Samples of each step that are written too: ids and numbers, no text of a chat. 0: none."""
    jsonl_mb: float = Field(default=16.0, gt=0)
    """Size of `tracking/metrics.jsonl` at which it becomes `metrics.1.jsonl`, and the one before that is deleted."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """`online` sends every figure to the host of your wandb account. `offline` writes files alone."""

    @field_validator("trackers")
    @classmethod
    def _are_registered(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        known = tracker_kinds() if names else {}
        for name in names:
            if name not in known:
                raise ValueError(f"no tracker {name!r}; installed: {', '.join(sorted(known))}")
        if len(set(names)) < len(names):
            raise ValueError("a tracker is named twice")
        return names

    @property
    def all_names(self) -> tuple[str, ...]:
        """The trackers that run: the JSON lines, and those that are named."""
        return (ALWAYS, *(name for name in self.trackers if name != ALWAYS))
