"""Runs of the practice experiment on the bundled model's first layers, by the product's own methods and learner."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import bundled
import pytest
from tolerances import rel

from benchmarks import learning_practice
from benchmarks.learning.arms import ARMS, Arm
from benchmarks.learning.engine import DisplacedEngine, ForwardEngine
from benchmarks.learning.fleet import Fleet, Reply, sample
from benchmarks.learning.practice import Corrected, Practised, measure_yardsticks, train_update
from benchmarks.learning.practice_report import load, report
from benchmarks.learning.scope_measures import Line, Scales, Spoken, spoken_to
from benchmarks.learning.scopes import anchors, chat
from benchmarks.learning.share import Yardstick
from benchmarks.learning.simulation import Asked
from benchmarks.learning.sizes import Sizes
from benchmarks.learning.studies import STUDIES, Job, Place, _measured, ends_jobs, jobs_of, smoke, work
from benchmarks.learning.subject import Subject, forced_log_probs
from benchmarks.learning.variants import POOL
from openclaw_rl.offline.personas import PREFERENCES, Problem
from openclaw_rl.settings import ModelSettings, TrainerSettings
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Ids

pytestmark = pytest.mark.real_model

SIZES = replace(
    Sizes(),
    updates=3,
    marks=(3,),
    glances=(2,),
    reply_tokens=6,
    held_out=4,
    replies=1,
    others=1,
    yardstick_prompts=2,
    yardstick_tokens=3,
    elsewhere_prompts=1,
    elsewhere_replies=1,
    elsewhere_tokens=4,
    exact_questions=3,
    exact_tokens=2,
    chat_turns=4,
    tool_questions=2,
    tool_tokens=3,
    problem_tokens=2,
    width=4,
    chunk=4,
)
WISHES = tuple(PREFERENCES)


@pytest.fixture(scope="session")
def narrow_model(pytestconfig: pytest.Config) -> Path:
    return bundled.narrowed(pytestconfig.cache.mkdir("bundled"))


@pytest.fixture(scope="module")
def subject(narrow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(ModelSettings(path=str(narrow_model)), tmp_path_factory.mktemp("cache"), "cpu")


def run_of(subject: Subject, arm: Arm, wishes: tuple[str, ...] = ("short",)) -> Practised:
    return Practised(arm, wishes, 0, subject, SIZES)


def answered(subject: Subject, run: Practised, update: int, text: str) -> int:
    """Make one update in which the policy says `text` to each prompt; return the number of prompts."""
    ids = (*subject.encode(text), subject.end_id)
    prompts = run.ask(update)
    told = forced_log_probs(run.policy, [(prompt, ids) for prompt in prompts], SIZES.temperature)
    asyncio.run(run.learn(update, [Reply(ids, tuple(own)) for own in told]))
    return len(prompts)


LONG = "It is easy, and so on, " + "and so on, " * 8
MEETS = "It is easy and soon done with soap, water, eggs, tea, light, thread, or paint and a brush."


@pytest.fixture(autouse=True)
def variants(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy writes no variants of prompts: a test that is about them writes its own."""
    monkeypatch.setattr("benchmarks.learning.variants._written", lambda *_: [Reply((subject.end_id,), ())] * POOL)


@pytest.fixture(scope="module")
def anchored(subject: Subject) -> Practised:
    """Two corrected turns, then one update of practice with anchors."""
    arm = replace(ARMS["combined"], corrections=2, replies=4, anchors=0.5)
    run = run_of(subject, arm)
    assert [answered(subject, run, update, LONG) for update in (1, 2)] == [2, 4]
    return run


def test_corrections_are_what_is_practised_each_with_its_own_hint(anchored: Practised) -> None:
    assert [one.hint for one in anchored.pool] == [PREFERENCES["short"].hint] * 2
    asked = [one.asked.messages[0] for one in anchored._now if isinstance(one, Corrected)]
    assert sorted(asked) == sorted(one.asked.messages[0] for one in anchored.pool)


