"""Plain training step for comparison: transformers, PEFT, padded batches, all logits, autograd, AdamW."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from openclaw_rl.settings import TrainerSettings
from openclaw_rl.types import Sample


class PlainTrainer:
    def __init__(self, base: PreTrainedModel, settings: TrainerSettings) -> None:
        base.requires_grad_(False)
        config = LoraConfig(
            r=settings.rank, lora_alpha=int(settings.alpha), target_modules=list(settings.target_modules)
        )
        self.model = get_peft_model(base, config)
        self._device = next(base.parameters()).device
        self._is_half = base.dtype is torch.bfloat16
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._adamw = torch.optim.AdamW(self._trained, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, samples: Sequence[Sample], micro_batches: Sequence[Sequence[int]]) -> float:
        """Make one step; return the loss. micro_batches: the samples of each forward pass."""
        self._adamw.zero_grad()
        total = 0.0
        for part in micro_batches:
            loss = self._loss([samples[k] for k in part]) * len(part) / len(samples)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._adamw.step()
        return total

    def _loss(self, samples: Sequence[Sample]) -> Tensor:
        """Return the policy-gradient loss of padded rows: the mean over each reply's tokens, then over the replies."""
        longest = max(len(s.prompt_ids) + len(s.response_ids) for s in samples)
        ids = torch.zeros(len(samples), longest, dtype=torch.long)
        seen = torch.zeros(len(samples), longest, dtype=torch.long)
        trained = torch.zeros(len(samples), longest)
        for row, sample in enumerate(samples):
            p, t = len(sample.prompt_ids), len(sample.response_ids)
            ids[row, : p + t] = torch.tensor(sample.prompt_ids + sample.response_ids)
            seen[row, : p + t] = 1
            trained[row, p : p + t] = 1 / t
        ids, seen, trained = (tensor.to(self._device) for tensor in (ids, seen, trained))
        credit = torch.tensor([sample.reward or 0.0 for sample in samples], device=self._device)
        with torch.autocast(self._device.type, torch.bfloat16) if self._is_half else nullcontext():
            logits = self.model(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, :-1]
        log_probs = torch.log_softmax(logits.float() / 0.7, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = (log_probs - log_probs.detach()).exp()
        return -((ratio * credit[:, None] * trained[:, 1:]).sum() / len(samples))


def in_order(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Return padded micro-batches of samples in their order."""
    return _cut(range(len(lengths)), lengths, token_budget)


def longest_first(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Return padded micro-batches of samples of similar length."""
    return _cut(sorted(range(len(lengths)), key=lambda k: -lengths[k]), lengths, token_budget)


def _cut(order: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    parts: list[list[int]] = []
    for k in order:
        together = [*parts[-1], k] if parts else [k]
        if parts and max(lengths[j] for j in together) * len(together) <= token_budget:
            parts[-1] = together
        else:
            parts.append([k])
    return parts
