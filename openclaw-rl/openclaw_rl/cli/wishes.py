"""The command `openclaw-rl wishes`: what you asked the model for in words, and what has become of it."""

from typing import Annotated, Any
from urllib.parse import quote

import typer

from openclaw_rl.cli import render
from openclaw_rl.cli.options import ConfigOption, DataDirOption, call, chat_key, must_stand_behind, target

app = typer.Typer()
wishes_app = typer.Typer(
    help="What you asked for in words, and what has become of it. A correction in a chat makes a wish; while nobody "
    "chats, the model practises it.",
    short_help="What you asked for in words, and what has become of it.",
    invoke_without_command=True,
)
app.add_typer(wishes_app, name="wishes")

KeyOption = Annotated[str | None, typer.Option(help="Chat key of the user. Default: the first of server.api_keys.")]
WishArgument = Annotated[int, typer.Argument(help="Number of the wish, from `openclaw-rl wishes`.")]


@wishes_app.callback()
def wishes(
    context: typer.Context, key: KeyOption = None, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    if context.invoked_subcommand is not None:
        must_stand_behind(context, key, config, data_dir)
        return
    _list(key, config, data_dir)


@wishes_app.command("list", short_help="List your wishes.")
def list_wishes(
    key: KeyOption = None,
    user: Annotated[
        str | None, typer.Option(help="For the operator: the wishes of this user, by the admin key.")
    ] = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List your wishes: their words, how much is learned, how often they were practised, and what it cost in KL."""
    _list(key, config, data_dir, user)


@wishes_app.command(short_help="Stop practising a wish.")
def remove(
    wish: WishArgument, key: KeyOption = None, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Stop practising a wish. What the model has learned of it stays until other practice wears it off.

    `openclaw-rl forget --rebuild` unlearns it, with the turns that asked for it.
    """
    _ask("DELETE", f"/v1/wishes/{wish}", key, config, data_dir)
    print(f"wish {wish} is removed: no practice rehearses it any more")


@wishes_app.command(short_help="Say that a wish holds everywhere.")
def general(
    wish: WishArgument,
    off: Annotated[bool, typer.Option("--off", help="It holds where it was asked alone, as at first.")] = False,
    key: KeyOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Say that a wish holds for all your prompts. No anchors keep it where it was asked then."""
    _ask("POST", f"/v1/wishes/{wish}", key, config, data_dir, json={"general": not off})
    print(f"wish {wish} holds {'where it was asked' if off else 'everywhere'}")


@wishes_app.command(short_help="Practise a wish again.")
def practise(
    wish: WishArgument, key: KeyOption = None, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Practise a wish again that was removed, was stopped, or rests."""
    _ask("POST", f"/v1/wishes/{wish}", key, config, data_dir, json={"practise": True})
    print(f"wish {wish} is practised while nobody chats")


def _list(key: str | None, config: Any, data_dir: Any, user: str | None = None) -> None:
    if user is None:
        rows = _ask("GET", "/v1/wishes", key, config, data_dir)["wishes"]
    else:
        rows = call("GET", f"/v1/admin/users/{quote(user, safe='')}/wishes", config, data_dir)["wishes"]
    for line in render.wishes(rows):
        print(line)
    if not rows:
        print("no wishes yet: correct a reply in your own words, and it becomes one (methods opd and combine)")


def _ask(method: str, path: str, key: str | None, config: Any, data_dir: Any, json: Any = None) -> Any:
    return call(method, path, config, data_dir, key=chat_key(target(config, data_dir), key), json=json)
