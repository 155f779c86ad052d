"""Reactions of a user (👍, 👎 …) that a chat surface reports in the internal context of OpenClaw's next request."""

import json
import re
from collections.abc import Sequence

from openclaw_rl.messages import Message
from openclaw_rl.sessions.openclaw import CONTEXT_BEGIN

_REACTION = re.compile(r"System: \[[^\]]*\] [\w .-]+? reaction (added|removed): (.+?) by ")
_TAKEN_BACK = "removed "


def reactions(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the reactions that the internal context reports, as emoji; a reaction taken back is `removed 👍`.

    The context quotes every piece of data as one JSON string. Only a string that begins as a system event is read, so a
    chat excerpt in another string cannot look like a reaction.
    """
    found: list[str] = []
    for message in messages:
        if not (message.role == "user" and (text := message.text()).startswith(CONTEXT_BEGIN)):
            continue
        for line in text.splitlines():
            if not line.startswith('"System: ['):
                continue
            try:
                events = str(json.loads(line)).splitlines()
            except ValueError:
                continue
            for event in events:
                if not (reaction := _REACTION.match(event)):
                    continue
                if reaction[1] == "added":
                    found.append(reaction[2])
                elif reaction[2] in found:
                    found.remove(reaction[2])
                else:
                    found.append(f"{_TAKEN_BACK}{reaction[2]}")
    return tuple(found)


def is_taken_back(reaction: str) -> bool:
    """Return True for a reaction of `reactions` that the user removed."""
    return reaction.startswith(_TAKEN_BACK)
