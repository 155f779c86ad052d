"""Sessions over a real ledger: pairs, a restart, and a broken ledger that breaks no chat."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openclaw_rl.errors import LedgerUnavailable
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.server.privacy import Forgetting, Retention
from openclaw_rl.sessions import store as store_module
from openclaw_rl.sessions.store import Sessions
from openclaw_rl.settings import RetentionSettings, SessionSettings, TrainingSettings
from openclaw_rl.types import DropReason, Request, SamplingParams, Scope, Turn, TurnState, TurnType, VersionRun

S = Scope("uma", "s")
NOW = 1_000_000.0


async def open_ledger(folder: Path) -> Ledger:
    identity = Identity(base_hash="base", tokenizer_hash="tokenizer", model_name="tiny")
    return await Ledger.open(folder / "ledger.sqlite", identity=identity, training=TrainingSettings())


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = await open_ledger(tmp_path)
    yield ledger
    await ledger.aclose()


@dataclass
class Client:
    """A chat client and the proxy in one: every reply is named by the request's number."""

    sessions: Sessions
    ledger: Ledger
    count: int = 0

    async def begin(
        self,
        messages: list[Message],
        reply: str | Message = "",
        *,
        scope: Scope = S,
        drop: DropReason | None = None,
        at: float = NOW,
        begin: bool = True,
        group: str | None = None,
    ) -> tuple[Request, Turn]:
        """Start a request; return it with its coming reply."""
        request = Request(
            request_id=f"r{self.count}",
            scope=scope,
            received_at=at,
            messages=tuple(messages),
            tools_json=None,
            template_kwargs_json=None,
            prompt_ids=(1, 2, 3),
            sampling=SamplingParams(max_new_tokens=16),
            group=group,
        )
        turn = Turn(
            turn_id=f"t{self.count}",
            request_id=request.request_id,
            finished_at=at + 1,
            response_ids=(4, 5),
            rollout_log_probs=(-0.5, -0.25),
            loss_mask=(True, True),
            versions=(VersionRun(0, 2),),
            finish_reason="stop",
            reply=Message(role="assistant", content=reply) if isinstance(reply, str) else reply,
            drop=drop,
        )
        self.count += 1
        if begin:
            await self.ledger.begin(request)
        return request, turn

    async def ask(self, messages: list[Message], reply: str | Message = "", **more: Any) -> tuple[str, str | None]:
        """Send a request and get the reply: the id of the new turn, and of the turn that the request answered."""
        request, turn = await self.begin(messages, reply, **more)
        answered = await self.sessions.observe(request)
        await self.sessions.served(request, turn)
        return turn.turn_id, answered

    async def state(self, turn_id: str) -> str:
        record = await self.ledger.turn(turn_id)
        assert record is not None
        return f"{record.state}" + (f": {record.reason}" if record.reason else "")


@pytest.fixture
def client(ledger: Ledger) -> Client:
    return Client(Sessions(ledger, SessionSettings()), ledger)


async def test_a_chat_is_recorded_and_paired(client: Client, chat) -> None:
    assert await client.ask(chat("hi"), "hello") == ("t0", None)
    assert await client.ask(chat("hi", "hello", "thanks"), "sure") == ("t1", "t0")
    record = await client.ledger.turn("t0")
    assert (record.state, record.answered_by) == (TurnState.PAIRED, "r1")
    assert record.next_state.messages == tuple(chat("thanks"))
    assert await client.state("t1") == "served"
    assert await client.ledger.audit() == []


async def test_a_retry_is_superseded_in_the_ledger(client: Client, chat) -> None:
    await client.ask(chat("hi"), "hello")
    await client.ask(chat("hi"), "hey")
    assert (await client.ask(chat("hi", "hey", "thanks"), "sure"))[1] == "t1"
    assert [await client.state(f"t{n}") for n in range(3)] == ["dropped: superseded", "paired", "served"]


async def test_a_cut_reply_pairs_for_the_record_if_its_part_returns(client: Client, chat) -> None:
    await client.ask(chat("tell"), "Once upon", drop=DropReason.CANCELLED)
    await client.ask(chat("tell"), "", drop=DropReason.CANCELLED)
    assert (await client.ask(chat("tell", "Once upon", "go on"), "a time"))[1] == "t0"
    assert await client.state("t0") == "dropped: cancelled"
    assert (await client.ledger.turn("t0")).next_state is not None
    await client.ask(chat("more"), "x", drop=DropReason.OPTED_OUT)
    await client.ask(chat("more"), "y")
    await client.ask(chat("more", "y", "fine"), "z")  # passes over a turn that has ended already: nothing to end
    assert await client.state("t3") == "dropped: opted_out"
    assert await client.ledger.audit() == []


