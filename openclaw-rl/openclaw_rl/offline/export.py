"""Export of the ledger's turns or samples to a file for the owner's own tools: JSON lines, or Parquet.

One row is one turn, or one sample, oldest first; both formats have the same columns. The pictures of the rows, named by
SHA-256 in the order of the prompt, are copied to a folder beside the file: `OUT.pictures/`. File and folder hold the
content of chats, so they are readable for their owner only. Rows are read and written one after the other, from one
snapshot, so an export of any size needs little memory.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, Literal, get_args, get_type_hints

import orjson

from openclaw_rl.errors import OpenClawRLError, SettingsError
from openclaw_rl.ledger import pictures
from openclaw_rl.ledger.records import TurnRecord
from openclaw_rl.ledger.snapshot import Snapshot
from openclaw_rl.messages import Message
from openclaw_rl.types import Ids, LogProbs

What = Literal["turns", "samples"]
Format = Literal["jsonl", "parquet"]
GROUP = 1000
"""Rows of a Parquet row group, and between two calls of `on_rows`."""


@dataclass(frozen=True, slots=True)
class TurnRow:
    """Columns of one turn. `*_json` is JSON text; token columns have one entry per token.

    `outcome`, `step_reward` and `advantage` belong to a step of a registered episode.
    `practice` is `wish` or `anchor` for a practice reply, which no user asked for.
    """

    turn_id: str
    user: str
    policy: str
    session_id: str | None
    task: str | None
    episode: str | None
    step: int | None
    state: str
    reason: str | None
    finished_at: float
    finish_reason: str
    messages_json: str
    tools_json: str | None
    sampling_json: str
    reply_json: str
    next_state_json: str | None
    reactions: tuple[str, ...]
    verdict: int | None
    verdict_source: str | None
    votes: tuple[int | None, ...]
    rationale: str | None
    feedback_json: str
    reward: float | None
    outcome: float | None
    step_reward: float | None
    advantage: float | None
    is_demonstration: bool
    practice: str | None
    practice_of: str | None
    wish_id: int | None
    trained_in: int | None
    prompt_ids: Ids
    pictures: tuple[str, ...]
    response_ids: Ids
    rollout_log_probs: LogProbs
    loss_mask: tuple[bool, ...]
    token_versions: Ids


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Columns of one sample, as a trainer gets it, with its state."""

    sample_id: str
    policy: str
    state: str
    reason: str | None
    trained_in: int | None
    is_demonstration: bool
    practice: str | None
    is_tool_turn: bool
    temperature: float
    reward: float | None
    advantage: float | None
    episode: str | None
    scored_version: int | None
    extra_json: str | None
    prompt_ids: Ids
    pictures: tuple[str, ...]
    response_ids: Ids
    rollout_log_probs: LogProbs
    teacher_log_probs: LogProbs | None
    student_log_probs: LogProbs | None
    loss_mask: tuple[bool, ...]
    token_versions: Ids


Row = TurnRow | SampleRow


def export(
    ledger: Path,
    out: Path,
    *,
    what: What,
    format: Format,
    user: str | None = None,
    policy: str | None = None,
    on_rows: Callable[[int], None] = lambda _: None,
) -> int:
    """Write the file and return its number of rows. Raises LedgerError, SettingsError (no pyarrow; the file exists).

    user: the owner of the rows, policy: the one that learns from them; None: all rows.
    """
    if format == "parquet":
        _pyarrow()  # before the file is made
    if pictures.folder_of(out).exists():  # before the rows are written
        raise SettingsError(f"{pictures.folder_of(out)}: File exists")
    with Snapshot.of(ledger) as snapshot:
        try:
            descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise SettingsError(f"{out}: {error.strerror}") from error
        try:
            with os.fdopen(descriptor, "wb") as file:
                records = snapshot.turns(user=user, policy=policy)
                rows: Iterator[Row] = _turn_rows(records) if what == "turns" else _sample_rows(records)
                kind: type[Row] = TurnRow if what == "turns" else SampleRow
                shown: set[str] = set()
                count = (_jsonl if format == "jsonl" else _parquet)(file, kind, _noting(rows, shown), on_rows)
            pictures.copy_files(shown, pictures.folder_of(ledger), pictures.folder_of(out))
            return count
        except OSError as error:
            out.unlink(missing_ok=True)
            raise SettingsError(f"{out}: {error.strerror}") from error
        except OpenClawRLError:
            out.unlink(missing_ok=True)
            raise


def _noting(rows: Iterator[Row], shown: set[str]) -> Iterator[Row]:
    """Yield the rows, and add the pictures of each to `shown`."""
    for row in rows:
        shown.update(row.pictures)
        yield row


