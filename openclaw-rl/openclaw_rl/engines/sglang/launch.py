"""Command line of SGLang's server, as a pure function of the settings and of the installed version.

The flags are those that the server relies on: adapters that are loaded and unloaded, streams of new tokens only,
background calls that yield to chats, and a share of the GPU for the trainer. `engine.args` goes last, and a flag named
there replaces ours.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_rl.errors import SettingsError
from openclaw_rl.settings import EngineSettings, ModelSettings, PoliciesSettings, PublisherSettings, TrainerSettings

MODULE = "sglang.launch_server"
ENVIRON = {
    # Its health check otherwise generates a token, which takes a second, fails while generation is paused and keeps
    # the cache from being flushed. A scheduler that hangs is ended by SGLang's own watchdog.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # A scoring call needs the logits of each token of its reply. Otherwise they are made for a whole prefill chunk at
    # once, beside the chats' memory: 8,192 tokens × 151,936 words × 12 bytes (bf16, fp32, its log-softmax) are 15 GB.
    "SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK": "1",
    "SGLANG_LOGITS_PROCESSER_CHUNK_SIZE": "1024",
    # The ids of a prompt with pictures stay as they came (`engines.pictures`). The default, on which exactness rests.
    "SGLANG_MM_AVOID_RETOKENIZE": "1",
}
"""Variables of SGLang; the names are spelt as it spells them."""
_PROBE = Path(__file__).with_name("probe.py")
_PROBE_S = 60.0
TAKES_IDS = ("--prefill-max-requests", "1", "--disable-overlap-schedule")
"""Flags of an engine that scores given ids: it would end of a batch where one request names ids and another does not
(sgl-project/sglang#34719). Such a batch is a prefill of two prompts. It is a decode step, too: with its overlapped
schedule SGLang runs one more step for a prompt that is scored already."""


@dataclass(frozen=True, slots=True)
class Installed:
    """Contents of the engine's environment."""

    version: str
    options: frozenset[str]
    """Names of the server's options, with underscores."""
    has_flash_attention: bool
    has_flashinfer: bool


@dataclass(frozen=True, slots=True)
class Adapters:
    """Room for adapters in a run that trains LoRA."""

    rank: int
    target_modules: tuple[str, ...]
    slots: int
    """Number of adapters served together, the base counted as one."""

    @classmethod
    def of(cls, trainer: TrainerSettings, publisher: PublisherSettings, policies: PoliciesSettings) -> "Adapters":
        most = policies.loaded + 2 if policies.is_per_user else publisher.max_versions  # + those of a publication
        return cls(trainer.rank, trainer.target_modules, most + 2)  # + base + teacher


def look(python: str | None) -> Installed:
    """Run `probe` in the environment of this interpreter. Blocks. Raises SettingsError, one line."""
    interpreter = python or sys.executable
    try:
        answer = subprocess.run(
            [interpreter, "-I", str(_PROBE)], capture_output=True, text=True, timeout=_PROBE_S, check=True
        )
        found = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SettingsError(f"engine.python {interpreter}: cannot be run: {error}") from error
    if found["version"] is None:
        raise SettingsError(
            f"engine.python {interpreter}: SGLang is not installed there (instructions/one-gpu-sglang.md)"
        )
    return Installed(
        found["version"], frozenset(found["options"]), found["has_flash_attention"], found["has_flashinfer"]
    )


def argv(
    installed: Installed,
    engine: EngineSettings,
    *,
    folder: Path,
    name: str,
    port: int,
    context_length: int | None,
    adapters: Adapters | None,
    dtype: str = "bfloat16",
) -> list[str]:
    """Return the arguments of SGLang's server. Raises SettingsError if that SGLang is too old."""
    flags: dict[str, Sequence[str]] = {
        "--model-path": [str(folder)],
        "--served-model-name": [name],
        "--host": ["127.0.0.1"],
        "--port": [str(port)],
        "--dtype": [dtype],
        "--mem-fraction-static": [f"{engine.memory_fraction:g}"],
        _streaming_flag(installed): [],
        "--log-level-http": ["warning"],
    }
    if context_length is not None:
        flags["--context-length"] = [str(context_length)]
    if "max_running" in engine.model_fields_set:
        flags["--max-running-requests"] = [str(engine.max_running)]
    if adapters is not None:
        flags |= {
            "--enable-lora": [],
            "--max-lora-rank": [str(adapters.rank)],
            "--lora-target-modules": list(adapters.target_modules),
            "--max-loras-per-batch": [str(adapters.slots)],
        }
    if "enable_priority_scheduling" in installed.options:
        flags["--enable-priority-scheduling"] = []
        if "disable_priority_preemption" in installed.options:
            flags["--disable-priority-preemption"] = []  # a judge's call waits for its turn; a chat must not end it
    if not installed.has_flash_attention:
        flags["--attention-backend"] = ["triton"]
        if "mm_attention_backend" in installed.options:
            flags["--mm-attention-backend"] = ["triton_attn"]  # of pictures; on Hopper it is else flash attention 3
    if not installed.has_flashinfer:
        flags["--sampling-backend"] = ["pytorch"]
    if "disable_prefill_cuda_graph" in installed.options:
        flags["--disable-prefill-cuda-graph"] = []  # a minute of every start, for little
    named = {word.partition("=")[0] for word in engine.args if word.startswith("--")}
    ours = [word for flag, values in flags.items() if flag not in named for word in (flag, *values)]
    return [*ours, *engine.args]


_WITH_WINDOWS = frozenset({"gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gpt_oss", "olmo3", "exaone4"})
"""Architectures whose sliding window SGLang's own model code applies."""


def refuse_window(folder: Path, context_length: int | None) -> None:
    """Raise SettingsError if SGLang would serve the folder's model without the sliding window that its trainer has."""
    # Its class for Mistral, Phi-3 and Qwen is Llama's, which sees the whole context. Beyond the window the replies
    # would then be of another model than the one that is trained (0.5 to 0.7 nats a token).
    whole: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    config: dict[str, Any] = whole.get("text_config") or whole
    kind, window = str(config.get("model_type")), config.get("sliding_window")
    slides = config.get("use_sliding_window", not kind.startswith("qwen"))
    if "layer_types" in config:
        slides = slides and "sliding_attention" in config["layer_types"]
    context = context_length or config.get("max_position_embeddings")
    if not window or not slides or kind in _WITH_WINDOWS or (context is not None and context <= window):
        return
    raise SettingsError(
        f"model.path {folder}: {kind} attends to a window of {window} tokens, and SGLang serves it without one: engine "
        f"and trainer would be different models. Set model.context_length to {window} or less, or engine.kind to "
        '"embedded"'
    )


def dtype_of(engine: EngineSettings, model: ModelSettings) -> str:
    """Return the type of the served weights. SGLang's own choice would be float16 for every folder in fp32."""
    # A sampler in float16 disagrees less with its trainer (arXiv:2510.26788). It was measured for the
    # bundled model alone that no activation overflows.
    if engine.dtype != "auto":
        return engine.dtype
    return "float16" if model.path == "bundled" else "bfloat16"


def check_takes_ids(installed: Installed) -> None:
    """Raise SettingsError if this SGLang does not know TAKES_IDS."""
    for flag in TAKES_IDS:
        if flag.startswith("--") and flag.removeprefix("--").replace("-", "_") not in installed.options:
            raise SettingsError(f"SGLang {installed.version} does not know {flag}, which method.top_k needs")


def _streaming_flag(installed: Installed) -> str:
    for option in ("incremental_streaming_output", "stream_output"):  # the second is its older name
        if option in installed.options:
            return "--" + option.replace("_", "-")
    raise SettingsError(f"SGLang {installed.version} cannot stream only what is new; 0.5.15 can")
