"""A policy's forward passes: a causal language model, with log-probs at response positions only.

Promises: the log-probs are those of a plain forward pass, log_softmax(logits / T) in fp32, however the rows of a
micro-batch are laid out. The model is never in training mode: dropout would train a policy that no engine served. With
16-bit weights the matrix products are in 16 bits, and trained parameters are kept in fp32.

`DeviceMemory` decides whether a pass keeps its activations or recomputes them. It compares an estimate from the model's
shape (`models.memory`) with the device's free memory. Where the estimate is wrong memory runs out once: `assume_less`.
On a CPU a pass over the budget keeps those of its last layers, as many as the budget or the free memory holds.

Leaves to others: the trained part of the model and its files (`lora`, `full`), whether its rows can be packed
(`architecture`), the loss, the optimizer.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from openclaw_rl.errors import SettingsError
from openclaw_rl.losses import TokenLogProbs, selected_log_probs
from openclaw_rl.models.memory import LOGITS_AT_ONCE, ModelShape, activation_bytes
from openclaw_rl.processes import malloc
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers import packed_attention
from openclaw_rl.trainers.architecture import (
    HALF,
    decode,
    decoder_layers,
    head_of,
    packing_of,
    plain_head_of,
)
from openclaw_rl.trainers.batches import MicroBatch, Piece, Row, micro_batches
from openclaw_rl.trainers.fused import HeadLogProbs, fuse_linears, fuse_norms, has_fast_head
from openclaw_rl.trainers.packed_attention import PackedLayout
from openclaw_rl.trainers.pictures import Eyes
from openclaw_rl.types import Ids, WeightKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MARGIN = 0.8
"""Share of the free memory that activations may take: the estimate is of Llama-like layers, and gradients need room."""
_CPU_SHARE = 0.2
"""Share of a CPU's free memory that the activations of a pass over the budget may take, beside engine and programs."""
_CPU_CHUNK = 256
"""Positions whose logits exist at once on a CPU; a GPU takes `LOGITS_AT_ONCE` logits in all."""


class DeviceMemory:
    """Free memory of the policy's device, against the activations of a pass."""

    def __init__(
        self, device: torch.device, token_bytes: int | None, fraction: float | None, *, least_bytes: int = 0
    ) -> None:
        """token_bytes: activations of one token; None: unknown for this model's layers, so never keep them.

        least_bytes: those of a token whose layers are all recomputed.
        """
        self._device, self._token_bytes, self._fraction = device, token_bytes, fraction
        self._least_bytes = least_bytes
        self._keeps_little = False
        if device.type == "cuda" and fraction is not None:
            torch.cuda.set_per_process_memory_fraction(fraction, device)

    @classmethod
    def of(cls, config: Mapping[str, Any], device: torch.device, settings: TrainerSettings) -> "DeviceMemory":
        try:
            shape = ModelShape.of(config)
        except SettingsError:
            return cls(device, None, settings.memory_fraction)
        kept, least = (activation_bytes(shape, recompute=recompute) for recompute in (False, True))
        return cls(device, kept, settings.memory_fraction, least_bytes=least)

    def holds_activations_of(self, tokens: int) -> bool:
        if self._keeps_little:
            return False
        if self._device.type != "cuda":
            return True
        return self._token_bytes is not None and tokens * self._token_bytes <= _MARGIN * self._free()

    def kept_share(self, tokens: int, budget: int) -> float:
        """Return the share of the layers that keep their activations in a pass over the budget."""
        if self._device.type != "cpu" or self._keeps_little or self._token_bytes is None:
            return 0.0  # on a GPU the memory bounds the length of a sample
        # The estimates are of 16 bits, a CPU computes in 32.
        whole, least = 2 * self._token_bytes, 2 * self._least_bytes
        allowed = max(budget * whole, int(_CPU_SHARE * (malloc.free_memory() or 0)))
        return min(1.0, max(0.0, (allowed / tokens - least) / (whole - least)))

    def assume_less(self) -> bool:
        """Recompute in every pass from now on, because memory ran out. Return False if that was so already."""
        kept_more, self._keeps_little = not self._keeps_little, True
        return kept_more

    def _free(self) -> float:
        free, total = torch.cuda.mem_get_info(self._device)
        allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        free += reserved - allocated  # the allocator's own free blocks
        return free if self._fraction is None else min(free, self._fraction * total - allocated)


