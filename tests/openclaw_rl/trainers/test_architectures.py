"""Files for an engine, of each architecture: LoRA targets and names, a round trip of full weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from close import approx
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma2Config, PreTrainedModel

from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.models.resolve import load_pretrained
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers import packed_attention
from openclaw_rl.trainers.base import Step
from openclaw_rl.trainers.full import FullPolicy
from openclaw_rl.trainers.learner import LocalLearner
from openclaw_rl.trainers.lora import ADAPTER_FILE, LoraPolicy
from openclaw_rl.trainers.policy import Policy
from openclaw_rl.types import Sample

SETTINGS = TrainerSettings(rank=2, alpha=8, learning_rate=1e-2, micro_batch_tokens=64, max_tokens=64, packing="on")
PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)

Make = Callable[[], PreTrainedModel]


def stepped(policy: Policy, samples: list[Sample], folder: Path) -> Step:
    learner = LocalLearner(policy, METHOD, SETTINGS, BinarySettings(baseline="none"), base_hash="base")
    learner.load(None, fresh_moments=False)
    result = learner.step(samples, lambda: None)
    assert isinstance(result, Step)
    learner.write(folder)
    return result


def assert_serves(served: torch.nn.Module, result: Step) -> None:
    """The trainer's probes are what this model gives by a plain forward pass, and they moved."""
    for probe in result.probes:
        with torch.no_grad():
            logits = served(input_ids=torch.tensor([probe.prompt_ids + probe.response_ids])).logits[0]
        log_probs = torch.log_softmax(logits, -1)[len(probe.prompt_ids) - 1 : -1]
        plain = log_probs.gather(-1, torch.tensor(probe.response_ids)[:, None]).squeeze(-1)
        assert probe.log_probs == approx(plain.tolist(), ulps=256)
        assert probe.log_probs != pytest.approx(probe.parent_log_probs, abs=1e-3)


def test_a_step_writes_an_adapter_that_peft_serves(architecture: Make, batch: list[Sample], tmp_path: Path) -> None:
    result = stepped(LoraPolicy(architecture(), SETTINGS), batch, tmp_path)
    names = {
        f"base_model.model.model.layers.{layer}.{projection}.lora_{side}.weight"
        for layer in range(2)
        for projection in PROJECTIONS
        for side in "AB"
    }
    tensors = load_file(tmp_path / ADAPTER_FILE)
    assert set(tensors) == names
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert_serves(PeftModel.from_pretrained(architecture(), tmp_path).eval(), result)


def test_a_step_writes_full_weights_that_transformers_serves(
    architecture: Make, batch: list[Sample], tmp_path: Path
) -> None:
    result = stepped(FullPolicy(architecture(), SETTINGS, load_base=architecture), batch, tmp_path)
    original = tmp_path / "original"
    architecture().save_pretrained(original)
    written = load_file(tmp_path / "model.safetensors")
    assert set(written) == set(load_file(original / "model.safetensors"))  # the names that the checkpoint came with
    assert_serves(load_pretrained(tmp_path).eval(), result)


def test_a_soft_cap_reaches_the_loaded_model_and_its_padded_rows(tmp_path: Path) -> None:
    """Gemma 2's cap of the attention scores, which transformers' `sdpa` drops."""
    config = Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=1.5,
        initializer_range=0.4,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ids = torch.arange(2, 34).reshape(2, 16)

    def logits(model: PreTrainedModel) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(input_ids=ids, use_cache=False).logits

    def other(attention: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention)

    capped, loaded = logits(other("eager")), load_pretrained(tmp_path)
    assert (logits(other("sdpa")) - capped).abs().mean() > 0.1  # the fault would be seen
    assert torch.equal(logits(loaded), capped)
    packed_attention.register()
    loaded.set_attn_implementation(packed_attention.ATTENTION_NAME)
    assert (logits(loaded) - capped).abs().max() < 1e-4
