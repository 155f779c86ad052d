"""Forced log-probs: those of the tokens that were asked about, or none."""

import msgspec
import pytest
from engine_client import raw_server, request, served
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.engines import score_answers
from openclaw_rl.errors import AlignmentError, EngineGone, EngineRefused
from openclaw_rl.testing import FakeEngine, ToyPolicy
from openclaw_rl.types import Ids, LogProbs


async def test_scores_align_with_the_response() -> None:
    fake = FakeEngine(policy=ToyPolicy())
    async with served(fake) as engine:
        score = await engine.score((1, 2, 3), (400, 500), lora_path=None, extra_key="v0", top_k=3)
        assert score.log_probs == fake.policy.log_probs([1, 2, 3, 400, 500], 3, 0)
        assert score.top_ids is not None
        assert score.top_log_probs is not None
        assert [row[0] for row in score.top_ids] == [400, 500]
        assert [len(row) for row in score.top_log_probs] == [3, 3]
        call = fake.calls[-1]
        assert (call.logprob_start_len, call.sampling_params.max_new_tokens, call.extra_key) == (2, 0, "v0")


async def test_given_ids_are_scored_position_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_answers, "BLOCK_VALUES", 8)
    fake, response = FakeEngine(policy=ToyPolicy()), (400, 500, 600, 700)
    wanted = ((400, 300), (301, 302, 303), (600,), (300, 301))
    async with served(fake) as engine:
        score = await engine.score_ids((1, 2, 3), response, wanted, lora_path=None, extra_key="v0")
    direct = await fake.score_ids((1, 2, 3), response, wanted, lora_path=None, extra_key="v0")
    assert score == direct
    assert score.log_probs == fake.policy.log_probs([1, 2, 3, *response], 3, 0)
    # Each block has the ids and the tokens of its own positions alone, and starts at the token before it.
    assert [(call.logprob_start_len, len(call.input_ids), call.token_ids_logprob) for call in fake.calls] == [
        (2, 4, [300, 400]),
        (3, 5, [301, 302, 303, 500]),
        (4, 7, [300, 301, 600, 700]),
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"prefill_max_requests": None},
        {"prefill_max_requests": 2},
        {"disable_overlap_schedule": False},
        {"enable_mixed_chunk": True},
    ],
)
async def test_an_engine_that_would_end_by_given_ids_is_not_sent_any(other: dict[str, object]) -> None:
    """SGLang's scheduler ends when ids are named beside another prompt of the batch, or in a decode step of others."""
    fake = FakeEngine(policy=ToyPolicy())
    fake.server_info = {
        "prefill_max_requests": 1,
        "disable_overlap_schedule": True,
        "enable_mixed_chunk": False,
    } | other
    async with served(fake) as engine:
        with pytest.raises(EngineRefused, match="start it with --prefill-max-requests 1 --disable-overlap-schedule"):
            await engine.score_ids((1, 2, 3), (400,), [(300,)], lora_path=None, extra_key="v0")
        await engine.score((1, 2, 3), (400, 500), lora_path=None, extra_key="v0", top_k=3)
    assert [call.token_ids_logprob for call in fake.calls] == [None]


async def test_an_engine_that_takes_one_prompt_a_batch_is_asked_once_until_it_goes_away() -> None:
    fake = FakeEngine(policy=ToyPolicy())
    fake.server_info = {"prefill_max_requests": 1, "disable_overlap_schedule": True}
    async with served(fake) as engine:
        await engine.score_ids((1, 2, 3), (400,), [(300,)], lora_path=None, extra_key="v0")
        fake.server_info = {"prefill_max_requests": 8}
        await engine.score_ids((1, 2, 3), (400,), [(300,)], lora_path=None, extra_key="v0")
        url, engine.url = engine.url, "http://127.0.0.1:9"
        with pytest.raises(EngineGone):
            await engine.model_info()
        engine.url = url  # another engine came back there
        with pytest.raises(EngineRefused, match="prefill-max-requests"):
            await engine.score_ids((1, 2, 3), (400,), [(300,)], lora_path=None, extra_key="v0")


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=9, unique=True), max_size=30), st.integers(1, 60))
def test_blocks_cover_each_position_once_and_stay_small(rows: list[list[int]], most: int) -> None:
    ids = [tuple(row) for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_answers, "BLOCK_VALUES", most)
        blocks = list(score_answers.id_blocks(ids))
    assert [t for begin, end in blocks for t in range(begin, end)] == list(range(len(ids)))
    for begin, end in blocks:
        values = (end - begin) * len({token for row in ids[begin:end] for token in row})
        assert end - begin == 1 or values <= most


