"""Findings of the stage `kills`: what does not hold, and what a kill does not prove."""

import signal

from gpu import node_steering
from gpu.node_processes import THOUGHT_TOKENS
from gpu.stages import Figures

LEAST_KEPT = 0.95
"""Share of the feedback since the last checkpoint that must be trained or wait."""
LEAST_AT_STAKE = 2
"""Versions that a crash would lose, at each kill."""
SERVES_CHATS = frozenset(("server", "engine"))
"""Processes whose death may cut chats; with two engines, the other one takes the replies of the dead one."""


def findings(figures: Figures) -> list[str]:
    found = [f"{key}: {figures[key]}" for key in ("failed", "audit") if figures.get(key)]
    found += [f"{key}: {said}" for key, said in figures.items() if key.endswith(" failed")]
    if (code := figures.get("script exit")) not in (None, 0, -signal.SIGKILL):  # SIGKILL: the check had no time left
        found.append(f"the script ended with {code}")
    elif code == 0 and figures.get("left behind"):
        found.append(f"left behind: {figures['left behind']}")
    cuts_chats = SERVES_CHATS - ({"engine"} if figures.get("engines", 1) > 1 else set())
    if figures.get("set", {}).get("method.teacher") != "base":
        found.append(f"the teacher is not the base of the PRM: {figures.get('set')}")
    if figures.get("set", {}).get("push") != figures["wanted push"]:
        found.append(f"the weights do not go by {figures['wanted push']}: {figures.get('set')}")
    quiet = {"before the first kill": figures.get("chats before the first kill", {})}
    for name, row in figures["kills"].items():
        if "skipped" in row:
            found.append(f"{name}: not killed, {row['skipped']}")
            continue
        if not isinstance(row.get("trains again s"), float):
            found.append(f"{name}: no version was trained since: {row.get('trains again s')}")
        if row.get("versions at stake", 0) < LEAST_AT_STAKE:
            found.append(f"{name}: a crash had {row.get('versions at stake', 0)} versions to lose, and proves little")
        for when in ("feedback since the checkpoint", "feedback after all kills"):
            share = row.get(when, {}).get("trained or waits")
            if share is None:
                found.append(f"{name}: {when}: no feedback was at stake, or none was looked at")
            elif share < LEAST_KEPT:
                found.append(f"{name}: {when}: {share} is trained or waits")
        if not row.get("chats", {}).get("answered"):
            found.append(f"{name}: no chat was answered meanwhile")
        if name not in cuts_chats:
            quiet[name] = row.get("chats until the next", {})
    found += [f"{name}: chats were refused or cut: {c['errors']}" for name, c in quiet.items() if c.get("errors")]
    found += node_steering.findings(figures["steering"] if figures.get("steering") else {"steering": {}})
    found += [f"never lost: {key}" for key, n in figures.get("never lost", {}).items() if "not in" in key and n]
    whole = [row for row in figures["long hints"] if row.get("finish") == "stop" and _is_long(row)]
    if not whole or not figures.get("long hints in samples"):
        found.append(f"no hint behind {THOUGHT_TOKENS} tokens of thought became a sample: {figures['long hints'][:2]}")
    return found


def _is_long(row: Figures) -> bool:
    return int(row.get("thought characters") or 0) >= THOUGHT_TOKENS and int(row.get("tokens") or 0) >= THOUGHT_TOKENS
