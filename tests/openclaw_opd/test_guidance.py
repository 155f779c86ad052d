"""The guided teacher's formulas: by hand, by their properties, and against a float64 reference over the vocabulary."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openclaw_opd import guidance
from openclaw_opd.guidance import LEAST_LOG_PROB, LEAST_TAIL, NONE, Weights
from openclaw_rl.types import LogProbs, TopK

weights = st.floats(0.01, 4)
logits = st.lists(st.tuples(st.floats(-4, 4), st.floats(-4, 4)), min_size=3, max_size=8)


def log_probs(values: list[float]) -> list[float]:
    made: list[float] = torch.tensor(values, dtype=torch.float64).log_softmax(-1).tolist()
    return made


def total(row: tuple[float, ...]) -> float:
    return math.fsum(map(math.exp, row))


def guided(hinted: LogProbs, aside: LogProbs, weight: float) -> LogProbs:
    return guidance.guided(hinted, aside, aside, Weights(weight))


def guided_table(hinted: list[LogProbs], aside: list[LogProbs], weight: float) -> tuple[LogProbs, ...]:
    return guidance.guided_table(hinted, aside, aside, Weights(weight))


def test_tokens_by_hand() -> None:
    # The hint makes the first token likelier by 1 nat, the second less likely by 2, and leaves the third.
    hinted, plain = (-1.0, -3.0, -0.5), (-2.0, -1.0, -0.5)
    assert guided(hinted, plain, 1.0) == (0.0, -5.0, -0.5)
    assert guided(hinted, plain, 0.5) == (-0.5, -4.0, -0.5)
    assert guided(hinted, plain, 0.0) == hinted
    with pytest.raises(ValueError, match="zip"):
        guided(hinted, plain[:2], 1.0)


def test_the_request_moves_tokens_by_hand() -> None:
    """A neutral request makes the first token less likely by 2 nats, the second likelier by 1."""
    hinted, aside, away = (-1.0, -3.0), (-2.0, -1.0), (-4.0, -0.0)
    assert guidance.guided(hinted, aside, away, Weights(1.0, 0.5)) == (0.0 + 1.0, -5.0 - 0.5)
    assert guidance.guided(hinted, aside, away, Weights(0.0, 0.5)) == (0.0, -3.5)
    assert guidance.guided(hinted, aside, away, NONE) == hinted
    with pytest.raises(ValueError, match="zip"):
        guidance.guided(hinted, aside, away[:1], Weights(1.0, 0.5))


@given(st.lists(st.tuples(*[st.floats(-4, 4)] * 3), min_size=3, max_size=8), weights, st.floats(0, 1))
def test_a_table_with_both_effects_is_their_distribution(
    rows: list[tuple[float, float, float]], w: float, part: float
) -> None:
    """K = V, in float64: softmax of log b_h + w (log b_h − log b_n) + v (log b_n − log b_y), v ≤ w."""
    v = part * w
    hinted, aside, away = (tuple(log_probs(list(side))) for side in zip(*rows, strict=True))
    moved = log_probs([h + w * (h - n) + v * (n - y) for h, n, y in zip(hinted, aside, away, strict=True)])
    (found,) = guidance.guided_table([hinted], [aside], [away], Weights(w, v))
    assert found == pytest.approx(moved, abs=1e-4)  # the tails are at their floor
    k = len(rows) - 2
    (some,) = guidance.guided_table([hinted[:k]], [aside[:k]], [away[:k]], Weights(w, v))
    TopK((tuple(range(k)),), (some,)).check(1)
    assert 1 - total(some) <= 1 - total(tuple(moved[:k])) + 1e-9, "Hölder: the tail is no more than its ids would be"


def test_a_table_by_hand() -> None:
    """The hint moves b from (.2, .5 | .3) to (.4, .4 | .2). With w = 1 the weights are .16/.2, .16/.5 and .04/.3."""
    hinted, plain = (math.log(0.4), math.log(0.4)), (math.log(0.2), math.log(0.5))
    norm = 0.8 + 0.32 + 0.04 / 0.3
    ((first, second),) = guided_table([hinted], [plain], 1.0)
    assert math.exp(first) == pytest.approx(0.8 / norm, rel=1e-12)
    assert math.exp(second) == pytest.approx(0.32 / norm, rel=1e-12)
    assert 1 - total((first, second)) == pytest.approx(0.04 / 0.3 / norm, rel=1e-12)


@given(logits, weights)
def test_a_table_of_the_whole_vocabulary_is_the_guided_distribution(rows: list[tuple[float, float]], w: float) -> None:
    """K = V, in float64: softmax of (1 + w) log b_h − w log b."""
    hinted, plain = (log_probs(list(side)) for side in zip(*rows, strict=True))
    moved = [(1 + w) * h - w * p for h, p in zip(hinted, plain, strict=True)]
    (found,) = guided_table([tuple(hinted)], [tuple(plain)], w)
    assert found == pytest.approx(log_probs(moved), abs=1e-4)  # both tails are at their floor


@given(logits, weights)
def test_ids_and_tail_are_a_distribution_and_the_tail_is_no_more_than_its_ids_would_be(
    rows: list[tuple[float, float]], w: float
) -> None:
    hinted, plain = (log_probs(list(side)) for side in zip(*rows, strict=True))
    k = len(rows) - 2
    (found,) = guided_table([tuple(hinted[:k])], [tuple(plain[:k])], w)
    TopK((tuple(range(k)),), (found,)).check(1)
    moved = log_probs([(1 + w) * h - w * p for h, p in zip(hinted, plain, strict=True)])
    assert 0 <= 1 - total(found) <= 1 - total(tuple(moved[:k])) + 1e-9
    # Among the ids the ratios are exact.
    for i in range(k):
        assert found[i] - found[0] == pytest.approx(moved[i] - moved[0], abs=1e-9)


@given(logits, weights)
def test_what_the_hint_favours_most_gains_and_more_weight_gains_more(rows: list[tuple[float, float]], w: float) -> None:
    hinted, plain = (tuple(log_probs(list(side))) for side in zip(*rows, strict=True))
    effects = [h - p for h, p in zip(hinted, plain, strict=True)]
    most, least = effects.index(max(effects)), effects.index(min(effects))
    sofar = hinted
    for weight in (w, 2 * w):
        (found,) = guided_table([hinted], [plain], weight)
        assert found[most] >= sofar[most] - 1e-5
        assert found[least] <= sofar[least] + 1e-5
        assert guided(hinted, plain, weight)[most] >= hinted[most] - 1e-12
        sofar = found


@given(logits)
def test_without_weight_or_without_an_effect_it_is_the_hinted_base(rows: list[tuple[float, float]]) -> None:
    hinted, plain = (tuple(log_probs(list(side))) for side in zip(*rows, strict=True))
    assert guided(hinted, plain, 0.0) == hinted
    assert guided_table([hinted[:2]], [plain[:2]], 0.0) == (hinted[:2],)
    assert guided(hinted, hinted, 3.0) == hinted
    assert guided_table([hinted[:2]], [hinted[:2]], 3.0)[0] == pytest.approx(hinted[:2], abs=1e-9)


def test_what_a_base_rules_out_makes_no_infinities() -> None:
    gone = -math.inf
    (found,) = guided_table([(math.log(0.5), gone, -2.0)], [(gone, gone, -1.0)], 1.0)
    assert all(math.isfinite(value) for value in found)
    assert total(found) <= 1 + 1e-12
    # An engine's rounding: both sides sum to more than 1.
    (found,) = guided_table([(1e-6, -14.0)], [(1e-6, -15.0)], 1.0)
    assert found[0] == pytest.approx(0.0, abs=1e-4)
    assert math.exp(LEAST_LOG_PROB) < LEAST_TAIL


def test_the_server_computes_it_without_torch() -> None:
    code = "import sys; import openclaw_opd.guidance, openclaw_opd.teacher; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