async def test_a_finished_session_ends_its_open_turns(client: Client, chat) -> None:
    await client.ask(chat("hi"), "hello")
    await client.ask(chat("yo"), "hey", scope=Scope("uma", "other"))
    await client.ask(chat("hi", "hello", "Thanks!"), "Bye.")
    await client.sessions.done(S)
    await client.sessions.done(Scope("uma", None))
    assert [await client.state(f"t{n}") for n in range(3)] == ["paired", "served", "dropped: no_next_state"]


async def test_open_turns_survive_a_restart(tmp_path: Path, chat) -> None:
    ledger = await open_ledger(tmp_path)
    await Client(Sessions(ledger, SessionSettings()), ledger).ask(chat("hi"), "hello")
    await ledger.aclose()
    ledger = await open_ledger(tmp_path)
    sessions = Sessions(ledger, SessionSettings())
    await sessions.refill()
    assert (await Client(sessions, ledger, count=1).ask(chat("hi", "hello", "thanks"), "sure"))[1] == "t0"
    await ledger.aclose()


async def test_a_changed_history_pairs_after_a_restart(tmp_path: Path, chat) -> None:
    anyone = Scope("uma", None)
    ledger = await open_ledger(tmp_path)
    first = Client(Sessions(ledger, SessionSettings()), ledger)
    await first.ask(chat("Name a tree.\nIt is 12:01."), "An oak, or a yew.", scope=anyone, group="app")
    await first.ask(chat("one", "1", "How many are three trees?"), "They are three.", scope=anyone)
    await ledger.aclose()
    ledger = await open_ledger(tmp_path)
    sessions = Sessions(ledger, SessionSettings())
    await sessions.refill()
    client = Client(sessions, ledger, count=2)
    bare = chat("Name a tree.", "An oak, or a yew.", "thanks")
    assert (await client.ask(bare, "x", scope=anyone))[1] is None
    assert (await client.ask(bare, "x", scope=anyone, group="app"))[1] == "t0"
    window = chat("How many are three trees?", "They are three.", "thanks")
    assert (await client.ask(window, "x", scope=anyone))[1] == "t1"
    await ledger.aclose()


async def test_after_a_restart_a_request_that_is_sent_again_answers_no_other_chat(tmp_path: Path, chat) -> None:
    """A kill cut the reply to an answer whose turn has it already. Another chat waits, alike but for its numbers."""
    anyone = Scope("uma", None)
    ledger = await open_ledger(tmp_path)
    client = Client(Sessions(ledger, SessionSettings()), ledger)
    other = chat("Tell me of topic 2-18.", "An oak.", "No, that is wrong. Try 662 again.")
    mine = chat("Tell me of topic 3-32.", "An oak.", "No, that is wrong. Try 215 again.")
    await client.ask(other, "The sea is slow.", scope=anyone)
    await client.ask(mine, "The sea is slow.", scope=anyone)
    again = (*mine, *chat("", "The sea is slow.", "No, try 1578 again.")[1:])
    assert (await client.ask(again, "cut", scope=anyone))[1] == "t1"
    await ledger.aclose()
    ledger = await open_ledger(tmp_path)
    sessions = Sessions(ledger, SessionSettings())
    await sessions.refill()
    client = Client(sessions, ledger, count=3)
    assert (await client.ask(again, "whole", scope=anyone))[1] is None
    answer = (*other, *chat("", "The sea is slow.", "Thanks!")[1:])
    assert (await client.ask(answer, "x", scope=anyone))[1] == "t0"
    assert [await client.state(f"t{n}") for n in range(2)] == ["paired", "paired"]
    await ledger.aclose()


async def test_turns_opened_by_an_older_server_pair_by_their_whole_history(tmp_path: Path, chat) -> None:
    ledger = await open_ledger(tmp_path)
    await Client(Sessions(ledger, SessionSettings()), ledger).ask(chat("hi"), "hello", scope=Scope("uma", None))
    await ledger.aclose()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute("UPDATE open_turn SET place = '{}'")  # as the migration leaves it
    ledger = await open_ledger(tmp_path)
    sessions = Sessions(ledger, SessionSettings())
    await sessions.refill()
    client = Client(sessions, ledger, count=1)
    assert (await client.ask(chat("hi [12:01]", "hello", "thanks"), "x", scope=Scope("uma", None)))[1] is None
    assert (await client.ask(chat("hi", "hello", "thanks"), "x", scope=Scope("uma", None)))[1] == "t0"
    await ledger.aclose()


async def test_the_oldest_open_turns_give_way(ledger: Ledger, chat) -> None:
    client = Client(Sessions(ledger, SessionSettings(max_open_turns=2)), ledger)
    for n in range(3):
        await client.ask(chat(f"question {n}"), "ok")
    assert [await client.state(f"t{n}") for n in range(3)] == ["dropped: no_next_state", "served", "served"]