class Policy(ABC):
    """A causal language model under training.

    `between` is called before each decoder layer, forward and backward. An exception there ends the pass early; a pause
    yields the processor.
    """

    kind: ClassVar[WeightKind]
    weights_file: ClassVar[str]
    parameters: dict[str, nn.Parameter]
    """The trainable parameters, fp32 if the model has 16 bits, in the order of their names."""
    eyes: Eyes | None = None
    """None: rows with pictures cannot be computed."""

    def __init__(
        self, base: "PreTrainedModel", settings: TrainerSettings, *, between: Callable[[], None] = lambda: None
    ) -> None:
        self.between = between
        self._settings = settings
        self._recomputed = 0
        """First layers of the present pass whose activations are computed again in backward."""
        base.eval().requires_grad_(False)
        self.device = next(base.parameters()).device
        self.base_dtype: torch.dtype = base.dtype
        vocabulary = base.config.get_text_config().vocab_size
        self._chunk = _CPU_CHUNK if self.device.type == "cpu" else max(64, LOGITS_AT_ONCE // vocabulary)
        self._memory = DeviceMemory.of(base.config.to_dict(), self.device, settings)
        self._decoder: nn.Module = base.get_decoder()
        with torch.no_grad():
            self._head, self._plain_head = head_of(base), plain_head_of(base)
            self._kernel: packed_attention.Kernel | None = packing_of(base, settings)
        if self.base_dtype in HALF:
            fuse_norms(base)
        fuse_linears(base)
        layers = decoder_layers(self._decoder)
        self._layers = len(layers)
        for number, layer in enumerate(layers):
            self._wrap(layer, number)

    # -- weights -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def reset(self, seed: int) -> None:
        """Become version 0."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the weights that an engine serves."""

    @abstractmethod
    def load(self, folder: Path, kept: Mapping[str, Tensor]) -> None:
        """Become the version of a folder. Raises TrainerError when it is of another shape, or not finite.

        kept: the tensors that `state` returned for this version.
        """

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that the next step needs and `save` does not write."""
        return {}

    def updated(self) -> None:  # noqa: B027
        """Take over `parameters`, which the optimizer changed."""

    @abstractmethod
    def reference(self) -> AbstractContextManager[None]:
        """Compute with the frozen base inside the block, without gradient."""

    @property
    def is_base(self) -> bool:
        """True where the policy is known to compute what its reference computes."""
        return False

    def is_finite(self) -> bool:
        largest = nn.utils.get_total_norm([p.detach() for p in self.parameters.values()], math.inf)
        return math.isfinite(float(largest))

    # -- forward passes ------------------------------------------------------------------------------------------------

    @property
    def is_packing(self) -> bool:
        return self._kernel is not None

    def cut(self, rows: Sequence[Row], token_budget: int) -> list[MicroBatch]:
        """Cut the rows into passes of at most `token_budget` positions, packed if this policy packs.

        A row with pictures is a pass of its own.
        """
        most = token_budget if self._settings.recompute == "never" else None
        text, seeing = ([row for row in rows if bool(row.pictures) is has] for has in (False, True))
        passes = micro_batches(
            text, token_budget, packed=self.is_packing, shares_stems=self._kernel == "split", most=most
        )
        return [*passes, *(MicroBatch((row,)) for row in seeing)]

    def recomputes(self, batch: MicroBatch, token_budget: int) -> bool:
        """Return True if a pass with gradient should keep one activation per layer and recompute the rest."""
        if self._settings.recompute != "auto":
            return self._settings.recompute == "always"
        # A row over the budget comes alone; its activations would not fit in the memory that the budget assumes.
        return batch.tokens > token_budget or not self._memory.holds_activations_of(batch.tokens)

    def save_memory(self) -> bool:
        """Keep fewer activations from now on, because memory ran out. Return False if none were kept already."""
        return self._memory.assume_less()

    def log_probs(self, batch: MicroBatch, *, recompute: bool = False) -> dict[int, Tensor]:
        """Return by sample index log π(token | all before it) [T] at the sample's temperature.

        Positions whose mask is False are 0, without gradient.
        """
        return {index: found.log_probs for index, found in self.token_log_probs(batch, recompute=recompute).items()}

    def token_log_probs(
        self,
        batch: MicroBatch,
        *,
        recompute: bool = False,
        gather: Mapping[int, Sequence[Ids]] | None = None,
        unscaled: bool = False,
    ) -> dict[int, TokenLogProbs]:
        """Return by sample index the `log_probs` [T], and from the same logits others at temperature 1.

        gather: sample index → [T, K] ids whose log-probs are wanted. unscaled: also those of the sampled tokens.
        recompute: keep one activation per layer and recompute the rest in backward, a third more time for a tenth of
        the memory; a pass over the settings' budget keeps all of some layers. Positions whose mask is False are zeros;
        only trained positions reach the output head.
        """
        tables = {piece.index: gather[piece.index] for piece in batch.pieces if gather and piece.index in gather}
        width = max((len(row) for table in tables.values() for row in table), default=0)
        where: list[int] = []
        ids: list[int] = []
        temperatures: list[float] = []
        others: list[Ids] = []
        for places, row in zip(batch.places, batch.rows, strict=True):
            for piece in row.pieces:
                table = tables.get(piece.index)
                for k in piece.trained:
                    where.append(places[piece.start + k - 1])
                    ids.append(row.ids[piece.start + k])
                    temperatures.append(piece.temperature)
                    wanted = () if table is None else tuple(table[k])
                    others.append(wanted + (0,) * (width - len(wanted)))  # cut off again below
        with self._precision():
            hidden = self._hidden(batch, recompute=recompute)  # [R * W, H]
            flat = self._selected(
                hidden[torch.tensor(where, device=self.device)],  # [N, H]
                torch.tensor(ids, device=self.device),
                torch.tensor(temperatures, device=self.device, dtype=torch.promote_types(hidden.dtype, torch.float32)),
                gather=torch.tensor(others, device=self.device) if width else None,
                unscaled=unscaled,
            )
        found, start = {}, 0
        for piece in batch.pieces:
            end = start + len(piece.trained)
            table = tables.get(piece.index)
            found[piece.index] = TokenLogProbs(
                _placed(flat.log_probs[start:end], piece),
                None if flat.unscaled is None else _placed(flat.unscaled[start:end], piece),
                None
                if flat.gathered is None or table is None
                else _placed(flat.gathered[start:end, : len(table[0])], piece),
            )
            start = end
        return found

    def _selected(
        self, hidden: Tensor, ids: Tensor, temperature: Tensor, *, gather: Tensor | None, unscaled: bool
    ) -> TokenLogProbs:
        weight = self._plain_head
        if weight is not None and gather is None and not unscaled and has_fast_head(hidden, weight):
            return TokenLogProbs(HeadLogProbs.apply(hidden, ids, temperature, weight))
        return selected_log_probs(
            hidden, ids, temperature, self._head, gather=gather, unscaled=unscaled, chunk=self._chunk
        )

    def _precision(self) -> AbstractContextManager[object]:
        """Return the autocast context: fp32 adapters beside 16-bit weights multiply in 16 bits, with fp32 gradients."""
        is_half = self.base_dtype in HALF
        return torch.autocast(self.device.type, self.base_dtype) if is_half else contextlib.nullcontext()

    def _hidden(self, batch: MicroBatch, *, recompute: bool) -> Tensor:
        """Return the hidden states: [R * W, H] of padded rows, [T, H] of packed ones."""
        self._recomputed = self._recomputed_layers(batch.tokens) if recompute else 0
        if batch.is_packed:
            if self._kernel is None:
                raise ValueError("this policy's rows are padded: cut them by its own `cut`")
            layout = PackedLayout.of(batch.lengths, self.device, self._kernel, batch.places)
            starts = zip(batch.rows, batch.starts, strict=True)
            ids = torch.tensor([[i for row, start in starts for i in row.ids[start:-1]]])
            return decode(self._decoder, ids.to(self.device), layout).flatten(0, 1)
        if batch.rows[0].pictures:
            if self.eyes is None:
                raise ValueError("this policy sees no pictures: its learner drops such samples")
            return self.eyes.hidden(batch.rows[0].ids[:-1], batch.rows[0].pictures)
        ids = torch.zeros(len(batch.rows), batch.width, dtype=torch.long)
        for number, row in enumerate(batch.rows):
            ids[number, : len(row.ids) - 1] = torch.tensor(row.ids[:-1])
        return decode(self._decoder, ids.to(self.device)).flatten(0, 1)

    def _recomputed_layers(self, tokens: int) -> int:
        budget = self._settings.token_budget
        if self._settings.recompute == "always" or tokens <= budget:
            return self._layers
        # The first ones: when backward comes to them, the memory of the others is free again.
        return math.ceil(self._layers * (1 - self._memory.kept_share(tokens, budget)))

    def _wrap(self, layer: nn.Module, number: int) -> None:
        """Make a layer interruptible, and its activations recomputable."""
        # transformers' own activation checkpointing needs training mode, which would switch dropout on.
        forward = layer.forward

        def interruptible(*args: Any, **kwargs: Any) -> Any:
            self.between()
            output = forward(*args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:  # and again when the gradient comes back to this layer
                hidden.register_hook(lambda _: self.between())
            return output

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if number < self._recomputed and torch.is_grad_enabled():
                return checkpoint(interruptible, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            return interruptible(*args, **kwargs)

        layer.forward = wrapped


def _placed(values: Tensor, piece: Piece) -> Tensor:
    """Return [T, …]: a piece's values at its trained tokens, zeros elsewhere."""
    places = torch.tensor(piece.trained, device=values.device)
    return values.new_zeros(piece.length, *values.shape[1:]).index_put((places,), values)
