"""The engine client: the dialect over HTTP, one instance per engine.

Promises: every call has a deadline. A 4xx is `EngineRefused`, every other failure on the way `EngineGone`. Closing a
stream's iterator aborts the request on the engine, by closing the connection and by `/abort_request`. The client does
not retry: its callers know which requests may be repeated.

It corrects SGLang's differences from the dialect:

* SGLang counts the requests of each adapter, and loses count of refused requests and of those that ended while they
  were queued. An unload waits for that count to reach zero, and until then no adapter can be loaded. So the client does
  not unload an adapter whose count may be wrong. It stays in the engine's host memory until the engine restarts.
* A streamed request that is aborted while it is queued (`pause` puts running ones back into the queue) ends with its
  last token once more, beside the log-probs of its whole reply. The client removes the part that it already has.
* SGLang writes id 0 for the vocabulary's last id beside a prompt's log-probs (it takes that id for an image's). That
  id is an ordinary token of SmolLM2 and others. The log-prob is the right one.
* SGLang ends when a batch has a request that names `token_ids_logprob` and one that names none. So ids are named only
  to an engine with `sglang.launch.TAKES_IDS`, or without `/server_info`.
* Where SGLang makes logits in slices, a table of such a batch may be another request's. A table that disagrees with the
  token's own log-prob is an AlignmentError.
"""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Literal

import httpx
import msgspec
import orjson
import structlog
from msgspec.structs import replace
from pydantic import BaseModel, ValidationError

from openclaw_rl.engines.base import Score, Tap
from openclaw_rl.engines.dialect import (
    LARGEST_ID,
    Abort,
    GenerateReply,
    GenerateRequest,
    LoadAdapter,
    ModelInfo,
    ModelList,
    Pause,
    UnloadAdapter,
    UpdateWeights,
    storable,
)
from openclaw_rl.engines.event_stream import TAKES_S, Connections, EventStream, error_message
from openclaw_rl.engines.pictures import Album, PicturePrompt, PictureUrls
from openclaw_rl.engines.score_answers import (
    SAME_PASS,
    aligned,
    check_length,
    check_takes_ids,
    id_blocks,
    is_table_of,
    rows_of,
    scoring_request,
)
from openclaw_rl.errors import AlignmentError, EngineFaulty, EngineGone, EngineRefused, PicturesRefused
from openclaw_rl.settings import EngineSettings
from openclaw_rl.types import Ids, LogProbs
from openclaw_rl.types.pictures import pictures_of

log = structlog.get_logger()

_REPLY = msgspec.json.Decoder(GenerateReply)
_ABORT_S = 2.0
_QUEUED_ABORT = "Abort in waiting queue"
"""SGLang's message for a request that was queued when it was aborted."""


