"""A wall clock is set; the times that the server writes go on evenly."""

from openclaw_rl.server.startup import SteadyClock


def test_a_wall_clock_that_is_set_moves_nothing() -> None:
    wall, steady = [1000.0], [5.0]
    clock = SteadyClock(lambda: wall[0], lambda: steady[0])
    assert clock() == 1000.0
    wall[0] += 86400  # forward by a day
    steady[0] += 2
    assert clock() == 1002.0
    wall[0] -= 10 * 86400  # back by ten
    steady[0] += 3
    assert clock() == 1005.0


def test_it_begins_where_the_wall_clock_is_and_never_goes_back() -> None:
    clock = SteadyClock()
    readings = [clock() for _ in range(1000)]
    assert readings == sorted(readings)
