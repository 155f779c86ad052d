"""The teacher's top-k table as it travels in `Sample.extra_json`: {"top_k": {"ids": [T, K], "log_probs": [T, K]}}."""

import json
import math
from dataclasses import dataclass

from openclaw_rl.errors import AlignmentError
from openclaw_rl.types import Ids, LogProbs, Sample

ROUNDING = 1e-3
"""By which an engine's probabilities may exceed 1 in sum."""


@dataclass(frozen=True, slots=True)
class TopK:
    """What the teacher, hint in the prompt, finds likeliest in each response token's place, at temperature 1."""

    ids: tuple[Ids, ...]  # [T, K], distinct in a row
    log_probs: tuple[LogProbs, ...]  # [T, K]

    def check(self, tokens: int) -> None:
        """Raises AlignmentError where the table is none of a reply of so many tokens."""
        widths = {len(row) for row in (*self.ids, *self.log_probs)}
        if not tokens == len(self.ids) == len(self.log_probs) or len(widths) != 1 or 0 in widths:
            raise AlignmentError(
                f"top-k: {tokens} tokens, {len(self.ids)} rows of ids and {len(self.log_probs)} of log-probs, "
                f"{sorted(widths)} wide"
            )
        if any(len(set(row)) != len(row) for row in self.ids):
            raise AlignmentError("top-k: an id stands twice in a row")
        if any(not math.fsum(map(math.exp, row)) <= 1 + ROUNDING for row in self.log_probs):  # a nan too
            raise AlignmentError("top-k: what stands there is no distribution")


def top_k_of(sample: Sample) -> TopK | None:
    """The sample's table, None without one. Raises AlignmentError when it does not fit the response."""
    if sample.extra_json is None:
        return None
    table = json.loads(sample.extra_json).get("top_k")
    if table is None:
        return None
    found = TopK(
        tuple(tuple(row) for row in table["ids"]),
        # An engine's -inf is null in JSON.
        tuple(tuple(-math.inf if value is None else value for value in row) for row in table["log_probs"]),
    )
    found.check(len(sample.response_ids))
    return found