class HttpEngine:
    """`engines.base.Engine` over the wire."""

    def __init__(
        self,
        url: str,
        *,
        settings: EngineSettings,
        loses_adapter_count: bool = False,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        """loses_adapter_count: the engine's kind says so (`EngineKind`)."""
        self.url = url.rstrip("/")
        self._album: Album | None = None
        self._settings = settings
        self._loses_adapter_count = loses_adapter_count
        self._takes_ids = False
        self._miscounted: set[str] = set()
        """Adapters that must stay loaded: an unload could wait forever."""
        self._generate = Connections(f"{self.url}/generate", connect_s=settings.connect_timeout_s)
        self._streams: set[EventStream] = set()
        # trust_env=False: an engine is never reached through a proxy that the environment names.
        self._client = client or httpx.AsyncClient(
            timeout=httpx.Timeout(settings.token_timeout_s, connect=settings.connect_timeout_s, write=TAKES_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            trust_env=False,
        )

    def show(self, album: Album) -> None:
        """Give the engine the pictures of the prompts that it scores; without them it refuses such a prompt."""
        self._album = album

    def move(self, url: str) -> None:
        """Call the engine at this URL from now on: its process starts again there."""
        self.url = url.rstrip("/")
        self._generate.close()
        self._generate = Connections(f"{self.url}/generate", connect_s=self._settings.connect_timeout_s)

    def break_off(self) -> None:
        """End every stream in EngineGone: a host that vanished closes no connection."""
        for wire in self._streams:
            wire.break_off()

    async def aclose(self) -> None:
        self._generate.close()
        await self._client.aclose()

    async def stream(self, request: GenerateRequest, tap: Tap | None = None) -> AsyncGenerator[GenerateReply, None]:
        asked = request if request.stream else request.model_copy(update={"stream": True})
        finished = refused = started = was_queued = False
        received = 0

        def offer(data: bytes) -> bool:
            nonlocal received
            if tap is None or not started or data[:1] != b"{":
                return False
            try:
                reply = _parse(data)
            except (EngineGone, EngineRefused):
                return False  # the iterator raises it
            is_taken = reply.meta_info.finish_reason is None and tap(reply)
            received += len(reply.output_ids) if is_taken else 0
            return is_taken

        wire = EventStream(self._generate, _body(asked), silence_s=self._settings.token_timeout_s, offer=offer)
        try:
            async with wire, aclosing(wire.events()) as events:
                self._streams.add(wire)
                async for data in events:
                    if data == b"[DONE]":
                        break
                    reply = _parse(data)
                    finish = reply.meta_info.finish_reason
                    if finish is not None and finish.type == "abort":
                        reply = _without_repeats(reply, received)
                        was_queued = finish.message == _QUEUED_ABORT
                    finished = finish is not None
                    received += len(reply.output_ids)
                    was_started, started = started, received > 0
                    yield reply
                    if not was_started:
                        await self._generate.refill()
        except AlignmentError as error:  # a picture was forgotten as it was to be sent
            raise EngineRefused(str(error), status=400) from error
        except EngineRefused:
            refused = True
            raise
        finally:
            self._streams.discard(wire)
            if not started or was_queued:
                self._miscount(request)
            if not finished and not refused and request.rid is not None:
                await self._abort(request.rid)
        if not finished:
            raise EngineGone("engine ended the stream without a finish reason")

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        body = request.model_copy(update={"stream": False})
        try:
            content = _body(body)
            if isinstance(content, bytes):
                reply = _parse(await self._call("POST", "/generate", content))
            else:
                async with aclosing(content):
                    reply = _parse(await self._call("POST", "/generate", content))
            if not all(0 <= token <= LARGEST_ID for token in reply.output_ids):
                raise EngineFaulty("the engine sent ids that are no token ids")
            return reply
        except BaseException:
            self._miscount(request)
            if request.rid is not None:
                await self._abort(request.rid)
            raise

    async def score(
        self, prompt_ids: Ids, response_ids: Ids, *, lora_path: str | None, extra_key: str | None, top_k: int = 0
    ) -> Score:
        shown = await self._shown(prompt_ids)
        asked = scoring_request(prompt_ids, response_ids, lora_path=lora_path, extra_key=extra_key, shown=shown)
        reply = await self.generate(asked.model_copy(update={"top_logprobs_num": top_k}))
        meta = reply.meta_info
        if shown is not None:
            check_length(reply, len(prompt_ids) + len(response_ids))
        log_probs = aligned(meta.input_token_logprobs, response_ids)
        if not top_k:
            return Score(log_probs)
        top = (meta.input_top_logprobs or [])[1:]
        if len(top) != len(response_ids) or any(row is None for row in top):
            raise AlignmentError(f"{len(response_ids)} tokens, {len(top)} top-k rows")
        rows = [row for row in top if row is not None]
        if not is_table_of(rows, response_ids, log_probs):
            raise AlignmentError("the top-k rows are another reply's")
        return Score(
            log_probs,
            top_log_probs=tuple(tuple(-math.inf if lp is None else storable(lp) for lp, _, _ in row) for row in rows),
            top_ids=tuple(tuple(token for _, token, _ in row) for row in rows),
        )

    async def score_ids(
        self, prompt_ids: Ids, response_ids: Ids, ids: Sequence[Ids], *, lora_path: str | None, extra_key: str | None
    ) -> Score:
        if not self._takes_ids:
            await self._ask_for_ids()
        # The dialect takes one list of ids for all positions, so the response is scored in blocks. The blocks after the
        # first find their prefix in the engine's cache.
        log_probs: list[float] = []
        table: list[LogProbs] = []
        # Each position names its own token too, by whose log-prob the table is known to be this reply's.
        named = [(*row, token) for row, token in zip(ids, response_ids, strict=True)]
        shown = await self._shown(prompt_ids)
        for begin, end in id_blocks(named):
            wanted = sorted({token for row in named[begin:end] for token in row})
            before, block = (*prompt_ids, *response_ids[:begin]), response_ids[begin:end]
            seen = None if shown is None else shown.then(response_ids[:begin])
            asked = scoring_request(before, block, lora_path=lora_path, extra_key=extra_key, shown=seen)
            reply = await self.generate(asked.model_copy(update={"token_ids_logprob": wanted}))
            if shown is not None:
                check_length(reply, len(before) + len(block))
            own = aligned(reply.meta_info.input_token_logprobs, block)
            rows = rows_of(reply.meta_info.input_token_ids_logprobs, named[begin:end])
            if any(abs(row[-1] - log_prob) > SAME_PASS for row, log_prob in zip(rows, own, strict=True)):
                raise AlignmentError("the log-probs of given ids are another reply's")
            log_probs += own
            table += [row[:-1] for row in rows]
        return Score(tuple(log_probs), top_log_probs=tuple(table), top_ids=tuple(ids))

    async def _ask_for_ids(self) -> None:
        try:
            check_takes_ids(await self._call("GET", "/server_info", None))
        except EngineRefused as error:
            if error.status != 404:
                raise
        self._takes_ids = True

    async def _shown(self, prompt_ids: Ids) -> PicturePrompt | None:
        """Return a prompt with pictures as the engine gets it; None for a text."""
        if self._album is None:
            if pictures_of(prompt_ids):
                raise PicturesRefused("this engine is shown no pictures")
            return None
        if not pictures_of(prompt_ids) and self._album.placeholder in prompt_ids:
            # Scored without its picture, a prompt gives finite log-probs, which mean nothing.
            raise PicturesRefused("a picture's place in the prompt has no picture")
        return await self._album.shown(prompt_ids)

    async def is_healthy(self) -> bool:
        return await self.fault() is None

    async def fault(self) -> str | None:
        """Return the reason that the engine does not serve now; None: it does."""
        try:
            reply = await self._client.get(f"{self.url}/health", timeout=self._settings.connect_timeout_s)
        except httpx.HTTPError as error:
            return f"{self.url} does not answer ({type(error).__name__})"
        return None if reply.status_code == 200 else f"{self.url}/health answers {reply.status_code}"

    async def model_info(self) -> ModelInfo:
        body = await self._call("GET", "/model_info", None)
        try:
            return ModelInfo.model_validate_json(body)
        except ValidationError as error:
            raise EngineGone(f"/model_info is no model's: {error.error_count()} problems") from error

    async def adapter_folders(self) -> dict[str, str] | None:
        try:
            listed = ModelList.model_validate_json(await self._call("GET", "/v1/models", None))
        except (EngineRefused, ValidationError):
            return None
        return {card.id: card.root or "" for card in listed.data if card.parent is not None}

    async def load_adapter(self, name: str, folder: Path) -> None:
        await self._post("/load_lora_adapter", LoadAdapter(lora_name=name, lora_path=str(folder)))
        self._miscounted.discard(name)  # a name it did not have: a fresh count

    async def unload_adapter(self, name: str) -> None:
        if name in self._miscounted:
            log.warning("adapter_stays_loaded", name=name, reason="the engine may have lost count of its requests")
            return
        await self._post("/unload_lora_adapter", UnloadAdapter(lora_name=name))

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        await self._post("/pause_generation", Pause(mode=mode))

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def abort_all(self) -> None:
        await self._post("/abort_request", Abort(abort_all=True))

    async def flush_cache(self) -> None:
        await self._post("/flush_cache", {})

    async def update_weights(self, folder: Path, weight_version: int) -> None:
        body = UpdateWeights(model_path=str(folder), weight_version=str(weight_version))
        await self._post("/update_weights_from_disk", body)

    def _miscount(self, request: GenerateRequest) -> None:
        if request.lora_path is not None and self._loses_adapter_count:
            self._miscounted.add(request.lora_path)

    async def _post(self, path: str, body: BaseModel | Mapping[str, str]) -> bytes:
        content = body.model_dump_json(exclude_none=True) if isinstance(body, BaseModel) else "{}"
        return await self._call("POST", path, content)

    async def _call(self, method: str, path: str, content: str | bytes | AsyncIterable[bytes] | None) -> bytes:
        headers = {"content-type": "application/json"} if content is not None else None
        try:
            reply = await self._client.request(method, f"{self.url}{path}", content=content, headers=headers)
        except httpx.HTTPError as error:
            self._takes_ids = False
            raise EngineGone(f"{path}: {error!r}") from error
        if 400 <= reply.status_code < 500:
            raise EngineRefused(error_message(reply.content), status=reply.status_code)
        if reply.status_code != 200:
            raise EngineFaulty(f"{path} answered {reply.status_code}: {error_message(reply.content)}")
        return reply.content

    async def _abort(self, rid: str) -> None:
        """Abort the request, as far as the engine answers: closing the connection has already aborted it."""
        try:
            async with asyncio.timeout(_ABORT_S):
                await self._post("/abort_request", Abort(rid=rid))
        except (EngineGone, EngineRefused, TimeoutError):
            return


def _json(request: GenerateRequest) -> bytes:
    # The fields are numbers and strings: orjson needs a fifth of pydantic's time.
    sampling = {name: value for name, value in request.sampling_params if value is not None}
    fields = {name: value for name, value in request if value is not None and name != "affinity"}
    return orjson.dumps({**fields, "sampling_params": sampling})


def _body(request: GenerateRequest) -> bytes | AsyncGenerator[bytes, None]:
    """Return the JSON of a request; of one with pictures piece by piece."""
    return _pieces(request, request.image_data) if isinstance(request.image_data, PictureUrls) else _json(request)


async def _pieces(request: GenerateRequest, urls: PictureUrls) -> AsyncGenerator[bytes, None]:
    # A URL has no character that JSON would escape.
    yield _json(request.model_copy(update={"image_data": None}))[:-1] + b',"image_data":["'
    is_first = True
    async with aclosing(urls.made()) as made:
        async for url in made:
            if not is_first:
                yield b'","'
            is_first = False
            yield url
    yield b'"]}'


def _parse(data: bytes) -> GenerateReply:
    try:
        reply = _REPLY.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        reply = _parse_loosely(data)
    if reply.error is not None and reply.meta_info.finish_reason is None and not reply.output_ids:
        # SGLang has answered 200 by the time it refuses a streamed request.
        raise EngineRefused(error_message(data), status=400)
    return reply


def _parse_loosely(data: bytes) -> GenerateReply:
    """Parse what other engines write and msgspec refuses: NaN, Infinity, numbers of another type than the dialect's."""
    try:
        found = json.loads(data)
        json.dumps(found, ensure_ascii=False).encode()  # half a surrogate is no text, for any of our readers
        return msgspec.convert(found, GenerateReply, strict=False)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, and so are those of json
        raise EngineFaulty(f"engine sent what is no reply: {error}") from error


def _without_repeats(reply: GenerateReply, received: int) -> GenerateReply:
    """Return the last event of an aborted reply with its new tokens only.

    The event's count of all tokens tells how many are new. The new tokens come first, also where the engine joined the
    event to others that waited.
    """
    meta = reply.meta_info
    new = max(0, meta.completion_tokens - received)
    if len(reply.output_ids) <= new and len(meta.output_token_logprobs or ()) <= new:
        return reply
    lists = {"output_token_logprobs": meta.output_token_logprobs, "output_top_logprobs": meta.output_top_logprobs}
    cut = {name: values[:new] for name, values in lists.items() if values is not None}
    return replace(reply, output_ids=reply.output_ids[:new], meta_info=replace(meta, **cut))
