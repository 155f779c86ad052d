from openclaw_rl.engines.embedded.throttle import ThreadChooser


class Machine:
    """Steps of a chooser on a simulated machine whose crowd comes and goes."""

    def __init__(self, most: int = 2) -> None:
        self.now = 0.0
        self.chooser = ThreadChooser(most, clock=lambda: self.now)
        self.is_crowded = False

    def step(self, rows: int = 1, work: float = 1.0) -> int:
        threads = self.chooser.choose(rows)
        seconds = work * (0.03 if threads == 1 else 0.4 if self.is_crowded else 0.02)
        self.now += seconds
        self.chooser.record(rows, threads, seconds, work)
        return threads

    def run(self, seconds: float) -> list[int]:
        end, used = self.now + seconds, []
        while self.now < end:
            used.append(self.step())
        return used


def test_a_quiet_machine_uses_all_threads():
    used = Machine().run(20)
    assert used.count(1) == 1  # measured once


def test_a_crowded_machine_falls_back_to_one_and_returns():
    machine = Machine()
    machine.run(5)
    machine.is_crowded = True
    assert machine.run(60).count(2) <= 16  # the step that found out, and the probes: two steps each
    machine.is_crowded = False
    machine.run(35)  # at most the longest pause
    assert machine.run(5).count(1) == 0


def test_a_machine_crowded_from_the_start():
    machine = Machine()
    machine.is_crowded = True
    used = machine.run(10)
    assert used[3:5] == [1, 2]  # measured once each, after the first steps
    assert used[5:25] == [1] * 20


def test_a_first_step_that_also_packs_the_weights_is_no_crowd():
    machine = Machine()
    machine.step(work=1.0)
    assert machine.chooser.choose(300) == 2
    machine.chooser.record(300, 2, 10.0, 1.0)
    assert [machine.step(rows=300) for _ in range(20)].count(1) == 1  # measured once


def test_longer_texts_are_no_crowd():
    machine = Machine()
    machine.run(2)
    assert [machine.step(work=1 + index / 10) for index in range(50)] == [2] * 50


def test_sizes_are_measured_apart():
    machine = Machine()
    machine.run(2)
    assert [machine.step(rows=300) for _ in range(5)] == [2, 2, 2, 1, 2]


def test_one_thread_is_one_thread():
    assert set(Machine(most=1).run(2)) == {1}
