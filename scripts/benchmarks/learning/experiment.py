"""Runs of the learning benchmark: their variants, the training of many runs in step, and their records."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.learning.engine import ForwardEngine, ScoringEngine
from benchmarks.learning.fleet import Fleet, Reply
from benchmarks.learning.measures import Answers, Quality, quality
from benchmarks.learning.served import ServedEngine, embedded_engine
from benchmarks.learning.simulation import Asked, Batch, Simulation
from benchmarks.learning.subject import Subject
from openclaw_combine import method as combine
from openclaw_opd import method as opd
from openclaw_rl.messages import Message
from openclaw_rl.methods import binary_rl
from openclaw_rl.methods.base import Method
from openclaw_rl.methods.hinted_prompt import HintPlace, hinted
from openclaw_rl.offline.personas import PREFERENCES, Preference, Topic, topics
from openclaw_rl.settings import MethodSettings, ModelSettings, TrainerSettings, settings_class
from openclaw_rl.trainers.base import NoStep
from openclaw_rl.types import SamplingParams

KEPT = 6
"""Replies of a run that stay in its results."""
METHODS = ("binary_rl", "opd", "combine")
ENDS = ("base", "hinted", "complained")
"""The base; the base that reads the wish as one canonical sentence; the base that reads a complaint verbatim."""
USERS = ("reads_request", "follows_up", "demonstrates")
"""`reads_request`: the user first checks that a reply is about the question. `follows_up`: the user stays and judges
the better reply. `demonstrates`: once content, the user also sends this reply as one to the question itself."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Changes to the settings we ship; the table shows its name."""

    name: str = "default"
    changes: tuple[tuple[str, str], ...] = ()
    """(setting of `trainer` or `method`, one of `USERS`; value as text)."""

    @classmethod
    def parse(cls, text: str) -> "Variant":
        """Parse `name:key=value,key=value`; without a name, the changes are the name."""
        name, _, changes = text.rpartition(":")
        pairs = [pair.split("=", 1) for pair in changes.split(",") if pair]
        return cls(name or changes or "default", tuple((key.strip(), value.strip()) for key, value in pairs))

    def settings(self, device: str, seed: int, method: str) -> tuple[TrainerSettings, MethodSettings]:
        trainer: dict[str, Any] = {"device": device, "seed": seed}
        own_class = settings_class(method)
        own: dict[str, Any] = {"name": method} | ({"hint_votes": 1} if "hint_votes" in own_class.model_fields else {})
        for key, value in self.changes:
            if key in USERS:
                continue
            elif key in TrainerSettings.model_fields:
                trainer[key] = value
            else:
                own[key] = value  # an unknown key is refused by name
        trainer.setdefault("micro_batch_tokens", 4096 if device == "cuda" else 1024)
        if "dtype" in TrainerSettings.model_fields:
            trainer.setdefault("dtype", "float32")  # so the sampler's log-probs equal the trainer's to rounding
        return TrainerSettings(**trainer), own_class(**own)

    def has_user(self, who: str) -> bool:
        """Return True if the user is of this kind, one of `USERS`."""
        return dict(self.changes).get(who, "0").casefold() in ("1", "true", "yes")


