"""Commands that read the ledger's file themselves: they need no server, and do not disturb a running one."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from openclaw_rl.cli.options import (
    ConfigOption,
    DataDirOption,
    SetOption,
    fail,
    one_engine,
    parse_sets,
    settings_of,
    target,
)
from openclaw_rl.data_dir import DataDir
from openclaw_rl.errors import OpenClawRLError

app = typer.Typer()


@app.command(short_help="Train from the ledger, offline.")
def replay(
    out: Annotated[Path, typer.Argument(help="New folder for the PEFT adapter, metrics.jsonl and replay.json.")],
    method: Annotated[
        str | None, typer.Option(help="Training method: binary_rl, opd or combine. Default: method.name.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Any model with the ledger's tokenizer and chat template. Default: model.path.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the first adapter and of the order: equal seeds give equal adapters.")
    ] = 0,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step. Default: training.batch_size.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Number of times that each sample is trained on.")] = 1,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Stop after this number of steps.")] = None,
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="Shuffle the samples. Default: in the order of time.")
    ] = False,
    user: Annotated[str | None, typer.Option(help="Only the turns of this user.")] = None,
    session: Annotated[str | None, typer.Option(help="Only the turns of this session.")] = None,
    engine_url: Annotated[
        str | None,
        typer.Option(
            help="For opd and combine: URL of a running engine with this model. Default: start the embedded engine."
        ),
    ] = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    sets: SetOption = None,
) -> None:
    """Train from the ledger, offline, with another method, model or setting.

    The command reads one snapshot of the ledger, also while a server runs, and does not change the ledger. The method
    scores every turn again that has a next message or feedback. It takes verdicts and feedback as recorded, and
    demonstrations as they are. binary_rl needs no engine; opd and combine need one for the teacher.

    The new folder holds an adapter that PEFT and SGLang load, one line of metrics per step, and a report of this run.
    """
    overrides: dict[str, Any] = {"trainer.seed": seed}
    named = {
        "data_dir": None if data_dir is None else str(data_dir),
        "method.name": method,
        "model.path": model,
        "training.batch_size": batch_size,
    }
    overrides |= {key: value for key, value in named.items() if value is not None}
    if engine_url is not None:
        overrides |= one_engine(engine_url)
    settings = settings_of(config, overrides | parse_sets(sets))
    from openclaw_rl import log
    from openclaw_rl.offline.replay import Plan
    from openclaw_rl.offline.replay import replay as run_replay

    log.configure("warning", settings.log_format)
    plan = Plan(out, epochs=epochs, max_steps=max_steps, is_shuffled=shuffle, user=user, session_id=session)
    try:
        report = run_replay(settings, plan, _progress)
    except OpenClawRLError as error:
        fail(str(error))
    except ExceptionGroup as group:
        errors, _ = group.split(OpenClawRLError)
        if errors is None:
            raise
        fail(str(_first(errors)))
    print(f"{report.steps} steps on {report.samples} samples; the adapter is in {out}")
    for reason, count in report.left_out.items():
        print(f"  {count} turns left out: {reason}")


@app.command("backup", short_help="Copy the ledger, also while a server runs.")
def backup_ledger(
    path: Annotated[Path, typer.Argument(help="New file for the copy.")],
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Copy the ledger, whole and consistent, also while a server runs.

    Pictures of chats go to a folder beside the copy: PATH.pictures. To restore the copy: stop the server, replace
    ledger.sqlite3 and ledger.sqlite3.pictures in the data directory with both, and delete ledger.sqlite3-wal and
    ledger.sqlite3-shm.
    """
    from openclaw_rl.ledger.snapshot import backup

    try:
        size = backup(DataDir.of(target(config, data_dir).data_dir).ledger, path)
    except OpenClawRLError as error:
        fail(str(error))
    print(f"the ledger is in {path} ({size / 2**20:.1f} MB)")


@app.command(short_help="Rewrite the ledger's file without its free space.")
def compact(config: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Rewrite the ledger's file without its free space, where deleted text may still be readable.

    Stop the server first.
    """
    from openclaw_rl.ledger.snapshot import compact as compact_file

    try:
        before, after = compact_file(DataDir.of(target(config, data_dir).data_dir).ledger)
    except OpenClawRLError as error:
        fail(str(error))
    print(f"the ledger had {before / 2**20:.1f} MB, and has {after / 2**20:.1f} MB")


@app.command("export", short_help="Write the ledger's turns or samples to a file.")
def export_rows(
    path: Annotated[Path, typer.Argument(help="New file for the rows.")],
    what: Annotated[
        str, typer.Option(help="`turns`: messages, verdict and state; `samples`: the tokens that a trainer gets.")
    ] = ("turns"),
    user: Annotated[str | None, typer.Option(help="Only the rows of this user. Default: of all users.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="Only the rows that this policy learns from, such as `user:NAME` or `policy`.")
    ] = None,
    format: Annotated[
        str, typer.Option(help='`jsonl`, or `parquet`, which needs pip install "openclaw-rl[export]".')
    ] = "jsonl",
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Write the ledger's turns or samples to a file, oldest first, for your own tools.

    The command reads one snapshot of the ledger, also while a server runs, and does not change the ledger. JSONL has
    one JSON object per line; Parquet has the same columns. The file holds the text of chats, so only you can read it.
    """
    if what not in ("turns", "samples"):
        fail(f"--what {what}: turns or samples")
    if format not in ("jsonl", "parquet"):
        fail(f"--format {format}: jsonl or parquet")
    from openclaw_rl.ledger.snapshot import Snapshot
    from openclaw_rl.offline.export import export

    ledger = DataDir.of(target(config, data_dir).data_dir).ledger
    try:
        with Snapshot.of(ledger) as snapshot:
            if policy is not None and policy not in (known := snapshot.policies()):
                fail(f"--policy {policy}: this ledger has {', '.join(known)}")
        count = export(
            ledger,
            path,
            what=what,  # type: ignore[arg-type]
            format=format,  # type: ignore[arg-type]
            user=user,
            policy=policy,
            on_rows=lambda n: _progress(f"{n} {what}"),
        )
    except OpenClawRLError as error:
        fail(str(error))
    print(f"{count} {what} are in {path}")


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _progress(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
