"""The chaos run's reading of memory, on curves with a known slope."""

import ctypes
import math
import random
import threading
from pathlib import Path

import pytest
from chaos.memory import HEAP, MOST_PER_MINUTE, OBJECTS, Memory, climb, held, late, pooled, tell_what_is_held

LEVELLING = [(60.0 * minute, 300 + 20 * (1 - math.exp(-minute / 3))) for minute in range(21)]
GROWING = [(60.0 * minute, 300 + 0.7 * minute) for minute in range(21)]


def test_lives_share_a_slope_and_not_a_level() -> None:
    restarted = [(2000 + at, mb - 50) for at, mb in GROWING]
    slope = pooled([GROWING, restarted], warm_up_s=120)
    assert (slope.per_minute, slope.lives, slope.minutes) == (pytest.approx(0.7), 2, 36.0)


def test_a_curve_that_flattens_is_told_from_one_that_grows() -> None:
    short = LEVELLING[:5]
    assert late([short, LEVELLING]).per_minute == pytest.approx(0.06, abs=0.03)
    assert late([short, GROWING]).per_minute == pytest.approx(0.7)
    assert late([LEVELLING]).minutes == 10.0


def test_too_little_says_nothing() -> None:
    assert pooled([GROWING[:4]], warm_up_s=120).per_minute is None


def life(minutes: float, mb_a_minute: float, *, seed: int, step_mb: float = 0.0) -> list[tuple[float, float]]:
    """Return a server's memory every 5 s: caches that fill, running requests, and a growth of its own."""
    chance = random.Random(seed)
    return [
        (
            at,
            140 + 9 * (1 - math.exp(-at / 40)) + mb_a_minute * at / 60 + step_mb * (at > 450) + chance.expovariate(1.5),
        )
        for at in (5.0 * number for number in range(round(12 * minutes)))
    ]


def read(name: str, *lives: list[tuple[float, float]]) -> Memory:
    memory = Memory(warm_up_s=120)
    for pid, readings in enumerate(lives):
        memory._readings[name][pid] = readings
    return memory


def test_a_server_that_climbs_is_a_finding() -> None:
    level, climbing = life(15, 0.0, seed=1), life(15, 0.55, seed=2)
    (found,) = read(f"stub server: {HEAP}", level, climbing).findings()
    assert found.startswith(f"stub server: {HEAP}: climbs by 0.")
    assert read(f"stub server: {OBJECTS}", life(15, 10.0, seed=3)).findings()


def test_noise_and_one_step_are_none() -> None:
    for seed in range(40):
        assert read(f"stub server: {HEAP}", life(12, 0.0, seed=seed)).findings() == []
    for seed in range(20):
        assert read(f"stub server: {HEAP}", life(14, 0.05, seed=seed, step_mb=1.5)).findings() == []


def test_what_climbs_is_found_whatever_the_noise() -> None:
    most = MOST_PER_MINUTE[HEAP]
    assert all(read(f"stub server: {HEAP}", life(12, 1.7 * most, seed=seed)).findings() for seed in range(40))


def test_a_short_life_and_another_figure_are_not_judged() -> None:
    assert climb([life(10.9, 5.0, seed=1)]) is None
    assert read(f"stub server: {HEAP}", life(5, 5.0, seed=1)).findings() == []
    assert read("stub server", life(15, 5.0, seed=1)).findings() == []


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="no glibc that tells what its heap holds")
def test_a_process_tells_what_it_holds(tmp_path: Path) -> None:
    file = tmp_path / "held"
    assert held(file) == {}
    threading.Thread(target=tell_what_is_held, args=(file, 0.01), daemon=True).start()

    def heap_mb() -> float:
        return held(file).get("MB of the C heap in use", 0.0)

    while not (before := heap_mb()):
        pass
    block = bytearray(64 << 20)
    while heap_mb() < before + 60:  # else the test's own time ends it
        pass
    assert len(block) == 64 << 20
