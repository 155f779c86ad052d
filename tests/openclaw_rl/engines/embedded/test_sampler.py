import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.engines.dialect import EngineSampling
from openclaw_rl.engines.embedded import sampler
from openclaw_rl.engines.embedded.jobs import Job, Wanted
from openclaw_rl.engines.embedded.kv_cache import CacheKey


def job(*, prompt: list[int] | None = None, output: list[int] | None = None, top: int = 0, **params: Any) -> Job:
    made = Job(
        rid="r",
        prompt=prompt or [5],
        sampling=EngineSampling(**params),
        max_new_tokens=8,
        wanted=Wanted(output=True, top=top),
        key=CacheKey(None, None),
        adapter=None,
        priority=0,
        end_ids=frozenset(),
    )
    made.output = output or []
    return made


def near(logits: torch.Tensor) -> float:
    """A few roundings of fp32 at the magnitude of these logits: the sums of kernels differ in their order."""
    return 8 * torch.finfo(torch.float32).eps * max(1.0, logits.abs().max().item())


def draw(logits: torch.Tensor, count: int, **params: Any) -> Counter[int]:
    """Ids drawn from one row with `count` seeds."""
    jobs = [job(sampling_seed=seed, **params) for seed in range(count)]
    return Counter(sampled.id for sampled in sampler.sample(logits.expand(count, -1), jobs))


def test_draws_follow_the_distribution():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    counts = draw(probs.log(), 4000)
    assert counts[4] == 0
    for index, p in enumerate(probs[:4].tolist()):
        assert counts[index] / 4000 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 4000))


def test_temperature_flattens_the_draws_and_the_log_probs():
    logits = torch.tensor([2.0, 1.0, 0.0])
    counts = draw(logits, 3000, temperature=4.0)
    expected = (logits / 4).softmax(-1)
    for index, p in enumerate(expected.tolist()):
        assert counts[index] / 3000 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 3000))
    sampled = sampler.sample(logits[None], [job(temperature=4.0)])[0]
    assert sampled.log_prob == pytest.approx(expected.log()[sampled.id].item(), abs=near(logits))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.4}, {0}),
        ({"min_p": 0.25}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.6}, {0, 1}),
        ({"top_p": 0.96, "min_p": 0.5}, {0, 1}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_cuts_limit_the_draw_and_never_the_log_prob(params, kept):
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    assert set(draw(probs.log(), 400, **params)) == kept
    sampled = sampler.sample(probs.log()[None], [job(**params)])[0]
    assert sampled.log_prob == pytest.approx(probs.log()[sampled.id].item(), abs=near(probs.log()))


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 1500}, {"min_p": 1e-3}, {"top_p": 0.99}, {"top_k": 3}])
def test_the_cut_of_a_wide_row_is_that_of_a_full_sort(params):
    """Only the head of a large vocabulary is ordered; the result may not depend on that."""
    torch.manual_seed(0)
    for scale in (0.01, 1.0, 6.0):
        probs = (torch.randn(1, 5000) * scale).softmax(-1)
        made = job(**params)
        ordered, indices = probs[0].sort(descending=True)
        before = ordered.double().cumsum(-1) - ordered
        keep = (before <= made.sampling.top_p) & (ordered >= ordered[0] * made.sampling.min_p)
        if made.sampling.top_k > 0:
            keep[made.sampling.top_k :] = False
        got = sampler._truncated(probs.clone(), [made])[0].nonzero()[:, 0]
        expected = indices[keep].sort().values
        assert abs(len(got) - len(expected)) <= 1  # one token may fall on the border by rounding
        assert set(got.tolist()) ^ set(expected.tolist()) <= {
            indices[keep.sum() - 1].item(),
            indices[keep.sum() % 5000].item(),
        }


def test_greedy_reports_temperature_one():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    sampled = sampler.sample(logits, [job(temperature=0.0)])[0]
    assert sampled.id == 1
    assert sampled.log_prob == pytest.approx(logits.log_softmax(-1)[0, 1].item(), abs=near(logits))


def test_rows_of_one_batch_do_not_touch_each_other():
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    jobs = [
        job(temperature=0.0),
        job(temperature=0.7, sampling_seed=1),
        job(temperature=1.3, sampling_seed=2, top_k=5, top=3),
        job(temperature=1.0, sampling_seed=3, presence_penalty=1.0, output=[4, 4]),
    ]
    together = sampler.sample(logits, jobs)
    alone = [sampler.sample(logits[row : row + 1], [jobs[row]])[0] for row in range(4)]
    assert [entry.id for entry in together] == [entry.id for entry in alone]
    assert [entry.log_prob for entry in together] == pytest.approx(
        [entry.log_prob for entry in alone], abs=near(logits)
    )
    assert [len(entry.top) for entry in together] == [0, 0, 3, 0]


@given(st.integers(0, 2**63 - 1), st.integers(0, 100_000))
def test_uniforms_are_in_range_and_repeat(seed, position):
    value = sampler.uniform(seed, position)
    assert 0 <= value < 1
    assert value == sampler.uniform(seed, position)


def test_a_seeded_reply_goes_on_when_resubmitted_with_its_tokens():
    logits = torch.zeros(1, 1000)
    whole = sampler.sample(logits, [job(prompt=[1, 2, 3], output=[7, 8], sampling_seed=5)])[0]
    again = sampler.sample(logits, [job(prompt=[1, 2, 3, 7, 8], sampling_seed=5)])[0]
    assert whole.id == again.id


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_range_give_tokens_that_are_possible(u):
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    assert sampler._invert(probs, [u]).item() == (1 if u == 0 else 3)


def test_penalties():
    """Counts over the reply; the repetition penalty over prompt and reply, dividing what is positive and multiplying
    what is not.
    """
    logits = torch.tensor([[1.0, 2.0, -1.0, 0.5]])
    reply = job(prompt=[2], output=[1, 1, 0], frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0)
    penalised = sampler._reshaped(logits, [reply])
    assert penalised[0].tolist() == pytest.approx([0.5 - 0.75, 1.0 - 1.25, -2.0, 0.5])
    assert logits[0].tolist() == [1.0, 2.0, -1.0, 0.5]


def test_scores_of_given_tokens():
    torch.manual_seed(1)
    logits = torch.randn(3, 40)
    table = logits.log_softmax(-1)
    scored = sampler.score(logits, [4, 0, 39], top=2, beside=(7, 39, 0))
    expected = [table[0, 4].item(), table[1, 0].item(), table[2, 39].item()]
    assert [entry.log_prob for entry in scored] == pytest.approx(expected, abs=near(table))
    for row, entry in enumerate(scored):
        assert [value for value, _ in entry.top] == pytest.approx(table[row].topk(2).values.tolist(), abs=near(table))
        assert entry.beside == pytest.approx(table[row, [7, 39, 0]].tolist(), abs=near(table))
    assert all(entry.top == entry.beside == [] for entry in sampler.score(logits, [4, 0, 39], top=0))


def test_a_bias_is_added_to_the_logits_of_its_own_row():
    logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(2, 1)
    rows = [job(logit_bias={"0": -100.0, "2": 1.5}), job()]
    assert sampler._reshaped(logits, rows).tolist() == [[-98.0, 1.0, 1.5], [2.0, 1.0, 0.0]]
    assert draw(logits[0], 200, logit_bias={"0": -100.0, "1": -100.0}) == {2: 200}
