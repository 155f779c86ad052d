"""A batch of samples of every kind, and the three methods that train on it."""

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from openclaw_combine.method import METHOD as COMBINE
from openclaw_combine.method import CombineSettings
from openclaw_opd.method import METHOD as OPD
from openclaw_rl.methods.base import Method
from openclaw_rl.methods.binary_rl import METHOD as BINARY
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.trainers.step import accumulate
from openclaw_rl.types import HintTerm, Sample, VersionRun

VOCABULARY = 64
METHODS = {"binary_rl": BINARY, "opd": OPD, "combine": COMBINE}
WEIGHTS = CombineSettings(binary_weight=0.7, opd_weight=1.3, opd_clip=1.5, demonstration_weight=0.4)


def make_sample(
    sample_id: str,
    prompt: int,
    response: int,
    *,
    reward: float | None = None,
    hint: bool = False,
    student: bool = True,
    top_k: int = 0,
    mask: tuple[bool, ...] | None = None,
    demonstration: bool = False,
    temperature: float = 0.7,
) -> Sample:
    dice = random.Random(sample_id)

    def log_probs() -> tuple[float, ...]:
        return tuple(-2.0 - 3 * dice.random() for _ in range(response))

    term = None
    if top_k:
        rows = [[math.log(dice.random() + 0.05) for _ in range(top_k + 1)] for _ in range(response)]
        table = [[value - math.log(math.fsum(map(math.exp, row))) for value in row[:top_k]] for row in rows]
        ids = [dice.sample(range(VOCABULARY), top_k) for _ in range(response)]
        term = HintTerm.of({"top_k": {"ids": ids, "log_probs": table}})
    return Sample(
        sample_id=sample_id,
        prompt_ids=tuple(dice.randrange(VOCABULARY) for _ in range(prompt)),
        response_ids=tuple(dice.randrange(VOCABULARY) for _ in range(response)),
        loss_mask=mask or (True,) * response,
        rollout_log_probs=(0.0,) * response if demonstration else log_probs(),
        versions=(VersionRun(0, response),),
        temperature=1.0 if demonstration else temperature,
        reward=reward,
        teacher_log_probs=log_probs() if hint or top_k else None,
        student_log_probs=log_probs() if (hint or top_k) and student else None,
        hint=term,
        is_demonstration=demonstration,
    )


HOLE = (True, False, True, True, False, True)
MIXED = (
    make_sample("both", 3, 4, reward=1.0, hint=True),
    make_sample("reward", 7, 2, reward=-1.0, temperature=1.0),
    make_sample("hint", 2, 6, hint=True, mask=HOLE),
    make_sample("trainer's student", 4, 3, reward=-1.0, hint=True, student=False),
    make_sample("top-k", 2, 5, top_k=4, mask=HOLE[:5]),
    make_sample("top-k and reward", 6, 2, reward=1.0, top_k=7, student=False, temperature=0.3),
    make_sample("demonstration", 5, 3, demonstration=True, mask=HOLE[:3]),
)


def batch_of(method: Method) -> list[Sample]:
    """Of the mixed batch what the method trains on."""
    return [sample for sample in MIXED if method.can_train(sample)]


def gradients(policy: LoraPolicy) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in policy.parameters.values() if parameter.grad is not None]
    assert len(found) == len(policy.parameters)
    for parameter in policy.parameters.values():
        parameter.grad = None
    return found


def step_gradients(
    policy: LoraPolicy,
    method: Method,
    batch: Sequence[Sample],
    trainer: TrainerSettings,
    settings: CombineSettings = WEIGHTS,
) -> list[Tensor]:
    accumulate(policy, method, batch, method.advantages(batch, settings, {}), trainer, settings)
    return gradients(policy)


def plain_logits(policy: LoraPolicy, sample: Sample) -> Tensor:
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    logits: Tensor = policy.model(input_ids=ids).logits[0][len(sample.prompt_ids) - 1 : -1]
    return logits
