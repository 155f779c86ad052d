"""Commands that steer a running server: feedback on a reply, the version that serves, learning, forgetting.

They call the running server of their data directory with that directory's admin key.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from openclaw_rl.cli import render
from openclaw_rl.cli.options import (
    ConfigOption,
    DataDirOption,
    PolicyOption,
    call,
    chat_key,
    fail,
    must_stand_behind,
    target,
)
from openclaw_rl.data_dir import DataDir
from openclaw_rl.types import SHARED_POLICY

app = typer.Typer()
learning_app = typer.Typer(
    help="Pause or resume learning. Chats go on meanwhile, and turns are recorded and judged.",
    short_help="Pause or resume learning; chats go on.",
    no_args_is_help=True,
)
app.add_typer(learning_app, name="learning")
engines_app = typer.Typer(
    help="Engines of a pool (engine.urls, engine.replicas): list them, or take one out for work on its host.",
    short_help="Engines of a pool: list them, take one out, bring it back.",
    invoke_without_command=True,
)
app.add_typer(engines_app, name="engines")
NumberArgument = Annotated[int, typer.Argument(help="Number of the engine, from `openclaw-rl engines`.")]
_OFF = "this server trains nothing: training.enabled is off (--no-learn)"


@app.command(short_help="Give feedback on one reply.")
def feedback(
    turn_id: Annotated[str | None, typer.Argument(help="Id of the reply, from `openclaw-rl turns`.")] = None,
    session: Annotated[str | None, typer.Option(help="Instead of an id: the newest turn of this session.")] = None,
    good: Annotated[bool, typer.Option("--good", help="A good reply: a reward of +1.")] = False,
    bad: Annotated[bool, typer.Option("--bad", help="A bad reply: a reward of -1.")] = False,
    value: Annotated[
        float | None, typer.Option(help="A number in [-1, 1]; its sign is the reward, 0 is neutral.")
    ] = None,
    comment: Annotated[
        str | None, typer.Option(help="Your wish for this reply, in words: a hint for the methods opd and combine.")
    ] = None,
    demonstration: Annotated[
        str | None, typer.Option(help="The reply that you wanted: the model is trained to give it.")
    ] = None,
    feedback_id: Annotated[
        str | None, typer.Option(help="Your own name for this feedback: a repeated request with it has no effect.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Chat key of the turn's user. Default: the first of server.api_keys.")
    ] = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Give feedback on one reply. It wins over the judge's verdict, and may come at any time.

    The command prints the effect, which depends on the turn's state.

    judged: the feedback is the verdict of a turn that waited for its next message, the judge or its score. A turn that
    was dropped for lack of a verdict (no_next_state, superseded, branch, neutral, unjudged, method) comes back.

    rescored: the turn's sample waited for the trainer; the method scores the turn again.

    late: the turn is being trained on, or was. The server keeps the feedback, shows
    it in `turns`, and applies it if that version is ever lost.

    recorded: the server keeps the feedback, without effect. A turn that can never be trained on (greedy sampling, opted
    out, …) stays as it is.

    A demonstration becomes a sample of its own, independent of the turn.
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
    said = {name: what for name, what in body.items() if what is not None}
    answer = call("POST", "/v1/feedback", config, data_dir, key=chat_key(target(config, data_dir), key), json=said)
    print(f"{answer['turn_id']}: effect {answer['effect']}, state {answer['state']}", end="")
    print(f"; {answer['demonstration_id']} waits for the trainer" if answer["demonstration_id"] else "")


@app.command(short_help="Go back to an earlier version.")
def rollback(
    to: Annotated[
        int | None,
        typer.Argument(help="Version to go back to. Default: the newest one before the serving one that has weights."),
    ] = None,
    requeue: Annotated[bool, typer.Option(help="Train the samples of the abandoned versions again.")] = False,
    policy: PolicyOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Go back to an earlier version and its optimizer state. The versions after it are abandoned.

    Wishes that were practised in them stop; `openclaw-rl wishes practise` takes one up again.
    """
    asked = {"to": to, "requeue": requeue, "policy": policy}
    body = call("POST", "/v1/admin/rollback", config, data_dir, json=asked)
    print(f"version {body['serving']} serves")


