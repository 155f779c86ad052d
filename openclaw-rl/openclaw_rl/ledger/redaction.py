"""Redaction: marks such as `[redacted:api_key]` replace secrets and personal data before texts are written to disk.

Served texts are never changed. `Redactor` finds secrets by their form: the prefixes of issuers' keys, private key
blocks, bearer headers, and passwords in URLs. It also finds values with the name of a secret (`password: …`,
`"api_key": "…"`) that look like one. Personal data are e-mail addresses, phone numbers with a country or area code,
card numbers and IBANs with right check digits, and US social security numbers. It finds no secret without a form (a
word that happens to be a password), and no name or address of a person. Its time is linear in the text; most texts cost
a few searches for fixed strings. It never masks a mark again.

`NounRedactor` masks the ledger's nouns. Token ids reveal the text, so the ids of a text with a mark are not written.
Such a turn is recorded, counted and paired, but never trained on (`redacted`). Prompt and reply are masked separately:
a secret in the prompt costs the prompt's ids, also in later turns of that conversation; a secret in the reply costs the
reply's ids. A secret in the next state costs no ids: the judge and the methods read the mark.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import orjson

from openclaw_rl.messages import Message
from openclaw_rl.settings import RedactionSettings
from openclaw_rl.types import DropReason, Feedback, NextState, Request, Sample, Turn, Verdict

_Check = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    pattern: re.Pattern[str]
    """The group `x` is masked, or the whole match without such a group."""
    anchors: tuple[str, ...]
    """Lower-case strings; a text with a match contains at least one. Empty: every text is searched."""
    check: _Check = bool
    """Test of a candidate; False leaves it unmasked."""


def _looks_random(text: str) -> bool:
    """Return True for a text that is neither a word, nor a placeholder, nor code."""
    kinds = sum(any(map(test, text)) for test in (str.islower, str.isupper, str.isdigit, lambda c: not c.isalnum()))
    return len(set(text)) >= 6 and kinds >= 2 and not _PLACEHOLDER.search(text)


def _looks_like_a_value(text: str) -> bool:
    """Return True for a random text that is no name in a program (`config.db.password`)."""
    return _looks_random(text) and not _NAME.fullmatch(text)


def _has_digit(text: str) -> bool:
    return any(map(str.isdigit, text))


def _luhn(text: str) -> bool:
    digits = [int(char) for char in text if char.isdigit()]
    if not 13 <= len(digits) <= 19 or len(set(digits)) == 1:
        return False
    doubled = [digit if i % 2 == 0 else digit * 2 - 9 * (digit > 4) for i, digit in enumerate(reversed(digits))]
    return sum(doubled) % 10 == 0


def _iban(text: str) -> bool:
    plain = re.sub(r"\s", "", text).upper()
    if not 15 <= len(plain) <= 34:
        return False
    return int("".join(str(int(char, 36)) for char in plain[4:] + plain[:4])) % 97 == 1


def _phone(text: str) -> bool:
    return 8 <= sum(map(str.isdigit, text)) <= 15


_PLACEHOLDER = re.compile(
    r"(?i)example|placeholder|changeme|xxxx|your[_-]|\*\*\*|\.\.\.|redacted|<[^>]*>|\$\{|\$\(|\(\)|env"
)
_NAME = re.compile(r"[A-Za-z_]+(?:[.:][A-Za-z_]+)*")
_END = r"(?![A-Za-z0-9_-])"
_TOKENS: dict[str, tuple[str, ...]] = {
    # name of the mark: what issuers' keys look like, each with its fixed beginning
    "api_key": (
        r"sk-[A-Za-z0-9_-]{20,200}",
        r"(?:rk|sk|pk)_(?:live|test)_[A-Za-z0-9]{16,200}",
        r"AIza[A-Za-z0-9_-]{35}",
        r"(?:AKIA|ASIA)[A-Z0-9]{16}",
        r"hf_[A-Za-z0-9]{30,100}",
        r"gsk_[A-Za-z0-9]{40,100}",
        r"r8_[A-Za-z0-9]{30,60}",
        r"SG\.[A-Za-z0-9_-]{16,64}\.[A-Za-z0-9_-]{16,64}",
        r"dop_v1_[a-f0-9]{64}",
        r"key-[a-f0-9]{32}",
        r"npm_[A-Za-z0-9]{36}",
        r"pypi-[A-Za-z0-9_-]{50,250}",
    ),
    "token": (
        r"gh[pousr]_[A-Za-z0-9]{36,255}",
        r"github_pat_[A-Za-z0-9_]{50,255}",
        r"glpat-[A-Za-z0-9_-]{20,100}",
        r"xox[abeoprs]-[A-Za-z0-9-]{10,250}",
        r"xapp-[A-Za-z0-9-]{10,250}",
        r"eyJ[A-Za-z0-9_-]{10,4000}\.eyJ[A-Za-z0-9_-]{10,8000}\.[A-Za-z0-9_-]{10,4000}",
        r"ya29\.[A-Za-z0-9_-]{20,1000}",
    ),
}
_BEGIN = r"(?<![A-Za-z0-9_-])"
_KEY_BLOCK = r"-----BEGIN (?:[A-Z0-9]{1,20} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
_NAMED = (
    r"(?i:(?<![a-z])(?:[a-z0-9]{0,20}[_-]){0,3}"
    r"(?:api[_-]?key|apikey|secret[_-]?key|client[_-]?secret|access[_-]?token|auth[_-]?token|refresh[_-]?token|"
    r"private[_-]?token|passwd|password|passphrase|secret)"
    r"['\"\\]{0,3}[ \t]{0,3}(?::=|=>|[:=])[ \t]{0,3}['\"\\]{0,3})"
    r"(?P<x>[^\s'\"\\,;(){}\[\]<>]{8,200}+)(?![(\[])"
)


def _kinds(patterns: dict[str, tuple[str, ...]]) -> Iterator[_Kind]:
    for name, forms in patterns.items():
        for form in forms:
            for anchor in _fixed_beginnings(form):
                check = _has_digit if form.startswith("sk-") else bool  # "sk-learn-and-what-comes-behind" is none
                yield _Kind(name, re.compile(_BEGIN + "(?:" + form + ")" + _END), (anchor,), check)


def _fixed_beginnings(form: str) -> tuple[str, ...]:
    """Return the literal beginning of a token's pattern, in lower case."""
    found = re.match(r"[A-Za-z0-9_-]+", form.replace(r"\.", ""))
    return (found[0].lower(),) if found else ("",)


