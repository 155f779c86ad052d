"""A model of one number, and its trainer: which of two replies it gives, the one its user likes or the other.

The number θ is the log-odds of the liked reply; it stands in the adapter's file, and the stub engine looks it up by the
file's hash, as it does for every toy policy. So what a judge votes becomes what users read, through the real server.
"""

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from harness.host import Server
from harness.model import Vocabulary
from harness.trainer import ToyTrainer
from safetensors.numpy import save

from openclaw_rl.testing import ToyPolicy
from openclaw_rl.testing.toy_policy import BASE_SEED
from openclaw_rl.trainer_protocol import LeaseBody
from openclaw_rl.types import Ids

LIKED, DISLIKED = "Yes", "red"
NEVER = -9.0
"""Log-prob of what the model never says."""


@dataclass(frozen=True, slots=True)
class Taste(ToyPolicy):
    liked: int = 0
    disliked: int = 0
    opening: Ids = ()
    """What the template writes before a reply."""
    thetas: dict[int, float] = field(default_factory=dict)
    """By the adapter's seed."""

    @classmethod
    def of(cls, vocabulary: Vocabulary, theta: float) -> "Taste":
        """theta: of the base."""
        (liked,), (disliked,), (end_id,) = (vocabulary.ids([text]) for text in (LIKED, DISLIKED, "<eos>"))
        opening = tuple(vocabulary.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False).ids)
        return cls(end_id=end_id, liked=liked, disliked=disliked, opening=opening, thetas={BASE_SEED: theta})

    def next_token(self, ids: Sequence[int], seed: int) -> int:
        if ids[-1] in (self.liked, self.disliked) and not self._begins(ids, len(ids)):
            return self.end_id
        digest = hashlib.sha256(f"{list(ids)}".encode()).digest()
        return self.liked if int.from_bytes(digest[:4], "big") / 2**32 < _sigmoid(self.thetas[seed]) else self.disliked

    def log_prob(self, ids: Sequence[int], position: int, seed: int) -> float:
        token, theta = ids[position], self.thetas[seed]
        if not self._begins(ids, position):
            return -0.05 if token == self.end_id else NEVER
        if token in (self.liked, self.disliked):
            return math.log(_sigmoid(theta if token == self.liked else -theta))
        return NEVER

    def _begins(self, ids: Sequence[int], position: int) -> bool:
        return tuple(ids[position - len(self.opening) : position]) == self.opening


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


class TasteTrainer:
    """Leases and commits over the trainer API, as one that runs elsewhere does."""

    def __init__(self, server: Server, policy: Taste) -> None:
        self._toy, self._policy = ToyTrainer(server.url, server.data_dir, policy), policy
        self.thetas = {0: policy.thetas[BASE_SEED]}
        """By version."""

    async def step(self, follow: Callable[[float, LeaseBody], float], *, wait_s: float = 120.0) -> int | None:
        """One batch, whose θ is what `follow` makes of the parent's and the batch; the version."""
        return await asyncio.to_thread(self._step, follow, wait_s)

    def _step(self, follow: Callable[[float, LeaseBody], float], wait_s: float) -> int | None:
        lease = self._toy.lease(wait_s=wait_s)
        if lease is None:
            return None
        theta = follow(self.thetas[lease.parent], lease)
        # The step's own name beside it: two steps to one θ are two files.
        name = np.frombuffer(lease.lease_id.encode(), np.uint8)
        weights = save({"theta": np.array([theta], np.float32), "lease": name})
        self._policy.thetas[int.from_bytes(hashlib.sha256(weights).digest()[:8], "big")] = theta
        version = self._toy.client.commit(self._toy.checkpoint(lease, weights=weights))
        self.thetas[version] = theta
        return version


def by_rewards(policy: Taste, rate: float) -> Callable[[float, LeaseBody], float]:
    """θ goes where the rewards point."""

    def follow(theta: float, lease: LeaseBody) -> float:
        for sample in lease.samples:
            assert sample.reward is not None
            theta += rate * sample.reward * (1 if sample.response_ids[0] == policy.liked else -1)
        return max(-4.0, min(4.0, theta))

    return follow
