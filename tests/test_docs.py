"""What the documents say, held against what is there: links, paths, settings, commands and their flags."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from openclaw_rl.cli.main import app
from openclaw_rl.settings import Branch, Settings

ROOT = Path(__file__).parents[1]
FOLDERS = ("instructions", "openclaw-combine", "openclaw-opd", "openclaw-rl", "scripts", "slime", "tests")
DOCS = sorted(
    [ROOT / "README.md", *(file for folder in FOLDERS for file in (ROOT / folder).glob("**/*.md"))],
    key=lambda file: str(file),
)
ENDINGS = ("py", "jsonl", "log", "json", "key", "token", "sqlite3")
PACKAGE = "".join(file.read_text() for file in sorted((ROOT / "openclaw-rl" / "openclaw_rl").rglob("*.py")))
COMMAND = typer.main.get_command(app)
METHOD_OF_FOLDER = {"openclaw-rl": "binary_rl", "openclaw-opd": "opd", "openclaw-combine": "combine"}
SETTINGS = {method: Settings(method={"name": method}) for method in (*METHOD_OF_FOLDER.values(), "agent")}
"""A method owns the settings of the branch `method`."""


def names(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.fixture(params=DOCS, ids=names)
def doc(request: pytest.FixtureRequest) -> Path:
    return request.param


def prose(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def code(text: str) -> Iterator[str]:
    """Lines of code blocks, continued ones as one, and what stands in backticks."""
    for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
        yield from re.sub(r"\\\n\s*", "", block).splitlines()
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text)))


def anchors(text: str) -> set[str]:
    """Of its headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_its_links_lead_somewhere(doc: Path) -> None:
    for where in re.findall(r"\]\(([^)\s]+)\)", prose(doc.read_text())):
        if re.match(r"[a-z]+:", where):
            continue
        path, _, anchor = where.partition("#")
        file = (doc.parent / path).resolve() if path else doc
        assert file.exists(), where
        assert not anchor or anchor in anchors(file.read_text()), where


def test_the_paths_it_names_are_there(doc: Path) -> None:
    for word in (word for line in code(doc.read_text()) for word in line.split()):
        found = re.fullmatch(rf"((?:{'|'.join(FOLDERS)})/[\w./-]+)[,.:;]?", word)
        if found and "…" not in word:
            # a package's own folder and the results are named from where they lie, too
            assert any((place / found[1]).exists() for place in (ROOT, *doc.parents)), word


def test_the_settings_it_names_exist(doc: Path) -> None:
    branches = "|".join(name for name, field in Settings.model_fields.items() if is_branch(field.annotation))
    for line in code(doc.read_text()):
        for key in re.findall(rf"(?<![\w./-])((?:{branches})\.\w+)(?![\w/(]|\.\w)", line):
            branch, name = key.split(".")
            fields = {field for settings in SETTINGS.values() for field in type(getattr(settings, branch)).model_fields}
            # or a file or module of that name, or an event of the log
            assert name in fields or name in ENDINGS or f'.{name}"' in PACKAGE, key


def test_the_defaults_in_its_tables_are_those_of_the_settings(doc: Path) -> None:
    settings = SETTINGS[METHOD_OF_FOLDER.get(doc.parent.name, "binary_rl")]
    for table in re.findall(r"^\| setting \| default \|.*\n\|[ |-]+\n((?:\|.*\n)+)", doc.read_text(), re.MULTILINE):
        for row in table.splitlines():
            named, told = (cell.strip() for cell in row.split("|")[1:3])
            keys = re.findall(r"`([\w.]+)`", named)
            if not told or told.startswith("as "):
                continue
            branch = getattr(settings, keys[0].split(".")[0])
            found = [getattr(branch, key.split(".")[-1]) for key in keys]
            assert [value(word.strip(" `")) for word in told.split(",")] == found, row


def is_branch(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Branch)


LIMIT = re.compile(
    r".*(?:timeout|hold|stall|drain|lease|ttl|wait|gate)_s|max_age_days|(?:score_)?workers|cache_tokens|keep_\w+|retries"
    r"|max_(?:body_mb|streams|running|open_turns|waiting|versions|new_tokens|tokens|updates|staleness|gb)"
)
"""Names of settings that bound a wait, a number of waiting things or a size."""
LIMITS_PAGE = (ROOT / "instructions" / "limits-and-faults.md").read_text()


def limits() -> Iterator[tuple[str, object]]:
    for branch, field in Settings.model_fields.items():
        if is_branch(field.annotation):
            for name in type(getattr(SETTINGS["binary_rl"], branch)).model_fields:
                if LIMIT.fullmatch(name):
                    yield f"{branch}.{name}", getattr(getattr(SETTINGS["binary_rl"], branch), name)


@pytest.mark.parametrize(("key", "default"), list(limits()), ids=lambda given: str(given))
def test_each_limit_is_on_the_page_of_limits_with_its_default(key: str, default: object) -> None:
    rows = [row for row in LIMITS_PAGE.splitlines() if row.startswith("|") and f"`{key}`" in row]
    assert rows, f"{key} bounds something, and the page says of nothing that it is full"
    told = [found for row in rows for found in re.findall(rf"`{re.escape(key)}` \((\d+(?:\.\d+)?)[,) ](?!h)", row)]
    assert all(float(number) == default for number in told)


def value(word: str) -> object:
    if word == "–":
        return None
    return float(word) if re.fullmatch(r"[\d.e-]+", word) else word


def test_the_commands_it_shows_have_these_flags(doc: Path) -> None:
    for line in code(doc.read_text()):
        if found := re.search(r"(?:^|[\s/(])openclaw-rl ([a-z][a-z-]*)(?:\s|$)(.*)", line):
            command = COMMAND.commands.get(found[1])  # type: ignore[attr-defined]
            assert command is not None, line
            words = split(found[2])
            while commands := getattr(command, "commands", None):  # typer may bring a click of its own
                if not words and command.invoke_without_command:
                    break
                assert words[0] in commands, line
                command = commands[words.pop(0)]
            known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
            assert {word.partition("=")[0] for word in words if re.match(r"--?\w", word)} <= known, line


def test_the_scripts_it_shows_have_these_flags(doc: Path) -> None:
    for line in code(doc.read_text()):
        if found := re.search(r"(?:^|\s)(scripts/(?:[\w/]+\.py|(?:benchmarks|e2e)\.sh \w+))\s(.*)", line):
            script = ROOT / re.sub(r"\.sh (\w+)$", r"/\1.py", found[1])
            assert script.is_file(), line
            text = "".join(file.read_text() for file in (*script.parent.glob("*.py"), *script.parent.glob("*/*.py")))
            for flag in (word.partition("=")[0] for word in split(found[2]) if word.startswith("--")):
                assert f'"{flag}"' in text or flag == "--help", line


def split(words: str) -> list[str]:
    """Up to a comment, a pipe, or the next command."""
    try:
        found = shlex.split(words, comments=True)
    except ValueError:  # an apostrophe of the sentence around it
        found = words.split()
    end = next((n for n, word in enumerate(found) if word in ("|", "&&", ";", "…")), len(found))
    return found[:end]


def test_the_nodes_variables_are_those_of_its_launch_script() -> None:
    rows = re.findall(r"^\| (`[A-Z][^|]*`) \|", (ROOT / "instructions" / "node.md").read_text(), re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`([A-Z_]+)`", row)}
    script = (ROOT / "slime" / "launch.sh").read_text()
    used = set(re.findall(r"\$\{([A-Z_]+):[-+]", script)) - {"PYTHONPATH"}
    assert told == used | {"HF_CKPT"}
