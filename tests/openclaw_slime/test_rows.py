"""A row rides on its advantages tensor through slime, or is missed: never another row's numbers."""

import pytest
import torch

from openclaw_rl.errors import TrainerError
from openclaw_rl.types import Sample, VersionRun
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
