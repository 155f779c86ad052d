import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.errors import TrainerError
from openclaw_rl.trainer_protocol import SampleBody
from openclaw_slime.rollout import EXTRAS_KEY, Extras, extras_of, train_data_of


def body(n: int, mask: list[bool], prompt: int = 3) -> SampleBody:
    t = len(mask)
    return SampleBody(
        sample_id=f"s{n}",
        prompt_ids=list(range(prompt)),
        response_ids=list(range(10, 10 + t)),
        loss_mask=mask,
        rollout_log_probs=[-0.5] * t,
        versions=[(0, t)],
        temperature=0.7,
        reward=1.0,
    )


masks = st.lists(st.booleans(), min_size=1, max_size=6).filter(any)


@given(st.lists(masks, min_size=1, max_size=5), st.integers(0, 5), st.randoms())
def test_a_partial_batch_weighs_as_a_batch_of_its_own_size(batch, fillers, random):
    """slime sums l_t m_t / rollout_mask_sum over the samples and divides by G; that must be the mean of n means."""
    size = len(batch) + fillers
    bodies = [body(n, mask) for n, mask in enumerate(batch)]
    data = train_data_of(extras_of(bodies, [[1.0] * len(mask) for mask in batch], size))
    losses = [[random.uniform(-2, 2) for _ in mask] for mask in batch]
    losses += [[random.uniform(-2, 2) for _ in mask] for mask in data["loss_masks"][len(batch) :]]
    slimes = sum(
        sum(x * m for x, m in zip(values, mask, strict=True)) / total
        for values, mask, total in zip(losses, data["loss_masks"], data["rollout_mask_sums"], strict=True)
    )
    ours = sum(
        sum(x for x, m in zip(values, mask, strict=True) if m) / sum(mask)
        for values, mask in zip(losses, batch, strict=False)
    )
    assert slimes / size == pytest.approx(ours / len(batch))


def test_exact_ids_masks_and_log_probs():
    rows = extras_of([body(0, [True, False, True])], [[0.5, 0.5, 0.5]], 2)
    data = train_data_of(rows)
    assert data["tokens"][0] == [0, 1, 2, 10, 11, 12]
    assert data["loss_masks"] == [[1, 0, 1], [0, 0, 0]]
    assert data["rollout_log_probs"][0] == [-0.5, -0.5, -0.5]
    assert data["rollout_mask_sums"][0] == 1.0  # 2 tokens × 1/2
    assert all(len(values) == 2 for values in data.values())
    assert [Extras.model_validate_json(text) for text in data[EXTRAS_KEY]] == rows


def test_absent_terms_stay_absent():
    (row,) = extras_of([body(0, [True])], [[1.0]], 1)
    assert row.sample.teacher_log_probs is None
    assert "teacher_log_probs" not in train_data_of([row])


@pytest.mark.parametrize("n", [0, 3])
def test_what_slime_would_trim_is_refused(n):
    with pytest.raises(TrainerError, match=f"a batch of {n} samples"):
        extras_of([body(i, [True]) for i in range(n)], [[1.0]] * n, 2)
