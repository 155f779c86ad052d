"""Our Adam steps as torch's does, with a checkpoint in between too."""

import copy
from argparse import Namespace

import pytest
import torch

from openclaw_slime.megatron_fixes import GroupStepAdam, use_given_rates


def parameters(seed: int) -> list[torch.nn.Parameter]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(n, generator=dice)) for n in (3, 5)]


def take(optimizer: torch.optim.Optimizer, number: int) -> None:
    dice = torch.Generator().manual_seed(number)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=dice)
    optimizer.step()


@pytest.mark.parametrize(("is_decoupled", "plain"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_it_steps_as_torchs_does_and_counts_in_its_groups(is_decoupled, plain):
    given = {"lr": 0.1, "weight_decay": 0.2, "betas": (0.9, 0.98), "eps": 1e-8}
    ours, theirs = parameters(1), parameters(1)
    mine, other = GroupStepAdam(ours, adam_w_mode=is_decoupled, **given), plain(theirs, **given)
    for number in range(4):
        take(mine, number)
        take(other, number)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert [group["step"] for group in mine.param_groups] == [4]
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in mine.state.values())


def test_it_goes_on_from_what_was_saved():
    ours = parameters(2)
    first = GroupStepAdam(ours, lr=0.1)
    for number in range(3):
        take(first, number)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    again = GroupStepAdam(copies, lr=0.1)
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    take(first, 3)
    take(again, 3)
    assert all(torch.equal(a, b) for a, b in zip(ours, copies, strict=True))
    assert again.param_groups[0]["step"] == 4


class Scheduler:
    """Megatron's way to a rate: a group's own values come first."""

    def __init__(self, optimizer: torch.optim.Optimizer, max_lr: float) -> None:
        self.optimizer, self.max_lr = optimizer, max_lr

    def step(self, increment: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("max_lr", self.max_lr)


def test_a_resumed_optimizer_takes_the_rates_of_its_arguments():
    first = GroupStepAdam(parameters(3), lr=0.1, betas=(0.9, 0.98))
    first.param_groups[0] |= {"max_lr": 0.1, "min_lr": 0.0}
    again = GroupStepAdam(parameters(3), lr=0.02, betas=(0.8, 0.9))
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    scheduler = Scheduler(again, 0.02)
    scheduler.step(increment=0)
    assert again.param_groups[0]["lr"] == 0.1  # the checkpoint's
    use_given_rates(Namespace(lr=0.02, min_lr=0.0, adam_beta1=0.8, adam_beta2=0.9), again, scheduler)
    assert again.param_groups[0]["lr"] == 0.02
    assert again.param_groups[0]["betas"] == (0.8, 0.9)
