"""Models and adapters for the check, and the plain forward passes that an engine's log-probs are held against."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class Forced:
    """A reply as an engine sampled it, to be scored again."""

    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]
    temperature: float


def random_model(tokenizer: Path, folder: Path, spread: float, *, seed: int = 0, **changes: Any) -> Path:
    """Random weights of the shape in `tokenizer`/config.json, with its tokenizer; fp32 safetensors.

    spread: standard deviation of the logits; nearly flat ones leave an adapter nothing to change.
    """
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(tokenizer)
        for name, value in changes.items():
            setattr(config, name, value)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(spread / (config.initializer_range * config.hidden_size**0.5))
        model.save_pretrained(folder)
        for file in tokenizer.iterdir():
            if "tokenizer" in file.name or file.suffix == ".jinja":
                shutil.copy(file, folder)
    return folder


def synthetic_adapter(base: Path, folder: Path, seed: int, device: str, nats: float) -> Path:
    """A rank-8 adapter of Gaussian noise, `nats` a token away from the base or a little more."""
    if (folder / "adapter_model.safetensors").exists():
        return folder
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(device)
    vocabulary = model.config.vocab_size
    text = [Forced([*range(10, 30)], torch.randint(10, min(vocabulary, 9000), (64,)).tolist(), [], 1.0)]
    plain = forced_log_probs(model, text[0], device)
    peft = get_peft_model(model, LoraConfig(r=8, lora_alpha=8, target_modules=TARGETS))
    noise = [parameter for name, parameter in peft.named_parameters() if "lora_B" in name]
    with torch.no_grad():
        for parameter in noise:
            parameter.normal_(0, 0.01)
        for _ in range(40):
            effect = float((forced_log_probs(peft, text[0], device) - plain).abs().mean())
            if effect > nats:
                break
            for parameter in noise:
                parameter.mul_(1.25)
    peft.save_pretrained(folder)
    print(f"{folder.name}: {effect:.2f} nats a token from its base", flush=True)
    return folder


@contextmanager
def loaded(base: Path, adapter: Path | None, dtype: torch.dtype, device: str) -> Iterator[Any]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).to(device).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    yield model
    del model
    if device == "cuda":
        torch.cuda.empty_cache()


@torch.no_grad()
def forced_log_probs(model: Any, reply: Forced, device: str, temperature: float | None = None) -> torch.Tensor:
    ids = torch.tensor([reply.prompt_ids + reply.response_ids], device=device)
    start = len(reply.prompt_ids) - 1
    logits = model(ids).logits[0, start:-1].float() / (reply.temperature if temperature is None else temperature)
    return logits.log_softmax(-1).gather(1, ids[0, start + 1 :, None])[:, 0].cpu()


def differences(theirs: Sequence[torch.Tensor], ours: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of an engine's log-probs to a forward pass's, over all tokens."""
    gaps = torch.cat([torch.tensor(b) - a for a, b in zip(theirs, ours, strict=True)])
    size = gaps.abs()
    return {
        "tokens": len(gaps),
        "mean_abs": round(float(size.mean()), 5),
        "p99_abs": round(float(size.quantile(0.99)), 5),
        "max_abs": round(float(size.max()), 5),
        "share_ratio_off_by_0.2": round(float(((gaps.exp() - 1).abs() > 0.2).float().mean()), 5),
    }


def compare(replies: Sequence[Forced], base: Path, adapter: Path | None, device: str) -> dict[str, Any]:
    """Against a bf16 and an fp32 forward pass, and those two against each other."""
    scored = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        with loaded(base, adapter, dtype, device) as model:
            scored[name] = [forced_log_probs(model, reply, device) for reply in replies]
    ours = [reply.log_probs for reply in replies]
    figures = {f"engine against {name}": differences(values, ours) for name, values in scored.items()}
    figures["bf16 against fp32"] = differences(scored["fp32"], [row.tolist() for row in scored["bf16"]])
    return figures
