"""Random sequences of calls and crashes give the same states as a model without SQL.

The model has turns, versions and the lease in plain dicts and predicts the result of each call. After every step the
audit is clean, the states and counts are the model's, and no turn has trained two versions of one ancestry.
"""

import shutil
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from ledger_model import DEAD, TRAINING, LedgerModel, ModelTurn, ModelVersion

from openclaw_rl.errors import CommitRefused
from openclaw_rl.messages import Message
from openclaw_rl.types import DropReason, Feedback, NextState, Verdict, VersionRun


class LedgerMachine(LedgerModel):
    @rule(data=st.data(), drop=st.sampled_from([None, None, None, DropReason.CANCELLED, DropReason.OPTED_OUT]))
    def serve_a_turn(self, data, drop) -> None:
        name = f"t{len(self.turns)}"
        known = sorted(self.versions)
        runs = data.draw(st.lists(st.sampled_from(known[-4:]), min_size=1, max_size=2))
        self.do(self._serve(name, tuple(VersionRun(version, 2) for version in runs), drop))
        self.turns[name] = ModelTurn(set(runs), "served" if drop is None else f"dropped.{drop}")

    @rule(is_tool=st.booleans())
    def pair_a_turn(self, is_tool) -> None:
        if (name := self.some("served")) is not None:
            message = Message(role="tool" if is_tool else "user", content="n")
            self.do(self.ledger.pair(name, NextState((message,)), by_request_id="x"))
            self.turns[name].state, self.turns[name].is_tool = "paired", is_tool
            self.turns[name].has_next_state = True
        if (name := self.some("judged", has_next_state=False)) is not None:  # its user was faster
            message = Message(role="tool" if is_tool else "user", content="n")
            self.do(self.ledger.pair(name, NextState((message,)), by_request_id="x"))
            self.turns[name].is_tool = is_tool
            self.turns[name].has_next_state = True

    @rule()
    def a_session_ends(self) -> None:
        if (name := self.some("served")) is not None:
            self.do(self.ledger.drop(name, DropReason.NO_NEXT_STATE))
            self.turns[name].state = "judged" if self.turns[name].has_comment else "dropped.no_next_state"

    @rule(value=st.sampled_from([None, 1.0, -1.0, 0.0, 0.5]), comment=st.booleans(), demonstration=st.booleans())
    def a_user_says_something(self, value, comment, demonstration) -> None:
        names = [name for name, turn in self.turns.items() if not turn.is_demonstration]
        if not names or not (comment or demonstration or value is not None):
            return
        name = self.random.choice(names)
        feedback = Feedback(
            f"f{self.said}", name, self.now, value, "c" if comment else None, "d" if demonstration else None
        )
        self.said += 1
        outcome = self.do(self.ledger.record_feedback(feedback, user="u", demonstration=(7,)))
        assert outcome.effect == self.effect_of(name, value, comment)
        turn = self.turns[name]
        turn.is_rated |= value is not None
        turn.has_comment |= comment
        if demonstration and turn.state != "dropped.opted_out":
            for other, its in self.turns.items():
                if other.startswith(f"{name}-demo") and its.state == "sampled":
                    its.state = "dropped.superseded"
            self.turns[str(outcome.demonstration_id)] = ModelTurn(
                {self.tip}, "sampled", is_demonstration=True, sampled_at=self.now
            )

    @rule(value=st.sampled_from([1, -1, 1, 0, None]))
    def judge_a_turn(self, value) -> None:
        verdict = None if value is None else Verdict(value, (value,), "rules")
        if (name := self.some("paired")) is not None:
            self.do(self.ledger.record_verdict(name, verdict))
            self.turns[name].state, self.turns[name].verdict = "judged", value
        if (other := self.some("served", "judged", "sampled", "leased", "trained")) is not None:
            if self.turns[other].is_rated:
                self.do(self.ledger.record_verdict(other, verdict))  # the user was faster: no change
            else:
                self.refuse(self.ledger.record_verdict(other, verdict))

    @rule(wait=st.sampled_from([0.0, 1.0]))
    def sample_a_turn(self, wait) -> None:
        if (name := self.some("judged")) is not None:
            self.now += wait
            self.sample(name)

    @rule(n=st.integers(1, 4), version=st.sampled_from(["tip", "parent", "any"]))
    def a_few_turns_wait(self, n, version) -> None:
        self.a_few_turns_go_all_the_way(n, version)

    @rule()
    def drop_a_turn(self) -> None:
        if (name := self.some("served", "paired", "judged", "sampled")) is not None:
            self.do(self.ledger.drop(name, DropReason.METHOD))
            self.turns[name].state = "dropped.method"
        if (name := self.some("leased", "trained")) is not None:
            self.refuse(self.ledger.drop(name, DropReason.METHOD))

    @rule(seconds=st.sampled_from([1.0, 19.0, 21.0, 60.0]))
    def time_passes(self, seconds) -> None:
        self.now += seconds

    @rule(now=st.booleans(), n=st.sampled_from([None, None, 1, 2, 5]), trainer=st.sampled_from("mno"))
    def a_trainer_asks(self, now, n, trainer) -> None:
        self.lease_a_batch(now=now, n=n, trainer=trainer)

    @precondition(lambda self: self.leases)
    @rule()
    def renew_the_lease(self) -> None:
        lease = self.leases[-1]
        if self.held:
            assert self.do(self.ledger.renew(lease.lease_id, lease.fence)) == self.now + TRAINING.lease_s
            self.deadline = self.now + TRAINING.lease_s
        else:
            self.refuse(self.ledger.renew(lease.lease_id, lease.fence), CommitRefused)

    @precondition(lambda self: self.held)
    @rule(drops_one=st.booleans())
    def release_the_lease(self, drops_one) -> None:
        lease = self.leases[-1]
        drop = self.random.choice(sorted(self.held)) if drops_one else None
        drops = {} if drop is None else {drop: DropReason.TOO_LONG}
        self.do(self.ledger.release(lease.lease_id, lease.fence, reason="test", drop=drops))
        self.end_lease(drop=drop)

    @precondition(lambda self: self.held)
    @rule(durable=st.booleans())
    def a_step_is_committed(self, durable) -> None:
        self.commit_the_lease(durable)

    @precondition(lambda self: self.leases)
    @rule()
    def commit_an_old_lease_again(self) -> None:
        lease = self.random.choice(self.leases[:-1] if self.held else self.leases) if len(self.leases) > 1 else None
        if lease is None:
            return
        number = self.committed.get(lease.lease_id)
        commit = self.ledger.commit(self.step(lease, durable=True))
        if number is None or self.versions[number].state in DEAD:
            self.refuse(commit, CommitRefused)
        else:
            assert self.do(commit) == number

    @rule(durable=st.booleans(), publish=st.booleans(), from_parent=st.booleans())
    def a_whole_step(self, durable, publish, from_parent) -> None:
        """So that chains grow long in short runs too."""
        self.now += TRAINING.lease_s  # whatever was leased goes back
        self.a_few_turns_go_all_the_way(2, "parent" if from_parent else "tip")
        self.lease_a_batch(now=True, n=None, trainer="m")
        if self.held:
            self.commit_the_lease(durable)
        if publish:
            self.publish_the_tip()

    @rule()
    def the_tip_is_published(self) -> None:
        self.publish_the_tip()

    @rule()
    def reject_a_version(self) -> None:
        number = self.some_version()
        path = self.path()
        above = path[: path.index(number) + 1] if number in path else []
        if not above or number == 0 or any(self.versions[n].state == "serving" for n in above):
            self.refuse(self.ledger.reject(number, "no"))
            return
        parent = self.versions[number].parent
        assert self.do(self.ledger.reject(number, "no")) == above
        for n in above:
            self.versions[n].state = "rejected"
            self.free(n, "dropped.gate_rejected" if n == number else "sampled")
        condemned = set(above)
        for n, version in self.versions.items():
            if version.state == "lost" and version.parent in condemned:
                version.state = "rejected"
                condemned.add(n)
        self.cut(set(above), parent)

    @rule(requeue=st.booleans())
    def roll_back(self, requeue) -> None:
        to = self.some_version()
        path = self.path()
        version = self.versions[to]
        if to not in path or version.state not in ("serving", "retired") or not version.is_durable:
            self.refuse(self.ledger.rollback(to, requeue=requeue))
            return
        self.do(self.ledger.rollback(to, requeue=requeue))
        after = path[: path.index(to)]
        for n in after:
            self.versions[n].state = "rolled_back"
            self.free(n, "sampled" if requeue else "dropped.rolled_back")
        for n, version in self.versions.items():
            if version.state == "lost" and n > to:
                version.state = "rolled_back"
        self.serve(to)
        self.cut(set(after), to)

    @rule()
    def a_version_becomes_durable(self) -> None:
        number = self.some_version()
        if self.versions[number].state in DEAD:
            self.refuse(self.ledger.durable(number), CommitRefused)
        else:
            self.do(self.ledger.durable(number))
            self.versions[number].is_durable = True

    @rule()
    def the_trainer_loses_what_it_had_not_saved(self) -> None:
        path = self.path()
        kept = next(n for n in path if self.versions[n].is_durable)
        lost = path[: path.index(kept)]
        version = self.do(self.ledger.lose_undurable("crash"))
        if not lost:
            assert version is None
            return
        serves = any(self.versions[n].state == "serving" for n in [*lost, kept])
        for n in lost:
            self.versions[n].state = "lost"
            self.free(n, "sampled")
        number = len(self.versions)
        assert version.weight_version == number
        passed = serves or self.versions[kept].state == "retired"
        self.versions[number] = ModelVersion(kept, "retired" if passed else "candidate", is_commit=False)
        if serves:
            self.serve(number)
        self.cut(set(lost), number)

    @rule(torn=st.binary(max_size=64))
    def the_power_fails(self, torn) -> None:
        """The files as they are now, and half a write on top of them, are all that is left."""
        self.opened += 1
        before, after = self.root / str(self.opened - 1), self.root / str(self.opened)
        after.mkdir()
        for name in ("l.sqlite", "l.sqlite-wal"):
            shutil.copy(before / name, after / name)
        with (after / "l.sqlite-wal").open("ab") as wal:
            wal.write(torn)
        self.do(self.ledger.aclose())
        shutil.rmtree(before)
        self.ledger = self._open(after)
        if self.held and self.now >= self.deadline:
            self.end_lease()

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.do(self.ledger.audit()) == []
        counts = self.do(self.ledger.counts())
        states = Counter(turn.state for turn in self.turns.values())
        groups = ("served", "paired", "judged", "sampled", "leased", "trained")
        assert {k: n for k, n in counts.items() if n and (k in groups or k.startswith("dropped."))} == dict(states)
        assert [str(version.state) for version in self.do(self.ledger.versions())] == [
            version.state for _, version in sorted(self.versions.items())
        ]
        assert self.do(self.ledger.tip()).weight_version == self.tip
        assert self.versions[self.do(self.ledger.serving_version())].state == "serving"
        listed = {turn.turn_id: turn for turn in self.do(self.ledger.turns(limit=10_000))}
        for name, turn in self.turns.items():
            found = listed[name]
            assert (found.state if found.reason is None else f"dropped.{found.reason}") == turn.state

    @invariant()
    def nothing_trains_twice_in_one_ancestry(self) -> None:
        for turn in getattr(self, "turns", {}).values():
            for version in turn.trained_in:
                above = self.versions[version].parent
                while above is not None:
                    assert above not in turn.trained_in
                    above = self.versions[above].parent


LedgerMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedgerMachine = LedgerMachine.TestCase
