"""The lines on the screen while it runs, and the summary at the end."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos.memory import Memory
from chaos.people import Timing
from chaos.sides import EmbeddedSide, Outages, StubSide


def line(started: float, sides: Sequence[StubSide | EmbeddedSide]) -> str:
    parts = [f"{time.monotonic() - started:6.0f} s"]
    for side in sides:
        people, name = side.people, "stub" if isinstance(side, StubSide) else "embedded"
        killed = " ".join(f"{role} {number}" for role, number in sorted(side.kills.items())) or "none"
        parts.append(
            f"{name}: {people.counts['sessions']} sessions, {len(people.seen)} replies, {people.running} running,"
            f" {len(people.cut)} not answered, killed: {killed}, findings {len(side.findings) + len(people.faults)}"
        )
    return " | ".join(parts)


def added_latency(times: Path, timings: Sequence[Timing], outages: Outages) -> dict[str, Any]:
    """What the server adds, reply by reply: to the time to the first token, and between the engine's last token and
    the finish that the client sees. Of replies that no fault touched; in `undisturbed` also no kill of engine or
    server, whose outage a held request waits for."""
    engine: dict[str, tuple[float, float, float]] = {}
    for row in times.read_text().splitlines() if times.exists() else ():
        rid, *values = row.split()
        if len(values) == 3:  # the last line of a killed engine may be torn
            engine[rid] = (float(values[0]), float(values[1]), float(values[2]))
    added: dict[str, list[tuple[float, float]]] = {"all": [], "undisturbed": []}
    for timing in timings:
        if (found := engine.get(timing.turn_id)) is not None:
            asked, began, ended = found
            both = 1000 * ((timing.first - timing.sent) - (began - asked)), 1000 * (timing.finished - ended)
            added["all"].append(both)
            if not outages.cover(timing.sent, timing.finished):
                added["undisturbed"].append(both)
    return {
        which: {
            "replies": len(values),
            "first_token_ms": _quantiles([first for first, _ in values]),
            "finish_ms": _quantiles([last for _, last in values]),
        }
        for which, values in added.items()
    }


def faults(folder: Path) -> dict[str, dict[str, int]]:
    """By stub, what it did."""
    found: dict[str, Counter[str]] = {}
    for file in folder.glob("*.json"):
        name = file.name.partition("-")[0]
        try:
            found.setdefault(name, Counter()).update(json.loads(file.read_text()))
        except ValueError:  # its writer was killed in the middle
            continue
    return {name: dict(counts) for name, counts in sorted(found.items())}


def log_lines(log: Path) -> dict[str, int]:
    """Events of a server's log by name, most first: nothing that happens to every request may be a line each."""
    events: Counter[str] = Counter()
    for row in log.read_text(errors="replace").splitlines() if log.exists() else ():
        try:
            events[str(json.loads(row).get("event", "other"))] += 1
        except (ValueError, AttributeError):
            events["other"] += 1
    return dict(events.most_common(20))


def summary(stub: StubSide, embedded: EmbeddedSide | None, memory: Memory, facts: dict[str, Any]) -> dict[str, Any]:
    sides = [side for side in (stub, embedded) if side is not None]
    findings = [*(finding for side in sides for finding in side.findings), *memory.findings()]
    return {
        "turns_lost": sum("LOST" in finding for finding in findings),
        "trained_twice": sum("of its own ancestors" in f or "and its ancestor" in f for f in findings),
        "wrong_pairs": sum(len(side.facts.get("wrong_pairs", ())) for side in sides),
        "not_answered_without_cause": sum(len(side.facts.get("cut_without_cause", ())) for side in sides),
        "findings": [finding[:1500] for finding in findings],
        "memory_per_minute": {name: asdict(grown) for name, grown in memory.growth().items()},
        "added_latency": added_latency(stub.place.times, stub.people.timings, stub.disturbances),
        "faults": faults(stub.place.faults),
        "log_lines": log_lines(stub.place.folder / "server.log"),
        "stub": stub.facts,
        "embedded": None if embedded is None else embedded.facts,
        **facts,
    }


def _quantiles(values: list[float]) -> dict[str, float]:
    ranked = sorted(values)
    names = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    at = {name: ranked[round(q * (len(ranked) - 1))] if ranked else 0.0 for name, q in names}
    return {name: round(value, 2) for name, value in at.items()}
