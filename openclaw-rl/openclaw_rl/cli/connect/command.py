"""The commands `openclaw-rl connect …`."""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from openclaw_rl.cli.connect import openclaw as openclaw_module
from openclaw_rl.cli.connect import other_clients, served
from openclaw_rl.cli.connect.kept import Kept
from openclaw_rl.cli.connect.openclaw import READ_FIRST, OpenClaw, Plan
from openclaw_rl.cli.connect.served import Served
from openclaw_rl.cli.options import ConfigOption, DataDirOption, call, fail, target, url_of
from openclaw_rl.data_dir import DataDir
from openclaw_rl.errors import ClientError, OpenClawRLError

app = typer.Typer(
    help="Point a chat client at the running server: OpenClaw, Codex, Claude Code, Open WebUI.",
    short_help="Point a chat client at the running server.",
    no_args_is_help=True,
)
_RECORDED_S = 20.0
"""Time for a served reply to be in the ledger."""

UrlOption = Annotated[
    str | None, typer.Option(help="Address of the server, as the client reaches it. Default: the running server's own.")
]
KeyOption = Annotated[
    str | None, typer.Option(help="Chat key for the client. Default: the first of server.api_keys, if there is one.")
]
LengthOption = Annotated[
    int | None,
    typer.Option(help="Longest reply, in tokens. Default: sampling.max_new_tokens, at most a quarter of the context."),
]
UndoOption = Annotated[bool, typer.Option("--undo", help="Put the client's configuration back as it was.")]
WriteOption = Annotated[
    bool, typer.Option("--write", help="Write the file. Default: print what it would hold, and write nothing.")
]
FileOption = Annotated[Path | None, typer.Option("--file", help="Another file to write than the client's own.")]


@app.command(short_help="Make the served model OpenClaw's default, check it, or undo it.")
def openclaw(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Write without asking.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and write nothing.")] = False,
    print_patch: Annotated[
        bool,
        typer.Option(
            "--print", help="Print the patch alone, with its key, for `openclaw config patch --stdin` elsewhere."
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Send one message through the client, and find it in the ledger. Writes nothing."),
    ] = False,
    undo: UndoOption = False,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="With --undo: the old file byte for byte, even if others changed it since."),
    ] = False,
    small: Annotated[
        bool | None,
        typer.Option(
            help="Also write OpenClaw's smallest profile (no tools, no bootstrap, 1,800 tokens of prompt), which a"
            " context of 8,192 tokens can hold. Default: only where OpenClaw has no configuration, and the context is"
            " too small without."
        ),
    ] = None,
    provider: Annotated[
        str, typer.Option(help="Name of our provider in OpenClaw. Not `qwen`: that is a plugin.")
    ] = "rl",
    max_tokens: LengthOption = None,
    client: Annotated[str, typer.Option(help="OpenClaw's program, if it is not `openclaw` on the PATH.")] = "openclaw",
    url: UrlOption = None,
    key: KeyOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Make the served model OpenClaw's default model.

    The command writes through the client's own `openclaw config patch`: a provider of ours beside the others, and
    agents.defaults.model.primary. It shows the change, lets the client check it, and asks. Comments of a JSON5 file are
    lost, as with every write of the client.

    --check sends one message in a session of its own, through the gateway if it runs. The reply must be in the ledger,
    with that session.

    --undo puts the file back byte for byte. If others changed it since, only our values are taken out, through the
    client. --exact puts the old file back all the same, and keeps the changed one.
    """
    if sum((print_patch, check, undo, dry_run)) > 1:
        fail("one of --print, --dry-run, --check and --undo")
    data = DataDir.of(target(config, data_dir).data_dir)
    try:
        if undo:
            _undo_openclaw(Kept(data.connect / "openclaw"), client, yes=yes, exact=exact)
            return
        if check:
            _check(OpenClaw(client), config, data_dir)
            return
        about = _served(url, key, max_tokens, config, data_dir)
        if print_patch:
            is_small = bool(small)
            print(
                json.dumps(openclaw_module.plan(about, {}, provider, is_new=False, is_small=is_small).patch, indent=2)
            )
            return
        _connect(OpenClaw(client), Kept(data.connect / "openclaw"), about, provider, small=small, yes=yes, dry=dry_run)
    except (OpenClawRLError, OSError) as error:
        fail(str(error))


@app.command(short_help="Print or write a profile for Codex.")
def codex(
    write: WriteOption = False,
    undo: UndoOption = False,
    name: Annotated[str, typer.Option(help="Name of the profile and of its provider.")] = "rl",
    file: FileOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Print a profile for Codex, or write it to NAME.config.toml in Codex's folder.

    Codex reads it with `codex --profile NAME`. Its config.toml stays as it is.
    """

    def found() -> other_clients.Configured:
        return other_clients.codex(_served(url, key, None, config, data_dir), name, file)

    _print_or_write("codex", None if undo else found, write=write, config=config, data_dir=data_dir)


