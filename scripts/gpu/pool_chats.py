"""Chats of the stage `pool`: their waits over each event, and what an event must show to prove its point."""

import itertools
from collections.abc import Sequence

from benchmarks.chat_load import Reply
from gpu import load
from gpu.stages import Figures

GAP_MOST_S = 0.5
"""Longest gap of a chat over a roll, as its client sees it. A pool that held its chats would hold them for a push."""


def figures_of(replies: Sequence[Reply], windows: dict[str, tuple[float, float]]) -> Figures:
    """Return the chats' figures: in all, in the calm, and the longest waits over each event."""
    errors: dict[str, int] = {}
    for reply in replies:
        if reply.error:
            errors[reply.error[:200]] = errors.get(reply.error[:200], 0) + 1
    waits = [wait for reply in replies for wait in waits_of(reply)]
    calm = [end - begin for begin, end, _ in waits if not any(begin < b and end > a for a, b in windows.values())]
    figures: Figures = {"replies": len(replies), "refused or cut": errors}
    figures["longest wait for a token in the calm, p50/p99/max s"] = [*load.p50_p99(calm), _most(calm)]
    for name, (a, b) in windows.items():
        over = [(end - begin, is_first) for begin, end, is_first in waits if begin < b and end > a]
        figures[name] = {
            "chats": sum(reply.started < b and (reply.token_times or [reply.started])[-1] > a for reply in replies),
            "longest gap s": _most([wait for wait, is_first in over if not is_first]),
            "longest first token s": _most([wait for wait, is_first in over if is_first]),
        }
    return figures


def killed_findings(name: str, running: int, calls: int) -> list[str]:
    """Return what a kill does not prove: one of an idle engine, and a return to no calls."""
    found = [f"{name}: it ran no call, so none had to move"] * (running == 0)
    return found + [f"{name}: it got no call after its return"] * (calls == 0)


def roll_findings(chats: Figures) -> list[str]:
    """Return the swaps of full weights over which a chat waited too long for a token, or that no chat met."""
    rolls = {name: row for name, row in chats.items() if name.startswith(("pin", "versions"))}
    gaps = {name: row["longest gap s"] for name, row in rolls.items()}
    found = [f"{name}: a chat had a gap of {gap} s" for name, gap in gaps.items() if gap > GAP_MOST_S]
    return found + [f"{name}: no chat ran over it" for name, row in rolls.items() if not row["chats"]]


def waits_of(reply: Reply) -> list[tuple[float, float, bool]]:
    """Return begin and end of the wait for each token, and whether it is the first one."""
    times = [reply.started, *reply.token_times]
    return [(a, b, at == 0) for at, (a, b) in enumerate(itertools.pairwise(times))]


def _most(values: Sequence[float]) -> float:
    return round(max(values, default=0.0), 3)
