"""Studies of the practice experiment: which arms, for which wishes and seeds; and their work on one device."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

from benchmarks.learning.arms import (
    ABLATIONS,
    ANCHORED,
    BINARY,
    CONTROLS,
    DAY,
    DRIFT,
    FEW,
    HANDFUL,
    JUDGED_PLACES,
    MAIN,
    WHOLE,
    Arm,
)
from benchmarks.learning.fleet import Fleet
from benchmarks.learning.practice import Practised, measure_yardsticks, train_update
from benchmarks.learning.scope_measures import Line, Scales, ends, line_of, spoken_to
from benchmarks.learning.sizes import Sizes
from benchmarks.learning.subject import Subject
from openclaw_rl.offline.personas import PREFERENCES, Problem
from openclaw_rl.settings import ModelSettings

REACHED = ("short", "no_lists", "lively")
"""Length, form and tone: wishes that the base meets in at most a tenth of its replies."""
EACH = tuple((name,) for name in REACHED)
IN_TURN = (REACHED,)
"""All wishes, one after the other."""


@dataclass(frozen=True, slots=True)
class Study:
    """Arms, each with each list of wishes and each seed."""

    arms: tuple[Arm, ...]
    wishes: tuple[tuple[str, ...], ...] = EACH
    seeds: tuple[int, ...] = (0, 1, 2)
    sizes: Sizes = field(default_factory=Sizes)
    has_elsewhere: bool = False
    """Measure other kinds of prompt too, after the last mark and after later conversations."""


@dataclass(frozen=True, slots=True)
class Place:
    """Device and files of the work."""

    model: ModelSettings
    cache: Path
    device: str
    threads: int
    results: Path
    problems: tuple[Problem, ...] = ()
    """Word problems that are asked elsewhere."""


@dataclass(frozen=True, slots=True)
class Job:
    """Work of one worker at a time: runs of one study, or the ends of one preference."""

    place: Place
    sizes: Sizes
    runs: tuple[tuple[Arm, tuple[str, ...], int], ...] = ()
    """(arm, wishes, seed)."""
    ends_of: tuple[str, int] | None = None
    """(preference, seed)."""
    has_elsewhere: bool = False


def jobs_of(studies: Sequence[Study], place: Place, group: int) -> list[Job]:
    """Return the jobs in the order of the studies, of at most `group` runs each."""
    jobs = []
    for study in studies:
        runs = [(arm, wishes, seed) for seed in study.seeds for arm in study.arms for wishes in study.wishes]
        parts = -(-len(runs) // group)
        jobs += [
            Job(place, study.sizes, tuple(runs[part::parts]), has_elsewhere=study.has_elsewhere)
            for part in range(parts)
        ]
    return jobs


def ends_jobs(preferences: Sequence[str], seeds: Sequence[int], place: Place, sizes: Sizes) -> list[Job]:
    return [Job(place, sizes, ends_of=(name, seed)) for name in preferences for seed in seeds]


def work(job: Job, deadline: float) -> bool:
    """Do a job in a worker process; return False where the deadline came first. Each line is written at once.

    deadline: in `time.time()`.
    """
    started = time.time()
    if started > deadline:
        return False
    subject = _subject(job.place)
    place = job.place
    posed = place.problems[: job.sizes.problems]
    if job.ends_of is not None:
        name, seed = job.ends_of
        for line in ends(subject, PREFERENCES[name], seed, job.sizes, posed):
            line.seconds = round(time.time() - started, 1)
            _write(place.results, line)
        return True
    runs = [Practised(arm, wishes, seed, subject, job.sizes) for arm, wishes, seed in job.runs]
    fleet = Fleet([run.policy for run in runs], subject.end_id)
    scales = Scales(subject, fleet, job.sizes, posed)
    measure_yardsticks(fleet, runs, job.sizes)
    known: dict[tuple[int, str], Line] = {}
    last = runs[0].last_mark
    later = last + max(run.arm.later_updates for run in runs)
    for update in range(1, later + 1):
        if time.time() > deadline:
            return False
        train_update(fleet, runs, update, job.sizes)
        lines = _measured(scales, runs, update, subject, job, known, time.time() - started)
        if update in (last, later) and job.has_elsewhere:
            scales.elsewhere([spoken_to(run, subject) for run in runs], lines[-len(runs) :])
        for line in lines:
            if update <= last or line.conversations:
                _write(place.results, line)
    return True


def _measured(
    scales: Scales,
    runs: Sequence[Practised],
    update: int,
    subject: Subject,
    job: Job,
    known: dict[tuple[int, str], Line],
    seconds: float,
) -> list[Line]:
    """Return the lines of this update: none, those of the wish, or of all wishes given so far, and again at the end.

    known: the newest line of each run and wish. A policy that stopped before it is not measured again.
    """
    sizes, lines = job.sizes, []
    later = update - runs[0].last_mark
    if later > 0:
        given = len(runs[0].wishes) if later == max(run.arm.later_updates for run in runs) else 0
    elif len(runs[0].wishes) == 1:
        given = 1 if update in sizes.marks else 0
        if update in sizes.glances:
            for run, score in zip(runs, scales.scores(runs), strict=True):
                run.steps[-1].score = round(score, 4)
    else:
        given, rest = divmod(update, sizes.updates)
        given = given if rest == 0 else 0
    for wish in range(given):
        preferences = [PREFERENCES[run.wishes[wish]] for run in runs]
        own = [line_of(run, p.name, update, seconds) for run, p in zip(runs, preferences, strict=True)]
        for number, (run, line) in enumerate(zip(runs, own, strict=True)):
            before = known.get((number, line.preference))
            if later <= 0 and before is not None and run.stopped_at is not None and run.stopped_at <= before.update:
                line.quality, line.passes, line.near = before.quality, before.passes, before.near
                line.replies = before.replies
            known[number, line.preference] = line
        scales.of(preferences, [spoken_to(run, subject) for run in runs], own)
        lines += own
    return lines


@cache
def _subject(place: Place) -> Subject:
    """Return the model, loaded once in a worker."""
    import torch

    torch.set_num_threads(place.threads)
    if place.device != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32: many runs share the card, and it is the products that cost
    return Subject(place.model, place.cache, place.device)


def _write(results: Path, line: Line) -> None:
    # One call of the system, so that lines of several workers do not mix.
    file = os.open(results, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(asdict(line), ensure_ascii=False) + "\n").encode())
    finally:
        os.close(file)
    q = line.quality
    print(
        f"{'+'.join(line.wishes):8} {line.arm:26} s{line.seed} u{line.update} {line.preference}: "
        f"score {q['score']:.2f} kl {q['kl']:.2f} relevance {q['relevance']:.2f} fluency {q['fluency']:.2f} "
        f"words {q['words']:.0f} near {line.near['score']:.2f} ({line.seconds:.0f} s)",
        flush=True,
    )


def smoke(of: Study) -> Study:
    """Return the study in little: every part of it runs, no figure of it means a thing."""
    sizes = replace(
        of.sizes,
        updates=2,
        marks=(2,),
        glances=(1,),
        reply_tokens=8,
        held_out=4,
        replies=1,
        others=1,
        yardstick_prompts=2,
        yardstick_tokens=4,
        elsewhere_prompts=2,
        elsewhere_replies=1,
        elsewhere_tokens=8,
        exact_questions=4,
        exact_tokens=4,
        chat_turns=4,
        tool_questions=2,
        tool_tokens=8,
        problems=min(of.sizes.problems, 2),
        problem_tokens=8,
        width=4,
        chunk=4,
    )
    arms = tuple(
        replace(
            arm,
            corrections=min(arm.corrections, 2),
            replies=4,
            later_conversations=min(arm.later_conversations, 6),
        )
        for arm in of.arms
    )
    return replace(of, arms=arms, seeds=of.seeds[:1], sizes=sizes)


SHORT_ALONE = (("short",),)
NINE = Sizes(updates=9, marks=(9,), replies=1, glances=())
AT_BOTH = Sizes(glances=(), replies=1)
LONG = Sizes(updates=29, marks=(9, 15, 20, 25, 29), replies=1, glances=())
TWENTY_FIVE = Sizes(updates=25, replies=1, glances=())
STUDIES: dict[str, tuple[Study, ...]] = {
    "final": (
        Study(ANCHORED, seeds=(3, 4, 5), sizes=AT_BOTH, has_elsewhere=True),
        Study((*MAIN, BINARY), seeds=(3, 4, 5), sizes=AT_BOTH),
    ),
    "ablations": (
        Study(ABLATIONS, SHORT_ALONE, seeds=(3, 4), sizes=NINE),
        Study(CONTROLS, SHORT_ALONE, seeds=(3, 4), sizes=NINE),
    ),
    "day": (Study(DAY, IN_TURN, seeds=(3, 4, 5), sizes=TWENTY_FIVE),),
    "handful": (Study(HANDFUL, SHORT_ALONE, seeds=(3, 4, 5), sizes=LONG),),
    "drift": (Study(DRIFT, (("short",), ("no_lists",)), seeds=(3, 4), sizes=AT_BOTH, has_elsewhere=True),),
    "places": (
        Study(FEW, (("short",), ("personal",)), seeds=(3, 4), sizes=AT_BOTH),
        Study(WHOLE, seeds=(3, 4), sizes=AT_BOTH),
        Study(JUDGED_PLACES, seeds=(3, 4), sizes=AT_BOTH),
    ),
}
"""`final`: what we promise. `ablations`: one change at a time. `day`: three wishes, one after the other. `handful`:
four corrections without a judge, and where practice unlearns. `drift`: before and after 150 conversations with
feedback. `places`: the hint's place, without neutral words."""
