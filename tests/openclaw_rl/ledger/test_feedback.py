"""Feedback on a turn in every state: it wins over the judge, takes effect once, and no turn trains twice because of
it."""

import sqlite3
from dataclasses import replace

import pytest

from openclaw_rl.errors import FeedbackReused, LedgerError
from openclaw_rl.ledger import Effect, Ledger
from openclaw_rl.ledger.schema import MIGRATIONS, migrate
from openclaw_rl.messages import Message
from openclaw_rl.testing.ledger_audit import audit
from openclaw_rl.types import DropReason, Feedback, NextState, Sample, TurnKey, Verdict


@pytest.fixture
def say(ledger):
    """`await say(turn_id, value=-1)`; each time under an id of its own."""
    count = iter(range(1000))

    async def record(turn_id: str, *, user: str = "ann", demonstration_ids=None, **said):
        feedback_id = said.pop("feedback_id", f"f{next(count)}")
        feedback = Feedback(feedback_id, turn_id, at=5.0, **said)
        return await ledger.record_feedback(feedback, user=user, demonstration=demonstration_ids)

    return record


async def scored(ledger: Ledger, turn_id: str, reward: float | None) -> None:
    """Make the sample of a judged turn, as the method would."""
    (judged,) = [judged for judged in await ledger.to_score(1000) if judged.turn.turn_id == turn_id]
    turn = judged.turn
    sample = Sample(
        turn_id, (1, 2, 3), turn.response_ids, turn.loss_mask, turn.rollout_log_probs, turn.versions, 0.7, reward=reward
    )
    await ledger.record_sample(sample, seen_feedback=judged.feedback_ids)


@pytest.fixture(autouse=True)
async def audited(ledger):
    yield
    if not ledger.is_closed:
        assert await ledger.audit(is_deep=True) == []


@pytest.mark.parametrize(("value", "sign"), [(1.0, 1), (-1.0, -1), (0.25, 1), (-0.01, -1), (0.0, 0)])
@pytest.mark.parametrize("stage", ["served", "paired", "judged"])
async def test_before_the_score_a_value_is_the_verdict(ledger, driver, say, stage, value, sign):
    turn_id = await getattr(driver, stage)()
    outcome = await say(turn_id, value=value)
    assert (outcome.effect, outcome.state) == (Effect.JUDGED, "judged")
    (judged,) = await ledger.to_score(10)
    assert judged.verdict == Verdict(sign, (), "feedback", f"the user's {value:g}")
    assert [said.value for said in judged.feedback] == [value]
    assert await ledger.open_turns(10) == []


async def test_a_turn_that_nobody_answered_yet_is_judged_with_an_empty_next_state_and_pairs_later(ledger, driver, say):
    turn_id = await driver.served()
    await say(turn_id, value=1)
    (judged,) = await ledger.to_score(10)
    assert judged.next_state == NextState(())
    state = NextState((Message(role="user", content="go on"),))
    await ledger.pair(turn_id, state, by_request_id="later")
    (judged,) = await ledger.to_score(10)
    assert judged.next_state == state  # for the record, and for hints
    with pytest.raises(LedgerError, match="paired already"):
        await ledger.pair(turn_id, state, by_request_id="again")


async def test_a_comment_alone_waits_for_the_next_state_and_keeps_the_turn_if_none_comes(ledger, driver, say):
    answered, silent, done = [await driver.served() for _ in range(3)]
    for turn_id in (answered, silent, done):
        assert (await say(turn_id, comment="shorter")).effect is Effect.RECORDED
        assert await driver.state(turn_id) == "served"
    await ledger.pair(answered, NextState((Message(role="user", content="ok"),)), by_request_id="x")
    (judged,) = await ledger.to_judge(10)
    assert judged.feedback[0].comment == "shorter"
    await ledger.drop(done, DropReason.NO_NEXT_STATE, "session done")
    assert await ledger.expire(1e9) == [silent]
    assert [await driver.state(turn_id) for turn_id in (silent, done)] == ["judged", "judged"]
    assert {judged.verdict for judged in await ledger.to_score(10)} == {None}


async def test_a_judge_that_comes_after_the_user_changes_nothing(ledger, driver, say):
    turn_id = await driver.paired()
    await say(turn_id, value=-1)
    await ledger.record_verdict(turn_id, Verdict(1, (1,), "llm"))
    (judged,) = await ledger.to_score(10)
    assert (judged.verdict.value, judged.verdict.source) == (-1, "feedback")
    await ledger.drop(turn_id, DropReason.UNJUDGED, "no quorum", seen_feedback=())
    assert await driver.state(turn_id) == "judged"


