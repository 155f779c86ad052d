"""Clients of the judge's model: an OpenAI-compatible URL, or the policy's own engine with the adapter off."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from openclaw_rl.backoff import Backoff
from openclaw_rl.engines.base import PRIORITY_BACKGROUND, Engine
from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest
from openclaw_rl.engines.pictures import PicturePrompt, data_url
from openclaw_rl.errors import EngineError, EngineRefused, JudgeError, JudgeRefused, RequestError
from openclaw_rl.judge.llm import Answer
from openclaw_rl.judge.pictures import with_references
from openclaw_rl.messages import ContentPart, Message, whole_characters
from openclaw_rl.settings import JudgeSettings
from openclaw_rl.types import Ids
from openclaw_rl.types.pictures import without_data

_ATTEMPTS = 4
"""Tries of one call at a busy or failing judge. Later attempts at the turn have longer pauses."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 4.0
_MAX_RETRY_AFTER_S = 30.0
_MODELS = "/models"
_REACH_S = 10.0
"""Time in which a judge that is there says so."""


_CAN_DO_WITHOUT = ("max_tokens", "max_completion_tokens", "temperature")
"""Parameters that some judges refuse."""
_MOST_WORDS = 200
"""Characters of a refusal that are kept. The whole could hold the conversation."""
_MOST_BYTES = 4 * 2**20
"""Size limit of an answer: several thousand times a verdict with its reasons."""
_CUT = frozenset({"length", "max_tokens", "max_output_tokens", "model_length"})
"""Words of APIs for an answer that ended at its token limit."""


class _RefusedError(JudgeRefused):
    """The judge refused the request, in these words."""

    def __init__(self, message: str, words: str) -> None:
        super().__init__(message)
        self.words = words


class HttpJudgeClient:
    """Client of any OpenAI-compatible server. The owner of the HTTP client closes it."""

    def __init__(self, client: httpx.AsyncClient, settings: JudgeSettings) -> None:
        if settings.url is None:
            raise ValueError("judge.url is not set")
        self._client = client
        self._settings = settings
        self._base = settings.url.rstrip("/").removesuffix("/chat/completions").rstrip("/")
        self._model = settings.model
        self._refused: set[str] = set()
        """Parameters that this judge refused; it is asked without them from then on."""

    async def __call__(self, prompt: Sequence[Message], *, max_new_tokens: int) -> Answer:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                if self._model is None:
                    self._model = await self._first_model()
                choice = (await self._complete(prompt, max_new_tokens))["choices"][0]
                is_cut = str(choice.get("finish_reason")).lower() in _CUT
                return Answer(_final_words(choice["message"].get("content")), is_cut=is_cut)
        except TimeoutError as error:
            raise JudgeError(f"judge did not answer within {self._settings.timeout_s:g} s") from error
        except (LookupError, TypeError, AttributeError) as error:
            raise JudgeError(f"judge sent a reply of another form: {error!r}") from error

    async def reach(self) -> None:
        """Check that a server answers at the judge's address. Raises JudgeError."""
        try:
            async with asyncio.timeout(min(self._settings.timeout_s, _REACH_S)):
                if self._model is None:  # every question needs this answer
                    self._model = await self._first_model()
                else:  # not every judge has a list, and not every key opens it
                    await self._client.get(self._base + _MODELS, timeout=_REACH_S)
        except TimeoutError as error:
            raise JudgeError(f"judge did not answer at {self._base}{_MODELS}") from error
        except httpx.HTTPError as error:
            raise JudgeError(f"judge did not answer at {self._base}{_MODELS}: {error!r}") from error
        except (LookupError, TypeError, AttributeError) as error:
            raise JudgeError(f"judge sent a list of models of another form: {error!r}") from error

    async def _first_model(self) -> str:
        """Return the name of the first model in the judge's list. Raises JudgeError, LookupError, TypeError."""
        return whole_characters(str((await self._call("GET", _MODELS))["data"][0]["id"]))

    async def _complete(self, prompt: Sequence[Message], max_new_tokens: int) -> Any:
        """Ask for a completion. A parameter that the judge refuses by name is renamed or left out from then on."""
        while True:
            limit = "max_completion_tokens" if "max_tokens" in self._refused else "max_tokens"
            body: dict[str, Any] = {
                "model": self._model,
                "messages": [message.model_dump(exclude_none=True) for message in prompt],
                "temperature": self._settings.temperature,
                limit: max_new_tokens,
            }
            body = {name: value for name, value in body.items() if name not in self._refused}
            try:
                return await self._call("POST", "/chat/completions", body)
            except _RefusedError as error:
                named = [name for name in _CAN_DO_WITHOUT if name in body and name in error.words]
                if not named:
                    raise
                self._refused.update(named)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        key = self._settings.api_key
        headers = {"X-Turn-Type": "side"}  # a server like this one may judge: it must not learn from being asked
        if key is not None:
            headers["Authorization"] = f"Bearer {key.get_secret_value()}"
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        for attempt in range(_ATTEMPTS):
            pause = backoff.next_s() * random.uniform(0.5, 1.5)
            try:
                asked = self._client.stream(
                    method, self._base + path, json=body, headers=headers, timeout=self._settings.timeout_s
                )
                async with asked as reply:
                    content = await _content(reply)
            except httpx.HTTPError as error:
                failure = f"judge did not answer at {self._base}{path}: {error!r}"
            else:
                if reply.is_success:
                    return _parsed(content)
                words = _words(content)
                failure = f"judge answered {reply.status_code} at {self._base}{path}" + (f": {words}" if words else "")
                if reply.status_code in (400, 413, 415, 422):
                    raise _RefusedError(failure, words)
                if reply.status_code != 429 and reply.status_code < 500:
                    break  # the request is at fault: another try would fail too
                pause = max(pause, _retry_after(reply))
            if attempt + 1 < _ATTEMPTS:
                await asyncio.sleep(pause)
        raise JudgeError(failure)


