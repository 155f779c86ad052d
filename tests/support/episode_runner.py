"""A runner that plays episodes straight into a ledger, without a server: requests, replies, votes, outcomes, credit."""

from dataclasses import dataclass, field

import pytest
from turns import KEY, make_request, make_turn, serve_turn

from openclaw_rl.errors import EpisodeRefused
from openclaw_rl.ledger import Ledger
from openclaw_rl.messages import Message
from openclaw_rl.methods.agent import METHOD, AgentSettings
from openclaw_rl.types import EpisodeOutcome, NewEpisode, Split, Verdict


def user(text):
    return Message(role="user", content=text)


def assistant(text):
    return Message(role="assistant", content=text)


@dataclass
class Runner:
    """Plays episodes into a ledger: each step is a request with the history so far, and a reply."""

    ledger: Ledger
    who: str = "ann"
    told: dict = field(default_factory=dict)
    count: int = 0

    async def open(self, name, *, task="t", group=None, size=1, split=Split.TRAIN):
        episode = await self.ledger.open_episode(NewEpisode(self.who, name, task, group, size, split))
        self.told[name] = [user(f"solve {task} ({name})")]
        return episode

    def request(self, name, episode, request_id):
        # At a time of its own: the ledger's clock of tests stands.
        return make_request(
            request_id,
            *self.told[name],
            user=self.who,
            session=f"episode:{name}",
            at=self.ledger._clock(),
            in_episode=episode.number,
            episode=name,
        )

    async def step(self, name, *, reply="do", drop=None, observation="seen", keeps_reply=True):
        """One step; the next request will bring `observation`. Return the turn's id."""
        self.count += 1
        turn_id = f"{name}-turn-{self.count}"
        episode = await self.ledger.find_episode(self.who, name)
        await serve_turn(
            self.ledger,
            self.request(name, episode, f"r-{turn_id}"),
            make_turn(turn_id, request=f"r-{turn_id}", reply=f"{reply} {self.count}", drop=drop),
            KEY,
        )
        await self.ledger.continue_episode(f"r-{turn_id}")
        if keeps_reply:
            self.told[name].append(assistant(f"{reply} {self.count}"))
        self.told[name].append(user(f"{observation} {self.count}"))
        return turn_id

    async def judge(self, votes):
        """Judge every step that waits: `votes` by turn; no votes: it stays without a verdict."""
        for turn in await self.ledger.to_judge(100):
            found = votes.get(turn.turn.turn_id)
            verdict = None
            if found is not None:
                valid = [vote for vote in found if vote is not None]
                mean = sum(valid) / len(valid)
                verdict = Verdict((mean > 0) - (mean < 0), tuple(found), "llm")
            await self.ledger.record_verdict(turn.turn.turn_id, verdict)

    async def end(self, name, reward, **more):
        return await self.ledger.end_episode(self.who, name, EpisodeOutcome(reward, **more))

    async def credit(self, **settings):
        for group in await self.ledger.groups_to_credit():
            assert await self.ledger.record_credit(group, METHOD.credit(group, AgentSettings(**settings)))

    async def fates(self, name):
        found = await self.ledger.episode(name, user=self.who)
        return [(turn.step, str(turn.reason or turn.state), turn.reward, turn.advantage) for turn in found.turns]


async def refused(call, code, status=409):
    with pytest.raises(EpisodeRefused) as error:
        await call
    assert (error.value.code, error.value.status) == (code, status)
    return error.value
