"""Translation between the dialect's bodies and jobs, and the response that streams a job to its client."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec
import orjson
from fastapi import Response
from starlette.types import Receive, Scope, Send

from openclaw_rl.engines.dialect import GenerateRequest
from openclaw_rl.engines.embedded.jobs import Decode, Job, TokenStops, TopLogProbs, Wanted
from openclaw_rl.engines.embedded.kv_cache import CacheKey
from openclaw_rl.engines.embedded.runner import Adapter
from openclaw_rl.errors import EngineRefused

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the loaded model, and its decoder."""

    vocab_size: int
    context_length: int
    end_ids: frozenset[int]
    decode: Decode | None
    """None when the model's folder holds no tokenizer."""


def check(request: GenerateRequest, limits: Limits) -> None:
    """Raise EngineRefused for a request that this model can never serve."""
    ids, sampling = request.input_ids, request.sampling_params
    if not ids:
        raise EngineRefused("input_ids is empty", status=400)
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        bad = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise EngineRefused(f"input_ids holds {bad}: the vocabulary is 0 … {limits.vocab_size - 1}", status=400)
    room = limits.context_length - (1 if sampling.max_new_tokens else 0)
    if len(ids) > room:
        raise EngineRefused(
            f"The input ({len(ids)} tokens) is longer than the model's context length ({limits.context_length} tokens)",
            status=400,
        )
    grammars = [name for name in _GRAMMARS if getattr(sampling, name, None)]
    if grammars:
        raise EngineRefused(f"{grammars[0]}: the embedded engine has no grammars", status=400)
    for token in sampling.logit_bias or ():
        if not (token.isascii() and token.isdigit() and int(token) < limits.vocab_size):
            raise EngineRefused(
                f"logit_bias names {token[:40]!r}: token ids are 0 … {limits.vocab_size - 1}", status=400
            )
    if sampling.stop and limits.decode is None:
        raise EngineRefused("stop: this model has no tokenizer, so text cannot be matched", status=400)
    if request.logprob_start_len >= len(ids):
        raise EngineRefused(
            f"logprob_start_len {request.logprob_start_len} is not below the prompt's {len(ids)} tokens", status=400
        )
    if not 0 <= request.top_logprobs_num <= limits.vocab_size:
        raise EngineRefused(f"top_logprobs_num {request.top_logprobs_num} is not in the vocabulary's range", status=400)
    if any(not 0 <= token < limits.vocab_size for token in request.token_ids_logprob or ()):
        raise EngineRefused(f"token_ids_logprob: token ids are 0 … {limits.vocab_size - 1}", status=400)


def make_job(request: GenerateRequest, adapter: Adapter | None, limits: Limits) -> Job:
    """Return the job of a request that `check` accepted."""
    sampling = request.sampling_params
    stops = [sampling.stop] if isinstance(sampling.stop, str) else list(sampling.stop or ())
    ends = set() if sampling.ignore_eos else {*(sampling.stop_token_ids or ()), *limits.end_ids}  # as SGLang does
    wants_prompt = request.return_logprob and request.logprob_start_len >= 0
    return Job(
        rid=request.rid or uuid4().hex,
        prompt=request.input_ids,
        sampling=sampling,
        max_new_tokens=min(sampling.max_new_tokens, limits.context_length - len(request.input_ids)),
        wanted=Wanted(
            output=request.return_logprob,
            prompt_from=request.logprob_start_len if wants_prompt else None,
            top=request.top_logprobs_num if request.return_logprob else 0,
            ids=tuple(request.token_ids_logprob or ()) if wants_prompt else (),
        ),
        key=CacheKey(request.extra_key, adapter),
        adapter=adapter,
        priority=request.priority or 0,
        end_ids=frozenset(ends),
        stops=TokenStops(stops, limits.decode) if any(stops) and limits.decode else None,
    )


async def progress(job: Job) -> AsyncIterator[tuple[int, int, bool]]:
    """Yield (begin, end, is_last) of the new tokens, each time the reply has grown or ended."""
    sent = 0
    while True:
        await job.changed.wait()
        job.changed.clear()
        is_last = job.finish is not None  # read first: it is written before the last tokens are visible
        end = job.visible
        if end > sent or is_last:
            yield sent, end, is_last
            sent = end
        if is_last:
            return


def reply(job: Job, begin: int, end: int, *, weight_version: str, text: str = "") -> bytes:
    """Return one `GenerateReply` with the tokens begin … end; the first reply also holds the prompt's log-probs."""
    meta: dict[str, Any] = {
        "id": job.rid,
        "prompt_tokens": len(job.prompt),
        "completion_tokens": end,
        "cached_tokens": job.cached_tokens or 0,
        "weight_version": weight_version,
        "finish_reason": None,
    }
    if job.finish is not None and end == job.visible:
        meta["finish_reason"] = {
            name: value for name, value in msgspec.structs.asdict(job.finish).items() if value is not None
        }
    if job.wanted.output:
        pairs = zip(job.log_probs[begin:end], job.output[begin:end], strict=True)
        meta["output_token_logprobs"] = [(log_prob, token, None) for log_prob, token in pairs]
        if job.wanted.top:
            meta["output_top_logprobs"] = [_top(top) for top in job.top_log_probs[begin:end]]
    if job.wanted.prompt_from is not None and begin == 0:
        tokens = job.prompt[job.wanted.prompt_from :]
        # An aborted request may have fewer entries than tokens.
        meta["input_token_logprobs"] = [
            (log_prob, token, None) for log_prob, token in zip(job.prompt_log_probs, tokens, strict=False)
        ]
        if job.wanted.top:
            meta["input_top_logprobs"] = [None if top is None else _top(top) for top in job.prompt_top_log_probs]
        if job.wanted.ids:
            meta["input_token_ids_logprobs"] = [
                None if row is None else _top(list(zip(row, job.wanted.ids, strict=True)))
                for row in job.prompt_id_log_probs
            ]
    return orjson.dumps({"text": text, "output_ids": job.output[begin:end], "meta_info": meta})


def _top(entries: TopLogProbs | Sequence[tuple[float, int]]) -> list[tuple[float, int, None]]:
    return [(log_prob, token, None) for log_prob, token in entries]


class Generation(Response):
    """The response to `/generate`: send the parts, stop when the client disconnects, and await `end` exactly once."""

    # Not a StreamingResponse: an iterator that was never started would not run its clean-up, and a request that is not
    # streamed must notice a closed connection too.

    def __init__(self, parts: AsyncIterator[bytes], *, is_stream: bool, end: Callable[[], Awaitable[None]]) -> None:
        super().__init__(media_type="text/event-stream" if is_stream else "application/json")
        del self.headers["content-length"]
        self._parts, self._end = parts, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            sending = asyncio.ensure_future(self._send(send))
            watching = asyncio.ensure_future(_gone(receive))
            try:
                await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
            finally:
                for task in (sending, watching):
                    task.cancel()
                await asyncio.gather(sending, watching, return_exceptions=True)
        finally:
            await asyncio.shield(self._end())

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
