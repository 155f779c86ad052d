"""Wishes are measured on fixed texts of the base, once a version, and no words of a user are kept too long."""

from typing import Any

import pytest
from practising import practice
from turns import make_request

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.base import Score
from openclaw_rl.messages import Message
from openclaw_rl.practice import measuring
from openclaw_rl.practice.measuring import Meter, Reading, probe_turns
from openclaw_rl.testing import FakeEngine
from openclaw_rl.types import Ids, Request, SamplingParams


class Scorer(FakeEngine):
    """The hint moves the base by +1 a token, neutral words by +0.4; an adapter moves it by `moved`."""

    moved = 0.75

    def __init__(self) -> None:
        super().__init__()
        self.scored: list[tuple[str, str | None]] = []

    async def score(
        self, prompt_ids: Ids, response_ids: Ids, *, lora_path: str | None, extra_key: str | None, top_k: int = 0
    ) -> Score:
        text = "".join(map(chr, prompt_ids))
        self.scored.append((text, lora_path))
        value = -2.0 + ("words" in text) + 0.4 * ("neutral" in text) + (0.0 if lora_path is None else self.moved)
        return Score((value,) * len(response_ids))


class Requests:
    def __init__(self) -> None:
        self.gone: set[str] = set()

    async def practice_request(self, turn_id: str) -> Request | None:
        if turn_id in self.gone:
            return None
        messages = (Message(role="user", content=f"question of {turn_id}"),)
        return make_request("r", *messages, prompt=render(messages, None, None), sampling=SamplingParams(4))


class Characters:
    end_ids = frozenset({0})
    vocab_size = 0x110000

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))


def render(messages: Any, tools_json: str | None, template_kwargs_json: str | None) -> tuple[int, ...]:
    return tuple(map(ord, "".join(message.text() for message in messages)))


@pytest.fixture
def bench() -> tuple[Meter, Scorer, VersionAdmission, Requests]:
    engine, serving, requests = Scorer(), VersionAdmission(hold_s=1.0), Requests()
    engine.adapters["policy-v3"] = 3
    serving.switch(3, "policy-v3")
    return Meter(requests, engine, serving, Characters(), render), engine, serving, requests


async def test_the_share_is_the_policys_part_of_what_the_wish_moves(bench, wish):
    meter, engine, *_ = bench
    found = await meter.measure(wish(1), [wish(1)], [])
    assert found.share == pytest.approx(0.75)
    assert found.kl is None
    sampled = [call for call in engine.calls if call.sampling_params.max_new_tokens]
    assert [call.lora_path for call in sampled] == [None, None]  # texts of the base, with the wish and without
    assert ["words 1-0" in "".join(map(chr, call.input_ids)) for call in sampled] == [False, True]


async def test_against_neutral_words_the_share_is_of_what_the_wish_itself_moves(bench, wish):
    _, engine, serving, requests = bench
    meter = Meter(requests, engine, serving, Characters(), render, reading=Reading(neutral="neutral", guidance=2.0))
    # The teacher stands at 1 + 2 · (1 - 0.4) = 2.2, a third of that is share 1, and the policy moved by 0.75.
    assert (await meter.measure(wish(1), [wish(1)], [])).share == pytest.approx(0.75 / (2.2 / 3))
    meter = Meter(requests, engine, serving, Characters(), render, reading=Reading(neutral="neutral"))
    assert (await meter.measure(wish(1), [wish(1)], [])).share == pytest.approx(0.75), "nothing is guided"


async def test_the_texts_are_made_once_and_the_policy_is_scored_once_a_version(bench, wish):
    meter, engine, serving, _ = bench
    await meter.measure(wish(1), [wish(1)], [])
    first = [call.input_ids for call in engine.calls]
    engine.calls.clear(), engine.scored.clear()
    await meter.measure(wish(1), [wish(1)], [])
    assert (engine.calls, engine.scored) == ([], [])
    engine.adapters["policy-v4"] = 4
    serving.switch(4, "policy-v4")
    engine.moved = 1.5
    assert (await meter.measure(wish(1), [wish(1)], [])).share == pytest.approx(1.5)
    assert {lora_path for _, lora_path in engine.scored} == {"policy-v4"}
    again = Meter(Requests(), engine, serving, Characters(), render)
    await again.measure(wish(1), [wish(1)], [])
    assert [call.input_ids for call in engine.calls] == first  # a restart measures on the same texts


async def test_the_base_has_learned_nothing_and_that_costs_nothing(bench, wish):
    meter, engine, serving, _ = bench
    serving.switch(0, None)
    assert (await meter.measure(wish(1), [wish(1)], [])).share == 0.0
    assert (engine.calls, engine.scored) == ([], [])


async def test_the_distance_of_practice_replies_from_the_base_is_measured(bench, wish):
    meter, engine, *_ = bench
    # The replies' log-probs under the policy are -0.5 a token, the base's -2.0.
    replies = [practice("t", 1) for _ in range(5)]
    assert (await meter.measure(wish(1), [wish(1)], replies[:3])).kl is None  # too few to say
    assert (await meter.measure(wish(1), [wish(1)], replies[:4])).kl == pytest.approx(1.5)
    engine.scored.clear()
    assert (await meter.measure(wish(1), [wish(1)], replies)).kl == pytest.approx(1.5)
    assert len(engine.scored) == 1  # each reply once
    meter.forget_all_but([wish(1)], replies[-1:])
    assert list(meter._far) == [replies[-1].sample.sample_id]


async def test_a_forgotten_prompt_is_left_out(bench, wish):
    meter, _, _, requests = bench
    requests.gone.add("turn-1-0")
    assert (await meter.measure(wish(1), [wish(1)], [])).share is None


async def test_texts_of_wishes_that_are_over_are_forgotten(bench, wish):
    meter, *_ = bench
    await meter.measure(wish(1), [wish(1)], [])
    assert meter._texts
    assert meter._plain
    meter.forget_all_but([wish(2)])
    assert not meter._texts
    assert not meter._plain


def test_prompts_held_back_come_first_then_own_ones_then_those_of_other_wishes(wish):
    many = wish(1, *[0] * 8)
    assert probe_turns(many, [many]) == ["turn-1-3", "turn-1-7"]
    one, other, foreign = wish(1), wish(2), wish(3, user="bob")
    assert probe_turns(one, [one, other, foreign]) == ["turn-1-0", "turn-2-0"]
    assert probe_turns(one, [one]) == ["turn-1-0"]
    assert len(probe_turns(many, [many])) == measuring.PROMPTS


def test_a_general_wish_is_measured_where_nobody_corrected_too(wish):
    assert probe_turns(wish(1, is_general=True), [], ["u1", "u2"]) == ["u1", "turn-1-0"]
    assert probe_turns(wish(1), [], ["u1", "u2"]) == ["turn-1-0"]
