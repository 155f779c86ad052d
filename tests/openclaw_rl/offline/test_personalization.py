"""The experiment of personalization: its people, its phases against the public API, and its table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from openclaw_rl.cli.main import app
from openclaw_rl.offline import personalization, personas
from openclaw_rl.offline.personalization import Plan, Result, Said, draw, interval, load, report, run
from openclaw_rl.offline.personas import ExperimentError, ModelPerson, Problem, RulePerson

LONG = "Take the {topic} and then go on, " + "and on, " * 40
PLAN = Plan(corrections=2, held_out=4, idle_s=60)


@dataclass
class FakeChat:
    """Server that answers at length until it was corrected twice and its user has rested."""

    asked: list[tuple[str | None, list[Mapping[str, str]]]] = field(default_factory=list)
    polls: int = 0

    def say(
        self, messages: Sequence[Mapping[str, str]], *, session: str | None, max_tokens: int | None = None
    ) -> tuple[str, bool, int]:
        self.asked.append((session, list(messages)))
        is_short = self.polls > 0 or messages[0]["role"] == "system"
        question = next(m["content"] for m in messages if m["role"] == "user")
        return (f"Do it so: {question}" if is_short else LONG.format(topic=question)), True, min(1, self.polls)

    def wishes(self) -> list[dict[str, Any]]:
        self.polls += 1
        rests = "learned" if self.polls > 1 else None
        return [{"state": "active", "rests": rests, "measured_in": 1, "learned": 0.5 * self.polls}]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeChat, Result]:
    monkeypatch.setattr(personalization, "_POLL_S", 0.0)
    monkeypatch.setattr(personalization, "_RESTS_S", -1.0)
    chat, told = FakeChat(), list[str]()
    person = RulePerson(personas.SHORT, 0)
    result = run(chat, person, PLAN, 0, "opd", told.append)  # type: ignore[arg-type]
    assert len(told) == len(result.events)
    return chat, result


def test_corrections_are_main_turns_and_questions_before_and_after_are_side_turns(
    done: tuple[FakeChat, Result],
) -> None:
    chat, result = done
    sides = [messages for session, messages in chat.asked if session is None]
    mains = [(session, messages) for session, messages in chat.asked if session is not None]
    assert (len(sides), len(mains), result.corrections, result.turns) == (12, 4, 2, 4)
    assert len({session for session, _ in mains}) == 2
    assert [len(messages) for _, messages in mains] == [1, 3, 1, 3]
    assert mains[1][1][-1]["content"] in {way for fault in personas.SHORT.complaints for way in fault.said}
    held_out = {messages[-1]["content"] for messages in sides}
    assert not held_out & {messages[0]["content"] for _, messages in mains}
    assert sum(messages[0]["role"] == "system" for messages in sides) == 4


def test_the_table_has_each_arm_and_the_corrections_until_three_in_a_row(
    done: tuple[FakeChat, Result], tmp_path: Path
) -> None:
    _, result = done
    assert result.scores("base") == [0.0] * 4
    assert result.scores("memory") == result.scores("learned") == [1.0] * 4
    assert result.turns_until_learned == 2
    (row,) = [line for line in report([result]).splitlines() if line.startswith("| short")]
    assert "| 0.00 (0.00–0.49) | 1.00 (0.51–1.00) | 1.00 (0.51–1.00) | 2 |" in row
    file = tmp_path / "r.json"
    file.write_text(json.dumps([asdict(result)]))
    assert load([file]) == [result]
    assert draw([result], tmp_path / "r.svg")
    assert "</svg>" in (tmp_path / "r.svg").read_text()


def test_a_rest_without_an_end_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(personalization, "_POLL_S", 0.0)
    chat = FakeChat()
    chat.wishes = lambda: [{"state": "active", "rests": None}]  # type: ignore[method-assign]
    plan = Plan(corrections=1, held_out=3, idle_s=0.01)
    result = run(chat, RulePerson(personas.SHORT, 1), plan, 1, "opd", lambda line: None)  # type: ignore[arg-type]
    assert result.events[-2]["event"] == "time is over"
    assert result.turns_until_learned is None


def test_a_file_of_other_things_is_refused(tmp_path: Path) -> None:
    for text in ("", "[]{", '[{"a": 1}]'):
        file = tmp_path / "x.json"
        file.write_text(text)
        with pytest.raises(ExperimentError, match="holds no results"):
            load([file])


@pytest.mark.parametrize(("scores", "text"), [([], "–"), ([1.0], "1.00 (0.21–1.00)"), ([0.0] * 96, "0.00 (0.00–0.04)")])
def test_intervals_hold_near_the_ends(scores: list[float], text: str) -> None:
    assert interval(scores) == text


PROBLEMS = tuple(Problem(f"{n}+1?", str(n + 1)) for n in range(4))


def test_a_model_plays_the_student_and_rates_the_replies() -> None:
    heard = []

    def ask(system: str, user: str) -> str:
        heard.append((system, user))
        return "It is stiff.\n\\boxed{0.75}" if "Rate" in system else "Done." if "casual" in user else "Less stiff."

    student = ModelPerson(personas.STUDENT, PROBLEMS, ask)
    assert not set(student.questions("train")) & set(student.questions("held_out"))
    question = student.questions("train")[0]
    assert student.answer(question, "**2**", has_ended=True, said=()) == "Less stiff."
    assert student.answer(question, "casual", has_ended=True, said=()) is None
    assert student.score(question, "casual", has_ended=True) == 0.75
    assert question in heard[-1][1]


def test_a_model_that_never_rates_ends_the_experiment() -> None:
    teacher = ModelPerson(personas.TEACHER, PROBLEMS, lambda system, user: "Fine.")
    with pytest.raises(ExperimentError, match="no rating"):
        teacher.score("q", "r", has_ended=True)


def test_turns_are_counted_to_the_first_streak() -> None:
    learned = [Said("q", "r", 1, score) for score in (1.0, 0.0, 1.0, 0.75, 1.0)]
    assert Result("short", 0, "opd", {}, learned=learned, corrections=4).turns_until_learned == 6


@pytest.mark.parametrize(
    ("reply", "is_right"),
    [("So 3 + 4 = 1,007.0", True), ("1007", True), ("1007 of 8", False), ("no number", False), ("-1007", False)],
)
def test_the_last_number_answers_a_word_problem(reply: str, is_right: bool) -> None:
    assert Problem("How many?", "1007").is_right(reply) is is_right


def test_word_problems_are_asked_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(personalization, "_POLL_S", 0.0)
    chat, posed = FakeChat(), (Problem("What is 3?", "3"), Problem("What is 4?", "5"))
    plan = Plan(corrections=0, held_out=3, idle_s=0)
    result = run(chat, RulePerson(personas.SHORT, 0), plan, 0, "opd", print, posed)  # type: ignore[arg-type]
    assert result.right == {"base": 0.5, "learned": 0.5}
    assert "| 0.50, 0.50 |" in report([result])


def test_the_command_reports_results_and_refuses_other_files(done: tuple[FakeChat, Result], tmp_path: Path) -> None:
    file, out = tmp_path / "r.json", tmp_path / "both"
    file.write_text(json.dumps([asdict(done[1])]))
    shown = CliRunner().invoke(app, ["experiment", "report", str(file), str(file), "--out", str(out)])
    assert "| short | opd | 2 | 2 |" in shown.output
    assert out.with_suffix(".md").read_text() in shown.output
    refused = CliRunner().invoke(app, ["experiment", "report", str(tmp_path / "none.json")])
    assert refused.exit_code == 2
    assert "holds no results" in refused.output


@pytest.mark.parametrize("person", ["student", "teacher"])
def test_a_person_of_the_paper_needs_a_model_and_problems(person: str) -> None:
    done = CliRunner().invoke(app, ["experiment", "personalization", "--url", "http://127.0.0.1:9", "--person", person])
    assert done.exit_code == 2
    assert "needs --user-url and --problems" in done.output
