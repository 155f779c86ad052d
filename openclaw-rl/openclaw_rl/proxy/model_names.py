"""Which model a client names, and whether we serve it.

Ours are the served name and `policy`, each alone (whatever version is current) or with one version behind it
(`policy@v7`, `policy-v7`): that version, or a 404. Any other name is an alias: a client that cannot be told our name
still gets the policy, with one warning in the log, unless `server.unknown_model` says to refuse it.
"""

import re
from collections.abc import Callable
from typing import Literal

from openclaw_rl.errors import RequestError

_VERSION = re.compile(r"(?:@(?P<at>.*)|-v(?P<dash>\d+))\Z", re.DOTALL)
_NUMBER = re.compile(r"v?(\d{1,9})\Z")


class ModelNames:
    def __init__(
        self, served: str, unknown: Literal["serve", "refuse"], current: Callable[[], int], warn: Callable[[str], None]
    ) -> None:
        """warn: told each foreign name that is served; it says so once."""
        self._own, self._unknown, self._current, self._warn = (served, "policy"), unknown, current, warn

    def wanted_version(self, name: str | None) -> int | None:
        """The version that must answer; None: whichever is current. Raises RequestError (404, `model_not_found`)."""
        if not name or name in self._own:
            return None
        for own in self._own:
            if name.startswith(own) and (found := _VERSION.match(name, len(own))):
                number = _NUMBER.match(found["dash"] or found["at"])
                if number is None or int(number[1]) != self._current():
                    raise self.not_found(name)
                return int(number[1])
        if self._unknown == "refuse":
            raise self.not_found(name)
        self._warn(name)
        return None

    def not_found(self, name: str) -> RequestError:
        served = ", ".join(dict.fromkeys((*self._own, f"policy@v{self._current()}")))
        return RequestError(
            f"The model {name[:100]!r} does not exist. Served here: {served}.",
            status=404,
            code="model_not_found",
            param="model",
        )