async def test_a_score_that_did_not_know_what_was_said_is_not_written(ledger, driver, say):
    turn_id = await driver.judged()
    (judged,) = await ledger.to_score(10)
    turn = judged.turn
    await say(turn_id, value=-1)
    old = Sample(
        turn_id, (1, 2, 3), turn.response_ids, turn.loss_mask, turn.rollout_log_probs, turn.versions, 0.7, reward=1.0
    )
    await ledger.record_sample(old, seen_feedback=judged.feedback_ids)
    await ledger.drop(turn_id, DropReason.NEUTRAL, seen_feedback=judged.feedback_ids)
    assert await driver.state(turn_id) == "judged"
    await scored(ledger, turn_id, -1.0)
    assert (await ledger.turn(turn_id)).sample.reward == -1.0


async def test_a_score_that_knew_feedback_which_was_taken_back_is_not_written(ledger, driver, say):
    turn_id = await driver.served()
    await say(turn_id, value=-1.0, comment="shorter", feedback_id="rl-1")
    (judged,) = await ledger.to_score(10)
    turn = judged.turn
    old = Sample(
        turn_id, (1, 2, 3), turn.response_ids, turn.loss_mask, turn.rollout_log_probs, turn.versions, 0.7, reward=-1.0
    )
    await ledger.take_back_feedback(turn_id, user="ann", prefix="rl-", key=KEY)
    await say(turn_id, value=1.0, feedback_id="rl-2")  # one piece again, but another
    await ledger.record_sample(old, seen_feedback=judged.feedback_ids)
    await ledger.drop(turn_id, DropReason.NEUTRAL, seen_feedback=judged.feedback_ids)
    assert (await ledger.turn(turn_id)).state == "judged"
    await scored(ledger, turn_id, 1.0)
    assert (await ledger.turn(turn_id)).sample.reward == 1.0


@pytest.mark.parametrize(
    ("said", "effect"),
    [
        ({"value": -1.0}, Effect.RESCORED),
        ({"value": 0.0}, Effect.RESCORED),
        ({"value": 0.5}, Effect.RECORDED),
        ({"comment": "shorter"}, Effect.RESCORED),
        ({"value": 1.0, "comment": "just so"}, Effect.RESCORED),
    ],
)
async def test_a_sample_that_waits_is_made_again_when_it_would_be_another(ledger, driver, say, said, effect):
    turn_id = await driver.sampled()
    outcome = await say(turn_id, **said)
    assert outcome.effect is effect
    if effect is Effect.RESCORED:
        assert outcome.state == "judged"
        assert (await ledger.turn(turn_id)).sample is None
        assert await ledger.lease(trainer="a", now=True) is None
        await scored(ledger, turn_id, said.get("value") or None)
    (sample,) = (await ledger.lease(trainer="a", now=True)).samples
    assert sample.sample_id == turn_id


async def test_late_feedback_is_kept_and_takes_effect_when_the_lease_comes_back(ledger, driver, say):
    turn_id = await driver.sampled()
    lease = await ledger.lease(trainer="a", now=True)
    assert (await say(turn_id, value=-1, feedback_id="late")).effect is Effect.LATE
    assert (await ledger.turn(turn_id)).verdict.value == 1
    await ledger.release(lease.lease_id, lease.fence, reason="test")
    assert await driver.state(turn_id) == "judged"
    assert (await say(turn_id, value=-1, feedback_id="late")).effect is Effect.RESCORED
    await scored(ledger, turn_id, -1.0)
    lease = await ledger.lease(trainer="a", now=True)
    assert [sample.reward for sample in lease.samples] == [-1.0]
    await driver.commit(lease)


async def test_late_feedback_on_what_was_trained_is_shown_and_takes_effect_only_if_that_version_is_lost(
    ledger, driver, say
):
    lost, (turn_id,) = await driver.step(durable=False)
    assert (await say(turn_id, value=-0.5)).effect is Effect.LATE
    (row,) = await ledger.turns()
    assert (row.state, row.verdict, row.feedback, row.trained_in) == ("trained", 1, -0.5, lost)
    await ledger.lose_undurable("crash")
    assert await driver.state(turn_id) == "judged"
    await scored(ledger, turn_id, -1.0)
    assert (await ledger.counts())["feedback.rescored"] == 1


async def test_late_feedback_on_a_dead_turn_stays_late(ledger, driver, say):
    version, (turn_id,) = await driver.step()
    await say(turn_id, value=-1)
    await ledger.reject(version, "gate")
    assert await driver.state(turn_id) == "dropped.gate_rejected"
    assert (await say(turn_id, value=1)).effect is Effect.RECORDED
    assert await driver.state(turn_id) == "dropped.gate_rejected"