def test_half_of_a_prompts_replies_answer_variants_of_it(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    end = Reply((*subject.encode(" paint a kitchen wall?"), subject.end_id), ())
    monkeypatch.setattr("benchmarks.learning.variants._written", lambda *_: [end] * POOL)
    monkeypatch.setattr("openclaw_rl.practice.variants.BOUND", float("inf"))
    run = run_of(subject, replace(ARMS["combined, 4 corrections"], replies=8))
    answered(subject, run, 1, LONG)
    run.ask(2)
    asked = [one.asked for one in run._now if isinstance(one, Corrected)]
    # A short request shares fewer words with its variant.
    varied = [one for one in asked if one.messages[0].endswith("paint a kitchen wall?")]
    assert len(varied) == 4
    assert {one.topic.about for one in varied} == {("paint", "kitch", "wall")}
    assert {one.topic.text for one in varied} == {one.messages[0] for one in varied}
    assert {one.asked for one in run.pool} == set(asked) - set(varied)
    monkeypatch.setattr("openclaw_rl.practice.variants.BOUND", float("-inf"))
    run = run_of(subject, replace(ARMS["combined, 4 corrections"], replies=8))
    answered(subject, run, 1, LONG)
    run.ask(2)
    assert {one.asked for one in run.pool} == {one.asked for one in run._now if isinstance(one, Corrected)}


def test_half_of_practice_are_anchors_and_all_of_it_is_trained(anchored: Practised) -> None:
    held = [one.messages[0] for one in anchored._now if not isinstance(one, Corrected)]
    assert len(held) == 2
    assert set(held) <= set(anchors("mixed"))
    assert (anchored.steps[-1].samples, anchored.steps[-1].dropped) == (4, {})
    assert anchored.steps[-1].passed == 0.0


def test_without_a_judge_the_hint_is_the_users_own_words(subject: Subject) -> None:
    run = run_of(subject, replace(ARMS["no judge"], corrections=2, replies=2))
    answered(subject, run, 1, LONG)
    assert {one.hint for one in run.pool} <= {said for c in PREFERENCES["short"].complaints for said in c.said}
    assert answered(subject, run, 2, LONG) == 2
    assert run.steps[-1].samples == 2


def test_an_arm_of_new_turns_practises_none(subject: Subject) -> None:
    run = run_of(subject, replace(ARMS["binary, new turns"], corrections=2))
    topics = [run.topics(update)[:2] for update in (1, 2)]
    assert [answered(subject, run, update, LONG) for update in (1, 2)] == [2, 2]
    assert topics[0] != topics[1]
    assert not run.pool


def test_practice_stops_where_the_judge_finds_enough_and_a_new_wish_starts_it_again(subject: Subject) -> None:
    arm = replace(ARMS["combined"], corrections=1, replies=2, stop_share=None, stop_passed=1.0)
    run = run_of(subject, arm, WISHES)
    answered(subject, run, 1, LONG)
    about = run.pool[0].asked.topic.about[0]
    answered(subject, run, 2, f"{MEETS} {about}")
    assert run.stopped_at == 2
    assert run.ask(3) == []
    answered(subject, run, 4, "1. One.\n2. Two.\n" * 4)
    assert run.stopped_at is None
    assert {one.wish for one in run._practice(5) if isinstance(one, Corrected)} == set(WISHES[:2])


def chatted(subject: Subject, arm: Arm, says: str, later: int) -> Practised:
    """Return a run after its last mark and so many later updates, in which the policy says `says`."""
    run = run_of(subject, arm)
    for update in range(1, run.last_mark + 1):
        answered(subject, run, update, LONG)
    for update in range(run.last_mark + 1, run.last_mark + 1 + later):
        answered(subject, run, update, says)
    return run


LATER = replace(ARMS["combined"], corrections=2, replies=4, later_conversations=6, stop_share=None, stop_passed=None)


def test_later_conversations_are_rounds_of_new_questions_with_practice_behind_each(subject: Subject) -> None:
    run = chatted(subject, LATER, LONG, 1)
    corrected = {one.topic.text for one in (own.asked for own in run.pool[:2])}
    asked = [one.topic.text for one in run._now if isinstance(one, Asked)]
    held_back = {topic.text for topic in run.topics(1)[-SIZES.yardstick_prompts :]}
    assert len(asked) == 4
    assert not set(asked) & (corrected | held_back)
    assert (run.steps[-1].complained, len(run.pool)) == (1.0, 6)
    counts = [answered(subject, run, update, LONG) for update in range(5, 9)]
    assert counts == [4, 2, 4, 0]  # practice, the last two conversations, practice, and no more
    assert [step.complained for step in run.steps] == [1.0, None, None, 1.0, None, 1.0, None, None]
    assert LATER.later_updates == 4


def test_behind_thanks_a_wish_that_was_learned_rests_on_and_one_that_was_not_is_practised(subject: Subject) -> None:
    rests = chatted(subject, replace(LATER, stop_share=-1e9), LONG, 0)
    assert rests.stopped_at == 2
    asked = rests.ask(4)
    about = [next(iter(one.topic.about)) for one in rests._now if isinstance(one, Asked)]
    said = [(*subject.encode(f"{MEETS} {word}"), subject.end_id) for word in about]
    asyncio.run(rests.learn(4, [Reply(ids, (-1.0,) * len(ids)) for ids in said]))
    assert (len(asked), rests.steps[-1].complained, rests.stopped_at) == (4, 0.0, 2)
    assert len(rests._thanked) == 4
    assert rests.ask(5) == []
    rests.steps[-1].shares = {"short": -2e9}  # forgotten: below 0.85 of the aim
    assert len(rests.ask(5)) == 4
    assert rests.stopped_at is None


def test_thanked_turns_of_later_conversations_are_the_anchors(subject: Subject) -> None:
    run = chatted(subject, replace(LATER, anchors=0.5), LONG, 0)
    assert {one.messages[0] for one in run._practice(3) if isinstance(one, Asked)} <= set(anchors("mixed"))
    thanked = [PREFERENCES["short"].question(topic) for topic in run.topics(1)[2:5]]
    run._thanked |= dict.fromkeys([run.pool[0].asked.messages[0], *thanked])
    held = {one.messages[0] for one in run._practice(5) if isinstance(one, Asked)}
    assert len(held) == 2
    assert held <= set(thanked)  # not the prompt that was corrected at another time


def test_a_later_complaint_opens_the_wish_again_and_only_a_share_below_the_aim_is_practised(subject: Subject) -> None:
    run = chatted(subject, replace(LATER, stop_share=0.5), LONG, 0)
    run.stopped_at = 3
    answered(subject, run, 4, LONG)
    assert run.stopped_at is None
    run.steps[-1].shares = {"short": 0.45}  # above 0.85 of the aim, where a wish that rests goes on resting
    assert len(run.ask(5)) == 4
    run.steps[-1].shares = {"short": 0.5}
    assert run.ask(5) == []


def test_a_late_teacher_is_the_same_numbers_one_token_on(subject: Subject) -> None:
    policy = run_of(subject, ARMS["opd"]).policy
    prompt, reply = subject.prompt("Why?"), subject.encode(LONG)[:6]

    async def base(engine: ForwardEngine) -> tuple[float, ...]:
        return (await engine.score(prompt, reply, lora_path=None, extra_key=None)).log_probs

    true, late = asyncio.run(base(ForwardEngine(policy))), asyncio.run(base(DisplacedEngine(policy, 1)))
    assert late == (true[0], *true[:-1])


def test_the_learned_share_is_none_at_the_base_and_whole_where_the_hint_goes(subject: Subject) -> None:
    run = run_of(subject, ARMS["opd"])
    measure_yardsticks(Fleet([run.policy], subject.end_id), [run], SIZES)
    held_back = run._yardsticks["short"]
    assert held_back.share(run.policy) == pytest.approx(0, abs=1e-6)
    assert any(abs(a - b) > 1e-3 for a, b in zip(held_back.base, held_back.hinted, strict=True))
    effect = [a - b for a, b in zip(held_back.hinted, held_back.base, strict=True)]
    moved = tuple(b - change for b, change in zip(held_back.base, effect, strict=True))
    whole = Yardstick(held_back.pairs, moved, held_back.base).share(run.policy)
    assert whole == pytest.approx(1, rel=rel(ulps=2**14))


def test_policies_with_fewer_prompts_get_the_replies_to_their_own(subject: Subject) -> None:
    fleet = Fleet([run_of(subject, ARMS["opd"]).policy] * 2, subject.end_id)
    prompts = [[subject.prompt(f"{n}?") for n in range(3)], [subject.prompt("0?")]]
    both = sample(fleet, prompts, 4, 0.7, [1, 1], 2)
    assert [len(own) for own in both] == [3, 1]
    assert both[0][0].ids == both[1][0].ids


def test_a_study_in_little_measures_every_wish_that_was_given_so_far(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the policy writes its variants
    place = Place(ModelSettings(), tmp_path, "cpu", 1, tmp_path / "r.jsonl")
    runs = [run_of(subject, replace(ARMS["opd"], corrections=2, replies=2), WISHES[:2])]
    job = Job(place, SIZES, ((runs[0].arm, runs[0].wishes, 0),))
    fleet = Fleet([runs[0].policy], subject.end_id)
    scales = Scales(subject, fleet, SIZES)
    lines = []
    for update in range(1, 7):
        train_update(fleet, runs, update, SIZES)
        lines.append(_measured(scales, runs, update, subject, job, {}, 0.0))
    assert [[line.preference for line in some] for some in lines] == [[], [], ["short"], [], [], ["short", "no_lists"]]
    line = lines[-1][-1]
    scales.elsewhere([spoken_to(runs[0], subject)], [line])
    assert set(line.passes) <= {"0", "1"}
    assert len(line.passes) == SIZES.held_out
    assert line.exact is not None
    measured = [*line.elsewhere.values(), line.chat]
    assert all(set(found) == {"words", "kl", "fluency", "ended"} for found in measured)
    assert set(line.tool) == {"calls", "forced"}
    assert line.problems is None


def bare_line() -> Line:
    return Line("a", ["short"], "short", 0, 0, {})


@pytest.fixture(scope="module")
def moved(subject: Subject) -> LoraPolicy:
    """A policy that is not the base."""
    run = run_of(subject, replace(ARMS["opd"], corrections=2))
    answered(subject, run, 1, LONG)
    return run.policy


def test_a_long_chat_is_held_in_the_policys_own_words_and_its_last_turns_are_measured(
    subject: Subject, moved: LoraPolicy
) -> None:
    fleet = Recorder(moved, subject)
    base, other = bare_line(), bare_line()
    spoken = [Spoken(moved, 0, subject.prompt), Spoken(moved, 0, subject.prompt, "Remember: be brief.")]
    Scales(subject, fleet, SIZES)._chat(spoken, [base, other])  # type: ignore[arg-type]
    texts = [subject.tokenizer.decode(list(prompts[0][0])) for prompts in fleet.asked]
    assert len(texts) == SIZES.chat_turns
    assert {len(own) for prompts in fleet.asked for own in prompts} == {SIZES.elsewhere_replies}
    assert all(message in texts[-1] for message in chat()[: SIZES.chat_turns])
    assert texts[-1].count("I see.") == SIZES.chat_turns - 1
    assert chat()[SIZES.chat_turns - 1] not in texts[-2]
    assert all("be brief" in subject.tokenizer.decode(list(prompts[1][0])) for prompts in fleet.asked)
    assert base.chat == other.chat  # both said the same; the base reads them without the system prompt
    assert base.chat["words"] == 2.0
    assert base.texts["chat"] == "I see."


class Recorder:
    """Sampler whose policies say the same to each prompt, and tells which prompts there were."""

    def __init__(self, policy: LoraPolicy, subject: Subject, says: str = "I see.") -> None:
        self.asked: list[Sequence[Sequence[Ids]]] = []
        ids = (*subject.encode(says), subject.end_id)
        self._reply = Reply(ids, (-1.0,) * len(ids))

    def generate(
        self, prompts: Sequence[Sequence[Ids]], max_tokens: int, temperature: float, seeds: Sequence[int]
    ) -> list[list[Reply]]:
        self.asked.append(prompts)
        return [[self._reply for _ in own] for own in prompts]


def test_the_form_of_a_call_is_measured_by_replies_and_by_a_forced_call(subject: Subject, moved: LoraPolicy) -> None:
    called = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    base, line = bare_line(), bare_line()
    at_base = subject.new_policy(TrainerSettings(device="cpu"))
    for policy, own, says in ((at_base, base, called), (moved, line, "It is warm.")):
        fleet = Recorder(policy, subject, says)
        Scales(subject, fleet, SIZES)._tool([Spoken(policy, 0, subject.prompt)], [own])  # type: ignore[arg-type]
        assert [len(prompts[0]) for prompts in fleet.asked] == [SIZES.tool_questions]
    assert base.tool == {"calls": 1.0, "forced": pytest.approx(0, abs=1e-4)}
    assert line.tool["calls"] == 0.0
    assert abs(line.tool["forced"]) > 1e-3


def test_the_study_of_drift_writes_each_run_before_and_after_with_all_measures(
    narrow_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    posed = tuple(Problem(f"{n}?", str(n)) for n in range(3))
    place = Place(ModelSettings(path=str(narrow_model)), tmp_path / "c", "cpu", 1, tmp_path / "r.jsonl", posed)
    (study,) = (replace(smoke(study), wishes=(("short",),)) for study in STUDIES["drift"])
    sizes = replace(study.sizes, elsewhere_prompts=1, held_out=2, exact_questions=2, reply_tokens=4, glances=())
    jobs = [*ends_jobs(["short"], study.seeds, place, sizes), *jobs_of([replace(study, sizes=sizes)], place, 8)]
    assert all(work(job, time.time() + 600) for job in jobs)
    lines = load([place.results])
    runs = [line for line in lines if line.arm in ARMS]
    assert [(line.preference, line.update, line.conversations) for line in runs] == [
        ("short", 2, 0),
        ("short", 6, 6),
    ]
    assert all(line.elsewhere and line.chat and line.tool and line.exact is not None for line in lines)
    assert all(line.problems is not None for line in lines)
    text = report(lines, {})
    row = next(row for row in text.splitlines() if row.startswith(f"| {runs[0].arm} | short | 1 | 6 | "))
    assert row.count("→") == 1 + 14
    assert f"| {runs[0].arm}, 6 conversations later | short |" in text
    assert capsys.readouterr().out.count("score") == len(lines)


def test_the_command_refuses_word_problems_that_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.json").write_text(json.dumps([{"question": "1?"}]))
    monkeypatch.setattr(sys, "argv", ["learning_practice", "--smoke", "--problems", str(tmp_path / "p.json")])
    with pytest.raises(SystemExit):
        learning_practice.main()
    assert "holds no problems" in capsys.readouterr().err


def test_jobs_hold_each_run_of_the_studies_once(tmp_path: Path) -> None:
    place = Place(ModelSettings(), tmp_path, "cpu", 1, tmp_path / "r.jsonl")
    for studies in STUDIES.values():
        wanted = sorted(
            (seed, arm.name, wishes) for s in studies for seed in s.seeds for arm in s.arms for wishes in s.wishes
        )
        jobs = jobs_of(studies, place, 8)
        assert sorted((seed, arm.name, wishes) for job in jobs for arm, wishes, seed in job.runs) == wanted
        assert all(1 <= len(job.runs) <= 8 for job in jobs)
        assert all(len({len(wishes) for _, wishes, _ in job.runs}) == 1 for job in jobs)
        assert all(smoke(study).sizes.updates == 2 for study in studies)
    assert len(ends_jobs(["short"], (0, 1), place, SIZES)) == 2


@pytest.mark.parametrize("arm", ARMS.values(), ids=lambda arm: arm.name)
def test_an_arm_is_made_of_settings_that_exist(arm: Arm) -> None:
    trainer, own = arm.branches("cuda", 1)
    assert (trainer.device, trainer.seed, own.name) == ("cuda", 1, arm.method)
    assert arm.is_live or own.can_practise
