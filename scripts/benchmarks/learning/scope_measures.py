"""Measures of a policy in and outside the scope of its wishes, as lines of results."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.learning.experiment import ENDS, ask_as, kept
from benchmarks.learning.fleet import Fleet, Reply, sample
from benchmarks.learning.measures import Answers, quality
from benchmarks.learning.practice import Practised
from benchmarks.learning.scopes import chat, elsewhere, exact, near_forms, tool
from benchmarks.learning.sizes import Sizes
from benchmarks.learning.subject import Subject, forced_log_probs
from benchmarks.learning.tool_form import ToolForm
from openclaw_rl.offline.personas import PREFERENCES, Preference, Problem, Topic, topics
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Ids

GREEDY = 0.02
"""Temperature of questions with one right answer: the likeliest token, but for ties."""
STREAK = 3
CHAT_MEASURED = 3
"""Last turns of the long chat, which are measured."""
MEMORY = "You are a helpful AI assistant named SmolLM, trained by Hugging Face\n\nRemember about the user:\n{}"
"""The system prompt of the model's template, and what agents' memories add to it."""
MEMORIES = ("memory", "memory verbatim")
"""The base with the wish in its system prompt: in one canonical sentence, or as all the user's ways to say it."""


@dataclass(slots=True)
class Line:
    """One line of the results."""

    arm: str
    wishes: list[str]
    """In the order in which the user had them."""
    preference: str
    """The one that is measured."""
    seed: int
    update: int
    quality: dict[str, float]
    passes: str = ""
    """1 for each first reply that meets the wish and is about the question, in the order of the topics."""
    near: dict[str, float] = field(default_factory=dict)
    elsewhere: dict[str, dict[str, float]] = field(default_factory=dict)
    chat: dict[str, float] = field(default_factory=dict)
    """Cost on the last turns of a long neutral chat."""
    tool: dict[str, float] = field(default_factory=dict)
    """`calls`: share of the replies that are calls, where a call is due. `forced`: log-prob per token of a well-formed
    call, less the base's."""
    exact: float | None = None
    problems: float | None = None
    steps: list[dict[str, object]] = field(default_factory=list)
    stopped_at: int | None = None
    training: dict[str, float] = field(default_factory=dict)
    complaints: int = 0
    """Corrected turns that are practised."""
    conversations: int = 0
    """Later conversations with feedback, between the last mark and this line."""
    seconds: float = 0.0
    replies: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """One reply to each other kind of prompt."""


Prompt = Callable[[str], Ids]
"""Renders a question as the policy reads it."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """A policy, and the way in which it is asked."""

    policy: LoraPolicy
    seed: int
    prompt: Prompt
    system: str | None = None
    """System prompt; None: the one that the model's template has by itself."""


