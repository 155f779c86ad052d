"""Text of a run, from its journal: `openclaw-rl agents status`."""

from collections import Counter
from pathlib import Path
from statistics import fmean

from openclaw_rl.agents.journal import GroupRecord, Records
from openclaw_rl.agents.runner import line_of

_NEWEST = 20


def of_file(folder: Path, environment: str) -> list[str]:
    """Return the lines of a run's state. Raises SettingsError without a journal."""
    journal = Records.of_folder(folder, environment)
    groups = journal.of_split("train")
    lines = [f"run {journal.run} of {environment}: {sum(g.is_whole for g in groups)} groups whole, of {len(groups)}"]
    stages = Counter(attempt.stage for g in groups for attempts in g.members.values() for attempt in attempts)
    if stages:
        lines.append("episodes: " + ", ".join(f"{count} {stage}" for stage, count in sorted(stages.items())))
    whole = [group for group in groups if group.is_whole and any(group.outcomes())]
    for kind in sorted({group.kind for group in whole}):
        of_kind = [group for group in whole if group.kind == kind]
        lines.append(f"  {kind or 'tasks'}: {_means(of_kind)}; newest {_NEWEST} groups: {_means(of_kind[-_NEWEST:])}")
    versions = sorted({group.version for group in whole if group.version is not None})
    lines += [f"  training on version {v}: {_means([g for g in whole if g.version == v])}" for v in versions]
    reasons = Counter(a.reason for g in groups for attempts in g.members.values() for a in attempts if a.reason)
    lines += [f"! {count} × {reason}" for reason, count in reasons.most_common(5)]
    return lines + [line_of(result) for result in journal.evaluations]


def _means(groups: list[GroupRecord]) -> str:
    found = [outcome for group in groups for outcome, _ in group.outcomes()]
    return f"reward {fmean(o.reward for o in found):+.2f}, passed {fmean(o.passed for o in found):.2f}"
