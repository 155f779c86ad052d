"""Convert messages to ids, and ids back to replies: SGLang's rendering and parsers around our incremental tokenizer.

The ids are those that SGLang's chat endpoint would give the engine for the same messages: template, tool and thinking
handling are SGLang's code. One difference: control strings inside a client's text stay plain text. `developer` is
`system`; text parts are joined by one newline. A request that cannot be rendered is a `RequestError`: no part of it is
dropped without an error.
"""

import asyncio
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from jinja2 import TemplateError
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from openclaw_rl.errors import RequestError
from openclaw_rl.messages import Message, in_call_order
from openclaw_rl.proxy.detokenizer import TokenTable
from openclaw_rl.proxy.parser import StreamParser
from openclaw_rl.proxy.sglang import ChatCompletionRequest, Tool
from openclaw_rl.proxy.template import load_chat_format
from openclaw_rl.proxy.tokenizer import CachedTokenizer
from openclaw_rl.settings import MemorySettings, ModelSettings
from openclaw_rl.types import Ids, WrittenReply

log = structlog.get_logger()

_INLINE_CHARS = 4096
"""Characters that the event loop tokenises (about 2 ms); longer texts go to a thread."""
_INLINE_RENDER_CHARS = 200_000
"""Characters of a conversation that the event loop renders (a few ms)."""
_NOT_FOR_TEMPLATES = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters) | {"messages"}
"""Arguments of the tokenizer itself (another template, the type of its result), which a client may not set."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and the facts about it that the reply's parser needs."""

    ids: Ids
    reasoning_open: bool
    """The prompt ends inside a think block."""
    tools: tuple[Tool, ...]
    """Tools whose calls are parsed out of the reply."""


