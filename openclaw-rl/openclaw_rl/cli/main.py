"""`openclaw-rl`: serve, look, steer. Its help is the manual.

The server runs in the foreground; `status`, `page` and `turns` look at a running server of the same data directory.
What steers one is in `cli_steer`, what reads the ledger's file in `cli_ledger`.
"""

import asyncio
import json
import sys
import webbrowser
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import quote

import typer

from openclaw_rl import settings as settings_module
from openclaw_rl.cli import control, ledger, render
from openclaw_rl.cli import doctor as doctor_module
from openclaw_rl.cli.options import (
    ConfigOption,
    DataDirOption,
    SetOption,
    call,
    fail,
    parse_sets,
    settings_of,
    target,
    url_of,
)
from openclaw_rl.data_dir import DataDir, write_private
from openclaw_rl.errors import OpenClawRLError
from openclaw_rl.server.api import page as page_module
from openclaw_rl.settings import tuned

app = typer.Typer(
    name="openclaw-rl",
    help="Online RL for personal agents: point your agent at this server, chat, and the model learns from what you "
    "say next.",
    epilog="Settings: a TOML file (--config), the environment (OPENCLAW_RL__SERVER__PORT=8000), or --set KEY=VALUE. "
    "`openclaw-rl settings` prints every key with its meaning and default.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_DEFAULTS = settings_module.Settings()
app.add_typer(control.app)
app.add_typer(ledger.app)


@app.command(short_help="Serve a model, and let it learn from its chats.")
def serve(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    host: Annotated[
        str | None, typer.Option(help=f"Default: {_DEFAULTS.server.host}. Anything but loopback needs server.api_keys.")
    ] = None,
    port: Annotated[int | None, typer.Option(help=f"Default: {_DEFAULTS.server.port}; 0 takes a free one.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="`bundled` (default: SmolLM2-135M-Instruct), a folder, or a Hugging Face causal LM."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="`embedded` (default), or `sglang`: started on the GPU, from the environment of engine.python."
        ),
    ] = None,
    engine_url: Annotated[
        str | None, typer.Option(help="Use a running SGLang at this URL in place of an engine of our own.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="How turns become training: binary_rl (default), opd or combine.")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="Who reads what was said next: `rules` (default), or `llm`, a model.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help=f"Judged turns per training step. Default: {_DEFAULTS.training.batch_size}")
    ] = None,
    learn: Annotated[bool, typer.Option(help="--no-learn: serve, record and judge, but train nothing.")] = True,
    sets: SetOption = None,
) -> None:
    """Serve the model on port 30000, record, judge, train and hot-swap. Stops cleanly on Ctrl-C or SIGTERM.

    The first start of a model may convert it, which takes a minute (an SGLang compiles, which takes several): the line
    `ready` says that it serves, and logs/engine.log in the data directory what the engine does meanwhile. Clients that
    come earlier wait. Every other command here takes the same --data-dir, or --config, as the server it talks to.
    """
    overrides: dict[str, Any] = {}
    named = {
        "data_dir": None if data_dir is None else str(data_dir),
        "server.host": host,
        "server.port": port,
        "model.path": model,
        "engine.kind": engine,
        "method.name": method,
        "judge.kind": judge,
        "training.batch_size": batch_size,
    }
    overrides.update({key: value for key, value in named.items() if value is not None})
    if engine_url is not None:
        overrides |= {"engine.kind": "url", "engine.url": engine_url}
    if not learn:
        overrides["training.enabled"] = False
    overrides |= parse_sets(sets)
    settings = settings_of(config, overrides)
    from openclaw_rl.server.app import run  # heavy: the front end's imports take seconds, and `--help` should not

    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(run(settings))
    except OpenClawRLError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


@app.command(short_help="What serves, what waits, what was learned, what is broken.")
def status(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="All of it, for programs: the processes, the last gate, scoring too.")
    ] = False,
) -> None:
    """What serves, what waits, what was learned, what is broken.

    A turn waits for what is said next (served), for the judge (paired), for the method (judged), for a full batch
    (sampled), and for the end of a training step (leased); it ends as trained, or as dropped for the reason that is
    named: `openclaw-rl turns ID` says more. A line that begins with ! is a part that is out of order.
    """
    body = call("GET", "/v1/admin/status", config, data_dir)
    print(json.dumps(body, indent=2) if as_json else render.status(body, url_of(target(config, data_dir))))


