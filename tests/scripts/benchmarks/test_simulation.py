"""Second turns and demonstrations of the learning benchmark's simulated user."""

import asyncio

import pytest

from benchmarks.learning.engine import ForwardEngine
from benchmarks.learning.fleet import Reply
from benchmarks.learning.simulation import Asked, Batch, Simulation
from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.offline.personas import SHORT, topics
from openclaw_rl.types import Ids, SamplingParams

TOPIC = topics("train")[0]
GOOD = f"It is about {TOPIC.about[0]}, and it is easy to do."
LONG = f"It is about {TOPIC.about[0]}, " + "and so on, " * 30


class Characters:
    """A subject whose tokens are characters."""

    end_id = 0

    def prompt(self, *messages: str) -> Ids:
        return self.encode("|".join(messages))

    def encode(self, text: str) -> Ids:
        return tuple(map(ord, text))

    def text(self, ids: Ids) -> str:
        return "".join(map(chr, ids)).rstrip("\0")


def reply(text: str) -> Reply:
    ids = (*map(ord, text), Characters.end_id)
    return Reply(ids, (-1.0,) * len(ids))


def heard(*, demonstrates: bool) -> tuple[list[Asked], Batch]:
    """Two chats: the first reply of both is too long; the second reply of one is good."""
    user = Simulation(
        Characters(),  # type: ignore[arg-type]
        SHORT,
        METHOD,
        BinarySettings(),
        ForwardEngine(None),  # type: ignore[arg-type]
        seed=0,
        reads_request=True,
        demonstrates=demonstrates,
    )
    asked, replies = user.first([TOPIC, TOPIC]), [reply(LONG), reply(LONG)]
    said = user.said(asked, replies)
    asked += user.second(asked, replies, said, [TOPIC, TOPIC])
    replies += [reply(GOOD), reply(LONG)]
    said += user.said(asked[2:], replies[2:])
    return asked, asyncio.run(user.round(asked, replies, said, 3, SamplingParams(96, temperature=0.7)))


@pytest.mark.parametrize("demonstrates", [False, True])
def test_what_each_turn_is_worth(demonstrates: bool) -> None:
    asked, batch = heard(demonstrates=demonstrates)
    assert batch.rewards == [-1, -1, 1, -1]
    assert asked[2].messages[:2] == (asked[0].messages[0], LONG)
    assert len(asked[2].messages) == 3
    judged = [sample for sample in batch.samples if not sample.is_demonstration]
    assert [sample.reward for sample in judged] == [-1.0, -1.0, 1.0, -1.0]
    assert judged[2].prompt_ids == Characters().prompt(*asked[2].messages)


def test_a_demonstration_answers_the_question_itself_and_nobody_sampled_it_there() -> None:
    asked, batch = heard(demonstrates=True)
    (one,) = [sample for sample in batch.samples if sample.is_demonstration]
    assert one.prompt_ids == Characters().prompt(asked[0].messages[0])
    assert one.response_ids == reply(GOOD).ids
    assert (one.reward, set(one.rollout_log_probs), one.oldest_version) == (None, {0.0}, 3)
    assert not [sample for sample in heard(demonstrates=False)[1].samples if sample.is_demonstration]
