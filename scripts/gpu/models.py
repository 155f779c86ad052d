"""Models and adapters of a check, and plain forward passes to compare an engine's log-probs with."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

QWEN3 = {
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "layers": 28, "heads": 16},
    "qwen3-tiny": {"hidden_size": 64, "intermediate_size": 96, "layers": 2, "heads": 8},
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "layers": 36, "heads": 32},
}
"""Shapes of Qwen3, and a tiny one: 8 KV heads of 128, tied embeddings, 151,936 tokens."""
RANK = 8
"""Rank and alpha of the synthetic adapters."""
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class Forced:
    """A reply as an engine sampled it; forward passes score it again."""

    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]
    temperature: float


def forced_of(turn: Mapping[str, Any]) -> Forced:
    """Return the reply of a turn, as `/v1/turns/{id}` returns it."""
    request, reply = turn["request"], turn["turn"]
    temperature = request["sampling"]["temperature"]
    return Forced(request["prompt_ids"], reply["response_ids"], reply["rollout_log_probs"], temperature)


def random_model(tokenizer: Path, folder: Path, spread: float, *, device: str, seed: int = 0, **changes: Any) -> Path:
    """Write random fp32 weights of the shape in `tokenizer`/config.json, with its tokenizer.

    spread: standard deviation of the logits. With nearly flat logits an adapter would have no effect.
    """
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(tokenizer)
        for name, value in changes.items():
            setattr(config, name, value)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(spread / (config.initializer_range * config.hidden_size**0.5))
        model.save_pretrained(folder)
        copy_tokenizer(tokenizer, folder)
    return folder


def qwen3(tokenizer: Path, folder: Path, *, device: str, spread: float = 0.8, **changes: int) -> Path:
    """Write random bf16 weights of the shape that `folder` is named after.

    The tokenizer is `tokenizer`, filled up to the shape's number of tokens.
    """
    if (folder / "model.safetensors").exists() or (folder / "model.safetensors.index.json").exists():
        return folder
    shape, old = QWEN3[folder.name] | changes, AutoConfig.from_pretrained(tokenizer)
    config = Qwen3Config(
        vocab_size=changes.get("vocab_size", 151936),
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=old.bos_token_id,
        eos_token_id=old.eos_token_id,
        pad_token_id=old.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(spread / (config.initializer_range * config.hidden_size**0.5))
    model.save_pretrained(folder)
    copy_tokenizer(tokenizer, folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"x{number}y": number for number in range(len(vocabulary), config.vocab_size)}
    file.write_text(json.dumps(content))
    return folder


def copy_tokenizer(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        if "tokenizer" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)


def synthetic_adapter(base: Path, folder: Path, seed: int, device: str, nats: float) -> Path:
    """Write a rank-8 adapter of Gaussian noise, at least `nats` a token away from the base."""
    if not (folder / "adapter_model.safetensors").exists():
        (effect,) = synthetic_adapters(base, [folder], seed, device, nats)
        print(f"{folder.name}: {effect:.2f} nats a token from its base", flush=True)
    return folder


@torch.no_grad()
def synthetic_adapters(base: Path, folders: Sequence[Path], seed: int, device: str, nats: float) -> list[float]:
    """Write such an adapter to each folder; return the distance of each from the base, in nats a token."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(device)
    vocabulary = model.config.vocab_size
    text = [Forced([*range(10, 30)], torch.randint(10, min(vocabulary, 9000), (64,)).tolist(), [], 1.0)]
    plain = forced_log_probs(model, text[0], device)
    peft = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS))
    noise = [parameter for name, parameter in peft.named_parameters() if "lora_B" in name]
    scale, effects = 0.01, []
    for folder in folders:
        for parameter in noise:
            parameter.normal_(0, scale)
        for _ in range(40):
            effect = float((forced_log_probs(peft, text[0], device) - plain).abs().mean())
            if effect > nats:
                break
            scale *= 1.25
            for parameter in noise:
                parameter.mul_(1.25)
        peft.save_pretrained(folder)
        effects.append(effect)
    return effects


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
    """Return the distance of an engine's log-probs to a forward pass's, over all tokens."""
    gaps = torch.cat([torch.tensor(b) - a for a, b in zip(theirs, ours, strict=True)])
    size = gaps.abs()
    return {
        "tokens": len(gaps),
        "mean_abs": round(float(size.mean()), 5),
        "p99_abs": round(float(size.quantile(0.99)), 5),
        "max_abs": round(float(size.max()), 5),
        "share_ratio_off_by_0.2": round(float(((gaps.exp() - 1).abs() > 0.2).float().mean()), 5),
    }


@dataclass(frozen=True, slots=True)
class Recorded:
    """A reply that one or several versions sampled."""

    reply: Forced
    runs: list[tuple[int, int]]
    """[weight_version, length]."""


def compare_runs(replies: Sequence[Recorded], folders: Mapping[int, Path], device: str) -> dict[str, Any]:
    """Compare each run of tokens with an fp32 forward pass under the weights of its version.

    The first token after a seam is compared separately: with the weights after the seam, and with those before it.
    """
    scored: dict[int, list[torch.Tensor]] = {}
    for version in sorted({version for recorded in replies for version, _ in recorded.runs}):
        with loaded(folders[version], None, torch.float32, device) as model:
            scored[version] = [forced_log_probs(model, recorded.reply, device) for recorded in replies]
    parts: dict[str, tuple[list[torch.Tensor], list[list[float]]]] = {}
    for number, recorded in enumerate(replies):
        at = before = 0
        for index, (version, length) in enumerate(recorded.runs):
            ours, theirs = recorded.reply.log_probs[at : at + length], scored[version][number][at : at + length]
            rows = [("replies of one version" if len(recorded.runs) == 1 else "joined replies", theirs, ours)]
            if index:
                rows += [("first token after a seam", theirs[:1], ours[:1])]
                rows += [("… under the weights before it", scored[before][number][at : at + 1], ours[:1])]
            for name, right, found in rows:
                parts.setdefault(name, ([], []))[0].append(right)
                parts[name][1].append(list(found))
            at, before = at + length, version
    return {name: differences(*values) for name, values in parts.items()}


def too_far(compared: Mapping[str, Any]) -> list[str]:
    """Return a finding for each of `compare`'s figures where the engine is clearly further from fp32 than bf16 is."""
    found = []
    for name, figures in compared.items():
        engine, bf16 = (figures[key]["mean_abs"] for key in ("engine against fp32", "bf16 against fp32"))
        if not engine <= 1.5 * bf16 + 0.005:
            found.append(f"{name}: the engine is {engine} nats from fp32, bf16 {bf16}")
    return found


def compare(replies: Sequence[Forced], base: Path, adapter: Path | None, device: str) -> dict[str, Any]:
    """Compare replies with a bf16 and an fp32 forward pass, and those two with each other."""
    scored = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        with loaded(base, adapter, dtype, device) as model:
            scored[name] = [forced_log_probs(model, reply, device) for reply in replies]
    ours = [reply.log_probs for reply in replies]
    figures = {f"engine against {name}": differences(values, ours) for name, values in scored.items()}
    figures["bf16 against fp32"] = differences(scored["fp32"], [row.tolist() for row in scored["bf16"]])
    return figures
