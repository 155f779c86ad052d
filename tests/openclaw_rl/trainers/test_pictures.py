"""The trainer on prompts with pictures: a random Qwen3-VL, beside transformers' plain forward pass."""

import copy
import hashlib
from dataclasses import replace

import pytest
import torch
from pictures import picture_file
from PIL import Image
from transformers import AutoImageProcessor, Qwen3VLForConditionalGeneration

from gpu.vision_model import vision_model
from openclaw_rl.errors import SettingsError
from openclaw_rl.messages import Message
from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.models.resolve import ResolvedModel
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.settings import ModelSettings, TrainerSettings
from openclaw_rl.trainers import base_model
from openclaw_rl.trainers.base import Step
from openclaw_rl.trainers.batches import rows_of
from openclaw_rl.trainers.learner import LocalLearner, probe_rows
from openclaw_rl.types import DropReason, Sample, VersionRun, WeightKind
from openclaw_rl.types.pictures import Picture

SETTINGS = TrainerSettings(rank=2, alpha=8, learning_rate=2e-2, micro_batch_tokens=512, max_tokens=512)
TOLERANCE = 1e-4
"""Nats between two fp32 passes of one model, as of the text path."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Return the folder of two pictures, and their references."""
    folder = tmp_path_factory.mktemp("pictures")
    found = []
    for shade, (width, height) in ((0, (32, 24)), (150, (40, 48))):
        data = picture_file(width, height, shade=shade)
        found.append(Picture(hashlib.sha256(data).hexdigest(), width, height))
        (folder / found[-1].digest).write_bytes(data)
    return folder, tuple(found)


@pytest.fixture(scope="module")
def frontend(model):
    return FrontEnd(ModelSettings(), model)


@pytest.fixture
def make_policy(model, pictures):
    def make(settings=SETTINGS, folder=pictures[0]):
        resolved = ResolvedModel("vision", model, model / "hash")
        policy = base_model.make_policy(WeightKind.LORA, resolved, settings, folder)
        policy.reset(0)
        return policy

    return make


def sample(frontend, name, text, shown, reply=(40, 41, 42), **more) -> Sample:
    parts = [{"type": "text", "text": text}, *(one.part().model_dump() for one in shown)]
    said = Message.model_validate({"role": "user", "content": parts})
    rendered = frontend.render([said], shows_pictures=True)
    fields = {"rollout_log_probs": (-3.0,) * len(reply), "temperature": 1.0, "reward": 1.0, **more}
    return Sample(
        name,
        rendered.ids,
        reply,
        (True,) * len(reply),
        versions=(VersionRun(0, len(reply)),),
        pictures=tuple(picture.digest for picture in rendered.pictures),
        **fields,
    )


@torch.no_grad()
def engines_log_probs(model, folder, one: Sample) -> torch.Tensor:
    """Return the log-probs of the reply as an engine computes them: processor, vision tower, whole model."""
    whole = Qwen3VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.tensor([one.prompt_ids + one.response_ids])
    inputs = {}
    if one.pictures:
        images = [Image.open(folder / digest).convert("RGB") for digest in one.pictures]
        inputs = dict(AutoImageProcessor.from_pretrained(model)(images=images, return_tensors="pt"))
        inputs["mm_token_type_ids"] = (ids == whole.config.image_token_id).int()
    logits = whole(input_ids=ids, **inputs).logits[0, len(one.prompt_ids) - 1 : -1].float()
    scaled = torch.log_softmax(logits / one.temperature, -1)
    return scaled.gather(-1, torch.tensor(one.response_ids)[:, None]).squeeze(-1)


