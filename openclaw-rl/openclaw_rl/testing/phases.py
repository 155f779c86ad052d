"""From the last feedback of a batch to the version that serves: where the seconds went, read from what a server keeps.

The ledger's events say when each turn was paired, judged, sampled, leased and trained; the version's report what the
step took; the server's log (`--set log_format=json`) what the publication took.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Moments:
    """Unix seconds."""

    paired: float
    leased: float
    committed: float
    published: float


def moments(turns: Iterable[Mapping[str, Any]], server_log: Path, weight_version: int) -> Moments:
    """Of the batch that made `weight_version`; `turns` as `GET /v1/turns/{id}` gives them."""
    batch = [_times(turn) for turn in turns if turn["trained_in"] == weight_version]
    published = datetime.fromisoformat(published_event(server_log, weight_version)["timestamp"]).timestamp()
    last = max(batch, key=lambda times: times["paired"])
    return Moments(last["paired"], last["leased"], last["trained"], published)


def phases(
    turns: Iterable[Mapping[str, Any]], server_log: Path, weight_version: int, metrics: Mapping[str, float]
) -> dict[str, float]:
    """Seconds of each phase after the last feedback of the batch; they add up to `total`."""
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
    for line in server_log.read_text().splitlines():
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("event") == "published" and event.get("weight_version") == weight_version:
            return dict(event)
    raise LookupError(f"{server_log.name} does not say that version {weight_version} was published")


def _times(turn: Mapping[str, Any]) -> dict[str, float]:
    """State → when the turn last came to it."""
    return {event["state"]: event["at"] for event in turn["events"]}