SECRETS: tuple[_Kind, ...] = (
    _Kind(
        "private_key",
        re.compile(_KEY_BLOCK + r"(?P<x>(?:(?!-----)[\s\S]){20,20000})(?:-----END|\Z)"),
        ("private key",),
    ),
    *_kinds(_TOKENS),
    _Kind(
        "bearer", re.compile(r"(?i:\bbearer[ \t]{1,3})(?P<x>[A-Za-z0-9._~+/=-]{16,4000})"), ("bearer",), _looks_random
    ),
    _Kind(
        "basic",
        re.compile(r"(?i:authorization['\"]?[ \t]?[:=][ \t]?['\"]?basic[ \t]{1,3})(?P<x>[A-Za-z0-9+/=]{8,2000})"),
        ("basic",),
    ),
    _Kind(
        "password",
        re.compile(r"(?i:\b[a-z][a-z0-9+.-]{1,20}://)[^\s/:@'\"<>\[\]]{0,100}:(?P<x>[^\s/@'\"<>]{3,200})@"),
        ("://",),
        lambda text: not _PLACEHOLDER.search(text),
    ),
    _Kind("password", re.compile(_NAMED), ("key", "token", "passw", "passphrase", "secret"), _looks_like_a_value),
)
PERSONAL: tuple[_Kind, ...] = (
    _Kind(
        "email", re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w-])"), ("@",)
    ),
    _Kind("card", re.compile(r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w-])"), (), _luhn),
    _Kind("iban", re.compile(r"(?<!\w)[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?!\w)"), (), _iban),
    _Kind("ssn", re.compile(r"(?<![\w-])(?!000|666|9)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![\w-])"), ("-",)),
    _Kind(
        "phone",
        re.compile(
            r"(?<![\w+.-])(?:\+\d(?:[ .()-]{0,2}\d){6,14}|\(\d{3}\) ?\d{3}[ .-]\d{4}|\d{3}[.-]\d{3}[.-]\d{4})(?![\w-])"
        ),
        (),
        _phone,
    ),
)


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


def _marked(found: re.Match[str], kind: _Kind) -> str:
    group: int | str = "x" if "x" in kind.pattern.groupindex else 0
    hidden = found[group]
    if hidden.startswith("[redacted:") or not kind.check(hidden):
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
        self._clean: set[int] = set()

    def request(self, request: Request) -> Request:
        """Return the request with marks; the same object if it has no secret."""
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
