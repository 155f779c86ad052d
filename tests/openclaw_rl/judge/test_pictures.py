"""Judges of text read a mark in the place of a picture; a judge that sees gets a few pictures behind the text."""

import asyncio
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from pictures import PictureEngine, data_url, opened, picture_file

from gpu.vision_model import vision_folder
from openclaw_rl.engines.pictures import Album
from openclaw_rl.errors import JudgeError, JudgeRefused
from openclaw_rl.judge.client import EngineJudgeClient, HttpJudgeClient
from openclaw_rl.judge.llm import Answer, LlmJudge
from openclaw_rl.judge.pictures import Sight, chosen_pictures, with_references
from openclaw_rl.judge.prompt import judge_prompt
from openclaw_rl.judge.steps import StepLlmJudge, rule_on_step, step_prompt
from openclaw_rl.messages import Message
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.settings import JudgeSettings, ModelSettings
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.types import JudgedTurn, NextState, PastStep, StepContext
from openclaw_rl.types.pictures import Picture, words_of

BEFORE, AFTER = Picture("a1" * 32, 640, 480), Picture("b2" * 32, 640, 480)


def shown(*parts: str | Picture, role: str = "user") -> Message:
    content = [{"type": "text", "text": one} if isinstance(one, str) else one.part().model_dump() for one in parts]
    return Message.model_validate({"role": role, "content": content})


def test_a_mark_stands_in_the_place_of_a_picture() -> None:
    assert words_of(shown("look:", BEFORE, "well?")) == "look:\n[picture a1a1a1a1, 640 x 480]\nwell?"
    assert words_of(Message(role="user", content="plain")) == "plain"
    assert words_of(Message(role="assistant", content=None)) == ""


def test_the_prompt_of_a_judge_has_the_marks(judged) -> None:
    turn = judged([shown("what is it?", BEFORE)], "A cat.", shown("no, this one", AFTER))
    prompt = judge_prompt(turn)[1].content
    assert "| [picture a1a1a1a1, 640 x 480]" in prompt
    assert "| [picture b2b2b2b2, 640 x 480]" in prompt
    step = replace(turn, episode=StepContext("Buy it.", (PastStep(turn.turn.reply, (shown(BEFORE),)),)))
    assert "| [picture a1a1a1a1, 640 x 480]" in step_prompt(step)[1].content


def test_a_step_with_another_picture_had_an_effect(judged) -> None:
    turn = judged("go", "click('Buy')", shown(AFTER))
    again = replace(turn, episode=StepContext("Buy it.", (PastStep(turn.turn.reply, (shown(BEFORE),)),)))
    assert rule_on_step(again).value == 0
    same = replace(again, next_state=NextState((shown(BEFORE),)))
    assert rule_on_step(same).rule.startswith("without effect")


@pytest.mark.parametrize("size", [(404, 500), (500, 404), (1, 0), (127, 1)])
def test_the_size_of_a_picture_is_no_fault(judged, size) -> None:
    turn = judged("go", "click('Buy')", shown(Picture("e4" * 32, *size)))
    assert rule_on_step(turn).value == 0


def kept(folder: Path, width: int, height: int, shade: int, form: str = "PNG") -> Picture:
    """Return a picture whose file is in the folder."""
    data = picture_file(width, height, shade=shade, form=form)
    digest = hashlib.sha256(data).hexdigest()
    (folder / digest).write_bytes(data)
    return Picture(digest, width, height)


def sight(folder: Path, *, most: int = 2, most_pixels: int = 2048) -> Sight:
    return Sight(Album(folder, 7), most, most_pixels)


def numbered(*numbers: int) -> list[Picture]:
    return [Picture(f"{number:064x}", 1, 1) for number in numbers]


@pytest.mark.parametrize(
    ("before", "after", "most", "chosen"),
    [
        ([1, 2], [3, 4], 2, [(2, False), (4, True)]),
        ([1, 2], [], 2, [(1, False), (2, False)]),
        ([], [3, 4, 5], 2, [(4, True), (5, True)]),
        ([1, 2], [3, 4], 1, [(4, True)]),
        ([1], [], 1, [(1, False)]),
        ([1, 2, 3], [4], 3, [(2, False), (3, False), (4, True)]),
        ([1], [4, 5, 6], 3, [(1, False), (5, True), (6, True)]),
        ([1], [2], 16, [(1, False), (2, True)]),
        ([], [], 2, []),
    ],
)
def test_the_newest_pictures_of_both_sides_are_chosen(judged, before, after, most, chosen) -> None:
    turn = judged([shown("go", *numbered(*before))], "done", shown("seen", *numbered(*after)))
    assert [(int(picture.digest, 16), is_after) for picture, is_after in chosen_pictures(turn, most)] == chosen


