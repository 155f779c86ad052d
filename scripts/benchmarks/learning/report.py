"""Tables and curves of the learning benchmark, from lines of results of one or several calls."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.learning.experiment import ENDS, Record

_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = ("score", "kl", "fluency", "relevance", "on_topic", "words", "lists", "echoes", "repeats")
SHOWN = 3
_Key = tuple[str, str, str]
"""(preference, method or end, variant)."""


def load(files: Iterable[Path]) -> list[Record]:
    return [Record(**json.loads(line)) for file in files for line in file.read_text().splitlines() if line.strip()]


def write_report(records: Sequence[Record], out: Path, about: Mapping[str, object]) -> str:
    """Write `out`.md; return its text."""
    text = report(records, about)
    out.with_suffix(".md").write_text(text)
    return text


def report(records: Sequence[Record], about: Mapping[str, object]) -> str:
    lines = ["# Two preferences, three methods", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    for preference in sorted({record.preference for record in records}):
        own = [record for record in records if record.preference == preference]
        ends = {end: _mean([r.quality for r in own if r.method == end]) for end in ENDS}
        lines += ["", f"## {preference}", "", *_table(own, ends), "", *_curves(own), *_said(own)]
    return "\n".join(lines) + "\n"


def _table(records: Sequence[Record], ends: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the table. Each cell is a mean over seeds, ± half the range; a share is of the way base → hinted."""
    titles = ("method", "variant", "update", "seeds", "score", "share", "KL", *_COLUMNS[2:])
    rows = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    groups: dict[tuple[str, str, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record.method, record.variant, record.update), []).append(record)
    order = (*ENDS, "binary_rl", "opd", "combine")
    for key in sorted(groups, key=lambda k: (order.index(k[0]), k[1] != "default", k[1], k[2])):
        method, variant, update = key
        some = groups[key]
        cells = [method, variant, str(update), str(len(some)), _cell(some, "score"), _share(some, ends)]
        cells += [_cell(some, column) for column in _COLUMNS[1:]]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _cell(records: Sequence[Record], column: str) -> str:
    values = [record.quality[column] for record in records if column in record.quality]
    if not values:
        return "–"  # an older run without this measure
    digits = 0 if column == "words" else 2
    spread = f" ± {(max(values) - min(values)) / 2:.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def _share(records: Sequence[Record], ends: Mapping[str, Mapping[str, float]]) -> str:
    if not ends["base"] or not ends["hinted"]:
        return "–"
    distance = ends["hinted"]["score"] - ends["base"]["score"]
    gained = statistics.fmean(record.quality["score"] for record in records) - ends["base"]["score"]
    return f"{gained / distance:.0%}" if distance else "–"


def _mean(qualities: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: statistics.fmean(q[key] for q in qualities) for key in qualities[0]} if qualities else {}


def _series(records: Sequence[Record], column: str) -> dict[_Key, list[tuple[int, float]]]:
    """Return the mean over seeds after each update, by method and variant, the base first."""
    base = [record.quality[column] for record in records if record.method == "base"]
    series: dict[_Key, list[tuple[int, float]]] = {}
    keys = {(r.preference, r.method, r.variant) for r in records if r.method not in ENDS}
    for key in sorted(keys):
        own = [r for r in records if (r.preference, r.method, r.variant) == key]
        marks = sorted({r.update for r in own})
        points = [(mark, statistics.fmean(r.quality[column] for r in own if r.update == mark)) for mark in marks]
        series[key] = ([(0, statistics.fmean(base))] if base else []) + points
    return series


def _curves(records: Sequence[Record]) -> list[str]:
    """Return curves of score and relevance, each on the scale from 0 (or the least) to the largest."""
    lines = ["```"]
    for column in ("score", "relevance"):
        series = _series(records, column)
        values = [value for points in series.values() for _, value in points]
        if not values:
            continue
        low, high = (0.0, 1.0) if column == "score" else (min(0.0, *values), max(values))
        for (_, method, variant), points in series.items():
            marks = "".join(_BARS[round((v - low) / ((high - low) or 1) * (len(_BARS) - 1))] for _, v in points)
            numbers = " ".join(f"{update}:{value:.2f}" for update, value in points)
            lines.append(f"{column:9} {method:10} {variant:24} {marks:6} {numbers}")
    return [*lines, "```"]


def _said(records: Sequence[Record]) -> list[str]:
    """Return the first kept replies of each run after its last update."""
    last = {(r.method, r.variant, r.seed): r for r in sorted(records, key=lambda r: r.update) if r.replies}
    lines = ["", "Replies to the first held-out questions:", ""] if last else []
    for (method, variant, seed), record in last.items():
        lines.append(f"- {method} {variant}, seed {seed}")
        lines += [f"  - *{question}* {text}" for question, text in list(record.replies.items())[:SHOWN]]
    return lines
