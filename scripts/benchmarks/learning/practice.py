"""Runs of the practice experiment: a round of corrected turns, then practice on new replies to the same prompts.

The round, the methods, the loss and the LoRA step are the product's. Practice is `Method.practise`, as the server calls
it: each new reply to a corrected prompt is scored under the hint of that prompt, and an anchor without one. A run may
be given several wishes, one after the other; practice then rehearses all that it has been given.

An arm may have later conversations: rounds of new questions, each answered by thanks or a complaint. Behind each round
is an update of practice, where the server's own rule finds a wish open. As on the server, its anchors are the user's
uncorrected turns as soon as there are enough.
"""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

from benchmarks.learning.arms import Arm
from benchmarks.learning.engine import DisplacedEngine, ForwardEngine
from benchmarks.learning.experiment import ask_as, method_of
from benchmarks.learning.fleet import Fleet, Reply, sample
from benchmarks.learning.scopes import anchors
from benchmarks.learning.share import Yardstick, yardstick
from benchmarks.learning.simulation import Asked, Simulation
from benchmarks.learning.sizes import Sizes
from benchmarks.learning.subject import Subject
from benchmarks.learning.variants import Writer
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import Dropped
from openclaw_rl.methods.hinted_prompt import HintPlace, hinted
from openclaw_rl.offline.personas import PREFERENCES, THANKS, Topic, topics
from openclaw_rl.practice.plan import REHEARSED, AnchorUse
from openclaw_rl.practice.relevance import Relevance
from openclaw_rl.practice.share import mean_kl
from openclaw_rl.practice.stops import FALLS_BELOW, LEARNED, rule
from openclaw_rl.settings import PracticeSettings
from openclaw_rl.trainers.base import NoStep
from openclaw_rl.types import Ids, JudgedTurn, Sample, SamplingParams, Verdict, Wish, WishState

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Corrected:
    """Prompt of a corrected turn, and what the user asked for instead."""

    wish: str
    asked: Asked
    hint: str


@dataclass(slots=True)
class Step:
    """State of a run after one update."""

    update: int
    shares: dict[str, float]
    """Learned share by wish, on prompts held back from practice."""
    passed: float | None = None
    """Share of the practice replies that meet their wish, by the judge."""
    answered: float | None = None
    """Share of the replies, anchors included, that answer their request, where the arm looks at it."""
    samples: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    complained: float | None = None
    """Share of the user's turns that were complained of, in an update on such turns."""
    score: float | None = None


