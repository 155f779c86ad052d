"""Stand-ins that can be checked exactly: a small tokenizer, and a learner whose weights tell what it trained on.

The learner is one tensor under AdamW. A sample's gradient is a vector of small integers, a hash of all the trainer got
of it; a batch's gradient is their sum, exact in float32 in any order. So the weights of a version are a function of its
parent's weights and moments and of the set of its samples: trained twice, left out, or resumed without its moments,
they
come out different.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from openclaw_rl.errors import TrainerError
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.settings import MemorySettings, ModelSettings
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.testing.toy_policy import BASE_SEED
from openclaw_rl.trainer_protocol import Probe
from openclaw_rl.trainers.base import Step
from openclaw_rl.trainers.checkpoint import OPTIMIZER_FILE
from openclaw_rl.types import Sample, WeightKind

BASE_HASH = "stub"
"""What the stub engine says it serves."""
WEIGHTS_FILE = "adapter_model.safetensors"
SIZE = 16
KEEP_OPTIMIZERS = 4
"""Of the newest versions, like a trainer's `keep_checkpoints`."""
REFUSED_SHARE = 12
"""One step in so many is reported wrong, so that the publisher's self-test refuses its version."""

_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_WORDS = "the a topic line short one tell about answer is sea river stone bread winter garden letter window green slow"


def make_frontend(folder: Path, *, memory: MemorySettings = MemorySettings()) -> FrontEnd:  # noqa: B008 (frozen)
    """The real front end over a tokenizer of a few hundred tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    words = _WORDS.split()
    tokenizer.train_from_iterator([" ".join(words[k:] + words[:k]) for k in range(len(words))], trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": _TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 8192}))
    return FrontEnd(ModelSettings(), folder, memory=memory)


def make_policy(frontend: FrontEnd, low_id: int = 256, mean_tokens: int = 12) -> ToyPolicy:
    """Replies of the tokenizer's merged tokens, which are plain words and parts of them."""
    (end_id,) = frontend.end_ids
    return ToyPolicy(low_id=low_id, high_id=end_id - 2, end_id=end_id, mean_tokens=mean_tokens)


def seed_of(sha256: str) -> int:
    """What the stub engine makes of an adapter whose weights file has this hash."""
    return int.from_bytes(bytes.fromhex(sha256)[:8], "big")


def gradient(sample: Sample) -> torch.Tensor:
    """[SIZE] small integers, of everything that a trainer is given of a sample."""
    told = (
        sample.sample_id.encode(),
        struct.pack(f"<{len(sample.prompt_ids)}I", *sample.prompt_ids),
        struct.pack(f"<{len(sample.response_ids)}I", *sample.response_ids),
        struct.pack(f"<{len(sample.rollout_log_probs)}d", *sample.rollout_log_probs),
        bytes(sample.loss_mask),
        repr((sample.versions, sample.temperature, sample.reward, sample.is_tool_turn)).encode(),
    )
    digest = hashlib.blake2b(b"\0".join(told), digest_size=SIZE).digest()
    return torch.tensor([byte % 17 - 8 for byte in digest], dtype=torch.float32)


class ToyLearner:
    """`trainers.base.Learner`. `pause` is called with a name wherever a kill should be possible."""

    kind = WeightKind.LORA
    base_hash = BASE_HASH

    def __init__(self, policy: ToyPolicy, pause: Callable[[str], None] = lambda _: None) -> None:
        self._policy, self._pause = policy, pause
        self._seed = BASE_SEED
        self._fresh(torch.zeros(SIZE))

    def _fresh(self, weights: torch.Tensor) -> None:
        self._weights = torch.nn.Parameter(weights.clone())
        self._optimizer = torch.optim.AdamW([self._weights], lr=0.01, weight_decay=0.01)

    def load(self, folder: Path | None, *, fresh_moments: bool) -> None:
        if folder is None:
            self._seed = BASE_SEED
            self._fresh(torch.zeros(SIZE))
            return
        try:
            self._fresh(load_file(folder / WEIGHTS_FILE)["weights"])
            self._seed = seed_of(hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest())
            if (folder / OPTIMIZER_FILE).exists() and not fresh_moments:
                self.resume(load_file(folder / OPTIMIZER_FILE))
        except OSError as error:
            raise TrainerError(f"{folder}: {error}") from error

    def resume(self, moments: dict[str, torch.Tensor]) -> None:
        """Go on with the moments that `moments` gave."""
        self._optimizer.state[self._weights] = {name: value.clone() for name, value in moments.items()}

    def moments(self) -> dict[str, torch.Tensor]:
        return dict(self._optimizer.state[self._weights])

    def hold(self, weights: bytes | None, moments: dict[str, torch.Tensor] | None) -> None:
        """`load`, from memory."""
        from safetensors.torch import load as parse

        self._fresh(torch.zeros(SIZE) if weights is None else parse(weights)["weights"])
        if moments is not None:
            self.resume(moments)

    def warm_up(self) -> None:
        """Let torch import what it imports at the first step; that takes seconds."""
        self._weights.grad = torch.zeros(SIZE)
        self._optimizer.step()

    def weights(self) -> bytes:
        """The weights file."""
        return bytes(save({"weights": self._weights.detach()}))

    def step(self, samples: Sequence[Sample], between: Callable[[], None], parent: int | None = None) -> Step:
        between()
        # By hand: what was forked after a backward pass may make none.
        self._weights.grad = torch.stack([gradient(sample) for sample in samples]).sum(dim=0)
        self._optimizer.step()
        between()
        self._pause("stepped")
        before, self._seed = self._seed, seed_of(hashlib.sha256(self.weights()).hexdigest())
        first = samples[0]
        ids, start = (*first.prompt_ids, *first.response_ids), len(first.prompt_ids)
        error = 1.0 if is_reported_wrong(samples) else 0.0
        probe = Probe(
            prompt_ids=list(first.prompt_ids),
            response_ids=list(first.response_ids),
            log_probs=[value - error for value in self._policy.log_probs(ids, start, self._seed)],
            parent_log_probs=list(self._policy.log_probs(ids, start, before)),
        )
        return Step(metrics={"samples": float(len(samples))}, probes=(probe,))

    def write(self, folder: Path) -> str:
        for name, content in ((WEIGHTS_FILE, self.weights()), (OPTIMIZER_FILE, save(self.moments()))):
            with (folder / name).open("wb") as file:
                file.write(content[: len(content) // 2])
                file.flush()
                self._pause("writing")
                file.write(content[len(content) // 2 :])
        return WEIGHTS_FILE


def is_reported_wrong(samples: Sequence[Sample]) -> bool:
    names = "\0".join(sorted(sample.sample_id for sample in samples))
    return hashlib.blake2b(names.encode()).digest()[0] % REFUSED_SHARE == 0
