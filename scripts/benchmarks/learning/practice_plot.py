"""Curves of the practice experiment as SVG: the score by update, for each preference."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.arms import ARMS
from benchmarks.learning.practice_report import scores
from benchmarks.learning.scope_measures import MEMORIES, Line

SHOWN = (
    "combined",
    "combined, 4 corrections",
    "opd",
    "no judge",
    "no judge, 4 corrections",
    "combined, anchors",
    "combined, w = 0",
    "combined, new turns",
)
HEIGHT, WIDTH = 3.6, 4.2
"""Inches of one panel."""


def plot(lines: Sequence[Line], out: Path) -> bool:
    """Write `out`.svg of the runs of one wish; return False without such runs or without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    single = [line for line in lines if len(line.wishes) == 1 and not line.conversations]
    if not single:
        return False
    preferences = list(dict.fromkeys(line.preference for line in single))
    found = [arm for arm in dict.fromkeys(line.arm for line in single) if arm in ARMS]
    shown = [arm for arm in SHOWN if arm in found] or found[: len(SHOWN)]
    figure = Figure((WIDTH * len(preferences), HEIGHT + 0.9), layout="constrained")
    panels = figure.subplots(1, len(preferences), sharey=True, squeeze=False)[0]
    for panel, preference in zip(panels, preferences, strict=True):
        own = [line for line in single if line.preference == preference]
        for arm, style in (("hinted", ":"), (MEMORIES[0], "--")):
            ends = [line.quality["score"] for line in own if line.arm == arm]
            if ends:
                panel.axhline(statistics.fmean(ends), linestyle=style, color="grey", label=f"base, {arm}")
        for number, arm in enumerate(shown):
            runs = last_lines([line for line in own if line.arm == arm])
            if runs:
                _curve(panel, arm, f"C{number}", [scores(line) for line in runs])
        panel.set_title(preference)
        panel.set_xlabel("update")
        panel.set_ylim(0, 1)
    panels[0].set_ylabel("share of held-out replies that meet the wish")
    known: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        known |= dict(zip(labels, handles, strict=True))
    if known:
        figure.legend(
            handles=list(known.values()), labels=list(known), loc="outside lower center", ncols=4, fontsize="small"
        )
    figure.savefig(out.with_suffix(".svg"), metadata={"Date": None})
    return True


def last_lines(lines: Sequence[Line]) -> list[Line]:
    """Return the last line of each seed."""
    return list({line.seed: line for line in sorted(lines, key=lambda line: line.update)}.values())


def _curve(panel: object, arm: str, colour: str, runs: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Draw the mean over the runs, with their range."""
    updates = sorted(set.intersection(*({update for update, _ in run} for run in runs)))
    by_update = [[dict(run)[update] for run in runs] for update in updates]
    means = [statistics.fmean(values) for values in by_update]
    panel.plot(updates, means, color=colour, label=arm)  # type: ignore[attr-defined]
    low, high = [min(values) for values in by_update], [max(values) for values in by_update]
    panel.fill_between(updates, low, high, color=colour, alpha=0.12, linewidth=0)  # type: ignore[attr-defined]
