"""Convert messages to ids, and ids back to replies: SGLang's rendering and parsers around our incremental tokenizer.

The ids are those that SGLang's chat endpoint would give the engine for the same messages: template, tool and thinking
handling are SGLang's code. One difference: control strings inside a client's text stay plain text. `developer` is
`system`; text parts are joined by one newline. A request that cannot be rendered is a `RequestError`: no part of it is
dropped without an error.

A front end renders small chats as it is made. A template that can render no chat is a `SettingsError`; lesser faults
are `problems` and `remarks`. A reply ends at the tokens that the model's files list. Where the template never writes
one of them behind a reply, the token that it writes there ends a reply too.
"""

import asyncio
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from jinja2 import TemplateError
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from openclaw_rl.errors import RequestError, SettingsError
from openclaw_rl.messages import FunctionCall, Message, ToolCall, in_call_order
from openclaw_rl.models.vision import Vision
from openclaw_rl.proxy.detokenizer import TokenTable
from openclaw_rl.proxy.parser import StreamParser
from openclaw_rl.proxy.sglang import ChatCompletionRequest, Tool
from openclaw_rl.proxy.skeleton import Skeletons
from openclaw_rl.proxy.template import ChatFormat, for_template, load_chat_format
from openclaw_rl.proxy.tokenizer import CachedTokenizer
from openclaw_rl.settings import MemorySettings, ModelSettings
from openclaw_rl.types import Ids, WrittenReply
from openclaw_rl.types.pictures import Picture, pictures_in, with_pictures

log = structlog.get_logger()

_INLINE_CHARS = 4096
"""Characters that the event loop tokenises (about 2 ms); longer texts go to a thread."""
_INLINE_RENDER_CHARS = 200_000
"""Characters of a conversation that the event loop renders (a few ms)."""
_NOT_FOR_TEMPLATES = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters) | {"messages"}
"""Arguments of the tokenizer itself (another template, the type of its result), which a client may not set."""
_TEMPLATE_FAULTS = (ValueError, TemplateError, TypeError, ArithmeticError, LookupError, AttributeError)
"""Errors of a template. It is a program of the model's author, and may divide by zero or index past an end."""
_PLAIN_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of messages of text alone, as templates get them."""
_PLAIN_FIELDS = {"role", "content"}
_ASKED, _SAID, _ASKED_AGAIN = "Fjord", "Harbour", "Glacier"
"""Texts of the chat that is rendered as a front end is made."""
_CALL = ToolCall(id="call_0123456789abcdef01234567", function=FunctionCall(name="look", arguments='{"at": "sea"}'))
_TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and the facts about it that the reply's parser needs."""

    ids: Ids
    """With its pictures, if it has any (`types.pictures.PromptIds`)."""
    reasoning_open: bool
    """The prompt ends inside a think block."""
    tools: tuple[Tool, ...]
    """Tools whose calls are parsed out of the reply."""
    pictures: tuple[Picture, ...] = ()
    """References to the pictures of the prompt, in its order."""
    opening: str = ""
    """The template's own text between the last control token and the reply."""


