"""Parts that the commands share: options, settings, calls to the running server, and the exit on a failure."""

import secrets
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer

from openclaw_rl import settings as settings_module
from openclaw_rl.data_dir import Announcement, DataDir
from openclaw_rl.errors import SettingsError

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="TOML file with settings. Default: openclaw-rl.toml in this folder, if present."
    ),
]
DataDirOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder of ledger, versions, keys and logs. Default: ~/.openclaw-rl")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="KEY=VALUE", help="Set one setting (`openclaw-rl settings` lists them); may be repeated."
    ),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        help="Policy, from `openclaw-rl policies`: `user:NAME` learns from one user (policies.mode per_user). "
        "Default: the shared one."
    ),
]

_CHECK_S = 30.0
"""Patience with a server that is to prove itself."""


def parse_sets(sets: list[str] | None) -> dict[str, Any]:
    overrides = {}
    for item in sets or []:
        key, equals, value = item.partition("=")
        if not equals or not key:
            fail(f"--set {item!r}: write KEY=VALUE")
        overrides[key] = value
    return overrides


def one_engine(url: str) -> dict[str, Any]:
    """Return the overrides of `--engine-url`: this engine alone, whatever pool the configuration names."""
    return {"engine.kind": "url", "engine.url": url, "engine.urls": [], "engine.replicas": 1}


def settings_of(config: Path | None, overrides: dict[str, Any]) -> settings_module.Settings:
    try:
        return settings_module.load(config, overrides)
    except SettingsError as error:
        fail(str(error))


def target(config: Path | None, data_dir: Path | None) -> settings_module.Settings:
    """Return the settings of the server that a command talks to."""
    return settings_of(config, {} if data_dir is None else {"data_dir": str(data_dir)})


def chat_key(settings: settings_module.Settings, key: str | None) -> str:
    """Return the chat key that a command sends: the given one, else the first of `server.api_keys`, else none."""
    keys = settings.server.api_keys
    if key or keys:
        return key or keys[0].key.get_secret_value()
    if settings.has_keys:
        fail("the users of this server have keys, and it stores none of them: name one with --key")
    return ""


def call(
    method: str, path: str, config: Path | None, data_dir: Path | None, *, key: str | None = None, **kwargs: Any
) -> Any:
    """Send one request to the running server of this data directory, and return its JSON.

    key: the bearer token; None: the admin key; empty: no token.
    """
    settings = target(config, data_dir)
    server = _announced(settings)
    if key is None:
        key = DataDir.of(settings.data_dir).secret("admin.key", settings.server.admin_key)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        # trust_env=False: the admin key must not pass through a proxy that the environment names.
        with httpx.Client(base_url=server.url, timeout=150.0, trust_env=False) as client:
            _check_is_ours(client, server)
            reply = client.request(method, path, headers=headers, **kwargs)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"the server at {server.url} does not answer: {error}")
    if reply.is_error:
        try:
            message = reply.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = reply.text
        fail(f"{reply.status_code}: {message}")
    return reply.json()


def url_of(settings: settings_module.Settings) -> str:
    """Return the URL of the running server of these settings, once it has proved to be that server."""
    server = _announced(settings)
    try:
        with httpx.Client(base_url=server.url, timeout=30.0, trust_env=False) as client:
            _check_is_ours(client, server)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"the server at {server.url} does not answer: {error}")
    return server.url


def _announced(settings: settings_module.Settings) -> Announcement:
    data = DataDir.of(settings.data_dir)
    no_server = (
        f"no server is ready in {data.root} (`openclaw-rl serve` starts one, and logs `ready` when it serves;"
        " --data-dir names another folder)"
    )
    try:
        return Announcement.read(data)
    except OSError:
        fail(no_server)
    except SettingsError as error:
        fail(f"{no_server}\n{error}")


def _check_is_ours(client: httpx.Client, server: Announcement) -> None:
    """Check that the server of this data directory answers, before it gets a key.

    After a crash the address file is stale, and another program or another user's server may have the port.
    """
    challenge = secrets.token_urlsafe(16)
    headers = {"X-OpenClaw-Challenge": challenge}
    # The head alone is read: another program's answer may have no end.
    with client.stream("GET", "/healthz", headers=headers, timeout=_CHECK_S) as answer:
        proof = answer.headers.get("x-openclaw-proof")
    if not server.proves(challenge, proof):
        fail(f"another program answers at {server.url}: the server of this data directory has ended")


def fail(message: str) -> NoReturn:
    for line in message.split("\n"):
        print(f"openclaw-rl: {line}", file=sys.stderr)
    raise SystemExit(2)


def must_stand_behind(context: typer.Context, *options: object) -> None:
    """Refuse options that stand before a subcommand. Raises typer.BadParameter.

    The subcommand does not see them: it would ask the server of the default data directory.
    """
    if any(options):
        raise typer.BadParameter(f"put the options behind `{context.info_name} {context.invoked_subcommand}`")
