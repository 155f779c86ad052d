"""Tables of the practice experiment, from lines of results of one or several calls."""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.learning.arms import ARMS, FAMILIES
from benchmarks.learning.experiment import ENDS
from benchmarks.learning.scope_measures import MEMORIES, Line, turns_until_learned

AT_BASE = (*ENDS, *MEMORIES)
COLUMNS = ("score", "relevance", "kl", "fluency", "on_topic", "words", "repeats")
THRESHOLDS = {"share": (0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0), "passed": (0.75, 0.875, 1.0)}
"""Values at which practice may stop: the learned share, or the judge's share of replies that meet the wish."""
_FAMILIES_QUOTED = ("main", "anchored", "drift")
QUOTED = ("base", "hinted", MEMORIES[0], *(arm.name for family in _FAMILIES_QUOTED for arm in FAMILIES[family]))
"""Arms whose replies are shown."""
_Rows = Sequence[Sequence[str]]


def load(files: Iterable[Path]) -> list[Line]:
    return [Line(**json.loads(text)) for file in files for text in file.read_text().splitlines() if text.strip()]


def write_report(lines: Sequence[Line], out: Path, about: Mapping[str, object]) -> str:
    """Write `out`.md; return its text. Without `about` the head of an older `out`.md stays."""
    file = out.with_suffix(".md")
    text = report(lines, about or _head(file))
    file.write_text(text)
    return text


def _head(file: Path) -> dict[str, str]:
    rows = file.read_text().split("\n\n")[1].splitlines() if file.exists() else []
    return dict(row.removeprefix("- ").split(": ", 1) for row in rows if row.startswith("- "))


def report(lines: Sequence[Line], about: Mapping[str, object]) -> str:
    found = ["# Learning from a few corrections", "", *(f"- {key}: {value}" for key, value in about.items())]
    found += ["", "Means over seeds, with the range (largest less smallest)."]
    single = [line for line in lines if len(line.wishes) == 1]
    for preference in _names(line.preference for line in single):
        own = [line for line in single if line.preference == preference]
        found += ["", f"## {preference}", "", *_table(_quality_rows(own))]
    found += _titled("Elsewhere", _elsewhere_rows(lines))
    found += _titled("Drift: before and after later conversations with feedback", _drift_rows(lines))
    in_turn = [line for line in lines if len(line.wishes) > 1 and not line.conversations]
    found += _titled("Wishes one after the other", _wishes_rows(in_turn))
    found += _titled(
        "A stop that needs no rule of the wish", _stop_rows([line for line in single if not line.conversations])
    )
    found += _said(lines)
    return "\n".join(found) + "\n"


def _quality_rows(lines: Sequence[Line]) -> _Rows:
    titles = ["arm", "update", "seeds", *COLUMNS, "near scope", "turns until learned", "stopped at"]
    rows = [titles]
    groups: dict[tuple[str, int], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.arm, line.update), []).append(line)
    for (arm, update), some in sorted(groups.items(), key=lambda item: (_order(item[0][0]), item[0][1])):
        cells = [arm, str(update), str(len(some))]
        cells += [_cell([line.quality[column] for line in some], 0 if column == "words" else 2) for column in COLUMNS]
        cells += [_cell([line.near["score"] for line in some if line.near]), _turns(some)]
        stops = [line.stopped_at for line in some if line.stopped_at is not None]
        rows.append([*cells, _cell(stops, 0) if stops else "–"])
    return rows


def _turns(lines: Sequence[Line]) -> str:
    """Return the mean number of turns before three first replies in a row meet the wish."""
    if lines[0].arm in AT_BASE:
        corrections = 0
    elif lines[0].arm in ARMS and ARMS[lines[0].arm].is_live:
        corrections = ARMS[lines[0].arm].corrections * lines[0].update
    else:
        corrections = ARMS[lines[0].arm].corrections if lines[0].arm in ARMS else lines[0].complaints
        corrections += lines[0].conversations
    found = [turns_until_learned(corrections, line.passes) for line in lines]
    known = [value for value in found if value is not None]
    if not known:
        return "never"
    return _cell(known, 1) + (f", {len(found) - len(known)} never" if len(known) < len(found) else "")


