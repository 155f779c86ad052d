"""Measures a model's own code: its layers, its logits, and whether its rows can be packed.

The module holds no list of architectures. Each answer is measured on the model itself, beside its own forward pass.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import structlog
import torch
from torch import Tensor, nn

from openclaw_rl.errors import SettingsError
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers import packed_attention
from openclaw_rl.trainers.packed_attention import PackedLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = structlog.get_logger()

HALF = (torch.bfloat16, torch.float16)


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks; an empty list if the model keeps them elsewhere.

    Without them no pass can be interrupted or recomputed.
    """
    lists = [list(module) for module in decoder.children() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def decode(decoder: nn.Module, ids: Tensor, layout: PackedLayout | None = None) -> Tensor:
    """Return the hidden states [R, W, H]."""
    more: dict[str, Any] = {}
    if layout is not None:
        # transformers passes a mask of four dimensions on to the layers. Packed attention does not read it, and
        # transformers then builds no mask of its own, whose size would be the row's length squared.
        unread = ids.new_empty((0, 0, 0, 0))
        more = {"position_ids": layout.positions, "attention_mask": unread, "packed_layout": layout}
    hidden: Tensor = decoder(input_ids=ids, use_cache=False, **more).last_hidden_state
    return hidden


def head_of(base: "PreTrainedModel") -> Callable[[Tensor], Tensor]:
    """Return the map from hidden states to logits. Raises SettingsError if it differs from the model's own forward."""
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
    ours = head(decode(base.get_decoder(), ids))
    if not torch.allclose(own.float(), ours.float(), rtol=1e-3, atol=1e-3):
        raise SettingsError(f"{type(base).__name__} computes its logits in a way that this trainer does not know")
    return head


def plain_head_of(base: "PreTrainedModel") -> Tensor | None:
    """Return the weight [V, H] of a head whose logits are the weight's product with the hidden state, and no more."""
    project = base.get_output_embeddings()
    has_more = base.config.to_dict().get("final_logit_softcapping") is not None
    if type(project) is not nn.Linear or project.bias is not None or has_more:
        return None
    return project.weight


def packing_of(base: "PreTrainedModel", settings: TrainerSettings) -> packed_attention.Kernel | None:
    """Return the kernel for packed rows, or None for padded rows.

    Rows are padded if the settings say so, if a GPU has the plain kernel alone, or if this model's layers let packed
    rows see each other. Raises SettingsError if `trainer.packing = "on"` cannot be kept.
    """
    if settings.packing == "off":
        return None
    config = base.config.get_text_config()
    heads = config.num_attention_heads
    kernel = packed_attention.choose_kernel(
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        base.dtype,
        device := next(base.parameters()).device,
    )
    # On a CPU no kernel is faster than the plain one, which also lets rows share their beginnings.
    if settings.packing == "auto" and kernel == "split" and device.type != "cpu":
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
    """Compare two packed sequences with each alone. Return a reason if they differ, None if they agree.

    With None the model keeps our attention; with a reason it is left as it was.
    """
    config = base.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"has layers of the kinds {', '.join(sorted(kinds))}"
    device, decoder = next(base.parameters()).device, base.get_decoder()
    lengths = (9, 15)
    ids = torch.arange(sum(lengths), device=device).unsqueeze(0) % config.vocab_size
    # Other tokens, not the same ones in another order: a layer that adds up its tokens would not notice an order.
    others = torch.cat([(ids[:, : lengths[0]] + sum(lengths)) % config.vocab_size, ids[:, lengths[0] :]], 1)
    alone = torch.cat([decode(decoder, part) for part in ids.split(lengths, 1)], 1).float()
    before = config._attn_implementation
    packed_attention.register()
    # A vision tower attends in both directions: it keeps its own attention.
    attends: Any = base if getattr(base.config, "vision_config", None) is None else decoder
    attends.set_attn_implementation(packed_attention.ATTENTION_NAME)
    layout = PackedLayout.of(lengths, device)
    try:
        packed, beside = (decode(decoder, row, layout).float() for row in (ids, others))
    except (NotImplementedError, TypeError, RuntimeError) as error:
        reason = f"does not take packed rows ({error})"
    else:
        # Means, not the largest: of 16 bits, deep models and other kernels some values differ by a tenth of the spread.
        spread = float(alone.std())
        leak = float((packed - beside)[:, lengths[0] :].abs().mean())
        drift = float((packed - alone).abs().mean())
        if leak <= 1e-3 * spread and drift <= (0.1 if base.dtype in HALF else 1e-3) * spread:
            return None
        if leak > 1e-3 * spread:
            reason = f"lets packed rows see each other (by {leak / spread:.2g} of the spread)"
        else:
            reason = f"computes other numbers in packed rows (off by {drift / spread:.2g} of the spread)"
    attends.set_attn_implementation(before)
    return reason