@pytest.mark.parametrize("reason", list(DropReason))
async def test_a_drop_for_want_of_a_word_is_taken_back_and_no_other(ledger, driver, say, reason):
    is_revived = reason in {"no_next_state", "superseded", "branch", "neutral", "unjudged", "method"}
    for said in ({"value": 1.0}, {"comment": "why not in French?"}):
        turn_id = await driver.served()
        await ledger.drop(turn_id, reason)
        outcome = await say(turn_id, **said)
        expected = {True: Effect.JUDGED if "value" in said else Effect.RESCORED, False: Effect.RECORDED}[is_revived]
        assert (outcome.effect, await driver.state(turn_id)) == (
            expected,
            "judged" if is_revived else f"dropped.{reason}",
        )


async def test_a_turn_a_trainer_gave_back_as_useless_can_be_scored_anew(ledger, driver, say):
    turn_id = await driver.sampled()
    lease = await ledger.lease(trainer="a", now=True)
    await ledger.release(lease.lease_id, lease.fence, reason="x", drop={turn_id: DropReason.METHOD})
    assert (await say(turn_id, value=-1)).effect is Effect.JUDGED
    await scored(ledger, turn_id, -1.0)
    assert (await ledger.turn(turn_id)).sample.reward == -1.0


async def test_the_newest_value_holds(ledger, driver, say):
    turn_id = await driver.paired()
    await say(turn_id, value=1)
    await say(turn_id, value=-1)
    (judged,) = await ledger.to_score(10)
    assert judged.verdict.value == -1
    assert [said.value for said in (await ledger.turn(turn_id)).judged.feedback] == [1, -1]


async def test_the_same_feedback_again_changes_nothing_and_other_feedback_under_its_id_is_refused(ledger, driver, say):
    first, second = await driver.paired(), await driver.paired()
    said = {"value": 1.0, "demonstration": "like this", "demonstration_ids": (5, 6), "feedback_id": "f"}
    once = await say(first, **said)
    assert await say(first, **said) == once
    assert (await ledger.counts())["sampled"] == 1
    with pytest.raises(FeedbackReused):
        await say(first, value=-1, feedback_id="f")
    with pytest.raises(FeedbackReused):
        await say(second, **said)
    assert len((await ledger.turn(first)).feedback) == 1
    assert await ledger.turn(second) is not None
    other = await driver.paired(user="bob")
    assert (await say(other, user="bob", value=1, feedback_id="f")).effect is Effect.JUDGED  # ids are each user's own


async def test_nobody_reaches_the_turns_of_others(ledger, driver, say):
    turn_id = await driver.paired(user="ann", session="s")
    with pytest.raises(LedgerError, match="no turn"):
        await say(turn_id, user="bob", value=1)
    assert await ledger.feedback_target(user="bob", turn_id=turn_id) is None
    assert await ledger.feedback_target(user="bob", session_id="s") is None
    assert (await ledger.feedback_target(user="ann", turn_id=turn_id)).turn_id == turn_id


async def test_a_session_means_its_newest_turn(ledger, driver, say):
    await driver.served(session="a")
    newest = await driver.served(session="a")
    await driver.served(session="b")
    await say(newest, demonstration="so", demonstration_ids=(1,))
    target = await ledger.feedback_target(user="ann", session_id="a")
    assert (target.turn_id, target.prompt_tokens) == (newest, 3)


async def test_a_demonstration_is_a_sample_of_its_own_whatever_becomes_of_the_turn(ledger, driver, say):
    trained_in, (turn_id,) = await driver.step()
    outcome = await say(turn_id, demonstration="Early to bed.", demonstration_ids=(40, 41, 2))
    assert (outcome.effect, outcome.state) == (Effect.RECORDED, "trained")
    assert outcome.demonstration_id == f"{turn_id}-demo"
    lease = await ledger.lease(trainer="a", now=True)
    (sample,) = lease.samples
    assert sample.is_demonstration
    assert (sample.sample_id, sample.prompt_ids, sample.response_ids) == (f"{turn_id}-demo", (1, 2, 3), (40, 41, 2))
    assert (sample.reward, sample.loss_mask, sample.temperature, sample.oldest_version) == (
        None,
        (True,) * 3,
        1.0,
        trained_in,
    )
    assert await driver.commit(lease) == 2
    record = await ledger.turn(f"{turn_id}-demo")
    assert (record.state, record.turn.reply.content, record.judged) == ("trained", "Early to bed.", None)
    row, _ = await ledger.turns()
    assert row.demonstration_of == turn_id
    assert (await ledger.counts())["requests"] == 1
    assert [ids for _, ids in await ledger.recent_replies(sampled_by=None, limit=9)] == [(10, 11, 12, 13)]
    with pytest.raises(LedgerError, match="no turn"):
        await say(f"{turn_id}-demo", value=1)


