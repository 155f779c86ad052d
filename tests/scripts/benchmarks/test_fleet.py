"""The benchmark's sampler of many policies gives each policy its own log-probs, and draws that no neighbour changes."""

import copy

import pytest
import torch
from tolerances import rel
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.learning.fleet import Fleet, Reply
from benchmarks.learning.subject import forced_log_probs
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Ids

END, TOKENS, TEMPERATURE = 3, 12, 0.7
SAME = rel(ulps=1024)  # a prompt beside others is another matrix product, and each token stands on those before it
PROMPTS: list[Ids] = [(5, 6, 7, 8, 9), (10,), (11, 12, 13)]


@pytest.fixture
def policies() -> list[LoraPolicy]:
    """The base, and two adapters on it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    base = LlamaForCausalLM(config).eval()
    found = [LoraPolicy(copy.deepcopy(base), TrainerSettings(rank=2, alpha=8)) for _ in range(3)]
    for seed, policy in enumerate(found):
        policy.reset(seed)
        if seed:
            for parameter in policy.parameters.values():
                parameter.data.add_(0.3 * torch.randn_like(parameter))
    return found


def sampled(policies: list[LoraPolicy], seeds: list[int]) -> list[list[Reply]]:
    return Fleet(policies, END).generate([PROMPTS] * len(policies), TOKENS, TEMPERATURE, seeds)


def test_log_probs_are_those_of_each_policy_alone(policies: list[LoraPolicy]) -> None:
    found = sampled(policies, [1, 1, 1])
    assert (
        len({tuple(reply.ids for reply in replies) for replies in found}) > 1
    )  # adapters that change nothing prove it
    for policy, replies in zip(policies, found, strict=True):
        pairs = [(prompt, reply.ids) for prompt, reply in zip(PROMPTS, replies, strict=True)]
        for values, reply in zip(forced_log_probs(policy, pairs, TEMPERATURE), replies, strict=True):
            torch.testing.assert_close(torch.tensor(values), torch.tensor(reply.log_probs), rtol=SAME, atol=SAME)


def test_draws_are_a_policys_own(policies: list[LoraPolicy]) -> None:
    together = sampled(policies, [1, 2, 3])
    alone = sampled(policies[1:2], [2])
    assert [reply.ids for reply in together[1]] == [reply.ids for reply in alone[0]]
    assert [reply.ids for reply in together[1]] != [reply.ids for reply in sampled(policies[1:2], [4])[0]]


def test_replies_end_with_their_end_token(policies: list[LoraPolicy]) -> None:
    replies = [reply for seed in range(6) for own in sampled(policies, [seed] * 3) for reply in own]
    assert all(END not in reply.ids[:-1] for reply in replies)
    assert all(reply.ids[-1] == END or len(reply.ids) == TOKENS for reply in replies)
    assert any(reply.ids[-1] == END for reply in replies)


def test_refresh_takes_what_was_learned(policies: list[LoraPolicy]) -> None:
    fleet = Fleet(policies[:1], END)
    for parameter in policies[0].parameters.values():
        parameter.data.add_(0.5 * torch.randn_like(parameter))
    fleet.refresh()
    reply = fleet.generate([PROMPTS], TOKENS, TEMPERATURE, [1])[0][0]
    values = forced_log_probs(policies[0], [(PROMPTS[0], reply.ids)], TEMPERATURE)[0]
    torch.testing.assert_close(torch.tensor(values), torch.tensor(reply.log_probs), rtol=SAME, atol=SAME)
