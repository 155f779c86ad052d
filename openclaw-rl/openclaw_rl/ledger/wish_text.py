"""Words of wishes: their comparison without a model.

Two wishes are equal if their words are, whatever case, punctuation and polite words around them. Two wishes contradict
each other if they name opposite ends of one axis, such as length. The table of axes is small on purpose: a pair that it
does not know stands side by side, and a judge model may still find the contradiction.

Limits: English only. A wish that holds in one place ("longer, but only in e-mails") and one that holds in another are
opposites here.
"""

import re

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?")
_POLITE = frozenset(
    ("please", "pls", "thanks", "thank", "you", "ok", "okay", "hi", "hey", "hello", "um", "hmm", "well", "just", "so")
)
"""Words that say nothing about the wish, at its two ends."""

_NOT = r"(?:no|without|avoid|drop|skip|stop(?: using)?|don['’]?t (?:use|write|give|make)|do not (?:use|write|make)|not)"
_AXES: dict[str, tuple[str, str]] = {
    "length": (
        r"short(?:er)?|brief(?:er|ly)?|concise(?:ly)?|(?:less|fewer) (?:text|words)|(?:one|a single|two) sentences?",
        r"(?<!no )longer|more detail(?:s|ed)?|in detail|elaborate|expand",
    ),
    "lists": (
        rf"{_NOT} (?:\w+ ){{0,3}}(?:lists?|bullets?|bullet points?|numbered)|in prose|as prose|flowing text",
        r"(?:use|as|with|give me|make) (?:a |an )?(?:\w+ )?(?:lists?|bullets?|bullet points?)",
    ),
    "formality": (
        r"more formal(?:ly)?|formal tone|be formal|too (?:casual|informal)|less casual",
        r"less formal(?:ly)?|(?:more )?casual(?:ly)?|informal(?:ly)?|too formal|too stiff|relaxed tone",
    ),
    "emoji": (rf"{_NOT} (?:\w+ ){{0,3}}emojis?", r"(?:use|add|more|with) (?:some )?emojis?"),
    "markdown": (
        rf"{_NOT} (?:\w+ )?markdown|plain text|{_NOT} (?:bold|headings?|headers?)",
        r"(?:use|in|with) markdown|use (?:bold|headings?)",
    ),
}
_ENDS = {name: tuple(re.compile(rf"\b(?:{pattern})\b") for pattern in patterns) for name, patterns in _AXES.items()}
_TOO = re.compile(r"\b(?:too|so|less|not so|not as) (long|short|detailed|brief)\b")
_TOO_ENDS = {"long": 0, "detailed": 0, "short": 1, "brief": 1}


def key_of(text: str) -> str:
    """Return the words by which equal wishes are recognized; empty for a text without words."""
    words = [word.replace("’", "'") for word in _WORD.findall(text.casefold())]
    start, end = 0, len(words)
    while start < end and words[start] in _POLITE:
        start += 1
    while end > start and words[end - 1] in _POLITE:
        end -= 1
    return " ".join(words[start:end] or words)


def opposed(one: str, other: str) -> str | None:
    """Return the axis on which two wishes name opposite ends; None if no axis has both."""
    ends, others = _named(one), _named(other)
    return next((axis for axis, end in ends.items() if others.get(axis, end) != end), None)


def _named(text: str) -> dict[str, int]:
    """Return the end that the text names on each axis; an axis of which it names both ends is left out."""
    said = " ".join(text.casefold().split())
    found: dict[str, set[int]] = {}
    for match in _TOO.finditer(said):
        found.setdefault("length", set()).add(_TOO_ENDS[match[1]])
    rest = _TOO.sub(" ", said)
    for axis, patterns in _ENDS.items():
        # "Don't give me a list" holds "give me a list": what the first end has named is no word of the second.
        left = patterns[0].sub(" ", rest)
        for end, (pattern, text) in enumerate(zip(patterns, (rest, left), strict=True)):
            if pattern.search(text):
                found.setdefault(axis, set()).add(end)
    return {axis: next(iter(ends)) for axis, ends in found.items() if len(ends) == 1}
