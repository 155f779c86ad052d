"""The command `openclaw-rl keys`: the users of a server, each with a key of its own.

The commands change the file `keys/users.json`. A running server sees the change at its next request.
"""

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from openclaw_rl.cli import render
from openclaw_rl.cli.options import ConfigOption, DataDirOption, call, fail, target
from openclaw_rl.data_dir import DataDir
from openclaw_rl.errors import SettingsError
from openclaw_rl.settings import UserLimits
from openclaw_rl.web.user_keys import UserKey, UserKeys

app = typer.Typer()
keys_app = typer.Typer(
    help="Users of this server, each with a key of its own. A user reaches the own turns, wishes and feedback alone.",
    short_help="Users of this server, each with a key of its own.",
    no_args_is_help=True,
)
app.add_typer(keys_app, name="keys")

NameArgument = Annotated[str, typer.Argument(help="Name of the user, from `openclaw-rl keys list`.")]
T = TypeVar("T")


class Switch(StrEnum):
    ON = "on"
    OFF = "off"


@keys_app.command(short_help="Add a user, and print the user's key.")
def add(
    name: Annotated[str, typer.Argument(help="Name of the user; turns, wishes and feedback belong to it.")],
    train: Annotated[
        Switch, typer.Option(help="off: the user's turns are served and recorded, never trained on.")
    ] = Switch.ON,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Add a user, and print the user's key. It is shown once: the server keeps only its digest.

    With the first user, every chat needs a key. The turns of a server without keys belong to `user`: a user of this
    name has them.
    """
    _print_key(_done(lambda: _users(config, data_dir).add(name, train=train is Switch.ON, now=time.time())), name)


@keys_app.command("list", short_help="List the users.")
def list_keys(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List the users, without their keys. Keys of `server.api_keys` are not among them."""
    found = _done(_users(config, data_dir).read)
    if as_json:
        rows = [
            {"user": one.user, "train": one.train, "created_at": one.created_at, "limits": one.limits.model_dump()}
            for one in found
        ]
        print(json.dumps(rows, indent=2))
        return
    for one in found:
        print(_line(one))
    if not found:
        print("no users: `openclaw-rl keys add NAME` adds one")


@keys_app.command(short_help="Show what each user used today, and what waits of each.")
def usage(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Show each user's requests and tokens of today (UTC), the turns that wait, and the wishes. No words of a chat."""
    rows = call("GET", "/v1/admin/users", config, data_dir)["users"]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for line in render.users(rows):
        print(line)
    if not rows:
        print("no user yet")


@keys_app.command(short_help="Give a user a new key; the old one opens nothing any more.")
def rotate(name: NameArgument, config: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Give a user a new key, and print it. The old one opens nothing from now on. The user's turns and wishes stay."""
    _print_key(_done(lambda: _users(config, data_dir).rotate(name, now=time.time())), name)


@keys_app.command(short_help="Limit a user, or say that the turns are not trained on.")
def limit(
    name: NameArgument,
    requests_at_once: Annotated[int | None, typer.Option(min=1, help="Chats of the user at once.")] = None,
    tokens_a_day: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of the prompts and replies from midnight to midnight (UTC)."),
    ] = None,
    practice_share: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Largest share of an update's practice replies that is the user's."),
    ] = None,
    train: Annotated[
        Switch | None, typer.Option(help="off: the user's turns are served and recorded, never trained on.")
    ] = None,
    default: Annotated[
        bool, typer.Option("--default", help="First drop the user's own limits: those of the settings (limits) hold.")
    ] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Give a user limits of its own, in place of those of the settings. They hold from the next request on.

    A chat over a limit gets 429, with the limit and the time in words. Chats of other users never do.
    """
    given = {"requests_at_once": requests_at_once, "tokens_a_day": tokens_a_day, "practice_share": practice_share}
    asked = {key: value for key, value in given.items() if value is not None}
    if not asked and train is None and not default:
        fail("nothing to change: name a limit, --train or --default")
    if practice_share == 0:
        fail("practice_share must be above 0; `practice.enabled` switches practice off")
    users = _users(config, data_dir)
    is_trained = None if train is None else train is Switch.ON
    limits = UserLimits.model_validate(asked)
    print(_line(_done(lambda: users.change(name, train=is_trained, limits=limits, keeps_others=not default))))


@keys_app.command(short_help="Take a user's key away.")
def revoke(name: NameArgument, config: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Take a user's key away: it opens nothing from now on. Replies that run go on.

    The user's turns stay, and so does what they taught. `openclaw-rl forget --user NAME --everything` deletes them.
    Without any user left, chats still need a key.
    """
    _done(lambda: _users(config, data_dir).revoke(name))
    print(f"the key of {name} opens nothing any more")


def _line(one: UserKey) -> str:
    since = datetime.fromtimestamp(one.created_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    told = [f"{name} {value}" for name, value in one.limits.model_dump(exclude_none=True).items()]
    return "   ".join([f"{one.user:<24} key of {since}", *told, *([] if one.train else ["never trained on"])])


def _users(config: Path | None, data_dir: Path | None) -> UserKeys:
    return UserKeys(DataDir.prepare(target(config, data_dir).data_dir).users)


def _done(work: Callable[[], T]) -> T:
    try:
        return work()
    except SettingsError as error:
        fail(str(error))


def _print_key(key: str, name: str) -> None:
    """Print the key alone on stdout, so that a script can take it."""
    print(key)
    print(f"openclaw-rl: the key of {name}; it is shown this once", file=sys.stderr)
