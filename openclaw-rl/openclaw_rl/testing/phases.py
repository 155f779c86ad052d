"""Measure the phases between the last feedback of a batch and the version that serves, from a server's records.

The ledger's events have the time at which each turn was paired, judged, sampled, leased and trained. The version's
report has the seconds of the step. The server's log (`--set log_format=json`) has those of the publication.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Moments:
    """Times of one batch, in Unix seconds."""

    paired: float
    leased: float
    committed: float
    published: float


def moments(turns: Iterable[Mapping[str, Any]], server_log: Path, weight_version: int) -> Moments:
    """Return the times of the batch that made `weight_version`; `turns` are records of `GET /v1/turns/{id}`."""
    batch = [_times(turn) for turn in turns if turn["trained_in"] == weight_version]
    published = datetime.fromisoformat(published_event(server_log, weight_version)["timestamp"]).timestamp()
    last = max(batch, key=lambda times: times["paired"])
    return Moments(last["paired"], last["leased"], last["trained"], published)


def phases(
    turns: Iterable[Mapping[str, Any]], server_log: Path, weight_version: int, metrics: Mapping[str, float]
) -> dict[str, float]:
    """Return the seconds of each phase after the last feedback of the batch; they add up to `total`."""
    turns = list(turns)
    at = moments(turns, server_log, weight_version)
    batch = [_times(turn) for turn in turns if turn["trained_in"] == weight_version]
    sampled = max(times["sampled"] for times in batch)
    event = published_event(server_log, weight_version)
    publication = {name.removesuffix("_s"): event[name] for name in ("load_s", "gate_s", "self_test_s", "switch_s")}
    seconds = {
        "judge and score": sampled - at.paired,
        "lease wait": at.leased - sampled,
        "step": metrics["learner_s"],
        "checkpoint and commit": at.committed - at.leased - metrics["learner_s"],
        **{name.replace("_", "-"): value for name, value in publication.items()},
        "publisher's own": at.published - at.committed - sum(publication.values()),
        "total": at.published - at.paired,
    }
    return {name: round(value, 2) for name, value in seconds.items()}


def published_event(server_log: Path, weight_version: int) -> Mapping[str, Any]:
    """Return the log's event of this version's publication. Raises LookupError."""
    for line in server_log.read_text().splitlines():
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("event") == "published" and event.get("weight_version") == weight_version:
            return dict(event)
    raise LookupError(f"{server_log.name} has no event that version {weight_version} was published")


def _times(turn: Mapping[str, Any]) -> dict[str, float]:
    """Return the time at which the turn last entered each state."""
    return {event["state"]: event["at"] for event in turn["events"]}
