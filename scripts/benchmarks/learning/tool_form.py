"""Questions that ask for a tool: their prompts, and the form of a call.

A template that renders tools shows the tool and an earlier call in its own form. For another template, as the bundled
model's, the system prompt describes the tool, and calls are JSON within `<tool_call>` tags. The earlier call lets even
a small base keep the form.
"""

import json
import re
from typing import Any

from benchmarks.learning.scopes import Tool
from benchmarks.learning.subject import Subject
from openclaw_rl.types import Ids

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_SYSTEM = "You are a helpful AI assistant."
_TOLD = """{system}

You may call this function to assist the user:
<tools>
{tool}
</tools>

For a call, answer with a JSON object with the function's name and its arguments within tags:
<tool_call>
{{"name": <function name>, "arguments": <arguments as JSON>}}
</tool_call>"""


class ToolForm:
    """One tool in the form of a model's template."""

    def __init__(self, subject: Subject, tool: Tool) -> None:
        self._subject, self._tool = subject, tool
        self._is_rendered = "tools" in (subject.tokenizer.chat_template or "")

    def prompt(self, value: str, *, system: str | None) -> Ids:
        """Return the question about this value, behind an earlier question that was answered by a call."""
        return self._subject.encode(self._text(value, system=system, is_called=False))

    def call(self, value: str, *, system: str | None) -> Ids:
        """Return the reply to `prompt` that is a well-formed call, without an end token."""
        if not self._is_rendered:
            return self._subject.encode(self._written(value))
        asked = self._text(value, system=system, is_called=False)
        whole = self._text(value, system=system, is_called=True)
        end = self._subject.tokenizer.eos_token
        return self._subject.encode(whole.removeprefix(asked).partition(end)[0].rstrip())

    def is_call(self, text: str) -> bool:
        """Return True if the text is a call of the tool, with its argument."""
        found = _TAGGED.search(text)
        try:
            call = json.loads(found[1] if found else text)
            arguments = call.get("arguments", call.get("parameters"))
            return bool(call["name"] == self._tool.name and list(arguments) == [self._tool.argument])
        except (ValueError, TypeError, KeyError, AttributeError):
            return False

    def _text(self, value: str, *, system: str | None, is_called: bool) -> str:
        chat = [] if system is None else [{"role": "system", "content": system}]
        if not self._is_rendered:
            told = _TOLD.format(system=system or _SYSTEM, tool=json.dumps(self._described()))
            chat = [{"role": "system", "content": told}]
        chat += [self._asked(self._tool.values[0]), self._called(self._tool.values[0]), self._asked(value)]
        chat += [self._called(value)] if is_called else []
        more: dict[str, Any] = {"tools": [self._described()]} if self._is_rendered else {}
        return str(
            self._subject.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=not is_called, **more
            )
        )

    def _asked(self, value: str) -> dict[str, Any]:
        return {"role": "user", "content": self._tool.question.format(value)}

    def _called(self, value: str) -> dict[str, Any]:
        if not self._is_rendered:
            return {"role": "assistant", "content": self._written(value)}
        function = {"name": self._tool.name, "arguments": {self._tool.argument: value}}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}

    def _written(self, value: str) -> str:
        call = json.dumps({"name": self._tool.name, "arguments": {self._tool.argument: value}})
        return f"<tool_call>\n{call}\n</tool_call>"

    def _described(self) -> dict[str, Any]:
        argument = {self._tool.argument: {"type": "string"}}
        parameters = {"type": "object", "properties": argument, "required": [self._tool.argument]}
        about = {"name": self._tool.name, "description": self._tool.description, "parameters": parameters}
        return {"type": "function", "function": about}
