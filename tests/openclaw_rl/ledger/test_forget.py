"""A forgotten session leaves no byte in the file, and other sessions stay; a backup is the ledger at one moment."""

import asyncio
import inspect
import stat
from dataclasses import replace

import pytest
from turns import make_request, make_turn

from openclaw_rl.errors import CommitRefused, LedgerError, LedgerLocked
from openclaw_rl.ledger import Forgotten, Ledger, deletion, leases
from openclaw_rl.ledger.snapshot import backup, compact
from openclaw_rl.ledger.store import write
from openclaw_rl.messages import Message
from openclaw_rl.types import DropReason, Feedback, NextState, SideCount


@pytest.fixture(autouse=True)
async def audited(ledger):
    yield
    if not ledger.is_closed:
        assert await ledger.audit(is_deep=True) == []


def bytes_of(ledger_path) -> bytes:
    return b"".join(file.read_bytes() for file in ledger_path.parent.glob("ledger.sqlite*"))


async def test_a_session_is_forgotten_and_what_others_share_stays(ledger, driver, ledger_path):
    shared = tuple(range(512))
    mine = [await driver.sampled(session="mine", prompt=(*shared, n)) for n in (600, 601)]
    await driver.served(session="mine", prompt=shared)
    theirs = await driver.sampled(session="theirs", prompt=shared)
    await ledger.record_feedback(
        Feedback("f", mine[0], 1.0, -1.0, "too long", "SECRET DEMONSTRATION"), user="ann", demonstration=(1, 2)
    )
    await ledger.count_side(SideCount("ann", "mine", "title", 1, 1, 200, 1.0))
    forgotten = await ledger.forget("mine")
    assert (forgotten.user, forgotten.turns, forgotten.trained_in) == ("ann", 4, ())
    assert [row.turn_id for row in await ledger.turns()] == [theirs]
    assert await ledger.turn(mine[0]) is None
    counts = await ledger.counts()
    assert (counts["requests"], counts["sampled"], counts["served"], counts["judged"]) == (1, 1, 0, 0)
    assert (counts["side"], counts["feedback"]) == (0, 0)
    record = await ledger.turn(theirs)
    assert record.request.prompt_ids == shared  # a piece that both had
    assert record.request.messages[0].content == "question 4"
    with pytest.raises(LedgerError, match="no session 'mine'"):
        await ledger.forget("mine")


async def test_its_words_and_tokens_are_in_no_byte_of_the_files(ledger, driver, ledger_path):
    """Also not in the slack of pages that were split while others wrote, and not in the log."""
    prompt = tuple(range(31_000, 31_040))  # short enough not to be compressed
    tokens = b"".join(token.to_bytes(2, "little") for token in prompt[5:35])
    for n in range(60):
        await driver.paired(session="mine" if n % 3 == 0 else f"other-{n}", prompt=(*prompt, n) if n % 3 == 0 else (n,))
    turn_id = await driver.paired(session="mine")
    await ledger.record_feedback(Feedback("f", turn_id, 1.0, None, "XYZZY-COMMENT"), user="ann")
    before = bytes_of(ledger_path)
    assert all(words in before for words in (b"XYZZY-COMMENT", b'question 1"', b"answer 31", tokens))
    forgotten = await ledger.forget("mine")
    assert forgotten.is_scrubbed
    left = bytes_of(ledger_path)  # while the server runs
    assert not [
        words for words in (b"XYZZY-COMMENT", b'question 1"', b'question 31"', b'answer 31"', tokens) if words in left
    ]
    assert b'question 2"' in left
    assert len(await ledger.turns(limit=1000)) == 40


async def test_a_file_too_large_to_write_anew_says_so_and_compact_does_it_later(
    ledger, driver, ledger_path, monkeypatch
):
    monkeypatch.setattr(deletion, "VACUUM_BYTES", 0)
    await driver.served(session="mine")
    assert not (await ledger.forget("mine")).is_scrubbed
    with pytest.raises(LedgerLocked):
        compact(ledger_path)
    await ledger.aclose()
    before, after = compact(ledger_path)
    assert after <= before
    assert b"question 1" not in bytes_of(ledger_path)


