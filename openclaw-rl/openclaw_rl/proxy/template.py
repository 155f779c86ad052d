"""Load the chat template and the reply parsers of a model folder, with SGLang's own code.

They are those that SGLang would choose for this folder, or the ones that the settings name. A choice that cannot work
is a SettingsError that names the setting. Only the tokenizer's files and the configs are read: no torch, no weights.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerFast

from openclaw_rl.errors import RequestError, SettingsError
from openclaw_rl.messages import ContentPart, Message
from openclaw_rl.proxy.parser import ReplyFormat
from openclaw_rl.proxy.sglang import FunctionCallParser, OpenAIServingChat, ReasoningParser, ServerArgs, TemplateManager
from openclaw_rl.proxy.skeleton import writes_texts_as_they_are
from openclaw_rl.settings import ModelSettings
from openclaw_rl.types.pictures import picture_of


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Template, parsers and limits of one model folder."""

    tokenizer: PreTrainedTokenizerFast
    serving: OpenAIServingChat
    """Renders messages; its "ids" are the rendered text."""
    template: str
    reply: ReplyFormat
    renders_tools: bool
    """The template shows tools to the model, and a parser finds its calls."""
    writes_texts_as_they_are: bool
    """The template looks at no text of a message: the text around them follows from the roles."""
    end_ids: frozenset[int]
    vocab_size: int | None
    """Rows of the embedding, from the model's config, like `context_length`; None if it has no such value."""
    context_length: int | None


def load_chat_format(model: ModelSettings, folder: Path) -> ChatFormat:
    """Load the chat format. folder: tokenizer files and config.json. Raises SettingsError."""
    try:
        tokenizer = _load_tokenizer(folder)
        config, generation = _json(folder / "config.json"), _json(folder / "generation_config.json")
    except Exception as error:  # the tokenizers library raises `Exception` itself
        why = str(error).strip().partition("\n")[0]
        raise SettingsError(f"model.path {model.path!r}: its tokenizer and configs cannot be read: {why}") from error
    server = ServerArgs(
        model_path=str(folder),
        device="cpu",
        tool_call_parser=model.tool_call_parser,
        reasoning_parser=model.reasoning_parser,
    )
    renderer = _TextTokenizer(tokenizer)
    manager = SimpleNamespace(
        tokenizer=renderer,
        processor=None,
        model_path=str(folder),
        server_args=server,
        image_token_id=None,
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(
                model_type=config.get("model_type", ""),
                architectures=config.get("architectures") or [],
                to_dict=lambda: dict(config),
            ),
            get_default_sampling_params=dict,
        ),
    )
    templates = TemplateManager()
    try:
        templates.load_chat_template(manager, model.chat_template, str(folder))
    except (RuntimeError, OSError) as error:
        raise SettingsError(f"model.chat_template: {error}") from error
    if templates.chat_template_name is None and not renderer.chat_template:
        raise SettingsError(f"model.path {model.path!r} has no chat template: name a Jinja file in model.chat_template")
    server.tool_call_parser = model.tool_call_parser or templates.suggested_tool_call_parser
    server.reasoning_parser = model.reasoning_parser or templates.suggested_reasoning_parser
    template = renderer.chat_template or ""
    serving = OpenAIServingChat(manager, templates)
    return ChatFormat(
        tokenizer=tokenizer,
        serving=serving,
        template=template,
        reply=_reply_format(server),
        writes_texts_as_they_are=serving.chat_encoding_spec is None
        and templates.chat_template_name is None
        and not serving.is_gpt_oss
        and not serving.is_gemma4
        and writes_texts_as_they_are(template),
        renders_tools="tools" in template and server.tool_call_parser is not None,
        end_ids=_end_ids(tokenizer, config, generation),
        vocab_size=_whole(_of_text(config, "vocab_size")),
        context_length=_whole(_of_text(config, "max_position_embeddings")),
    )


def for_template(message: Message, index: int) -> dict[str, Any]:
    """Return the message as SGLang takes it. Raises RequestError for a part that would not reach the model."""
    fields = message.model_dump(exclude_none=True)
    if message.role == "developer":
        fields["role"] = "system"
    if isinstance(message.content, list):
        thoughts = message.thoughts()
        if thoughts and message.reasoning_content is None:
            fields["reasoning_content"] = thoughts
        shows = any(picture_of(part) is not None for part in message.content)
        for number, part in enumerate(message.content):
            if picture_of(part) is not None:
                continue
            if part.type != "text" and not (message.role == "assistant" and part.is_thought):
                raise RequestError(
                    f"this model reads text only: messages[{index}].content[{number}] is of type {part.type!r}",
                    code="unsupported_content",
                    param=f"messages[{index}].content[{number}]",
                )
        if shows:
            fields["content"] = [_shown(part) for part in message.content if not part.is_thought]
        else:
            fields["content"] = message.text()
    for call, made in zip(fields.get("tool_calls", ()), message.tool_calls or (), strict=True):
        call["function"]["arguments"] = made.function.as_object()
    return fields


def _shown(part: ContentPart) -> dict[str, Any]:
    """Return a part of a message with pictures, as SGLang takes it."""
    picture = picture_of(part)
    if picture is None:
        return {"type": "text", "text": part.text or ""}
    return {"type": "image_url", "image_url": {"url": f"sha256:{picture.digest}"}}


class _TextTokenizer:
    """The tokenizer that SGLang's code gets: its "ids" are the rendered text, which `CachedTokenizer` tokenises."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template
        self.bos_token_id = tokenizer.bos_token_id

    def encode(self, text: str, **_: object) -> list[str]:
        return [text]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> str | list[str]:
        text = self._tokenizer.apply_chat_template(
            conversation, tokenize=False, chat_template=self.chat_template, **kwargs
        )
        return [text] if tokenize else text

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    from transformers import AutoTokenizer  # imported here because it imports torch

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _reply_format(server: ServerArgs) -> ReplyFormat:
    think_start = think_end = None
    if server.reasoning_parser is not None:
        try:
            detector = ReasoningParser(server.reasoning_parser).detector
        except ValueError as error:
            known = ", ".join(sorted(ReasoningParser.DetectorMap))
            raise SettingsError(f"model.reasoning_parser {server.reasoning_parser!r}: one of {known}") from error
        think_start, think_end = detector.think_start_token, detector.think_end_token
    call_start = call_end = None
    if server.tool_call_parser is not None:
        try:
            calls = FunctionCallParser([], server.tool_call_parser).detector
        except ValueError as error:
            known = ", ".join(sorted(FunctionCallParser.ToolCallParserEnum))
            raise SettingsError(f"model.tool_call_parser {server.tool_call_parser!r}: one of {known}") from error
        call_start, call_end = getattr(calls, "bot_token", None), getattr(calls, "eot_token", None)
    return ReplyFormat(
        reasoning_parser=server.reasoning_parser,
        tool_call_parser=server.tool_call_parser,
        think_start=think_start,
        think_end=think_end,
        call_start=call_start,
        call_end=call_end,
    )


def _end_ids(tokenizer: PreTrainedTokenizerFast, *configs: Mapping[str, Any]) -> frozenset[int]:
    found = {tokenizer.eos_token_id}
    for config in configs:
        ids = config.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [ids])
    return frozenset(token for token in found if token is not None)


def _of_text(config: Mapping[str, Any], name: str) -> Any:
    """Return a value of the config; a model of several media keeps those of its text in a table of their own."""
    value = config.get(name)
    table = config.get("text_config")
    return table.get(name) if value is None and isinstance(table, dict) else value


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _whole(value: Any) -> int | None:
    return int(value) if value else None
