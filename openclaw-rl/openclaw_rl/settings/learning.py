"""Settings of learning: the judge, batches, the trainer. Those of the method are in `method_settings`."""

from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from openclaw_rl.settings.base import Branch, Url


class JudgeSettings(Branch):
    kind: Literal["rules", "llm"] = "rules"
    """`rules`: a table of phrases decides. `llm`: a model votes."""
    url: Url | None = None
    """OpenAI-compatible base URL (`http://127.0.0.1:30001/v1`) of the judge; the policy's engine without adapter when
    unset."""
    model: str | None = None
    """Model name in calls of `url`."""
    api_key: SecretStr | None = None
    """Key for `url`."""
    sees: bool | None = None
    """The judge gets pictures of the turn, before the reply and after it. Unset: it does where the policy's own engine
    judges and takes pictures; a model at `url` reads text alone, with a mark for each picture."""
    most_pictures: int = Field(default=2, ge=1, le=16)
    """Pictures in one prompt of a judge that sees: the newest before the reply, and the newest after it."""
    picture_pixels: int = Field(default=1_048_576, ge=1024)
    """Size to which a larger picture is scaled for the judge, in width times height."""
    votes: int = Field(default=3, ge=1)
    """Independent judge samples per turn; the verdict is their majority."""
    quorum: int = Field(default=2, ge=1)
    """Valid votes (or `votes`, where that is less) without which a turn stays unjudged."""
    temperature: float = Field(default=0.6, ge=0)
    """Sampling temperature of a vote."""
    max_new_tokens: int = Field(default=4096, ge=16)
    """Tokens of one vote, reasoning included."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Time for one vote."""
    workers: int = Field(default=4, ge=1)
    """Turns judged at once; judge calls yield to chats."""
    retries: int = Field(default=5, ge=0)
    """Later attempts, with growing pauses, at a turn for which the judge did not answer. After the last one the turn
    ends `unjudged`. While the judge fails for every turn, the turns wait and use up no attempt."""
    max_waiting: int = Field(default=10_000, ge=1)
    """Turns that may wait for a verdict; the oldest beyond it end as `backlog`."""

    @property
    def needed_votes(self) -> int:
        return min(self.quorum, self.votes)

    @model_validator(mode="after")
    def _quorum(self) -> Self:
        if "quorum" in self.model_fields_set and self.quorum > self.votes:
            raise ValueError(f"quorum {self.quorum} is larger than votes {self.votes}")
        return self


class TrainingSettings(Branch):
    enabled: bool = True
    """False: record and judge, never train."""
    weights: Literal["lora", "full"] = "lora"
    """Content of a version: an adapter beside a frozen base, or the model's own weights. A ledger keeps to one kind."""
    batch_size: int = Field(default=16, ge=1)
    """Samples of a training step."""
    min_batch: int = Field(default=4, ge=1)
    """Samples of the smallest step that `max_wait_s` starts."""
    max_wait_s: float = Field(default=1800.0, gt=0)
    """After this time a smaller batch of at least `min_batch` (or of `batch_size`, where that is less) is trained."""
    max_staleness: int = Field(default=4, ge=0)
    """Versions between a sample's oldest token and the tip; older ones are dropped."""
    max_tool_share: float = Field(default=0.5, ge=0, le=1)
    """Largest share of tool turns in a batch."""
    lease_s: float = Field(default=900.0, gt=0)
    """Life of a lease without a renewal; after it the samples wait again. A step that makes no progress for this long
    is not renewed, and the server restarts the local trainer."""
    max_waiting: int = Field(default=2000, ge=1)
    """Samples that may wait for a trainer; the oldest beyond it end as `backlog`."""


class TrainerSettings(Branch):
    """The local trainer."""

    kind: Literal["local", "external"] = "local"
    """`external`: the server starts no trainer; another one leases samples over the trainer API."""
    python: str | None = None
    """Interpreter of the trainer's environment; this one when unset."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the base and its matrix products: `auto` is bfloat16 on a GPU. Trained weights and log-probs are fp32."""
    quantise: Literal["none", "8bit", "4bit"] = "none"
    """Bits of the frozen base: 8, or 4 (NF4), by bitsandbytes. For a GPU that is too small for a 16-bit base."""
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    """Share of the GPU's memory that the trainer may take; the free memory when unset."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the trainer."""
    practice_threads: int | None = Field(default=None, ge=1)
    """CPU threads of a step on practice alone, which begins while nobody chats; all cores when unset."""
    nice: int = Field(default=10, ge=0, le=19)
    """Priority of the trainer's process, as of the command nice: 19 is the lowest."""
    rank: int = Field(default=16, ge=1)
    """Rank of the LoRA adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the LoRA adapter: its product is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Modules that the LoRA adapter changes."""
    learning_rate: float = Field(default=3e-4, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    """First steps, in which the learning rate rises to its value."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of AdamW."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment of AdamW."""
    beta2: float = Field(default=0.98, ge=0, lt=1)
    """Decay of the second moment of AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Norm to which larger gradients are clipped."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The objective clips ratios below 1 − this."""
    clip_high: float = Field(default=0.28, gt=0)
    """The objective clips ratios above 1 + this."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL to the frozen base."""
    old_log_probs: Literal["recompute", "rollout"] = "recompute"
    """`recompute`: the trainer's own log-probs before the step. `rollout`: those of the engine, with a dual clip."""
    tis_clip: float = Field(default=2.0, ge=1)
    """Truncated importance weight between trainer and engine."""
    tis_mask: float = Field(default=8.0, gt=1)
    """Tokens whose weight is outside [1/x, x] are masked and counted."""
    micro_batch_tokens: int | None = Field(default=None, ge=64)
    """Token budget of one forward pass; when unset 1024 on a CPU and 8192 on a GPU."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Concatenate the rows of a pass instead of padding them: `auto` on a CPU, and on a GPU in 16 bits, for models that
    support it. On a CPU, rows that begin alike are then computed once up to where they differ."""
    recompute: Literal["auto", "always", "never"] = "auto"
    """Compute activations again in backward: a third more time for a tenth of the memory. `auto`: where they would not
    fit. In a pass over the budget, on a GPU, all are; on a CPU, those of the layers that neither the budget nor a fifth
    of the free memory holds."""
    max_tokens: int = Field(default=8192, ge=64)
    """Prompt and response of one sample; longer ones are dropped as `too_long`."""
    seed: int = 0
    """Seed of the first adapter."""
    keep_checkpoints: int = Field(default=4, ge=2)
    """Optimizer states kept for rollback, beside the versions that serve."""

    @property
    def token_budget(self) -> int:
        if self.micro_batch_tokens is not None:
            return self.micro_batch_tokens
        return 1024 if self.device == "cpu" else 8192
