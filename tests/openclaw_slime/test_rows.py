"""A row rides on its advantages tensor through slime, or is missed: never another row's numbers."""

import pytest
import torch

from openclaw_rl.errors import TrainerError
from openclaw_rl.trainer_protocol import SampleBody
from openclaw_rl.types import HintTerm, Sample, TopK, VersionRun
from openclaw_slime.losses import _part
from openclaw_slime.rollout import extras_of
from openclaw_slime.rows import Row, ride, row_of


def row(name: str) -> Row:
    runs = (VersionRun(3, 2),)
    return Row(Sample(name, (1, 2), (3, 4), (True, True), (-1.0, -2.0), runs, 0.7, reward=1.0), (1.0, 1.0))


def test_a_row_is_found_on_its_own_tensor() -> None:
    tensors = [ride(torch.ones(2), row(name)) for name in ("a", "b")]
    assert [row_of(tensor).sample.sample_id for tensor in tensors] == ["a", "b"]


@pytest.mark.parametrize(
    "remade", [torch.clone, lambda t: t[:], lambda t: t.float() * 1, lambda t: torch.tensor(t.tolist())]
)
def test_a_slime_that_makes_other_tensors_of_them_is_refused_by_name(remade) -> None:
    """The row carries all that a method needs, a top-k too: without it the step fails before it is in the weights."""
    with pytest.raises(TrainerError, match="not the pinned one"):
        row_of(remade(ride(torch.ones(2), row("a"))))


def test_a_guided_sample_arrives_as_it_was_scored_and_is_cut_at_its_own_places():
    """A guided teacher is not normalised: its numbers may be above 0. Every token's are others, so a shift shows."""
    table = TopK(((7, 8), (8, 9), (9, 7), (7, 9)), ((-0.5, -1.5), (-0.25, -2.0), (-1.0, -1.25), (-0.75, -3.0)))
    hint = HintTerm("Be brief.", "practice", gain=-0.5, guidance=1.5, hinted_gap=-0.125, top_k=table)
    sample = Sample(
        "s",
        (1, 2),
        (3, 4, 5, 6),
        (True, False, True, True),
        (-1.0, -2.0, -3.0, -4.0),
        (VersionRun(3, 4),),
        0.7,
        teacher_log_probs=(0.25, -1.5, 2.0, -0.125),
        student_log_probs=(-1.0, -1.25, -2.5, -0.5),
        scored_version=3,
        hint=hint,
    )
    (extras,) = extras_of([SampleBody.of(sample)], [[1.25, -0.25, 2.0, 0.375]], 1, parent=3)
    found = Row.of(extras.model_dump_json())
    assert (found.sample, found.credit) == (sample, (1.25, -0.25, 2.0, 0.375))
    part = _part(found.sample, [1, 3])
    assert part is not None
    assert (part.response_ids, part.loss_mask) == ((4, 6), (False, True))
    assert (part.teacher_log_probs, part.student_log_probs) == ((-1.5, -0.125), (-1.25, -0.5))
