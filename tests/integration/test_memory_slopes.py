"""How the chaos run reads memory, on curves of which the slope is known."""

import ctypes
import math
import threading
from pathlib import Path

import pytest
from chaos.memory import held, late, pooled, tell_what_is_held

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
