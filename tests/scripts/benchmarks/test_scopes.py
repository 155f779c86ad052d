"""Prompts outside a wish's scope, exact answers, and the report of the practice experiment."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.learning.practice_plot import plot
from benchmarks.learning.practice_report import load, report
from benchmarks.learning.scope_measures import Line, turns_until_learned
from benchmarks.learning.scopes import Exact, anchors, chat, elsewhere, exact, near_forms, tool
from openclaw_rl.offline.personas import topics


def test_no_anchor_is_a_prompt_that_is_measured() -> None:
    measured = {prompt for some in elsewhere().values() for prompt in some} | {one.question for one in exact()}
    measured |= {*chat(), *(tool().question.format(value) for value in tool().values)}
    assert not measured & set(anchors("mixed"))
    assert set(anchors("mixed")) == set(anchors("like")) | set(anchors("other"))
    assert len(elsewhere()) == 5
    assert all(form.format("boil an egg").count("boil an egg") == 1 for form in near_forms())
    assert not {topic.text for topic in topics("train")} & measured


@pytest.mark.parametrize(
    ("reply", "is_right"),
    [("It is Rome.", True), ("ROME", True), ("Romeo lived there.", False), ("", False), ("It is 7, or seven.", False)],
)
def test_an_exact_answer_is_a_word_of_the_reply(reply: str, is_right: bool) -> None:
    assert Exact("What is the capital of Italy?", ("rome",)).is_right(reply) is is_right


@pytest.mark.parametrize(
    ("passes", "turns"),
    [("1111", 4.0), ("0000", None), ("110", None), ("0111", 4.0 + 6 / 4), ("01110", 4.0 + (1 + 0 + 4 + 3 + 2) / 5)],
)
def test_turns_until_three_in_a_row(passes: str, turns: float | None) -> None:
    found = turns_until_learned(4, passes)
    assert found == (None if turns is None else pytest.approx(turns))


def line(arm: str, update: int, score: float, seed: int = 0, **changes: object) -> Line:
    columns = ("score", "relevance", "kl", "fluency", "on_topic", "words", "repeats")
    kinds = {"story": {"words": 100.0, "kl": 0.0, "fluency": -1.0, "ended": 1.0}}
    step = {"update": 1, "shares": {"short": 1.3}, "own_shares": {}, "passed": 0.5, "score": 0.25}
    steps = [step | {"update": n, "shares": {"short": 0.5 * n}} for n in (1, 2, 3)] if update else []
    values = {"preference": "short", "wishes": ["short"], "passes": "1110", "complaints": 4 if update else 0}
    return Line(
        arm=arm,
        seed=seed,
        update=update,
        quality=dict.fromkeys(columns, score),
        near={"score": 0.5, "kl": 0.1},
        elsewhere=kinds,
        exact=1.0,
        steps=steps,
        **(values | changes),  # type: ignore[arg-type]
    )


def test_the_report_compares_arms_with_the_base_and_tries_stops(tmp_path: Path) -> None:
    rows = [
        line("base", 0, 0.0),
        line("combined", 9, 0.8),
        line("combined", 9, 0.6, seed=1),
        line("combined", 18, 0.7, wishes=["short", "no_lists"]),
        line("combined", 18, 0.9, wishes=["short", "no_lists"], preference="no_lists"),
    ]
    text = report(rows, {"device": "none"})
    table = {row.split(" | ")[0]: row for row in text.splitlines() if row.startswith("| ")}
    assert "| combined | 9 | 2 | 0.70 (0.20) |" in text
    assert "+0%, KL 0.00" in text
    assert "0.25 (u3)" in text
    assert table["| combined"].startswith("| combined")
    assert plot(rows, tmp_path / "curves")
    assert (tmp_path / "curves.svg").read_text().count("</svg>") == 1


def test_the_report_shows_a_long_chat_tool_calls_and_word_problems_beside_the_base() -> None:
    at_base = line("base", 0, 0.0, chat={"words": 50.0, "kl": 0.0}, tool={"calls": 0.75, "forced": 0.0}, problems=0.04)
    after = {"chat": {"words": 40.0, "kl": 0.12}, "tool": {"calls": 0.5, "forced": -0.031}, "problems": 0.02}
    older = line("opd", 9, 0.5)
    text = report([at_base, line("combined", 9, 0.5, **after), older], {})
    table = text.split("## Elsewhere")[1].split("\n## ")[0]
    rows = {row.split(" | ")[0]: row for row in table.splitlines() if row.startswith("| ")}
    assert "| 50 words | 0.75 | 1.00 | 0.04 |" in rows["| base"]
    assert "| -20%, KL 0.12 | 0.50, forced -0.03 | 1.00 | 0.02 |" in rows["| combined"]
    assert "| – | – | 1.00 | – |" in rows["| opd"]


def test_the_report_of_drift_sets_both_measures_side_by_side() -> None:
    arm = "combined, 4 corrections, shipped anchors"
    heard = [{"update": n, "shares": {}, "score": None, "complained": c} for n, c in enumerate((1.0, None, 0.5, 0.25))]
    before = line(arm, 17, 0.9, chat={"words": 9.0, "kl": 0.1})
    after = replace(line(arm, 37, 0.8, chat={"words": 9.0, "kl": 0.3}), steps=heard, conversations=150)
    text = report([line("base", 0, 0.0), before, after], {})
    table = text.split("## Drift")[1].split("\n## ")[0]
    (row,) = [row for row in table.splitlines() if row.startswith(f"| {arm}")]
    assert row.startswith(f"| {arm} | short | 1 | 150 | 0.50 → 0.25 | 0.90 → 0.80 |")
    assert "| 0.10 → 0.30 |" in row
    assert f"| {arm}, 150 conversations later | short | 1 |" in text
    assert "| 5.5 |" in text
    assert "| 155.5 |" in text  # turns until learned: the corrections, and the later conversations
    assert "## Drift" not in report([before], {})


def test_lines_of_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(json.dumps(asdict(line("combined", 9, 0.5))) + "\n\n")
    assert load([file]) == [line("combined", 9, 0.5)]