async def test_versions_that_trained_on_it_are_named_and_a_lease_that_holds_it_is_over(ledger, driver):
    await driver.sampled(session="mine")
    other = await driver.sampled(session="theirs")
    version = await driver.commit(await ledger.lease(trainer="a", now=True))
    await driver.serve(version)
    await driver.sampled(session="mine", version=version)
    waiting = await driver.sampled(session="theirs", version=version)
    lease = await ledger.lease(trainer="a", now=True)
    forgotten = await ledger.forget("mine")
    assert (forgotten.turns, forgotten.trained_in) == (2, (version,))
    for asked in (ledger.renew(lease.lease_id, lease.fence), ledger.leased(lease.fence), driver.commit(lease)):
        with pytest.raises(CommitRefused, match="is revoked: a session was forgotten"):
            await asked
    # The trainer leaves the step out and goes on: the tip is what it was, and the other samples come again.
    assert (await ledger.tip()).weight_version == version
    assert [await driver.state(turn) for turn in (other, waiting)] == ["trained", "sampled"]
    probes = (await ledger.version(version)).report.probes
    assert not any(probe.prompt_ids or probe.response_ids for probe in probes)
    assert [sample.sample_id for sample in (await ledger.lease(trainer="a", now=True)).samples] == [waiting]


@pytest.mark.parametrize("commits", [True, False])
async def test_a_deletion_waits_for_the_optimizers_step_on_its_sample(ledger, driver, commits, monkeypatch):
    """As long as a step may take; a trainer that died in it does not keep the deletion for ever."""
    monkeypatch.setattr(leases, "STEP_S", 60.0 if commits else 0.2)
    mine, theirs = await driver.sampled(session="mine"), await driver.sampled(session="theirs")
    lease = await ledger.lease(trainer="a", now=True)
    await ledger.begin_step(lease.lease_id, lease.fence)
    wait, waits = ledger._step_over, asyncio.Event()

    async def step_over():
        waits.set()
        await wait()

    monkeypatch.setattr(ledger, "_step_over", step_over)
    forgetting = asyncio.create_task(ledger.forget("mine"))
    await waits.wait()
    if commits:
        version = await driver.commit(lease)
        assert (await forgetting).trained_in == (version,)
        assert await driver.state(theirs) == "trained"
    else:
        assert (await forgetting).trained_in == ()
        assert await driver.state(theirs) == "sampled"
        with pytest.raises(CommitRefused, match="a session was forgotten"):
            await ledger.begin_step(lease.lease_id, lease.fence)
    assert await ledger.turn(mine) is None
    assert await ledger.audit() == []


async def test_a_deletion_of_other_samples_does_not_wait_for_a_step(ledger, driver):
    await driver.sampled(session="mine")
    lease = await ledger.lease(trainer="a", now=True)
    await ledger.begin_step(lease.lease_id, lease.fence)
    await driver.sampled(session="theirs")
    async with asyncio.timeout(120):
        assert (await ledger.forget("theirs")).turns == 1
    await driver.commit(lease)


async def test_a_session_of_another_user_is_not_meant(ledger, driver):
    await driver.served(user="ann", session="s")
    await driver.served(user="bob", session="s")
    with pytest.raises(LedgerError, match="several users have a session 's': ann, bob"):
        await ledger.forget("s")
    with pytest.raises(LedgerError, match="no session 's' of user 'eve'"):
        await ledger.forget("s", "eve")
    assert await ledger.forget("s", "bob") == Forgotten("bob", "s", 1, 2, ())
    assert [row.user for row in await ledger.turns()] == ["ann"]


async def test_a_session_that_is_being_answered_is_not_forgotten_under_the_reply(ledger, driver):
    await driver.served(session="s")
    message = Message(role="user", content="more")
    await ledger.begin(make_request("now", message))
    with pytest.raises(LedgerError, match="is being answered right now"):
        await ledger.forget("s")
    assert len(await ledger.turns()) == 1


async def test_what_others_come_to_refer_to_between_the_plan_and_the_deed_stays(ledger, driver, monkeypatch):
    """A piece that only the session had when it was planned: now in another's question, in the reply to a request that
    was running already, and in the next state of a turn from before."""
    await driver.served(session="mine", prompt=(1, 2, 3))  # "question 1", "answer 1"
    before = await driver.served(session="theirs", prompt=(9,))
    running = make_request("running", user="bob", session="b", text="x", prompt=(9,))
    await ledger.begin(running)
    carry_out = inspect.unwrap(Ledger._carry_out)

    def later(ledger, db, plan):
        question, answer = Message(role="user", content="question 1"), Message(role="assistant", content="answer 1")
        asked = make_request("late", question, user="bob", session="c", prompt=(1, 2, 3))
        ledger._insert(asked, db)
        turn = make_turn("turn-late", request="running", reply=answer)
        inspect.unwrap(Ledger.finish)(ledger, db, turn, driver.key)
        inspect.unwrap(Ledger.pair)(ledger, db, before, NextState((question,)), by_request_id="side")
        return carry_out(ledger, db, plan)

    monkeypatch.setattr(Ledger, "_carry_out", write(later))
    assert (await ledger.forget("mine")).turns == 1
    assert (await ledger.turn("turn-late")).turn.reply.content == "answer 1"
    assert (await ledger.turn(before)).next_state.messages[0].content == "question 1"
    await ledger.abandon("late", DropReason.CANCELLED)


