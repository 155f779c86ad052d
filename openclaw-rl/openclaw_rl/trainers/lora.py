"""The policy a trainer trains: a frozen base and one LoRA adapter (PEFT), with log-probs at response positions only.

Promises: the log-probs are those of a plain forward pass, log_softmax(logits / T) in fp32; equal seeds give equal
first adapters; the adapter's files are a PEFT folder that PEFT and SGLang load. The base is never touched, and never
in training mode: dropout would train a policy that nobody served.

Leaves to others: the loss, the optimizer, folders that must survive a crash (`checkpoint.py`).
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from openclaw_rl.errors import SettingsError, TrainerError
from openclaw_rl.losses import TokenLogProbs, selected_log_probs
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.batches import MicroBatch, Piece
from openclaw_rl.types import Ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_FILE = "adapter_model.safetensors"
_DEFAULT_TARGETS = TrainerSettings.model_fields["target_modules"].default


class LoraPolicy:
    """`between` is called before each decoder layer, forward and backward: a raise there ends a pass early, a pause
    yields the processor."""

    parameters: dict[str, nn.Parameter]
    """The trainable ones, in the order of their names."""

    def __init__(
        self, base: "PreTrainedModel", settings: TrainerSettings, *, between: Callable[[], None] = lambda: None
    ) -> None:
        self.between = between
        self._settings = settings
        self._recompute = False
        base.eval().requires_grad_(False)
        self._decoder: nn.Module = base.get_decoder()
        self._head = _head_of(base)
        for layer in _decoder_layers(self._decoder):
            self._wrap(layer)
        alpha = int(settings.alpha) if settings.alpha.is_integer() else settings.alpha
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=alpha,  # scaling is alpha / rank; a fraction is fine
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            fan_in_fan_out=any(_is_conv1d(module) for module in self._decoder.modules()),
            target_modules=sorted(target_modules(self._decoder, settings.target_modules)),
        )
        self.model: PeftModel = get_peft_model(base, config).eval()
        self.parameters = {
            name: parameter for name, parameter in sorted(self.model.named_parameters()) if parameter.requires_grad
        }
        self.device = next(base.parameters()).device

    # -- weights -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """The adapter that changes nothing: A drawn from `seed` in the order of names, B zero."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.parameters.items():
            if ".lora_A." in name:
                drawn = torch.empty(parameter.shape, dtype=torch.float32)
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
                parameter.copy_(drawn)
            else:
                parameter.zero_()

    def save(self, folder: Path) -> None:
        """Write the adapter as a PEFT folder: `adapter_config.json` and `adapter_model.safetensors`."""
        tensors = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            folder / ADAPTER_FILE,
            metadata={"format": "pt"},
        )
        config = copy.copy(self.model.peft_config["default"])
        config.inference_mode = True
        config.base_model_name_or_path = None  # a path of this machine; `base_hash` in the ledger says which base it is
        config.save_pretrained(str(folder))

    def load(self, folder: Path) -> None:
        """Take the adapter of a PEFT folder. Raises TrainerError when it is of another shape, or not finite."""
        tensors = load_file(folder / ADAPTER_FILE)
        expected = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        if {n: tuple(t.shape) for n, t in tensors.items()} != {n: tuple(t.shape) for n, t in expected.items()}:
            raise TrainerError(
                f"{folder}: this adapter has other modules or another rank than trainer.target_modules and "
                f"trainer.rank = {self._settings.rank} say"
            )
        set_peft_model_state_dict(self.model, tensors)
        if not self.is_finite():
            raise TrainerError(f"{folder}: the adapter holds values that are not finite")

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(parameter).all()) for parameter in self.parameters.values())

    # -- forward passes ------------------------------------------------------------------------------------------------

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
        hidden = self._hidden(batch, recompute=recompute)  # [R, W, H]
        tables = {piece.index: gather[piece.index] for piece in batch.pieces if gather and piece.index in gather}
        width = max((len(row) for table in tables.values() for row in table), default=0)
        where: list[tuple[int, int]] = []
        ids: list[int] = []
        temperatures: list[float] = []
        others: list[Ids] = []
        for number, row in enumerate(batch.rows):
            for piece in row.pieces:
                table = tables.get(piece.index)
                for k in piece.trained:
                    where.append((number, piece.start + k - 1))
                    ids.append(row.ids[piece.start + k])
                    temperatures.append(piece.temperature)
                    wanted = () if table is None else tuple(table[k])
                    others.append(wanted + (0,) * (width - len(wanted)))  # cut away again below
        rows, columns = torch.tensor(where, device=self.device).unbind(-1)
        chosen = hidden[rows, columns]  # [N, H]
        flat = selected_log_probs(
            chosen,
            torch.tensor(ids, device=self.device),
            torch.tensor(temperatures, device=self.device, dtype=torch.promote_types(chosen.dtype, torch.float32)),
            self._head,
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

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the frozen base answers."""
        with self.model.disable_adapter(), torch.no_grad():
            yield

    def _hidden(self, batch: MicroBatch, *, recompute: bool) -> Tensor:
        ids = torch.zeros(len(batch.rows), batch.width, dtype=torch.long)
        for number, row in enumerate(batch.rows):
            ids[number, : len(row.ids) - 1] = torch.tensor(row.ids[:-1])
        self._recompute = recompute
        hidden: Tensor = self._decoder(input_ids=ids.to(self.device), use_cache=False).last_hidden_state
        return hidden

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


def _placed(values: Tensor, piece: Piece) -> Tensor:
    """The values of a piece's trained tokens in their places among all T; zeros elsewhere."""
    places = torch.tensor(piece.trained, device=values.device)
    return values.new_zeros(piece.length, *values.shape[1:]).index_put((places,), values)


def target_modules(decoder: nn.Module, wanted: Sequence[str]) -> set[str]:
    """The names PEFT adapts. The default names that a model lacks (GPT-2, Phi-3 …) are replaced by all its linear
    layers; a name the user gave must exist. Raises SettingsError."""
    linear = {name.rsplit(".", 1)[-1] for name, module in decoder.named_modules() if _is_linear(module)}
    missing = set(wanted) - linear
    if not missing:
        return set(wanted)
    if tuple(wanted) == _DEFAULT_TARGETS and linear:
        return linear
    raise SettingsError(
        f"trainer.target_modules: the model has no {', '.join(sorted(missing))}; its linear layers are "
        f"{', '.join(sorted(linear)) or 'none'}"
    )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear layer, whose weight lies the other way round."""
    return type(module).__name__ == "Conv1D"


def _decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """The repeated blocks; none where a model keeps them elsewhere: then no pass is cut short or recomputed."""
    lists = [list(module) for module in decoder.children() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


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

    with torch.no_grad():
        ids = torch.arange(8, device=next(base.parameters()).device).unsqueeze(0)
        own = base(input_ids=ids, use_cache=False).logits
        ours = head(base.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state)
        if not torch.allclose(own.float(), ours.float(), rtol=1e-3, atol=1e-3):
            raise SettingsError(f"{type(base).__name__} computes its logits in a way that this trainer does not know")
    return head
