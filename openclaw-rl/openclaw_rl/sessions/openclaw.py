"""OpenClaw's text marks: the text that its client puts around, between and after a user's own words.

The marks were recorded with openclaw 2026.9.6. An unmodified client names no kind in its headers, so requests are
classified by text. Every mark is anchored at the client's place for it: the start of a message behind its time stamp,
its last line, or the shape of the whole request. A user who quotes a mark inside a message is therefore no background
traffic. No function edits a message; `strip_wrapping` returns a copy of its text.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from openclaw_rl.messages import Message

_AGENT_SYSTEM = "<!-- openclaw:attempt:STABLE -->"
_TITLE_SYSTEM = "Generate a concise session title"
_COMPACTION_SYSTEM = "You are a context summarization assistant."
CONTEXT_BEGIN = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
_CONTEXT_END = "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
_SUMMARY = "The conversation history before this point was compacted into the following summary:"
_EMPTY_REPLY = "The previous attempt did not produce a user-visible answer. Continue"
_QUEUED = "[Queued user message from a previous active turn; preserved as context only."
_QUEUED_TAIL = "\n\nContinue the current task from the existing transcript"
_SLUG = "Based on this conversation, generate a short 1-2 word filename slug"
_SUBAGENT = "[Subagent Context] You are running as a subagent"
_TASK_DONE = "A background task completed."
_INTER_SESSION_START = "[Inter-session message] "
_POLL = "[OpenClaw heartbeat poll]"
_STAMPED_STARTS = (_SUBAGENT, _TASK_DONE, _INTER_SESSION_START, _POLL)

_STAMP = re.compile(
    r"^\[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) \d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d)? [^\]\n]{1,40}\] ?", re.MULTILINE
)
_RUNTIME = re.compile(r"^Runtime: agent=(\S+) \| session=(\S+) \|(?: sessionId=(\S+) \|)?.*$", re.MULTILINE)
_CONTEXT_BLOCK = re.compile(r"\A[A-Z][\w ()]{2,60}: ⟦openclaw:ctx⟧\n```json\n.*?\n```\s*", re.DOTALL)
_TRAILING_CONTEXT = re.compile(
    rf"^{CONTEXT_BEGIN}(?:(?!{CONTEXT_BEGIN}).)*{_CONTEXT_END}\s*\Z", re.MULTILINE | re.DOTALL
)
_CRON = re.compile(r"\A\[cron:\S+ [^\]\n]*\] ")
_CLOCK_TAIL = re.compile(r"\nCurrent time: .+\nReference UTC: \d{4}-\d\d-\d\d \d\d:\d\d UTC\s*\Z")
_INTER_SESSION = re.compile(r"^\[Inter-session message\] .*\bisUser=false\b", re.MULTILINE)
_INTERNAL_SESSION = re.compile(r"\Aagent:[^:]+:(subagent|cron|internal-session-effects|helper):")

_UNSTAMPED_STARTS = {
    "Follow the heartbeat monitor scratch context when provided.": "heartbeat",
    "Pre-compaction memory flush.": "memory_flush",
}
_INTERNAL_SESSION_KINDS = {
    "subagent": "subagent",
    "cron": "cron",
    "internal-session-effects": "memory_flush",
    "helper": "slug",
}
_MAX_MERGED = 16
"""Most merged messages that are split out of one message; it bounds the time that a hostile message can cost."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The `Runtime:` line, which the client adds to the first user message of every request, outside the history."""

    agent: str
    session_key: str
    session_id: str | None


def runtime(messages: Sequence[Message]) -> Runtime | None:
    """Return the request's `Runtime:` line, or None."""
    # It is the last such line of the first user message; a line before it is a quote.
    first = next((message for message in messages if message.role == "user"), None)
    text = "" if first is None else first.text()
    if "Runtime: agent=" not in text:
        return None
    lines = _RUNTIME.findall(text)
    return Runtime(agent=lines[-1][0], session_key=lines[-1][1], session_id=lines[-1][2] or None) if lines else None


def is_ephemeral(message: Message) -> bool:
    """Return True for a message that the client drops from its history: internal context, or the nudge after an empty
    reply."""
    if message.role != "user":
        return False
    text = message.text()
    if text.startswith(CONTEXT_BEGIN):
        return text.rstrip().endswith(_CONTEXT_END)
    return _begins(text, _EMPTY_REPLY)


def is_summary(message: Message) -> bool:
    """Return True for the message that replaced the start of the history in a compaction."""
    return message.role == "user" and message.text().startswith(_SUMMARY)


def is_recovery(message: Message) -> bool:
    """Return True for a user message that the client rewrote because its first attempt failed: a retry for the user."""
    return message.role == "user" and _begins(message.text(), _QUEUED)


