"""Build the tree from its sources and explain what is wrong with them. Only this module reads the environment."""

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
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SettingsError(f"{path}: it is not UTF-8: {error.reason} at byte {error.start}") from error
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"{path}: {error}") from error
    stronger = [*_of_environment(environ), *_of_command_line(overrides or {})]
    name = next((value for keys, value, _ in reversed(stronger) if keys == ["method", "name"]), None)
    if isinstance(name, str) and isinstance(table := tree.get("method"), dict):
        tree["method"] = _for_method(table, name)
    for keys, value, source in stronger:
        _put(tree, keys, value, source=source)
    try:
        return tuned.applied(Settings.model_validate(tree))
    except ValidationError as error:
        raise SettingsError(_explained(error, path, _method_name(tree))) from error


def _of_environment(environ: Mapping[str, str]) -> Iterator[tuple[list[str], Any, str]]:
    """Yield the path, the value and the source of each setting in the environment."""
    for name, value in sorted(environ.items()):
        if name.startswith(ENV_PREFIX):
            yield name.removeprefix(ENV_PREFIX).lower().split("__"), _parse(value), name


def _of_command_line(overrides: Mapping[str, Any]) -> Iterator[tuple[list[str], Any, str]]:
    for key, value in overrides.items():
        yield key.split("."), _parse(value) if isinstance(value, str) else value, key


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


def _parse(text: str) -> Any:
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
    return " and ".join(methods_with(str(loc[1]))) if len(loc) == 2 and loc[0] == "method" else ""


def _shown(detail: Mapping[str, Any]) -> str:
    value = detail.get("input")
    is_secret = detail["type"] == "extra_forbidden" or _SECRETS & {str(part) for part in detail["loc"]}
    if is_secret or not isinstance(value, str | int | float) or "@" in str(value) or len(str(value)) > 80:
        return ""
    return f" (it is {value!r})"