async def test_a_demonstration_never_grows_stale(ledger, driver, say, clock):
    """max_staleness is 2."""
    waiting = [await driver.sampled(version=0) for _ in range(3)]
    clock.advance(1)
    await say(waiting[0], demonstration="so", demonstration_ids=(1,))
    for _ in waiting:
        await driver.commit(await ledger.lease(trainer="a", n=1))
    (sample,) = (await ledger.lease(trainer="a", now=True)).samples
    assert (sample.is_demonstration, sample.oldest_version) == (True, 0)


async def test_a_demonstration_outlives_the_version_of_its_day(ledger, driver, say):
    version, (turn_id,) = await driver.step()
    await say(turn_id, demonstration="so", demonstration_ids=(1,))
    await ledger.reject(version, "gate")
    (sample,) = (await ledger.lease(trainer="a", now=True)).samples
    assert (sample.is_demonstration, sample.oldest_version) == (True, version)


async def test_a_newer_demonstration_takes_the_place_of_one_that_waits(ledger, driver, say):
    turn_id = await driver.served()
    await say(turn_id, demonstration="so", demonstration_ids=(1,))
    await say(turn_id, demonstration="or so", demonstration_ids=(2,))
    assert await driver.state(f"{turn_id}-demo") == "dropped.superseded"
    assert [sample.response_ids for sample in (await ledger.lease(trainer="a", now=True)).samples] == [(2,)]


@pytest.mark.parametrize("reason", [DropReason.OPTED_OUT, DropReason.RECORD_ONLY])
async def test_nothing_is_learned_from_who_opted_out(ledger, driver, say, reason):
    turn_id = await driver.served(drop=reason)
    outcome = await say(turn_id, value=1, demonstration="so", demonstration_ids=(1,))
    assert (outcome.effect, outcome.demonstration_id) == (Effect.RECORDED, None)
    assert await ledger.lease(trainer="a", now=True) is None


async def test_everything_is_still_there_after_a_restart(ledger, driver, say, ledger_path, identity, training):
    turn_id = await driver.paired()
    said = {"value": 0.5, "comment": "c", "demonstration": "d", "demonstration_ids": (1,), "feedback_id": "f"}
    once = await say(turn_id, **said)
    await ledger.aclose()
    reopened = await Ledger.open(ledger_path, identity=identity, training=training)
    feedback = Feedback("f", turn_id, 5.0, 0.5, "c", "d")
    assert (await reopened.turn(turn_id)).feedback == (feedback,)
    again = await reopened.record_feedback(replace(feedback, at=9.0), user="ann", demonstration=(1,))
    assert again == once
    assert await reopened.audit(is_deep=True) == []
    await reopened.aclose()


async def test_a_file_of_the_first_schema_is_migrated_with_all_it_holds(
    ledger, driver, ledger_path, identity, training, make_driver
):
    """The rows are made by today's code and copied, column by column, into a file that the first schema made."""
    await driver.step()
    sampled, served, dropped = await driver.sampled(), await driver.served(), await driver.paired()
    await ledger.record_verdict(dropped, Verdict(0, (0,), "llm"))
    await ledger.drop(dropped, DropReason.NEUTRAL)
    before = [await driver.state(f"turn-{n}") for n in range(1, driver.count + 1)]
    await ledger.aclose()
    old = ledger_path.with_name("old.sqlite")
    with sqlite3.connect(old, isolation_level=None) as db:
        migrate(db, MIGRATIONS[:1])
        triggers = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            db.execute(f"DROP TRIGGER {name}")
        db.execute("ATTACH ? AS new", (str(ledger_path),))
        tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (table,) in tables:
            columns = ", ".join(row[1] for row in db.execute(f"PRAGMA main.table_info({table})"))
            db.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM new.{table}")
        for _, sql in triggers:
            db.execute(sql)
        db.execute("DETACH new")
    old.replace(ledger_path)
    for suffix in ("-wal", "-shm"):
        ledger_path.with_name(ledger_path.name + suffix).unlink(missing_ok=True)
    reopened = await Ledger.open(ledger_path, identity=identity, training=training)
    again = make_driver(reopened, count=driver.count)
    assert [await again.state(f"turn-{n}") for n in range(1, driver.count + 1)] == before
    for turn_id, effect in ((sampled, "rescored"), (served, "judged"), (dropped, "judged")):
        outcome = await reopened.record_feedback(
            Feedback(turn_id, turn_id, 1.0, -1.0, None, "so"), user="ann", demonstration=(1,)
        )
        assert outcome.effect == effect
    assert await again.sampled() == f"turn-{driver.count + 1}"
    assert len((await reopened.lease(trainer="a", now=True)).samples) == 4
    assert await reopened.audit(is_deep=True) == []
    await reopened.aclose()


