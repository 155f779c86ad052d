"""Measures and report of the learning benchmark on held-out replies."""

import pytest

from benchmarks.learning.experiment import Record
from benchmarks.learning.measures import repeats_question
from benchmarks.learning.report import report


@pytest.mark.parametrize(
    ("reply", "is_repeated"),
    [
        ("How do I boil an egg? How do I boil an egg!", True),
        ("do i boil an egg, you ask", True),
        ("To boil an egg, lower it into boiling water.", False),
        ("I do boil how an egg", False),
        ("", False),
    ],
)
def test_five_words_of_the_question_in_a_row_repeat_it(reply: str, is_repeated: bool) -> None:
    assert repeats_question("How do I boil an egg?", reply) is is_repeated


def test_a_short_question_is_repeated_as_a_whole() -> None:
    assert repeats_question("Why so?", "Why so? Because.")
    assert not repeats_question("Why so?", "So why not?")


def test_the_report_shows_what_was_said_last_and_takes_older_rows() -> None:
    columns = ("score", "kl", "fluency", "relevance", "on_topic", "words", "lists", "echoes")
    older = dict.fromkeys(columns, 0.5)
    said = {"How do I boil an egg?": "In water."}
    rows = [
        Record("binary_rl", "short", 0, "script", 4, older | {"repeats": 0.25}, replies={"Why?": "No."}),
        Record("binary_rl", "short", 0, "script", 8, older | {"repeats": 0.25}, replies=said),
        Record("opd", "short", 0, "script", 8, older),
    ]
    text = report(rows, {})
    assert "*How do I boil an egg?* In water." in text
    assert "No." not in text
    assert [line[-9:] for line in text.splitlines() if line.startswith("| opd")] == [" 0.50 | – |"[-9:]]