class EngineJudgeClient:
    """Client of the base model in the policy's engine: adapter off, with a lower priority than every chat.

    `slots` are the engine's places for this judge's calls. The timeout starts when a call has its place.
    """

    def __init__(
        self,
        engine: Engine,
        settings: JudgeSettings,
        *,
        render: Callable[[Sequence[Message]], Ids],
        decode: Callable[[Ids], str],
        slots: asyncio.Semaphore,
        placeholder: int | None = None,
    ) -> None:
        """placeholder: token of a picture's place; None: the model reads text alone."""
        self._slots, self._placeholder = slots, placeholder
        self._engine = engine
        self._settings = settings
        self._render = render
        self._decode = decode

    async def __call__(self, prompt: Sequence[Message], *, max_new_tokens: int) -> Answer:
        prompt_ids, shown = await asyncio.to_thread(self._shown, prompt)
        sampling = EngineSampling(max_new_tokens=max_new_tokens, temperature=self._settings.temperature)
        request = GenerateRequest(
            input_ids=list(prompt_ids if shown is None else shown.ids),
            image_data=None if shown is None else shown.image_data,
            sampling_params=sampling,
            extra_key="judge",
            priority=PRIORITY_BACKGROUND,
        )
        try:
            async with self._slots, asyncio.timeout(self._settings.timeout_s):
                reply = await self._engine.generate(request)
        except TimeoutError as error:
            raise JudgeError(f"judge did not answer within {self._settings.timeout_s:g} s") from error
        except EngineError as error:
            if isinstance(error, EngineRefused) and error.status != 429:
                raise JudgeRefused(f"judge's engine failed: {error}") from error
            raise JudgeError(f"judge's engine failed: {error}") from error
        text = self._decode(tuple(reply.output_ids))
        if self._decode(prompt_ids[-8:]).rstrip().endswith("<think>"):
            text = f"<think>{text}"  # the template opened the thought, so an answer without an end is all thought
        finish = reply.meta_info.finish_reason
        if finish is None or finish.type == "abort":
            raise JudgeError("judge's engine broke off")
        return Answer(text, is_cut=finish.type == "length")

    def _shown(self, prompt: Sequence[Message]) -> tuple[Ids, PicturePrompt | None]:
        """Render the prompt, with its pictures if it has any; blocks. Raises JudgeError."""
        messages, pictures = with_references(prompt)
        ids = self._rendered(messages)
        if not pictures:
            return ids, None
        if self._placeholder is None:
            raise JudgeRefused("this judge reads text only")
        return ids, PicturePrompt.of(ids, [data_url(picture) for picture in pictures], self._placeholder)

    def _rendered(self, prompt: Sequence[Message]) -> Ids:
        """Render the prompt; blocks. Raises JudgeError when the model's template refuses it."""
        try:
            return self._render(prompt)
        except RequestError as refused:
            try:
                return self._render(without_system(prompt))
            except RequestError:
                raise JudgeError(f"this model cannot be its own judge: {refused.message}") from refused


def without_system(prompt: Sequence[Message]) -> list[Message]:
    """Return the prompt with its system messages in front of the first user message's text.

    Some templates have no system role (Gemma 1 and 2, Mistral 0.1 and 0.2).
    """
    told = "\n\n".join(message.text() for message in prompt if message.role == "system")
    rest = [message for message in prompt if message.role != "system"]
    if not told or not rest or rest[0].role != "user":
        return list(prompt)
    said = rest[0].content
    if isinstance(said, list):
        return [rest[0].model_copy(update={"content": [ContentPart(type="text", text=told), *said]}), *rest[1:]]
    return [rest[0].model_copy(update={"content": f"{told}\n\n{rest[0].text()}"}), *rest[1:]]


async def _content(reply: httpx.Response) -> bytes:
    """Return the body. Raises JudgeError when it is too large, before the rest of it comes."""
    content = bytearray()
    async for piece in reply.aiter_bytes():
        content += piece
        if len(content) > _MOST_BYTES:
            raise JudgeError(f"judge's answer is larger than {_MOST_BYTES / 2**20:g} MB")
    return bytes(content)


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)  # not orjson, which refuses an answer that ends inside an emoji
    except (ValueError, RecursionError) as error:
        raise JudgeError("judge sent no JSON") from error


def _final_words(content: object) -> str:
    """Return the text of an answer's content, which is a text or a list of parts, without parts that are thoughts.

    An answer without content (a refusal, a thought alone) has none. Raises TypeError for content of another form.
    """
    if content is None or isinstance(content, str):
        return whole_characters(content or "")
    parts = content if isinstance(content, list) else [content]
    texts = [part if isinstance(part, str) else _text_of_part(part) for part in parts]
    return whole_characters("".join(texts))


def _text_of_part(part: object) -> str:
    if not isinstance(part, dict):
        raise TypeError(f"content of type {type(part).__name__}")
    text = part.get("text") if part.get("type", "text") in ("text", "output_text") else None
    return text if isinstance(text, str) else ""


def _words(content: bytes) -> str:
    """Return the message of an error in OpenAI's form; empty without one."""
    try:
        message = str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return whole_characters(" ".join(without_data(message).split())[:_MOST_WORDS])


def _retry_after(reply: httpx.Response) -> float:
    try:
        return min(max(float(reply.headers.get("retry-after", 0)), 0.0), _MAX_RETRY_AFTER_S)
    except ValueError:
        return 0.0  # a date; our own pause will do
