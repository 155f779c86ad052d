"""The server's settings on a node: one table, of the launch script's variables under the user's `--set`.

slime's command line takes its numbers from the same table (`under_settings`), so that no setting acts on the server
alone. A key that no part of a node reads is refused by its name.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from openclaw_rl.errors import SettingsError
from openclaw_rl.settings import MethodSettings, Settings, TrainerSettings, is_loopback, load, settings_class
from openclaw_rl.settings.loading import parse_value
from openclaw_slime.arguments import NodeOptions

DATA_DIR = "~/.openclaw-rl/node"
HOLD_S = 300
"""Longest wait of a chat while a dead engine comes back, then the driver, which sends its weights.

Measured: 80 s for a 0.6B model.
"""
JUDGE_TIMEOUT_S = 600
"""Time of one judge answer: a thought of twice `judge.max_new_tokens`, at some 30 tokens a second."""
DRIFT_KL = 0.01
"""KL_COEF, where the teacher is the policy itself and moves with it."""

_IN_ARGV = {"learning_rate", "weight_decay", "beta1", "beta2", "max_grad_norm", "warmup_steps", "kl_coef"}
_IN_OUR_CODE = {"clip_low", "clip_high", "old_log_probs", "tis_clip", "tis_mask", "max_tokens", "keep_checkpoints"}
_TRAINED_WITH = frozenset(_IN_ARGV | _IN_OUR_CODE)
"""Keys of `trainer.*` that a node reads. The others describe the local trainer."""
_SET_BY = {
    "data_dir": "SAVE_CKPT",
    "model.path": "HF_CKPT",
    "method.name": "--method",
    "server.port": "PORT",
    "engine.kind": "the node: its engine is SGLang",
    "engine.replicas": "ROLLOUT_ENGINES",
    "trainer.kind": "the node: its trainer is slime",
    "training.weights": "the node: it trains full weights",
    "trainer.micro_batch_tokens": "MAX_TOKENS_PER_GPU",
}
"""Keys that other processes of the node depend on, and the variable in their place."""
_LOCAL = sorted(TrainerSettings.model_fields.keys() - _TRAINED_WITH - {"kind", "micro_batch_tokens"})
INERT: Mapping[str, str] = {
    **{f"trainer.{name}": "it is for the local trainer; slime trains here" for name in _LOCAL},
    **{
        f"engine.{name}": "it is for the embedded engine; SGLang serves here (engine.args)"
        for name in ("device", "threads", "cache_tokens", "prefill_chunk")
    },
    "engine.url": "the server starts the policy's SGLang itself",
    "engine.urls": "the server starts the policy's SGLangs itself (ROLLOUT_ENGINES)",
    "model.gguf_file": "Megatron starts from the safetensors of HF_CKPT",
    "method.ema_decay": "only the local trainer writes the teacher that it is for",
    **{f"policies.{name}": "full weights have one policy" for name in ("mode", "start", "loaded")},
    "publisher.max_versions": "the engine holds full weights of one version, and no adapters",
    "publisher.prewarm_sessions": "full weights replace the ones that serve: no version is there before the switch",
}
"""Keys that act on no part of a node, and the reason."""

TENSOR_FLAGS = ("--tp", "--tp-size", "--tensor-parallel-size")
"""SGLang's names of ENGINE_TP."""

Values = Mapping[str, object]
"""Dotted keys of the settings; a text is parsed as a TOML value."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of our server and its engines that do not follow from the node."""

    host: str = "127.0.0.1"
    port: int = 30000
    data_dir: str = DATA_DIR
    served_model_name: str | None = None
    tool_call_parser: str = "qwen25"
    reasoning_parser: str = "qwen3"
    max_new_tokens: int = 8192
    """Of a chat that names no limit, thought included."""
    judge: str = "llm"
    judge_votes: int = 3
    judge_temperature: float = 0.6
    judge_max_new_tokens: int = 4096
    judge_url: str | None = None
    """OpenAI-compatible base URL of a judge elsewhere; the PRM of this node when unset."""
    prm_port: int = 30001
    prm_args: tuple[str, ...] = ()
    """More arguments for the PRM's SGLang, for example other kernels on a host without its fast ones."""
    prm_holds_base: bool = False
    """The PRM of this node serves the policy's own checkpoint, so it can be the teacher and the gate's base too."""
    mem_fraction_static: float = 0.85
    top_k: int = 0
    extra: tuple[str, ...] = ()
    """More settings of the server, as `key=value`."""


def moves_with_policy(method: MethodSettings) -> bool:
    """Return True if the method distils, and its teacher is the policy itself."""
    return method.needs_engine and getattr(method, "teacher", None) == "policy"


def asks_prm(settings: Settings, prm_port: int) -> bool:
    """Return True if a part of the server asks this node's PRM: the judge (votes, hints), the teacher, the gate."""
    is_judge = settings.judge.kind == "llm" or settings.method.needs_hint_judge
    urls = [settings.judge.url if is_judge else None, settings.method.base_teacher_url, settings.publisher.base_url]
    parts = [urlsplit(url) for url in urls if url is not None]
    return any(part.port == prm_port and is_loopback(part.hostname or "") for part in parts)


def final_settings(
    options: NodeOptions, server: ServerOptions, engine_python: str | None, environ: Mapping[str, str]
) -> tuple[dict[str, object], Settings]:
    """Return the values for the server's command line, and the settings that the server will read from them.

    Raises SettingsError, as the server would minutes later. Without a weight of the KL term, a teacher that moves with
    the policy sets it.
    """
    values = server_values(options, server, engine_python)
    settings = _loaded(values, environ)
    if "trainer.kl_coef" not in values:
        values["trainer.kl_coef"] = DRIFT_KL if moves_with_policy(settings.method) else 0.0
        settings = _loaded(values, environ)
    return values, settings


