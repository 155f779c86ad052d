"""Parse sampled ids into reasoning, content and tool calls as they come. O(1) per token.

A stream in pieces shows the same as the same ids at once, because both run this parser. It never shows half a
character, a stop string, a control token or half a tool call; the arguments of a call are valid JSON. A call that was
cut by the token limit, that names no known tool or that is not JSON stays text.

SGLang's streaming detectors split off the reasoning. Tool calls are collected from their opening marker to their
closing one, and then parsed by SGLang's detector as a whole.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from openclaw_rl.messages import FunctionCall, Message, ToolCall
from openclaw_rl.proxy.detokenizer import Detokenizer
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


@dataclass(frozen=True, slots=True)
class Delta:
    """Newly visible parts of a reply."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


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
    ) -> None:
        self._detokenizer, self._form = detokenizer, form
        self._stops = TextStops(stop)
        self._thinking = (
            ReasoningParser(form.reasoning_parser, force_reasoning=reasoning_open).detector
            if form.reasoning_parser is not None
            else None
        )
        self._calls = _CallSplitter(form, tools) if tools and form.tool_call_parser is not None else None
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._tool_calls: list[ToolCall] = []

    @property
    def is_stopped(self) -> bool:
        """True if a stop string matched: the reply is over."""
        return self._stops.is_stopped

    @property
    def kept(self) -> int:
        """Tokens before the stop string; valid once `is_stopped`."""
        return self._stops.kept

    @property
    def has_calls(self) -> bool:
        return bool(self._tool_calls)

    def feed(self, token: int) -> Delta | None:
        """Take one token; return the newly visible parts, or None."""
        text = self._stops.feed(self._detokenizer.feed(token))
        return self._show(text) if text else None

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
        return Delta(reasoning, content, tuple(calls))

    def reply(self) -> Message:
        """Return the message as the client got it."""
        content = "".join(self._content)
        return Message(
            role="assistant",
            content=None if self._tool_calls and not content else content,
            reasoning_content="".join(self._reasoning) or None,
            tool_calls=list(self._tool_calls) or None,
        )

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


class TextStops:
    """Stop strings in a stream of text, and the tokens that they cut off. O(1) per token.

    No text of a stop string or behind it is ever released. Text that may still become a stop string is held back.
    """

    __slots__ = ("_ends", "_held", "_out", "_stops", "is_stopped", "kept")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._out = 0
        """Characters released."""
        self._ends: list[int] = []
        """Count of characters decoded, after each token."""
        self.is_stopped = False
        self.kept = 0
        """Tokens before the first token that the match cut; valid once `is_stopped`."""

    def feed(self, text: str) -> str:
        """Take one token's text; return the text that may be shown."""
        if not self._stops:
            return text
        if self.is_stopped:
            return ""
        buffer = self._held + text
        self._ends.append(self._out + len(buffer))
        found = [at for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            cut = min(found)
            self.is_stopped = True
            self.kept = self._tokens_before(self._out + cut)
            self._held = ""
            return buffer[:cut]
        hold = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - hold :]
        self._out += len(buffer) - hold
        return buffer[: len(buffer) - hold]

    def finish(self) -> str:
        """End the text; return the part held back."""
        held, self._held = self._held, ""
        return held

    def _tokens_before(self, position: int) -> int:
        """Return the number of tokens whose text ends before `position`."""
        count = next(i for i, end in enumerate(self._ends) if end > position)
        # A token without text holds the first bytes of the next token's character, and is cut with it.
        while (
            count > 0 and self._ends[count - 1] == position and self._ends[count - 1] == _before(self._ends, count - 1)
        ):
            count -= 1
        return count


class _CallSplitter:
    """Splitter of content into text and finished calls."""

    # SGLang's streaming detector of calls would parse all of the arguments again with every token.

    def __init__(self, form: ReplyFormat, tools: Sequence[Tool]) -> None:
        self._parser, self._tools = str(form.tool_call_parser), list(tools)
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
        while text:
            if self._block is None:
                buffer = self._held + text
                at = buffer.find(self._start)
                if at < 0:
                    shown += self._hold(buffer)
                    break
                shown += self._visible(buffer[:at].rstrip())
                self._held, self._block, self._tail = "", [], ""
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
        calls = [
            ToolCall(
                id=f"call_{uuid.uuid4().hex[:24]}", function=FunctionCall(name=item.name, arguments=item.parameters)
            )
            for item in items
            if item.name and _is_object(item.parameters)
        ]
        if not calls or len(calls) < len(items):
            return [], self._start + raw
        return calls, text if not self._start else ""


def _before(ends: list[int], index: int) -> int:
    return ends[index - 1] if index else 0


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False