@app.command(short_help="Keep one version serving.")
def pin(
    weight_version: Annotated[int | None, typer.Argument(help="Version to serve from now on.")] = None,
    off: Annotated[bool, typer.Option("--off", help="Publish new versions again.")] = False,
    policy: PolicyOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Keep one version serving. Training goes on, and new versions wait until `pin --off`."""
    if (weight_version is None) != off:
        fail("give a version, or --off")
    body = call("POST", "/v1/admin/pin", config, data_dir, json={"weight_version": weight_version, "policy": policy})
    print(f"version {body['serving']} serves" + ("" if off else ", pinned"))


@learning_app.command("pause")
def learning_pause(policy: PolicyOption = None, config: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Stop giving batches to the trainer: of one policy, or without --policy of everyone."""
    call("POST", "/v1/admin/learning", config, data_dir, json={"on": False, "policy": policy})
    print("learning is paused" + _of(policy))


@learning_app.command("resume")
def learning_resume(policy: PolicyOption = None, config: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Give batches to the trainer again. Without --policy, each policy that was paused by itself learns again, too."""
    body = call("POST", "/v1/admin/learning", config, data_dir, json={"on": True, "policy": policy})
    if not body["enabled"]:
        print(f"learning is no longer paused, but {_OFF}")
    elif not body["learning"]:
        print(f"{policy} is no longer paused by itself, but everyone is: `openclaw-rl learning resume`")
    else:
        print("learning is on" + _of(policy))


def _of(policy: str | None) -> str:
    return "" if policy is None else f" for {policy}"


@app.command(short_help="List the policies in numbers: one, or one for each user.")
def policies(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List the policies: the version that serves, the newest trained one, the samples that wait. No words of a chat."""
    rows = call("GET", "/v1/admin/policies", config, data_dir)["policies"]
    print(json.dumps(rows, indent=2) if as_json else "\n".join(render.policies(rows)))


@engines_app.callback()
def engines(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    if context.invoked_subcommand is not None:
        must_stand_behind(context, as_json, config, data_dir)
        return
    rows = call("GET", "/v1/admin/engines", config, data_dir)["engines"]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print("\n".join(render.engines(rows)) or "this server has one engine, and no pool")


@engines_app.command(short_help="Take an engine out of the pool; what runs on it ends there.")
def drain(number: NumberArgument, config: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Take an engine out of the pool, for work on its host. The replies that run on it end there.

    No new request goes to it, and its conversations go on elsewhere with their next turn. It stays out until `engines
    undrain`, also when it or the server starts again. The last engine that serves cannot be drained.
    """
    one = call("POST", f"/v1/admin/engines/{number}", config, data_dir, json={"drained": True})
    print(f"engine {number} at {one['engine']} is drained; {one['running']} calls run on it")


@engines_app.command(short_help="Bring a drained engine back into the pool.")
def undrain(number: NumberArgument, config: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Bring a drained engine back into the pool. It gets requests once it holds what the others hold."""
    one = call("POST", f"/v1/admin/engines/{number}", config, data_dir, json={"drained": False})
    state = "serves" if one["is_in"] else "is no longer drained; it serves once it holds what the others hold"
    print(f"engine {number} at {one['engine']} {state}")


@app.command(short_help="Train now, on the samples that wait.")
def train(
    now: Annotated[bool, typer.Option("--now", help="Required: confirms that the batch may be small.")] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Train now on the samples that wait, instead of waiting for a full batch."""
    if not now:
        fail("training starts by itself when a batch is full; `openclaw-rl train --now` does not wait for that")
    body = call("POST", "/v1/admin/train", config, data_dir)
    if not body["enabled"]:
        fail(_OFF)
    if not body["learning"]:
        fail(f"learning is paused, {body['waiting']} samples wait: `openclaw-rl learning resume` first")
    print(
        f"{body['waiting']} samples wait"
        + (": the trainer takes them now" if body["waiting"] else ", nothing to train on")
    )


@app.command(short_help="Delete a session, a conversation or a user from the ledger.")
def forget(
    session: Annotated[str | None, typer.Argument(help="Id of the session, from `openclaw-rl turns`.")] = None,
    turn: Annotated[
        str | None,
        typer.Option(
            help="Instead of SESSION: the id of any reply of the session, or of a conversation without a session id."
        ),
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="Owner of the session, if several users have a session of that id.")
    ] = None,
    everything: Annotated[bool, typer.Option("--everything", help="Every turn of --user.")] = False,
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild", help="Roll back to before the first version trained on the session; train again without it."
        ),
    ] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Delete a session, a conversation or a user from the ledger: turns, samples, feedback, and the messages that no
    other session has.

    A client may send no session id. Name such a conversation by any of its replies (--turn). The ledger identifies it
    by its first question and answer: conversations of one user that begin alike are deleted together.

    The trainer loses a batch that holds one of the samples. Weights that were trained on the session cannot be changed:
    the command lists those versions. With --rebuild the policy goes back to the newest version before them, their
    folders are deleted, and the samples of other sessions that still fit train again. `openclaw-rl replay` trains a new
    adapter from the rest of the ledger.

    Backups and exports are yours to delete.
    """
    if (session is not None) + (turn is not None) + everything != 1:
        fail("one of SESSION, --turn ID and --everything")
    if everything and user is None:
        fail("--everything needs --user")
    said = {"session_id": session, "turn_id": turn, "user": user, "everything": everything, "rebuild": rebuild}
    asked = {name: what for name, what in said.items() if what is not None}
    body = call("POST", "/v1/admin/forget", config, data_dir, json=asked)
    whose = f"session {body['session_id']}" if body["session_id"] else f"user {user}" if everything else "it"
    print(f"{body['turns']} turns of {whose} are gone, and {body['pieces']} contents that no other turn had")
    if body["trained_in"]:
        print(f"versions trained on it: {', '.join(map(str, body['trained_in']))}")
    if body["began_with"]:
        print(f"policies began with their weights and keep them: {', '.join(map(str, body['began_with']))}")
    if rebuilt := body["rebuilt"]:
        for policy, number in rebuilt["serving"].items():
            of = "" if policy == SHARED_POLICY else f" of {policy}"
            print(f"version {number}{of} serves again, {rebuilt['waiting']} samples wait to be learned")
    if body["not_rebuilt"]:
        print(f"not rebuilt: {body['not_rebuilt']}")
    if not body["is_scrubbed"]:
        print("free space of the ledger may still hold parts of it: stop the server and run `openclaw-rl compact`")


@app.command("export-adapter", short_help="Copy a version's LoRA adapter to a folder.")
def export_adapter(
    folder: Annotated[Path, typer.Argument(help="New folder for the PEFT adapter.")],
    weight_version: Annotated[
        int | None, typer.Option("--version", help="Version to copy. Default: the version that serves.")
    ] = None,
    policy: PolicyOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Copy a version's LoRA adapter, in PEFT format, out of the data directory."""
    number = weight_version
    if number is None:
        params = {} if policy is None else {"policy": policy}
        number = call("GET", "/v1/admin/status", config, data_dir, params=params)["serving"]
    row = call("GET", f"/v1/admin/versions/{number}", config, data_dir)
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
