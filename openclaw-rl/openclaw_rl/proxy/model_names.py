"""Names by which clients ask for the policy, and the cards of `/v1/models`.

A card has the fields of OpenAI's form and of Anthropic's, and so has the list: a client reads those that it knows.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from openclaw_rl.errors import RequestError

_VERSION = re.compile(r"(?:@(?P<at>.*)|-v(?P<dash>\d+))\Z", re.DOTALL)
_NUMBER = re.compile(r"v?(\d{1,9})\Z")


class ModelNames:
    """Names by which a client may ask for the policy.

    Our own names are the served name and `policy`. Alone, each means the current version; with a version behind it
    (`policy@v7`, `policy-v7`), that version or a 404. Any other name is an alias: a client with a fixed model name
    still gets the policy, with one warning in the log. `server.unknown_model = "refuse"` makes an alias a 404.
    """

    def __init__(
        self,
        served: str,
        unknown: Literal["serve", "refuse"],
        current: Callable[[], int | None],
        warn: Callable[[str], None],
    ) -> None:
        """current: None where users have policies of their own; the reply then checks the version. warn: called with
        each alias that is served.
        """
        self._own, self._unknown, self._current, self._warn = (served, "policy"), unknown, current, warn

    def wanted_version(self, name: str | None) -> int | None:
        """Return the version that must answer; None means the current one.

        Raises RequestError (404, `model_not_found`).
        """
        if not name or name in self._own:
            return None
        for own in self._own:
            if name.startswith(own) and (found := _VERSION.match(name, len(own))):
                number = _NUMBER.match(found["dash"] or found["at"])
                if number is None or self._current() not in (None, int(number[1])):
                    raise self.not_found(name)
                return int(number[1])
        if self._unknown == "refuse":
            raise self.not_found(name)
        self._warn(name)
        return None

    def not_found(self, name: str) -> RequestError:
        current = self._current()
        names = self._own if current is None else (*self._own, f"policy@v{current}")
        served = ", ".join(dict.fromkeys(names))
        return RequestError(
            f"The model {name[:100]!r} does not exist. Served here: {served}.",
            status=404,
            code="model_not_found",
            param="model",
        )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the served model that a client's configuration needs."""

    context_length: int
    max_output_tokens: int
    """Longest reply to a request that names no limit."""
    supports_tools: bool
    """The template can show tools to the model."""
    supports_reasoning: bool
    """The model's replies may begin with a thought."""


def model_list(name: str, created: int, facts: ModelFacts | None = None) -> bytes:
    """Return the body of `/v1/models`. facts: None while they are not known."""
    card = _card(name, name, created, facts)
    pages = {"has_more": False, "first_id": name, "last_id": name}
    return orjson.dumps({"object": "list", "data": [card], **pages})


def model_card(asked: str, name: str, created: int, facts: ModelFacts) -> bytes:
    """Return the body of `/v1/models/{asked}`: the served model under the name that the client asked for."""
    return orjson.dumps(_card(asked, name, created, facts))


def _card(asked: str, name: str, created: int, facts: ModelFacts | None) -> dict[str, Any]:
    at = datetime.fromtimestamp(created, UTC)
    card = {
        "id": asked,
        "object": "model",
        "created": created,
        "owned_by": "openclaw-rl",
        "root": name,
        "type": "model",
        "display_name": name,
        "created_at": f"{at:%Y-%m-%dT%H:%M:%SZ}",
        "lifecycle": "active",
    }
    if facts is not None:
        lengths = ("max_model_len", "context_length", "max_input_tokens", "max_tokens")
        card |= dict.fromkeys(lengths, facts.context_length)
        card["max_output_tokens"] = facts.max_output_tokens
        card |= {"supports_tools": facts.supports_tools, "supports_reasoning": facts.supports_reasoning}
    return card
