"""Rows and micro-batches: every trained token once, prefixes shared, budgets kept."""

from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.trainers.batches import Row, micro_batches, rows_of
from openclaw_rl.types import Sample, VersionRun

ids = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    """Few distinct ids, so that samples often are prefixes of each other."""
    made = []
    for index in range(draw(st.integers(1, 7))):
        response = draw(ids)
        mask = tuple(draw(st.lists(st.booleans(), min_size=len(response), max_size=len(response)).filter(any)))
        made.append(
            Sample(
                sample_id=str(index),
                prompt_ids=draw(ids),
                response_ids=response,
                loss_mask=mask,
                rollout_log_probs=(-1.0,) * len(response),
                versions=(VersionRun(0, len(response)),),
                temperature=1.0,
            )
        )
    return made


@given(batches(), st.booleans(), st.booleans(), st.integers(1, 40))
def test_every_sample_is_somewhere_once_behind_its_own_prompt(
    samples: list[Sample], share: bool, packed: bool, budget: int
) -> None:
    cut = micro_batches(rows_of(samples, share_prefixes=share), budget, packed=packed)
    found = {piece.index: (row, piece) for batch in cut for row in batch.rows for piece in row.pieces}
    assert sum(len(batch.pieces) for batch in cut) == len(samples) == len(found)
    for index, sample in enumerate(samples):
        row, piece = found[index]
        assert row.ids[: piece.start] == sample.prompt_ids
        assert row.ids[piece.start : piece.start + piece.length] == sample.response_ids
        assert piece.trained == tuple(k for k, trained in enumerate(sample.loss_mask) if trained)


@given(batches(), st.booleans(), st.integers(1, 40))
def test_a_pass_keeps_the_budget_unless_one_row_alone_exceeds_it(
    samples: list[Sample], packed: bool, budget: int
) -> None:
    rows = rows_of(samples)
    cut = micro_batches(rows, budget, packed=packed)
    for batch in cut:
        assert batch.tokens <= budget or len(batch.rows) == 1
    if packed:
        assert sum(batch.tokens for batch in cut) == sum(len(row.ids) - 1 for row in rows)  # nothing in vain
        half_empty = [batch for batch in cut if 2 * batch.tokens <= budget]
        assert len(half_empty) <= 1


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(0, 3)), min_size=1), st.integers(1, 80))
def test_rows_that_begin_alike_are_computed_once_and_every_position_sees_its_own_prefix(
    shapes: list[tuple[int, int, int]], budget: int
) -> None:
    """shapes: tokens of a common beginning, tokens behind it, and the number that these repeat."""
    rows = [Row((*range(stem), *[100 + own] * n, 7), ()) for stem, n, own in shapes]
    cut = micro_batches(rows, budget, packed=True, shares_stems=True)
    assert sorted(row.ids for batch in cut for row in batch.rows) == sorted(row.ids for row in rows)
    for batch in cut:
        computed = [token for row, start in zip(batch.rows, batch.starts, strict=True) for token in row.ids[start:-1]]
        assert len(computed) == batch.tokens == sum(batch.lengths)
        assert batch.tokens <= 8 * budget or len(batch.rows) == 1
        for row, places in zip(batch.rows, batch.places, strict=True):
            assert [computed[place] for place in places] == list(row.ids[:-1])
    assert sum(batch.tokens for batch in cut) <= sum(len(row.ids) - 1 for row in rows)


def test_a_row_joins_a_pass_over_the_budget_where_that_is_less_work() -> None:
    stem = tuple(range(90))
    rows = [Row((*stem, *range(200 + 20 * k, 219 + 20 * k), 7), ()) for k in range(4)]
    (tree,) = micro_batches(rows, 100, packed=True, shares_stems=True)
    assert (tree.starts, tree.lengths) == ([0, 90, 90, 90], [109, 19, 19, 19])
    limited = micro_batches(rows, 100, packed=True, shares_stems=True, most=130)
    assert [len(batch.rows) for batch in limited] == [2, 2]
    apart = [Row((*range(300 + 100 * k, 360 + 100 * k), 7), ()) for k in range(4)]
    assert [batch.tokens for batch in micro_batches(apart, 120, packed=True, shares_stems=True)] == [120, 120]
    assert [batch.tokens for batch in micro_batches(apart, 100, packed=True, shares_stems=True)] == [60] * 4


@given(batches())
def test_no_row_is_the_prefix_of_another(samples: list[Sample]) -> None:
    rows = rows_of(samples)
    for one in rows:
        assert not any(other is not one and other.ids[: len(one.ids)] == one.ids for other in rows)


def test_turns_that_extend_each_other_share_a_row() -> None:
    def turn(name: str, prompt: tuple[int, ...], response: tuple[int, ...]) -> Sample:
        n = len(response)
        return Sample(name, prompt, response, (True,) * n, (-1.0,) * n, (VersionRun(0, n),), 1.0)

    first, second = turn("1", (1, 2), (3, 4)), turn("2", (1, 2, 3, 4, 5), (6,))
    other = turn("3", (1, 2), (3, 5))  # the same prompt, another answer: not a prefix
    rows = rows_of([first, other, second])
    assert [[piece.index for piece in row.pieces] for row in rows] == [[2, 0], [1]]
    assert [len(row.pieces) for row in rows_of([first, other, second], share_prefixes=False)] == [1, 1, 1]