async def test_a_session_that_goes_on_while_it_is_planned_is_planned_anew(ledger, driver, monkeypatch):
    await driver.served(session="mine")
    carry_out, seen = inspect.unwrap(Ledger._carry_out), []

    def later(ledger, db, plan):
        if not seen:
            asked = make_request("more", session="mine", text="and then?")
            ledger._insert(asked, db)
            inspect.unwrap(Ledger.abandon)(ledger, db, "more", DropReason.CANCELLED)
        seen.append(plan)
        return carry_out(ledger, db, plan)

    monkeypatch.setattr(Ledger, "_carry_out", write(later))
    await ledger.forget("mine")
    assert len(seen) == 2
    assert (await ledger.counts())["requests"] == 0


async def test_a_version_that_is_not_served_yet_keeps_the_figures_of_its_probes_and_loses_the_tokens(
    ledger, driver, ledger_path
):
    """Also in a large file, which is not rewritten."""
    version, _ = await driver.step()
    (before,) = (await ledger.version(version)).report.probes
    assert before.prompt_ids
    assert before.response_ids
    await ledger.forget("s")
    (probe,) = (await ledger.version(version)).report.probes
    assert probe == replace(before, prompt_ids=(), response_ids=())
    assert probe.log_probs


async def test_a_conversation_without_an_id_is_named_by_any_of_its_replies(ledger, driver):
    """Its first question and answer identify it. Equal words of another user, another answer, and sessions with an id
    stay. A retry that no request continued goes too."""
    system, hi = Message(role="system", content="be kind"), Message(role="user", content="hi")
    yes, no = Message(role="assistant", content="yes"), Message(role="assistant", content="no")
    more, bye = Message(role="user", content="more"), Message(role="user", content="bye")

    async def say(*told, reply, user="ann", session=None):
        driver.count += 1
        name = f"turn-{driver.count}"
        await ledger.begin(make_request(f"request-{name}", *told, user=user, session=session, prompt=(driver.count,)))
        await ledger.finish(make_turn(name, request=f"request-{name}", reply=reply), driver.key)
        return name

    first = await say(system, hi, reply=yes)
    second = await say(Message(role="system", content="it is later"), hi, yes, more, reply=no)
    await ledger.pair(first, NextState((more,)), by_request_id=f"request-{second}")
    branch = await say(hi, yes, bye, reply=yes)  # of the same reply, and paired with nothing
    retry = await say(system, hi, reply=no)
    other = await say(system, hi, reply=no)
    gone_on = await say(system, hi, no, more, reply=yes)
    await ledger.pair(other, NextState((more,)), by_request_id=f"request-{gone_on}")
    bobs = await say(system, hi, yes, more, reply=no, user="bob")
    named = await say(system, hi, yes, more, reply=no, session="s")
    middle = await say(bye, hi, yes, reply=no)
    kept = {other, gone_on, bobs, named, middle}
    rated = Feedback("f", other, 1.0, demonstration="well")
    await ledger.record_feedback(rated, user="ann", demonstration=(1, 2))  # its request has the same messages
    shown = {row.turn_id for row in await ledger.turns()}
    (demonstration,) = shown - kept - {first, second, branch, retry}
    forgotten = await ledger.forget_turn(second)
    assert (forgotten.user, forgotten.session_id, forgotten.turns) == ("ann", None, 4)
    assert {row.turn_id for row in await ledger.turns()} == {*kept, demonstration}
    with pytest.raises(LedgerError, match=f"no turn '{first}'"):
        await ledger.forget_turn(first)
    assert (await ledger.forget_turn(demonstration)).turns == 3
    assert (await ledger.forget_turn(named)).session_id == "s"
    assert {row.turn_id for row in await ledger.turns()} == {bobs, middle}


async def test_a_conversation_that_began_differently_in_each_request_is_forgotten_whole(ledger, driver):
    """A client sent the last messages only, and decorated the newest: what was paired belongs together."""
    names = []
    for n in range(4):
        told = [Message(role="user", content=f"question {k}{' [now]' * (k == n)}") for k in range(max(0, n - 1), n + 1)]
        request = make_request(f"window-{n}", *told, user="ann", session=None, prompt=(n, n))
        names.append(f"turn-of-window-{n}")
        await ledger.begin(request)
        await ledger.finish(make_turn(names[-1], request=request.request_id), driver.key)
        if n:
            await ledger.pair(names[-2], NextState(tuple(told[-1:])), by_request_id=request.request_id)
    other = await driver.served(session=None)
    assert (await ledger.forget_turn(names[2])).turns == 4
    assert [row.turn_id for row in await ledger.turns()] == [other]


