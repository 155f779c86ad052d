"""What the commands share: options, the settings they name, and how a command fails."""

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from openclaw_rl import settings as settings_module
from openclaw_rl.errors import SettingsError

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file; openclaw-rl.toml here when present.")
]
DataDirOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Where everything is kept. Default: ~/.openclaw-rl")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Any setting; may be repeated.")
]


def parse_sets(sets: list[str] | None) -> dict[str, Any]:
    overrides = {}
    for item in sets or []:
        key, equals, value = item.partition("=")
        if not equals or not key:
            fail(f"--set {item!r}: write KEY=VALUE")
        overrides[key] = value
    return overrides


def settings_of(config: Path | None, overrides: dict[str, Any]) -> settings_module.Settings:
    try:
        return settings_module.load(config, overrides)
    except SettingsError as error:
        fail(str(error))


def target(config: Path | None, data_dir: Path | None) -> settings_module.Settings:
    """The settings of the server that a command talks to."""
    return settings_of(config, {} if data_dir is None else {"data_dir": str(data_dir)})


def fail(message: str) -> NoReturn:
    for line in message.split("\n"):
        print(f"openclaw-rl: {line}", file=sys.stderr)
    raise SystemExit(2)
