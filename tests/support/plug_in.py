"""A method that another package brings: one file and its metadata in a folder, as pip would leave them."""

from pathlib import Path

LENGTH = '''
"""Reward by length: a reply of `target_tokens` tokens earns 1, and each token more or less costs the same."""

from pydantic import Field

from openclaw_rl.methods.base import Dropped, SampleLoss, sample_of, unusable
from openclaw_rl.settings import MethodSettings


class LengthSettings(MethodSettings):
    target_tokens: int = Field(default=8, ge=1)
    """Length in tokens that earns the full reward."""

    def conflicts(self, weights):
        if weights == "full":
            yield "method.target_tokens is for adapters"


class Length:
    name = "length"
    settings = LengthSettings

    async def score(self, judged, tools):
        if reason := unusable(judged):
            return Dropped(reason)
        target = tools.settings.target_tokens
        return sample_of(judged, reward=1 - abs(len(judged.turn.response_ids) - target) / target)

    def can_train(self, sample):
        return sample.reward is not None

    def advantages(self, batch, settings, state):
        return [[sample.reward] * len(sample.response_ids) for sample in batch]

    def gathered_ids(self, sample):
        return None

    def loss(self, sample, terms, trainer, method):
        from openclaw_rl.methods.objective import clipped_objective

        policy = clipped_objective(terms, trainer)
        return SampleLoss(policy.loss_sum, int(terms.loss_mask.sum()), policy.tallies)


METHOD = Length()
'''


def install(folder: Path, name: str, source: str) -> None:
    """Write the package `name`, whose module holds `METHOD`, with the entry point that makes it `method.name`."""
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[openclaw_rl.methods]\n{name} = {name}:METHOD\n")
