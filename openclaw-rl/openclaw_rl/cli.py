"""`openclaw-rl`: serve, look, steer. Its help is the manual.

The server runs in the foreground; the other commands here talk to a running server of the same data directory, with
that directory's admin key. Those that read the ledger's file are in `cli_ledger`.
"""

import asyncio
import json
import shutil
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer

from openclaw_rl import cli_ledger, cli_show
from openclaw_rl import doctor as doctor_module
from openclaw_rl import page as page_module
from openclaw_rl import settings as settings_module
from openclaw_rl.cli_common import ConfigOption, DataDirOption, SetOption, fail, parse_sets, settings_of, target
from openclaw_rl.data_dir import DataDir, write_private
from openclaw_rl.errors import OpenClawRLError

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
learning_app = typer.Typer(
    help="Pause or resume learning; chats go on, turns are still recorded and judged.",
    short_help="Pause or resume learning; chats go on.",
    no_args_is_help=True,
)
app.add_typer(learning_app, name="learning")
_DEFAULTS = settings_module.Settings()
_OFF = "this server trains nothing: training.enabled is off (--no-learn)"
app.add_typer(cli_ledger.app)


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
    from openclaw_rl.app import run  # heavy: the front end's imports take seconds, and `--help` should not

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
    body = _call("GET", "/v1/admin/status", config, data_dir)
    print(json.dumps(body, indent=2) if as_json else cli_show.status(body, _url(target(config, data_dir))))


