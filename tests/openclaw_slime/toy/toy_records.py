"""Readers of a toy node's ledger and files, and the way of people's turns into its ledger."""

import json
from contextlib import suppress

from toy_node import ToyServer

from openclaw_rl.ledger import TurnSummary
from openclaw_rl.ledger.states import ABANDONED, DEAD, PASSED
from openclaw_rl.messages import Message
from openclaw_rl.types import (
    NextState,
    Request,
    Sample,
    SamplingParams,
    Scope,
    Turn,
    TurnKey,
    TurnState,
    Verdict,
    Version,
    VersionRun,
)
from openclaw_slime.checkpoints import Checkpoints

IDS, MASK, LOG_PROBS = (7, 8, 9), (True,) * 3, (-1.0,) * 3


class Records:
    """Reads and writes of one toy node's ledger, and reads of its weights."""

    def __init__(self, server: ToyServer, checkpoints: Checkpoints) -> None:
        self._server, self._checkpoints = server, checkpoints
        self.sampled_by: dict[str, int] = {}
        """Version that sampled each turn, also of those that are forgotten."""
        self.forgotten: set[str] = set()

    # -- people and the judge

    def serve(self) -> str:
        """Record a turn of the version that serves, in a session of its own."""
        name, version = f"turn-{len(self.sampled_by):03d}", self._server.serving.current
        assert self._server.do(self._server.ledger.version(version)).state not in ABANDONED
        self.sampled_by[name] = version
        self._server.do(self._served(name, version))
        return name

    def judge(self, name: str) -> None:
        self._server.do(self._judged(name))

    async def _served(self, name: str, version: int) -> None:
        ledger, message, reply = self._server.ledger, Message(role="user", content="q"), Message(role="assistant")
        scope, params = Scope("u", f"s-{name}"), SamplingParams(max_new_tokens=8)
        await ledger.begin(Request(name, scope, 0.0, (message,), None, None, (1, 5), params))
        turn = Turn(name, name, 0.0, IDS, LOG_PROBS, MASK, (VersionRun(version, 3),), "stop", reply)
        await ledger.finish(turn, TurnKey("r", "b", "h"))

    async def _judged(self, name: str) -> None:
        ledger, runs = self._server.ledger, (VersionRun(self.sampled_by[name], 3),)
        await ledger.pair(name, NextState((Message(role="user", content="q"),)), by_request_id=name)
        await ledger.record_verdict(name, Verdict(1, (1,), "rules"))
        await ledger.record_sample(Sample(name, (1, 5), IDS, MASK, LOG_PROBS, runs, 0.7, reward=1.0))

    async def forget(self, name: str) -> tuple[int, ...]:
        """Delete the turn's session. Return the versions that were trained on it."""
        done = await self._server.ledger.forget(f"s-{name}")
        self.forgotten.add(name)
        return done.trained_in

    def not_forgotten(self, names: list[str]) -> list[str]:
        return [name for name in names if name not in self.forgotten]

    # -- what is

    def turns(self) -> list[TurnSummary]:
        turns = self._server.do(self._server.ledger.turns(limit=10_000))
        assert {turn.turn_id for turn in turns} == self.sampled_by.keys() - self.forgotten
        return turns

    def states(self) -> dict[str, TurnState]:
        return {turn.turn_id: turn.state for turn in self.turns()}

    def versions(self) -> dict[int, Version]:
        return {version.weight_version: version for version in self._server.do(self._server.ledger.versions())}

    def snapshot(self) -> tuple[dict[int, Version], dict[int, list[str]]]:
        """Return the versions, and the weights of those that are alive, durable and not pruned, of one moment.

        Raises FileNotFoundError if the ledger names weights that are not on disk.
        """
        while True:
            versions = self.versions()
            alive = [v for v in versions.values() if v.durable and v.state not in DEAD]
            named = [v for v in alive if v.folder is not None or v.weights_file is None]
            try:
                weights = {v.weight_version: [] if v.folder is None else self._weights(v) for v in named}
            except FileNotFoundError:
                if self.versions() == versions:  # else the publisher has pruned it meanwhile
                    raise
            else:
                if self.versions() == versions:
                    return versions, weights

    def existing(self) -> dict[int, list[str]]:
        """Return the weights of the versions that a rollback can go to: they passed the gate, and are whole on disk.

        A checkpoint that was not reported exists from the driver's next start on.
        """
        versions, weights = self.snapshot()
        return {number: names for number, names in weights.items() if versions[number].state in PASSED}

    def best_on_disk(self) -> list[str]:
        """Return the longest weights of which the driver has a whole checkpoint, and which nobody abandoned."""
        folders = {self._checkpoints.folder(fence) for fence in self._checkpoints.whole_fences()}
        versions = [v for v in self.versions().values() if v.folder in folders and v.state not in ABANDONED]
        best: list[str] = []
        for version in versions:
            with suppress(FileNotFoundError):  # pruned, by the ledger's word
                best = max(best, self._weights(version), key=len)
        return best

    def has_learned(self, number: int) -> bool:
        """Return False for the base, also under a new number that it got after a crash."""
        version = self._server.do(self._server.ledger.version(number))
        return number > 0 if version.same_weights_as is None else self.has_learned(version.same_weights_as)

    def _weights(self, version: Version) -> list[str]:
        assert version.folder is not None
        names: list[str] = json.loads((self._server.folder / version.folder / "weights.json").read_text())
        return names
