"""A policy without weights: tokens and log-probs are hashes of the last tokens, the position and the adapter's seed.

Equal arguments give equal floats. A cut and resumed reply is therefore the same as an uncut one, and scoring a token
shows the adapter that sampled it. Two adapters differ by up to `spread` nats a token and by 0 on average, so the
publisher's KL gate passes.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from openclaw_rl.trainers.checkpoint import OPTIMIZER_FILE
from openclaw_rl.types import Ids, LogProbs

_MASK = (1 << 64) - 1
_WINDOW = 3
BASE_SEED = 0


def adapter_seed(folder: Path) -> int:
    """Return the seed that represents an adapter's weights: a hash of the bytes of its weight files."""
    # A trainer keeps the optimizer's state beside the weights for a while; it is no weight.
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        if path.name != OPTIMIZER_FILE:
            digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:8], "big")


@dataclass(frozen=True, slots=True)
class ToyPolicy:
    """A deterministic policy over word ids."""

    low_id: int = 300
    high_id: int = 2000
    """Tokens are from [low_id, high_id): words, in most vocabularies."""
    end_id: int = 2
    mean_tokens: int = 64
    """Mean length of a reply; with 0 only `max_new_tokens` ends it."""
    spread: float = 0.2

    def next_token(self, ids: Sequence[int], seed: int) -> int:
        """Return the token after `ids`. It is the same under every adapter."""
        h = _hash(1, ids, len(ids))
        if self.mean_tokens and h % self.mean_tokens == 0:
            return self.end_id
        return self.low_id + (h >> 20) % (self.high_id - self.low_id)

    def log_prob(self, ids: Sequence[int], position: int, seed: int) -> float:
        """Return log p(ids[position] | ids[:position]) under the adapter with this seed."""
        h = _mix(_hash(seed, ids, position) ^ ids[position])
        return -1.0 - self.spread * (h >> 11) / (1 << 53)

    def log_probs(self, ids: Sequence[int], start: int, seed: int) -> LogProbs:
        """Return the log-probs of ids[start:]."""
        return tuple(self.log_prob(ids, position, seed) for position in range(start, len(ids)))

    def likeliest(self, token: int, k: int) -> Ids:
        """Return the k likeliest ids where this token was sampled."""
        others = (other for other in range(self.low_id, self.low_id + k) if other != token)
        return (token, *islice(others, k - 1))

    def table(self, ids: Sequence[Sequence[int]], tokens: Sequence[int], log_probs: LogProbs) -> tuple[LogProbs, ...]:
        """Return log-probs of `ids` [T, K] beside tokens with `log_probs` [T]; -4, -5 … for the lowest ids."""
        return tuple(
            tuple(log_prob if other == token else -4.0 - abs(other - self.low_id) for other in row)
            for row, token, log_prob in zip(ids, tokens, log_probs, strict=True)
        )


def _hash(seed: int, ids: Sequence[int], position: int) -> int:
    h = _mix(seed ^ position)
    for token in ids[max(0, position - _WINDOW) : position]:
        h = _mix(h ^ token)
    return h


def _mix(x: int) -> int:
    """Apply splitmix64's finaliser."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