@app.command("claude-code", short_help="Print or write the environment of Claude Code.")
def claude_code(
    write: WriteOption = False,
    undo: UndoOption = False,
    file: FileOption = None,
    max_tokens: LengthOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Print the environment for Claude Code, or merge it into `env` of its settings.json."""

    def found() -> other_clients.Configured:
        return other_clients.claude_code(_served(url, key, max_tokens, config, data_dir), file)

    _print_or_write("claude-code", None if undo else found, write=write, config=config, data_dir=data_dir)


@app.command("open-webui", short_help="Print or write the environment of Open WebUI.")
def open_webui(
    write: WriteOption = False,
    undo: UndoOption = False,
    file: FileOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Print the environment for Open WebUI, or write it to open-webui.env in this folder."""

    def found() -> other_clients.Configured:
        return other_clients.open_webui(_served(url, key, None, config, data_dir), file)

    _print_or_write("open-webui", None if undo else found, write=write, config=config, data_dir=data_dir)


def _served(
    url: str | None, key: str | None, max_tokens: int | None, config: Path | None, data_dir: Path | None
) -> Served:
    settings = target(config, data_dir)
    own = url_of(settings)
    about = served.ask(own, settings, key=key, reply_tokens=max_tokens)
    return about if url is None else about.at(served.reachable(url))


def _connect(
    client: OpenClaw, kept: Kept, about: Served, provider: str, *, small: bool | None, yes: bool, dry: bool
) -> None:
    if provider == "qwen":
        raise ClientError("--provider qwen: OpenClaw would install a plugin of that name")
    version, file = client.version(), client.config_file()
    is_new = not file.exists()
    tested = "" if version.startswith(openclaw_module.TESTED) else f" (tested: {openclaw_module.TESTED})"
    print(f"OpenClaw {version}{tested}, {file}{' (there is none yet)' if is_new else ''}")
    old = {} if is_new else client.values(READ_FIRST)
    is_tight = about.context < openclaw_module.OWN_PROMPT + about.reply_tokens
    is_small = small if small is not None else is_new and is_tight
    is_ours = openclaw_module.is_ours(kept.back, provider)
    plan = openclaw_module.plan(about, old, provider, is_new=is_new, is_small=is_small, is_ours=is_ours)
    plan = _checked(client, plan)
    _show(plan.lines(), plan.remarks)
    if dry:
        print("OpenClaw accepts the change. Nothing is written (--dry-run)")
        return
    _confirm("Write it?", yes=yes)
    before = kept.back, kept.ours
    is_first = kept.is_empty
    kept.keep(openclaw_module.config_files(file), *openclaw_module.after(kept.back, kept.ours, plan))
    try:
        said = client.patch(plan.patch, replaced=plan.replaced)
    except ClientError:
        if not kept.changed():
            kept.forget() if is_first else kept.keep([], *before)
        raise
    kept.wrote()
    print(said)
    print(f"{provider}/{served.MODEL} is OpenClaw's default model; a session with a model of its own keeps it")
    print("next: openclaw-rl connect openclaw --check    (back: --undo)")


def _checked(client: OpenClaw, plan: Plan) -> Plan:
    """Return the plan that the client accepts in a dry run. Raises ClientError."""
    try:
        client.patch(plan.patch, replaced=plan.replaced, is_dry=True)
    except ClientError as error:
        if plan.keeps_provider or ("sendSessionAffinityHeaders" not in str(error) and "compat" not in str(error)):
            raise
        plan = openclaw_module.without_session_headers(plan)
        client.patch(plan.patch, replaced=plan.replaced, is_dry=True)
    return plan


def _undo_openclaw(kept: Kept, client: str, *, yes: bool, exact: bool) -> None:
    if kept.is_empty:
        raise ClientError(f"there is nothing to undo: {kept.folder} keeps no configuration of OpenClaw")
    if kept.is_exact or exact:
        _confirm("Put OpenClaw's configuration back as it was?", yes=yes)
        print("\n".join(kept.restore()))
    else:
        changed = ", ".join(map(str, kept.changed())) or "the configuration"
        print(f"{changed} was changed after connect; these values go back, and the other changes stay:")
        program = OpenClaw(client)
        now = program.values(openclaw_module.READ_FIRST)
        back = openclaw_module.without_theirs(kept.back, kept.ours, now)
        for path, value in openclaw_module.leaves(back):
            print(f"  {'.'.join(path)} = {'(removed)' if value is None else json.dumps(value)}")
        print("(--exact puts the whole old file back instead, and keeps the changed one)")
        program.patch(back, is_dry=True)
        _confirm("Write it?", yes=yes)
        said = "nothing of ours is left in it"
        for step in openclaw_module.steps_back(back, now.get("models")):
            said = program.patch(step)
        print(said)
    kept.forget()


def _check(client: OpenClaw, config: Path | None, data_dir: Path | None) -> None:
    """Send one message through the client and find its reply in the ledger. Raises ClientError."""
    mark = secrets.token_hex(4)
    is_local = not client.has_gateway()
    way = "without a gateway, which takes a minute" if is_local else "through the gateway"
    print(f"sending one message through OpenClaw, {way} …", flush=True)
    # A session of its own each time: a second check in the same one would be feedback on the first.
    said = client.say(f"Reply with one word: pong. (check {mark})", f"openclaw-rl-check-{mark}", is_local=is_local)
    end = time.monotonic() + _RECORDED_S
    asked = {"session_id": said.session_id} if said.session_id else {"q": mark}
    while not (found := _turns(config, data_dir, **asked)) and time.monotonic() < end:
        time.sleep(0.5)
    found = found or _turns(config, data_dir, q=mark)
    if not found:
        raise ClientError(
            f"{said.model} answered, and no such message reached this server: is it the default model of the agent?"
        )
    row = found[0]
    if row["session_id"] != said.session_id:
        raise ClientError(
            f"the message arrived as {row['turn_id']} in session {row['session_id']}, not in the client's"
            f" {said.session_id}"
        )
    print(f"{said.model} answered {said.text[:80]!r}")
    print(f"ledger: {row['turn_id']}, session {row['session_id']}, version {row['oldest_version']}")
    print("it has no next message, so nothing is learned from it")


def _turns(config: Path | None, data_dir: Path | None, **asked: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = call("GET", "/v1/turns", config, data_dir, params={"limit": 5, **asked})["turns"]
    return found


def _print_or_write(
    client: str,
    make: Callable[[], other_clients.Configured] | None,
    *,
    write: bool,
    config: Path | None,
    data_dir: Path | None,
) -> None:
    """Print or write the configuration of a client, and end the command with a message where that fails.

    make: None puts the client's files back.
    """
    try:
        kept = Kept(DataDir.of(target(config, data_dir).data_dir).connect / client)
        if make is None:
            _undo_files(kept)
        else:
            _offer(kept, make(), write=write)
    except (OpenClawRLError, OSError) as error:
        fail(str(error))


def _offer(kept: Kept, found: other_clients.Configured, *, write: bool) -> None:
    if not write:
        print(found.shown, end="")
        print("\n".join(f"# {note}" for note in (f"for {found.path}; --write writes it", *found.notes)))
        return
    path = found.path.resolve()  # a link of the user's stays one
    if path.exists() and path.read_text() == found.content:
        print(f"{path} holds it already")
        return
    kept.keep([path])
    other_clients.write(path, found.content)
    kept.wrote()
    print("\n".join((f"{path} is written; --undo puts back what was there", *found.notes)))


def _undo_files(kept: Kept) -> None:
    if kept.is_empty:
        raise ClientError("there is nothing to undo: `connect` wrote no file of this client")
    print("\n".join(kept.restore()))
    kept.forget()


def _show(lines: Any, remarks: Sequence[str]) -> None:
    for line in lines:
        print(line)
    for remark in remarks:
        print(f"? {remark}")


def _confirm(question: str, *, yes: bool) -> None:
    if yes:
        return
    try:
        if typer.confirm(question):
            return
    except typer.Abort:  # the end of a pipe
        print()
    _nothing()


def _nothing() -> NoReturn:
    fail("nothing is written (--yes writes without asking)")
