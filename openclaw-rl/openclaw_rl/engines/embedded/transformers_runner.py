"""The runner for every architecture: transformers' own model, one sequence after the other. Exact, and not fast.

It serves the architectures that `llama_runner` does not know. Adapters are PEFT's, switched between sequences.
"""

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from openclaw_rl.engines.embedded.runner import KV, Adapter, Logits, Span
from openclaw_rl.errors import EngineRefused


@dataclass(slots=True, eq=False)
class CacheKV:
    """`KV` as transformers' cache."""

    cache: DynamicCache
    length: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class KeptLogits:
    """`Logits` that the forward has computed already."""

    kept: Tensor  # [keep, V]

    def __len__(self) -> int:
        return self.kept.shape[0]

    def rows(self, begin: int, end: int) -> Tensor:
        return self.kept[begin:end].float()


class TransformersRunner:
    """`Runner` over any causal language model of transformers."""

    def __init__(self, model: PreTrainedModel, *, context_length: int) -> None:
        self._model = model
        self._device = model.device
        self._config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = self._config.vocab_size
        self.context_length = context_length
        # Only plain per-token layers can be cut back to a prefix; recurrent and sliding-window ones cannot.
        self.can_share = all(type(layer) is DynamicLayer for layer in DynamicCache(config=self._config).layers)
        self._adapters = 0
        self._lock = threading.Lock()
        """Loading an adapter changes the model's modules, and may come from another thread."""

    def new_kv(self) -> CacheKV:
        return CacheKV(DynamicCache(config=self._config))

    def copy_kv(self, kv: KV, length: int) -> CacheKV:
        assert isinstance(kv, CacheKV)
        copied = CacheKV(copy.deepcopy(kv.cache), kv.length)
        self.truncate_kv(copied, length)
        return copied

    def truncate_kv(self, kv: KV, length: int) -> None:
        assert isinstance(kv, CacheKV)
        if length < kv.length:
            kv.cache.crop(length - kv.length)
            kv.length = length

    def run(self, spans: Sequence[Span]) -> list[Logits]:
        with self._lock:
            return [self._run(span) for span in spans]

    def _run(self, span: Span) -> KeptLogits:
        kv = span.kv
        assert isinstance(kv, CacheKV)
        self._activate(span.adapter)
        output = self._model(
            input_ids=torch.tensor([list(span.ids)], device=self._device),
            past_key_values=kv.cache,
            use_cache=True,
            logits_to_keep=max(span.keep, 1),  # 0 would mean all
        )
        kv.length += len(span.ids)
        return KeptLogits(output.logits[0, -span.keep :] if span.keep else output.logits[0, :0])

    def last(self, logits: Sequence[Logits]) -> Tensor:
        return torch.cat([rows.rows(len(rows) - 1, len(rows)) for rows in logits])

    def _activate(self, adapter: Adapter | None) -> None:
        if not self._adapters:
            return
        if adapter is None:
            self._model.disable_adapters()
        else:
            self._model.enable_adapters()
            self._model.set_adapter(adapter.weights)

    def load_adapter(self, name: str, folder: Path) -> Adapter:
        if not (folder / "adapter_config.json").is_file():
            raise EngineRefused(f"{folder} holds no adapter_config.json", status=400)
        with self._lock:
            self._adapters += 1
            inner = f"adapter_{self._adapters}"  # PEFT's names are module names: ours may hold dots, and come again
            try:
                self._model.load_adapter(str(folder), adapter_name=inner)
            except (ValueError, OSError, RuntimeError, KeyError) as error:
                raise EngineRefused(f"{folder}: {error}", status=400) from error
        return Adapter(name, inner)

    def drop_adapter(self, adapter: Adapter) -> None:
        self._model.delete_adapter(adapter.weights)

    def load_weights(self, folder: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        own = self._model.state_dict()
        wrong = [name for name, tensor in tensors.items() if name not in own or own[name].shape != tensor.shape]
        if wrong or not tensors:
            raise EngineRefused(f"{folder} does not fit the model: {wrong[:3] or 'no safetensors'}", status=400)
        self._model.load_state_dict(tensors, strict=False)
