"""Parse sampled ids into reasoning, content and tool calls as they come. O(1) per token.

A stream in pieces shows the same as the same ids at once, because both run this parser. It never shows half a
character, a stop string, a control token or half a tool call; the arguments of a call are valid JSON. A call that was
cut by the token limit, that names no known tool or that is not JSON stays text.

SGLang's streaming detectors split off the reasoning. Tool calls are collected from their opening marker to their
closing one, and then parsed by SGLang's detector as a whole. A client that wants one call gets the reply as far as its
second call. A reply under a grammar of calls is JSON, and no text of it is shown.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from openclaw_rl.messages import FunctionCall, Message, ToolCall
from openclaw_rl.proxy.detokenizer import Detokenizer, TextStops
from openclaw_rl.proxy.sglang import FunctionCallParser, ReasoningParser, Tool


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """Markers and parsers of a model's reasoning and calls; None where the model has no such part."""

    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    think_start: str | None = None
    think_end: str | None = None
    call_start: str | None = None
    call_end: str | None = None

    @property
    def markers(self) -> frozenset[str]:
        """Control strings with a meaning in replies."""
        found = (self.think_start, self.think_end, self.call_start, self.call_end)
        return frozenset(marker.strip() for marker in found if marker and marker.strip())

    def shows(self, token: str) -> bool:
        """Return True if a special token must reach the parsers as text."""
        return bool(token.strip()) and any(token.strip() in marker for marker in self.markers)