async def test_the_audit_of_a_file_does_not_take_feedback_for_turns(ledger, ledger_path, driver, say):
    await say(await driver.sampled(), value=-1)
    await say(await driver.served(), value=1)
    assert list(audit(ledger_path, [])) == []


KEY = TurnKey("reply", "before", "history")


@pytest.mark.parametrize("stage", ["served", "paired", "judged"])
async def test_taken_back_a_turn_is_where_it_would_be_without_the_feedback(ledger, driver, say, stage):
    turn_id = await getattr(driver, stage)()
    await say(turn_id, value=-1.0, comment="shorter", feedback_id="rl-1")
    outcome = await ledger.take_back_feedback(turn_id, user="ann", prefix="rl-", key=KEY)
    before = "served" if stage == "served" else "paired"
    assert (outcome.feedback_id, outcome.effect, outcome.state) == ("rl-1", Effect.RESCORED, before)
    record = await ledger.turn(turn_id)
    assert (record.verdict, record.feedback, record.sample) == (None, (), None)
    assert [turn.turn_id for turn in await ledger.open_turns(10)] == ([turn_id] if stage == "served" else [])
    assert (await ledger.counts())["feedback"] == 0
    await say(turn_id, value=1.0, feedback_id="rl-2")  # and it may be rated anew
    (judged,) = await ledger.to_score(10)
    assert judged.verdict == Verdict(1, (), "feedback", "the user's 1")


async def test_taken_back_after_the_score_it_is_judged_by_its_next_state_again(ledger, driver, say):
    turn_id = await driver.paired()
    await say(turn_id, value=1.0, feedback_id="rl-1")
    await scored(ledger, turn_id, 1.0)
    outcome = await ledger.take_back_feedback(turn_id, user="ann", prefix="rl-", key=KEY)
    assert (outcome.effect, outcome.state) == (Effect.RESCORED, "paired")
    assert (await ledger.turn(turn_id)).sample is None
    assert [judged.turn.turn_id for judged in await ledger.to_judge(10)] == [turn_id]


async def test_taken_back_the_rating_before_it_holds(ledger, driver, say):
    turn_id = await driver.served()
    await say(turn_id, value=1.0, feedback_id="rl-1")
    await say(turn_id, value=-1.0, feedback_id="rl-2")
    outcome = await ledger.take_back_feedback(turn_id, user="ann", prefix="rl-")
    assert (outcome.feedback_id, outcome.state) == ("rl-2", "judged")
    (judged,) = await ledger.to_score(10)
    assert judged.verdict == Verdict(1, (), "feedback", "the user's 1")


async def test_without_its_key_an_unanswered_turn_ends_and_a_new_rating_revives_it(ledger, driver, say):
    turn_id = await driver.served()
    await say(turn_id, value=1.0, feedback_id="rl-1")
    outcome = await ledger.take_back_feedback(turn_id, user="ann", prefix="rl-")
    assert (outcome.state, (await ledger.turn(turn_id)).reason) == ("dropped", DropReason.NO_NEXT_STATE)
    assert (await say(turn_id, value=1.0, feedback_id="rl-2")).state == "judged"


async def test_what_a_trainer_has_is_not_taken_back(ledger, driver, say):
    turn_id = await driver.served()
    await say(turn_id, value=1.0, feedback_id="rl-1")
    await scored(ledger, turn_id, 1.0)
    await ledger.lease(trainer="a", now=True)
    outcome = await ledger.take_back_feedback(turn_id, user="ann", prefix="rl-", key=KEY)
    assert (outcome.effect, outcome.state) == (Effect.LATE, "leased")
    assert [said.feedback_id for said in (await ledger.turn(turn_id)).feedback] == ["rl-1"]


async def test_only_ones_own_feedback_of_that_kind_is_taken_back(ledger, driver, say):
    turn_id = await driver.served()
    await say(turn_id, value=1.0, feedback_id="from the page")
    for user in ("ann", "bob"):
        assert await ledger.take_back_feedback(turn_id, user=user, prefix="rl-", key=KEY) is None
    assert (await ledger.turn(turn_id)).state == "judged"
