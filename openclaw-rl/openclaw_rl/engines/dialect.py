"""Engine dialect: the part of SGLang's native HTTP API that the server uses, as typed bodies.

SGLang 0.5.15 serves it on a GPU (with `--incremental-streaming-output`), `engines.embedded` on a laptop. The
conformance suite in `tests/conformance/` holds for both. Meaning of the bodies:

* `POST /generate` takes ids and gives ids. Streaming (`"stream": true`) answers server-sent events
  `data: {GenerateReply}` and a last `data: [DONE]`. Every event holds only the new entries of `output_ids` and
  `meta_info.output_token_logprobs`; `meta_info.completion_tokens` counts all so far. Without streaming the answer is
  one `GenerateReply`.
* A sampled end token is the last of `output_ids`. The engine adds no token after `length`.
* `meta_info.output_token_logprobs = [[log_prob, id, null], ...]`: of softmax(logits / temperature) (temperature 0:
  greedy, reported at temperature 1), never renormalised by top-p or top-k.
* `meta_info.input_token_logprobs` (with `logprob_start_len` ≥ 0): entry j belongs to token `logprob_start_len + j`. It
  is log p(token | all before it) at temperature 1. The *first* entry's log-prob is null. To score a response of T
  tokens after a prompt of P: ids = prompt + response, `max_new_tokens: 0`, `logprob_start_len: P - 1`; drop the first
  of the T + 1 entries. `input_top_logprobs` (with `top_logprobs_num` = K) is aligned alike: each entry is a list of K
  `[log_prob, id, null]`, or null. `input_token_ids_logprobs` (with `token_ids_logprob`, a list of ids) is aligned and
  built alike: each entry holds the log-probs of these ids, in their order.
* `extra_key` isolates prefix-cache entries; adapters are isolated from each other and from the base without it.
* `lora_path` names a loaded adapter. A request keeps its adapter to the end. An unknown name is a 400.
* `POST /pause_generation {"mode": "abort" | "retract" | "in_place"}`, `/continue_generation`: requests that arrive in
  between wait.
* `POST /abort_request {"rid": …}` or `{"abort_all": true}`: the request answers at once with its tokens so far and
  `finish_reason.type == "abort"`.
* `GET|POST /flush_cache`: 200, or 400 while a request runs or is queued.
* `POST /load_lora_adapter {"lora_name", "lora_path"}` (a PEFT folder), `/unload_lora_adapter {"lora_name"}`: an unload
  waits for the adapter's requests. A name that is already loaded is a 400.
* `GET /v1/models`: `ModelList`. Its entries with a parent are the loaded adapters, each with the folder it came from.
* `GET /health`: 200 once the engine can serve. `GET /model_info`: `ModelInfo`.
* Errors: a 4xx with `{"error": {"message": …}}`. A prompt longer than the context is a 400 before the engine generates.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, SkipValidation


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class EngineSampling(_Body):
    """`sampling_params` of `/generate`. The client always sends every field that matters."""

    max_new_tokens: int = Field(default=128, ge=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    min_p: float = Field(default=0.0, ge=0, le=1)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None
    logit_bias: dict[str, float] | None = None
    """Biases by token id, written in decimal as SGLang takes it."""
    json_schema: str | None = None
    """Grammars: SGLang only; the embedded engine answers 400."""


class GenerateRequest(_Body):
    input_ids: list[int]
    image_data: SkipValidation[Sequence[str] | None] = Field(default=None, repr=False)
    """Pictures as `data:` URLs; `input_ids` then holds one placeholder for each (`engines.pictures`). They may be made
    as they are read, so no check of types reads them."""
    sampling_params: EngineSampling = EngineSampling()
    rid: str | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    """-1: no prompt log-probs."""
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    """Ids, the same for each position, whose log-probs are returned beside those of the prompt's tokens."""
    return_text_in_logprobs: bool = False
    lora_path: str | None = None
    extra_key: str | None = None
    affinity: str | None = Field(default=None, exclude=True)
    """Conversation that the request belongs to, for a pool of engines (`engines.pool`). It is never sent."""
    priority: int | None = None
    """Chats have a higher priority than judge and teacher calls (SGLang: `--enable-priority-scheduling`)."""


TokenLogProb = tuple[float | None, int, str | None]
LARGEST_ID, _LARGEST_FLOAT = 2**31 - 1, 3.4e38
"""Bounds of a token's id and of a log-prob as they are stored. No vocabulary is larger."""


def storable(log_prob: float | None) -> float:
    """Return a log-prob as float32 can hold it; NaN without one, and for a number that is out of its range."""
    if log_prob is None:
        return math.nan
    return log_prob if -_LARGEST_FLOAT <= log_prob <= _LARGEST_FLOAT or math.isinf(log_prob) else math.nan


# The answers are msgspec's, not pydantic's: one is read for each token, and msgspec needs a tenth of the time.


class _Answer(msgspec.Struct, frozen=True):
    """A part of an answer of `/generate`. Unknown fields are left out."""


class FinishReason(_Answer, frozen=True):
    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    """For `stop`: the end token's id, or the stop string."""
    length: int | None = None
    message: str | None = None
    status_code: Any = None
    """For `abort`: the HTTP status of a refusal, where it is a number."""


class MetaInfo(_Answer, frozen=True):
    id: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str | None = None
    finish_reason: FinishReason | None = None
    """None until the last event."""
    input_token_logprobs: list[TokenLogProb] | None = None
    output_token_logprobs: list[TokenLogProb] | None = None
    input_top_logprobs: list[list[TokenLogProb] | None] | None = None
    output_top_logprobs: list[list[TokenLogProb] | None] | None = None
    input_token_ids_logprobs: list[list[TokenLogProb] | None] | None = None


class GenerateReply(_Answer, frozen=True):
    text: str = ""
    output_ids: list[int] = []
    meta_info: MetaInfo = MetaInfo()
    error: Any = None
    """A refusal of a streamed request; the status was sent before."""


class ModelInfo(_Body):
    model_path: str
    tokenizer_path: str | None = None
    is_generation: bool = True
    weight_version: str | None = None
    base_hash: str | None = None
    """Embedded engine: sha256 over the names and bytes of its tensors. The trainer must hold the same."""
    context_length: int | None = None


class ModelCard(_Body):
    id: str
    root: str | None = None
    """An adapter's folder."""
    parent: str | None = None
    """An adapter's base."""


class ModelList(_Body):
    data: list[ModelCard]


class LoadAdapter(_Body):
    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadAdapter(_Body):
    lora_name: str


class Pause(_Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Abort(_Body):
    rid: str = ""
    abort_all: bool = False


class UpdateWeights(_Body):
    model_path: str
    flush_cache: bool = True
    weight_version: str | None = None


def error_body(message: str) -> dict[str, Any]:
    """Return the body of a 4xx or 5xx."""
    return {"error": {"message": message, "type": "invalid_request_error"}}