@pytest.mark.parametrize(
    "rows",
    [
        None,  # an engine that does not know the field
        [None, [[-1.0, 7, None]]],  # a row short
        [None, [[-1.0, 7, None]], [[-1.0, 8, None]]],  # another id
        [[[-1.0, 7, None]], [[-1.0, 7, None]], [[-1.0, 7, None]], [[-1.0, 7, None]]],
    ],
)
async def test_rows_that_do_not_hold_the_given_ids_are_refused(rows: list[object] | None) -> None:
    entries = [[None, 1, None], [-1.0, 2, None], [-2.0, 3, None]]
    meta = {"input_token_logprobs": entries, "input_token_ids_logprobs": rows}
    text = msgspec.json.encode({"meta_info": meta})
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text)
    async with raw_server(answer) as engine:
        with pytest.raises(AlignmentError, match="given ids"):
            await engine.score_ids((1,), (2, 3), [(7,), (7,)], lora_path=None, extra_key=None)


@pytest.mark.parametrize(
    ("own", "listed", "is_its_own"),
    [
        (-1.0, -1.0, True),
        (-1.0, -1.0005, True),
        (-1.0, -1.5, False),
        (-1.0, None, True),  # JSON has no NaN: the method refuses it
        (-1e39, -1.0, True),  # out of the range of what is kept
    ],
)
async def test_a_table_that_disagrees_with_its_tokens_is_refused(
    own: float, listed: float | None, is_its_own: bool
) -> None:
    """As SGLang answers where logits are made in slices and a chat stands between two of them."""
    entries = [[None, 1, None], [-0.5, 2, None], [own, 3, None]]
    tops = [None, [[-0.1, 9, None], [-0.5, 2, None]], [[-0.2, 9, None], [listed, 3, None]]]
    meta = {"input_token_logprobs": entries, "input_top_logprobs": tops}
    text = msgspec.json.encode({"meta_info": meta})
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text)
    async with raw_server(answer) as engine:
        asked = engine.score((1,), (2, 3), lora_path=None, extra_key=None, top_k=2)
        if is_its_own:
            assert (await asked).top_ids == ((9, 2), (9, 3))
            return
        with pytest.raises(AlignmentError, match="another reply's"):
            await asked


@pytest.mark.parametrize(("listed", "is_its_own"), [(-2.0, True), (-2.0005, True), (-2.5, False), (None, False)])
async def test_given_ids_that_disagree_with_their_tokens_are_refused(listed: float | None, is_its_own: bool) -> None:
    """As SGLang answers where logits are made in slices: the table of another request, with the same ids."""
    entries = [[None, 1, None], [-0.5, 2, None], [-2.0, 3, None]]
    rows = [None, [[-0.5, 2, None], [-1.5, 3, None], [-1.0, 7, None]]]
    rows += [[[-0.7, 2, None], [listed, 3, None], [-1.1, 7, None]]]
    text = msgspec.json.encode({"meta_info": {"input_token_logprobs": entries, "input_token_ids_logprobs": rows}})
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text)
    async with raw_server(answer) as engine:
        asked = engine.score_ids((1,), (2, 3), [(7,), (7, 2)], lora_path=None, extra_key=None)
        if is_its_own:
            score = await asked
            assert (score.top_ids, score.top_log_probs) == (((7,), (7, 2)), ((-1.0,), (-1.1, -0.7)))
            return
        with pytest.raises(AlignmentError, match="another reply's"):
            await asked


async def score_answered_by(told: list[int], asked: Ids) -> LogProbs:
    """What scoring gives where the engine says that these were the tokens."""
    entries = [[None, 1, None], *([-float(n), token, None] for n, token in enumerate(told, start=1))]
    text = msgspec.json.encode({"meta_info": {"input_token_logprobs": entries}})
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text)
    async with raw_server(answer) as engine:
        return (await engine.score((1,), asked, lora_path=None, extra_key=None)).log_probs


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ((2,), [9]),
        ((2, 3), [2]),
        ((5, 6, 7, 8), [1, 5, 6, 7]),  # shifted
        ((5, 6, 7, 8), [6, 7, 8, 0]),
        ((7, 7, 7, 5), [0, 7, 7, 7]),
        ((5, 6, 7, 7), [5, 6, 7, 0]),  # not each time
        ((5, 8, 7), [0, 8, 7]),  # not the last of any vocabulary
        ((5, 8, 7), [0, 0, 7]),
    ],
)
async def test_scores_of_other_tokens_are_refused(asked: Ids, told: list[int]) -> None:
    with pytest.raises(AlignmentError):
        await score_answered_by(told, asked)


@pytest.mark.parametrize(("asked", "told"), [((5, 999, 6), [5, 0, 6]), ((999, 0, 999), [0, 0, 0]), ((999,), [0])])
async def test_sglangs_zero_for_the_last_id_of_the_vocabulary_is_that_id(asked: Ids, told: list[int]) -> None:
    assert await score_answered_by(told, asked) == tuple(-float(n) for n in range(1, len(asked) + 1))


async def test_generated_log_probs_are_those_that_scoring_gives() -> None:
    fake = FakeEngine()
    async with served(fake) as engine:
        reply = await engine.generate(request([1, 2, 3], n=20))
        score = await engine.score((1, 2, 3), tuple(reply.output_ids), lora_path=None, extra_key=None)
    assert [lp for lp, _, _ in reply.meta_info.output_token_logprobs or []] == list(score.log_probs)