def _elsewhere_rows(lines: Sequence[Line]) -> _Rows:
    """Return the rows of other kinds of prompt: words as a share of the base's, and KL to the base."""
    # A hint is in the prompt of the question alone: elsewhere it is not read, and the base is the base.
    measured = [line for line in lines if line.elsewhere and line.arm not in ENDS[1:]]
    if not measured:
        return []
    kinds = list(measured[0].elsewhere)
    base = {(line.preference, line.seed): line for line in measured if line.arm == "base"}
    titles = ["arm", "wish", "seeds", *kinds, "KL elsewhere", "long chat", "tool calls", "exact answers"]
    rows = [[*titles, "word problems", "near scope KL"]]
    groups: dict[tuple[str, str, int], list[Line]] = {}
    for line in measured:
        if (line.preference, line.seed) in base:
            groups.setdefault((line.arm, "+".join(line.wishes), line.conversations), []).append(line)
    for (arm, wishes, later), some in sorted(groups.items(), key=lambda item: (_order(item[0][0]), *item[0][1:])):
        cells = [f"{arm}, {later} conversations later" if later else arm, wishes, str(len(some))]
        bases = [base[line.preference, line.seed] for line in some]
        cells += [_changed(some, bases, partial(_kind, kind)) for kind in kinds]
        every = [statistics.fmean(line.elsewhere[kind]["kl"] for kind in kinds) for line in some]
        cells += [_cell(every), _changed(some, bases, lambda line: line.chat), _called(some)]
        cells += [_cell([line.exact for line in some if line.exact is not None])]
        cells += [_cell([line.problems for line in some if line.problems is not None])]
        rows.append([*cells, _cell([line.near["kl"] for line in some if line.near])])
    return rows


def _kind(kind: str, line: Line) -> Mapping[str, float]:
    return line.elsewhere[kind]


def _changed(some: Sequence[Line], at_base: Sequence[Line], cost: Callable[[Line], Mapping[str, float]]) -> str:
    """Return the base's words, or by how much others differ from them and their KL to the base."""
    found, own = list(map(cost, some)), list(map(cost, at_base))
    if not all([*found, *own]):
        return "–"  # older results have no such measure
    words, own_words = (statistics.fmean(one["words"] for one in side) for side in (found, own))
    if some[0].arm == "base":
        return f"{words:.0f} words"
    return f"{words / own_words - 1:+.0%}, KL {statistics.fmean(one['kl'] for one in found):.2f}"


def _called(lines: Sequence[Line]) -> str:
    """Return the share of replies that are calls, and the change of a well-formed call's log-prob per token."""
    known = [line.tool for line in lines if line.tool]
    if not known:
        return "–"
    calls, forced = (statistics.fmean(one[key] for one in known) for key in ("calls", "forced"))
    return f"{calls:.2f}" if lines[0].arm == "base" else f"{calls:.2f}, forced {forced:+.2f}"


def _quality_of(column: str, line: Line) -> float | None:
    return line.quality.get(column)


_DRIFT: Mapping[str, Callable[[Line], float | None]] = {
    **{column: partial(_quality_of, column) for column in COLUMNS},
    "near scope": lambda line: line.near.get("score"),
    "KL elsewhere": lambda line: statistics.fmean(k["kl"] for k in line.elsewhere.values()) if line.elsewhere else None,
    "long chat KL": lambda line: line.chat.get("kl"),
    "tool calls": lambda line: line.tool.get("calls"),
    "forced call": lambda line: line.tool.get("forced"),
    "exact answers": lambda line: line.exact,
    "word problems": lambda line: line.problems,
}
"""Measures before and after later conversations."""


def _drift_rows(lines: Sequence[Line]) -> _Rows:
    """Return each measure at the last mark and after the later conversations."""
    sides: tuple[dict[tuple[str, str, int], Line], ...] = ({}, {})
    for line in lines:
        sides[line.conversations > 0][line.arm, line.preference, line.seed] = line
    groups: dict[tuple[str, str], list[tuple[Line, Line]]] = {}
    for (arm, preference, seed), after in sides[1].items():
        if (arm, preference, seed) in sides[0]:
            groups.setdefault((arm, preference), []).append((sides[0][arm, preference, seed], after))
    if not groups:
        return []
    rows = [["arm", "wish", "seeds", "conversations", "complaints, first and last round", *_DRIFT]]
    for (arm, preference), pairs in sorted(groups.items(), key=lambda item: (_order(item[0][0]), item[0][1])):
        later = [line for _, line in pairs]
        cells = [arm, preference, str(len(pairs)), str(later[0].conversations), _complaints(later)]
        for measure in _DRIFT.values():
            found = [[measure(pair[side]) for pair in pairs] for side in (0, 1)]
            cells.append(" → ".join(_cell([value for value in values if value is not None]) for values in found))
        rows.append(cells)
    return rows


def _complaints(lines: Sequence[Line]) -> str:
    """Return the share of turns that were complained of, in the first and in the last later round."""
    ends = []
    for line in lines:
        heard = [float(str(step["complained"])) for step in line.steps if step.get("complained") is not None]
        later = heard[len(line.wishes) :]
        ends += [(later[0], later[-1])] if later else []
    return " → ".join(_cell([end[side] for end in ends]) for side in (0, 1))


