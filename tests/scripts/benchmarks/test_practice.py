"""Runs of the practice experiment on the bundled model's first layers, by the product's own methods and learner."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tolerances import rel

from benchmarks.learning.arms import ARMS, Arm
from benchmarks.learning.fleet import Fleet, Reply
from benchmarks.learning.practice import Corrected, Practised, Sizes, measure_yardsticks, sample, train_update
from benchmarks.learning.scope_measures import Scales, spoken_to
from benchmarks.learning.scopes import anchors
from benchmarks.learning.share import Yardstick
from benchmarks.learning.studies import STUDIES, Job, Place, _measured, ends_jobs, jobs_of, smoke
from benchmarks.learning.subject import Subject
from openclaw_rl.offline.personas import PREFERENCES
from openclaw_rl.settings import ModelSettings

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
    width=4,
    chunk=4,
)
WISHES = tuple(PREFERENCES)


@pytest.fixture(scope="module")
def subject(short_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(ModelSettings(path=str(short_model)), tmp_path_factory.mktemp("cache"), "cpu")


def run_of(subject: Subject, arm: Arm, wishes: tuple[str, ...] = ("short",)) -> Practised:
    return Practised(arm, wishes, 0, subject, SIZES)


def answered(subject: Subject, run: Practised, update: int, text: str) -> int:
    """Make one update in which the policy says `text` to each prompt; return the number of prompts."""
    ids = (*subject.encode(text), subject.end_id)
    prompts = run.ask(update)
    asyncio.run(run.learn(update, [Reply(ids, (-1.0,) * len(ids)) for _ in prompts]))
    return len(prompts)


LONG = "It is easy, and so on, " + "and so on, " * 20


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
    meets = "It is easy and soon done with soap, water, eggs, tea, light, thread, or paint and a brush."
    about = run.pool[0].asked.topic.about[0]
    answered(subject, run, 2, f"{meets} {about}")
    assert run.stopped_at == 2
    assert run.ask(3) == []
    answered(subject, run, 4, "1. One.\n2. Two.\n" * 4)
    assert run.stopped_at is None
    assert {one.wish for one in run._practice(5) if isinstance(one, Corrected)} == set(WISHES[:2])


def test_a_late_teacher_is_the_same_numbers_one_token_on(subject: Subject) -> None:
    from benchmarks.learning.engine import ForwardEngine
    from benchmarks.learning.practice import _DisplacedEngine

    policy = run_of(subject, ARMS["opd"]).policy
    prompt, reply = subject.prompt("Why?"), subject.encode(LONG)[:6]

    async def base(engine: ForwardEngine) -> tuple[float, ...]:
        return (await engine.score(prompt, reply, lora_path=None, extra_key=None)).log_probs

    true, late = asyncio.run(base(ForwardEngine(policy))), asyncio.run(base(_DisplacedEngine(policy, 1)))
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


def test_a_study_in_little_measures_every_wish_that_was_given_so_far(subject: Subject, tmp_path: Path) -> None:
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
    assert all(set(found) == {"words", "kl", "fluency", "ended"} for found in line.elsewhere.values())


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
