"""OpenAI's Responses, the reply: one response object, or the events that build it item by item.

A thought is an item of type `reasoning`: its text is the summary where the client asked for one, else the content. No
signature and no encrypted content is made up.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from openclaw_rl.errors import RequestError
from openclaw_rl.messages import ToolCall
from openclaw_rl.proxy.body import ParsedBody
from openclaw_rl.proxy.dialects import responses_request
from openclaw_rl.proxy.dialects.base import Asked, Outcome, TokenLogProb, Usage, arguments_text
from openclaw_rl.proxy.parser import Delta
from openclaw_rl.web import bodies
from openclaw_rl.web.sse import KEEP_ALIVE

_ECHOED = ("instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key", "safety_identifier", "user")
_FIELDS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text", "logprobs": "include"}
"""Names of the chat form, and what they are called here."""
_NOTHING: Mapping[str, Any] = {}
_NO_LOG_PROBS: Mapping[str, Any] = {"logprobs": []}


class OpenAIResponses:
    """The dialect."""

    path, id_prefix = "/responses", "resp_"
    key_header: str | None = None
    keep_alive = KEEP_ALIVE

    def read(self, data: bytes) -> ParsedBody:
        return responses_request.read(data)

    def events(self, asked: Asked) -> "ResponseEvents":
        return ResponseEvents(asked)

    def whole(self, asked: Asked, outcome: Outcome) -> bytes:
        events = ResponseEvents(asked)
        message = outcome.message
        events.delta(Delta(message.reasoning_content or "", message.text(), tuple(message.tool_calls or ())))
        events.log_probs = list(outcome.log_probs or ())
        return orjson.dumps(events.response(outcome))

    def error(self, fault: RequestError, request_id: str) -> bytes:
        param = _own_name(fault.param)
        return bodies.error(fault.message, status=fault.status, code=fault.code, param=param)

    def headers(self, request_id: str) -> Mapping[str, str]:
        return {"x-request-id": request_id}


def _own_name(param: str | None) -> str | None:
    """Return the name that a field of the chat form has in this dialect."""
    first = (param or "").split(".")[0].split("[")[0]
    return _FIELDS.get(first, param)


class ResponseEvents:
    """Server-sent events of one response. `sequence_number` counts them; `output_index` counts the items."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._key = asked.reply_id.partition("_")[2]
        body = asked.body.raw.get("reasoning")
        self._is_summary = isinstance(body, dict) and body.get("summary") is not None
        self._number = 0
        self._items: list[dict[str, Any]] = []
        """All items so far; the last one may be open."""
        self._open: str | None = None
        """Kind of the open item: `reasoning` or `message`."""
        self._text: list[str] = []
        """Text of the open item."""
        self._delta = b""
        """Beginning of the open item's delta events."""
        self.log_probs: list[TokenLogProb] = []

    def opening(self) -> bytes:
        response = self._object("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: Delta | None, log_probs: Sequence[TokenLogProb] | None = None) -> bytes:
        if log_probs:
            self.log_probs += log_probs
        if delta is None:
            return b""
        out = b""
        if delta.reasoning:
            out += self._add("reasoning", delta.reasoning)
        if delta.content:
            out += self._add("message", delta.content)
        for call in delta.calls:
            out += self._call(call)
        return out

    def end(self, outcome: Outcome) -> bytes:
        out = self._close(_status(outcome))
        response = self.response(outcome)
        return out + self._event(f"response.{response['status']}", response=response)

    def failure(self, fault: RequestError) -> bytes:
        code = "server_error" if fault.status >= 500 else fault.code
        out = self._close(status="incomplete")
        response = self._object("failed") | {"error": {"code": code, "message": fault.message}}
        return out + self._event("response.failed", response=response)

    def response(self, outcome: Outcome) -> dict[str, Any]:
        """Return the response object of a complete reply."""
        status = _status(outcome)
        self._close(status)
        for item in self._items:
            if item["type"] == "message" and self.log_probs:
                item["content"][0]["logprobs"] = [entry.json() for entry in self.log_probs]
        cut = {"incomplete_details": {"reason": "max_output_tokens"}} if status == "incomplete" else {}
        return self._object(status, outcome.usage) | cut

    # -- items ---------------------------------------------------------------------------------------------------------

    def _add(self, kind: str, text: str) -> bytes:
        out = b"" if self._open == kind else self._close() + self._begin(kind)
        self._text.append(text)
        self._number += 1
        return out + b"".join((self._delta, str(self._number - 1).encode(), b',"delta":', orjson.dumps(text), b"}\n\n"))

    def _begin(self, kind: str) -> bytes:
        index = len(self._items)
        self._open, self._text = kind, []
        if kind == "message":
            item: dict[str, Any] = {
                "id": f"msg_{self._key}_{index}",
                "type": "message",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
            event, part, more = "response.output_text.delta", "response.content_part", _NO_LOG_PROBS
        else:
            item = {"id": f"rs_{self._key}_{index}", "type": "reasoning", "status": "in_progress", "summary": []}
            if self._is_summary:
                event, part, more = "response.reasoning_summary_text.delta", "response.reasoning_summary_part", _NOTHING
            else:
                item["content"] = []
                event, part, more = "response.reasoning_text.delta", "response.content_part", _NOTHING
        self._items.append(item)
        place = {"item_id": item["id"], "output_index": index, self._index_name: 0}
        head = orjson.dumps({"type": event, **place, **more})
        self._delta = b"event: " + event.encode() + b"\ndata: " + head[:-1] + b',"sequence_number":'
        return self._event("response.output_item.added", output_index=index, item=item) + self._event(
            f"{part}.added", **place, part=self._part("")
        )

    @property
    def _index_name(self) -> str:
        return "summary_index" if self._open == "reasoning" and self._is_summary else "content_index"

    def _part(self, text: str) -> dict[str, Any]:
        if self._open == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "summary_text" if self._is_summary else "reasoning_text", "text": text}

    def _close(self, status: str = "completed") -> bytes:
        """End the open item."""
        if self._open is None:
            return b""
        item, text, index = self._items[-1], "".join(self._text), len(self._items) - 1
        place = {"item_id": item["id"], "output_index": index, self._index_name: 0}
        part = self._part(text)
        item["status"] = status
        if self._open == "message":
            item["content"] = [part]
            done, part_done, more = "response.output_text.done", "response.content_part.done", _NO_LOG_PROBS
        elif self._is_summary:
            item["summary"] = [part]
            done, part_done, more = (
                "response.reasoning_summary_text.done",
                "response.reasoning_summary_part.done",
                _NOTHING,
            )
        else:
            item["content"] = [part]
            done, part_done, more = "response.reasoning_text.done", "response.content_part.done", _NOTHING
        self._open = None
        return (
            self._event(done, **place, text=text, **more)
            + self._event(part_done, **place, part=part)
            + self._event("response.output_item.done", output_index=index, item=item)
        )

    def _call(self, call: ToolCall) -> bytes:
        out, index, arguments = self._close(), len(self._items), arguments_text(call)
        item = {
            "id": f"fc_{self._key}_{index}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": call.function.name,
            "arguments": "",
        }
        place = {"item_id": item["id"], "output_index": index}
        out += self._event("response.output_item.added", output_index=index, item=item)
        out += self._event("response.function_call_arguments.delta", **place, delta=arguments)
        out += self._event(
            "response.function_call_arguments.done", **place, name=call.function.name, arguments=arguments
        )
        item |= {"status": "completed", "arguments": arguments}
        self._items.append(item)
        return out + self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _object(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        asked, raw = self._asked, self._asked.body.raw
        chat, sampling = asked.body.chat, asked.sampling
        tools, _ = responses_request.tools_of(raw.get("tools") or ())
        return {
            "id": asked.reply_id,
            "object": "response",
            "created_at": asked.created,
            "completed_at": asked.created if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": asked.model,
            "output": self._items,
            "usage": None if usage is None else _usage(usage),
            "previous_response_id": None,
            "tools": [_tool(tool["function"]) for tool in tools],
            "tool_choice": raw.get("tool_choice") or "auto",
            "parallel_tool_calls": chat.parallel_tool_calls is not False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "top_logprobs": chat.top_logprobs or 0,
            "reasoning": {"effort": None, "summary": None, **(raw.get("reasoning") or {})},
            "text": {"format": {"type": "text"}, **_given(raw.get("text"))},
            "truncation": "disabled",
            "service_tier": "default",
            "store": False,
            "background": False,
            "metadata": raw.get("metadata") or {},
            **{name: raw.get(name) for name in _ECHOED},
        }


def _status(outcome: Outcome) -> str:
    return "incomplete" if outcome.finish_reason == "length" else "completed"


def _given(fields: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (fields or {}).items() if value is not None}


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    nothing = {"description": None, "parameters": None, "strict": None}
    return {"type": "function", **nothing, **function}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
