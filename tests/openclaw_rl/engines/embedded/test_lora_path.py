"""The LoRA path of each architecture that the table of `instructions/one-gpu-sglang.md` names.

Random weights in fp32: the embedded engine samples, the trainer steps, the gate scores the new version, the engine
serves it beside the older ones. All of them compute the same log-probs, within the rounding of fp32.
"""

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.models.resolve import ResolvedModel
from openclaw_rl.publishing.gate import Gate
from openclaw_rl.settings import PublisherSettings, TrainerSettings
from openclaw_rl.trainers.base import Step
from openclaw_rl.trainers.base_model import make_policy
from openclaw_rl.trainers.learner import LocalLearner
from openclaw_rl.types import Sample, StepProbe, VersionRun, WeightKind

NOISE = 2e-4
"""Nats a token; measured: 1e-6 to 1e-5. bfloat16 is at 1e-2."""
COMMON: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1, "eos_token_id": 2,
    "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "phi3": {"sliding_window": 24},  # fused projections, and the window of Phi-3-mini
    "qwen2": {"tie_word_embeddings": True},  # Qwen2.5: biases of q, k, v
    "qwen3": {"head_dim": 16},  # norms of q and k
    "smollm3": {},  # each fourth layer has no positions
    "olmo2": {},  # norms behind attention and MLP
    "olmo3": {"sliding_window": 24},  # three layers of four with a window
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 24, "attn_logit_softcapping": 1.5},
    "mistral": {"sliding_window": 24},
}
TRAINER = TrainerSettings(rank=4, alpha=16, learning_rate=2e-2, max_tokens=128, micro_batch_tokens=256)


def folder_of(architecture: str, root: Path) -> Path:
    torch.manual_seed(1)
    config = AutoConfig.for_model(architecture, **COMMON, **ARCHITECTURES[architecture])
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:  # fresh ones are 0 and 1: a forward that forgets them would pass
            torch.nn.init.normal_(parameter, 1.0 if "weight" in name else 0.0, 0.3)
    model.save_pretrained(root / "model")
    return root / "model"


@pytest.mark.parametrize("packing", ["off", "on"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_engine_trainer_gate_and_swap_agree(architecture, packing, start_engine, tmp_path):
    folder = folder_of(architecture, tmp_path)
    trainer = TRAINER.model_copy(update={"packing": packing})
    policy = make_policy(WeightKind.LORA, ResolvedModel(architecture, folder, tmp_path / "hash"), trainer)
    learner = LocalLearner(policy, METHOD, trainer, BinarySettings(baseline="none"), base_hash="base")
    learner.load(None, fresh_moments=False)
    dice = random.Random(0)
    async with start_engine(folder) as engine:
        adapters: dict[int, Any] = {0: None}

        async def reply(version: int, n: int) -> Sample:
            prompt = dice.choices(range(3, 320), k=20 + 10 * n)  # beyond the windows
            how = {"temperature": 0.7, "sampling_seed": n}
            job = await engine.generate(prompt, 16, adapter=adapters[version], params=how, extra_key=f"v{version}")
            runs = (VersionRun(version, 16),)
            ids = tuple(job.output)
            return Sample(
                f"{version}-{n}", tuple(prompt), ids, (True,) * 16, tuple(job.log_probs), runs, 0.7,
                reward=(1.0, -1.0)[n % 2],
            )  # fmt: skip

        async def score(version: int, prompt_ids: Any, ids: Any) -> tuple[float, ...]:
            whole, start = [*prompt_ids, *ids], len(prompt_ids) - 1
            job = await engine.generate(
                whole, 0, adapter=adapters[version], logprob_start_len=start, extra_key=f"v{version}"
            )
            return tuple(job.prompt_log_probs[1:])

        gate = Gate(None, SimpleNamespace(current=0), score, PublisherSettings(self_test_tolerance=NOISE))
        for parent in (0, 1):
            result = learner.step([await reply(parent, n) for n in range(4)], lambda: None, parent)
            assert isinstance(result, Step)
            assert result.metrics["fresh_abs_log_ratio"] <= NOISE  # what the engine sampled, as the trainer computes it
            written = tmp_path / f"v{parent + 1}"
            written.mkdir()
            learner.write(written)
            adapters[parent + 1] = engine.runner.load_adapter(f"v{parent + 1}", written)
            probes = [StepProbe(**probe.model_dump()) for probe in result.probes]
            assert await gate.self_test(parent + 1, probes) is None
            for probe in probes:  # the step is seen in the engine, and the parent still serves beside it
                under = await score(parent, probe.prompt_ids, probe.response_ids)
                assert list(under) == pytest.approx(probe.parent_log_probs, abs=10 * NOISE)
                moved = [abs(a - b) for a, b in zip(probe.log_probs, probe.parent_log_probs, strict=True)]
                assert math.fsum(moved) / len(moved) > 100 * NOISE
