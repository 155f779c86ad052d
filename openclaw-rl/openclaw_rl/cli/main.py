"""The command `openclaw-rl`: serve a model, look at a running server, steer it. Its `--help` is the manual.

The server runs in the foreground. `status`, `page` and `turns` ask the running server of the same data directory. The
commands that steer it are in `control`; those that read the ledger's file are in `ledger`.
"""

import asyncio
import io
import json
import sys
import textwrap
import webbrowser
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import quote

import typer

from openclaw_rl import settings as settings_module
from openclaw_rl.cli import agents, control, experiment, keys, ledger, render, wishes
from openclaw_rl.cli import doctor as doctor_module
from openclaw_rl.cli.connect import command as connect
from openclaw_rl.cli.options import (
    ConfigOption,
    DataDirOption,
    PolicyOption,
    SetOption,
    call,
    fail,
    one_engine,
    parse_sets,
    settings_of,
    target,
    url_of,
)
from openclaw_rl.data_dir import DataDir, write_private
from openclaw_rl.errors import OpenClawRLError
from openclaw_rl.settings import tuned

app = typer.Typer(
    name="openclaw-rl",
    help="Online RL for personal agents: point your agent at this server and chat. The model learns from your next "
    "messages.",
    epilog="Settings come from a TOML file (--config), the environment (OPENCLAW_RL__SERVER__PORT=8000) and --set "
    "KEY=VALUE; the last wins. `openclaw-rl settings` prints every key with its value and meaning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_DEFAULTS = settings_module.Settings()
_LONGEST_LINE = 120
"""Characters of a line of `openclaw-rl settings`."""
app.add_typer(control.app)
app.add_typer(ledger.app)
app.add_typer(experiment.app, name="experiment")
app.add_typer(wishes.app)
app.add_typer(keys.app)
app.add_typer(agents.app, name="agents")
app.add_typer(connect.app, name="connect")


@app.command(short_help="Serve a model and train it on its chats.")
def serve(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    host: Annotated[
        str | None,
        typer.Option(
            help=f"Address to listen on. Default: {_DEFAULTS.server.host}; any other host needs server.api_keys "
            "or a user (`openclaw-rl keys add`)."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help=f"Port to listen on. Default: {_DEFAULTS.server.port}; 0 takes a free port.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="`bundled` (default: SmolLM2-135M-Instruct), a model folder, or the name of a Hugging Face causal LM."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="`embedded` (default: in this environment, on the CPU unless engine.device is cuda), or `sglang`: "
            "the server starts SGLang on the GPU with the interpreter engine.python."
        ),
    ] = None,
    engine_url: Annotated[
        str | None, typer.Option(help="URL of a running SGLang to use; the server then starts no engine.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Training method: binary_rl (default), opd, combine or agent.")
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(help="Judge that rates each reply by the next message: `rules` (default), or `llm`, a model."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help=f"Judged turns per training step. Default: {_DEFAULTS.training.batch_size}")
    ] = None,
    learn: Annotated[bool, typer.Option(help="Train. --no-learn: serve, record and judge only.")] = True,
    sets: SetOption = None,
) -> None:
    """Serve the model, record and judge its turns, train on them, and swap in the new weights while it serves.

    The APIs are OpenAI's (Chat Completions, Responses) and Anthropic's (Messages), at http://127.0.0.1:30000/v1 by
    default; the page is at http://127.0.0.1:30000/. Ctrl-C or SIGTERM stops the server cleanly.

    The first start of a model may convert it, which takes a minute; SGLang compiles for several minutes. The log line
    `ready` means that chats are answered. Until then they get a 503 that clients try again. logs/engine.log in the data
    directory shows the engine's progress.

    Every other command needs the same --data-dir or --config as the server it talks to.
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
        overrides |= one_engine(engine_url)
    if not learn:
        overrides["training.enabled"] = False
    overrides |= parse_sets(sets)
    settings = settings_of(config, overrides)
    from openclaw_rl.server.app import run  # the front end's imports take seconds, and `--help` must not

    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(run(settings))
    except OpenClawRLError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


@app.command(short_help="Show the served version, turns, training and faults.")
def status(
    policy: PolicyOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print JSON for programs, which also holds the processes, the last gate and the scoring."
        ),
    ] = False,
) -> None:
    """Show the version that serves, the turns by state, the training, and the parts that are out of order.

    A turn waits for the next message (served), for the judge (paired), for the method's score (judged), for a full
    batch (sampled), and for the end of a training step (leased). It ends as trained or as dropped. The list counts the
    dropped turns by reason; `openclaw-rl turns ID` shows the reason of one turn.

    A line that begins with ! names a part that is out of order. Version and training are those of one policy
    (--policy); the turns are everybody's.
    """
    body = call("GET", "/v1/admin/status", config, data_dir, params={} if policy is None else {"policy": policy})
    print(json.dumps(body, indent=2) if as_json else render.status(body, url_of(target(config, data_dir))))


@app.command(short_help="Open the server's page in the browser: chat, correct, watch, steer.")
def page(config: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Open the server's page in the browser: chat, rate replies, and see and steer what is learned.

    Its views of the server need the admin key. On this machine the command passes it to the browser in a file that
    only you can read. On another machine, open the printed address (through an SSH tunnel, because the server listens
    on loopback) and type the content of keys/admin.key.
    """
    # With FastAPI, which would be a fifth of any other command's start.
    from openclaw_rl.server.api.page import redirect

    settings = target(config, data_dir)
    data, where = DataDir.of(settings.data_dir), url_of(settings)
    file = data.run / "page.html"
    write_private(file, redirect(where, data.secret("admin.key", settings.server.admin_key)).encode())
    print(f"{where}/    (admin key: {data.keys / 'admin.key'})")
    webbrowser.open(file.as_uri())


@app.command()
def turns(
    turn_id: Annotated[
        str | None, typer.Argument(help="Id of one turn to show: its messages, and why it was or was not trained on.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Number of turns, newest first.")] = 20,
    state: Annotated[
        str | None,
        typer.Option(help="Only turns in this state: served, paired, judged, sampled, leased, trained or dropped."),
    ] = None,
    session: Annotated[str | None, typer.Option(help="Only turns of this session.")] = None,
    user: Annotated[str | None, typer.Option(help="Only turns of this user.")] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print JSON for programs; one turn then has its token ids, log-probs and messages."
        ),
    ] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List recorded turns, or show one turn."""
    if turn_id is not None:
        found = call("GET", f"/v1/turns/{quote(turn_id, safe='')}", config, data_dir)
    else:
        query = {"limit": limit, "state": state, "session_id": session, "user": user}
        asked = {name: value for name, value in query.items() if value is not None}
        found = call("GET", "/v1/turns", config, data_dir, params=asked)["turns"]
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    elif turn_id is not None:
        print(render.turn(found))
    else:
        print("\n".join(render.turns(found)))


@app.command("settings", short_help="Print every setting, its value and its meaning.")
def show_settings(config: ConfigOption = None, sets: SetOption = None) -> None:
    """Print every setting with its key, its value and its meaning.

    The table [method] holds the settings of the chosen method (--set method.name=opd).
    """
    settings = settings_of(config, parse_sets(sets))
    _print_branch(settings, "", tuned.in_force(settings))


@app.command(short_help="Check packages, memory, port, disk, model and client before a start.")
def doctor(
    model: Annotated[str | None, typer.Option(help="Check this model instead of model.path.")] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(help="GB of a GPU's memory: estimate what fits on it beside serving.")
    ] = None,
    slime_python: Annotated[
        str | None, typer.Option(help="Interpreter of slime's environment: compare it with the tested versions.")
    ] = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    sets: SetOption = None,
) -> None:
    """Check this machine before a start: versions, packages, GPUs, memory, port, disk, model, client.

    `!` marks a missing requirement, and the exit code is then 1. `?` marks a version or device that was not tested.
    """
    overrides = parse_sets(sets) | ({} if data_dir is None else {"data_dir": str(data_dir)})
    question = doctor_module.Question(settings_of(config, overrides), model, gpu_memory, slime_python)
    findings = doctor_module.examine(question)
    for finding in findings:
        print(finding.line())
    if any(finding.level == "missing" for finding in findings):
        raise SystemExit(1)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory, or None where uvloop is not installed (Windows)."""
    try:
        import uvloop  # a fifth less CPU per streamed token
    except ImportError:
        return None
    return uvloop.new_event_loop


def _print_branch(branch: settings_module.Branch, prefix: str, measured: tuned.Values) -> None:
    for name, field in type(branch).model_fields.items():
        value = getattr(branch, name)
        if isinstance(value, settings_module.Branch):
            print(f"\n[{prefix}{name}]")
            _print_branch(value, f"{prefix}{name}.", measured)
        else:
            meaning = " ".join((field.description or "").split())
            if f"{prefix}{name}" in measured:
                meaning = (
                    f"{meaning} Measured for this method on the bundled model; {field.default} for others.".strip()
                )
            _print_setting(f"{prefix}{name} = {value}", meaning)


def _print_setting(line: str, meaning: str) -> None:
    """Print the meaning behind the value, or above it when the line would be too long for a terminal."""
    if not meaning:
        print(line)
    elif len(line) + len(meaning) < _LONGEST_LINE:
        print(f"{line}    # {meaning}")
    else:
        print(textwrap.fill(meaning, _LONGEST_LINE, initial_indent="# ", subsequent_indent="# "))
        print(line)


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):  # a chat may hold a character that this terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    app()
