"""Sections of `trainer_speed.py`: one function a question, which returns a flat row of figures."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.trainer.clock import GIB, Deadline, best_of, free, measured
from benchmarks.trainer.plain import PlainTrainer, in_order, longest_first
from benchmarks.trainer.subjects import Shape, batch_of, random_model
from openclaw_rl.errors import SettingsError
from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.models import memory
from openclaw_rl.models.memory import ModelShape
from openclaw_rl.models.resolve import ResolvedModel
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers import base_model
from openclaw_rl.trainers.batches import MicroBatch, rows_of
from openclaw_rl.trainers.full import FullPolicy
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.trainers.optimizer import PolicyOptimizer
from openclaw_rl.trainers.policy import Policy
from openclaw_rl.trainers.step import train_step
from openclaw_rl.types import Sample

Row = dict[str, float | int | str | None]
METHOD_SETTINGS = BinarySettings(baseline="none")


class OurTrainer:
    def __init__(self, policy: Policy, settings: TrainerSettings) -> None:
        self.policy, self._settings = policy, settings
        self._optimizer = PolicyOptimizer(policy.parameters, settings)

    def step(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        credit = METHOD.advantages(samples, METHOD_SETTINGS, {})
        metrics, left_out = train_step(
            self.policy, self._optimizer, METHOD, samples, credit, self._settings, METHOD_SETTINGS
        )
        assert not left_out
        return metrics


def speed(shape: Shape, settings: TrainerSettings, lengths: Sequence[int], *, times: int, label: str) -> Row:
    """Measure tokens a second of our step and of the plain one, with the same token budget, on the same samples."""
    device, dtype = settings.device, base_model.dtype_of(settings)
    samples, tokens, budget = batch_of(lengths, shape.vocabulary), sum(lengths), settings.token_budget
    row: Row = {"section": label, "model": shape.name, "tokens": tokens, "longest": max(lengths), "budget": budget}
    is_mixed = min(lengths) < max(lengths)
    plain = PlainTrainer(random_model(shape, device, dtype), settings)
    orders = {"plain": in_order} | ({"plain_sorted": longest_first} if is_mixed else {})
    for name, order in orders.items():
        parts = order(lengths, budget)
        reading = best_of(times, device, partial(plain.step, samples, parts))
        row |= {f"{name}_tokens_s": tokens / reading.seconds, f"{name}_peak_gib": reading.peak_gib}
    del plain
    free(device)
    policy = LoraPolicy(random_model(shape, device, dtype), settings)
    policy.reset(0)
    ours = OurTrainer(policy, settings)
    reading = best_of(times, device, partial(ours.step, samples))
    row |= {"ours_tokens_s": tokens / reading.seconds, "ours_peak_gib": reading.peak_gib}
    row["kernel"] = str(policy._kernel)
    row["passes"] = len(policy.cut(rows_of(samples), budget))
    row["recomputed"] = sum(policy.recomputes(p, budget) for p in policy.cut(rows_of(samples), budget))
    for name in orders:
        row[f"ratio_to_{name}"] = reading_ratio(row, "ours", name)
    del policy, ours
    free(device)
    return row


def reading_ratio(row: Row, ours: str, other: str) -> float:
    a, b = row[f"{ours}_tokens_s"], row[f"{other}_tokens_s"]
    assert isinstance(a, float)
    assert isinstance(b, float)
    return a / b


def exactness(shape: Shape, settings: TrainerSettings, lengths: Sequence[int]) -> Row:
    """Compare log-probs of packed 16-bit rows with an fp32 and a 16-bit forward pass of each sample alone.

    It also measures the change of the other rows when one row's ids change."""
    device, dtype = settings.device, base_model.dtype_of(settings)
    samples = batch_of(lengths, shape.vocabulary)
    policy = LoraPolicy(random_model(shape, device, dtype), settings)
    policy.reset(0)
    others = batch_of(lengths, shape.vocabulary - 1)[:1] + samples[1:]
    with torch.no_grad():
        passed = policy.cut(rows_of(samples, share_prefixes=False), sum(lengths))
        packed = _flat(policy, passed)
        alone = _flat(policy, [MicroBatch((row,)) for batch in passed for row in batch.rows])
        moved = _flat(policy, policy.cut(rows_of(others, share_prefixes=False), sum(lengths)))
        exact = LoraPolicy(policy.model.unload().float(), settings.model_copy(update={"packing": "off"}))
        exact.reset(0)
        reference = _flat(exact, [MicroBatch((row,)) for batch in passed for row in batch.rows])
    row: Row = {"section": "exactness", "model": shape.name, "samples": len(samples), "kernel": str(policy._kernel)}
    row["packed_mean_abs"] = float(torch.cat([(packed[k] - reference[k]).abs() for k in reference]).mean())
    row["alone_mean_abs"] = float(torch.cat([(alone[k] - reference[k]).abs() for k in reference]).mean())
    row["packed_against_alone_mean_abs"] = float(torch.cat([(packed[k] - alone[k]).abs() for k in packed]).mean())
    row["neighbours_largest_change"] = max(float((packed[k] - moved[k]).abs().max()) for k in range(1, len(samples)))
    del policy, exact
    free(device)
    return row


def _flat(policy: Policy, passes: Sequence[MicroBatch]) -> dict[int, torch.Tensor]:
    return {index: values for batch in passes for index, values in policy.log_probs(batch).items()}


LADDER = (2048, 4096, 8192, 12288, 16384, 24576, 32768, 40960, 49152, 65536, 98304, 131072)


