"""A policy's forward passes: a causal language model, with log-probs at response positions only.

Promises: the log-probs are those of a plain forward pass, log_softmax(logits / T) in fp32, however the rows of a
micro-batch lie. The model is never in training mode: dropout would train a policy that nobody served. With 16-bit
weights the matrix products are in 16 bits, and what is trained is kept in fp32.

Leaves to others: what is trained of the model and how it is written (`lora`, `full`), the loss, the optimizer.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import structlog
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from openclaw_rl.errors import SettingsError
from openclaw_rl.losses import TokenLogProbs, selected_log_probs
from openclaw_rl.memory_budget import LOGITS_AT_ONCE
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers import packed_attention
from openclaw_rl.trainers.batches import MicroBatch, Piece, Row, micro_batches
from openclaw_rl.trainers.card import Card
from openclaw_rl.trainers.fused import fuse_norms
from openclaw_rl.trainers.packed_attention import PackedLayout
from openclaw_rl.types import Ids, WeightKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = structlog.get_logger()

_CPU_CHUNK = 256
"""Positions whose logits exist at a time; a GPU is given more of them, `LOGITS_AT_ONCE` logits in all."""
_HALF = (torch.bfloat16, torch.float16)


class Policy(ABC):
    """`between` is called before each decoder layer, forward and backward: a raise there ends a pass early, a pause
    yields the processor."""

    kind: ClassVar[WeightKind]
    weights_file: ClassVar[str]
    parameters: dict[str, nn.Parameter]
    """The trainable ones, fp32 where the model has 16 bits, in the order of their names."""

    def __init__(
        self, base: "PreTrainedModel", settings: TrainerSettings, *, between: Callable[[], None] = lambda: None
    ) -> None:
        self.between = between
        self._settings = settings
        self._recompute = False
        base.eval().requires_grad_(False)
        self.device = next(base.parameters()).device
        self._dtype: torch.dtype = base.dtype
        vocabulary = base.config.get_text_config().vocab_size
        self._chunk = _CPU_CHUNK if self.device.type == "cpu" else max(64, LOGITS_AT_ONCE // vocabulary)
        self._card = Card.of(base.config.to_dict(), self.device, settings)
        self._decoder: nn.Module = base.get_decoder()
        with torch.no_grad():
            self._head = _head_of(base)
            self._kernel: packed_attention.Kernel | None = _packing_of(base, settings)
        if self._dtype in _HALF:
            fuse_norms(base)
        for layer in decoder_layers(self._decoder):
            self._wrap(layer)

    # -- weights -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def reset(self, seed: int) -> None:
        """Become version 0."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write what an engine serves."""

    @abstractmethod
    def load(self, folder: Path, kept: Mapping[str, Tensor]) -> None:
        """Become the version of a folder. `kept`: what `state` gave with it. Raises TrainerError when it is of another
        shape, or not finite."""

    def state(self) -> dict[str, Tensor]:
        """What `save` does not write and the next step needs."""
        return {}

    def updated(self) -> None:  # noqa: B027
        """`parameters` were changed by the optimizer."""

    @abstractmethod
    def reference(self) -> AbstractContextManager[None]:
        """Inside, the frozen base answers, without gradient."""

    def is_finite(self) -> bool:
        largest = nn.utils.get_total_norm([p.detach() for p in self.parameters.values()], math.inf)
        return math.isfinite(float(largest))

    # -- forward passes ------------------------------------------------------------------------------------------------

    @property
    def is_packing(self) -> bool:
        return self._kernel is not None

    def cut(self, rows: Sequence[Row], token_budget: int) -> list[MicroBatch]:
        """The rows in passes of at most `token_budget` positions, as this policy computes them best."""
        return micro_batches(rows, token_budget, packed=self.is_packing)

    def recomputes(self, batch: MicroBatch, token_budget: int) -> bool:
        """Whether a pass with gradient should keep one activation per layer only and compute the rest again."""
        if self._settings.recompute != "auto":
            return self._settings.recompute == "always"
        # A row over the budget came alone; its activations would not fit in the memory that the budget stands for.
        return batch.tokens > token_budget or not self._card.holds_activations_of(batch.tokens)

    def save_memory(self) -> bool:
        """After memory ran out: keep less from now on. Whether there was less to keep."""
        return self._card.assume_less()

    def log_probs(self, batch: MicroBatch, *, recompute: bool = False) -> dict[int, Tensor]:
        """Sample index → log π(token | all before it) [T] at the sample's temperature; 0 without gradient where the
        mask is False.
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
        """`log_probs`, and from the same logits those at temperature 1: with `unscaled` of the same tokens, and of the
        ids that `gather` lists [T, K] for a sample's index. T tokens each; zeros where the mask is False.

        Only trained positions reach the output head. `recompute`: keep one activation per layer and compute the rest
        again in backward, a third more time for a tenth of the memory.
        """
        tables = {piece.index: gather[piece.index] for piece in batch.pieces if gather and piece.index in gather}
        width = max((len(row) for table in tables.values() for row in table), default=0)
        where: list[int] = []
        ids: list[int] = []
        temperatures: list[float] = []
        others: list[Ids] = []
        for offset, row in zip(_offsets(batch), batch.rows, strict=True):
            for piece in row.pieces:
                table = tables.get(piece.index)
                for k in piece.trained:
                    where.append(offset + piece.start + k - 1)
                    ids.append(row.ids[piece.start + k])
                    temperatures.append(piece.temperature)
                    wanted = () if table is None else tuple(table[k])
                    others.append(wanted + (0,) * (width - len(wanted)))  # cut away again below
        with self._precision():
            hidden = self._hidden(batch, recompute=recompute)  # [R * W, H]
            flat = selected_log_probs(
                hidden[torch.tensor(where, device=self.device)],  # [N, H]
                torch.tensor(ids, device=self.device),
                torch.tensor(temperatures, device=self.device, dtype=torch.promote_types(hidden.dtype, torch.float32)),
                self._head,
                gather=torch.tensor(others, device=self.device) if width else None,
                unscaled=unscaled,
                chunk=self._chunk,
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

    def _precision(self) -> AbstractContextManager[object]:
        """fp32 adapters beside 16-bit weights are multiplied in 16 bits, and their gradients arrive in fp32."""
        is_half = self._dtype in _HALF
        return torch.autocast(self.device.type, self._dtype) if is_half else contextlib.nullcontext()

    def _hidden(self, batch: MicroBatch, *, recompute: bool) -> Tensor:
        """[R * W, H] of padded rows, [T, H] of packed ones."""
        self._recompute = recompute
        if batch.is_packed:
            if self._kernel is None:
                raise ValueError("this policy's rows are padded: cut them by its own `cut`")
            layout = PackedLayout.of(batch.lengths, self.device, self._kernel)
            ids = torch.tensor([[i for row in batch.rows for i in row.ids[:-1]]])
            return _decode(self._decoder, ids.to(self.device), layout).flatten(0, 1)
        ids = torch.zeros(len(batch.rows), batch.width, dtype=torch.long)
        for number, row in enumerate(batch.rows):
            ids[number, : len(row.ids) - 1] = torch.tensor(row.ids[:-1])
        return _decode(self._decoder, ids.to(self.device)).flatten(0, 1)

    def _wrap(self, layer: nn.Module) -> None:
        """Our own activation checkpointing: transformers' needs training mode, which would switch dropout on."""
        forward = layer.forward

        def interruptible(*args: Any, **kwargs: Any) -> Any:
            self.between()
            output = forward(*args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:  # and again when the gradient comes back to this layer
                hidden.register_hook(lambda _: self.between())
            return output

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._recompute and torch.is_grad_enabled():
                return checkpoint(interruptible, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            return interruptible(*args, **kwargs)

        layer.forward = wrapped


def _offsets(batch: MicroBatch) -> Iterator[int]:
    """Where each row begins among the computed positions."""
    offset = 0
    for length in batch.lengths:
        yield offset
        offset += length if batch.is_packed else batch.width


def _placed(values: Tensor, piece: Piece) -> Tensor:
    """The values of a piece's trained tokens in their places among all T; zeros elsewhere."""
    places = torch.tensor(piece.trained, device=values.device)
    return values.new_zeros(piece.length, *values.shape[1:]).index_put((places,), values)


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """The repeated blocks; none where a model keeps them elsewhere: then no pass is cut short or recomputed."""
    lists = [list(module) for module in decoder.children() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _decode(decoder: nn.Module, ids: Tensor, layout: PackedLayout | None = None) -> Tensor:
    """Hidden states [R, W, H]. A mask of four dimensions is passed on to the layers as it is: with a layout nobody
    reads it, and transformers makes none of its own, whose size would be the row's length squared."""
    more: dict[str, Any] = {}
    if layout is not None:
        unread = ids.new_empty((0, 0, 0, 0))
        more = {"position_ids": layout.positions, "attention_mask": unread, "packed_layout": layout}
    hidden: Tensor = decoder(input_ids=ids, use_cache=False, **more).last_hidden_state
    return hidden


def _head_of(base: "PreTrainedModel") -> Callable[[Tensor], Tensor]:
    """Hidden states → logits as in the model's own forward pass. Raises SettingsError where that is something else."""
    project: nn.Module | None = base.get_output_embeddings()
    if project is None:
        raise SettingsError(f"{type(base).__name__} has no output head: it is not a causal language model")
    config: Mapping[str, object] = base.config.to_dict()
    cap = config.get("final_logit_softcapping")

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = project(hidden)
        return torch.tanh(logits / cap) * cap if isinstance(cap, float) else logits

    ids = torch.arange(8, device=next(base.parameters()).device).unsqueeze(0)
    own = base(input_ids=ids, use_cache=False).logits
    ours = head(_decode(base.get_decoder(), ids))
    if not torch.allclose(own.float(), ours.float(), rtol=1e-3, atol=1e-3):
        raise SettingsError(f"{type(base).__name__} computes its logits in a way that this trainer does not know")
    return head


def _packing_of(base: "PreTrainedModel", settings: TrainerSettings) -> packed_attention.Kernel | None:
    """The kernel for packed rows; None: rows are padded, because the settings say so, because only the slow kernel
    serves here, or because this model's layers would let a packed neighbour be seen. Raises SettingsError when the
    settings insist."""
    if settings.packing == "off":
        return None
    config = base.config.get_text_config()
    heads = config.num_attention_heads
    kernel = packed_attention.choose_kernel(
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        base.dtype,
        next(base.parameters()).device,
    )
    if settings.packing == "auto" and kernel == "split":
        return None
    reason = _why_not_packed(base)
    if reason is None:
        log.info("rows_are_packed", kernel=kernel)
        return kernel
    if settings.packing == "on":
        raise SettingsError(f'trainer.packing "on": {type(base).__name__} {reason}')
    log.warning("rows_are_padded", model=type(base).__name__, reason=reason)
    return None


def _why_not_packed(base: "PreTrainedModel") -> str | None:
    """Whether two sequences behind each other have the numbers that each has alone; if so the model is left with our
    attention, else as it was."""
    config = base.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"has layers of the kinds {', '.join(sorted(kinds))}"
    device, decoder = next(base.parameters()).device, base.get_decoder()
    lengths = (9, 15)
    ids = torch.arange(sum(lengths), device=device).unsqueeze(0) % config.vocab_size
    others = torch.cat([ids[:, : lengths[0]].flip(1), ids[:, lengths[0] :]], 1)
    alone = torch.cat([_decode(decoder, part) for part in ids.split(lengths, 1)], 1).float()
    before = config._attn_implementation
    packed_attention.register()
    base.set_attn_implementation(packed_attention.ATTENTION_NAME)
    layout = PackedLayout.of(lengths, device)
    try:
        packed, beside = (_decode(decoder, row, layout).float() for row in (ids, others))
    except (NotImplementedError, TypeError, RuntimeError) as error:
        reason = f"does not take packed rows ({error})"
    else:
        # Means, not the largest: of 16 bits, deep models and other kernels some values differ by a tenth of the spread.
        spread = float(alone.std())
        leak = float((packed - beside)[:, lengths[0] :].abs().mean())
        drift = float((packed - alone).abs().mean())
        if leak <= 1e-3 * spread and drift <= (0.1 if base.dtype in _HALF else 1e-3) * spread:
            return None
        reason = f"lets packed rows see each other ({leak / spread:.2g}, {drift / spread:.2g} of the spread)"
    base.set_attn_implementation(before)
    return reason
