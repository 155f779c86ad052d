"""Redaction: marks such as `[redacted:api_key]` replace secrets and personal data before texts are written to disk.

Served texts are never changed. `Redactor` finds secrets and personal data by their form (`secret_forms`). Its time is
linear in the text; most texts cost a few searches for fixed strings. It never masks a mark again.

`NounRedactor` masks the ledger's nouns. Token ids reveal the text, so the ids of a text with a mark are not written.
Such a turn is recorded, counted and paired, but never trained on (`redacted`). Prompt and reply are masked separately:
a secret in the prompt costs the prompt's ids, also in later turns of that conversation; a secret in the reply costs the
reply's ids. A secret in the next state costs no ids: the judge and the methods read the mark. A secret in a system
prompt or in a tool's description costs every turn of that client, so the redactor counts those requests
(`standing_secrets`). Secrets in pictures have no form: with `redaction.pictures` a mark replaces every picture, and its
turn is never trained on.
"""

import re
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson

from openclaw_rl.ledger.secret_forms import PERSONAL, SECRETS, Kind
from openclaw_rl.messages import Message
from openclaw_rl.settings import RedactionSettings
from openclaw_rl.types import DropReason, Feedback, NextState, Request, Sample, Turn, Verdict
from openclaw_rl.types.pictures import picture_of, pictures_in

_HIDDEN_PICTURE = "[redacted:picture]"
_STANDING_OF = 50
"""Newest requests of which those with a secret in a standing text are counted."""


class Redactor:
    """Search for the chosen kinds of secrets. Stateless: any thread may use it."""

    def __init__(self, *, secrets: bool, pii: bool) -> None:
        self._kinds = (*(SECRETS if secrets else ()), *(PERSONAL if pii else ()))

    @property
    def is_on(self) -> bool:
        return bool(self._kinds)

    def mask(self, text: str) -> str:
        """Return the text with marks; the same object if it has no secret."""
        if len(text) < 8:
            return text
        lower = text.lower()
        for kind in self._kinds:
            if not kind.anchors or any(anchor in lower for anchor in kind.anchors):
                masked = kind.pattern.sub(lambda found, kind=kind: _marked(found, kind), text)  # type: ignore[misc]
                text = text if masked == text else masked
        return text


def _marked(found: re.Match[str], kind: Kind) -> str:
    group: int | str = "x" if "x" in kind.pattern.groupindex else 0
    hidden = found[group]
    if hidden.startswith("[redacted:") or not kind.check(found, hidden):
        return found[0]
    begin, end = found.start(group) - found.start(), found.end(group) - found.start()
    return f"{found[0][:begin]}[redacted:{kind.name}]{found[0][end:]}"


class NounRedactor:
    """Redactor of requests, turns, verdicts, samples and feedback. It runs on the writer's thread."""

    def __init__(self, settings: RedactionSettings, *, remembered: int = 50_000) -> None:
        """remembered: number of clean texts whose hashes are kept."""
        # A clean text is not searched again: every request of a conversation brings its whole history.
        self._remembered = remembered
        self._redactor = Redactor(secrets=settings.secrets, pii=settings.pii)
        self.hides_pictures = settings.pictures
        """No picture is stored."""
        self._clean: set[int] = set()
        self._standing: deque[bool] = deque(maxlen=_STANDING_OF)

    @property
    def standing_secrets(self) -> str | None:
        """The number of new requests whose system prompt or tools hold a secret, in words; None: there are none."""
        flags = tuple(self._standing)  # another thread appends
        if not any(flags):
            return None
        return (
            f"{sum(flags)} of the last {len(flags)} chats have a system prompt or tools with what looks like a secret, "
            "so no turn of theirs is trained on; `turns ID` shows the place"
        )

    def request(self, request: Request) -> Request:
        """Return the request with marks; the same object if it has no secret."""
        if not self._redactor.is_on and not self.hides_pictures:
            return request
        messages = tuple(map(self._message, request.messages))
        tools, kwargs = self._json(request.tools_json), self._json(request.template_kwargs_json)
        stop = tuple(map(self._text, request.sampling.stop))
        task, episode = self._optional(request.task), self._optional(request.episode)
        said = (request.messages, request.tools_json, request.template_kwargs_json)
        self._standing.append(
            tools != request.tools_json
            or any(
                masked is not message
                for masked, message in zip(messages, request.messages, strict=True)
                if message.role in ("system", "developer")
            )
        )
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
            pictures=() if self.hides_pictures else request.pictures,
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
        hint = sample.hint
        if hint is None:
            return sample
        text, detail, own = self._optional(hint.text), self._text(hint.detail), self._json(hint.method_json)
        return replace(sample, hint=replace(hint, text=text, detail=detail, method_json=own))

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
        if self.hides_pictures and pictures_in([message]) and isinstance(message.content, list):
            is_hidden = [picture_of(part) is not None for part in message.content]
            masked["content"] = [
                {"type": "text", "text": _HIDDEN_PICTURE} if hidden else part
                for hidden, part in zip(is_hidden, masked["content"], strict=True)
            ]
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
    """Return a JSON value with every string masked."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, dict):
        # `"password": "…"`: the name of a value shows that it is a secret
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
