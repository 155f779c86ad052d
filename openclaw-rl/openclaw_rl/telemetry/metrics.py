"""Metrics in Prometheus' text form: the ledger's own counters, and the meters of what happens beside it. What is
counted twice can disagree, so nothing is.
"""

from collections.abc import Mapping, Sequence

from openclaw_rl.processes.supervisor import ChildStatus
from openclaw_rl.telemetry.health import Health

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(
    counts: Mapping[str, int],
    weight_version: int,
    health: Health,
    problems: Sequence[str] = (),
    children: Sequence[ChildStatus] = (),
) -> str:
    """One gauge per ledger counter, the version that serves, this run's meters, the restarts of its processes, and
    which parts are out of order: the words of `problems` before their colon."""
    lines = [
        "# HELP openclaw_rl_weight_version The policy version that new requests get.",
        "# TYPE openclaw_rl_weight_version gauge",
        f"openclaw_rl_weight_version {weight_version}",
        "# HELP openclaw_rl_ledger Rows of the ledger by what became of them.",
        "# TYPE openclaw_rl_ledger gauge",
    ]
    lines += [f'openclaw_rl_ledger{{what="{what}"}} {count}' for what, count in sorted(counts.items())]
    lines += [
        "# HELP openclaw_rl_scoring Judge and teacher calls by what came of them, since the server started.",
        "# TYPE openclaw_rl_scoring counter",
    ]
    lines += [f'openclaw_rl_scoring{{what="{what}"}} {count}' for what, count in sorted(health.counts.items())]
    lines += [
        "# HELP openclaw_rl_scoring_mean Means over scored turns since the server started, in nats a token.",
        "# TYPE openclaw_rl_scoring_mean gauge",
    ]
    lines += [
        f'openclaw_rl_scoring_mean{{what="{what}"}} {mean.value:.6g}' for what, mean in sorted(health.means.items())
    ]
    lines += [
        "# HELP openclaw_rl_out_of_order Parts that do not do what they should now; none when all is well.",
        "# TYPE openclaw_rl_out_of_order gauge",
    ]
    parts = sorted({problem.partition(":")[0] for problem in problems})
    lines += [f'openclaw_rl_out_of_order{{part="{part}"}} 1' for part in parts]
    lines += [
        "# HELP openclaw_rl_failures_total Calls of a part that failed, since the server started.",
        "# TYPE openclaw_rl_failures_total counter",
    ]
    lines += [f'openclaw_rl_failures_total{{part="{part}"}} {n}' for part, n in sorted(health.failures.items())]
    lines += [
        "# HELP openclaw_rl_restarts_total Processes of ours that ended and were started again.",
        "# TYPE openclaw_rl_restarts_total counter",
    ]
    lines += [f'openclaw_rl_restarts_total{{part="{child.name}"}} {child.restarts}' for child in children]
    return "\n".join(lines) + "\n"
