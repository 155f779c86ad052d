"""The terminal miniature: one request in plain words, one bash command, and a look at everything that it changed.

Five kinds of request (cat, mkdir, rm, cp, touch). The prompt has one example of each. The check compares the whole work
folder with what it should be: `mv` is no delete, and a right command with a side effect is not right.

Half of the training tasks name the command ("Use cat: Show the file notes.txt."), an easier first stage: the bundled
model passes 0.55 of those and 0.20 of the plain ones, and without them no group of cat, cp or touch has a contrast. The
held-out tasks are plain.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from openclaw_rl.agents.environment import Outcome, Split, Task
from openclaw_rl.agents.episode import Episode
from openclaw_rl.errors import EnvironmentFault

_TRAIN_NAMES = (
    "notes", "plan", "list", "draft", "report", "recipe", "budget", "letter", "diary", "log", "todo", "poem",
    "song", "menu", "index", "guide", "essay", "memo", "quote", "story",
)  # fmt: skip
_EVAL_NAMES = (
    "agenda", "survey", "ticket", "invoice", "summary", "lesson", "journal", "map", "profile", "table",
)  # fmt: skip
_TRAIN_ENDINGS, _EVAL_ENDINGS = ("txt", "md", "csv"), ("log", "dat", "cfg")
_TRAIN_FOLDERS = (
    "photos", "music", "old", "backup", "work", "data", "archive", "tests", "images", "books", "games", "tools",
)  # fmt: skip
_EVAL_FOLDERS = (
    "videos", "drafts", "papers", "letters", "maps", "models",
)  # fmt: skip
_WORDS = (
    "apple", "river", "stone", "cloud", "maple", "tiger", "piano", "lemon", "copper", "violet", "anchor", "basket",
    "candle", "meadow", "pepper",
)  # fmt: skip

_SYSTEM = "You write one bash command for each request. Answer with the command alone."
_EXAMPLES = (
    ("Show the file shopping.txt.", "cat shopping.txt"),
    ("Make a folder named pictures.", "mkdir pictures"),
    ("Delete the file letters.md.", "rm letters.md"),
    ("Copy the file songs.txt to hits.txt.", "cp songs.txt hits.txt"),
    ("Create an empty file named report.csv.", "touch report.csv"),
)
KINDS = ("cat", "mkdir", "rm", "cp", "touch")


@dataclass(frozen=True, slots=True)
class Request:
    """One request: the files before it, and the changes that alone are right."""

    text: str
    files: Mapping[str, str]
    changes: Mapping[str, str | None]
    """Paths to new contents; None: it is gone. A folder's path ends with `/`."""
    output: str | None = None
    """Text to be printed; None: the output does not matter."""


class TerminalMini:
    """One-step tasks over a small work folder."""

    needs_sandbox = True

    def __init__(self, train_tasks: int = 512, eval_tasks: int = 200, seed: int = 0, named_share: float = 0.5) -> None:
        """named_share: of the training tasks, those that name the command."""
        self._counts: dict[str, int] = {"train": train_tasks, "eval": eval_tasks}
        self._seed, self._named_share = seed, named_share

    def tasks(self, split: Split) -> Sequence[Task]:
        found: dict[str, Task] = {}
        dice = random.Random(f"{self._seed}:{split}")
        while len(found) < self._counts[split]:
            kind = KINDS[len(found) % len(KINDS)]
            request = make_request(kind, split, dice)
            is_named = split == "train" and dice.random() < self._named_share
            if is_named:
                request = replace(request, text=named(kind, request.text))
            id_ = f"terminal_mini/{split}/{kind}/{_slug(request)}"
            data = {"request": request, "is_named": is_named}
            found.setdefault(id_, Task(id_, f"{kind}, named" if is_named else kind, data))
        return list(found.values())

    async def run(self, task: Task, episode: Episode) -> Outcome:
        request = task.data["request"]
        assert isinstance(request, Request)
        share = 0.0
        async with episode.sandbox(files={name: text.encode() for name, text in request.files.items()}) as sandbox:
            before = await sandbox.take()
            output = b""
            async with episode.acting():
                reply = await episode.ask(messages_of(request.text, is_named=bool(task.data["is_named"])))
                output = (await sandbox.run(command_of(reply.text), timeout_s=10)).output
            async with episode.checking():
                share = share_of(request, before or {}, await sandbox.take(), output)
        return Outcome(2 * share - 1, {"share": share})


def make_request(kind: str, split: Split, dice: random.Random) -> Request:
    """Draw a request of a kind; names of the two splits are disjoint."""
    is_train = split == "train"
    names, endings = (_TRAIN_NAMES, _TRAIN_ENDINGS) if is_train else (_EVAL_NAMES, _EVAL_ENDINGS)
    first, second, third = (f"{name}.{dice.choice(endings)}" for name in dice.sample(names, 3))
    folder = dice.choice(_TRAIN_FOLDERS if is_train else _EVAL_FOLDERS)
    text = "".join(f"{word}\n" for word in dice.sample(_WORDS, 2))
    files = {first: text, third: "".join(f"{word}\n" for word in dice.sample(_WORDS, 2))}
    match kind:
        case "cat":
            return Request(f"Show the file {first}.", files, {}, output=text)
        case "mkdir":
            return Request(f"Make a folder named {folder}.", files, {f"{folder}/": ""})
        case "rm":
            return Request(f"Delete the file {first}.", files, {first: None})
        case "cp":
            return Request(f"Copy the file {first} to {second}.", files, {second: text})
        case _:
            return Request(f"Create an empty file named {second}.", files, {second: ""})


def named(kind: str, request: str) -> str:
    return f"Use {kind}: {request}"


def messages_of(request: str, *, is_named: bool = False) -> list[dict[str, object]]:
    messages: list[dict[str, object]] = [{"role": "system", "content": _SYSTEM}]
    for plain, command in _EXAMPLES:
        asked = named(command.split()[0], plain) if is_named else plain
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": command}]
    return [*messages, {"role": "user", "content": request}]


def command_of(reply: str) -> str:
    """Return the command of a reply: the first code block, else the first line, without a prompt sign."""
    if block := re.search(r"```(?:\w+\n)?(.*?)(?:```|$)", reply, re.DOTALL):
        reply = block[1]
    lines = reply.strip().splitlines()
    return re.sub(r"^[$#>]\s+", "", lines[0].strip().strip("`")) if lines else ""


def share_of(request: Request, before: Mapping[str, bytes], after: Mapping[str, bytes] | None, output: bytes) -> float:
    """Return the right changes as a share of the wanted and the made ones together."""
    if after is None:  # more than a sandbox may hold
        return 0.0
    wanted = {name: None if text is None else text.encode() for name, text in request.changes.items()}
    made: dict[str, bytes | None] = {name: text for name, text in after.items() if before.get(name) != text}
    made |= dict.fromkeys(before.keys() - after.keys())
    if not before:
        raise EnvironmentFault("the files of the task are not in the sandbox")
    right = sum(name in made and made[name] == text for name, text in wanted.items())
    total = len(wanted.keys() | made.keys())
    if request.output is not None:
        total += 1
        right += output.decode("utf-8", "replace").strip() == request.output.strip()
    return right / total


def _slug(request: Request) -> str:
    files = "+".join(f"{name}={'-'.join(text.split())}" for name, text in request.files.items())
    return re.sub(r"[^\w.+=-]+", "-", f"{request.text} {files}").strip("-")