class Delta(NamedTuple):  # one is made for each token: half the time of a frozen dataclass
    """Newly visible parts of a reply."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


def joined(deltas: Sequence[Delta]) -> Delta | None:
    """Return the parts as one; None for no part."""
    if len(deltas) < 2:
        return deltas[0] if deltas else None
    return Delta(
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        tuple(call for delta in deltas for call in delta.calls),
    )


class StreamParser:
    """Parser of one reply."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        form: ReplyFormat,
        *,
        tools: Sequence[Tool] = (),
        reasoning_open: bool = False,
        stop: Sequence[str] = (),
        one_call: bool = False,
        is_forced: bool = False,
    ) -> None:
        """one_call: the client wants no second call. is_forced: a grammar makes the reply a JSON list of calls."""
        self._detokenizer, self._form = detokenizer, form
        self._stops = TextStops(stop)
        self._thinking = (
            ReasoningParser(form.reasoning_parser, force_reasoning=reasoning_open).detector
            if form.reasoning_parser is not None and not is_forced
            else None
        )
        self._calls: _CallSplitter | _ForcedCalls | None = None
        if is_forced:
            self._calls = _ForcedCalls(tools, one_call=one_call)
        elif tools and form.tool_call_parser is not None:
            self._calls = _CallSplitter(form, tools, one_call=one_call)
        self._is_plain = self._thinking is None and self._calls is None and not any(stop)
        """The text is shown as it comes."""
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._tool_calls: list[ToolCall] = []
        self._fed = self._visible = self._reasoned = 0
        """Tokens so far; those up to the last visible part; those of the thought."""

    @property
    def is_stopped(self) -> bool:
        """True if a stop string matched: the reply is over."""
        return self._stops.is_stopped

    @property
    def stop(self) -> str | None:
        """The stop string that ended the reply."""
        return self._stops.matched

    @property
    def is_over(self) -> bool:
        """True if the client gets no further part, whatever else the model writes."""
        return self.is_stopped or self._has_second_call

    @property
    def kept(self) -> int:
        """Tokens that the client gets whole, once `is_over`: those before the stop string or the second call."""
        kept = self._stops.kept if self.is_stopped else self._fed
        return min(kept, self._visible) if self._has_second_call else kept

    @property
    def delivered(self) -> int:
        """Tokens of which the client gets a part. An end token counts; a token that only a cut part has does not."""
        shown = self._stops.shown if self.is_stopped else self._fed
        return min(shown, self._visible) if self._has_second_call else shown

    @property
    def reasoned(self) -> int:
        """Tokens of the thought, among the delivered ones."""
        return min(self._reasoned, self.delivered)

    @property
    def has_calls(self) -> bool:
        return bool(self._tool_calls)

    def feed(self, token: int) -> Delta | None:
        """Take one token; return the newly visible parts, or None."""
        self._fed += 1
        text = self._detokenizer.feed(token)
        if self._is_plain:
            if not text:
                return None
            self._visible = self._fed
            self._content.append(text)
            return Delta("", text)
        text = self._stops.feed(text)
        return self._counted(self._show(text)) if text else None

    def finish(self, *, is_complete: bool) -> Delta | None:
        """End the reply; return the parts held back, or None.

        is_complete: the model ended its reply itself, so a call without its closing marker still counts.
        """
        reasoning = content = ""
        calls: list[ToolCall] = []
        held = self._stops.feed(self._detokenizer.finish()) + self._stops.finish()
        if held and (delta := self._show(held)) is not None:
            reasoning, content, calls = delta.reasoning, delta.content, list(delta.calls)
        if self._thinking is not None:
            rest = self._thinking.finish()
            reasoning += self._as_reasoning(rest.reasoning_text or "")
            content, calls = self._as_content(rest.normal_text or "", content, calls)
        if self._calls is not None:
            text, found = self._calls.finish(is_complete=is_complete)
            text = self._as_text(text)
            content += text
            calls += found
            self._tool_calls += found
        if not (reasoning or content or calls):
            return None
        return self._counted(Delta(reasoning, content, tuple(calls)))

    def reply(self) -> Message:
        """Return the message as the client got it."""
        content = "".join(self._content)
        return Message(
            role="assistant",
            content=None if self._tool_calls and not content else content,
            reasoning_content="".join(self._reasoning) or None,
            tool_calls=list(self._tool_calls) or None,
        )

    @property
    def _has_second_call(self) -> bool:
        return self._calls is not None and self._calls.is_over

    def _counted(self, delta: Delta | None) -> Delta | None:
        """Count the tokens since the last visible part as tokens of this one."""
        if delta is not None:
            if delta.reasoning and not delta.content and not delta.calls:
                self._reasoned += self._fed - self._visible
            self._visible = self._fed
        return delta

    def _show(self, text: str) -> Delta | None:
        if self._thinking is None and self._calls is None:
            self._content.append(text)
            return Delta(content=text)
        reasoning = ""
        if self._thinking is not None:
            split = self._thinking.parse_streaming_increment(text)
            reasoning, text = self._as_reasoning(split.reasoning_text or ""), split.normal_text or ""
        content, calls = self._as_content(text, "", [])
        if not (reasoning or content or calls):
            return None
        return Delta(reasoning, content, tuple(calls))

    def _as_reasoning(self, text: str) -> str:
        if not self._reasoning:
            text = text.lstrip("\n")
        if text:
            self._reasoning.append(text)
        return text

    def _as_content(self, text: str, content: str, calls: list[ToolCall]) -> tuple[str, list[ToolCall]]:
        if self._calls is None:
            return content + self._as_text(text), calls
        text, found = self._calls.feed(text)
        self._tool_calls += found
        return content + self._as_text(text), calls + found

    def _as_text(self, text: str) -> str:
        if self._reasoning and not self._content:
            text = text.lstrip("\n")  # the blank lines between a think block and the answer
        if text:
            self._content.append(text)
        return text