@dataclass(frozen=True, slots=True)
class Run:
    method: str
    preference: str
    seed: int
    variant: Variant = Variant()


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a run."""

    updates: int = 8
    turns: int = 16
    reply_tokens: int = 96
    marks: tuple[int, ...] = (1, 2, 4, 8)
    """Updates after which the run is measured."""
    held_out: int = 48
    replies: int = 2
    """Replies per held-out topic."""
    others: int = 3
    """Number of other questions that relevance compares with."""
    temperature: float = 0.7


@dataclass(slots=True)
class Record:
    """One line of the results."""

    method: str
    preference: str
    seed: int
    variant: str
    update: int
    quality: dict[str, float]
    training: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    complaints: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    replies: dict[str, str] = field(default_factory=dict)
    """Replies to the first held-out questions, each on one line."""


def method_of(name: str) -> Method:
    """Return the method of this name."""
    # By import, not by entry point: a GPU host may run a checkout that is not installed.
    methods: dict[str, Method] = {"binary_rl": binary_rl.METHOD, "opd": opd.METHOD, "combine": combine.METHOD}
    return methods[name]


class Trained:
    """One run: its policy, its learner, its user."""

    def __init__(self, run: Run, subject: Subject, plan: Plan, *, engine_url: str | None = None) -> None:
        """engine_url: URL of an embedded engine for the scoring pairs; None: a plain forward."""
        trainer, own = run.variant.settings(subject.device, run.seed, run.method)
        self.run, self.preference, self._plan = run, PREFERENCES[run.preference], plan
        self.policy = subject.new_policy(trainer)
        method = method_of(run.method)
        self._learner = subject.new_learner(self.policy, method, trainer, own)
        engine: ScoringEngine = ForwardEngine(self.policy)
        if engine_url is not None:
            engine = ServedEngine(self.policy, engine_url, name=f"{run.method}-{run.preference}-{run.seed}")
        self.user = Simulation(
            subject,
            self.preference,
            method,
            own,
            engine,
            seed=run.seed,
            reads_request=run.variant.has_user("reads_request"),
            demonstrates=run.variant.has_user("demonstrates"),
        )
        self.sampling = SamplingParams(plan.reply_tokens, temperature=plan.temperature)
        self.metrics: dict[str, float] = {}
        self.batch = Batch()

    def topics(self, update: int) -> list[Topic]:
        """Return the topics of an update, equal for all methods and variants of a seed."""
        return random.Random(1000 * self.run.seed + update).sample(topics("train"), self._plan.turns)

    async def learn(self, update: int, asked: Sequence[Asked], replies: Sequence[Reply], said: Sequence[str]) -> None:
        self.batch = await self.user.round(asked, replies, said, update - 1, self.sampling)
        self.metrics = {}
        if not self.batch.samples:
            return  # no samples: no step
        result = self._learner.step(self.batch.samples, lambda: None)
        if isinstance(result, NoStep):  # memory ran out beside other workers: try the batch again, as a trainer does
            result = self._learner.step(self.batch.samples, lambda: None)
        if isinstance(result, NoStep):
            raise RuntimeError(f"{self.run}: {result.reason}")
        self.metrics = dict(result.metrics)

    def record(self, update: int, found: Quality, replies: dict[str, str], started: float) -> Record:
        told = ("loss", "grad_norm", "abs_log_ratio", "masked_share", "samples", "trained_tokens", "learner_s")
        rewards = self.batch.rewards
        return Record(
            self.run.method,
            self.run.preference,
            self.run.seed,
            self.run.variant.name,
            update,
            found.as_dict(),
            {key: self.metrics[key] for key in told if key in self.metrics}
            | {"verdict_mean": sum(rewards) / max(1, len(rewards))},
            dict(self.batch.dropped),
            dict(self.batch.complaints),
            round(time.perf_counter() - started, 1),
            replies,
        )


def train_together(
    subject: Subject,
    runs: Sequence[Run],
    plan: Plan,
    write: Callable[[Record], None],
    started: float,
    *,
    engine_url: str | None = None,
) -> None:
    """Train the runs in step: one sampler serves them all. Their users must agree in `follows_up`."""
    (follows_up,) = {run.variant.has_user("follows_up") for run in runs}
    trained = [Trained(run, subject, plan, engine_url=engine_url) for run in runs]
    fleet = Fleet([one.policy for one in trained], subject.end_id)
    for update in range(1, plan.updates + 1):
        asked, replies, said = chats(fleet, trained, plan, update, follows_up=follows_up)

        asyncio.run(_learn(update, trained, asked, replies, said))
        fleet.refresh()
        if update in plan.marks:
            for one, (found, shown) in zip(trained, measure(subject, fleet, trained, plan), strict=True):
                write(one.record(update, found, shown, started))


async def _learn(
    update: int,
    trained: Sequence[Trained],
    asked: Sequence[list[Asked]],
    replies: Sequence[list[Reply]],
    said: Sequence[list[str]],
) -> None:
    for one, its_asked, its_replies, its_said in zip(trained, asked, replies, said, strict=True):
        await one.learn(update, its_asked, its_replies, its_said)


_Rounds = tuple[list[list[Asked]], list[list[Reply]], list[list[str]]]


def chats(fleet: Fleet, trained: Sequence[Trained], plan: Plan, update: int, *, follows_up: bool) -> _Rounds:
    """Return `plan.turns` turns of every run: the questions, the replies, and the users' answers."""
    topics_of = [one.topics(update) for one in trained]

    def said_to(asked: list[list[Asked]], part: int) -> tuple[list[list[Reply]], list[list[str]]]:
        prompts = [one.user.prompts(own) for one, own in zip(trained, asked, strict=True)]
        seeds = [1000 * one.run.seed + 100 * part + update for one in trained]
        replies = fleet.generate(prompts, plan.reply_tokens, plan.temperature, seeds)
        return replies, [
            one.user.said(its_asked, its_replies)
            for one, its_asked, its_replies in zip(trained, asked, replies, strict=True)
        ]

    first = len(topics_of[0]) // (1 + follows_up)
    asked = [one.user.first(own[:first]) for one, own in zip(trained, topics_of, strict=True)]
    replies, said = said_to(asked, 0)
    if follows_up:
        more = [
            one.user.second(its_asked, its_replies, its_said, fresh[first : 2 * first])
            for one, its_asked, its_replies, its_said, fresh in zip(
                trained, asked, replies, said, topics_of, strict=True
            )
        ]
        more_replies, more_said = said_to(more, 1)
        asked = [a + b for a, b in zip(asked, more, strict=True)]
        replies = [a + b for a, b in zip(replies, more_replies, strict=True)]
        said = [a + b for a, b in zip(said, more_said, strict=True)]
    return asked, replies, said


