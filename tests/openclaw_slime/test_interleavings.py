"""Random walks of a toy node (`node_machine`): the real loop, ledger, publisher and trainer API, with toy weights.

People chat with what serves, a judge speaks sooner or later, the driver trains, pushes and checkpoints. In between, and
at each point inside a driver's turn, the driver is killed or meets an error, a user's session is forgotten, a lease is
revoked, the operator or the watch rolls back, a version is pinned, the server or the engine dies and comes back.

- The ledger's audit is clean, and a sample ends `rolled_back` only if a rollback abandoned the version that sampled or
  trained it. In the end every other sample is in the serving weights, once.
- A driver that starts holds the best weights that nobody abandoned and that are whole on disk, and they serve.
- The watch goes back to the newest version up to the last good one that exists, and never to the base in silence.
- The ledger names no weights that are not on disk, and the newest checkpoints are kept.

The suite makes a few walks, the same in each run. OPENCLAW_INTERLEAVINGS sets their number and OPENCLAW_SEED draws
others: `OPENCLAW_INTERLEAVINGS=1000 OPENCLAW_SEED=1 scripts/test.sh tests/openclaw_slime/test_interleavings.py -s`.
"""

import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import structlog
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from node_machine import EVENTS, POINTS, Node
from pydantic import SecretStr
from toy_node import TOKEN

from openclaw_rl.ledger import leases
from openclaw_rl.publishing import publisher
from openclaw_slime.node import NodeConfig

EXAMPLES, SEED = int(os.environ.get("OPENCLAW_INTERLEAVINGS", "20")), int(os.environ.get("OPENCLAW_SEED", "0"))
STEPS = 8
DAYS = st.integers(0, 4)


class Walk(RuleBasedStateMachine):
    config: NodeConfig
    tally: Counter[str]
    node: Node

    @initialize(dice=st.integers(0, 2**32), every=st.integers(1, 4), every_s=st.sampled_from([float("inf"), 250.0]))
    def begin(self, dice: int, every: int, every_s: float) -> None:
        self.node = Node(self.config, dice, every=every, every_s=every_s, tally=self.tally)

    @rule(n=st.integers(1, 3), is_judged=st.booleans())
    def people_chat(self, n: int, is_judged: bool) -> None:
        self.node.people_chat(n, is_judged=is_judged)

    @rule()
    def judge_speaks(self) -> None:
        self.node.judge_speaks()

    @rule(days=DAYS)
    def days_pass(self, days: int) -> None:
        self.node.days_pass(days)

    @rule()
    def driver_is_stopped(self) -> None:
        self.node.stop_driver()

    @rule(what=st.sampled_from(sorted(EVENTS)))
    def something_happens(self, what: str) -> None:
        self.node.happen(what)

    @rule(days=DAYS, point=st.sampled_from(POINTS), what=st.sampled_from(["killed", "fails"]))
    def driver_is_disturbed_at(self, days: int, point: str, what: str) -> None:
        self.node.days_pass(days)
        self.node.until_it_happens(point, what)

    @rule(days=DAYS, point=st.sampled_from(POINTS), what=st.sampled_from(sorted(EVENTS)), starts=st.booleans())
    def something_happens_at(self, days: int, point: str, what: str, starts: bool) -> None:
        """In a turn of the driver, or while it starts."""
        self.node.days_pass(days)
        if starts:
            self.node.happen("killed")
        self.node.until_it_happens(point, what)

    @invariant()
    def it_holds(self) -> None:
        if hasattr(self, "node"):
            self.tally["steps"] += 1
            self.node.check()

    def teardown(self) -> None:
        if hasattr(self, "node"):
            try:
                self.node.finish()
            finally:
                self.node.close()


@pytest.fixture
def is_quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(publisher, "RETRY_S", 0.02)
    monkeypatch.setattr(leases, "STEP_S", 0.1)  # a deletion inside a step waits no longer for the commit
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("is_quick")
def test_random_interleavings_lose_nothing_and_repeat_nothing(node_config: Callable[..., NodeConfig]) -> None:
    tally: Counter[str] = Counter()

    class Machine(Walk):
        config = node_config("combine").model_copy(update={"token": SecretStr(TOKEN)})

    Machine.tally = tally
    how = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a shrink would take minutes
        suppress_health_check=list(HealthCheck),
    )
    started = time.monotonic()
    try:
        run_state_machine_as_test(seed(SEED)(Machine), settings=how)
    finally:
        seconds = round(time.monotonic() - started)
        sys.stdout.write(json.dumps({"seed": SEED, "seconds": seconds, **dict(sorted(tally.items()))}) + "\n")