async def test_a_conversation_of_one_question_takes_no_other_along(ledger, driver):
    alone = await driver.served(session=None)
    other = await driver.served(session=None)
    assert (await ledger.forget_turn(alone)).turns == 1
    assert [row.turn_id for row in await ledger.turns()] == [other]


async def test_a_user_is_forgotten_with_all_sessions(ledger, driver):
    await driver.sampled(user="ann", session="a")
    await driver.served(user="ann", session=None)
    theirs = await driver.served(user="bob", session="a")
    await ledger.count_side(SideCount("ann", "a", "title", 1, 1, 200, 1.0))
    forgotten = await ledger.forget_user("ann")
    assert (forgotten.turns, forgotten.session_id) == (2, None)
    assert [row.turn_id for row in await ledger.turns()] == [theirs]
    assert (await ledger.counts())["side"] == 0
    with pytest.raises(LedgerError, match="no user 'ann'"):
        await ledger.forget_user("ann")


async def test_who_sent_background_requests_alone_is_forgotten_too(ledger, driver, ledger_path):
    """The ledger keeps no content of them, only their user and session."""
    for user, session in (("ann", "of-titles"), ("ann", None), ("bob", "of-titles"), ("eve", None)):
        await ledger.count_side(SideCount(user, session, "title", 1, 1, 200, 1.0))
    with pytest.raises(LedgerError, match="several users have a session 'of-titles': ann, bob"):
        await ledger.forget("of-titles")
    assert await ledger.forget("of-titles", "bob") == Forgotten("bob", "of-titles", 0, 0, ())
    assert await ledger.forget("of-titles") == Forgotten("ann", "of-titles", 0, 0, ())
    with pytest.raises(LedgerError, match="no session 'of-titles'"):
        await ledger.forget("of-titles")
    assert (await ledger.counts())["side"] == 2
    for user in ("ann", "eve"):
        assert (await ledger.forget_user(user)).turns == 0
        with pytest.raises(LedgerError, match=f"no user '{user}'"):
            await ledger.forget_user(user)
    assert (await ledger.counts())["side"] == 0
    assert b"of-titles" not in bytes_of(ledger_path)


async def test_the_policy_goes_back_behind_what_was_trained_on_it(ledger, driver):
    first, _ = await driver.step()  # session "s"
    await driver.serve(first)
    other = await driver.sampled(session="theirs", version=first)
    second = await driver.commit(await ledger.lease(trainer="a", now=True))
    await driver.serve(second)
    forgotten = await ledger.forget("theirs")
    assert forgotten.trained_in == (second,)
    assert await ledger.rollback_from(forgotten.trained_in) == {"policy": first}
    assert await ledger.serving_version() == first
    assert len(await ledger.drop_weights(first)) == 1
    assert (await ledger.version(second)).folder is None
    assert (await ledger.version(first)).folder is not None
    assert await ledger.turn(other) is None
    assert await ledger.rollback_from((second,)) == {}  # it is dead already


async def test_a_backup_taken_while_turns_are_written_is_whole(
    ledger, driver, ledger_path, tmp_path, identity, training, make_driver
):
    copy = tmp_path / "copy" / "ledger.sqlite3"
    copy.parent.mkdir()
    for _ in range(5):
        await driver.sampled()

    async def write() -> None:
        for _ in range(40):
            await driver.sampled()

    _, size = await asyncio.gather(write(), asyncio.to_thread(backup, ledger_path, copy))
    assert size == copy.stat().st_size
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert [file.name for file in copy.parent.iterdir()] == ["ledger.sqlite3"]
    opened = await Ledger.open(copy, identity=identity, training=training)
    assert await opened.audit(is_deep=True) == []
    assert 5 <= (await opened.counts())["requests"] <= 45
    assert (await make_driver(opened, count=100).served()) == "turn-101"
    await opened.aclose()


async def test_a_backup_overwrites_nothing_and_names_what_is_missing(ledger, ledger_path, tmp_path):
    (tmp_path / "there").write_text("mine")
    with pytest.raises(LedgerError, match="there: File exists"):
        backup(ledger_path, tmp_path / "there")
    with pytest.raises(LedgerError, match="no ledger at"):
        backup(tmp_path / "none", tmp_path / "copy")
    (tmp_path / "junk").write_bytes(b"no database, but long enough to be one" * 100)
    with pytest.raises(LedgerError, match="cannot copy"):
        backup(tmp_path / "junk", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