class Practised:
    """One run: its policy, its learner, its users."""

    def __init__(self, arm: Arm, wishes: Sequence[str], seed: int, subject: Subject, sizes: Sizes) -> None:
        trainer, own = arm.branches(subject.device, seed)
        self.arm, self.wishes, self.seed = arm, tuple(wishes), seed
        self._subject, self._sizes = subject, sizes
        self.policy = subject.new_policy(trainer)
        self._method = method_of(arm.method)
        self._learner = subject.new_learner(self.policy, self._method, trainer, own)
        engine = DisplacedEngine(self.policy, arm.shift) if arm.shift else ForwardEngine(self.policy)
        self._place: HintPlace = getattr(own, "hint_place", "behind")
        self._neutral: str = getattr(own, "neutral_hint", "")
        self._guidance: float = getattr(own, "guidance", 0.0)
        self.users = {
            wish: Simulation(subject, PREFERENCES[wish], self._method, own, engine, seed=seed, reads_request=True)
            for wish in wishes
        }
        for user in self.users.values():
            user.in_few_words = arm.in_few_words

        def render(messages: Sequence[Message], tools_json: str | None, kwargs_json: str | None) -> Ids:
            return subject.prompt(*(message.text() for message in messages))

        self._relevance = Relevance(
            engine,  # type: ignore[arg-type]
            render,
            subject.encode,
            least=arm.least_relevance,
        )
        self._writer = Writer(subject, engine, render) if arm.variants else None
        self._rehearsals: Counter[Asked] = Counter()
        """Practice replies by corrected prompt."""
        self.sampling = SamplingParams(sizes.reply_tokens, temperature=sizes.temperature)
        self.pool: list[Corrected] = []
        self.anchors = anchors(arm.anchor_kind)
        self._anchored = AnchorUse()
        self.steps: list[Step] = []
        self.metrics: dict[str, float] = {}
        self.stopped_at: int | None = None
        self._yardsticks: dict[str, Yardstick] = {}
        self._thanked: dict[str, None] = {}
        """Prompts of later conversations that the user was content with, each once."""
        self._now: list[Corrected | Asked] = []
        self._round_of: str | None = None
        """Wish of the user whose turns the update learns from; None: the update is practice."""

    # -- what is asked -------------------------------------------------------------------------------------------------

    def topics(self, number: int) -> list[Topic]:
        """Return the topics of round `number`, equal for all arms of a seed; those of the next wish are others."""
        dice = random.Random(1000 * self.seed + number)
        return dice.sample(topics("train"), len(topics("train")))

    def ask(self, update: int) -> list[Ids]:
        """Return the prompts of the next update: a round of the user's, or practice."""
        wish, within = divmod(update - 1, self._sizes.updates)
        later = update - self.last_mark
        self._round_of = None
        if later > 0:
            self._now = self._ask_later(update, later)
        elif within == 0 or self.arm.is_live:
            self._round_of = self.wishes[wish]
            self._now = list(self.users[self._round_of].first(self.topics(update)[: self.arm.corrections]))
        elif self.stopped_at is not None or not self.pool:
            self._now = []
        else:
            self._now = self._practice(update)
        return [self._subject.prompt(*(one.asked if isinstance(one, Corrected) else one).messages) for one in self._now]

    @property
    def last_mark(self) -> int:
        return self._sizes.updates * len(self.wishes)

    def _ask_later(self, update: int, later: int) -> list[Corrected | Asked]:
        """Return a round of new questions, or the practice behind it. Rounds are of each wish in turn."""
        if later > self.arm.later_updates:
            return []
        number, is_practice = divmod(later - 1, 2)
        if is_practice:
            return self._practice(update) if self._is_open() else []
        place = number % len(self.wishes)
        self._round_of = self.wishes[place]
        # Neither the topics of the corrections nor those of the learned share.
        order = self.topics(place * self._sizes.updates + 1)
        fresh = order[self.arm.corrections : len(order) - self._sizes.yardstick_prompts]
        start = number * self.arm.replies
        end = min(start + self.arm.replies, self.arm.later_conversations)
        found = islice(_without_end(fresh, random.Random(55 * self.seed)), start, end)
        return list(self.users[self._round_of].first(list(found)))

    def _is_open(self) -> bool:
        """Return True if a wish needs practice by the server's rule, after new turns."""
        shares = self.steps[-1].shares
        rests = None if self.stopped_at is None else LEARNED
        aim = math.inf if self.arm.stop_share is None else self.arm.stop_share

        def rules(name: str) -> bool:
            wish = Wish(0, "user", "policy", 0.0, WishState.ACTIVE, (), rests=rests)
            return rule(wish, shares.get(name, 0.0), None, (), PracticeSettings(), aim=aim).rests is None

        is_open = any(rules(name) for name in {one.wish for one in self.pool})
        if is_open:
            self.stopped_at = None
        return is_open

    def _practice(self, update: int) -> list[Corrected | Asked]:
        """Return the practice of an update: prompts of all wishes in turn, then anchors."""
        dice = random.Random(77 * self.seed + update)
        held = round(self.arm.replies * self.arm.anchors)
        chosen: list[Corrected | Asked] = [*map(self._varied, self._rehearsed(self.arm.replies - held, dice))]
        corrected = {one.asked.messages[0] for one in self.pool}
        own = [text for text in self._thanked if text not in corrected]
        return [*chosen, *(Asked(Topic("", ()), (text,)) for text in self._held_prompts(own, held))]

    def _rehearsed(self, count: int, dice: random.Random) -> list[Corrected]:
        """Return corrected prompts, those of each wish in turn; wishes that rest have the server's share of places."""
        given = [wish for wish in self.wishes if any(one.wish == wish for one in self.pool)]
        shares = self.steps[-1].shares if self.steps else {}
        level = math.inf if self.arm.stop_share is None else FALLS_BELOW * self.arm.stop_share
        # An older wish rests too: the server's patience has ended its practice.
        resting = [wish for wish in given if wish != given[-1] or shares.get(wish, 0.0) >= level]
        still_open = [wish for wish in given if wish not in resting]
        kept = int(count * REHEARSED) if resting and still_open else 0
        found = []
        for wishes, places in ((still_open or given, count - kept), (resting, kept)):
            turns = [_without_end([one for one in self.pool if one.wish == wish], dice) for wish in wishes]
            found += [next(turns[n % len(turns)]) for n in range(places)]
        return found

    def _varied(self, one: Corrected) -> Corrected:
        """Return the prompt or a variant of it, in the server's turns (`practice.plan`)."""
        done = self._rehearsals[one.asked]
        self._rehearsals[one.asked] += 1
        share = self.arm.variants
        if self._writer is None or int((done + 1) * share) == int(done * share):
            return one
        varied = asyncio.run(self._writer.of(one.asked, one.hint))
        return one if varied is None else replace(one, asked=varied)

    def _held_prompts(self, own: Sequence[str], count: int) -> list[str]:
        """Return the anchors of an update, chosen as the server chooses them."""
        used, found = AnchorUse(Counter(self._anchored.times), self._anchored.leaks), list[str]()
        for _ in range(count):
            left = [text for text in own if text not in found]
            every = own if left else self.anchors
            places = left or [text for text in self.anchors if text not in found] or self.anchors
            found.append(used.choice(places, sum(used.times[text] for text in every)))
            used.times[found[-1]] += 1
        return found

    # -- what is learned -----------------------------------------------------------------------------------------------

    async def learn(self, update: int, replies: Sequence[Reply]) -> None:
        """Train on the replies to the prompts of `ask`."""
        step = Step(update, {})
        samples: list[Sample] = []
        if self._round_of is not None:
            samples = await self._hear(update, replies, step, self._round_of)
        elif self._now:
            samples = await self._practise(update, replies, step)
        self.metrics = {}
        if samples:
            self.metrics = self._train(samples)
        step.samples = len(samples)
        if samples or not self.steps:
            step.shares = {wish: one.share(self.policy) for wish, one in self._yardsticks.items()}
        else:
            step.shares = dict(self.steps[-1].shares)
        self.steps.append(step)
        if self.stopped_at is None and self._has_enough(step):
            self.stopped_at = update

    async def _hear(self, update: int, replies: Sequence[Reply], step: Step, wish: str) -> list[Sample]:
        user, asked = self.users[wish], [one for one in self._now if isinstance(one, Asked)]
        said = user.said(asked, replies)
        batch = await user.round(asked, replies, said, update - 1, self.sampling)
        step.complained = 1 - batch.complaints["thanks"] / len(asked)
        if update > self.last_mark:
            pairs = zip(asked, said, strict=True)
            self._thanked |= dict.fromkeys(one.messages[0] for one, answer in pairs if answer in THANKS)
        hints = {sample.sample_id: sample.hint.text for sample in batch.samples if sample.hint is not None}
        for n, one in enumerate(asked):
            hint = hints.get(f"v{update - 1}-{n}")
            if hint is not None and not self.arm.is_live:
                self.pool.append(Corrected(wish, one, hint))
                self.stopped_at = None  # the wish was asked for again: what was learned of it did not do
        step.dropped = dict(batch.dropped)
        return batch.samples

    async def _practise(self, update: int, replies: Sequence[Reply], step: Step) -> list[Sample]:
        dice = random.Random(13 * self.seed + update)
        jobs: list[tuple[JudgedTurn, str | None]] = []
        verdicts: list[int] = []
        for n, (one, reply) in enumerate(zip(self._now, replies, strict=True)):
            asked = one.asked if isinstance(one, Corrected) else one
            user = self.users[one.wish if isinstance(one, Corrected) else self.wishes[0]]
            turn = user.turn(f"p{update}-{n}", asked, reply, None, update - 1, self.sampling)
            if not isinstance(one, Corrected):
                jobs.append((turn, None))
                continue
            verdict = -1 if user.complaint(asked.topic, reply) else 1
            verdicts.append(verdict)
            if self.arm.has_judge:
                turn = replace(turn, verdict=Verdict(verdict, (verdict,), "llm"))
            hints = [one.hint] if self.arm.has_own_hint else [o.hint for o in self.pool if o.wish == one.wish]
            jobs.append((turn, dice.choice(hints)))
        async with AsyncExitStack() as stack:
            user = next(iter(self.users.values()))  # all users share the engine and the settings
            tools = await stack.enter_async_context(user.scoring(update - 1, places=len(jobs)))
            if self.arm.least_relevance:
                answers = await asyncio.gather(*(self._answers(turn, hint) for turn, hint in jobs))
                jobs = [job for job, fits in zip(jobs, answers, strict=True) if fits]
                step.answered = sum(answers) / len(answers)
            found = await asyncio.gather(*(self._method.practise(turn, hint, tools) for turn, hint in jobs))
        step.dropped = dict(Counter(f"{one.reason}: {one.detail}" for one in found if isinstance(one, Dropped)))
        step.passed = sum(verdict == 1 for verdict in verdicts) / max(1, len(verdicts))
        for (turn, hint), made in zip(jobs, found, strict=True):
            if hint is None and not isinstance(made, Dropped):
                sides = (made.student_log_probs or (), made.teacher_log_probs or ())
                self._anchored.add(turn.request.messages[0].text(), mean_kl([sides]))
        return [one for one in found if not isinstance(one, Dropped)]

    async def _answers(self, turn: JudgedTurn, hint: str | None) -> bool:
        return hint is None or await self._relevance.answers(
            turn.request.messages[-1].text(), turn.request, turn.turn.reply.text()
        )

    def _train(self, samples: list[Sample]) -> dict[str, float]:
        result = self._learner.step(samples, lambda: None)
        if isinstance(result, NoStep):  # memory ran out beside other workers: try the batch again, as a trainer does
            result = self._learner.step(samples, lambda: None)
        if isinstance(result, NoStep):
            raise RuntimeError(f"{self.arm.name}: {result.reason}")
        return dict(result.metrics)

    def _has_enough(self, step: Step) -> bool:
        given = {one.wish for one in self.pool}
        share, passed = self.arm.stop_share, self.arm.stop_passed
        if not given or self._round_of is not None or (share is None and passed is None):
            return False
        has_share = share is None or all(step.shares.get(wish, 0.0) >= share for wish in given)
        return has_share and (passed is None or (step.passed or 0.0) >= passed)

    # -- the learned share ---------------------------------------------------------------------------------------------

    def yardstick_prompts(self) -> list[tuple[Ids, Ids]]:
        """Return (plain, hinted) prompts of every wish, held back from practice."""
        end = "hinted" if self.arm.has_judge else "complained"
        found = []
        for number, wish in enumerate(self.wishes):
            order = self.topics(number * self._sizes.updates + 1)
            for n, topic in enumerate(order[-self._sizes.yardstick_prompts :]):
                told = ask_as(PREFERENCES[wish], topic, end, n, place=self._place, in_few_words=self.arm.in_few_words)
                hinted = self._subject.prompt(told)
                found.append((self._subject.prompt(PREFERENCES[wish].question(topic)), hinted))
        return found

    def set_yardsticks(
        self, prompts: Sequence[tuple[Ids, Ids]], replies: Sequence[Reply], hinted_replies: Sequence[Reply]
    ) -> None:
        for number, wish in enumerate(self.wishes):
            own = slice(number * self._sizes.yardstick_prompts, (number + 1) * self._sizes.yardstick_prompts)
            neutral = self._neutral_prompts(number, wish) if self._neutral else None
            self._yardsticks[wish] = yardstick(
                self.policy, prompts[own], replies[own], hinted_replies[own], neutral, self._guidance
            )

    def _neutral_prompts(self, number: int, wish: str) -> list[Ids]:
        order = self.topics(number * self._sizes.updates + 1)
        asked = [PREFERENCES[wish].question(topic) for topic in order[-self._sizes.yardstick_prompts :]]
        told = [hinted((Message(role="user", content=text),), self._neutral, self._place) for text in asked]
        return [self._subject.prompt(messages[0].text()) for messages in told if messages is not None]


