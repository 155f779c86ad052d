"""One LoRA step on the bundled 135M model: exact log-probs, and a move in the direction of the reward."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.models import resolve
from openclaw_rl.settings import ModelSettings, TrainerSettings
from openclaw_rl.trainers.base import Step
from openclaw_rl.trainers.learner import LocalLearner
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Sample, VersionRun

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def resolved(bundled_cache: Path) -> resolve.ResolvedModel:
    return resolve.resolve(ModelSettings(), bundled_cache)


def test_a_step_moves_the_bundled_model_where_the_reward_points(
    resolved: resolve.ResolvedModel, tmp_path: Path
) -> None:
    settings = TrainerSettings()
    tokenizer = AutoTokenizer.from_pretrained(resolved.folder, local_files_only=True)
    model = resolve.load_model(resolved)
    base_hash = resolve.base_hash(resolved)

    def sample(name: str, question: str, answer: str, reward: float) -> Sample:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompt = tuple(tokenizer.encode(text, add_special_tokens=False))
        response = tuple(tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0].float() / 0.7
        log_probs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        rollout = log_probs.gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
        t = len(response)
        return Sample(
            name, prompt, response, (True,) * t, tuple(rollout.tolist()), (VersionRun(0, t),), 0.7, reward=reward
        )

    samples = [
        sample("prose", "How do I keep a plant alive?", "Water it once a week and keep it near a window.", 1.0),
        sample("list", "Give me tips for a good sleep.", "1. Go to bed early.\n2. Avoid screens.\n3. Read.", -1.0),
    ]
    learner = LocalLearner(LoraPolicy(model, settings), METHOD, settings, BinarySettings(), base_hash=base_hash)
    learner.load(None, fresh_moments=False)
    result = learner.step(samples, lambda: None)
    assert isinstance(result, Step)
    assert result.metrics["abs_log_ratio"] < 1e-4  # the first adapter changes nothing: these are the base's own numbers
    assert result.metrics["masked_share"] == 0
    shift = {}
    for probe in result.probes:
        name = next(s.sample_id for s in samples if list(s.response_ids) == probe.response_ids)
        shift[name] = sum(probe.log_probs) - sum(probe.parent_log_probs)
    assert shift["prose"] > 0.1
    assert shift["list"] < -0.1
    learner.write(tmp_path)
    again = LocalLearner(
        LoraPolicy(resolve.load_model(resolved), settings), METHOD, settings, BinarySettings(), base_hash=base_hash
    )
    again.load(tmp_path, fresh_moments=False)
    second, same = learner.step(samples, lambda: None), again.step(samples, lambda: None)
    assert isinstance(second, Step)
    assert isinstance(same, Step)
    assert second.metrics["loss"] == same.metrics["loss"]