class Scales:
    """Measures of a group of policies that one sampler serves."""

    def __init__(self, subject: Subject, fleet: Fleet, sizes: Sizes, problems: Sequence[Problem] = ()) -> None:
        self._subject, self._fleet, self._sizes, self._problems = subject, fleet, sizes, problems

    def scores(self, runs: Sequence[Practised]) -> list[float]:
        """Return the score of each run's first wish, from one reply per held-out topic."""
        asked = topics("held_out")[: self._sizes.held_out]
        found = []
        preferences = [PREFERENCES[run.wishes[0]] for run in runs]
        prompts = [[self._subject.prompt(preference.question(t)) for t in asked] for preference in preferences]
        for preference, own in zip(preferences, self._said(prompts, [r.seed for r in runs], 500_000), strict=True):
            found.append(statistics.fmean(self._is_met(preference, t, r) for t, r in zip(asked, own, strict=True)))
        return found

    def of(self, preferences: Sequence[Preference], spoken: Sequence[Spoken], lines: Sequence[Line]) -> None:
        """Fill in the quality and the near scope of each line that has none, for its preference."""
        if all(line.quality for line in lines):
            return
        asked = topics("held_out")[: self._sizes.held_out]
        twice = asked * self._sizes.replies
        prompts = [[one.prompt(p.question(t)) for t in twice] for p, one in zip(preferences, spoken, strict=True)]
        seeds = [one.seed for one in spoken]
        said = self._said(prompts, seeds, 500_000)
        forms = near_forms()
        near = [[one.prompt(forms[n % len(forms)].format(t.text)) for n, t in enumerate(asked)] for one in spoken]
        said_near = self._said(near, seeds, 600_000)
        plain_near = [self._subject.prompt(forms[n % len(forms)].format(t.text)) for n, t in enumerate(asked)]
        for preference, one, replies, near_replies, line in zip(
            preferences, spoken, said, said_near, lines, strict=True
        ):
            if line.quality:
                continue
            plain = [self._subject.prompt(preference.question(topic)) for topic in twice]
            answers = Answers(twice, plain, replies)
            found = quality(
                self._subject,
                one.policy,
                preference,
                answers,
                temperature=self._sizes.temperature,
                others=self._sizes.others,
            )
            line.quality = _rounded(found.as_dict())
            line.passes = "".join(
                "1" if self._passes(preference, topic, reply) else "0"
                for topic, reply in list(zip(twice, replies, strict=True))[: len(asked)]
            )
            line.replies = kept(self._subject, preference, twice, replies)
            met = [self._is_met(preference, t, r) for t, r in zip(asked, near_replies, strict=True)]
            line.near = _rounded({"score": statistics.fmean(met), **self._cost(one, plain_near, near_replies)})

    def elsewhere(self, spoken: Sequence[Spoken], lines: Sequence[Line]) -> None:
        """Fill in the measures of other kinds of prompt, of a long chat, of a tool, of exact answers and problems."""
        kinds = {kind: some[: self._sizes.elsewhere_prompts] for kind, some in elsewhere().items()}
        asked = [(kind, text) for kind, some in kinds.items() for text in some] * self._sizes.elsewhere_replies
        seeds = [one.seed for one in spoken]
        said = self._said(
            [[one.prompt(text) for _, text in asked] for one in spoken], seeds, 900_000, self._sizes.elsewhere_tokens
        )
        for one, replies, line in zip(spoken, said, lines, strict=True):
            for kind in kinds:
                own = [n for n, (its, _) in enumerate(asked) if its == kind]
                plain = [self._subject.prompt(asked[n][1]) for n in own]
                line.elsewhere[kind] = _rounded(self._cost(one, plain, [replies[n] for n in own]))
                line.texts[kind] = self._one_line(replies[own[0]])
        self._chat(spoken, lines)
        self._tool(spoken, lines)
        questions, sizes = exact()[: self._sizes.exact_questions], self._sizes
        prompts = [[one.prompt(q.question) for q in questions] for one in spoken]
        answers = self._said(prompts, seeds, 1, sizes.exact_tokens, GREEDY)
        for replies, line in zip(answers, lines, strict=True):
            rights = [q.is_right(self._one_line(r)) for q, r in zip(questions, replies, strict=True)]
            line.exact = statistics.fmean(rights)
        if not self._problems:
            return
        prompts = [[one.prompt(p.question) for p in self._problems] for one in spoken]
        answers = self._said(prompts, seeds, 2, sizes.problem_tokens, GREEDY)
        for replies, line in zip(answers, lines, strict=True):
            rights = [p.is_right(self._one_line(r)) for p, r in zip(self._problems, replies, strict=True)]
            line.problems = statistics.fmean(rights)

    def _chat(self, spoken: Sequence[Spoken], lines: Sequence[Line]) -> None:
        """Hold the long chats, each with the policy's own replies, and fill in the cost of the last turns."""
        asked = chat()[: self._sizes.chat_turns]
        held: list[list[list[str]]] = [[[] for _ in range(self._sizes.elsewhere_replies)] for _ in spoken]
        measured: list[list[tuple[Ids, Reply]]] = [[] for _ in spoken]
        seeds = [one.seed for one in spoken]
        for turn, text in enumerate(asked):
            for own in held:
                for messages in own:
                    messages.append(text)
            prompts = [
                [self._subject.prompt(*messages, system=one.system) for messages in own]
                for one, own in zip(spoken, held, strict=True)
            ]
            said = self._said(prompts, seeds, 910_000 + 1000 * turn, chunk=len(prompts[0]))
            for own, replies, its in zip(held, said, measured, strict=True):
                for messages, reply in zip(own, replies, strict=True):
                    if turn >= len(asked) - CHAT_MEASURED:
                        its.append((self._subject.prompt(*messages), reply))
                    messages.append(self._subject.text(reply.ids))
        for one, its, line in zip(spoken, measured, lines, strict=True):
            line.chat = _rounded(self._cost(one, [plain for plain, _ in its], [reply for _, reply in its]))
            line.texts["chat"] = self._one_line(its[-1][1])

    def _tool(self, spoken: Sequence[Spoken], lines: Sequence[Line]) -> None:
        """Fill in how far each policy keeps the form of a call: by its own replies, and on well-formed calls."""
        form, values = ToolForm(self._subject, tool()), tool().values[1 : self._sizes.tool_questions + 1]
        prompts = [[form.prompt(value, system=one.system) for value in values] for one in spoken]
        seeds, tokens = [one.seed for one in spoken], self._sizes.tool_tokens
        said = self._said(prompts, seeds, 920_000, tokens, chunk=len(values))
        for one, own, replies, line in zip(spoken, prompts, said, lines, strict=True):
            texts = [self._subject.text(reply.ids) for reply in replies]
            told = forced_log_probs(
                one.policy, [(p, form.call(v, system=one.system)) for p, v in zip(own, values, strict=True)]
            )
            with one.policy.reference():
                base = forced_log_probs(
                    one.policy, [(form.prompt(v, system=None), form.call(v, system=None)) for v in values]
                )
            moved = (sum(map(sum, told)) - sum(map(sum, base))) / sum(map(len, base))
            line.tool = _rounded({"calls": statistics.fmean(map(form.is_call, texts)), "forced": moved})
            line.texts["tool"] = " ".join(texts[0].split())

    def _said(
        self,
        prompts: Sequence[Sequence[Ids]],
        seeds: Sequence[int],
        offset: int,
        tokens: int | None = None,
        temperature: float | None = None,
        chunk: int | None = None,
    ) -> list[list[Reply]]:
        """chunk: prompts of a policy in one call; fewer where prompts are long, since a call is always filled up."""
        own = [offset + seed for seed in seeds]
        heat = self._sizes.temperature if temperature is None else temperature
        return sample(self._fleet, prompts, tokens or self._sizes.reply_tokens, heat, own, chunk or self._sizes.chunk)

    def _cost(self, one: Spoken, plain: Sequence[Ids], replies: Sequence[Reply]) -> dict[str, float]:
        """Return words, KL to the base per token, and fluency of replies to these prompts."""
        with one.policy.reference():
            pairs = [(prompt, reply.ids) for prompt, reply in zip(plain, replies, strict=True)]
            base = forced_log_probs(one.policy, pairs, self._sizes.temperature)
        tokens = sum(len(reply.ids) for reply in replies)
        own = sum(sum(reply.log_probs) for reply in replies)
        return {
            "words": statistics.fmean(len(self._one_line(reply).split()) for reply in replies),
            "kl": (own - sum(map(sum, base))) / tokens,
            "fluency": sum(map(sum, base)) / tokens,
            "ended": statistics.fmean(reply.ids[-1] == self._subject.end_id for reply in replies),
        }

    def _is_met(self, preference: Preference, topic: Topic, reply: Reply) -> bool:
        has_ended = reply.ids[-1] == self._subject.end_id
        return preference.is_met(topic, self._subject.text(reply.ids), has_ended=has_ended)

    def _passes(self, preference: Preference, topic: Topic, reply: Reply) -> bool:
        has_ended, text = reply.ids[-1] == self._subject.end_id, self._subject.text(reply.ids)
        return preference.complaint(topic, text, has_ended=has_ended, reads_request=True) is None

    def _one_line(self, reply: Reply) -> str:
        return " ".join(self._subject.text(reply.ids).split())


