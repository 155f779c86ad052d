"""What the ledger writes in place of secrets: the nouns on their way to disk, with marks where `redaction` found one.

Token ids are text in another spelling, so those of a text with a mark are not written: such a turn is recorded, counted
and paired, its story told, but it can never be trained on (`redacted`). The two sides are looked at apart. A secret in
a prompt costs the prompt's ids (and a later turn of that conversation has it in its prompt too), one in a reply the
reply's; one in the next state costs nothing, the judge and the methods read the mark.

Runs on the writer's thread. Texts that were found clean are remembered, by hash, so that the history of a conversation
is read once.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson

from openclaw_rl.messages import Message
from openclaw_rl.redaction import Redactor
from openclaw_rl.settings import RedactionSettings
from openclaw_rl.types import DropReason, Feedback, NextState, Request, Sample, Turn, Verdict


class Masks:
    def __init__(self, settings: RedactionSettings, *, remembered: int = 50_000) -> None:
        """remembered: texts found clean."""
        self._remembered = remembered
        self._redactor = Redactor(secrets=settings.secrets, pii=settings.pii)
        self._clean: set[int] = set()

    def request(self, request: Request) -> Request:
        """The same object when nothing is to be hidden."""
        if not self._redactor.is_on:
            return request
        messages = tuple(map(self._message, request.messages))
        tools, kwargs = self._json(request.tools_json), self._json(request.template_kwargs_json)
        stop = tuple(map(self._text, request.sampling.stop))
        task, episode = self._optional(request.task), self._optional(request.episode)
        said = (request.messages, request.tools_json, request.template_kwargs_json)
        if (messages, tools, kwargs, stop, task, episode) == (
            *said,
            request.sampling.stop,
            request.task,
            request.episode,
        ):
            return request
        return replace(
            request,
            messages=messages,
            tools_json=tools,
            template_kwargs_json=kwargs,
            sampling=replace(request.sampling, stop=stop),
            task=task,
            episode=episode,
            prompt_ids=() if (messages, tools, kwargs) != said else request.prompt_ids,
        )

    def turn(self, turn: Turn) -> Turn:
        reply = self._message(turn.reply)
        if reply == turn.reply:
            return turn
        return replace(
            turn,
            reply=reply,
            response_ids=(),
            rollout_log_probs=(),
            loss_mask=(),
            versions=(),
            drop=DropReason.REDACTED,
        )

    def next_state(self, next_state: NextState) -> NextState:
        return replace(next_state, messages=tuple(map(self._message, next_state.messages)))

    def verdict(self, verdict: Verdict | None) -> Verdict | None:
        return None if verdict is None else replace(verdict, rationale=self._text(verdict.rationale))

    def sample(self, sample: Sample) -> Sample:
        return replace(sample, extra_json=self._json(sample.extra_json))

    def feedback(self, said: Feedback) -> Feedback:
        return replace(said, comment=self._optional(said.comment), demonstration=self._optional(said.demonstration))

    def text(self, text: str) -> str:
        return self._text(text)

    def _message(self, message: Message) -> Message:
        if isinstance(message.content, str) and message.model_fields_set <= {"role", "content"}:
            content = self._text(message.content)
            return message if content is message.content else message.model_copy(update={"content": content})
        fields = message.model_dump(exclude_unset=True)
        masked = _walk(fields, self._text)
        return message if masked == fields else Message.model_validate(masked)

    def _json(self, text: str | None) -> str | None:
        if text is None or self._text(text) is text:
            return text
        return orjson.dumps(_walk(orjson.loads(text), self._text)).decode()

    def _optional(self, text: str | None) -> str | None:
        return None if text is None else self._text(text)

    def _text(self, text: str) -> str:
        key = hash(text)
        if key in self._clean:
            return text
        masked = self._redactor.mask(text)
        if masked is text:
            if len(self._clean) >= self._remembered:
                self._clean.clear()
            self._clean.add(key)
        return masked


def _walk(value: Any, mask: Callable[[str], str]) -> Any:
    """JSON values with every string masked. A role stays what it is."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, dict):
        # `"password": "…"`: the name of a value says what it is
        return {key: _named(key, item, mask) for key, item in value.items()}
    if isinstance(value, list):
        return [_walk(item, mask) for item in value]
    return value


def _named(key: str, value: Any, mask: Callable[[str], str]) -> Any:
    if not isinstance(value, str):
        return _walk(value, mask)
    head = f"{key}: "
    masked = mask(head + value)
    return masked[len(head) :] if masked.startswith(head) else mask(value)