def _turn_rows(records: Iterator[TurnRecord]) -> Iterator[TurnRow]:
    for record in records:
        request, turn, verdict, sample = record.request, record.turn, record.verdict, record.sample
        yield TurnRow(
            turn_id=turn.turn_id,
            user=request.scope.user,
            policy=request.scope.policy,
            session_id=request.scope.session_id,
            task=request.task,
            episode=request.episode,
            step=request.step,
            state=str(record.state),
            reason=_reason(record),
            finished_at=turn.finished_at,
            finish_reason=turn.finish_reason,
            messages_json=_json(request.messages),
            tools_json=request.tools_json,
            sampling_json=orjson.dumps(request.sampling).decode(),
            reply_json=turn.reply.model_dump_json(exclude_unset=True),
            next_state_json=None if record.next_state is None else _json(record.next_state.messages),
            reactions=() if record.next_state is None else record.next_state.reactions,
            verdict=None if verdict is None else verdict.value,
            verdict_source=None if verdict is None else verdict.source,
            votes=() if verdict is None else verdict.votes,
            rationale=None if verdict is None else verdict.rationale,
            feedback_json=orjson.dumps(record.feedback).decode(),
            reward=None if sample is None else sample.reward,
            outcome=record.outcome,
            step_reward=record.step_reward,
            advantage=None if sample is None else sample.advantage,
            is_demonstration=sample is not None and sample.is_demonstration,
            practice=_practice(record),
            practice_of=record.practice_of,
            wish_id=record.wish_id,
            trained_in=record.trained_in,
            prompt_ids=tuple(request.prompt_ids),
            pictures=tuple(picture.digest for picture in request.pictures),
            response_ids=turn.response_ids,
            rollout_log_probs=turn.rollout_log_probs,
            loss_mask=turn.loss_mask,
            token_versions=tuple(run.weight_version for run in turn.versions for _ in range(run.length)),
        )


def _sample_rows(records: Iterator[TurnRecord]) -> Iterator[SampleRow]:
    for record in records:
        sample = record.sample
        if sample is None:
            continue
        yield SampleRow(
            sample_id=sample.sample_id,
            policy=record.request.scope.policy,
            state=str(record.state),
            reason=_reason(record),
            trained_in=record.trained_in,
            is_demonstration=sample.is_demonstration,
            practice=_practice(record),
            is_tool_turn=sample.is_tool_turn,
            temperature=sample.temperature,
            reward=sample.reward,
            advantage=sample.advantage,
            episode=record.request.episode,
            scored_version=sample.scored_version,
            extra_json=None if sample.hint is None else sample.hint.to_json(),
            prompt_ids=sample.prompt_ids,
            pictures=sample.pictures,
            response_ids=sample.response_ids,
            rollout_log_probs=sample.rollout_log_probs,
            teacher_log_probs=sample.teacher_log_probs,
            student_log_probs=sample.student_log_probs,
            loss_mask=sample.loss_mask,
            token_versions=tuple(run.weight_version for run in sample.versions for _ in range(run.length)),
        )


def _reason(record: TurnRecord) -> str | None:
    return None if record.reason is None else str(record.reason)


def _practice(record: TurnRecord) -> str | None:
    return None if record.practice is None else str(record.practice)


def _json(messages: tuple[Message, ...]) -> str:
    return f"[{','.join(message.model_dump_json(exclude_unset=True) for message in messages)}]"


def _jsonl(file: BinaryIO, _: type[Row], rows: Iterator[Row], on_rows: Callable[[int], None]) -> int:
    count = 0
    for row in rows:
        file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        count += 1
        if count % GROUP == 0:
            on_rows(count)
    return count


def _parquet(file: BinaryIO, kind: type[Row], rows: Iterator[Row], on_rows: Callable[[int], None]) -> int:
    arrow, parquet = _pyarrow()
    hints = get_type_hints(kind)
    schema = arrow.schema([(field.name, _arrow_type(arrow, hints[field.name])) for field in fields(kind)])
    count = 0
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        while group := list(islice(rows, GROUP)):
            writer.write_table(arrow.Table.from_pylist([asdict(row) for row in group], schema=schema))
            count += len(group)
            on_rows(count)
    return count


def _arrow_type(arrow: Any, hint: Any) -> Any:
    """Return the column type of a field's type; every column may hold None."""
    if isinstance(hint, UnionType):
        (hint,) = [kind for kind in get_args(hint) if kind is not NoneType]
    scalar = {str: "string", int: "int64", float: "float64", bool: "bool_"}
    if hint in scalar:
        return getattr(arrow, scalar[hint])()
    token = {Ids: "int32", LogProbs: "float32"}
    return arrow.list_(getattr(arrow, token[hint])() if hint in token else _arrow_type(arrow, get_args(hint)[0]))


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise SettingsError(
            'Parquet needs pyarrow: pip install "openclaw-rl[export]", or export with --format jsonl'
        ) from error
