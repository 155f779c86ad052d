"""The number of a picture's tokens, beside transformers' own processor."""

import json
import random

import pytest

from gpu.vision_model import MERGE, vision_folder
from openclaw_rl.errors import RequestError, SettingsError
from openclaw_rl.models.vision import Vision
from openclaw_rl.types.pictures import Picture


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return vision_folder(tmp_path_factory.mktemp("vision"))


def sizes():
    rng = random.Random(0)
    fixed = [(1, 1), (3, 3), (4, 4), (8, 8), (12, 12), (20, 20), (640, 480), (1920, 1080), (1080, 1920), (8, 1600)]
    return fixed + [(rng.randint(5, 900), rng.randint(5, 900)) for _ in range(300)]


@pytest.mark.parametrize(("least", "most"), [(256, 2304), (65536, 16777216), (3136, 1003520)])
def test_a_picture_has_as_many_tokens_as_the_processor_writes(folder, least, most) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    processor.size = {"shortest_edge": least, "longest_edge": most}
    vision = Vision(0, frozenset({0}), factor=8, least_pixels=least, most_pixels=most)
    for width, height in sizes():
        theirs = processor.get_number_of_image_patches(height, width) // MERGE**2
        assert vision.tokens(width, height) == theirs, (width, height)


def test_the_files_of_a_model_say_how_it_reads(folder, tmp_path) -> None:
    config = json.loads((folder / "config.json").read_text())
    vision = Vision.of(folder)
    assert vision.placeholder == config["image_token_id"]
    assert vision.reserved == {config["image_token_id"], config["video_token_id"]}
    assert (vision.factor, vision.least_pixels, vision.most_pixels) == (8, 256, 2304)
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["OtherVL"]}))
    with pytest.raises(SettingsError, match=r"does not know \(OtherVL\)"):
        Vision.of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingsError, match="do not say how it reads"):
        Vision.of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(SettingsError, match="reads text only"):
        Vision.of(tmp_path)


def test_placeholders_become_as_many_as_a_picture_has_tokens() -> None:
    vision = Vision(9, frozenset({9}), factor=8, least_pixels=256, most_pixels=2304)
    wide, small = Picture("a" * 64, 32, 16), Picture("b" * 64, 16, 16)
    assert vision.expanded((1, 9, 2, 9, 3), (wide, small)) == (1, *[9] * 8, 2, *[9] * 4, 3)
    with pytest.raises(RequestError, match="shows 1 of the 2 pictures"):
        vision.expanded((1, 9), (wide, small))
    with pytest.raises(RequestError, match="200 times"):
        vision.expanded((9,), (Picture("c" * 64, 2010, 10),))
