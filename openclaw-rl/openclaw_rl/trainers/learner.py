"""The local learner: a policy, its optimizer and the method's state, which load, step and write as one.

Promises: N steps in a row equal k steps, a write, a load elsewhere and N − k steps, bit for bit. State files are
safetensors and JSON, never a pickle.

    adapter_config.json  adapter_model.safetensors   the PEFT adapter, which an engine serves; of full weights
    config.json  model.safetensors                   the model
    optimizer.state                                  AdamW's moments, fp32 masters, and the random generators
    state.json                                       steps, the method's state, and the hash of the base
    ema/                                             with `method.teacher = "ema"`: its adapter (`lora`)

A step also measures probes: a few forced tokens with the trainer's log-probs before and after, for the publisher's
self-test.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from openclaw_rl.errors import TrainerError
from openclaw_rl.methods.base import Method
from openclaw_rl.processes import malloc
from openclaw_rl.settings import MethodSettings, TrainerSettings
from openclaw_rl.trainer_protocol import Probe
from openclaw_rl.trainers.base import NoStep, Step
from openclaw_rl.trainers.batches import MicroBatch, Piece, Row
from openclaw_rl.trainers.checkpoint import OPTIMIZER_FILE
from openclaw_rl.trainers.lora import EmaTeacher, LoraPolicy
from openclaw_rl.trainers.optimizer import PolicyOptimizer
from openclaw_rl.trainers.policy import Policy
from openclaw_rl.trainers.step import NotFinite, train_step
from openclaw_rl.types import DropReason, Sample

log = structlog.get_logger()

# Small: a probe compares two programs on equal ids, and needs neither the whole prompt nor the whole reply.
PROBES, PROMPT_TOKENS, RESPONSE_TOKENS = 2, 32, 32
STATE_FILE = "state.json"
_RNG_CPU, _RNG_CUDA = "rng.cpu", "rng.cuda"


def probe_rows(samples: Sequence[Sample], placeholder: int | None = None) -> MicroBatch:
    """Return the prompt's end and the reply's beginning of the samples with the longest replies, at temperature 1.

    placeholder: token of a picture's place. A probe is text: its prompt begins behind the last such place.
    """
    chosen = sorted(samples, key=lambda sample: (-len(sample.response_ids), sample.sample_id))[:PROBES]
    rows = []
    for index, sample in enumerate(chosen):
        prompt, response = sample.prompt_ids[-PROMPT_TOKENS:], sample.response_ids[:RESPONSE_TOKENS]
        if placeholder in prompt[:-1]:
            prompt = prompt[len(prompt) - prompt[::-1].index(placeholder) :]
        piece = Piece(index, len(prompt), len(response), trained=tuple(range(len(response))), temperature=1.0)
        rows.append(Row(prompt + response, (piece,)))
    return MicroBatch(tuple(rows))


@torch.no_grad()
def score(policy: Policy, batch: MicroBatch) -> list[list[float]]:
    log_probs = policy.log_probs(batch)
    return [[float(value) for value in log_probs[piece.index]] for piece in batch.pieces]


def probes_of(
    batch: MicroBatch, before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]
) -> tuple[Probe, ...]:
    return tuple(
        Probe(
            prompt_ids=list(row.ids[: piece.start]),
            response_ids=list(row.ids[piece.start :]),
            log_probs=list(new),
            parent_log_probs=list(old),
        )
        for row, piece, old, new in zip(batch.rows, batch.pieces, before, after, strict=True)
    )


class LearnerState(BaseModel):
    """The content of `state.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    base_hash: str
    method: str
    optimizer_steps: int
    """Steps since the moments were fresh; the warm-up counts them."""
    method_state: dict[str, float]
    precision: str = ""
    """Precision of the base: a dtype, or the bits of a quantised one. Empty: from before it was kept."""


class LocalLearner:
    """The learner of the local trainer."""

    def __init__(
        self,
        policy: Policy,
        method: Method,
        settings: TrainerSettings,
        method_settings: MethodSettings,
        *,
        base_hash: str,
    ) -> None:
        self.kind, self.base_hash = policy.kind, base_hash
        self._policy, self._method = policy, method
        self._settings, self._method_settings = settings, method_settings
        self._optimizer = PolicyOptimizer(policy.parameters, settings)
        self._method_state: dict[str, float] = {}
        self._teacher: EmaTeacher | None = None
        decay = method_settings.ema_teacher_decay
        if decay is not None and isinstance(policy, LoraPolicy):
            self._teacher = EmaTeacher(policy, decay)
        dtype = str(policy.base_dtype).removeprefix("torch.")
        self._precision = dtype if settings.quantise == "none" else settings.quantise
        self._bad_batches = 0
        """Batches in a row whose numbers were not finite."""

    # -- versions ------------------------------------------------------------------------------------------------------

    def load(self, folder: Path | None, *, fresh_moments: bool) -> None:
        """Load a version's weights, moments, random generators and method state. Raises TrainerError.

        Moments that are gone, or not wanted, start fresh with `warmup_steps`.
        """
        if folder is None:
            self._policy.reset(self._settings.seed)
            self._optimizer.fresh()
            self._method_state = {}
            torch.manual_seed(self._settings.seed)
            if self._teacher is not None:
                self._teacher.load(None)
            return
        try:
            state = LearnerState.model_validate_json((folder / STATE_FILE).read_bytes())
            if state.base_hash != self.base_hash:
                raise TrainerError(f"{folder}: this version belongs to base {state.base_hash[:12]}…")
            kept = load_file(folder / OPTIMIZER_FILE) if (folder / OPTIMIZER_FILE).exists() else {}
            self._policy.load(folder, kept)
            if self._teacher is not None:
                self._teacher.load(folder)
        except (OSError, ValidationError, SafetensorError) as error:
            raise TrainerError(f"checkpoint {folder} cannot be read: {error}") from error
        if state.precision not in ("", self._precision):
            # Trained weights are kept in fp32 and stay as they are; what is computed beside them is rounded elsewhere.
            log.warning("precision_changed", folder=str(folder), was=state.precision, now=self._precision)
        self._method_state = dict(state.method_state) if state.method == self._method.name else {}
        if _RNG_CPU in kept:
            torch.set_rng_state(kept.pop(_RNG_CPU))
        if _RNG_CUDA in kept and self._policy.device.type == "cuda":
            torch.cuda.set_rng_state(kept[_RNG_CUDA], self._policy.device)
        kept.pop(_RNG_CUDA, None)
        if fresh_moments or not kept:
            self._optimizer.fresh()
        else:
            self._optimizer.load(kept, state.optimizer_steps)

    def write(self, folder: Path) -> str:
        self._policy.save(folder)
        if self._teacher is not None:
            self._teacher.write(folder)
        tensors: dict[str, Tensor] = self._policy.state() | self._optimizer.state() | {_RNG_CPU: torch.get_rng_state()}
        if self._policy.device.type == "cuda":
            tensors[_RNG_CUDA] = torch.cuda.get_rng_state(self._policy.device)
        save_file(tensors, folder / OPTIMIZER_FILE)
        state = LearnerState(
            base_hash=self.base_hash,
            method=self._method.name,
            optimizer_steps=self._optimizer.steps,
            method_state=self._method_state,
            precision=self._precision,
        )
        (folder / STATE_FILE).write_text(json.dumps(state.model_dump(), indent=1, sort_keys=True))
        return self._policy.weights_file

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, samples: Sequence[Sample], between: Callable[[], None], parent: int | None = None) -> Step | NoStep:
        started = time.perf_counter()
        drop = {s.sample_id: reason for s in samples if (reason := self._unusable(s)) is not None}
        usable = [sample for sample in samples if sample.sample_id not in drop]
        if not usable:
            return NoStep("no sample of the batch can be trained on", drop)
        self._policy.between = between
        try:
            with _cpu_threads(self._threads_of(usable)):
                stepped = self._step(usable, parent)
        except NotFinite as error:
            return NoStep(str(error), drop | self._blame(usable))
        except torch.OutOfMemoryError:
            if self._policy.save_memory():
                return NoStep("out of memory: activations are recomputed from now on", drop)
            longest = max(usable, key=lambda s: len(s.prompt_ids) + len(s.response_ids))
            return NoStep("out of memory", drop | {longest.sample_id: DropReason.TOO_LONG})
        finally:
            self._policy.between = lambda: None
            self._optimizer.zero_grad()
            if self._policy.eyes is not None:
                self._policy.eyes.rest()
            _give_memory_back()
        self._bad_batches = 0
        metrics = dict(stepped.metrics) | {"dropped": float(len(drop) + len(stepped.drop))}
        metrics["learner_s"] = time.perf_counter() - started
        return Step(metrics, drop | dict(stepped.drop), stepped.probes)

    def _threads_of(self, samples: Sequence[Sample]) -> int | None:
        """Return the CPU threads of a step; None: the process's own number."""
        if self._policy.device.type != "cpu" or not all(sample.is_practice for sample in samples):
            return None
        return self._settings.practice_threads or os.cpu_count()

    def _step(self, samples: list[Sample], parent: int | None) -> Step:
        # A quantised base differs from the engine's on purpose: its distance would hide every other cause.
        parent = parent if self._settings.quantise == "none" else None
        method_state = dict(self._method_state)
        advantages = self._method.advantages(samples, self._method_settings, method_state)
        eyes = self._policy.eyes
        probes = probe_rows(samples, None if eyes is None else eyes.placeholder)
        before = score(self._policy, probes)
        metrics, left_out = train_step(
            self._policy,
            self._optimizer,
            self._method,
            samples,
            advantages,
            self._settings,
            self._method_settings,
            parent=parent,
        )
        after = score(self._policy, probes)
        if not all(math.isfinite(value) for values in (*before, *after) for value in values):
            raise NotFinite("a probe's log-probs are not finite")
        self._method_state = method_state
        if self._teacher is not None:
            metrics["ema_truncation"] = self._teacher.follow()
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        metrics["probe_shift"] = _mean_abs_difference(before, after)
        metrics["optimizer_steps"] = float(self._optimizer.steps)
        metrics |= {"reward_mean": math.fsum(rewards) / len(rewards)} if rewards else {}
        metrics |= method_state
        return Step(
            metrics,
            {samples[index].sample_id: DropReason.NON_FINITE for index in left_out},
            probes_of(probes, before, after),
        )

    def _unusable(self, sample: Sample) -> DropReason | None:
        if not sample.prompt_ids:
            return DropReason.EMPTY  # nothing predicts the first token
        if len(sample.prompt_ids) + len(sample.response_ids) > self._settings.max_tokens:
            return DropReason.TOO_LONG
        if sample.pictures and (self._policy.eyes is None or not self._policy.eyes.has(sample.pictures)):
            return DropReason.UNSUPPORTED_CONTENT
        if not self._method.can_train(sample):
            return DropReason.METHOD  # made by another method, before the settings changed
        return None

    def _blame(self, samples: Sequence[Sample]) -> dict[str, DropReason]:
        """Return the samples to drop for a batch that was not finite: none the first time, all the second time."""
        # After the first time the tip is loaded and the batch comes again; without a drop it would come for ever.
        self._bad_batches += 1
        return {} if self._bad_batches < 2 else {sample.sample_id: DropReason.NON_FINITE for sample in samples}


def _mean_abs_difference(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> float:
    differences = [abs(x - y) for xs, ys in zip(a, b, strict=True) for x, y in zip(xs, ys, strict=True)]
    return math.fsum(differences) / len(differences)


@contextmanager
def _cpu_threads(count: int | None) -> Iterator[None]:
    """Compute with so many CPU threads meanwhile; None: with as many as before."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _give_memory_back() -> None:
    """Return the allocators' free memory to the system: between steps the engine needs those gigabytes."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    malloc.give_back()
