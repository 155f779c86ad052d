"""Practice on prompts with pictures: the policy answers anew with them, and measures are taken behind them."""

import hashlib
from dataclasses import replace

import pytest
from engine_client import served
from pictures import PictureEngine, opened, picture_file
from practice_bench import Characters, render
from practising import practice, sample_of

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.pictures import Album
from openclaw_rl.errors import AlignmentError
from openclaw_rl.messages import Message
from openclaw_rl.models.vision import Vision
from openclaw_rl.practice.measuring import KL_REPLIES, Meter, Reading
from openclaw_rl.practice.sampling import ReplySampler, base_reply
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.types import Request, SamplingParams, Scope
from openclaw_rl.types.pictures import Picture, PromptIds

PAD = 7
VISION = Vision(PAD, frozenset({PAD}), factor=16, least_pixels=256, most_pixels=65536)


@pytest.fixture
def picture(tmp_path) -> Picture:
    data = picture_file(32, 32)
    digest = hashlib.sha256(data).hexdigest()
    (tmp_path / digest).write_bytes(data)
    return Picture(digest, 32, 32)


@pytest.fixture
def engine() -> PictureEngine:
    return PictureEngine(VISION, policy=ToyPolicy(mean_tokens=0))


def sampler(engine: PictureEngine, album: Album | None) -> ReplySampler:
    serving = VersionAdmission(5)
    serving.switch(0, None)
    return ReplySampler(engine, serving, Characters(), render, 8192, 8, SamplingParams(8), lambda: 1.0, album)


def asked(picture: Picture) -> Request:
    said = Message.model_validate({"role": "user", "content": [picture.part().model_dump()]})
    ids = PromptIds((300, *[PAD] * VISION.tokens(32, 32), 301), (picture,))
    return Request("r", Scope("ann", "s"), 1.0, (said,), None, None, ids, SamplingParams(8), pictures=(picture,))


async def test_a_new_reply_is_sampled_with_the_pictures(engine, picture, tmp_path) -> None:
    practice = sampler(engine, Album(tmp_path, PAD))
    request = asked(picture)
    assert practice.is_fit(request)
    judged = await practice.reply(request)
    (sent,) = engine.sent
    assert sent.input_ids == [300, PAD, 301]
    assert [opened(url).size for url in sent.image_data] == [(32, 32)]
    assert judged.request.prompt_ids == request.prompt_ids
    assert len(judged.turn.response_ids) == 8
    engine.drift = 1
    assert await practice.reply(request) is None, "the engine read another prompt"
    (tmp_path / picture.digest).unlink()
    assert await practice.reply(request) is None, "the picture was forgotten"


async def test_a_prompt_with_pictures_is_not_practised_where_no_trainer_takes_it(engine, picture) -> None:
    assert not sampler(engine, None).is_fit(asked(picture))


async def test_the_bases_fixed_text_is_sampled_with_the_pictures(engine, picture, tmp_path) -> None:
    how = {"end_ids": [2], "max_tokens": 4, "temperature": 1.0, "seed": 1, "album": Album(tmp_path, PAD)}
    prompt = asked(picture).prompt_ids
    assert len(await base_reply(engine, prompt, **how)) == 4
    assert len(engine.sent[0].image_data) == 1
    (tmp_path / picture.digest).unlink()
    with pytest.raises(AlignmentError, match="is not here"):
        await base_reply(engine, prompt, **how)


async def test_the_distance_from_the_base_is_measured_with_the_pictures(engine, picture, tmp_path) -> None:
    request = asked(picture)
    replies = []
    for place in range(KL_REPLIES):
        # A sample that comes from the ledger has plain ids.
        sample = sample_of(f"t{place}", (301, 302, 303, 304), tuple(request.prompt_ids))
        replies.append(replace(practice("t", 1), request=request, sample=sample))
    async with served(engine) as base:
        base.show(Album(tmp_path, PAD))
        meter = Meter(Requests(request), base, VersionAdmission(5), Characters(), render, base=base)
        assert (await meter._kl(replies)) is not None
    assert [len(sent.image_data) for sent in engine.scored] == [1] * KL_REPLIES


async def test_a_prompt_whose_pictures_fail_stops_no_measure(engine, picture, tmp_path, wish) -> None:
    requests = Requests(asked(picture))
    serving = VersionAdmission(hold_s=1.0)
    engine.adapters["policy-v3"] = 3
    serving.switch(3, "policy-v3")
    async with served(engine) as base:
        base.show(Album(tmp_path, PAD))
        engine.drift = 1
        meter = Meter(requests, base, serving, Characters(), render, reading=Reading(album=Album(tmp_path, PAD)))
        assert (await meter.measure(wish(1), [wish(1)], [])).share is None
        count = requests.count
        assert (await meter.measure(wish(1), [wish(1)], [])).share is None
        assert requests.count == count, "it is remembered"
        sample = sample_of("t", (301, 302), tuple(requests.request.prompt_ids))
        replies = [replace(practice("t", 1), request=requests.request, sample=sample)] * KL_REPLIES
        assert (await meter.measure(wish(1), [wish(1)], replies)).kl is None


class Requests:
    def __init__(self, request: Request) -> None:
        self.request, self.count = request, 0

    async def practice_request(self, turn_id: str) -> Request | None:
        self.count += 1
        return self.request