async def test_paired_wakes_the_judge(ledger: Ledger, chat) -> None:
    paired = asyncio.Event()
    client = Client(Sessions(ledger, SessionSettings(), paired=paired), ledger)
    await client.ask(chat("hi"), "hello")
    assert not paired.is_set()
    await client.ask(chat("hi", "hello", "thanks"), "sure")
    assert paired.is_set()


async def test_old_turns_expire(ledger: Ledger, chat, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(Sessions(ledger, SessionSettings(pair_ttl_s=100.0)), ledger)
    now = store_module.time.time()
    await client.ask(chat("old"), "ok", at=now - 200)
    await client.ask(chat("old"), "cut", at=now - 200, drop=DropReason.CANCELLED)
    await client.ask(chat("new"), "ok", at=now)
    await sweep(client.sessions, monkeypatch)
    assert [await client.state(f"t{n}") for n in range(3)] == [
        "dropped: no_next_state",
        "dropped: cancelled",
        "served",
    ]
    assert (await client.ask(chat("old", "ok", "late"), "x"))[1] is None
    assert (await client.ask(chat("old", "cut", "late"), "x"))[1] is None
    assert (await client.ask(chat("new", "ok", "thanks"), "x"))[1] == "t2"


async def sweep(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one round of `expire_forever`."""
    swept = asyncio.Event()

    async def one_sweep(seconds: float) -> None:
        swept.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": one_sweep}))
        task = asyncio.create_task(sessions.expire_forever())
        await swept.wait()
        task.cancel()


async def test_a_request_whose_end_could_not_be_written_ends_once_the_ledger_can(
    client: Client, chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its end the request would count as running, and its session could never be forgotten."""

    async def full(*_: object, **__: object) -> None:
        raise LedgerUnavailable("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(client.ledger, "finish", full)
        patch.setattr(client.ledger, "abandon", full)
        assert not await client.sessions.served(*await client.begin(chat("hi"), "hello"))
        request, _ = await client.begin(chat("yo"), "")
        await client.sessions.abandon(request.request_id, DropReason.CANCELLED)
        await sweep(client.sessions, monkeypatch)
        assert (await client.ledger.counts())["running"] == 2
    await sweep(client.sessions, monkeypatch)
    counts = await client.ledger.counts()
    assert (counts["running"], counts["abandoned.not_recorded"], counts["abandoned.cancelled"]) == (0, 1, 1)
    assert await client.ledger.audit() == []


async def test_an_end_that_was_written_after_all_is_not_written_again(
    client: Client, chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = client.ledger.finish

    async def unsynced(*said: object) -> None:
        await finish(*said)
        raise LedgerUnavailable("not synced")

    with monkeypatch.context() as patch:
        patch.setattr(client.ledger, "finish", unsynced)
        assert not await client.sessions.served(*await client.begin(chat("hi"), "hello", at=store_module.time.time()))
    await sweep(client.sessions, monkeypatch)
    assert await client.state("t0") == "served"
    assert (await client.ledger.counts())["abandoned"] == 0


async def test_parallel_requests_never_take_one_turn_twice(client: Client, chat) -> None:
    await client.ask(chat("hi"), "hello")
    answered = await asyncio.gather(*(client.ask(chat("hi", "hello", f"say {n}"), f"reply {n}") for n in range(8)))
    assert sorted(str(turn_id) for _, turn_id in answered) == ["None"] * 7 + ["t0"]


class BrokenLedger:
    """A ledger whose disk is full."""

    async def _fail(self, *args: object, **kwargs: object) -> None:
        raise LedgerUnavailable("disk full")

    finish = pair = drop = expire = open_turns = ended_turns = begin = abandon = _fail


async def test_a_ledger_that_cannot_write_never_fails_a_chat(chat) -> None:
    client = Client(Sessions(BrokenLedger(), SessionSettings()), BrokenLedger())
    assert await client.ask(chat("hi"), "hello", begin=False) == ("t0", None)
    assert await client.ask(chat("hi", "hello", "thanks"), "sure", begin=False) == ("t1", None)
    await client.sessions.done(S)
    with pytest.raises(LedgerUnavailable):
        await client.sessions.refill()


async def test_what_could_not_be_paired_ends_visibly(ledger: Ledger, client: Client, chat, monkeypatch) -> None:
    await client.ask(chat("hi"), "hello")
    monkeypatch.setattr(ledger, "pair", BrokenLedger()._fail)
    assert (await client.ask(chat("hi", "hello", "thanks"), "sure"))[1] == "t0"
    assert await ledger.expire(NOW + 1.5) == ["t0", "t1"]
    assert await client.state("t0") == "dropped: no_next_state"


async def test_the_recorded_traffic_in_a_real_ledger(client: Client, traffic) -> None:
    """Every main reply of the recordings is in the ledger, paired with its user's next message; no side request is."""
    mains = 0
    for name in (
        "interleaved_two_sessions",
        "tool_call_turn",
        "side_memory_flush",
        "telegram_reaction",
        "retry_after_503",
    ):
        for request in traffic(name):
            if request.classified.type is TurnType.SIDE:
                await client.sessions.observe_side(request.scope, request.messages)
            elif request.reply is not None:
                mains += 1
                await client.ask(request.messages, request.reply, scope=request.scope)
    counts = await client.ledger.counts()
    assert counts["paired"] + counts["served"] == mains == client.count
    assert counts["paired"] == 8
    for n in range(mains):
        record = await client.ledger.turn(f"t{n}")
        answer = await client.ledger.turn(f"t{record.answered_by.removeprefix('r')}") if record.answered_by else None
        assert answer is None or answer.request.scope == record.request.scope
    assert await client.ledger.audit() == []


async def test_a_reaction_in_a_heartbeat_is_a_next_state(client: Client, traffic) -> None:
    first, second = traffic("telegram_reaction")
    await client.ask(first.messages, first.reply, scope=first.scope)
    heartbeat = Message(role="user", content="Follow the heartbeat monitor scratch context when provided.")
    seen = [*second.messages[:-2], heartbeat, second.messages[-1]]
    assert await client.sessions.observe_side(first.scope, seen) == "t0"
    record = await client.ledger.turn("t0")
    assert (record.next_state.messages, record.next_state.reactions) == ((), ("👍",))
    assert record.state is TurnState.PAIRED


async def test_a_forgotten_turn_leaves_no_digest_in_memory(ledger: Ledger, client: Client, chat) -> None:
    other = Scope("uma", "other")
    await client.ask(chat("my secret"), "hello")
    await client.ask(chat("my secret", "hello", "more"), "sure")
    await client.ask(chat("hi"), "welcome", scope=other)
    pairing = client.sessions._pairing
    assert pairing.turn_ids == ["t1", "t2", "t0"]
    await ledger.forget("s")
    await client.sessions.forget_deleted()
    assert pairing.turn_ids == ["t2"]
    assert {scope for _, scope, _ in pairing._index} == {other}
    assert not pairing._known._digests
    assert (await client.ask(chat("my secret", "hello", "more", "sure", "go on"), "no"))[1] is None
    assert (await client.ask(chat("hi", "welcome", "thanks"), "bye", scope=other))[1] == "t2"
    assert await ledger.audit() == []


async def test_forgetting_and_retention_leave_no_digest_in_memory(
    ledger: Ledger, client: Client, chat, tmp_path: Path, monkeypatch
) -> None:
    """Through the classes that the server has, also where the deletion fails behind its first rows."""
    pairing = client.sessions._pairing
    (tmp_path / "versions").mkdir()
    forgetting = Forgetting(ledger, client.sessions, publisher=None, root=tmp_path)  # type: ignore[arg-type]
    await client.ask(chat("my secret"), "hello")
    await forgetting.session("s", None)
    assert (pairing.turn_ids, dict(pairing._known._digests)) == ([], {})

    await client.ask(chat("my secret"), "hello")
    real = ledger.forget

    async def forget_and_fail(session_id: str, user: str | None = None) -> Any:
        await real(session_id, user)
        raise LedgerUnavailable("the log could not be moved")

    monkeypatch.setattr(ledger, "forget", forget_and_fail)
    with pytest.raises(LedgerUnavailable):
        await forgetting.session("s", None)
    assert (pairing.turn_ids, dict(pairing._known._digests)) == ([], {})

    await client.ask(chat("my secret"), "hello")
    await client.sessions.done(S)
    aged = Retention(ledger, client.sessions, RetentionSettings(max_age_days=1e-9), clock=lambda: 1e12)
    assert await aged.round()
    assert (pairing.turn_ids, dict(pairing._known._digests)) == ([], {})


async def test_what_is_forgotten_while_the_ledger_is_asked_stays_forgotten(
    ledger: Ledger, client: Client, chat, monkeypatch
) -> None:
    await client.ask(chat("hi"), "hello")

    async def deleted(turn_ids: list[str]) -> list[str]:
        await client.sessions.done(S)  # t0 ended meanwhile
        client.sessions._pairing.forget(turn_ids)
        return turn_ids

    monkeypatch.setattr(ledger, "deleted", deleted)
    await client.sessions.forget_deleted()
    assert client.sessions._pairing.turn_ids == []
