"""The seam to experiment trackers: `start`, `step`, `samples`, `close`.

A tracker is a class behind an entry point of the group `openclaw_rl.trackers`. One thread (`thread`) calls all its
methods, so it needs no lock, and it may block. It may raise any exception: the thread then closes it, makes a new one
after a pause, and gives the same step to that one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from openclaw_rl.errors import SettingsError
from openclaw_rl.settings.tracking import TrackingSettings, tracker_kinds


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """One run, which lasts as long as its data directory: a restart of the server goes on with it."""

    id: str
    folder: Path
    """`tracking/` in the data directory; a tracker makes what it needs below it."""
    settings: TrackingSettings
    config: Mapping[str, str | int | float | bool]
    """Facts of the run, without secrets, addresses and paths."""


@dataclass(frozen=True, slots=True)
class TrackedSample:
    """One sample of a step: its turn's id and numbers. Texts stay in the ledger, where `forget` reaches them."""

    turn_id: str
    verdict: int | None
    prompt_tokens: int
    response_tokens: int
    sampled_by: int
    """Oldest version that sampled it."""
    is_practice: bool


class Tracker:
    """Base class of trackers."""

    needs: str | None = None
    """Module that must be installed; None: the standard library is enough."""
    extra: str | None = None
    """Extra of our package that installs it."""

    def start(self, run: TrackedRun) -> None:
        """Open the run, or go on with it. Called before all other methods."""

    def step(self, version: int, at: float, figures: Mapping[str, float]) -> None:
        """Take the figures of one version, by their public names. `at`: seconds since 1970, of the commit.

        Versions rise. One may come again: all of it after a crash, or marks alone (`version/rolled_back`).
        """
        raise NotImplementedError

    def samples(self, version: int, at: float, rows: Sequence[TrackedSample]) -> None:
        """Take samples of a step, after its figures. A tracker without a place for rows leaves them out."""

    def close(self) -> None:
        """Write what waits, and let go of files and processes."""


def load_tracker(name: str) -> type[Tracker]:
    """Return the class registered under `name`. Raises SettingsError."""
    point = tracker_kinds().get(name)
    if point is None:
        raise SettingsError(f"tracking.trackers: no tracker {name!r}")
    try:
        found = point.load()
    except Exception as error:  # a module of others may raise anything while it is imported
        raise SettingsError(f"tracking.trackers {name!r}: {point.value} cannot be loaded: {error!r}") from error
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise SettingsError(f"tracking.trackers {name!r}: {point.value} is no Tracker")
    return found


def problems(settings: TrackingSettings) -> Iterator[str]:
    """Yield one line for each named tracker that cannot work here."""
    for name in settings.trackers:
        try:
            found = load_tracker(name)
        except SettingsError as error:
            yield str(error)
            continue
        if found.needs is not None and find_spec(found.needs) is None:
            how = f": pip install 'openclaw-rl[{found.extra}]'" if found.extra else ""
            yield f"tracking.trackers {name!r}: the package {found.needs} is not installed{how}"