class _CallSplitter:
    """Splitter of content into text and finished calls."""

    # SGLang's streaming detector of calls would parse all of the arguments again with every token.

    def __init__(self, form: ReplyFormat, tools: Sequence[Tool], *, one_call: bool) -> None:
        self._parser, self._tools = str(form.tool_call_parser), list(tools)
        self._one_call, self._has_call = one_call, False
        self.is_over = False
        """True once a second call began that the client does not want: no text or call comes from there on."""
        self._open, self._close = form.call_start or "", form.call_end or ""
        self._start, self._end = self._open.strip(), self._close.strip()
        if len(self._end) < 3:
            self._end = ""  # a bracket is no marker of its own: the call lasts to the end of the reply
        self._held = ""
        self._block: list[str] | None = [] if not self._start else None
        """Text of the current call behind its opening marker; a format without that marker is held to the end."""
        self._tail = ""
        self._after_call = False

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        shown, calls = "", []
        while text and not self.is_over:
            if self._block is None:
                buffer = self._held + text
                at = buffer.find(self._start)
                if at < 0:
                    shown += self._hold(buffer)
                    break
                shown += self._visible(buffer[:at].rstrip())
                self._held = ""
                if self._one_call and self._has_call:
                    self.is_over = True
                    break
                self._block, self._tail = [], ""
                text = buffer[at + len(self._start) :]
            else:
                # Of the text before, only its end can be part of the closing marker.
                at = (self._tail + text).find(self._end) if self._end else -1
                if at < 0:
                    self._block.append(text)
                    self._tail = (self._tail + text)[-(len(self._end) - 1) :] if self._end else ""
                    break
                cut = at + len(self._end) - len(self._tail)
                whole = "".join(self._block) + text[:cut]
                text = text[cut:]
                found, raw = self._parse(whole[: -len(self._end)], whole)
                calls += found
                shown += self._visible(raw)
                self._block, self._tail = None, ""
                self._after_call = bool(found)
        return shown, calls

    def finish(self, *, is_complete: bool) -> tuple[str, list[ToolCall]]:
        if self.is_over:
            return "", []
        if self._block is None:
            held, self._held = self._held, ""
            return ("" if self._after_call and not held.strip() else held), []
        inside = "".join(self._block)
        self._block = None
        if is_complete:
            found, raw = self._parse(inside, inside)
            return raw, found
        return self._start + inside, []

    def _hold(self, buffer: str) -> str:
        """Return the text that can be no part of a marker; blanks wait too, in case a call follows them."""
        size = 0
        for length in range(min(len(buffer), len(self._start) - 1), 0, -1):
            if buffer.endswith(self._start[:length]):
                size = length
                break
        text = buffer[: len(buffer) - size].rstrip()
        self._held = buffer[len(text) :]
        return self._visible(text)

    def _visible(self, text: str) -> str:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text

    def _parse(self, inside: str, raw: str) -> tuple[list[ToolCall], str]:
        """Return the calls of one block, or its text unchanged."""
        block = f"{self._open}{inside.strip()}{self._close}" if self._end else f"{self._open}{inside}"
        text, items = FunctionCallParser(self._tools, self._parser).parse_non_stream(block)
        calls = [_call(item.name, item.parameters) for item in items if item.name and _is_object(item.parameters)]
        if not calls or len(calls) < len(items):
            return [], self._start + raw
        self._has_call = True
        return calls[:1] if self._one_call else calls, text if not self._start else ""


class _ForcedCalls:
    """Collector of a reply that a grammar made a JSON list of calls: `[{"name": …, "parameters": {…}}]`."""

    def __init__(self, tools: Sequence[Tool], *, one_call: bool) -> None:
        self._names, self._one_call = {tool.function.name for tool in tools}, one_call
        self._text: list[str] = []
        self.is_over = False

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        self._text.append(text)
        return "", []

    def finish(self, *, is_complete: bool) -> tuple[str, list[ToolCall]]:
        """Return the calls, or the text of a reply that is no such list."""
        text, self._text = "".join(self._text), []
        try:
            found = orjson.loads(text)
            pairs = [(str(one["name"]), one["parameters"]) for one in (found if isinstance(found, list) else [found])]
        except (ValueError, TypeError, KeyError):
            return text, []
        if any(name not in self._names or not isinstance(arguments, dict) for name, arguments in pairs):
            return text, []
        calls = [_call(name, orjson.dumps(arguments).decode()) for name, arguments in pairs]
        return "", calls[:1] if self._one_call else calls


def _call(name: str, arguments: str) -> ToolCall:
    return ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=FunctionCall(name=name, arguments=arguments))


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False
