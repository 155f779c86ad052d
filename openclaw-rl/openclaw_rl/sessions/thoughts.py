"""Thoughts in a reply's text: clients store a reasoning model's reply as one text and send the thoughts back in it.

`without_thoughts` removes what stands in think marks before the answer. Marks inside the answer, and marks that never
close, are the answer's own words. `without_quote` removes a quoted block before the answer; a model writes such blocks
too, so pairing tries the text with the block first.
"""

import re

from openclaw_rl.messages import Message

_MARKS = (
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<ifm|think>", "</ifm|think>"),
    ("<ifm|think>", "</ifm|think_fast>"),
    ("<ifm|think>", "</ifm|think_faster>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|channel>", "<channel|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("to=self<|message|>", "<|eom|>"),
    ("<|content_thinking|>", "<|end_message|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    (":::thinking\n", "\n:::"),
)
"""Marks of the reasoning parsers (but tags), and of clients. A blank before a mark is no part of it here."""
_TAG = re.compile(r"<((?:\w+:)?(?:think|thinking|thoughts?|reasoning|reflection))(?:\s[^<>]*)?>", re.IGNORECASE)
_DETAILS = re.compile(r"<details(\s[^<>]{0,500})?>\s*(<summary>[^<\n]*</summary>)?", re.IGNORECASE)
_ABOUT_THOUGHTS = re.compile(r"think|thought|reason", re.IGNORECASE)
_FENCE = re.compile(r"(`{3,}|~{3,})(?:think|thinking|thoughts?|reasoning)[ \t]*\n", re.IGNORECASE)
_LONE_END = re.compile(r"(?:</(?:\w+:)?think(?:ing)?>|\[/THINK\]|◁/think▷)[ \t]*(?:\n|\Z)", re.IGNORECASE)
"""The end of a thought whose start stood in the prompt."""
_ANSWER_HEAD = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>")
_QUOTE = re.compile(r"(?:[^\n>][^\n]{0,80}\n+)?((?:[ ]{0,3}>[^\n]*(?:\n|\Z))+)\s*")
_MOST_BLOCKS = 16
"""Most thoughts before one answer; a client that joins several calls writes one for each."""


def without_thoughts(text: str) -> str:
    """Return a reply without the thoughts before its answer; a reply of thoughts alone is empty."""
    for _ in range(_MOST_BLOCKS):
        end = _end_of_thought(text)
        if end is None:
            return text
        text = text[end:].lstrip()
        if head := _ANSWER_HEAD.match(text):
            text = text[head.end() :].lstrip()
    return text


def has_answer(reply: Message) -> bool:
    """Return False for a reply that ended inside its thought, or before any text: its user got neither text nor
    call."""
    if reply.tool_calls:
        return True
    text = without_thoughts(reply.text().strip())
    return bool(text) and not is_open_thought(text)


def is_open_thought(text: str) -> bool:
    """Return True for a text that begins with a thought; of a text without its thoughts, one that never ended."""
    return bool(_TAG.match(text)) or text.startswith(tuple(start for start, _ in _MARKS))


def without_quote(text: str) -> str | None:
    """Return the reply behind a quoted block, which may have one line about thinking above it; None without one."""
    found = _QUOTE.match(text)
    if found is None or found.end() == len(text):
        return None
    head = text[: found.start(1)]
    return text[found.end() :] if not head or _ABOUT_THOUGHTS.search(head) else None


def _end_of_thought(text: str) -> int | None:
    """Return the end of the thought that the text begins with, or None."""
    if text[:1] in ("<", "[", "◁", ":", "`", "~", "t"):
        if tag := _TAG.match(text):
            return _behind(text, f"</{tag[1]}>", tag.end())
        if (details := _DETAILS.match(text)) and _ABOUT_THOUGHTS.search(f"{details[1]} {details[2]}"):
            return _behind(text, "</details>", details.end())
        if fence := _FENCE.match(text):
            return _behind(text, f"\n{fence[1]}", fence.end() - 1)
        ends = [_behind(text, end, len(start)) for start, end in _MARKS if text.startswith(start)]
        if found := [end for end in ends if end is not None]:
            return min(found)
    lone = _LONE_END.search(text) if "hink" in text or "HINK" in text else None
    return None if lone is None or _TAG.search(text, 0, lone.start()) else lone.end()


def _behind(text: str, mark: str, start: int) -> int | None:
    found = re.compile(re.escape(mark), re.IGNORECASE).search(text, start)
    return None if found is None else found.end()