@app.command(short_help="The same as a page with curves, in the browser.")
def page(config: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Open the server's page: what waits, what users say, what each step measured, while it happens.

    The page asks for the admin key. A browser on this machine gets it by a file that only you can read; elsewhere, open
    the printed address (through an SSH tunnel: the server listens on loopback) and type what keys/admin.key holds.
    """
    settings = target(config, data_dir)
    data, where = DataDir.of(settings.data_dir), _url(settings)
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
        found = _call("GET", f"/v1/turns/{quote(turn_id, safe='')}", config, data_dir)
    else:
        query = {"limit": limit, "state": state, "session_id": session}
        asked = {name: value for name, value in query.items() if value is not None}
        found = _call("GET", "/v1/turns", config, data_dir, params=asked)["turns"]
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    elif turn_id is not None:
        print(cli_show.turn(found))
    else:
        print("\n".join(cli_show.turns(found)))


@app.command(short_help="Say of one reply what you think of it.")
def feedback(
    turn_id: Annotated[str | None, typer.Argument(help="The reply's id, as `openclaw-rl turns` lists it.")] = None,
    session: Annotated[str | None, typer.Option(help="In place of an id: the newest turn of this session.")] = None,
    good: Annotated[bool, typer.Option("--good", help="More of this: a reward of +1.")] = False,
    bad: Annotated[bool, typer.Option("--bad", help="Less of this: a reward of -1.")] = False,
    value: Annotated[
        float | None, typer.Option(help="A number in [-1, 1]; its sign is the reward, 0 is neutral.")
    ] = None,
    comment: Annotated[
        str | None, typer.Option(help="What should have been otherwise: a hint for the methods opd and combine.")
    ] = None,
    demonstration: Annotated[
        str | None, typer.Option(help="The reply you would have liked: the model is trained to give it.")
    ] = None,
    feedback_id: Annotated[
        str | None, typer.Option(help="A name of your own: the same one again changes nothing.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="The chat key of the turn's user. Default: the first of server.api_keys.")
    ] = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Say of one reply what you think of it. Your word wins over the judge's.

    It may come at any time. A turn that waits for its next state, for the judge or for its score is judged by it; one
    whose sample waits for the trainer is scored again; one that was dropped because nothing was said of it
    (no_next_state, superseded, branch, neutral, unjudged, method) comes back. For a turn that is being trained on, or
    has been, it is late: it is kept, shown in `turns`, and takes effect if that version is ever lost. A turn that can
    never be trained on (greedy sampling, opted out, …) stays as it is.

    A demonstration is a sample of its own, whatever becomes of the turn.
    """
    if good + bad + (value is not None) > 1:
        fail("one of --good, --bad and --value")
    body = {
        "turn_id": turn_id,
        "session_id": session,
        "value": True if good else False if bad else value,
        "comment": comment,
        "demonstration": demonstration,
        "feedback_id": feedback_id,
    }
    keys = target(config, data_dir).server.api_keys
    chat_key = key or (keys[0].key.get_secret_value() if keys else "")
    said = {name: what for name, what in body.items() if what is not None}
    answer = _call("POST", "/v1/feedback", config, data_dir, key=chat_key, json=said)
    print(f"{answer['turn_id']}: {answer['effect']}, the turn is {answer['state']}", end="")
    print(f"; {answer['demonstration_id']} waits for the trainer" if answer["demonstration_id"] else "")


@app.command(short_help="Go back to an earlier version.")
def rollback(
    to: Annotated[
        int | None, typer.Argument(help="Version to go back to; default: the parent of the one that serves.")
    ] = None,
    requeue: Annotated[bool, typer.Option(help="Let the samples of the abandoned versions wait again.")] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Go back to an earlier version, its optimizer state included; what was learned after it is abandoned."""
    body = _call("POST", "/v1/admin/rollback", config, data_dir, json={"to": to, "requeue": requeue})
    print(f"version {body['serving']} serves")


@app.command(short_help="Keep serving one version.")
def pin(
    weight_version: Annotated[int | None, typer.Argument(help="Version to keep serving.")] = None,
    off: Annotated[bool, typer.Option("--off", help="Publish new versions again.")] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Keep serving one version; training goes on, nothing is published until `pin --off`."""
    if (weight_version is None) != off:
        fail("give a version, or --off")
    body = _call("POST", "/v1/admin/pin", config, data_dir, json={"weight_version": weight_version})
    print(f"version {body['serving']} serves" + ("" if off else ", pinned"))


@learning_app.command("pause")
def learning_pause(config: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Hand out no more batches."""
    _call("POST", "/v1/admin/learning", config, data_dir, json={"on": False})
    print("learning is paused")


@learning_app.command("resume")
def learning_resume(config: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Hand out batches again."""
    body = _call("POST", "/v1/admin/learning", config, data_dir, json={"on": True})
    print("learning is on" if body["enabled"] else f"learning is no longer paused, but {_OFF}")


@app.command(short_help="Train now, on whatever waits.")
def train(
    now: Annotated[bool, typer.Option("--now", help="Needed: this trains on whatever waits, however little.")] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Do not wait for a full batch: train now on the samples that wait."""
    if not now:
        fail("training starts by itself when a batch is full; `openclaw-rl train --now` does not wait for that")
    body = _call("POST", "/v1/admin/train", config, data_dir)
    if not body["enabled"]:
        fail(_OFF)
    if not body["learning"]:
        fail(f"learning is paused, {body['waiting']} samples wait: `openclaw-rl learning resume` first")
    print(
        f"{body['waiting']} samples wait"
        + (": the trainer takes them now" if body["waiting"] else ", nothing to train on")
    )


@app.command(short_help="Delete a session from the ledger.")
def forget(
    session: Annotated[str, typer.Argument(help="The session's id, as `openclaw-rl turns` lists it.")],
    user: Annotated[str | None, typer.Option(help="Whose, when several users have one of that name.")] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Go back behind the versions trained on it, and learn again without it.")
    ] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Delete a session from the ledger: its turns, samples, feedback, and every message nobody else refers to.

    A batch that holds one of its samples is taken from the trainer. Weights that were trained on the session cannot be
    changed: they are named. With --rebuild the policy goes back to the newest version before them, their folders are
    deleted, and the samples of other sessions that still fit train again; `openclaw-rl replay` trains an adapter anew
    from all that is left. Backups and exports are yours to delete.
    """
    said = {"session_id": session, "user": user, "rebuild": rebuild}
    body = _call("POST", "/v1/admin/forget", config, data_dir, json=said)
    print(f"{body['turns']} turns of session {session} are gone, and {body['pieces']} contents that were only theirs")
    if body["trained_in"]:
        print(f"versions trained on it: {', '.join(map(str, body['trained_in']))}")
    if rebuilt := body["rebuilt"]:
        print(f"version {rebuilt['serving']} serves again, {rebuilt['waiting']} samples wait to be learned")
    if not body["is_scrubbed"]:
        print("remains of it may lie in free space of the ledger: stop the server and run `openclaw-rl compact`")


@app.command("export-adapter", short_help="Copy a version's LoRA adapter (PEFT format).")
def export_adapter(
    folder: Annotated[Path, typer.Argument(help="New folder for the PEFT adapter.")],
    weight_version: Annotated[int | None, typer.Option("--version", help="Default: the one that serves.")] = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Copy a version's LoRA adapter (PEFT format) out of the data directory."""
    number = weight_version
    if number is None:
        number = _call("GET", "/v1/admin/status", config, data_dir)["serving"]
    row = _call("GET", f"/v1/admin/versions/{number}", config, data_dir)
    if row["folder"] is None:
        fail(f"version {number} has no adapter on disk: it is the base, or its weights were deleted")
    if folder.exists():
        fail(f"{folder} exists already")
    if row["kind"] != "lora":
        fail(f"version {number} is no adapter: it holds all of the model's weights, in {row['folder']}")
    source = DataDir.of(target(config, data_dir).data_dir).root / row["folder"]
    try:
        folder.mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy2(source / name, folder / name)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    print(f"version {number} is in {folder}")


@app.command("settings")
def show_settings(config: ConfigOption = None, sets: SetOption = None) -> None:
    """Print every setting: its key, its value now, its meaning."""
    _print_branch(settings_of(config, parse_sets(sets)), "")


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


def _print_branch(branch: settings_module.Branch, prefix: str) -> None:
    for name, field in type(branch).model_fields.items():
        value = getattr(branch, name)
        if isinstance(value, settings_module.Branch):
            print(f"\n[{prefix}{name}]")
            _print_branch(value, f"{prefix}{name}.")
        else:
            meaning = " ".join((field.description or "").split())
            print(f"{prefix}{name} = {value}" + (f"    # {meaning}" if meaning else ""))


def _call(
    method: str, path: str, config: Path | None, data_dir: Path | None, *, key: str | None = None, **kwargs: Any
) -> Any:
    """One request to the running server of this data directory, with its admin key unless another is given (none, when
    that is empty)."""
    settings = target(config, data_dir)
    where = _url(settings)
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


def _url(settings: settings_module.Settings) -> str:
    """Where the running server of these settings listens."""
    root = DataDir.of(settings.data_dir)
    try:
        return str(json.loads(root.server_file.read_text())["url"])
    except OSError:
        fail(
            f"no server is ready in {root.root} (`openclaw-rl serve` starts one, and logs `ready` when it serves;"
            " --data-dir names another folder)"
        )


def main() -> None:
    app()
