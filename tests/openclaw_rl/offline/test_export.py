"""Turns and samples as files: every row of the ledger is there, in both formats; a running server is not disturbed."""

import json
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from practising import practice
from turns import make_request, make_turn, serve_turn

from openclaw_rl.errors import LedgerError, LedgerMismatch, SettingsError
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.offline.export import export
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.types import DropReason, Feedback, HintTerm, NextState, Sample, Verdict, VersionRun

TOOLS = '[{"type":"function","function":{"name":"f"}}]'


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    """Yield a ledger that is open while the test exports: one trained-on turn with every field, a demonstration, one
    dropped turn.
    """
    ledger = await Ledger.open(
        tmp_path / "l.sqlite", identity=Identity("base", "tokenizer", "tiny"), training=TrainingSettings()
    )
    runs = (VersionRun(0, 1), VersionRun(3, 1))
    for name, drop in (("full", None), ("dropped", DropReason.CANCELLED)):
        request = make_request(name, text="Grüße\n漢", tools_json=TOOLS, prompt=tuple(range(600)), step=2)
        ids, log_probs, mask = (7, 70_000), (-0.5, -0.25), (True, False)
        turn = make_turn(name, ids=ids, log_probs=log_probs, mask=mask, runs=runs, drop=drop)
        await serve_turn(ledger, request, turn)
    await ledger.pair("full", NextState((Message(role="user", content="no"),), ("👎",)), by_request_id="x")
    await ledger.record_verdict("full", Verdict(-1, (-1, None), "llm", "why"))
    sample = Sample(
        "full",
        tuple(range(600)),
        (7, 70_000),
        (True, False),
        (-0.5, -0.25),
        runs,
        0.7,
        reward=-1.0,
        teacher_log_probs=(-1.0, -2.0),
        student_log_probs=(-0.5, -0.125),
        scored_version=3,
        hint=HintTerm(text="h"),
    )
    await ledger.record_sample(sample)
    said = Feedback("f", "full", 5.0, -0.5, None, "better")
    await ledger.record_feedback(said, user="ann", demonstration=(9,))
    yield ledger
    await ledger.aclose()


@pytest.fixture
def path(ledger: Ledger, tmp_path: Path) -> Path:
    return tmp_path / "l.sqlite"


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_row_tells_all_of_a_turn(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "turns.jsonl"
    assert export(path, out, what="turns", format="jsonl") == 3
    full, dropped, demonstration = lines(out)
    assert json.loads(str(full["messages_json"])) == [{"role": "user", "content": "Grüße\n漢"}]
    assert (full["user"], full["session_id"], full["step"], full["tools_json"]) == ("ann", "s", 2, TOOLS)
    assert json.loads(str(full["sampling_json"]))["temperature"] == 0.7
    assert (full["state"], full["verdict"], full["verdict_source"], full["reward"]) == ("sampled", -1, "feedback", -1.0)
    assert json.loads(str(full["next_state_json"])) == [{"role": "user", "content": "no"}]
    assert (full["reactions"], full["response_ids"], full["token_versions"]) == (["👎"], [7, 70_000], [0, 3])
    assert (full["prompt_ids"], full["loss_mask"]) == (list(range(600)), [True, False])
    assert json.loads(str(full["feedback_json"]))[0]["demonstration"] == "better"
    assert (dropped["state"], dropped["reason"], dropped["next_state_json"]) == ("dropped", "cancelled", None)
    assert (demonstration["turn_id"], demonstration["is_demonstration"]) == ("full-demo", True)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


async def test_practice_is_marked_in_both_files(ledger: Ledger, path: Path, tmp_path: Path) -> None:
    (wish,) = await ledger.wishes()
    replies = [practice("full", wish.wish_id, name="again"), practice(None, None, name="anchor")]
    assert await ledger.record_practice(replies) == 2
    out, samples = tmp_path / "turns.jsonl", tmp_path / "samples.jsonl"
    export(path, out, what="turns", format="jsonl")
    shown = {row["turn_id"]: (row["practice"], row["practice_of"], row["wish_id"]) for row in lines(out)}
    assert (shown["again"], shown["anchor"]) == (("wish", "full", wish.wish_id), ("anchor", None, None))
    assert shown["full"] == shown["full-demo"] == (None, None, None)
    export(path, samples, what="samples", format="jsonl")
    assert {row["sample_id"]: row["practice"] for row in lines(samples)} == {
        "full": None,
        "full-demo": None,
        "again": "wish",
        "anchor": "anchor",
    }


def test_a_row_tells_all_of_a_sample(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    assert export(path, out, what="samples", format="jsonl") == 2
    full, demonstration = lines(out)
    assert (full["sample_id"], full["reward"], full["temperature"]) == ("full", -1.0, 0.7)
    assert (full["teacher_log_probs"], full["student_log_probs"]) == ([-1.0, -2.0], [-0.5, -0.125])
    assert (full["scored_version"], full["extra_json"]) == (3, '{"hint": {"text": "h"}}')
    assert (demonstration["response_ids"], demonstration["reward"]) == ([9], None)


@pytest.mark.parametrize("what", ["turns", "samples"])
def test_parquet_has_the_same_rows(path: Path, tmp_path: Path, what: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out, as_lines = tmp_path / "rows.parquet", tmp_path / "rows.jsonl"
    counts = [
        export(path, file, what=what, format=format)  # type: ignore[arg-type]
        for file, format in ((out, "parquet"), (as_lines, "jsonl"))
    ]
    assert counts[0] == counts[1]
    assert parquet.read_table(out).to_pylist() == lines(as_lines)


def test_without_pyarrow_parquet_is_refused_in_plain_words(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SettingsError, match=r"openclaw-rl\[export\]"):
        export(path, tmp_path / "x.parquet", what="turns", format="parquet")
    assert not (tmp_path / "x.parquet").exists()


def test_nothing_is_overwritten_and_what_is_no_ledger_is_named(path: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(SettingsError, match="there: File exists"):
        export(path, tmp_path / "there", what="turns", format="jsonl")
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(LedgerError, match="no ledger at"):
        export(tmp_path / "none", tmp_path / "out", what="turns", format="jsonl")
    (tmp_path / "empty").touch()
    with pytest.raises(LedgerMismatch, match="has schema 0"):
        export(tmp_path / "empty", tmp_path / "out", what="turns", format="jsonl")


async def test_a_closed_ledger_is_read_too_and_left_as_it_was(ledger: Ledger, path: Path, tmp_path: Path) -> None:
    await ledger.aclose()
    before = path.read_bytes()
    assert export(path, tmp_path / "out", what="turns", format="jsonl") == 3
    assert path.read_bytes() == before


async def test_an_export_of_one_user_has_no_row_of_another(ledger: Ledger, tmp_path: Path) -> None:
    await serve_turn(ledger, make_request("bobs", user="bob"), make_turn("bobs"))
    path = tmp_path / "l.sqlite"
    everything = export(path, tmp_path / "all.jsonl", what="turns", format="jsonl")
    rows = {}
    for user in ("ann", "bob", "nobody"):
        export(path, tmp_path / f"{user}.jsonl", what="turns", format="jsonl", user=user)
        rows[user] = [json.loads(line) for line in (tmp_path / f"{user}.jsonl").read_text().splitlines()]
    assert [row["turn_id"] for row in rows["bob"]] == ["bobs"]
    assert {row["user"] for row in rows["ann"]} == {"ann"}
    assert (len(rows["ann"]) + 1, rows["nobody"]) == (everything, [])
    assert export(path, tmp_path / "s.jsonl", what="samples", format="jsonl", user="bob") == 0
