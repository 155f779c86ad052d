from itertools import cycle

import pytest

from openclaw_rl.engines.embedded.throttle import BackgroundShare


class Machine:
    """Steps of a share on a simulated machine: a plain step takes 30 ms, each background token a little more."""

    def __init__(self, token_ms: float, most: int = 128) -> None:
        self.token_ms, self.share = token_ms, BackgroundShare(most)
        self.noise = cycle([0.0])

    def step(self, decoding: int = 1) -> tuple[int, float]:
        tokens = self.share.tokens(decoding)
        seconds = (30 + tokens * self.token_ms) / 1e3 + next(self.noise)
        self.share.record(decoding, tokens, seconds)
        return tokens, seconds

    def run(self, steps: int) -> list[tuple[int, float]]:
        return [self.step() for _ in range(steps)]


@pytest.mark.parametrize("token_ms", [0.01, 0.5, 1.5, 3.0])
def test_a_step_takes_at_most_twice_as_long_once_it_was_measured(token_ms):
    machine = Machine(token_ms)
    machine.run(40)
    assert max(seconds for _, seconds in machine.run(100)) < 0.06


def test_a_fast_machine_gets_on_with_it():
    machine = Machine(0.01)
    machine.run(40)
    assert {tokens for tokens, _ in machine.run(100)} == {128, 0}


def test_a_slow_one_does_a_little_in_most_steps():
    machine = Machine(20.0)
    tokens = [tokens for tokens, _ in machine.run(100)]
    assert set(tokens[40:]) == {4, 0}
    assert tokens[40:].count(0) <= 7  # the steps that the others are measured against


def test_a_late_step_is_no_slow_machine():
    machine = Machine(0.5)
    machine.run(40)
    usual = {tokens for tokens, _ in machine.run(30)}
    machine.noise = cycle([0.0, 0.0, 0.0, 0.0, 0.5])
    assert {tokens for tokens, _ in machine.run(200)} == usual


def test_it_follows_the_machine():
    machine = Machine(0.5)
    machine.run(40)
    machine.token_ms = 3.0
    machine.run(40)
    assert max(tokens for tokens, _ in machine.run(50)) == 8
    machine.token_ms = 0.1
    machine.run(60)
    assert max(tokens for tokens, _ in machine.run(50)) == 128


def test_another_number_of_replies_is_measured_by_itself():
    machine = Machine(0.5)
    machine.run(10)
    assert machine.step(decoding=5)[0] == 0
    assert machine.step(decoding=5)[0] > 0
