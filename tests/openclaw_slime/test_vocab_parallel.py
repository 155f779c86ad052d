"""Log-probs out of a cut vocabulary, beside torch on the whole one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from close import assert_close
from tolerances import rel

from openclaw_rl.losses import log_probs_of
from openclaw_slime.vocab_parallel import VocabShard, gathered_log_probs

CHILD = Path(__file__).with_name("vocab_child.py")


@pytest.mark.parametrize("ranks", [2])
def test_every_rank_has_the_numbers_and_its_part_of_the_gradient(ranks, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    arguments = [[sys.executable, CHILD, str(rank), str(ranks), str(tmp_path / "store")] for rank in range(ranks)]
    children = [
        subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for argv in arguments
    ]
    try:
        answers = [child.communicate(timeout=120) for child in children]
    finally:
        for child in children:
            child.kill()
    for out, err in answers:
        assert out, err[-2000:]
        assert json.loads(out.splitlines()[-1])["difference"] < rel(torch.float64, 2**14)  # at log-probs of size 100


def test_the_numbers_are_those_of_our_losses_in_fp32():
    dice = torch.Generator().manual_seed(0)
    logits, ids = 5 * torch.randn(9, 50, generator=dice), torch.randint(0, 50, (9,), generator=dice)
    temperature = torch.rand(9, generator=dice) + 0.3
    found = gathered_log_probs(logits, ids[:, None], temperature, VocabShard())[:, 0]
    assert_close(found, log_probs_of(logits, ids, temperature))


def test_gradients_are_the_functions_own():
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    ids, temperature = torch.tensor([[0, 5], [1, 1], [2, 3], [4, 0]]), torch.tensor([0.5, 1.0, 2.0, 0.7])

    def of(values: torch.Tensor) -> torch.Tensor:
        return gathered_log_probs(values, ids, temperature, VocabShard(vocab_size=6), chunk=2)

    assert torch.autograd.gradcheck(of, (logits,))


def test_no_position_gives_nothing_but_keeps_its_graph():
    logits = torch.zeros(0, 6, requires_grad=True)
    found = gathered_log_probs(logits, torch.zeros(0, 1, dtype=torch.long), torch.ones(0), VocabShard())
    assert found.shape == (0, 1)
    found.sum().backward()
    assert logits.grad is not None
