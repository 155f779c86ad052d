"""Replies to prompts with pictures at the gate."""

import hashlib
from collections.abc import Sequence

import pytest
from pictures import picture_file
from publishing import PROMPT, REPLY, World, publish
from turns import make_request, make_turn, serve_turn

from openclaw_rl.engines.base import Score
from openclaw_rl.errors import AlignmentError, EngineError, EngineRefused
from openclaw_rl.publishing.gate import Gate
from openclaw_rl.publishing.reply_scores import Remembered, affordable
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.testing import FakeEngine
from openclaw_rl.types import Ids
from openclaw_rl.types.pictures import Picture, PromptIds, pictures_of

ONE, TWO = Picture("a1" * 32, 32, 32), Picture("b2" * 32, 32, 32)


def seeing(length: int, picture: Picture = ONE) -> PromptIds:
    return PromptIds(range(length), (picture,))


async def test_figures_of_another_picture_of_one_size_are_others() -> None:
    remembered = Remembered()
    asked = []

    async def score(number, prompt, ids):
        asked.append(prompt)
        return (-1.0,)

    for prompt in (seeing(5), seeing(5, TWO), tuple(range(5)), seeing(5)):
        await remembered.of(1, prompt, (9,), score)
    assert asked == [seeing(5), seeing(5, TWO), tuple(range(5))]


def test_the_gate_reads_replies_of_both_kinds() -> None:
    texts = [(tuple(range(n)), (1, 2, 3)) for n in (4, 3, 2)]
    pictures = [(seeing(n), (1, 2, 3)) for n in (60, 50)]
    settings = PublisherSettings(gate_replies=4, gate_prompt_tokens=70, gate_tokens=2)
    kept = affordable([*texts, *pictures], settings)
    assert [len(prompt) for prompt, _ in kept] == [2, 50, 3, 4]
    assert all(ids == (1, 2) for _, ids in kept)
    assert kept[1][0] == seeing(50)
    assert [len(prompt) for prompt, _ in affordable(texts, settings)] == [2, 3, 4]
    assert affordable(pictures[:1], settings.model_copy(update={"gate_prompt_tokens": 5})) == [(seeing(60), (1, 2))]


def test_a_prompt_past_the_budget_takes_no_place_of_a_shorter_one() -> None:
    texts = [(tuple(range(n)), (1,)) for n in (2, 3, 4)]
    settings = PublisherSettings(gate_replies=3, gate_prompt_tokens=20)
    kept = affordable([*texts, (seeing(60), (1,)), (seeing(70), (1,))], settings)
    assert [len(prompt) for prompt, _ in kept] == [2, 3, 4]


class Blind(FakeEngine):
    """An engine that fails for a prompt with pictures."""

    def __init__(self, error: EngineError | AlignmentError) -> None:
        super().__init__()
        self.error, self.asked = error, 0

    async def score(self, prompt_ids: Ids, response_ids: Ids, **how) -> Score:
        if pictures_of(prompt_ids):
            self.asked += 1
            raise self.error
        return await super().score(prompt_ids, response_ids, **how)


async def with_picture(world: World, error: EngineError | AlignmentError) -> Blind:
    """Store a turn with a picture, whose prompt this world's engine then fails for."""
    data = picture_file()
    picture = Picture(hashlib.sha256(data).hexdigest(), 32, 24, data)
    request = make_request("seen", session="seen", prompt=PromptIds((1, 5), (picture,)), pictures=(picture,))
    await serve_turn(world.ledger, request, make_turn("seen", ids=REPLY))
    engine = Blind(error)
    engine.policy, engine.adapters, engine.folders = world.engine.policy, world.engine.adapters, world.engine.folders
    return engine


FAILS = (EngineRefused("no picture fits", status=400), AlignmentError("picture of the prompt is not here"))


@pytest.mark.parametrize("error", FAILS, ids=["refused", "gone"])
@pytest.mark.parametrize("has_probe", [True, False])
async def test_a_picture_that_the_engine_cannot_get_stops_no_version(
    world: World, error, has_probe, monkeypatch
) -> None:
    engine = await with_picture(world, error)
    monkeypatch.setattr(world.engine, "score", engine.score)
    number = await world.commit(sampled_by=0, has_probe=has_probe)
    await publish(world, number)
    assert engine.asked > 0
    assert world.health.counts["gate_pictures_left_out"] > 0
    assert world.publisher.last_gate.step_kl is not None, "the text counts"


@pytest.mark.parametrize("error", FAILS, ids=["refused", "gone"])
async def test_full_weights_are_tested_on_texts_where_pictures_fail(full_world: World, error, monkeypatch) -> None:
    engine = await with_picture(full_world, error)
    monkeypatch.setattr(full_world.engine, "score", engine.score)
    await publish(full_world, await full_world.commit_full())
    assert engine.asked > 0
    assert full_world.publisher.last_gate.step_kl is not None


async def test_with_pictures_alone_that_fail_nothing_is_measured(world: World) -> None:
    engine = await with_picture(world, FAILS[0])
    asked: list[Ids] = []

    async def score(number: int, prompt_ids: Ids, ids: Ids, user: str | None = None) -> Sequence[float]:
        asked.append(prompt_ids)
        return (await engine.score(prompt_ids, ids, lora_path=None, extra_key=None)).log_probs

    gate = Gate(world.ledger, world.serving, score, PublisherSettings(), health=world.health)
    await gate.needs_numbers([])
    assert await gate.self_test(1, []) is None
    await gate.prepare(0)
    assert asked
    assert all(pictures_of(prompt) for prompt in asked)
    await world.sampled(0)
    asked.clear()
    await gate.needs_numbers([])
    assert asked == [PROMPT], "a text before a picture"