def _loaded(values: Values, environ: Mapping[str, str]) -> Settings:
    return load(None, {key: str(value) for key, value in values.items()}, environ)


def server_values(options: NodeOptions, server: ServerOptions, engine_python: str | None) -> dict[str, object]:
    """Return every setting that the node gives its server, the user's own last. Raises SettingsError."""
    layout = options.layout
    values: dict[str, object] = {
        "data_dir": server.data_dir,
        "model.path": options.hf_checkpoint,
        "model.tool_call_parser": server.tool_call_parser,
        "model.reasoning_parser": server.reasoning_parser,
        "model.context_length": options.context_length,
        "sampling.temperature": options.temperature,
        "sampling.max_new_tokens": server.max_new_tokens,
        "method.name": options.method,
        **_method_values(options.method, server),
        "training.batch_size": options.batch_size,
        "training.weights": "full",
        "trainer.kind": "external",
        "trainer.learning_rate": options.learning_rate,
        "trainer.weight_decay": options.weight_decay,
        "trainer.beta1": options.adam_beta1,
        "trainer.beta2": options.adam_beta2,
        "trainer.max_grad_norm": options.max_grad_norm,
        "trainer.warmup_steps": options.warmup_steps,
        "trainer.max_tokens": options.max_tokens_per_gpu * layout.context_parallel,
        "judge.kind": server.judge,
        "engine.kind": "sglang",
        "engine.memory_fraction": server.mem_fraction_static,
        "engine.hold_s": HOLD_S,
    }
    if options.kl_coef is not None:
        values["trainer.kl_coef"] = options.kl_coef
    if engine_python is not None:
        values["engine.python"] = engine_python
    if layout.rollout_engines > 1:
        values["engine.replicas"] = layout.rollout_engines
    if layout.engine_tp > 1:
        values["engine.args"] = f'["--tp", "{layout.engine_tp}"]'
    if server.judge == "llm":
        values |= {
            "judge.votes": server.judge_votes,
            "judge.quorum": min(2, server.judge_votes),
            "judge.temperature": server.judge_temperature,
            "judge.max_new_tokens": server.judge_max_new_tokens,
            "judge.timeout_s": JUDGE_TIMEOUT_S,
            "judge.url": server.judge_url or f"http://127.0.0.1:{server.prm_port}/v1",
        }
    if server.prm_holds_base:
        values["publisher.base_url"] = f"http://127.0.0.1:{server.prm_port}"
    if server.top_k:
        values["method.top_k"] = server.top_k
    if server.served_model_name is not None:
        values["server.served_model_name"] = server.served_model_name
    given = _given(server.extra, values)
    values |= given
    if "method.teacher_url" not in given and values.get("method.teacher") not in ("base", '"base"'):
        values.pop("method.teacher_url", None)  # it was ours, for the teacher that the user's own replaced
    return values


def _method_values(method: str, server: ServerOptions) -> dict[str, object]:
    """Return the settings of a method that distils: its hints, and the teacher that the node can offer."""
    values: dict[str, object] = {
        "hint_source": "judge" if server.judge == "llm" else "verbatim",
        "hint_votes": server.judge_votes,
        "teacher": "base" if server.prm_holds_base else "policy",  # full weights leave no base in the policy's engine
    }
    if server.prm_holds_base:
        values["teacher_url"] = f"http://127.0.0.1:{server.prm_port}"
    has = settings_class(method).model_fields
    return {f"method.{key}": value for key, value in values.items() if key in has}


def _given(extra: Sequence[str], values: Values) -> dict[str, object]:
    """Return the user's settings. Raises SettingsError for one that would act on no part of the node, or on one."""
    given: dict[str, object] = {}
    for setting in extra:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise SettingsError(f"--set {setting!r}: write KEY=VALUE")
        if key in _SET_BY and parse_value(value) != values.get(key):
            raise SettingsError(f"--set {key}: it is set by {_SET_BY[key]}")
        if key in INERT:
            raise SettingsError(f"--set {key}: {INERT[key]}")
        given[key] = _engine_args(value, values.get(key)) if key == "engine.args" else value
    return given


def _engine_args(given: str, ours: object) -> object:
    """Return the user's arguments of SGLang behind ours. Raises SettingsError for weights that no push would reach."""
    words = parse_value(given)
    if not isinstance(words, list):
        return given  # the settings name the error
    flags = {str(word).partition("=")[0] for word in words}
    if "--quantization" in flags:
        raise SettingsError("--set engine.args --quantization: the weights that the driver sends are bfloat16")
    kept = parse_value(str(ours)) if ours is not None and not flags & set(TENSOR_FLAGS) else []
    return json.dumps([*(kept if isinstance(kept, list) else []), *words])


def under_settings(options: NodeOptions, settings: Settings) -> NodeOptions:
    """Return the options with the numbers of the final settings. Raises SettingsError for a batch that does not fit."""
    trainer = settings.trainer
    return replace(
        options,
        batch_size=settings.training.batch_size,
        learning_rate=trainer.learning_rate,
        weight_decay=trainer.weight_decay,
        adam_beta1=trainer.beta1,
        adam_beta2=trainer.beta2,
        max_grad_norm=trainer.max_grad_norm,
        warmup_steps=trainer.warmup_steps,
        kl_coef=trainer.kl_coef,
        temperature=settings.sampling.temperature,
        context_length=settings.model.context_length or options.context_length,
    )


def kept_checkpoints(settings: Settings) -> int | None:
    """Return the number of Megatron's checkpoints to keep, where the user set it."""
    is_set = "keep_checkpoints" in settings.trainer.model_fields_set
    return settings.trainer.keep_checkpoints if is_set else None
