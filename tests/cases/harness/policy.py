"""A case's pieces as a policy of `FakeEngine`: the reply is as scripted, its log-probs tell whose weights sampled it.

Unlike `stubs` the engine behind it can load adapters, replace its weights, and go on with a reply that was cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.model import Vocabulary
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.types import LogProbs


@dataclass(frozen=True, slots=True)
class ScriptedPolicy(ToyPolicy):
    reply: tuple[int, ...] = ()
    """What it says to everything, the end token left out."""
    opening: tuple[int, ...] = field(default=())
    """What the template writes before a reply."""

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
    """What `stubs` answers when it scores, whatever the weights."""

    def log_probs(self, ids: Sequence[int], start: int, seed: int) -> LogProbs:
        return (-0.5,) * (len(ids) - start)
