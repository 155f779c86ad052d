"""What the commands share: options, the settings they name, the server they talk to, and how a command fails."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer

from openclaw_rl import settings as settings_module
from openclaw_rl.data_dir import DataDir
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


def call(
    method: str, path: str, config: Path | None, data_dir: Path | None, *, key: str | None = None, **kwargs: Any
) -> Any:
    """One request to the running server of this data directory, with its admin key unless another is given (none, when
    that is empty)."""
    settings = target(config, data_dir)
    where = url_of(settings)
    if key is None:
        key = DataDir.of(settings.data_dir).secret("admin.key", settings.server.admin_key)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        # trust_env=False: the admin key goes to our own server, through no proxy that the environment names.
        with httpx.Client(timeout=150.0, trust_env=False) as client:
            reply = client.request(method, where + path, headers=headers, **kwargs)
    except httpx.HTTPError as error:
        fail(f"the server at {where} does not answer: {error}")
    if reply.is_error:
        try:
            message = reply.json()["error"]["message"]
        except (ValueError, KeyError):
            message = reply.text
        fail(f"{reply.status_code}: {message}")
    return reply.json()


def url_of(settings: settings_module.Settings) -> str:
    """Where the running server of these settings listens."""
    root = DataDir.of(settings.data_dir)
    try:
        return str(json.loads(root.server_file.read_text())["url"])
    except OSError:
        fail(
            f"no server is ready in {root.root} (`openclaw-rl serve` starts one, and logs `ready` when it serves;"
            " --data-dir names another folder)"
        )


def fail(message: str) -> NoReturn:
    for line in message.split("\n"):
        print(f"openclaw-rl: {line}", file=sys.stderr)
    raise SystemExit(2)