class FrontEnd:
    """One tokenizer, one template. Thread-safe."""

    def __init__(self, model: ModelSettings, folder: Path, *, memory: MemorySettings = MemorySettings()) -> None:  # noqa: B008 (frozen)
        """folder: tokenizer files and config.json. Blocks for half a second. Raises SettingsError."""
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
        self._skeletons = Skeletons(self._plain_text) if chats.writes_texts_as_they_are else None
        self._rows = chats.vocab_size
        self.problems: tuple[str, ...] = ()
        """Faults of the model's files that spoil chats, one sentence each."""
        self.remarks: tuple[str, ...] = ()
        """Facts about the model's files that a user should know: chats work."""
        self.vision: Vision | None = None
        """None: the model reads text only."""
        self.why_blind = ""
        """The reason for that, as the rest of a sentence about the model."""
        try:
            self.vision = Vision.of(folder)
        except SettingsError as error:
            self.why_blind = str(error)
        self._try(model)
        self._end_id, self.end_ids = self._ends(chats)
        if self._opens_no_reply(chats):
            self.problems += (
                "the template ignores add_generation_prompt: a prompt ends behind the user's words and opens no reply",
            )
        hidden = {token for token in self._pieces.special_ids if not self._format.shows(self.token_text(token))}
        self._table = TokenTable(backend, backend_json, hidden_ids=hidden | self.end_ids)
        self.vocab_size = max(len(self._tokenizer), chats.vocab_size or 0)
        """Rows of the model's embedding, as far as known: an id beyond them was never sampled."""
        self.context_length = model.context_length or chats.context_length or 8192
        self.tokenizer_hash = hashlib.sha256(f"{backend_json}\0{chats.template}".encode()).hexdigest()
        if not self._pieces.is_exact:
            log.warning("tokenizer_not_cut", reason="pieces do not tokenise alone as they do together")

    @property
    def thinks(self) -> bool:
        """True if a reply of the model may begin with a thought."""
        return self._format.think_start is not None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] = {},
        *,
        shows_pictures: bool = False,
    ) -> Rendered:
        """Render the prompt. Blocks: a few ms for a long conversation, plus 0.5 ms per 1,000 new characters.

        shows_pictures: the caller gives the engine the pictures of `Rendered.pictures`. Then a reference to a picture
        becomes as many placeholders as the picture has tokens; else it is refused.
        """
        text, parsed = self._text(messages, tools, template_kwargs)
        return self._rendered(text, self._pieces.encode(text), parsed, messages, shows_pictures=shows_pictures)

    async def render_async(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] = {},
        *,
        shows_pictures: bool = False,
    ) -> Rendered:
        """Render the prompt; long conversations and long texts run in a thread."""
        if sum(len(message.text()) for message in messages) > _INLINE_RENDER_CHARS:
            work = partial(self.render, messages, tools, template_kwargs, shows_pictures=shows_pictures)
            return await asyncio.to_thread(work)
        text, parsed = self._text(messages, tools, template_kwargs)
        ids = self._pieces.encode_if_short(text, _INLINE_CHARS)
        if ids is None:
            ids = await asyncio.to_thread(self._pieces.encode, text)
        return self._rendered(text, ids, parsed, messages, shows_pictures=shows_pictures)

    async def expect_back(self, rendered: Rendered, reply: Message) -> None:
        """Tokenise a reply of text alone: the next turn brings it back, and finds its tokens in the cache."""
        # A guess: templates write a past reply as it came, behind its opening. A wrong one costs this call alone.
        if reply.tool_calls or reply.reasoning_content or rendered.reasoning_open or not self._pieces.is_exact:
            return
        text = rendered.opening + str(self._pieces.protect(reply.text(), is_reply=True))
        if self._pieces.encode_if_short(text, _INLINE_CHARS) is None:
            await asyncio.to_thread(self._pieces.encode, text)

    def parser(
        self, rendered: Rendered, *, stop: Sequence[str] = (), one_call: bool = False, is_forced: bool = False
    ) -> StreamParser:
        """Return a parser for the reply to this prompt. one_call, is_forced: as of `StreamParser`."""
        return StreamParser(
            self._table.detokenizer(),
            self._format,
            tools=rendered.tools,
            reasoning_open=rendered.reasoning_open,
            stop=stop,
            one_call=one_call,
            is_forced=is_forced,
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
        return body if self._end_id is None else (*body, self._end_id)

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

    def _rendered(
        self, text: str, ids: Ids, tools: tuple[Tool, ...], messages: Sequence[Message], *, shows_pictures: bool
    ) -> Rendered:
        start = self._format.think_start
        pictures = pictures_in(messages[at] for at in in_call_order(messages))
        if pictures:
            ids = self._with_pictures(text, ids, pictures, shows_pictures=shows_pictures)
        is_open = bool(start) and text.rstrip().endswith(start or "")
        opening = self._pieces.opening(text)
        return Rendered(ids, reasoning_open=is_open, tools=tools, pictures=pictures, opening=opening)

    def _with_pictures(self, text: str, ids: Ids, pictures: Sequence[Picture], *, shows_pictures: bool) -> Ids:
        if (vision := self.vision) is None or not shows_pictures:
            raise RequestError("a picture, and this model reads text only here", code="unsupported_content")
        if self._pieces.is_typed(text, vision.reserved):
            # The engine reads the prompt's text, and would take the words for one more picture.
            raise RequestError("a text beside a picture spells the model's own mark of a picture", param="messages")
        return with_pictures(vision.expanded(ids, pictures), pictures)

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, template_kwargs: Mapping[str, Any]
    ) -> tuple[str, tuple[Tool, ...]]:
        protect = self._pieces.protect
        if not tools and not template_kwargs and (text := self._from_skeleton(messages)) is not None:
            return text, ()
        kwargs = dict(template_kwargs)
        for name in kwargs.keys() & _NOT_FOR_TEMPLATES:
            raise RequestError(f"chat_template_kwargs.{name} is not for the template", param="chat_template_kwargs")
        body: dict[str, Any] = {
            "messages": [
                protect(for_template(messages[i], i), is_reply=messages[i].role == "assistant")
                for i in in_call_order(messages)
            ],
            "reasoning_effort": kwargs.pop("reasoning_effort", None),
        }
        if kwargs:
            body["chat_template_kwargs"] = protect(kwargs)
        if tools and self.renders_tools:
            body["tools"] = protect(tools)
        try:
            text = self._processed(body)
            parsed = tuple(Tool.model_validate(tool) for tool in tools or ()) if self.renders_tools else ()
        except _TEMPLATE_FAULTS as error:
            raise _fault(error) from error
        return text, parsed

    def _processed(self, body: Mapping[str, Any]) -> str:
        """Return the prompt as SGLang's code makes it."""
        request = ChatCompletionRequest.model_validate(body)
        return "".join(self._serving._process_messages(request, is_multimodal=False).prompt_ids)

    def _plain_text(self, roles: Sequence[str], texts: Sequence[str]) -> str:
        """Return the prompt of messages of text alone."""
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        return self._processed({"messages": messages, "reasoning_effort": None})

    def _from_skeleton(self, messages: Sequence[Message]) -> str | None:
        """Return the prompt of messages of text alone, where the template writes their texts as they are."""
        if self._skeletons is None:
            return None
        roles, texts = [], []
        for message in messages:
            role, text = _PLAIN_ROLES.get(message.role), message.content
            if role is None or not isinstance(text, str) or message.model_fields_set != _PLAIN_FIELDS:
                return None
            roles.append(role)
            texts.append(self._pieces.protect(text, is_reply=role == "assistant"))
        try:
            return self._skeletons.text(roles, texts)
        except _TEMPLATE_FAULTS as error:
            raise _fault(error) from error

    # -- the model's files, tried once ---------------------------------------------------------------------------------

    def _try(self, model: ModelSettings) -> None:
        """Render small chats. Raises SettingsError if no chat can be rendered; lesser faults become problems."""
        user, reply = Message(role="user", content=_ASKED), Message(role="assistant", content=_SAID)
        system, again = Message(role="system", content=_SAID), Message(role="user", content=_ASKED_AGAIN)
        named = model.chat_template
        source = f"model.chat_template {named!r}" if named else f"model.path {model.path!r}: its chat template"
        if fault := self._fault_of([user]):
            raise SettingsError(f"{source} can serve no chat: {fault}")
        if fault := self._fault_of([user, reply, again]):
            self.problems += (f"the template cannot render a chat that has a reply: {fault}",)
        if fault := self._fault_of([system, user]):
            # A chat without a system message works, and clients that send none are served well.
            self.remarks += (f"the template cannot render a system message: {fault}",)
        if self.renders_tools:
            call = Message(role="assistant", content=None, tool_calls=[_CALL])
            result = Message(role="tool", content=_SAID, tool_call_id=_CALL.id)
            if fault := self._fault_of([user], [_TOOL]) or self._fault_of([user, call, result], [_TOOL]):
                self.problems += (f"the template cannot render tools, calls and their results: {fault}",)

    def _fault_of(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str | None:
        """Return the reason why such a chat cannot be served, or None."""
        try:
            ids = self.render(messages, tools).ids
        except RequestError as error:
            return error.message.removeprefix("the messages cannot be rendered: ")
        beyond = next((token for token in ids if self._rows is not None and token >= self._rows), None)
        if beyond is None:
            return None
        return f"it writes token {beyond} ({self.token_text(beyond)!r}); the model's embedding has {self._rows} rows"

    def _ends(self, chats: ChatFormat) -> tuple[int | None, frozenset[int]]:
        """Return the token that ends a reply, and all tokens that do."""
        behind, listed = self._behind_reply(chats), chats.end_ids
        if agreed := [token for token in behind if token in listed]:
            return agreed[0], listed
        first = self._tokenizer.eos_token_id if listed else None
        names = ", ".join(repr(self.token_text(token)) for token in sorted(listed)) or "no end token"
        if not behind:
            if not listed:
                self.problems += (
                    "no end token: the model's files list none and the template writes none, so that each reply runs "
                    "to its limit; name one as eos_token_id in generation_config.json",
                )
            else:
                self.remarks += (f"the template never ends a reply with {names}: replies may run to their limit",)
            return first, listed
        self.remarks += (
            f"the model's files list {names}, and the template ends a reply with {self.token_text(behind[0])!r}: "
            "both end a reply",
        )
        return behind[0], listed | {behind[0]}

    def _behind_reply(self, chats: ChatFormat) -> list[int]:
        """Return the control tokens that the template writes behind a reply: at the end of a chat, and inside one."""
        # Inside a chat a template may close a reply with another token than the model samples (gpt-oss).
        user, reply = Message(role="user", content=_ASKED), Message(role="assistant", content=_SAID)
        texts = [_applied(chats, [user, reply], opens_reply=False)]
        try:
            inside, _ = self._text([user, reply, Message(role="user", content=_ASKED_AGAIN)], None, {})
        except RequestError:
            inside = ""
        # The marks of the next message are no end of this one, but a sampled one ends the reply as well.
        texts.append(inside.partition(_ASKED_AGAIN)[0])
        found = [token for text in reversed(texts) for token in self._pieces.controls(text.partition(_SAID)[2])]
        return [token for token in found if self.token_text(token).strip() not in self._format.markers]

    def _opens_no_reply(self, chats: ChatFormat) -> bool:
        """Return True if prompts lack the marks that the template writes before a reply."""
        user, reply = Message(role="user", content=_ASKED), Message(role="assistant", content=_SAID)
        opened = _applied(chats, [user], opens_reply=True)
        if not opened or opened != _applied(chats, [user], opens_reply=False):
            return False
        # A template without such marks ends both alike (`[/INST]`).
        prompt = opened.partition(_ASKED)[2].rstrip()
        before = _applied(chats, [user, reply], opens_reply=False).partition(_ASKED)[2].partition(_SAID)[0].rstrip()
        return before != prompt and before.startswith(prompt)


def _applied(chats: ChatFormat, messages: Sequence[Message], *, opens_reply: bool) -> str:
    """Return the text that the template alone makes of the messages; empty if it makes none."""
    if not chats.template:
        return ""
    plain = [message.model_dump(exclude_none=True) for message in messages]
    try:
        return str(
            chats.tokenizer.apply_chat_template(
                plain, tokenize=False, chat_template=chats.template, add_generation_prompt=opens_reply
            )
        )
    except _TEMPLATE_FAULTS:
        return ""


def _fault(error: Exception) -> RequestError:
    """Return the RequestError of a rendering error; it names the field that SGLang's code refused."""
    param, why = "messages", str(error)
    if not isinstance(error, ValueError | TemplateError | TypeError):
        why = f"{type(error).__name__}: {why}"  # alone, the words of a KeyError are a name
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        param, why = str(first["loc"][0]), first["msg"].removeprefix("Value error, ")
        if param in Tool.model_fields:  # read one by one
            param = "tools"
        if param != "messages":
            return RequestError(f"{param}: {why}", param=param)
    return RequestError(f"the messages cannot be rendered: {why}", param=param)