class FrontEnd:
    """One tokenizer, one template. Thread-safe."""

    def __init__(self, model: ModelSettings, folder: Path, *, memory: MemorySettings = MemorySettings()) -> None:  # noqa: B008 (frozen)
        """folder: tokenizer files and config.json. Blocks for half a second."""
        chats = load_chat_format(model, folder)
        self._tokenizer, self._format, self._serving = chats.tokenizer, chats.reply, chats.serving
        self.renders_tools = chats.renders_tools
        """True if the template shows tools to the model and a parser finds its calls."""
        backend = self._tokenizer.backend_tokenizer
        backend_json = backend.to_str()
        self._pieces = CachedTokenizer(
            backend,
            backend_json,
            assistant_may_write=self._format.markers,
            cache_bytes=int(memory.texts_mb * 2**20),
            words=memory.words,
        )
        self.end_ids = chats.end_ids
        hidden = {token for token in self._pieces.special_ids if not self._format.shows(self.token_text(token))}
        self._table = TokenTable(backend, backend_json, hidden_ids=hidden | self.end_ids)
        self.vocab_size = max(len(self._tokenizer), chats.vocab_size or 0)
        """Rows of the model's embedding, as far as known: an id beyond them was never sampled."""
        self.context_length = model.context_length or chats.context_length or 8192
        self.tokenizer_hash = hashlib.sha256(f"{backend_json}\0{chats.template}".encode()).hexdigest()
        if not self._pieces.is_exact:
            log.warning("tokenizer_not_cut", reason="pieces do not tokenise alone as they do together")

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, template_kwargs: Mapping[str, Any] = {}
    ) -> Rendered:
        """Render the prompt. Blocks: a few ms for a long conversation, plus 0.5 ms per 1,000 new characters."""
        text, parsed = self._text(messages, tools, template_kwargs)
        return self._rendered(text, self._pieces.encode(text), parsed)

    async def render_async(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, template_kwargs: Mapping[str, Any] = {}
    ) -> Rendered:
        """Render the prompt; long conversations and long texts run in a thread."""
        if sum(len(message.text()) for message in messages) > _INLINE_RENDER_CHARS:
            return await asyncio.to_thread(self.render, messages, tools, template_kwargs)
        text, parsed = self._text(messages, tools, template_kwargs)
        ids = self._pieces.encode_if_short(text, _INLINE_CHARS)
        if ids is None:
            ids = await asyncio.to_thread(self._pieces.encode, text)
        return self._rendered(text, ids, parsed)

    def parser(self, rendered: Rendered, *, stop: Sequence[str] = ()) -> StreamParser:
        """Return a parser for the reply to this prompt."""
        return StreamParser(
            self._table.detokenizer(),
            self._format,
            tools=rendered.tools,
            reasoning_open=rendered.reasoning_open,
            stop=stop,
        )

    def reply_ids(self, text: str) -> Ids:
        """Return the tokens that the model would have sampled for the reply `text`, its end token included."""
        # The tokens are cut out of a rendered conversation with that reply. Some templates write past replies
        # differently from new ones (an open think block): then the text alone is tokenised.
        user, reply = Message(role="user", content="a"), Message(role="assistant", content=text)
        prompt, whole = self.render([user]), self.render([user, reply, user]).ids
        begin = len(prompt.ids)
        end = next((i for i in range(begin, len(whole)) if whole[i] in self.end_ids), None)
        if whole[:begin] == prompt.ids and end is not None:
            return whole[begin : end + 1]
        thought = f"{self._format.think_end}\n\n" if prompt.reasoning_open else ""
        body = self._pieces.encode(thought + str(self._pieces.protect(text, is_reply=True)))
        return (*body, self._tokenizer.eos_token_id)

    def written_reply(self, text: str) -> WrittenReply:
        """Return the tokens of a reply that a user wrote. The end of an empty thought, if it has one, is given."""
        # The user wrote no thought. If `</think>` were trained, the policy would learn not to think.
        ids, end = self.reply_ids(text), self._format.think_end
        if end is None or not self.render([Message(role="user", content="a")]).reasoning_open:
            return WrittenReply(ids)
        written = ""
        for given, token in enumerate(ids):
            if end in written and not self.token_text(token).isspace():
                return WrittenReply(ids, given)
            written += self.token_text(token)
        return WrittenReply(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the plain text of ids, without control tokens."""
        detokenizer = self._table.detokenizer()
        return "".join(map(detokenizer.feed, ids)) + detokenizer.finish()

    def token_text(self, token: int) -> str:
        """Return the text of one token, also of a control token."""
        return str(self._tokenizer.decode([token]))

    def _rendered(self, text: str, ids: Ids, tools: tuple[Tool, ...]) -> Rendered:
        start = self._format.think_start
        return Rendered(ids, reasoning_open=bool(start) and text.rstrip().endswith(start or ""), tools=tools)

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, template_kwargs: Mapping[str, Any]
    ) -> tuple[str, tuple[Tool, ...]]:
        protect = self._pieces.protect
        kwargs = dict(template_kwargs)
        for name in kwargs.keys() & _NOT_FOR_TEMPLATES:
            raise RequestError(f"chat_template_kwargs.{name} is not for the template", param="chat_template_kwargs")
        body: dict[str, Any] = {
            "messages": [
                protect(_plain(messages[i], i), is_reply=messages[i].role == "assistant")
                for i in in_call_order(messages)
            ],
            "reasoning_effort": kwargs.pop("reasoning_effort", None),
        }
        if kwargs:
            body["chat_template_kwargs"] = protect(kwargs)
        if tools and self.renders_tools:
            body["tools"] = protect(tools)
        try:
            request = ChatCompletionRequest.model_validate(body)
            pieces = self._serving._process_messages(request, is_multimodal=False).prompt_ids
            parsed = tuple(Tool.model_validate(tool) for tool in tools or ()) if self.renders_tools else ()
        except (ValueError, TemplateError, TypeError) as error:
            raise _fault(error) from error
        return "".join(pieces), parsed


def _plain(message: Message, index: int) -> dict[str, Any]:
    """Return the message as SGLang takes it. Raises RequestError for a part that would not reach the model."""
    fields = message.model_dump(exclude_none=True)
    if message.role == "developer":
        fields["role"] = "system"
    if isinstance(message.content, list):
        thoughts = message.thoughts()
        if thoughts and message.reasoning_content is None:
            fields["reasoning_content"] = thoughts
        for number, part in enumerate(message.content):
            if part.type != "text" and not (message.role == "assistant" and part.is_thought):
                raise RequestError(
                    f"this model reads text only: messages[{index}].content[{number}] is of type {part.type!r}",
                    code="unsupported_content",
                    param=f"messages[{index}].content[{number}]",
                )
        fields["content"] = message.text()
    for call, made in zip(fields.get("tool_calls", ()), message.tool_calls or (), strict=True):
        call["function"]["arguments"] = made.function.as_object()
    return fields


def _fault(error: Exception) -> RequestError:
    """Return the RequestError of a rendering error; it names the field that SGLang's code refused."""
    param, why = "messages", str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        param, why = str(first["loc"][0]), first["msg"].removeprefix("Value error, ")
        if param in Tool.model_fields:  # read one by one
            param = "tools"
        if param != "messages":
            return RequestError(f"{param}: {why}", param=param)
    return RequestError(f"the messages cannot be rendered: {why}", param=param)