def spoken_to(run: Practised, subject: Subject) -> Spoken:
    return Spoken(run.policy, run.seed, lambda question: subject.prompt(question))


def line_of(run: Practised, preference: str, update: int, seconds: float) -> Line:
    told = ("loss", "grad_norm", "abs_log_ratio", "gap_abs", "kl", "learner_s")
    return Line(
        run.arm.name,
        list(run.wishes),
        preference,
        run.seed,
        update,
        {},
        steps=[asdict(step) for step in run.steps],
        stopped_at=run.stopped_at,
        training=_rounded({key: run.metrics[key] for key in told if key in run.metrics}),
        complaints=sum(one.wish == preference for one in run.pool),
        conversations=run.arm.later_conversations if update > run.last_mark else 0,
        seconds=round(seconds, 1),
    )


def ends(
    subject: Subject, preference: Preference, seed: int, sizes: Sizes, problems: Sequence[Problem] = ()
) -> list[Line]:
    """Measure the base: as it is, with the wish in its prompt, and with the wish in its system prompt."""
    policy = subject.new_policy(TrainerSettings(device=subject.device))
    asked = {preference.question(topic): (n, topic) for n, topic in enumerate(topics("held_out"))}

    def system_of(end: str) -> str | None:
        if end not in MEMORIES:
            return None
        wishes = (preference.hint,) if end == "memory" else preference.fault.said
        return MEMORY.format("\n".join(f"- {wish}" for wish in wishes))

    def prompt_of(end: str) -> Prompt:
        if (system := system_of(end)) is not None:
            return lambda question: subject.prompt(question, system=system)

        def prompt(question: str) -> Ids:
            if question not in asked:
                return subject.prompt(question)
            n, topic = asked[question]
            return subject.prompt(ask_as(preference, topic, end, n))

        return prompt

    names = (*ENDS, *MEMORIES)
    lines = [Line(name, [preference.name], preference.name, seed, 0, {}) for name in names]
    spoken = [Spoken(policy, seed, prompt_of(name), system_of(name)) for name in names]
    scales = Scales(subject, Fleet([policy] * len(names), subject.end_id), sizes, problems)
    scales.of([preference] * len(names), spoken, lines)
    scales.elsewhere(spoken, lines)
    return lines


def turns_until_learned(corrections: int, passes: str) -> float | None:
    """Return the mean number of turns before three first replies in a row meet the wish.

    The turns are the corrected ones, and those of later chats until the streak begins. Later chats are the held-out
    replies in their order, from each of them on, around the end. No more is learned in them: this is an upper bound.
    None: there is no streak.
    """
    around = passes + passes[: STREAK - 1]
    starts = [n for n in range(len(passes)) if around[n : n + STREAK] == "1" * STREAK]
    if not starts:
        return None
    waits = [min((start - n) % len(passes) for start in starts) for n in range(len(passes))]
    return corrections + statistics.fmean(waits)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 4) for key, value in values.items()}
