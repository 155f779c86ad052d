"""The real trainer beside a server over a stub engine: loop, learner and LoRA of a random Llama with a vocabulary of
words.

Its log-probs differ from the stub's, so `LENIENT` lets every version pass the gate and the self-test, and
`tiny_settings` masks only extreme tokens.
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
from openclaw_rl.trainers.client import LeaseSession, TrainerClient
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
    yield TrainerLoop(LeaseSession(client, "tiny", threading.Event(), wait_s=30), learner, server.data_dir)
    client.close()
