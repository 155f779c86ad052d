"""The policy without weights answers as an engine does."""

import math

import pytest

from openclaw_rl.testing.toy_policy import ToyPolicy
from openclaw_rl.types.samples import TopK


@pytest.mark.parametrize("token", [2, 300, 305, 319, 320, 1999])
def test_the_likeliest_ids_of_a_token_are_k_distinct_ids_of_a_distribution(token: int) -> None:
    policy = ToyPolicy()
    row = policy.likeliest(token, 20)
    (log_probs,) = policy.table([row], [token], (-1.2,))

    TopK((row,), (log_probs,)).check(1)
    assert len(row) == 20
    assert row[0] == token
    assert log_probs[0] == -1.2
    assert math.fsum(map(math.exp, log_probs)) < 1
