"""Scores of prompts with pictures over HTTP: ids and pictures as SGLang takes them, and each way to be wrong."""

import asyncio
import gc
import hashlib
import pickle

import pytest
from engine_client import SETTINGS, collect, raw_server, request, served
from pictures import PictureEngine, opened, picture_file

from openclaw_rl.engines import event_stream, pictures, score_answers
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.pictures import Album, PicturePrompt, PictureUrls
from openclaw_rl.errors import AlignmentError, EngineGone, EngineRefused, PicturesRefused
from openclaw_rl.models.picture_memory import PictureMemory
from openclaw_rl.models.vision import Vision
from openclaw_rl.settings import PictureSettings
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
    ids, found = [300], []
    for name in names:
        found.append(Picture(hashlib.sha256(FILES[name]).hexdigest(), *SIZES[name]))
        ids += [8, *[PAD] * VISION.tokens(*SIZES[name]), 9]
    return PromptIds(ids, found)


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


@pytest.fixture
def made_pngs(monkeypatch) -> list[int]:
    """Sizes of the JPEGs that were written as PNGs."""
    made: list[int] = []
    own = pictures.as_png

    def as_png(data, size):
        made.append(len(data))
        return own(data, size)

    monkeypatch.setattr(pictures, "as_png", as_png)
    return made


async def test_a_chats_pictures_are_written_one_by_one_and_a_jpeg_that_comes_twice_once(made_pngs) -> None:
    memory = PictureMemory(PictureSettings())
    fake = PictureEngine(VISION, policy=ToyPolicy(mean_tokens=0))
    names = ("jpeg", "png", "jpeg", "webp")
    own = [Picture(hashlib.sha256(FILES[name]).hexdigest(), *SIZES[name], FILES[name]) for name in names]
    async with served(fake) as engine:
        shown_prompt = PicturePrompt.of(shown(*names), PictureUrls(own, memory), PAD)
        body = request(list(shown_prompt.ids), n=2).model_copy(update={"image_data": shown_prompt.image_data})
        assert await collect(engine, body)
        (sent,) = fake.sent
        assert made_pngs == [len(FILES["jpeg"])]
        assert sent.image_data == list(shown_prompt.image_data)
        assert [opened(url).size for url in sent.image_data] == [SIZES[name] for name in names]
    gc.collect()
    while memory._files:
        await asyncio.sleep(0)
    assert memory._work == 0


async def test_a_score_decodes_a_picture_once_for_all_its_requests(album, monkeypatch, made_pngs) -> None:
    monkeypatch.setattr(score_answers, "BLOCK_VALUES", 3)
    fake = PictureEngine(VISION, policy=ToyPolicy(mean_tokens=0))
    async with served(fake) as engine:
        engine.show(album)
        await engine.score_ids(shown("jpeg", "jpeg"), REPLY, [(400, 401)] * 3, lora_path=None, extra_key="v0")
        assert [len(sent.image_data) for sent in fake.scored] == [2, 2, 2]
        assert len(made_pngs) == 1
        first = await album.shown(shown("jpeg"))
        assert [url async for url in first.image_data.made()]
        second = await album.shown(shown("jpeg", "png"))
        assert len([url async for url in second.image_data.made()]) == 2
        assert len(made_pngs) == 2, "the second prompt takes what the first has made"
        del first, second
    gc.collect()
    assert not album._made, "nothing outlasts the prompts that show it"
    while album.memory._files:
        await asyncio.sleep(0)


async def test_without_room_to_keep_it_a_picture_is_made_again(album, monkeypatch, made_pngs) -> None:
    monkeypatch.setattr(album.memory, "keep", lambda _: None)
    prompt = await album.shown(shown("jpeg", "jpeg"))
    urls = [url async for url in prompt.image_data.made()]
    assert urls[0] == urls[1]
    assert len(made_pngs) == 2


async def test_a_picture_that_is_forgotten_as_it_is_sent_ends_the_call(album, tmp_path) -> None:
    async with served(PictureEngine(VISION)) as engine:
        engine.show(album)
        prompt = await album.shown(shown("png"))
        (tmp_path / shown("png").pictures[0].digest).unlink()
        body = request(list(prompt.ids)).model_copy(update={"image_data": prompt.image_data})
        with pytest.raises(EngineRefused, match="is not here"):
            await collect(engine, body)
        with pytest.raises(AlignmentError, match="is not here"):
            await engine.generate(body)
        assert (album.memory._work, album.memory._files) == (0, 0)


def large(memory: PictureMemory) -> PictureUrls:
    """Return a picture that is larger than all buffers on the way."""
    return PictureUrls([Picture("0" * 64, 9, 9, b"RIFF" + bytes(2**24))], memory)


async def test_an_engine_that_takes_no_byte_is_gone(monkeypatch) -> None:
    monkeypatch.setattr(event_stream, "TAKES_S", 0.05)
    is_over = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()
        await is_over.wait()
        writer.close()

    memory = PictureMemory(PictureSettings())
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    engine = HttpEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", settings=SETTINGS)
    try:
        with pytest.raises(EngineGone, match="took no byte"):
            await collect(engine, request([1, PAD]).model_copy(update={"image_data": large(memory), "rid": None}))
        assert memory._work == 0
    finally:
        is_over.set()
        await engine.aclose()
        server.close()


async def test_an_engine_may_refuse_before_it_has_the_whole_body() -> None:
    words = b'{"error": {"message": "too large"}}'
    answer = b"HTTP/1.1 413 X\r\ncontent-length: %d\r\n\r\n%b" % (len(words), words)
    memory = PictureMemory(PictureSettings())
    async with raw_server(answer, then_hang=True) as engine:
        with pytest.raises(EngineRefused, match="too large"):
            await collect(engine, request([1, PAD]).model_copy(update={"image_data": large(memory), "rid": None}))
    assert memory._work == 0


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
