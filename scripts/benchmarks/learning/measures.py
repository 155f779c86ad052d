"""Measures on held-out topics: the preference, and its cost, since a policy can hack a score alone.

Replies are sampled as they are served, at the sampling temperature. The frozen base gives three measures. KL is per
token, on the policy's own samples. Fluency is the mean log-prob of the reply after its plain prompt. Relevance is the
mean log-prob per token of the question, given the reply, less that of other topics' questions.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.learning.fleet import Reply
from benchmarks.learning.subject import Subject, forced_log_probs
from openclaw_rl.offline.personas import Preference, Topic, has_list, is_about, words_of
from openclaw_rl.practice.relevance import TASK
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Ids

RUN = 5


@dataclass(frozen=True, slots=True)
class Quality:
    score: float
    """Share of replies that meet every rule of the preference."""
    kl: float
    fluency: float
    relevance: float
    on_topic: float
    """Share of replies that hold a word of their topic."""
    words: float
    ended: float
    lists: float
    echoes: float
    repeats: float
    """Share of replies with `RUN` words in a row of their question, which raise relevance."""

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Answers:
    """The replies of one policy, one for each topic."""

    asked: Sequence[Topic]
    prompts: Sequence[Ids]
    """The prompts without a hint, whether or not the replies were sampled with one."""
    replies: Sequence[Reply]


def quality(
    subject: Subject,
    policy: LoraPolicy,
    preference: Preference,
    answers: Answers,
    *,
    temperature: float,
    others: int,
) -> Quality:
    """Return the quality of replies.

    With a hint, `kl` is the distance of the hinted base from the base on the hinted base's replies."""
    asked, plain, replies = answers.asked, answers.prompts, answers.replies
    pairs = [(prompt, reply.ids) for prompt, reply in zip(plain, replies, strict=True)]
    own = [value for reply in replies for value in reply.log_probs]
    with policy.reference():
        base = [value for values in forced_log_probs(policy, pairs, temperature) for value in values]
        fluency = statistics.fmean(value for values in forced_log_probs(policy, pairs) for value in values)
        relevance = _relevance(subject, policy, preference, asked, replies, others)
    texts = [subject.text(reply.ids) for reply in replies]
    ended = [reply.ids[-1] == subject.end_id for reply in replies]
    words = [text.split() for text in texts]
    return Quality(
        score=statistics.fmean(
            preference.is_met(topic, text, has_ended=end) for topic, text, end in zip(asked, texts, ended, strict=True)
        ),
        kl=statistics.fmean(a - b for a, b in zip(own, base, strict=True)),
        fluency=fluency,
        relevance=relevance,
        on_topic=statistics.fmean(is_about(topic, text) for topic, text in zip(asked, texts, strict=True)),
        words=statistics.fmean(map(len, words)),
        ended=statistics.fmean(ended),
        lists=statistics.fmean(map(has_list, texts)),
        echoes=statistics.fmean(preference.echoes(words_of(text)) for text in texts),
        repeats=statistics.fmean(
            repeats_question(preference.question(topic), text) for topic, text in zip(asked, texts, strict=True)
        ),
    )


def repeats_question(question: str, reply: str) -> bool:
    """Return True if the reply holds `RUN` words in a row of the question, or all of a shorter one."""
    asked, said = words_of(question), words_of(reply)
    run = min(RUN, len(asked))
    runs = {tuple(asked[k : k + run]) for k in range(len(asked) - run + 1)}
    return any(tuple(said[k : k + run]) in runs for k in range(len(said) - run + 1))


def _relevance(
    subject: Subject,
    policy: LoraPolicy,
    preference: Preference,
    asked: Sequence[Topic],
    replies: Sequence[Reply],
    others: int,
) -> float:
    dice = random.Random(0)
    distinct = sorted({topic.text: topic for topic in asked}.values(), key=lambda topic: topic.text)
    pairs = []
    for topic, reply in zip(asked, replies, strict=True):
        about = subject.prompt(TASK.format(subject.text(reply.ids)))
        compared = dice.sample([other for other in distinct if other.text != topic.text], others)
        pairs += [(about, subject.encode(preference.question(t))) for t in (topic, *compared)]
    means = [statistics.fmean(values) for values in forced_log_probs(policy, pairs)]
    rows = [means[k : k + 1 + others] for k in range(0, len(means), 1 + others)]
    return statistics.fmean(row[0] - statistics.fmean(row[1:]) for row in rows)
