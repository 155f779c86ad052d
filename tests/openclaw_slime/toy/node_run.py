"""Drivers on one data directory, started again until the work is done, over the toy server (`toy_node`)."""

import threading

from toy_node import ToyMegatron, ToyServer

from openclaw_rl.backoff import Backoff
from openclaw_rl.trainers.client import LeaseSession
from openclaw_rl.types import TurnState, Version
from openclaw_slime.checkpoints import Checkpoints, Due
from openclaw_slime.loop import NodeLoop, StartAgain
from openclaw_slime.node import TRAINER, NodeConfig

POINTS = ["generate", "train", "trained", "push", "pushing", "pushed", "save", "saved"]
"""Points of a turn at which a driver may end, in their order."""


class Run:
    """Starts drivers on one data directory until the work is done."""

    def __init__(self, server: ToyServer, config: NodeConfig, *, every: int) -> None:
        self.server, self.config = server, config
        self.checkpoints = Checkpoints(server.folder, every=every)
        self.client = server.client()
        self.starts = 0
        self.now = 0.0
        """The clock by which a checkpoint that failed is tried again."""
        self.hung = threading.Event()

    def start(self) -> tuple[NodeLoop, ToyMegatron]:
        self.starts += 1
        started = self.client.start(
            TRAINER, self.checkpoints.whole_fences(), writes_files=self.config.push_folder is not None
        )
        megatron = ToyMegatron(self.server, self.checkpoints, self.config, started.tip)
        session = LeaseSession(
            self.client,
            TRAINER,
            threading.Event(),
            wait_s=0.2,
            pauses=Backoff(0.01, 0.1),
            on_hang=self.hung.set,
        )
        due = Due(self.checkpoints.every, clock=lambda: self.now)
        driver = NodeLoop(session, megatron.node(), self.config, self.checkpoints, started.tip, due=due)
        driver._meet_engine()
        return driver, megatron

    def finish(self, driver: NodeLoop | None = None) -> None:
        """Turn until no sample waits; start a driver again when it asks for it."""
        driver = driver or self.start()[0]
        while True:
            try:
                if driver.turn() is None and not self.counts().get("sampled"):
                    driver._save()
                    return
            except StartAgain:
                driver, _ = self.start()

    def counts(self) -> dict[str, int]:
        return self.server.do(self.server.ledger.counts())

    def samples(self, n: int) -> list[str]:
        return [self.server.do(self.server.sample(self.server.serving.current)) for _ in range(n)]

    def check(self, samples: list[str]) -> None:
        """Every sample is in the weights that serve, once, and the ledger says so too."""
        ledger, engine = self.server.ledger, self.server.engine
        assert sorted(engine.holds) == sorted(samples)
        serving = self.server.do(ledger.serving_version())
        assert (self.server.serving.current, engine.weight_version) == (serving, serving)
        assert self.server.do(ledger.audit()) == []
        for name in samples:
            assert self.server.do(ledger.turn(name)).state is TurnState.TRAINED


def turn_and_save(driver: NodeLoop) -> None:
    driver.turn()
    driver._save()


def turns(driver: NodeLoop, n: int) -> None:
    for _ in range(n):
        driver.turn()


def number(version: Version) -> int:
    return version.weight_version


def tip(run: Run) -> int:
    return run.server.do(run.server.ledger.tip()).weight_version