def measure(
    subject: Subject, fleet: Fleet, trained: Sequence[Trained], plan: Plan
) -> list[tuple[Quality, dict[str, str]]]:
    """Return the quality of each policy's replies, and a few of them."""
    asked = topics("held_out")[: plan.held_out] * plan.replies
    prompts = [[subject.prompt(one.preference.question(topic)) for topic in asked] for one in trained]
    seeds = [500_000 + one.run.seed for one in trained]
    replies = fleet.generate(prompts, plan.reply_tokens, plan.temperature, seeds)
    found = []
    for one, own_prompts, own in zip(trained, prompts, replies, strict=True):
        worth = quality(
            subject,
            one.policy,
            one.preference,
            Answers(asked, own_prompts, own),
            temperature=plan.temperature,
            others=plan.others,
        )
        found.append((worth, kept(subject, one.preference, asked, own)))
    return found


def kept(subject: Subject, preference: Preference, asked: Sequence[Topic], replies: Sequence[Reply]) -> dict[str, str]:
    """Return the first replies by their question."""
    pairs = list(zip(asked, replies, strict=True))[:KEPT]
    return {preference.question(topic): " ".join(subject.text(reply.ids).split()) for topic, reply in pairs}


def measure_ends(
    subject: Subject,
    preferences: Sequence[str],
    seeds: Sequence[int],
    plan: Plan,
    write: Callable[[Record], None],
    started: float,
) -> None:
    """Measure the base without and with the hint in its prompt: the two ends of the scale of learning."""
    policy = subject.new_policy(TrainerSettings(device=subject.device))
    fleet = Fleet([policy], subject.end_id)
    asked = topics("held_out")[: plan.held_out] * plan.replies
    for name in preferences:
        preference = PREFERENCES[name]
        plain = [subject.prompt(preference.question(topic)) for topic in asked]
        for end in ENDS:
            for seed in seeds:
                prompts = [subject.prompt(ask_as(preference, topic, end, n)) for n, topic in enumerate(asked)]
                replies = fleet.generate([prompts], plan.reply_tokens, plan.temperature, [500_000 + seed])[0]
                found = quality(
                    subject,
                    policy,
                    preference,
                    Answers(asked, plain, replies),
                    temperature=plan.temperature,
                    others=plan.others,
                )
                seconds = round(time.perf_counter() - started, 1)
                shown = kept(subject, preference, asked, replies)
                write(Record(end, name, seed, "", 0, found.as_dict(), seconds=seconds, replies=shown))


def ask_as(
    preference: Preference, topic: Topic, end: str, n: int, *, place: HintPlace = "behind", in_few_words: bool = False
) -> str:
    """Return the question as the end reads it, with a hint in the place where the product's teacher reads it."""
    question = preference.question(topic)
    if end == "base":
        return question
    ways = preference.fault.ways(in_few_words=in_few_words)
    hint = preference.hint if end == "hinted" else ways[n % len(ways)]
    changed = hinted((Message(role="user", content=question),), hint, place)
    assert changed is not None
    return changed[0].text()


@dataclass(frozen=True, slots=True)
class Job:
    """Work of one worker process."""

    model: ModelSettings
    cache: Path
    device: str
    threads: int
    plan: Plan
    results: Path
    runs: tuple[Run, ...] = ()
    ends_of: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    uses_engine: bool = False
    """Scoring pairs come from the embedded engine, in a process of its own."""


def work(job: Job) -> None:
    """Run a job in a worker process. Each result is appended at once: an interrupted run keeps those it had."""
    import torch

    started = time.perf_counter()
    torch.set_num_threads(job.threads)
    subject = Subject(job.model, job.cache, job.device)

    def write(record: Record) -> None:
        with job.results.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")
        q = record.quality
        print(
            f"{record.preference:8} {record.method:10} {record.variant:22} seed {record.seed} update {record.update}: "
            f"score {q['score']:.2f} kl {q['kl']:.2f} relevance {q['relevance']:.2f} fluency {q['fluency']:.2f} "
            f"words {q['words']:.0f} ({record.seconds:.0f} s)",
            flush=True,
        )

    if job.ends_of:
        measure_ends(subject, job.ends_of, job.seeds, job.plan, write, started)
    if job.runs:
        with contextlib.ExitStack() as stack:
            url = None
            if job.uses_engine:
                url = stack.enter_context(embedded_engine(job.model, job.cache, device=job.device, threads=job.threads))
            train_together(subject, job.runs, job.plan, write, started, engine_url=url)


def shared_out(runs: Sequence[Run], workers: int, template: Job) -> list[Job]:
    """Return jobs of about equal size, each of one kind of user, with runs of each method in every job."""
    parts: list[tuple[Run, ...]] = []
    for follows_up in (False, True):
        some = [run for run in runs if run.variant.has_user("follows_up") == follows_up]
        share = max(1, round(workers * len(some) / len(runs)))
        parts += [tuple(some[k::share]) for k in range(share)]
    return [replace(template, runs=part) for part in parts if part]
