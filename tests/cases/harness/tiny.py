"""The real trainer beside a server over a stub engine: loop, learner and LoRA, of a random Llama with the vocabulary of
words. Its log-probs are not the stub's: `LENIENT` lets the gate and the self-test pass whatever comes of it, and
`tiny_settings` masks only what is beyond all measure.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harness.host import Server
from harness.model import CONTEXT
from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.client import TrainerClient
from openclaw_rl.trainers.learner import LocalLearner
from openclaw_rl.trainers.loop import TrainerLoop
from openclaw_rl.trainers.lora import LoraPolicy

LENIENT = {"publisher.self_test_tolerance": 1e9, "publisher.max_step_kl": 1e9, "publisher.max_base_kl": 1e9}


def tiny_settings(**more: Any) -> TrainerSettings:
    return TrainerSettings(rank=2, tis_mask=1e6, **more)


@contextmanager
def tiny_trainer(server: Server, settings: TrainerSettings) -> Iterator[TrainerLoop]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    policy = LoraPolicy(LlamaForCausalLM(config).eval(), settings)
    learner = LocalLearner(policy, METHOD, settings, BinarySettings(), base_hash="stub")
    token = (server.data_dir / "keys" / "trainer.token").read_text().strip()
    client = TrainerClient(server.url, token)
    yield TrainerLoop(client, learner, server.data_dir, name="tiny", stop=threading.Event(), lease_wait_s=30)
    client.close()
