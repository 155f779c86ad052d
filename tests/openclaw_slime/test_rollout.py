import json
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.errors import TrainerError
from openclaw_rl.methods.agent import AgentSettings
from openclaw_rl.methods.binary_rl import BinarySettings
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainer_protocol import LeaseBody, SampleBody
from openclaw_slime.node import NodeConfig
from openclaw_slime.rollout import EXTRAS_KEY, Extras, LeasedBatches, extras_of, train_data_of


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


class Leases:
    """Leases of two samples by their fence; each is on the parent that it was given."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}

    def leased(self, fence: int) -> LeaseBody:
        samples = [body(n, [True, True]) for n in range(2)]
        return LeaseBody(lease_id=f"l{fence}", fence=fence, parent=self.parents[fence], expires_at=0, samples=samples)


def batches(folder: Path) -> tuple[LeasedBatches, Leases]:
    method = BinarySettings(baseline="ema")
    config = NodeConfig(url="http://server", token="t", trainer=TrainerSettings(), method=method)
    made = LeasedBatches(Namespace(openclaw=config, global_batch_size=2, save=str(folder)))
    made._client = leases = Leases()  # type: ignore[assignment]
    return made, leases


def saved(folder: Path, fence: int) -> dict[str, float]:
    return json.loads((folder / f"method_state_{fence:07d}.json").read_text())


def test_steps_of_agents_reach_slime_with_the_advantages_of_their_groups(tmp_path):
    method = AgentSettings(name="agent", divisor="episode")
    config = NodeConfig(url="http://server", token="t", trainer=TrainerSettings(), method=method)
    made = LeasedBatches(Namespace(openclaw=config, global_batch_size=4, save=str(tmp_path)))
    steps = [
        body(n, [True, False]).model_copy(update={"reward": None, "advantage": advantage, "episode": episode})
        for n, (advantage, episode) in enumerate([(1.5, 1), (0.5, 1), (-1.0, 2)])
    ]
    lease = LeaseBody(lease_id="l", fence=1, parent=0, expires_at=0, samples=steps)
    made._client = Namespace(leased=lambda fence: lease)  # type: ignore[assignment]
    rows = [row for row in made.batch(1) if not row.is_filler]
    # Two steps and one: each episode weighs half of a batch of three.
    assert [row.advantages for row in rows] == [[1.125] * 2, [0.375] * 2, [-1.5] * 2]
    sent = [Extras.model_validate_json(text).sample.to_sample() for text in train_data_of(rows)[EXTRAS_KEY]]
    assert [(sample.advantage, sample.episode) for sample in sent] == [(1.5, 1), (0.5, 1), (-1.0, 2)]


def test_a_checkpoint_that_is_saved_twice_keeps_the_methods_state(tmp_path):
    made, leases = batches(tmp_path)
    leases.parents = {10: 0, 11: 1}
    made.batch(10)
    made.save(10)
    once = saved(tmp_path, 10)
    made.save(10)  # the server was away when the first was reported
    assert saved(tmp_path, 10) == once != {}
    made.batch(11)
    made.save(11)
    assert saved(tmp_path, 11).keys() == once.keys()
    assert saved(tmp_path, 11) != once


def test_a_step_that_is_left_out_has_no_part_in_the_methods_state(tmp_path):
    made, leases = batches(tmp_path)
    leases.parents = {10: 0, 11: 1, 12: 1}
    made.batch(10)
    made.batch(11)  # on version 1, so 10 made it; this one is left out
    made.save(10)
    once = saved(tmp_path, 10)
    plain, same = batches(tmp_path / "plain")
    same.parents = {10: 0}
    plain.batch(10)
    plain.save(10)
    assert saved(tmp_path / "plain", 10) == once
    made.batch(12)  # left out too
    made.save(10)
    assert saved(tmp_path, 10) == once
