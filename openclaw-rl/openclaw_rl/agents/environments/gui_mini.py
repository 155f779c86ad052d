"""The GUI miniature: a page as a list of named elements, one task in plain words, one action by name.

Three kinds: click a button, type a word into a field, check a box. The prompt has one example of each. The check plays
the action on the page and compares the page's whole state with what it should be. Names and words of the held-out tasks
are in no training task.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from openclaw_rl.agents.environment import Outcome, Split, Task
from openclaw_rl.agents.episode import Episode

KINDS = ("click", "type", "check")
_ROLES = {"click": "button", "type": "field", "check": "box"}
_TRAIN_NAMES = {
    "click": (
        "Save", "Cancel", "Search", "Next", "Back", "Open", "Print", "Delete", "Edit", "Share", "Help", "Login",
        "Reset", "Upload", "Close", "Start", "Copy", "Send",
    ),
    "type": (
        "Name", "Email", "City", "Phone", "Title", "Street", "Company", "Subject", "Country", "Color", "Price", "Note",
    ),
    "check": (
        "News", "Terms", "Remember", "Music", "Sports", "Updates", "Alerts", "Private", "Weekly", "Gift", "Sound",
        "Urgent",
    ),
}  # fmt: skip
_EVAL_NAMES = {
    "click": (
        "Submit", "Refresh", "Download", "Accept", "Continue", "Settings", "Logout", "Undo", "Finish", "Record",
    ),
    "type": ("Address", "Username", "Comment", "Hobby", "School", "Region"),
    "check": ("Offers", "Daily", "Backup", "Games", "Public", "Travel"),
}  # fmt: skip
_TRAIN_WORDS = (
    "apple", "river", "stone", "cloud", "maple", "tiger", "piano", "lemon", "copper", "violet", "anchor", "basket",
    "candle", "meadow", "pepper", "Anna", "Peter", "Maria", "Paris", "London",
)  # fmt: skip
_EVAL_WORDS = (
    "walrus", "guitar", "cherry", "silver", "hammer", "bucket", "lantern", "Laura", "Simon", "Berlin", "Lisbon",
    "orange",
)  # fmt: skip
_SYSTEM = "Do the task on the page. Answer with one action."
_ACTION = re.compile(
    r"(click|type|check)\(\s*(?:'([^'\n]*)'|\"([^\"\n]*)\")(?:\s*,\s*(?:'([^'\n]*)'|\"([^\"\n]*)\"))?\s*\)"
)


@dataclass(frozen=True, slots=True)
class PageTask:
    """A page, and the one state of it that is right."""

    elements: tuple[tuple[str, str], ...]
    """Roles and names, in their order."""
    request: str
    changed: str
    """Name of the element that changes."""
    value: str
    """Of it afterwards: `clicked`, `checked`, or the text."""

    @property
    def text(self) -> str:
        shown = ", ".join(f"{role} {name}" for role, name in self.elements)
        return f"Page: {shown}\nTask: {self.request}"


_EXAMPLES = (
    (((("button", "Stop"), ("field", "Age"), ("box", "Rain")), "click Stop"), "click('Stop')"),
    (((("box", "Snow"), ("field", "Pet"), ("button", "Go")), "check Snow"), "check('Snow')"),
    (((("field", "Food"), ("button", "Run"), ("box", "Wind")), "type in Food: rice"), "type('Food', 'rice')"),
)


class GuiMini:
    """One-step tasks on small pages; a page is a state, without a browser."""

    def __init__(self, train_tasks: int = 512, eval_tasks: int = 200, seed: int = 0) -> None:
        self._counts: dict[str, int] = {"train": train_tasks, "eval": eval_tasks}
        self._seed = seed

    def tasks(self, split: Split) -> Sequence[Task]:
        dice = random.Random(f"{self._seed}:{split}:gui")
        found: dict[str, Task] = {}
        while len(found) < self._counts[split]:
            kind = KINDS[len(found) % len(KINDS)]
            page = make_page(kind, split, dice)
            id_ = f"gui_mini/{split}/{kind}/{_slug(page)}"
            found.setdefault(id_, Task(id_, kind, {"page": page}))
        return list(found.values())

    async def run(self, task: Task, episode: Episode) -> Outcome:
        page = task.data["page"]
        assert isinstance(page, PageTask)
        reply = ""
        async with episode.acting():
            reply = (await episode.ask(messages_of(page))).text
        state = played(page, reply)
        return Outcome(1.0 if state == {page.changed: page.value} else -1.0, {"form": float(state is not None)})


def make_page(kind: str, split: Split, dice: random.Random) -> PageTask:
    """Draw a page of three to five elements and a task of a kind; names of the two splits are disjoint."""
    names = _TRAIN_NAMES if split == "train" else _EVAL_NAMES
    kinds = [*KINDS, *(dice.choice(KINDS) for _ in range(dice.randrange(3)))]
    drawn = {one: dice.sample(names[one], kinds.count(one)) for one in KINDS}
    elements = [(_ROLES[one], name) for one in KINDS for name in drawn[one]]
    dice.shuffle(elements)
    name = drawn[kind][0]
    word = dice.choice(_TRAIN_WORDS if split == "train" else _EVAL_WORDS)
    request, value = {
        "click": (f"click {name}", "clicked"),
        "type": (f"type in {name}: {word}", word),
        "check": (f"check {name}", "checked"),
    }[kind]
    return PageTask(tuple(elements), request, name, value)


def messages_of(page: PageTask) -> list[dict[str, object]]:
    messages: list[dict[str, object]] = [{"role": "system", "content": _SYSTEM}]
    for (elements, request), action in _EXAMPLES:
        shown = PageTask(elements, request, "", "").text
        messages += [{"role": "user", "content": shown}, {"role": "assistant", "content": action}]
    return [*messages, {"role": "user", "content": page.text}]


def played(page: PageTask, reply: str) -> Mapping[str, str] | None:
    """Return what an action changed on the page, or None: the reply is no action."""
    found = _ACTION.fullmatch(reply.strip())
    if found is None:
        return None
    kind, name, text = found[1], found[2] or found[3] or "", found[4] if found[4] is not None else found[5]
    if (text is not None) != (kind == "type"):
        return None
    if (_ROLES[kind], name) not in page.elements:
        return {}
    return {name: text if text is not None else {"click": "clicked", "check": "checked"}[kind]}


def _slug(page: PageTask) -> str:
    elements = "+".join(f"{role}={name}" for role, name in page.elements)
    return re.sub(r"[^\w.+=-]+", "-", f"{page.request} {elements}").strip("-")