def is_background(message: Message) -> bool:
    """Return True for a user message that no user wrote: heartbeat, memory flush, cron, sub-agent task or result."""
    return message.role == "user" and _background_kind(message.text()) is not None


def is_agent_request(messages: Sequence[Message]) -> bool:
    """Return True for a request of OpenClaw's agent, by its system prompt."""
    return (
        bool(messages) and messages[0].role in ("system", "developer") and messages[0].text().startswith(_AGENT_SYSTEM)
    )


def background_request(messages: Sequence[Message], *, tools: bool) -> str | None:
    """Return the kind of a background request (`title`, `heartbeat` …); None for a chat, and for other clients."""
    if not messages or messages[0].role not in ("system", "developer"):
        return None
    system = messages[0].text()
    if not tools and len(messages) == 2:
        if system.startswith(_TITLE_SYSTEM):
            return "title"
        if system.startswith(_COMPACTION_SYSTEM) and messages[1].text().startswith("<conversation>"):
            return "compaction"
    if not is_agent_request(messages):
        return None
    line = runtime(messages)
    if line is not None and (internal := _INTERNAL_SESSION.match(line.session_key)):
        return _INTERNAL_SESSION_KINDS[internal[1]]
    users = [message for message in messages if message.role == "user" and not is_ephemeral(message)]
    if not users:
        return None
    text = users[-1].text()
    if kind := _background_kind(text):
        return kind
    if not tools and _begins(text, _SLUG):
        return "slug"
    # Users' messages have a time stamp, so a message without one among stamped messages is the client's own. With time
    # stamps switched off, no message counts as the client's own.
    is_bare = not _STAMP.match(text) and not is_summary(users[-1])
    return "event" if is_bare and any(_STAMP.match(user.text()) for user in users[:-1]) else None


def strip_wrapping(text: str) -> str:
    """Return a user's own words, without the client's wrapping.

    The wrapping is the time stamp, the sender block, the `Runtime:` line, trailing internal context and the text of a
    retry. It changes between requests: the `Runtime:` line follows the current channel, a retry gets a new time stamp.
    The words stay the same, so pairing compares them.
    """
    if _CONTEXT_END in text:
        text = _TRAILING_CONTEXT.sub("", text)
    if "Runtime: agent=" in text:
        text = _RUNTIME.sub("", text)
    if _STAMP.match(text):
        text = _STAMP.sub("", text)  # of every line: each merged message has its own
    while block := _CONTEXT_BLOCK.match(text):
        text = text[block.end() :]
    if text.startswith(_QUEUED):
        text = text.partition("\n")[2]
        if (tail := text.rfind(_QUEUED_TAIL)) >= 0:
            text = text[:tail]
    return text.strip()


def unstamped(text: str) -> str:
    """Return a reply as the client keeps it: without a time stamp that the model repeated from the user's message."""
    while stamp := _STAMP.match(text):
        text = text[stamp.end() :]
    return text.strip()


def unmerged(message: Message) -> Iterator[str]:
    """Yield the texts that the last messages of a merged user message have alone, longest first."""
    if message.role != "user":
        return
    if isinstance(message.content, list):
        texts = [part.text or "" for part in message.content if part.type == "text"]
        suffixes = ["\n".join(texts[k:]) for k in range(1, len(texts))]
    else:
        text = message.text()
        starts = [stamp.start() for stamp in _STAMP.finditer(text)] if _STAMP.match(text) else []
        suffixes = [text[start:] for start in starts[1:]]
    for suffix in suffixes[-_MAX_MERGED:]:
        if words := strip_wrapping(suffix):
            yield words


def _begins(text: str, mark: str) -> bool:
    """Return True if the text begins with the mark, behind its time stamp if it has one."""
    stamp = _STAMP.match(text)
    return text.startswith(mark, stamp.end() if stamp else 0)


def _background_kind(text: str) -> str | None:
    stamp = _STAMP.match(text)
    if stamp is None:
        for start, kind in _UNSTAMPED_STARTS.items():
            if text.startswith(start):
                return kind
        if _CRON.match(text):
            return "cron"
        return "event" if "\nReference UTC: " in text and _CLOCK_TAIL.search(_RUNTIME.sub("", text)) else None
    if not text.startswith(_STAMPED_STARTS, stamp.end()):
        return None
    body = text[stamp.end() :]
    if body.rstrip() == _POLL:
        return "heartbeat"
    is_task = body.startswith(_SUBAGENT) and "\n[Subagent Task]\n" in body
    is_result = body.startswith((_TASK_DONE, _INTER_SESSION_START)) and _INTER_SESSION.search(body)
    return "subagent" if is_task or is_result else None
