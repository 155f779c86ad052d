"""A terminal task of three steps: find the folder, find the file that holds a word in it, print that file's last line.

The prompt shows three episodes as examples. The policy sees each command's output and ends by printing the line.
"""

import random
from collections.abc import Sequence

from openclaw_rl.agents.environment import Outcome, Split, Task
from openclaw_rl.agents.environments.terminal_mini import command_of
from openclaw_rl.agents.episode import Episode

_TRAIN_FOLDERS = (
    "docs", "data", "files", "texts", "store", "pages", "shelf", "box", "room", "desk",
)  # fmt: skip
_EVAL_FOLDERS = (
    "vault", "cabin", "attic", "cellar", "garage",
)  # fmt: skip
_TRAIN_WORDS = (
    "tiger", "piano", "lemon", "copper", "violet", "anchor", "basket", "candle", "meadow", "pepper", "falcon",
    "marble", "saddle", "tunnel", "ribbon",
)  # fmt: skip
_EVAL_WORDS = (
    "walrus", "guitar", "cherry", "silver", "orange", "hammer", "bucket", "lantern",
)  # fmt: skip
_LINES = (
    "the rain has stopped", "we meet at noon", "bring the red bag", "the door is open", "call me later",
    "the train is late", "milk and bread", "turn left here", "the cat sleeps", "page nine is lost", "water the plants",
    "it is warm today",
)  # fmt: skip
_SYSTEM = (
    "You work in a terminal. Answer each message with one bash command alone. A folder here has files. Find the file "
    "in it that holds the word, and print the last line of that file."
)
_EXAMPLES = (
    ("Word: rabbit", "ls"),
    ("notes", "grep -l rabbit notes/*"),
    ("notes/b.txt", "tail -n 1 notes/b.txt"),
    ("Word: kettle", "ls"),
    ("music", "grep -l kettle music/*"),
    ("music/a.txt", "tail -n 1 music/a.txt"),
    ("Word: spoon", "ls"),
    ("plans", "grep -l spoon plans/*"),
    ("plans/c.txt", "tail -n 1 plans/c.txt"),
)
"""After one episode alone the bundled model passes no task."""
_OBSERVATION_CHARS = 400


class TerminalFind:
    """Episodes of three steps, with room for one mistake."""

    needs_sandbox = True

    def __init__(self, train_tasks: int = 512, eval_tasks: int = 200, seed: int = 0, steps: int = 4) -> None:
        self._counts: dict[str, int] = {"train": train_tasks, "eval": eval_tasks}
        self._seed, self._steps = seed, steps

    def tasks(self, split: Split) -> Sequence[Task]:
        dice = random.Random(f"{self._seed}:{split}:find")
        is_train = split == "train"
        found: dict[str, Task] = {}
        while len(found) < self._counts[split]:
            word = dice.choice(_TRAIN_WORDS if is_train else _EVAL_WORDS)
            folder = dice.choice(_TRAIN_FOLDERS if is_train else _EVAL_FOLDERS)
            holder, texts = dice.randrange(3), []
            for number in range(3):
                lines = dice.sample(_LINES, 3)
                if number == holder:
                    lines[dice.randrange(2)] += f" {word}"
                texts.append("".join(f"{line}\n" for line in lines))
            files = {f"{folder}/{'abc'[number]}.txt": text for number, text in enumerate(texts)}
            last = texts[holder].splitlines()[-1]
            id_ = f"terminal_find/{split}/{word}-{folder}-{'abc'[holder]}-{dice.getrandbits(32):08x}"
            found[id_] = Task(id_, "find", {"word": word, "files": files, "last": last})
        return list(found.values())

    async def run(self, task: Task, episode: Episode) -> Outcome:
        files, last = task.data["files"], task.data["last"]
        assert isinstance(files, dict)
        messages: list[dict[str, object]] = [{"role": "system", "content": _SYSTEM}]
        for said, command in _EXAMPLES:
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": command}]
        messages.append({"role": "user", "content": f"Word: {task.data['word']}"})
        done = False
        async with episode.sandbox(files={name: text.encode() for name, text in files.items()}) as sandbox:
            async with episode.acting():
                for _ in range(self._steps):
                    reply = await episode.ask(messages)
                    finished = await sandbox.run(command_of(reply.text), timeout_s=10)
                    done = finished.output.decode("utf-8", "replace").strip() == last
                    if done:
                        break
                    seen = finished.text.strip()[:_OBSERVATION_CHARS] or "(no output)"
                    messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": seen}]
        return Outcome(1.0 if done else -1.0, {"steps": episode.steps})
