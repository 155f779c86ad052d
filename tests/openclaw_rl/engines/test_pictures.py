"""Scores of prompts with pictures over HTTP: ids and pictures as SGLang takes them, and each way to be wrong."""

import hashlib
import pickle

import pytest
from engine_client import served
from pictures import PictureEngine, opened, picture_file

from openclaw_rl.engines import score_answers
from openclaw_rl.engines.pictures import Album
from openclaw_rl.errors import AlignmentError, PicturesRefused
from openclaw_rl.models.vision import Vision
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.types.pictures import Picture, PromptIds, head, pictures_of, with_pictures

PAD = 7
VISION = Vision(PAD, frozenset({PAD}), factor=16, least_pixels=256, most_pixels=65536)
FILES = {
    "png": picture_file(32, 32, shade=1),
    "other": picture_file(32, 32, shade=2),
    "jpeg": picture_file(32, 48, shade=3, form="JPEG"),
    "webp": picture_file(16, 16, shade=4, form="WEBP", lossless=True),
}
SIZES = {"png": (32, 32), "other": (32, 32), "jpeg": (32, 48), "webp": (16, 16)}
REPLY = (301, 302, 303)


def shown(*names: str) -> PromptIds:
    """Return a prompt with these pictures, each between two marks, expanded."""
    ids, pictures = [300], []
    for name in names:
        pictures.append(Picture(hashlib.sha256(FILES[name]).hexdigest(), *SIZES[name]))
        ids += [8, *[PAD] * VISION.tokens(*SIZES[name]), 9]
    return PromptIds(ids, pictures)


@pytest.fixture
def album(tmp_path) -> Album:
    for data in FILES.values():
        (tmp_path / hashlib.sha256(data).hexdigest()).write_bytes(data)
    return Album(tmp_path, PAD)


async def test_a_score_sends_the_pictures_beside_one_placeholder_each(album) -> None:
    fake = PictureEngine(VISION, policy=ToyPolicy(mean_tokens=0))
    async with served(fake) as engine:
        engine.show(album)
        prompt = shown("jpeg", "webp", "jpeg", "png")
        score = await engine.score(prompt, REPLY, lora_path=None, extra_key="v0", top_k=2)
        (sent,) = fake.scored
        assert sent.input_ids == [300, *[8, PAD, 9] * 4, *REPLY]
        assert sent.logprob_start_len == len(prompt) - 1
        assert [opened(url).size for url in sent.image_data] == [(32, 48), (16, 16), (32, 48), (32, 32)]
        assert [url.partition(";")[0] for url in sent.image_data][:2] == ["data:image/png", "data:image/webp"]
        assert len(score.log_probs) == len(score.top_ids) == 3
        assert (await engine.score(prompt, REPLY, lora_path=None, extra_key="v0")).log_probs == score.log_probs
        other = shown("jpeg", "webp", "jpeg", "other")
        assert tuple(other) == tuple(prompt)
        assert (await engine.score(other, REPLY, lora_path=None, extra_key="v0")).log_probs != score.log_probs


async def test_given_ids_are_scored_in_blocks_behind_the_pictures(album, monkeypatch) -> None:
    monkeypatch.setattr(score_answers, "BLOCK_VALUES", 3)
    fake = PictureEngine(VISION, policy=ToyPolicy(mean_tokens=0))
    async with served(fake) as engine:
        engine.show(album)
        prompt = shown("png", "webp")
        table = await engine.score_ids(prompt, REPLY, [(400, 401)] * 3, lora_path=None, extra_key="v0")
        assert [len(sent.image_data) for sent in fake.scored] == [2, 2, 2]
        assert [sent.input_ids[-1] for sent in fake.scored] == list(REPLY)
        whole = await engine.score(prompt, REPLY, lora_path=None, extra_key="v0")
        assert table.log_probs == whole.log_probs


async def test_a_prompt_that_the_engine_reads_otherwise_has_no_score(album) -> None:
    fake = PictureEngine(VISION, policy=ToyPolicy(mean_tokens=0))
    async with served(fake) as engine:
        with pytest.raises(PicturesRefused, match="shown no pictures"):
            await engine.score(shown("png"), REPLY, lora_path=None, extra_key=None)
        engine.show(album)
        for call in (
            engine.score(tuple(shown("png")), REPLY, lora_path=None, extra_key=None),
            engine.score_ids(tuple(shown("png")), REPLY, [(400,)] * 3, lora_path=None, extra_key=None),
        ):
            with pytest.raises(PicturesRefused, match="has no picture"):
                await call
        assert fake.scored == [], "a prompt that lost its pictures reaches no engine"
        fake.drift = 1
        for call in (
            engine.score(shown("png"), REPLY, lora_path=None, extra_key=None),
            engine.score_ids(shown("png"), REPLY, [(400,)] * 3, lora_path=None, extra_key=None),
        ):
            with pytest.raises(AlignmentError, match="the engine reads 11 tokens"):
                await call


async def test_a_forgotten_picture_is_told(album, tmp_path) -> None:
    async with served(PictureEngine(VISION)) as engine:
        engine.show(album)
        prompt = shown("png")
        (tmp_path / prompt.pictures[0].digest).unlink()
        with pytest.raises(AlignmentError, match="is not here"):
            await engine.score(prompt, REPLY, lora_path=None, extra_key=None)
        assert await album.read(prompt.pictures[0], 9999) is None
        with pytest.raises(AlignmentError, match="1 pictures, and 0 places"):
            await engine.score(PromptIds((300,), shown("webp").pictures), REPLY, lora_path=None, extra_key=None)


async def test_a_file_of_other_bytes_is_no_picture(album, tmp_path) -> None:
    picture = shown("png").pictures[0]
    (tmp_path / picture.digest).write_bytes(bytes(len(FILES["png"])))
    assert await album.read(picture, 9999) is None
    with pytest.raises(AlignmentError, match="is not here"):
        await album.shown(shown("png"))


@pytest.mark.parametrize("name", ["../../etc/passwd", "a" * 63, "g" * 64, "a" * 62 + "/.", ""])
async def test_a_name_that_is_no_digest_opens_no_file(album, name) -> None:
    assert await album.read(Picture(name, 1, 1), 9999) is None


def test_ids_with_pictures_are_other_ids() -> None:
    one, other, text = shown("png"), shown("other"), tuple(shown("png"))
    assert one == shown("png") != other
    assert one != text
    assert text != one
    assert len({one, other, text, shown("png")}) == 3
    assert pickle.loads(pickle.dumps(one)) == one
    assert with_pictures(text, ()) is text
    assert head(one, -1) == PromptIds(text[:-1], one.pictures)
    assert type(head(text, -1)) is type(one[:-1]) is tuple
    assert pictures_of(text) == ()
    for other in (None, 5, [*text], "text"):
        assert one != other
        assert one.__eq__(other) is one.__ne__(other) is NotImplemented
