"""A step's figures, merged over Megatron's ranks."""

import pytest

from openclaw_slime.outcome import RankShare, merged


def test_ranks_that_repeat_a_number_are_not_counted_twice() -> None:
    first = RankShare(True, True, loss=2.0, trained_tokens=5, tallies={"gap": (3.0, 5.0)})
    twin = RankShare(True, False, loss=2.0, trained_tokens=5, tallies={"gap": (3.0, 5.0)})
    other = RankShare(True, True, loss=1.0, trained_tokens=3, tallies={"gap": (1.0, 3.0)}, not_finite=("s",))
    outcome = merged([first, twin, other], samples=3, batch_size=4)
    assert outcome.metrics["loss"] == pytest.approx(3 / 4)
    assert outcome.metrics["gap"] == pytest.approx(4 / 8)
    assert outcome.not_finite == ("s",)
    with pytest.raises(ValueError, match="some ranks stepped"):
        merged([first, RankShare(False, True)], samples=1, batch_size=1)