def _wishes_rows(lines: Sequence[Line]) -> _Rows:
    if not lines:
        return []
    wishes = lines[0].wishes
    rows = [["arm", "after the wish", "seeds", *(f"score of {wish}" for wish in wishes), "relevance", "KL"]]
    groups: dict[tuple[str, int], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.arm, line.update), []).append(line)
    updates = sorted({line.update for line in lines})
    for (arm, update), some in sorted(groups.items(), key=lambda item: (_order(item[0][0]), item[0][1])):
        by_wish = {wish: [line for line in some if line.preference == wish] for wish in wishes}
        cells = [arm, wishes[updates.index(update)], str(len({line.seed for line in some}))]
        cells += [_cell([line.quality["score"] for line in own]) for own in by_wish.values()]
        rows.append([*cells, *(_cell([line.quality[column] for line in some]) for column in ("relevance", "kl"))])
    return rows


def _stop_rows(lines: Sequence[Line]) -> _Rows:
    """Return where each candidate would have stopped, and the score there, beside the last score without a stop."""
    last = {(line.arm, line.preference, line.seed): line for line in lines if line.steps}
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in last.values():
        if not line.complaints or line.stopped_at is not None:
            continue
        groups.setdefault((line.arm, line.preference), []).append(line)
    if not groups:
        return []
    named = [f"{name} ≥ {value:g}" for name, values in THRESHOLDS.items() for value in values]
    rows = [["arm", "wish", "seeds", "share at the end", *named, "no stop"]]
    for (arm, preference), some in sorted(groups.items(), key=lambda item: (item[0][1], _order(item[0][0]))):
        cells = [arm, preference, str(len(some)), _cell([float(_of(line.steps[-1], "shares")) for line in some])]
        for name, values in THRESHOLDS.items():
            cells += [_stopped(some, name, value) for value in values]
        rows.append([*cells, _cell([scores(line)[-1][1] for line in some])])
    return rows


def _stopped(lines: Sequence[Line], name: str, threshold: float) -> str:
    """Return `score (update)` at the first update that reaches the threshold; `–` where a seed never does."""
    updates, there = [], []
    for line in lines:
        reached = [step for step in line.steps[1:] if _of(step, "shares" if name == "share" else name) >= threshold]
        if not reached:
            return "–"
        update = int(str(reached[0]["update"]))
        updates.append(update)
        there.append(next((score for at, score in scores(line) if at >= update), scores(line)[-1][1]))
    return f"{statistics.fmean(there):.2f} (u{statistics.fmean(updates):.0f})"


def scores(line: Line) -> list[tuple[int, float]]:
    """Return (update, score) of the run, glances and its own mark."""
    found = [(int(str(step["update"])), float(str(step["score"]))) for step in line.steps if step["score"] is not None]
    return [*found, (line.update, line.quality["score"])]


def _of(step: Mapping[str, object], name: str) -> float:
    value = step.get(name)
    if isinstance(value, Mapping):
        return min(map(float, value.values())) if value else 0.0
    return float(str(value)) if value is not None else 0.0


def _said(lines: Sequence[Line]) -> list[str]:
    """Return replies of the first seed after the last update."""
    first = min(line.seed for line in lines)
    last = {(line.arm, line.preference): line for line in lines if line.seed == first and line.arm in QUOTED}
    found = ["", "## Replies", ""]
    for (arm, preference), line in sorted(last.items(), key=lambda item: (item[0][1], _order(item[0][0]))):
        found.append(f"- {preference}, {arm}, update {line.update}")
        found += [f"  - *{question}* {text}" for question, text in list(line.replies.items())[:2]]
        found += [f"  - {kind}: {text[:200]}" for kind, text in list(line.texts.items())[:3:2]]
    return found


def _titled(title: str, rows: _Rows) -> list[str]:
    return ["", f"## {title}", "", *_table(rows)] if rows else []


def _table(rows: _Rows) -> list[str]:
    return [
        f"| {' | '.join(rows[0])} |",
        "| --- " * len(rows[0]) + "|",
        *(f"| {' | '.join(row)} |" for row in rows[1:]),
    ]


def _cell(values: Sequence[float], digits: int = 2) -> str:
    if not values:
        return "–"
    spread = f" ({max(values) - min(values):.{digits}f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def _order(arm: str) -> tuple[int, str]:
    names = [*AT_BASE, *ARMS]
    return (names.index(arm), arm) if arm in names else (len(names), arm)


def _names(some: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(some))
