"""Build the tree from its sources and explain what is wrong with them. Only this module reads the environment."""

import codecs
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from openclaw_rl.errors import SettingsError
from openclaw_rl.settings import tuned
from openclaw_rl.settings.method_settings import DEFAULT_METHOD, installed_methods, methods_with, settings_class
from openclaw_rl.settings.tree import Settings

ENV_PREFIX = "OPENCLAW_RL__"
_PLAIN = {"extra_forbidden": "no such setting", "model_type": "it is a table of settings, not a value"}
_SECRETS = frozenset({"api_keys", "key", "admin_key", "trainer_token", "api_key", "webhook_url"})


def load(
    config: Path | None = None, overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Build the tree.

    config: a TOML file; `openclaw-rl.toml` in the working directory when None and present.
    overrides: dotted keys to values, from the command line (`{"server.port": 8000}`); strings are parsed like TOML
    values.
    A key that no source sets has its tuned value (`tuned`), else the branch's default.
    Raises SettingsError with one line for each problem, which names its key.
    """
    environ = os.environ if environ is None else environ
    tree: dict[str, Any] = {}
    path = config or (Path("openclaw-rl.toml") if Path("openclaw-rl.toml").is_file() else None)
    if path is not None:
        tree = _of_file(path)
    stronger = [*_of_environment(environ), *_of_command_line(overrides or {})]
    name = next((value for keys, value, _ in reversed(stronger) if keys == ["method", "name"]), None)
    if isinstance(name, str) and isinstance(table := tree.get("method"), dict):
        tree["method"] = _for_method(table, name)
    for keys, value, source in stronger:
        _put(tree, keys, value, source=source)
    try:
        return tuned.applied(_validated(tree, _texts(environ, overrides or {})))
    except ValidationError as error:
        raise SettingsError(_explained(error, path, _method_name(tree))) from error


def _of_file(path: Path) -> dict[str, Any]:
    """Read a TOML file in UTF-8 or UTF-16, with or without a byte order mark, which editors of Windows write."""
    try:
        content = path.read_bytes()
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        # TOML has no lone CR; `read_text` would translate the line ends of old editors, and so does this.
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        return tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        wanted = "UTF-16" if is_utf16 else "UTF-8"
        raise SettingsError(f"{path}: it is not {wanted}: {error.reason} at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: {error}") from error


def _validated(tree: dict[str, Any], texts: Mapping[tuple[str, ...], str]) -> Settings:
    """Validate the tree. A setting that is a text gets its text as it was written, not the number that it looks like.

    texts: values of the environment and of the command line, by path.
    """
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        # pydantic knows the type of a setting. It refuses a key of digits, or a date, as no string: its text counts.
        wrong = [detail["loc"] for detail in error.errors() if detail["type"] in ("string_type", "path_type")]
        again = [tuple(map(str, loc)) for loc in wrong if tuple(map(str, loc)) in texts]
        if not again:
            raise
        for keys in again:
            _put(tree, list(keys), texts[keys], source=".".join(keys))
        return Settings.model_validate(tree)


def _texts(environ: Mapping[str, str], overrides: Mapping[str, Any]) -> dict[tuple[str, ...], str]:
    texts = {tuple(keys): environ[name] for keys, _, name in _of_environment(environ)}
    return texts | {tuple(key.split(".")): value for key, value in overrides.items() if isinstance(value, str)}


def _of_environment(environ: Mapping[str, str]) -> Iterator[tuple[list[str], Any, str]]:
    """Yield the path, the value and the source of each setting in the environment. An empty variable is not set.

    Raises SettingsError for a variable with one underscore where ours have two.
    """
    for name, value in sorted(environ.items()):
        if not value:
            continue  # a compose file writes `NAME=` for a variable of its own that is not set
        if name.startswith(ENV_PREFIX):
            yield name.removeprefix(ENV_PREFIX).lower().split("__"), parse_value(value), name
        elif name.startswith(ENV_PREFIX[:-1]) and (meant := _with_two_underscores(name)):
            raise SettingsError(f"{name}: no setting is read from it; write {meant}")


def _with_two_underscores(name: str) -> str | None:
    """Return the variable that is meant by one with single underscores, if there is such a setting."""
    first, _, rest = name.removeprefix(ENV_PREFIX[:-1]).lower().partition("_")
    branches = {branch: field.annotation for branch, field in Settings.model_fields.items()}
    known = getattr(branches.get(first), "model_fields", {})
    if rest in known:
        return f"{ENV_PREFIX}{first.upper()}__{rest.upper()}"
    whole = f"{first}_{rest}"
    is_leaf = whole in branches and not hasattr(branches[whole], "model_fields")
    return f"{ENV_PREFIX}{whole.upper()}" if is_leaf else None


def _of_command_line(overrides: Mapping[str, Any]) -> Iterator[tuple[list[str], Any, str]]:
    for key, value in overrides.items():
        yield key.split("."), parse_value(value) if isinstance(value, str) else value, key


def _for_method(table: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the file's `method` table, when a flag or the environment chooses another method than the file.

    The file's own method may have keys that the chosen one lacks. They are left out, so that one file serves
    `openclaw-rl replay --method …` too. A key that neither method has stays, and is refused.
    """
    written_for = table.get("name", DEFAULT_METHOD)
    if written_for == name or not {written_for, name} <= installed_methods().keys():
        return table
    own, chosen = (settings_class(method).model_fields for method in (written_for, name))
    return {key: value for key, value in table.items() if key in chosen or key not in own}


def _method_name(tree: Mapping[str, Any]) -> str:
    table = tree.get("method")
    return str(table.get("name", DEFAULT_METHOD)) if isinstance(table, dict) else DEFAULT_METHOD


def _put(tree: dict[str, Any], path: list[str], value: Any, *, source: str) -> None:
    node = tree
    for part in path[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise SettingsError(f"{source}: {part!r} is a value, not a table")
        node = child
    node[path[-1]] = value


def parse_value(text: str) -> Any:
    """Parse a TOML value (`8000`, `true`, `["a"]`); return other text as it is."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explained(error: ValidationError, path: Path | None, method: str) -> str:
    """Return one line for each problem: the setting, the fault, and the value unless it may be a secret."""
    where, lines = f"{path}: " if path else "", []
    for detail in error.errors():
        key = ".".join(str(part) for part in detail["loc"])
        what = _PLAIN.get(detail["type"], detail["msg"].removeprefix("Value error, "))
        if detail["type"] == "extra_forbidden" and (owners := _owners(detail["loc"])):
            what = f"it belongs to {owners}, and method.name is {method}"
        lines += [where + (f"{key}: {line}{_shown(detail)}" if key else line) for line in what.split("\n")]
    return "\n".join(lines)


def _owners(loc: tuple[int | str, ...]) -> str:
    """`opd and combine` for `method.opd_clip`; empty for a key that no installed method has."""
    names = methods_with(str(loc[1])) if len(loc) == 2 and loc[0] == "method" else []
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _shown(detail: Mapping[str, Any]) -> str:
    value = detail.get("input")
    is_secret = detail["type"] == "extra_forbidden" or _SECRETS & {str(part) for part in detail["loc"]}
    if is_secret or not isinstance(value, str | int | float) or "@" in str(value) or len(str(value)) > 80:
        return ""
    return f" (it is {value!r})"