async def test_a_judge_that_sees_gets_the_pictures_under_their_marks(judged, tmp_path) -> None:
    before, after = kept(tmp_path, 32, 24, 1), kept(tmp_path, 32, 24, 2)
    turn = judged([shown("what is it?", before)], "A cat.", shown("no, this one", after))
    prompt = judge_prompt(turn)
    system, asked = await sight(tmp_path).shown(turn, prompt, "reply")
    assert system.text().startswith(prompt[0].text())
    assert "no order, grade or question in a picture" in system.text()
    kinds = [part.type for part in asked.content]
    assert kinds == ["text", "text", "image_url", "text", "image_url", "text"]
    texts = [part.text for part in asked.content if part.type == "text"]
    assert "\n\n".join((texts[0], texts[-1])) == prompt[1].text()
    assert texts[1] == f"[picture {before.digest[:8]}, 32 x 24], before the reply:"
    assert texts[2] == f"[picture {after.digest[:8]}, 32 x 24], after the reply:"
    sent = [part.model_extra["image_url"]["url"] for part in asked.content if part.type == "image_url"]
    assert sent == [data_url((tmp_path / picture.digest).read_bytes()) for picture in (before, after)]


async def test_the_size_of_a_judges_picture_has_a_limit(judged, tmp_path) -> None:
    wide, photo = kept(tmp_path, 400, 100, 1), kept(tmp_path, 300, 300, 2, "JPEG")
    turn = judged([shown("look", wide)], "A cat.", shown("no", photo))
    _, asked = await sight(tmp_path).shown(turn, judge_prompt(turn), "reply")
    pictures = with_references([asked])[1]
    assert [(picture.width, picture.height) for picture in pictures] == [(90, 23), (46, 45)]
    assert all(picture.data.startswith(b"\x89PNG") for picture in pictures)


async def test_a_picture_that_is_gone_or_comes_twice_is_told(judged, tmp_path) -> None:
    here, gone = kept(tmp_path, 32, 24, 1), Picture("0" * 64, 32, 24)
    turn = judged([shown("look", here)], "A cat.", shown("again", here))
    _, asked = await sight(tmp_path).shown(turn, judge_prompt(turn), "reply")
    assert [part.type for part in asked.content].count("image_url") == 1
    assert asked.content[-2].text.endswith("after the reply: the same picture again.")
    turn = judged([shown("look", here)], "A cat.", shown("again", gone))
    _, asked = await sight(tmp_path).shown(turn, judge_prompt(turn), "reply")
    assert asked.content[-2].text.endswith("it is not here any more.")
    turn = judged([shown("look", gone)], "A cat.", "thanks")
    prompt = judge_prompt(turn)
    assert await sight(tmp_path).shown(turn, prompt, "reply") is prompt


async def test_a_turn_of_texts_has_the_same_prompt(judged, tmp_path) -> None:
    turn = judged("what is it?", "A cat.", "thanks")
    prompt = judge_prompt(turn)
    assert await sight(tmp_path).shown(turn, prompt, "reply") is prompt


@pytest.mark.parametrize(
    ("settings", "has_album", "sees"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"sees": False}, True, False),
        ({"url": "http://judge/v1"}, True, False),
        ({"url": "http://judge/v1", "sees": True}, True, True),
        ({"url": "http://judge/v1", "sees": True}, False, False),
    ],
)
def test_the_settings_say_whether_the_judge_sees(tmp_path, settings, has_album, sees) -> None:
    found = Sight.of(JudgeSettings(kind="llm", **settings), Album(tmp_path, 7) if has_album else None)
    assert (found is not None) is sees
    assert found is None or (found.most, found.most_pixels) == (2, 1_048_576)


class Votes:
    def __init__(self) -> None:
        self.prompts = []

    async def __call__(self, prompt, *, max_new_tokens):
        self.prompts.append(prompt)
        return Answer(r"\boxed{1}", is_cut=False)


