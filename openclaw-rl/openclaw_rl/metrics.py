"""Metrics in Prometheus' text form, read from the ledger's own counters: what is counted twice can disagree, so
nothing is.
"""

from collections.abc import Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(counts: Mapping[str, int], weight_version: int) -> str:
    """One gauge per ledger counter, and the version that serves."""
    lines = [
        "# HELP openclaw_rl_weight_version The policy version that new requests get.",
        "# TYPE openclaw_rl_weight_version gauge",
        f"openclaw_rl_weight_version {weight_version}",
        "# HELP openclaw_rl_ledger Rows of the ledger by what became of them.",
        "# TYPE openclaw_rl_ledger gauge",
    ]
    lines += [f'openclaw_rl_ledger{{what="{what}"}} {count}' for what, count in sorted(counts.items())]
    return "\n".join(lines) + "\n"
