"""Write the reference pages that come from the code: `instructions/settings.md` and `instructions/commands.md`.

    python scripts/reference.py             write them
    python scripts/reference.py --check     print the pages that are out of date, and exit with 1

Settings come from the tree of settings, commands from the command line's own help. A test runs the check.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from openclaw_rl.cli.main import app
from openclaw_rl.settings import Branch, Settings
from openclaw_rl.settings.tuned import BUNDLED

PAGES = Path(__file__).resolve().parents[1] / "instructions"
METHODS = ("binary_rl", "opd", "combine", "agent")
GENERATED = "This page is written by `scripts/reference.py` from the code."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    stale = [name for name, text in pages().items() if not is_written(name, text)]
    for name in stale:
        if options.check:
            print(f"{name} is out of date: python scripts/reference.py")
        else:
            (PAGES / name).write_text(pages()[name])
            print(f"{name} is written")
    return 1 if stale and options.check else 0


def pages() -> dict[str, str]:
    """Return the text of each generated page by its file's name."""
    return {"settings.md": "\n".join(settings_page()) + "\n", "commands.md": "\n".join(commands_page()) + "\n"}


def is_written(name: str, text: str) -> bool:
    file = PAGES / name
    return file.is_file() and file.read_text() == text


# -- settings ---------------------------------------------------------------------------------------------------------


def settings_page() -> Iterator[str]:
    """Yield the lines of the page of settings: a table for each branch."""
    yield from (
        "# Settings",
        "",
        GENERATED,
        "",
        "A setting comes from a TOML file (`--config`; `openclaw-rl.toml` in this folder is read by itself), from the",
        "environment (`OPENCLAW_RL__SERVER__PORT=8000`) or from `--set KEY=VALUE`. The last of these wins. An unknown",
        "key is an error that names it. `openclaw-rl settings` prints the values in use, and",
        "`openclaw-rl settings --set method.name=opd` those of another method.",
        "[Limits and faults](limits-and-faults.md) tells what happens at each limit.",
        "",
        "A dash is no value: the feature is off, or the value is found at the start.",
        "",
        "[The whole server](#the-whole-server) · "
        + " · ".join(f"[`{name}`](#{anchor(title(name))})" for name, _ in branches(Settings())),
        "",
        "## The whole server",
        "",
    )
    yield from table(Settings(), "", {name for name, _ in branches(Settings())})
    for name, branch in branches(Settings()):
        yield from ("", f"## {title(name)}", "")
        if name == "method":
            yield from method_tables()
        else:
            yield from table(branch, f"{name}.")
    yield from ("", "## The bundled model", "")
    yield "The bundled model with a LoRA of the local trainer has other defaults, which were measured for it:"
    yield from ("", "| method | key | default |", "| --- | --- | --- |")
    for method, values in BUNDLED.items():
        yield from (f"| `{method}` | `{key}` | {shown(value)} |" for key, value in values.items())


def method_tables() -> Iterator[str]:
    """Yield a table of the first method's settings, and one of each other method's."""
    for number, name in enumerate(METHODS):
        branch = Settings(method={"name": name}).method
        yield from (*([""] if number else []), f"### Method `{name}`", "")
        yield from table(branch, "method.", {"name"})


def branches(settings: Settings) -> Iterator[tuple[str, Branch]]:
    for name in type(settings).model_fields:
        if isinstance(branch := getattr(settings, name), Branch):
            yield name, branch


def table(branch: Branch, prefix: str, left_out: set[str] = frozenset()) -> Iterator[str]:  # type: ignore[assignment]
    yield from ("| key | default | meaning |", "| --- | --- | --- |")
    for name, field in type(branch).model_fields.items():
        if name not in left_out:
            yield f"| `{prefix}{name}` | {shown(getattr(branch, name))} | {meaning(field)} |"


def meaning(field: FieldInfo) -> str:
    """Return the field's own words, with the words that it takes where they are few."""
    told = cell(field.description or "")
    words = [word for part in (field.annotation, *get_args(field.annotation)) for word in literals(part)]
    missing = [word for word in words if f"`{word}`" not in told]
    choices = f"One of {', '.join(f'`{word}`' for word in words)}." if missing else ""
    return " ".join(part for part in (told, choices) if part)


def literals(annotation: Any) -> list[str]:
    return [str(word) for word in get_args(annotation)] if get_origin(annotation) is Literal else []


def shown(value: Any) -> str:
    match value:
        case None | () | "" | {}:
            return "–"
        case bool():
            return f"`{str(value).lower()}`"
        case float():
            return f"{value:g}"
        case int():
            return str(value)
        case tuple() | list():
            return cell(", ".join(f"`{part}`" for part in value))
    return cell(f"`{value}`")


# -- commands ---------------------------------------------------------------------------------------------------------


def commands_page() -> Iterator[str]:
    """Yield the lines of the page of commands: usage, help and options of each."""
    root = typer.main.get_command(app)
    yield from (
        "# Commands",
        "",
        GENERATED,
        "",
        "Each command's `--help` prints the same. A command that talks to a server finds it by its data directory, and",
        "needs no address.",
        "",
    )
    commands = list(walk("openclaw-rl", root))
    for path, command in commands:
        yield f"- [`{path}`](#{anchor(path)}): {cell(command.get_short_help_str(120))}"
    for path, command in commands:
        yield from ("", f"## {path}", "")
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        words = " ".join(one.name.upper() for one in arguments)
        tail = "" if hasattr(command, "commands") else "[OPTIONS]"
        yield from ("```sh", " ".join(part for part in (path, words, tail) if part), "```")
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
            yield from ("", cell(paragraph))
        options = [one for one in command.params if one not in arguments or getattr(one, "help", None)]
        if options:
            yield from ("", "| option | meaning |", "| --- | --- |")
            yield from (row(one) for one in options)


def walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield each command that can run, below the root."""
    for name, one in getattr(command, "commands", {}).items():
        here = f"{path} {name}"
        if one.callback is not None and (not hasattr(one, "commands") or one.invoke_without_command):
            yield here, one
        yield from walk(here, one)


def is_flag(option: Any) -> bool:
    return bool(getattr(option, "is_flag", False))


def row(option: Any) -> str:
    if option.param_type_name == "argument":
        name = f"`{option.name.upper()}`"
    else:
        kind = "" if is_flag(option) else f" {option.metavar or 'VALUE'}"
        name = ", ".join(f"`{flag}{kind}`" for flag in (*option.opts, *option.secondary_opts))
    told = cell(option.help or "")
    if not (callable(option.default) or is_flag(option) or option.default in (None, ()) or "Default: " in told):
        told = f"{told} Default: {shown(option.default)}."
    return f"| {cell(name)} | {told} |"


# -- text -------------------------------------------------------------------------------------------------------------


def title(branch: str) -> str:
    return f"Branch {branch}"


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def cell(text: str) -> str:
    """Return the text as one line that a table's cell can hold."""
    return " ".join(text.replace("\b", "").split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