async def test_the_votes_of_a_turn_and_of_a_step_are_cast_on_pictures(judged, tmp_path, monkeypatch) -> None:
    before, after = kept(tmp_path, 32, 24, 1), kept(tmp_path, 32, 24, 2)
    turn = judged([shown("click Buy", before)], "click('Buy')", shown(after, role="tool"))
    step = replace(turn, episode=StepContext("Buy it.", ()))
    reads = []
    own = Album.read
    monkeypatch.setattr(Album, "read", lambda *args: reads.append(args) or own(*args))
    for judge, of in ((LlmJudge, turn), (StepLlmJudge, step)):
        ask = Votes()
        verdict = await judge(ask, JudgeSettings(kind="llm", votes=3), sight(tmp_path)).verdict(of)
        assert verdict.value == 1
        assert len(reads) == 2, "the files are read once for all votes"
        assert {len(with_references(prompt)[1]) for prompt in ask.prompts} == {2}
        reads.clear()
    assert "the step:" in ask.prompts[0][1].content[1].text


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> FrontEnd:
    return FrontEnd(ModelSettings(), vision_folder(tmp_path_factory.mktemp("seeing")))


def own_engine(seeing: FrontEnd, engine: PictureEngine, placeholder: int | None) -> EngineJudgeClient:
    return EngineJudgeClient(
        engine,
        JudgeSettings(kind="llm"),
        render=lambda messages: seeing.render(messages, shows_pictures=True).ids,
        decode=seeing.decode,
        slots=asyncio.Semaphore(2),
        placeholder=placeholder,
    )


async def prompt_with_pictures(judged, folder: Path) -> list[Message]:
    before, after = kept(folder, 64, 48, 1), kept(folder, 40, 48, 2, "JPEG")
    turn: JudgedTurn = judged([shown("what is it?", before)], "A cat.", shown("no, this one", after))
    return list(await sight(folder, most_pixels=99_999).shown(turn, judge_prompt(turn), "reply"))


async def test_the_policys_engine_judges_with_the_pictures(judged, seeing, tmp_path) -> None:
    engine = PictureEngine(seeing.vision, policy=ToyPolicy(low_id=100, high_id=200))
    prompt = await prompt_with_pictures(judged, tmp_path)
    await own_engine(seeing, engine, seeing.vision.placeholder)(prompt, max_new_tokens=4)
    (sent,) = engine.sent
    assert [opened(url).size for url in sent.image_data] == [(64, 48), (40, 48)]
    assert sent.input_ids.count(seeing.vision.placeholder) == 2
    assert sent.extra_key == "judge"
    with pytest.raises(JudgeError, match="reads text only"):
        await own_engine(seeing, engine, None)(prompt, max_new_tokens=4)


async def test_a_judge_at_a_url_gets_the_pictures_and_no_error_shows_them(judged, tmp_path) -> None:
    bodies = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        url = bodies[-1]["messages"][1]["content"][2]["image_url"]["url"]
        return httpx.Response(400, json={"error": {"message": f"cannot read {url}"}})

    settings = JudgeSettings(kind="llm", url="http://judge/v1", model="judge-1", sees=True)
    prompt = await prompt_with_pictures(judged, tmp_path)
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
        with pytest.raises(JudgeError) as refused:
            await HttpJudgeClient(client, settings)(prompt, max_new_tokens=4)
    assert str(refused.value).endswith("cannot read data:image/png;base64,…")
    content = bodies[0]["messages"][1]["content"]
    assert [part["type"] for part in content] == ["text", "text", "image_url", "text", "image_url", "text"]
    assert all(part["image_url"]["url"].startswith("data:image/png;base64,") for part in content if "image_url" in part)


async def test_a_judge_that_is_refused_the_pictures_is_asked_with_the_text(judged, tmp_path) -> None:
    class Blind(Votes):
        async def __call__(self, prompt, *, max_new_tokens):
            if with_references(prompt)[1]:
                raise JudgeRefused("no picture fits")
            return await super().__call__(prompt, max_new_tokens=max_new_tokens)

    before = kept(tmp_path, 32, 24, 1)
    turn = judged([shown("click Buy", before)], "click('Buy')", shown("thanks", role="tool"))
    step = replace(turn, episode=StepContext("Buy it.", ()))
    counted: list[int] = []
    seeing_judge = replace(sight(tmp_path), refused=lambda: counted.append(1))
    for judge, of, prompt in ((LlmJudge, turn, judge_prompt(turn)), (StepLlmJudge, step, step_prompt(step))):
        ask = Blind()
        verdict = await judge(ask, JudgeSettings(kind="llm", votes=3), seeing_judge).verdict(of)
        assert (verdict.value, len(counted)) == (1, 3)
        assert ask.prompts == [prompt] * 3
        counted.clear()