def train_update(fleet: Fleet, runs: Sequence[Practised], update: int, sizes: Sizes) -> None:
    """Make one update of every run."""
    prompts = [run.ask(update) for run in runs]
    filled = [own or [next(own for own in prompts if own)[0]] for own in prompts] if any(prompts) else []
    replies: list[list[Reply]] = [[] for _ in runs]
    if filled:
        seeds = [1000 * run.seed + update for run in runs]
        replies = sample(fleet, filled, sizes.reply_tokens, sizes.temperature, seeds, sizes.width)

    async def learn() -> None:
        for run, own, its in zip(runs, prompts, replies, strict=True):
            await run.learn(update, its[: len(own)])

    asyncio.run(learn())
    if filled:
        fleet.refresh()


def measure_yardsticks(fleet: Fleet, runs: Sequence[Practised], sizes: Sizes) -> None:
    """Fix the texts of the learned share, before the first update: all policies are the base."""
    prompts = [run.yardstick_prompts() for run in runs]
    sides = []
    for side in (0, 1):
        own = [[pair[side] for pair in some] for some in prompts]
        seeds = [31 + side] * len(runs)
        sides.append(sample(fleet, own, sizes.yardstick_tokens, sizes.temperature, seeds, sizes.width))
    for run, its, replies, told in zip(runs, prompts, *sides, strict=True):
        run.set_yardsticks(its, replies, told)


def _without_end(some: Sequence[_T], dice: random.Random) -> Iterator[_T]:
    """Yield the items in a new random order again and again."""
    while True:
        yield from dice.sample(list(some), len(some))
