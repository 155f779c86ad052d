"""The tool-call miniature: one request in plain words, one of four tools with one argument, one line of JSON.

The prompt has two examples. The check parses the line and compares the call as a whole; no text of the policy is run.
Held-out tasks name cities, times, songs and people that no training task has.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence

from openclaw_rl.agents.environment import Outcome, Split, Task
from openclaw_rl.agents.episode import Episode

TOOLS = {"weather": "weather in {}", "alarm": "alarm at {}", "play": "play {}", "call": "call {}"}
"""Each tool's request, with a place for its one argument."""
_ENDS = ("", " now", " please", " today")
_TRAIN_VALUES = {
    "weather": (
        "Paris", "London", "Rome", "Madrid", "Vienna", "Oslo", "Dublin", "Boston", "Chicago", "Denver", "Tokyo",
        "Delhi", "Cairo", "Lima", "Athens", "Prague", "Milan", "Dallas", "Seattle", "Miami", "Toronto", "Sydney",
        "Lagos", "Nairobi", "Havana", "Geneva", "Munich", "Hamburg", "Naples", "Lyon", "Porto", "Seville",
    ),
    "call": (
        "Peter", "Anna", "Maria", "Tom", "Nina", "David", "Julia", "Mark", "Ben", "Lisa", "Sarah", "Jack", "Emma",
        "Oscar", "Helen", "Frank", "Alice", "Henry", "Grace", "James", "Robert", "Susan", "Linda", "George", "Karen",
        "Steven", "Carol", "Martin", "Diana", "Victor", "Rachel", "Daniel",
    ),
    "alarm": tuple(f"{hour}:{minute}" for hour in (5, 6, 7, 8, 9, 10, 11, 4) for minute in ("00", "15", "30", "45")),
    "play": (
        "Yesterday", "Imagine", "Thriller", "Hello", "Respect", "Yellow", "Halo", "Creep", "Angie", "Roxanne",
        "Africa", "Sultans", "Jolene", "Rocket", "Fields", "Clocks", "Wonderwall", "Firework", "Umbrella", "Happy",
        "Royals", "Chandelier", "Titanium", "Believe", "Vogue", "Faith", "Kiss", "Jump", "Dreams", "Heroes", "Layla",
        "Help",
    ),
}  # fmt: skip
_EVAL_VALUES = {
    "weather": (
        "Berlin", "Lisbon", "Warsaw", "Bogota", "Houston", "Phoenix", "Kyoto", "Mumbai", "Zurich", "Venice",
        "Glasgow", "Quebec", "Manila", "Tunis",
    ),
    "call": (
        "Laura", "Simon", "Kevin", "Monica", "Philip", "Sandra", "Walter", "Sophie", "Thomas", "Rose", "Adam", "Clara",
        "Arthur", "Eva",
    ),
    "alarm": (
        "3:10", "3:40", "5:20", "6:10", "6:50", "7:25", "8:05", "8:50", "9:35", "10:40", "11:20", "12:10", "12:35",
        "1:50",
    ),
    "play": (
        "Purple", "Hallelujah", "Zombie", "Sailing", "Waterloo", "Diamonds", "Bad", "Fever", "Rosanna", "Valerie",
        "Lola", "Torn", "Stan", "Starman",
    ),
}  # fmt: skip
_SYSTEM = "Tools: weather, alarm, play, call. Answer with one line of JSON."
_EXAMPLES = (
    ("call Paul", {"tool": "call", "input": "Paul"}),
    ("alarm at 2:30", {"tool": "alarm", "input": "2:30"}),
)


class ToolcallMini:
    """One-step tasks; a call is compared, never made."""

    def __init__(self, train_tasks: int = 512, eval_tasks: int = 200, seed: int = 0) -> None:
        self._counts: dict[str, int] = {"train": train_tasks, "eval": eval_tasks}
        self._seed = seed

    def tasks(self, split: Split) -> Sequence[Task]:
        values = _TRAIN_VALUES if split == "train" else _EVAL_VALUES
        by_tool = {
            tool: [(words.format(value) + end, value) for value in values[tool] for end in _ENDS]
            for tool, words in TOOLS.items()
        }
        dice = random.Random(f"{self._seed}:{split}:toolcall")
        for found in by_tool.values():
            dice.shuffle(found)
        tools, most = list(TOOLS), sum(map(len, by_tool.values()))
        if self._counts[split] > most:
            raise ValueError(f"{split}_tasks is {self._counts[split]}, and there are {most} requests")
        made = []
        for number in range(self._counts[split]):
            tool = tools[number % len(tools)]
            text, value = by_tool[tool][number // len(tools)]
            call = {"tool": tool, "input": value}
            made.append(Task(f"toolcall_mini/{split}/{_slug(text)}", tool, {"request": text, "call": call}))
        return made

    async def run(self, task: Task, episode: Episode) -> Outcome:
        found: Mapping[str, object] | None = None
        async with episode.acting():
            found = call_of((await episode.ask(messages_of(str(task.data["request"])))).text)
        return Outcome(1.0 if found == task.data["call"] else -1.0, {"form": float(is_call(found))})


def messages_of(request: str) -> list[dict[str, object]]:
    messages: list[dict[str, object]] = [{"role": "system", "content": _SYSTEM}]
    for said, call in _EXAMPLES:
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": json.dumps(call)}]
    return [*messages, {"role": "user", "content": request}]


def call_of(reply: str) -> Mapping[str, object] | None:
    """Return the call of a reply: the whole of it is one line with one JSON object; else None."""
    try:
        found = json.loads(reply, object_pairs_hook=_once) if "\n" not in reply.strip() else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_call(found: Mapping[str, object] | None) -> bool:
    """Return True for a tool of the prompt with its one argument, whatever its value."""
    return found is not None and found.keys() == {"tool", "input"} and found["tool"] in tuple(TOOLS)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuse a key that comes twice: JSON's last one would win."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _slug(text: str) -> str:
    return re.sub(r"[^\w:]+", "-", text)
