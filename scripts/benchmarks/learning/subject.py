"""Model under test: prompts, exact log-probs, and one trainable policy per run, on a base that is loaded once.

Policies and learners are the product's own (`LoraPolicy`, `LocalLearner`); they share the base's tensors.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from openclaw_rl.methods.base import Method
from openclaw_rl.models import resolve
from openclaw_rl.settings import MethodSettings, ModelSettings, TrainerSettings
from openclaw_rl.trainers.batches import Piece, Row, micro_batches
from openclaw_rl.trainers.learner import LocalLearner
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Ids

PASS_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Positions of one forward pass without gradient."""


class Subject:
    def __init__(self, model: ModelSettings, cache: Path, device: str) -> None:
        resolved = resolve.resolve(model, cache)
        self.name, self.device = resolved.name, device
        self.base_hash = resolve.base_hash(resolved)
        self.tokenizer = AutoTokenizer.from_pretrained(resolved.folder, local_files_only=True)
        self.end_id = int(self.tokenizer.eos_token_id)
        self._base = resolve.load_model(resolved, device=device)

    def new_policy(self, settings: TrainerSettings) -> LoraPolicy:
        """Return a new policy that starts as the base and shares its frozen tensors."""
        frozen = {id(tensor): tensor for tensor in (*self._base.parameters(), *self._base.buffers())}
        policy = LoraPolicy(copy.deepcopy(self._base, frozen), settings)
        policy.reset(settings.seed)
        return policy

    def new_learner(
        self, policy: LoraPolicy, method: Method, settings: TrainerSettings, method_settings: MethodSettings
    ) -> LocalLearner:
        learner = LocalLearner(policy, method, settings, method_settings, base_hash=self.base_hash)
        learner.load(None, fresh_moments=False)
        return learner

    def prompt(self, *messages: str, system: str | None = None) -> Ids:
        """Render a conversation that starts with the user, up to the policy's next reply.

        system: the system prompt; None: the one that the model's template has by itself.
        """
        roles = ("user", "assistant")
        chat = [] if system is None else [{"role": "system", "content": system}]
        chat += [{"role": roles[n % 2], "content": text} for n, text in enumerate(messages)]
        return self.encode(self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    def encode(self, text: str) -> Ids:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def text(self, ids: Ids) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


@torch.no_grad()
def forced_log_probs(
    policy: LoraPolicy, pairs: Sequence[tuple[Ids, Ids]], temperature: float = 1.0
) -> list[list[float]]:
    """Return log π(token | prefix) of the reply tokens of each (prompt, reply), by a plain batched fp32 forward."""
    rows = [
        Row(prompt + reply, (Piece(n, len(prompt), len(reply), tuple(range(len(reply))), temperature),))
        for n, (prompt, reply) in enumerate(pairs)
    ]
    found: dict[int, list[float]] = {}
    for batch in micro_batches(rows, PASS_TOKENS[policy.device.type]):
        found |= {n: values.tolist() for n, values in policy.log_probs(batch).items()}
    return [found[n] for n in range(len(pairs))]