@pytest.mark.parametrize("packing", ["auto", "off"])
def test_the_trainers_log_probs_are_the_engines(model, pictures, frontend, make_policy, packing) -> None:
    folder, (small, large) = pictures
    samples = [
        sample(frontend, "one", "what? ", (small,)),
        sample(frontend, "two", "compare ", (small, large), reply=(50, 51), temperature=0.7),
        sample(frontend, "again", "and twice ", (large, large), reply=(60,)),
        sample(frontend, "text", "no picture at all", (), reply=(70, 71)),
        sample(frontend, "more", "no picture here", (), reply=(72, 73, 74)),
    ]
    policy = make_policy(SETTINGS.model_copy(update={"packing": packing}))
    passes = policy.cut(rows_of(samples), 512)
    assert sorted(len(batch.rows) for batch in passes if batch.rows[0].pictures) == [1, 1, 1]
    for batch in passes:
        for index, found in policy.log_probs(batch).items():
            wanted = engines_log_probs(model, folder, samples[index])
            assert torch.allclose(found.detach(), wanted, atol=TOLERANCE), samples[index].sample_id


def test_a_reply_depends_on_the_picture(model, pictures, frontend, make_policy) -> None:
    folder, (small, _) = pictures
    other = picture_file(32, 24, shade=77)
    digest = hashlib.sha256(other).hexdigest()
    (folder / digest).write_bytes(other)
    policy, one = make_policy(), sample(frontend, "one", "what? ", (small,))
    first, second = (
        policy.log_probs(policy.cut(rows_of([replace(one, pictures=(name,))]), 512)[0])[0].detach()
        for name in (small.digest, digest)
    )
    assert float((first - second).abs().max()) > 100 * TOLERANCE


def test_turns_of_one_conversation_share_a_row_with_their_pictures(pictures, frontend, make_policy) -> None:
    _, (small, large) = pictures
    first = sample(frontend, "first", "look ", (small,))
    ids = first.prompt_ids + first.response_ids
    later = replace(
        sample(frontend, "later", "", (large,)),
        prompt_ids=ids + sample(frontend, "tail", "", (large,)).prompt_ids,
        pictures=(small.digest, large.digest),
    )
    (row,) = rows_of([first, later])
    assert [piece.index for piece in row.pieces] == [1, 0]
    assert row.pictures == (small.digest, large.digest)
    assert len(rows_of([first, replace(later, pictures=(large.digest, large.digest))])) == 2
    policy = make_policy()
    together = policy.log_probs(policy.cut([row], 512)[0])
    for index, one in enumerate((first, later)):
        alone = policy.log_probs(policy.cut(rows_of([one]), 512)[0])[0]
        assert torch.allclose(together[index], alone, atol=TOLERANCE)


def test_a_step_raises_the_answer_about_a_picture_and_leaves_the_tower_alone(pictures, frontend, make_policy) -> None:
    _, (small, large) = pictures
    policy = make_policy()
    tower = {name: tensor.clone() for name, tensor in policy.model.named_parameters() if "visual" in name}
    assert tower
    assert not any("visual" in name for name in policy.parameters)
    learner = LocalLearner(policy, METHOD, SETTINGS, BinarySettings(baseline="none"), base_hash="base")
    learner.load(None, fresh_moments=False)
    right = sample(frontend, "right", "what? ", (small,), reply=(40, 41, 42))
    wrong = sample(frontend, "wrong", "what? ", (large,), reply=(40, 41, 42), reward=-1.0)

    def scores():
        with torch.no_grad():
            return [float(policy.log_probs(policy.cut(rows_of([one]), 512)[0])[0].sum()) for one in (right, wrong)]

    before = scores()
    fresh = [tuple(policy.log_probs(policy.cut(rows_of([one]), 512)[0])[0].tolist()) for one in (right, wrong)]
    batch = [replace(one, rollout_log_probs=values) for one, values in zip((right, wrong), fresh, strict=True)]
    for _ in range(3):
        stepped = learner.step(batch, lambda: None, 0)
        assert isinstance(stepped, Step), stepped
        assert stepped.drop == {}
    assert policy.eyes._last == ((), {}), "no pixels stay behind the step"
    after = scores()
    assert after[0] > before[0] + 0.1
    assert after[1] < before[1] - 0.1
    assert after[0] - after[1] > before[0] - before[1] + 0.2
    for name, tensor in policy.model.named_parameters():
        if name in tower:
            assert torch.equal(tensor, tower[name])