@app.command(short_help="The same as a page with curves, in the browser.")
def page(config: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Open the server's page: what waits, what users say, what each step measured, while it happens.

    The page asks for the admin key. A browser on this machine gets it by a file that only you can read; elsewhere, open
    the printed address (through an SSH tunnel: the server listens on loopback) and type what keys/admin.key holds.
    """
    settings = target(config, data_dir)
    data, where = DataDir.of(settings.data_dir), url_of(settings)
    door = data.run / "page.html"
    write_private(door, page_module.door(where, data.secret("admin.key", settings.server.admin_key)).encode())
    print(f"{where}/    (admin key: {data.keys / 'admin.key'})")
    webbrowser.open(door.as_uri())


@app.command()
def turns(
    turn_id: Annotated[
        str | None, typer.Argument(help="One turn: what was said, and why it was or was not trained on.")
    ] = None,
    limit: Annotated[int, typer.Option(help="How many, newest first.")] = 20,
    state: Annotated[
        str | None, typer.Option(help="served, paired, judged, sampled, leased, trained or dropped.")
    ] = None,
    session: Annotated[str | None, typer.Option(help="Only this session.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs; one turn with its token ids, log-probs and messages.")
    ] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List recorded turns, or show one."""
    if turn_id is not None:
        found = call("GET", f"/v1/turns/{quote(turn_id, safe='')}", config, data_dir)
    else:
        query = {"limit": limit, "state": state, "session_id": session}
        asked = {name: value for name, value in query.items() if value is not None}
        found = call("GET", "/v1/turns", config, data_dir, params=asked)["turns"]
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    elif turn_id is not None:
        print(render.turn(found))
    else:
        print("\n".join(render.turns(found)))


@app.command("settings")
def show_settings(config: ConfigOption = None, sets: SetOption = None) -> None:
    """Print every setting: its key, its value now, its meaning."""
    settings = settings_of(config, parse_sets(sets))
    _print_branch(settings, "", tuned.in_force(settings))


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(help="Look at this model in place of the settings' one.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(help="GB of a card: what fits on it beside serving.")] = None,
    slime_python: Annotated[
        str | None, typer.Option(help="Interpreter of slime's environment: compare it with what the node was built on.")
    ] = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    sets: SetOption = None,
) -> None:
    """Look before you start: versions, GPUs, port, disk, model. `!` is missing, `?` is not what was tested."""
    overrides = parse_sets(sets) | ({} if data_dir is None else {"data_dir": str(data_dir)})
    question = doctor_module.Question(settings_of(config, overrides), model, gpu_memory, slime_python)
    findings = doctor_module.examine(question)
    for finding in findings:
        print(finding.line())
    if any(finding.level == "missing" for finding in findings):
        raise SystemExit(1)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one (not on Windows): a fifth less CPU per streamed token."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _print_branch(branch: settings_module.Branch, prefix: str, taught: tuned.Values) -> None:
    for name, field in type(branch).model_fields.items():
        value = getattr(branch, name)
        if isinstance(value, settings_module.Branch):
            print(f"\n[{prefix}{name}]")
            _print_branch(value, f"{prefix}{name}.", taught)
        else:
            meaning = " ".join((field.description or "").split())
            if f"{prefix}{name}" in taught:
                meaning = (
                    f"{meaning} Measured for this method on the bundled model; {field.default} for others.".strip()
                )
            print(f"{prefix}{name} = {value}" + (f"    # {meaning}" if meaning else ""))


def main() -> None:
    app()
