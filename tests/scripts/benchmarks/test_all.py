"""Rows of all figures beside their aims and limits, the page that is written from them, and columns of growth."""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from processes_below import lives

from benchmarks import all as every
from benchmarks.growth import Column, ledger

TREE = {"figures": {"ms": {"ours": [3.0, 1.0, 2.0], "relay": [0.5]}}, "flag": True}
PLACE = ("figures", "ms", "ours")


def figure(**more: object) -> every.Figure:
    return every.Figure("a figure", "b", PLACE, **more)  # type: ignore[arg-type]


def test_rounds_give_a_median_and_their_spread() -> None:
    assert every.found(TREE, PLACE) == (2.0, 1.0, 3.0)
    assert every.found(TREE, ("figures", "ms", "ours", 1)) == (1.0, 1.0, 1.0)
    assert every.found(TREE, ("figures", "s")) is None
    assert every.found(TREE, ("flag",)) is None
    assert every.found(None, PLACE) is None


@pytest.mark.parametrize(
    ("more", "met", "ratio"),
    [
        ({"aim": 2.0}, True, None),
        ({"aim": 1.9}, False, None),
        ({"aim": 2.1, "at_least": True}, False, None),
        ({"aim": 4.0, "limit": "relay", "limit_where": ("figures", "ms", "relay"), "of_ratio": True}, True, 4.0),
        ({"aim": 3.9, "limit": "relay", "limit_where": ("figures", "ms", "relay"), "of_ratio": True}, False, 4.0),
        ({"aim": 1.0, "limit": "LiteLLM", "limit_where": ("figures", "ms", "LiteLLM"), "of_ratio": True}, None, None),
        ({}, None, None),
    ],
)
def test_a_row_compares_the_figure_or_its_ratio_with_the_aim(more, met, ratio) -> None:
    row = every.row_of(figure(**more), {"b": TREE}, {})
    assert (row.value, row.met, row.ratio) == (2.0, met, ratio)


def test_a_row_that_was_not_measured_tells_why() -> None:
    assert every.row_of(figure(aim=1.0), {}, {"b": "ended with 1"}).note == "ended with 1"
    assert every.row_of(figure(aim=1.0), {}, {}).note == "not measured"
    assert every.row_of(figure(needs="a card"), {}, {}).note == "a card"
    assert every.row_of(figure(aim=1.0), {}, {}).met is None


def test_every_figure_names_a_benchmark_or_what_it_needs() -> None:
    folder = Path(every.__file__).parent
    for each in every.FIGURES:
        is_ours = (folder / f"{each.benchmark}.py").is_file()
        assert each.needs or is_ours or each.benchmark in (f"{every.CHAT}headers", f"{every.CHAT}none"), each.name
        assert bool(each.limit) == bool(each.limit_where)
    assert len({each.name for each in every.FIGURES}) == len(every.FIGURES)


def test_the_real_openclaw_chats_where_it_has_a_folder(tmp_path: Path) -> None:
    plain = {"only": "", "rounds": 5, "litellm": None, "router": None}
    without, beside = (
        dict(every.commands(argparse.Namespace(**plain, openclaw=folder), tmp_path)) for folder in (None, "claw")
    )
    assert beside.keys() - without.keys() == {"openclaw_chat-headers", "openclaw_chat-none"}
    assert beside.keys() == {each.benchmark for each in every.FIGURES if each.benchmark} | {"growth"}
    flags = ["--identity", "none", "--out", str(tmp_path / "openclaw_chat-none.json")]
    assert beside["openclaw_chat-none"] == ["e2e.openclaw_chat", "claw", *flags]
    assert without["loop_latency"] == ["benchmarks.loop_latency", "--out", str(tmp_path / "loop_latency.json")]


def test_the_page_is_written_from_the_files_of_the_benchmarks(tmp_path: Path, monkeypatch, capsys) -> None:
    serving = {"last feedback to serving, s": 14.0, "inter-token gap p50 / p99, ms": {"in the publication": [50, 200]}}
    (tmp_path / "loop_latency.json").write_text(json.dumps(serving))
    column = Column.of("ms", ("1 session", 2.0), ("10 sessions", 2.1))
    (tmp_path / "growth.json").write_text(json.dumps({"columns": [column.as_json()]}))
    monkeypatch.setattr(sys, "argv", ["all", "--read", "--folder", str(tmp_path)])
    every.main()
    text = (tmp_path / every.PAGE).read_text()
    assert text in capsys.readouterr().out
    assert "| last feedback to serving, 8 short chats, s | 14 |  | – | ≤ 15 | met |" in text
    assert "| gap between tokens near a swap, p99, ms | 200 |  | – | ≤ 100 | **not met** |" in text
    assert "| ms | 1 session | 2 | 10 sessions | 2.1 | 1.05 | flat |" in text
    whole = json.loads((tmp_path / every.ROWS).read_text())
    assert text == every.page(whole["about"], whole["rows"]) + every.growth_table(whole["growth"])
    assert [row["figure"] for row in whole["rows"]] == [each.name for each in every.FIGURES]


def test_a_benchmark_that_fails_leaves_its_reason(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "loop_latency.json").write_text(json.dumps({"last feedback to serving, s": 1.0}))
    monkeypatch.setattr(sys, "argv", ["all", "--only", "no_such", "--folder", str(tmp_path)])
    monkeypatch.setattr(
        every, "commands", lambda options, folder: [("loop_latency", ["benchmarks.loop_latency", "--no-such-flag"])]
    )
    every.main()
    assert "| last feedback to serving, 8 short chats, s | – | " in capsys.readouterr().out
    row = next(row for row in json.loads((tmp_path / every.ROWS).read_text())["rows"] if row["value"] is None)
    assert row["met"] is None
    notes = {row["benchmark"]: row["note"] for row in json.loads((tmp_path / every.ROWS).read_text())["rows"]}
    assert notes["loop_latency"] == "ended with 2"


def test_a_benchmark_that_is_cut_leaves_no_process(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("")
    (tmp_path / "benchmarks" / "slow.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(every, "__file__", str(tmp_path / "benchmarks" / "all.py"))
    monkeypatch.setattr(
        every, "commands", lambda options, folder: [("slow", ["benchmarks.slow", str(tmp_path / "pid")])]
    )
    ends = subprocess.Popen.wait

    def cut(process: "subprocess.Popen[bytes]", timeout: float | None = None) -> int:
        """Let the time be over in the moment in which the benchmark has its child."""
        if timeout is None:
            return ends(process)
        while not ((tmp_path / "pid").is_file() and (tmp_path / "pid").read_text()):
            time.sleep(0.05)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", cut)
    assert every.run(argparse.Namespace(minutes=0.1), tmp_path) == {"slow": "not done in 0.1 minutes"}
    child = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 60
    while lives(child):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_column_is_flat_or_explained_as_far_as_its_cause_grew() -> None:
    small, large = ("1", 1.0), ("10", 9.0)
    assert Column.of("a", small, ("10", 1.2)).flat
    assert Column.of("a", small, large, grew=10, cause="linear").explained == "linear"
    assert Column.of("a", small, ("10", 20.0), grew=10, cause="linear").explained.startswith("NOT EXPLAINED")
    assert Column.of("a", small, large).explained.startswith("NOT EXPLAINED")
    assert not asdict(Column.of("a", small, large))["flat"]


def test_the_ledgers_columns_come_from_its_own_benchmark() -> None:
    columns = ledger(every.RESULTS / "ledger_scale.json")
    assert {"ledger: pair, ms", "ledger: lease, ms"} <= {column.figure for column in columns}
    assert all(column.flat for column in columns)