def largest_context(shape: Shape, settings: TrainerSettings, cap_gib: float, deadline: Deadline, longest: int) -> Row:
    """Find the longest sample that trains (one whole step, recomputing) while the allocator may hold `cap_gib`."""
    device, dtype = settings.device, base_model.dtype_of(settings)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gib * GIB / total))
    model_shape = ModelShape.of(shape.config.to_dict())
    predicted = memory.largest_context(model_shape, min(cap_gib * GIB, total))
    row: Row = {"section": "largest_context", "model": shape.name, "cap_gib": cap_gib, "predicted": predicted}
    ladder = [tokens for tokens in LADDER if tokens <= longest]
    place = min(sum(tokens < predicted for tokens in ladder), len(ladder) - 1)
    trains, fails = 0, None
    policy = LoraPolicy(random_model(shape, device, dtype), settings)
    policy.reset(0)
    ours = OurTrainer(policy, settings)
    tried = set()
    while 0 <= place < len(ladder) and place not in tried and deadline.left_s > 0:
        tried.add(place)
        samples = batch_of([ladder[place]], shape.vocabulary)
        try:
            with measured(device) as reading:
                ours.step(samples)
            trains = ladder[place]
            row |= {"seconds": reading.seconds, "peak_gib": reading.peak_gib}
            place += 1
        except torch.OutOfMemoryError:
            fails = ladder[place]
            place -= 1
        ours._optimizer.zero_grad()
        free(device)
    row |= {"trains": trains, "fails": fails, "ladder_ends": ladder[-1]}
    shape_memory = memory.training(model_shape, trains)
    row["predicted_peak_gib"] = shape_memory.total / GIB
    del policy, ours
    torch.cuda.set_per_process_memory_fraction(1.0)
    free(device)
    return row


def full_weights(shape: Shape, settings: TrainerSettings, lengths: Sequence[int], folder: Path) -> Row:
    """Measure a step on all weights, and the export that an engine loads."""
    device, dtype = settings.device, base_model.dtype_of(settings)
    samples = batch_of(lengths, shape.vocabulary)
    policy = FullPolicy(
        random_model(shape, device, dtype), settings, load_base=lambda: random_model(shape, device, dtype)
    )
    ours = OurTrainer(policy, settings)
    reading = best_of(1, device, partial(ours.step, samples))
    row: Row = {"section": "full_weights", "model": shape.name, "tokens": sum(lengths)}
    row |= {"ours_tokens_s": sum(lengths) / reading.seconds, "peak_gib": reading.peak_gib}
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    policy.save(folder)
    row["export_s"] = time.perf_counter() - started
    written, own = load_file(folder / "model.safetensors"), dict(policy.model.named_parameters())
    row["export_differs"] = sum(
        not torch.equal(own[name].cpu(), tensor) for name, tensor in written.items() if name in own
    )
    predicted = memory.training(ModelShape.of(shape.config.to_dict()), max(lengths), weights="full", recompute=False)
    row["predicted_weights_gib"] = (predicted.weights + predicted.trained) / GIB
    del policy, ours
    free(device)
    return row


def _beside_the_whole(
    policy: LoraPolicy, resolved: ResolvedModel, settings: TrainerSettings, samples: Sequence[Sample]
) -> Row:
    """Return the distance of log-probs and an adapter's gradients to those on the base of 16 bits."""
    sixteen = settings.model_copy(update={"quantise": "none"})
    whole = LoraPolicy(base_model.load(resolved, sixteen), sixteen)
    found, gradients = [], []
    for each in (policy, whole):
        each.reset(0)
        (passed,) = each.cut(rows_of(samples), 10**6)
        log_probs = torch.cat(list(each.log_probs(passed).values()))
        log_probs.mean().backward()
        found.append(log_probs.detach())
        trained = [parameter.grad for name, parameter in each.parameters.items() if ".lora_B." in name]
        gradients.append(torch.cat([gradient.flatten() for gradient in trained if gradient is not None]))
    return {
        "log_probs_mean_abs": float((found[0] - found[1]).abs().mean()),
        "gradients_cosine": float(torch.cosine_similarity(gradients[0], gradients[1], dim=0)),
    }


def quantised(shape: Shape, settings: TrainerSettings, lengths: Sequence[int], folder: Path) -> Row:
    """Measure a step on a base of fewer bits, from a folder of that shape."""
    device = settings.device
    samples = batch_of(lengths, shape.vocabulary)
    row: Row = {"section": "quantised", "model": shape.name, "quantise": settings.quantise, "tokens": sum(lengths)}
    resolved = ResolvedModel(shape.name, folder, folder / "base_hash")
    started = time.perf_counter()
    try:
        policy = LoraPolicy(base_model.load(resolved, settings), settings)
    except SettingsError as error:
        return row | {"refused": str(error)}
    row["load_s"] = time.perf_counter() - started
    policy.reset(0)
    held = torch.cuda.memory_allocated() / GIB if device == "cuda" else None
    ours = OurTrainer(policy, settings)
    reading = best_of(1, device, partial(ours.step, samples))
    row |= {"base_gib": held, "ours_tokens_s": sum(lengths) / reading.seconds, "peak_gib": reading.peak_gib}
    row["predicted_base_gib"] = ModelShape.of(shape.config.to_dict()).weights(settings.quantise) / GIB
    if shape.name != "4b":
        row |= _beside_the_whole(policy, resolved, settings, samples[:4])
    del policy, ours
    free(device)
    return row
