"""A case's pieces as a policy of `FakeEngine`: a scripted reply, with log-probs that identify the sampling weights.

Unlike `stubs`, the engine behind it can load adapters, replace its weights, and resume a cut reply.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.model import Vocabulary
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.types import LogProbs


@dataclass(frozen=True, slots=True)
class ScriptedPolicy(ToyPolicy):
    reply: tuple[int, ...] = ()
    """Its reply to every prompt, without the end token."""
    opening: tuple[int, ...] = field(default=())
    """Ids that the template writes before a reply."""

    def next_token(self, ids: Sequence[int], seed: int) -> int:
        size = len(self.opening)
        starts = (at for at in range(len(ids) - size, -1, -1) if tuple(ids[at : at + size]) == self.opening)
        said = len(ids) - (next(starts) + size)
        return self.reply[said] if said < len(self.reply) else self.end_id


def scripted(vocabulary: Vocabulary, pieces: Sequence[str]) -> ScriptedPolicy:
    (end_id,) = vocabulary.ids(["<eos>"])
    start = vocabulary.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
    return ScriptedPolicy(end_id=end_id, reply=tuple(vocabulary.ids(pieces)), opening=tuple(start))


class FlatPolicy(ToyPolicy):
    """Policy with the log-prob that `stubs` answers to scoring calls; it is the same for all weights."""

    def log_probs(self, ids: Sequence[int], start: int, seed: int) -> LogProbs:
        return (-0.5,) * (len(ids) - start)
