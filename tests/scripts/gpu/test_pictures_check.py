"""The check of pictures passes on an exact engine, and finds each fault that it is made for."""

import asyncio

import pytest
from msgspec.structs import replace
from vision_engine import running_vision_engine

from gpu import pictures_check
from gpu.vision_model import vision_model
from openclaw_rl.models.vision import Vision


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = vision_model(tmp_path_factory.mktemp("vision"))
    with running_vision_engine(folder) as (engine, url):
        yield engine, url, folder


def run(engine):
    _, url, folder = engine
    return asyncio.run(pictures_check.check(folder, url, "cpu", "float32", 3))


def test_an_exact_engine_has_no_finding(engine) -> None:
    figures = run(engine)
    assert figures["findings"] == []
    assert max(figures["gaps"].values()) < 1e-4
    assert max(figures["gaps_under_adapter"].values()) < 1e-4
    assert max(figures["scores"].values()) < 1e-4
    assert len(figures["scores"]) == 7


def test_an_engine_that_counts_other_tokens_is_found(engine) -> None:
    engine[0].drift = 1
    try:
        findings = run(engine)["findings"]
    finally:
        engine[0].drift = 0
    assert any(line.startswith("PNG 320x240: ") for line in findings)
    assert any(line.startswith("pictures: engine and trainer differ") for line in findings)


def test_an_engine_that_drops_the_adapter_is_found(engine, monkeypatch) -> None:
    monkeypatch.setattr(engine[0].real, "add", lambda seed, folder: None)
    engine[0].real._adapted.clear()
    findings = run(engine)["findings"]
    assert [line.partition(":")[0] for line in findings] == ["texts under an adapter", "pictures under an adapter"]


@pytest.mark.parametrize("kind", ["picture", "video"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_reply_is_read_up_to_a_place_without_a_picture(engine, monkeypatch, kind: str, at: int) -> None:
    """Random weights sample such places, and no pass can read on there."""
    vision, generate = Vision.of(engine[2]), engine[0].generate
    (video,) = vision.reserved - {vision.placeholder}
    place = vision.placeholder if kind == "picture" else video
    asked: dict[str, int] = {}

    async def with_a_place(request):
        reply = await generate(request)
        prompt = str((request.input_ids, request.lora_path))
        asked[prompt] = asked.get(prompt, 0) + 1
        if request.logprob_start_len >= 0 or (at == 0 and asked[prompt] > 1):
            return reply
        ids = [place if number == at else token for number, token in enumerate(reply.output_ids)]
        return replace(reply, output_ids=ids)

    monkeypatch.setattr(engine[0], "generate", with_a_place)
    figures = run(engine)
    assert figures["findings"] == []
    assert set(asked.values()) >= {2 if at == 0 else 1}