def test_the_adapter_loads_into_a_plain_model_and_answers_as_the_trainer_does(
    model, pictures, frontend, make_policy, tmp_path
) -> None:
    from peft import PeftModel

    folder, (small, _) = pictures
    policy, one = make_policy(), sample(frontend, "one", "what? ", (small,))
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    policy.save(tmp_path)
    whole = PeftModel.from_pretrained(Qwen3VLForConditionalGeneration.from_pretrained(model), tmp_path).eval()
    images = [Image.open(folder / small.digest).convert("RGB")]
    inputs = dict(AutoImageProcessor.from_pretrained(model)(images=images, return_tensors="pt"))
    ids = torch.tensor([one.prompt_ids + one.response_ids])
    inputs["mm_token_type_ids"] = (ids == whole.config.image_token_id).int()
    with torch.no_grad():
        logits = whole(input_ids=ids, **inputs).logits[0, len(one.prompt_ids) - 1 : -1]
    wanted = torch.log_softmax(logits, -1).gather(-1, torch.tensor(one.response_ids)[:, None]).squeeze(-1)
    found = policy.log_probs(policy.cut(rows_of([one]), 512)[0])[0]
    assert torch.allclose(found.detach(), wanted, atol=TOLERANCE)
    assert all(".language_model." in name for name in policy.tensors())


def test_a_pass_that_recomputes_gives_the_same_gradient(pictures, frontend, make_policy) -> None:
    _, shown = pictures
    one = sample(frontend, "one", "what? ", shown)
    gradients = []
    for recompute in (False, True):
        policy = make_policy(SETTINGS.model_copy(update={"recompute": "always" if recompute else "never"}))
        (batch,) = policy.cut(rows_of([one]), 512)
        policy.log_probs(batch, recompute=recompute)[0].sum().backward()
        gradients.append({name: copy.copy(p.grad) for name, p in policy.parameters.items()})
    for name, kept in gradients[0].items():
        # Rounding of sums in another order, beside the largest entry: some entries are near zero.
        rounding = 1e3 * torch.finfo(kept.dtype).eps * float(kept.abs().max())
        assert torch.allclose(kept, gradients[1][name], rtol=0, atol=rounding), name


def test_a_sample_whose_picture_is_gone_is_dropped_and_the_rest_is_trained(frontend, pictures, make_policy) -> None:
    _, (small, _) = pictures
    learner = LocalLearner(make_policy(), METHOD, SETTINGS, BinarySettings(baseline="none"), base_hash="base")
    learner.load(None, fresh_moments=False)
    gone = replace(sample(frontend, "gone", "what? ", (small,)), pictures=("0" * 64,))
    stepped = learner.step([gone, sample(frontend, "here", "what? ", (small,))], lambda: None)
    assert isinstance(stepped, Step)
    assert stepped.drop == {"gone": DropReason.UNSUPPORTED_CONTENT}
    blind = LocalLearner(make_policy(folder=None), METHOD, SETTINGS, BinarySettings(), base_hash="base")
    assert blind.step([sample(frontend, "a", "what? ", (small,))], lambda: None).drop == {
        "a": DropReason.UNSUPPORTED_CONTENT
    }


def test_a_probe_is_text(frontend, pictures) -> None:
    _, (small, _) = pictures
    one = sample(frontend, "one", "what? ", (small,))
    place = frontend.vision.placeholder
    (row,) = probe_rows([one], place).rows
    assert place not in row.ids
    assert row.ids[: row.pieces[0].start] == one.prompt_ids[-row.pieces[0].start :]
    assert row.pictures == ()


def test_full_weights_of_a_model_with_a_tower_are_refused(model) -> None:
    resolved = ResolvedModel("vision", model, model / "hash")
    with pytest.raises(SettingsError, match="vision has a vision tower"):
        base_model.make_policy(WeightKind.FULL, resolved, SETTINGS)
