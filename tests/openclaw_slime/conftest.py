"""Samples of every kind a batch may hold, the node's part of slime's args, and checkouts that look like slime's."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slime_sources
from node_run import Run
from pydantic import SecretStr
from toy_node import TOKEN, ToyServer

from openclaw_combine.method import CombineSettings
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.types import HintTerm, Sample, VersionRun
from openclaw_slime.node import NodeConfig

VOCABULARY = 48
K = 3


@pytest.fixture
def slime_tree(tmp_path: Path) -> Path:
    """Checkouts of a slime and a Megatron-LM that hold only the code that the plugin relies on."""
    for name, source in slime_sources.FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    (tmp_path / "megatron/training").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def node_config() -> Callable[..., NodeConfig]:
    def make(method: str = "combine", kl_coef: float = 0.0) -> NodeConfig:
        trainer = TrainerSettings(kl_coef=kl_coef)
        settings = CombineSettings(name=method, teacher="policy", baseline="none", top_k=K)
        return NodeConfig(url="http://server", token="t", trainer=trainer, method=settings)

    return make


@pytest.fixture
def run(tmp_path: Path, node_config: Callable[..., NodeConfig]) -> Iterator[Run]:
    server = ToyServer(tmp_path)
    config = node_config("combine").model_copy(update={"url": server.url, "token": SecretStr(TOKEN)})
    yield Run(server, config, every=2)
    server.close()


@pytest.fixture
def every_kind() -> list[Sample]:
    """A verdict alone, a hint alone, both, a gap whose student side the trainer gives, a top-k, a demonstration."""
    return [
        _sample("verdict", 5, mask=(True, False, True, True, True)),
        _sample("hint", 4, reward=None, gap=True, temperature=1.0),
        _sample("both", 6, reward=-1.0, gap=True),
        _sample("student", 3, reward=None, gap=True, student=False),
        _sample("topk", 4, gap=True, top_k=True),
        _sample("shown", 3, reward=None, demonstration=True),
    ]


@pytest.fixture
def verdicts() -> list[Sample]:
    """Samples that slime's own loss supports too: a reward each, one temperature."""
    return [
        _sample("up", 7),
        _sample("down", 6, reward=-1.0),
        _sample("holes", 5, mask=(False, True, True, False, True)),
    ]


def _sample(
    name: str,
    length: int,
    *,
    mask: tuple[bool, ...] | None = None,
    reward: float | None = 1.0,
    gap: bool = False,
    student: bool = True,
    top_k: bool = False,
    demonstration: bool = False,
    temperature: float = 0.7,
) -> Sample:
    dice = random.Random(name)
    near = [-3.5 - dice.random() for _ in range(length)]
    table = None
    if top_k:
        ids = [dice.sample(range(VOCABULARY), K) for _ in range(length)]
        table = HintTerm.of({"top_k": {"ids": ids, "log_probs": [[-1.5, -2.0, -3.0]] * length}})
    return Sample(
        sample_id=name,
        prompt_ids=tuple(dice.randrange(VOCABULARY) for _ in range(2 + len(name) % 4)),
        response_ids=tuple(dice.randrange(VOCABULARY) for _ in range(length)),
        loss_mask=mask or (True,) * length,
        rollout_log_probs=(0.0,) * length if demonstration else tuple(near),
        versions=(VersionRun(0, length),),
        temperature=temperature,
        reward=reward,
        teacher_log_probs=tuple(value + dice.uniform(-1, 1) for value in near) if gap else None,
        student_log_probs=tuple(near) if gap and student else None,
        scored_version=0 if gap else None,
        hint=table,
        is_demonstration=demonstration,
    )
