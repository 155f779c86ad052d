"""Pictures beside the ledger: stored once, masked, copied, and deleted with the last turn that shows them."""

import asyncio
import errno
import hashlib
import json
import sqlite3
import stat
import threading
from pathlib import Path

import pytest
from ledger import IDENTITY, give_sample
from pictures import picture_file
from turns import KEY, make_request, make_turn, serve_turn

from openclaw_rl.errors import EpisodeRefused, LedgerError
from openclaw_rl.ledger import Ledger, pictures, turns
from openclaw_rl.ledger.schema import MIGRATIONS, migrate
from openclaw_rl.ledger.snapshot import backup
from openclaw_rl.ledger.store import LedgerLimits
from openclaw_rl.messages import Message
from openclaw_rl.offline.export import export
from openclaw_rl.settings import RedactionSettings, TrainingSettings
from openclaw_rl.types import DropReason, Feedback, NextState
from openclaw_rl.types.pictures import Picture, PromptIds, with_pictures


def picture(shade: int) -> Picture:
    data = picture_file(shade=shade)
    return Picture(hashlib.sha256(data).hexdigest(), 32, 24, data)


ONE, TWO = picture(1), picture(2)


def shown(name: str, *of: Picture, session: str = "s", text: str = "look", **more):
    """Return a request whose message has these pictures."""
    parts = [{"type": "text", "text": text}, *(one.part().model_dump() for one in of)]
    message = Message.model_validate({"role": "user", "content": parts})
    return make_request(name, message, session=session, prompt=with_pictures((1, 2), of), pictures=of, **more)


def files(tmp_path) -> set[str]:
    folder = pictures.folder_of(tmp_path / "l.db")
    return {file.name for file in folder.iterdir()} if folder.is_dir() else set()


async def swept(ledger: Ledger) -> None:
    """Wait until the sweeps that were asked for are done."""
    await ledger._writer.alone(lambda _: None)


class Disk:
    """A disk whose writes of pictures begin, and wait."""

    def __init__(self, monkeypatch) -> None:
        self.go_on, self.has_begun = threading.Event(), threading.Event()
        self._own = pictures._write_file
        monkeypatch.setattr(pictures, "_write_file", self._write)

    def _write(self, file: Path, data: bytes) -> None:
        # The temporary file of `write_private` is there while the disk writes.
        file.with_name(f".{file.name}.1").write_bytes(data[:9])
        self.has_begun.set()
        assert self.go_on.wait(30)
        file.with_name(f".{file.name}.1").unlink()
        self._own(file, data)

    async def begins(self) -> None:
        assert await asyncio.to_thread(self.has_begun.wait, 30)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk(monkeypatch)
    yield disk
    disk.go_on.set()


@pytest.fixture
def opened(tmp_path):
    """`await opened(redaction=…)`; every ledger is audited and closed at the end of its block."""

    async def start(**more) -> Ledger:
        training = TrainingSettings(batch_size=1, min_batch=1)
        return await Ledger.open(tmp_path / "l.db", identity=IDENTITY, training=training, **more)

    return start


async def test_a_picture_is_stored_once_and_comes_back_in_the_order_of_the_prompt(tmp_path, opened) -> None:
    ledger = await opened()
    request = shown("a", ONE, TWO, ONE)
    await give_sample(ledger, request, make_turn("a"))
    await serve_turn(ledger, shown("b", TWO), make_turn("b"))
    assert files(tmp_path) == {ONE.digest, TWO.digest}
    folder = pictures.folder_of(tmp_path / "l.db")
    assert (folder / ONE.digest).read_bytes() == ONE.data
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / ONE.digest).stat().st_mode) == 0o600
    record = await ledger.turn("a")
    assert record.request == request
    assert record.request.pictures[0].data is None
    lease = await ledger.lease(trainer="t", now=True)
    assert lease.samples[0].pictures == (ONE.digest, TWO.digest, ONE.digest)
    assert await ledger.audit(is_deep=True) == []
    await ledger.aclose()
    assert ONE.data[:64] not in (tmp_path / "l.db").read_bytes()


async def test_forgetting_deletes_a_picture_that_no_other_turn_shows(tmp_path, opened) -> None:
    ledger = await opened()
    await serve_turn(ledger, shown("a", ONE, TWO, session="gone"), make_turn("a"))
    await serve_turn(ledger, shown("b", TWO, session="stays"), make_turn("b"))
    forgotten = await ledger.forget("gone")
    assert forgotten.is_scrubbed
    assert files(tmp_path) == {TWO.digest}
    assert await ledger.audit(is_deep=True) == []
    await ledger.forget("stays")
    assert files(tmp_path) == set()
    await serve_turn(ledger, shown("c", ONE, session="again"), make_turn("c"))
    assert files(tmp_path) == {ONE.digest}
    assert await ledger.audit(is_deep=True) == []
    await ledger.aclose()


async def test_retention_counts_and_deletes_pictures(tmp_path, opened) -> None:
    ledger = await opened()
    await serve_turn(ledger, shown("a", ONE), make_turn("a", drop=DropReason.UNSUPPORTED_CONTENT))
    before = (await ledger.retain(older_than=None, most_bytes=None)).used_bytes
    assert (await ledger.retain(older_than=10.0, most_bytes=None)).turns == 1
    assert files(tmp_path) == set()
    assert before - (await ledger.retain(older_than=None, most_bytes=None)).used_bytes >= len(ONE.data)
    await ledger.aclose()


async def test_a_file_that_a_crash_left_goes_at_the_next_start(tmp_path, opened) -> None:
    ledger = await opened()
    await serve_turn(ledger, shown("a", ONE), make_turn("a"))
    await ledger.aclose()
    folder = pictures.folder_of(tmp_path / "l.db")
    (folder / TWO.digest).write_bytes(TWO.data)
    (folder / f".{TWO.digest}").write_bytes(TWO.data[:10])
    ledger = await opened()
    assert files(tmp_path) == {ONE.digest}
    await ledger.aclose()


async def test_a_folder_that_cannot_be_listed_costs_a_sweep_and_no_write(tmp_path, opened, monkeypatch) -> None:
    ledger = await opened()
    await serve_turn(ledger, shown("a", ONE, session="gone"), make_turn("a"))
    own = Path.iterdir

    def iterdir(folder: Path):
        if folder.suffix == ".pictures":
            raise OSError(errno.EMFILE, "Too many open files")
        return own(folder)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "iterdir", iterdir)
        assert not (await ledger.forget("gone")).is_scrubbed
        await serve_turn(ledger, shown("b", TWO, session="stays"), make_turn("b"))
    assert files(tmp_path) == {ONE.digest, TWO.digest}
    await ledger.aclose()
    ledger = await opened()
    assert files(tmp_path) == {TWO.digest}
    await ledger.aclose()


async def test_a_half_deleted_picture_is_written_anew_when_it_comes_again(tmp_path, opened) -> None:
    ledger = await opened()
    folder = pictures.folder_of(tmp_path / "l.db")
    folder.mkdir()
    (folder / ONE.digest).write_bytes(bytes(len(ONE.data)))  # no row names it
    await serve_turn(ledger, shown("a", ONE), make_turn("a"))
    assert (folder / ONE.digest).read_bytes() == ONE.data
    await ledger.aclose()


async def test_a_ledger_from_before_the_pictures_is_copied(tmp_path) -> None:
    with sqlite3.connect(tmp_path / "old.db") as db:
        migrate(db, MIGRATIONS[:7])
    assert backup(tmp_path / "old.db", tmp_path / "copy.db") > 0


async def test_the_audit_finds_a_picture_without_its_file(tmp_path, opened) -> None:
    ledger = await opened()
    await serve_turn(ledger, shown("a", ONE, TWO), make_turn("a"))
    folder = pictures.folder_of(tmp_path / "l.db")
    (folder / ONE.digest).unlink()
    (folder / TWO.digest).write_bytes(b"cut")
    assert sorted(await ledger.audit()) == sorted(
        [
            f"the file of picture {ONE.digest} is missing",
            f"the file of picture {TWO.digest} has 3 bytes, not {len(TWO.data)}",
        ]
    )
    await ledger.aclose()
    with sqlite3.connect(tmp_path / "l.db") as db:
        db.execute("DELETE FROM request_picture WHERE n = 0")
    ledger = await opened()
    found = await ledger.audit()
    assert f"picture {ONE.digest.upper()} is shown by no request" in found
    assert "the pictures of request a have gaps" in found
    await ledger.aclose()


async def test_a_request_whose_picture_cannot_be_written_is_refused(opened) -> None:
    ledger = await opened()
    with pytest.raises(LedgerError, match="not in the ledger"):
        await ledger.begin(shown("a", Picture("0" * 64, 1, 1)))
    assert await ledger.audit() == []
    await ledger.aclose()


async def test_a_demonstration_shows_the_pictures_of_its_turn(opened) -> None:
    ledger = await opened()
    await serve_turn(ledger, shown("a", ONE), make_turn("a"))
    said = Feedback("f", "a", 3.0, demonstration="better")
    await ledger.record_feedback(said, user="ann", demonstration=(5, 6))
    (sample,) = (await ledger.lease(trainer="t", now=True)).samples
    assert sample.is_demonstration
    assert sample.pictures == (ONE.digest,)
    await ledger.aclose()


async def test_prompts_for_the_gate_and_for_practice_have_their_pictures(tmp_path, opened) -> None:
    ledger = await opened()
    await serve_turn(ledger, shown("a", ONE, session="x"), make_turn("a"))
    await serve_turn(ledger, make_request("b", session="y", prompt=(1, 3)), make_turn("b"))
    prompt = PromptIds((1, 2), (ONE,))
    assert (await ledger.practice_request("a")).prompt_ids == prompt
    assert [ids for _, ids in await ledger.recent_prompts(9)] == [(1, 3), prompt]
    assert [ids for ids, _ in await ledger.recent_replies(sampled_by=0, limit=9)] == [(1, 3), prompt]
    (pictures.folder_of(tmp_path / "l.db") / ONE.digest).unlink()
    assert await ledger.practice_request("a") is None
    assert [ids for _, ids in await ledger.recent_prompts(9)] == [(1, 3)]
    assert [ids for ids, _ in await ledger.recent_replies(sampled_by=0, limit=9)] == [(1, 3)]
    assert (await ledger.practice_request("b")).prompt_ids == (1, 3)
    await ledger.aclose()


async def test_where_no_engine_gets_pictures_no_prompt_with_one_is_given_out(opened) -> None:
    ledger = await opened(limits=LedgerLimits(shows_pictures=False))
    for name in "abc":
        await serve_turn(ledger, shown(name, ONE, session=name), make_turn(name))
        await ledger.drop(name, DropReason.NO_NEXT_STATE)
    await serve_turn(ledger, make_request("text", session="y", prompt=(1, 3)), make_turn("text"))
    await ledger.drop("text", DropReason.NO_NEXT_STATE)
    for name in "def":
        await serve_turn(ledger, shown(name, ONE, session=name), make_turn(name))
        await ledger.drop(name, DropReason.NO_NEXT_STATE)
    # Newer ones take no place of a text.
    assert [ids for _, ids in await ledger.recent_prompts(1)] == [(1, 3)]
    for by in (0, None):
        assert [ids for ids, _ in await ledger.recent_replies(sampled_by=by, limit=1)] == [(1, 3)]
    assert await ledger.anchor_turns(user="ann", policy="policy", limit=1) == ["text"]
    assert await ledger.practice_request("a") is None
    assert (await ledger.practice_request("text")).prompt_ids == (1, 3)
    assert (await ledger.turn("a")).request.pictures == (ONE,), "people see it"
    await ledger.aclose()


async def test_a_reference_is_no_secret_and_a_secret_beside_it_is_masked(tmp_path, opened) -> None:
    ledger = await opened()
    await serve_turn(ledger, shown("a", ONE), make_turn("a"))
    assert (await ledger.turn("a")).request.prompt_ids == PromptIds((1, 2), (ONE,))
    secret = "sk-proj-Zk3v9Qp2Lx8Wn5Rt7Yb1Mc4Hd6Jf0Gs"
    await serve_turn(ledger, shown("b", ONE, text=f"key {secret}"), make_turn("b"))
    record = await ledger.turn("b")
    assert secret not in record.request.messages[0].text()
    assert (record.request.prompt_ids, record.reason) == ((), DropReason.REDACTED)
    await ledger.aclose()


async def test_redacted_pictures_are_never_written(tmp_path, opened) -> None:
    ledger = await opened(redaction=RedactionSettings(pictures=True))
    await serve_turn(ledger, shown("a", ONE), make_turn("a"))
    record = await ledger.turn("a")
    assert record.request.messages[0].text() == "look\n[redacted:picture]"
    assert (record.request.pictures, record.reason) == ((), DropReason.REDACTED)
    await ledger.pair("a", NextState(shown("b", TWO).messages), by_request_id="b")
    assert "[redacted:picture]" in (await ledger.turn("a")).next_state.messages[0].text()
    assert files(tmp_path) == set()
    await ledger.aclose()


async def test_a_backup_and_an_export_take_the_pictures_along(tmp_path, opened) -> None:
    ledger = await opened()
    await serve_turn(ledger, shown("a", ONE), make_turn("a"))
    await serve_turn(ledger, shown("b", TWO, user="bob"), make_turn("b"))
    copy = tmp_path / "copy.db"
    assert backup(tmp_path / "l.db", copy) >= copy.stat().st_size + len(ONE.data) + len(TWO.data)
    assert {file.name for file in pictures.folder_of(copy).iterdir()} == {ONE.digest, TWO.digest}
    out = tmp_path / "bob.jsonl"
    assert export(tmp_path / "l.db", out, what="turns", format="jsonl", user="bob") == 1
    assert json.loads(out.read_text())["pictures"] == [TWO.digest]
    assert {file.name for file in pictures.folder_of(out).iterdir()} == {TWO.digest}
    parquet = tmp_path / "all.parquet"
    assert export(tmp_path / "l.db", parquet, what="turns", format="parquet") == 2
    await ledger.aclose()
    again = await Ledger.open(copy, identity=IDENTITY, training=TrainingSettings())
    assert await again.audit(is_deep=True) == []
    assert (await again.turn("a")).request.pictures == (ONE,)
    await again.aclose()
    second = tmp_path / "second.db"
    pictures.folder_of(second).mkdir()
    with pytest.raises(LedgerError, match="is there already"):
        backup(tmp_path / "l.db", second)
    assert not second.exists()


async def test_a_new_picture_is_written_off_the_writing_thread_and_before_its_row(
    tmp_path, opened, monkeypatch
) -> None:
    threads: list[str] = []
    own = pictures._write_file

    def write_file(file: Path, data: bytes) -> None:
        threads.append(threading.current_thread().name)
        with sqlite3.connect(tmp_path / "l.db") as db:
            assert db.execute("SELECT count(*) FROM picture").fetchone() == (0,)
        own(file, data)

    monkeypatch.setattr(pictures, "_write_file", write_file)
    ledger = await opened()
    await ledger.begin(shown("a", ONE))
    await ledger.begin(shown("b", ONE))
    assert len(threads) == 1
    assert threads[0].startswith("ledger-pictures")
    assert (await ledger.audit(is_deep=True)) == []
    await ledger.aclose()


async def test_other_turns_do_not_wait_for_a_disk_that_writes_a_picture(opened, disk) -> None:
    ledger = await opened()
    slow = asyncio.create_task(ledger.begin(shown("a", ONE)))
    await disk.begins()
    await serve_turn(ledger, make_request("b", session="y"), make_turn("b"))
    assert not slow.done()
    disk.go_on.set()
    await slow
    await ledger.finish(make_turn("a"), KEY)
    await ledger.aclose()


async def test_a_picture_that_a_request_holds_outlasts_the_deletion_of_its_last_turn(tmp_path, opened) -> None:
    ledger = await opened()
    await serve_turn(ledger, shown("a", ONE, session="gone"), make_turn("a"))
    async with ledger._staged.hold([ONE], ledger._known_pictures, timeout_s=9):
        assert (await ledger.forget("gone")).is_scrubbed
        assert files(tmp_path) == {ONE.digest}
        await ledger._begin(shown("b", ONE), within_s=9)
    assert await ledger.audit(is_deep=True) == []
    assert files(tmp_path) == {ONE.digest}
    async with ledger._staged.hold([TWO], ledger._known_pictures, timeout_s=9):
        await ledger._writer.alone(pictures.sweep)
        assert files(tmp_path) == {ONE.digest, TWO.digest}
    await swept(ledger)  # what the sweep left goes at the end of the hold
    assert files(tmp_path) == {ONE.digest}
    await ledger.aclose()


async def test_a_hold_that_ended_marks_no_file_for_the_next_one(tmp_path, opened, disk, monkeypatch) -> None:
    ledger = await opened()
    staged = ledger._staged
    with pytest.raises(LedgerError, match="not written within"):
        async with staged.hold([ONE], ledger._known_pictures, timeout_s=0.01):
            pytest.fail("held")
    await disk.begins()
    # A sweep leaves the file of the write that still runs, also its temporary one.
    await ledger._writer.alone(pictures.sweep)
    assert files(tmp_path) == {f".{ONE.digest}.1"}
    started = asyncio.Event()

    async def known(digests):
        started.set()
        return await ledger._known_pictures(digests)

    async def second() -> None:
        async with staged.hold([ONE], known, timeout_s=30):
            assert writes == [ONE.digest], "it writes the file itself"
            await ledger._begin(shown("b", ONE), within_s=9)

    task = asyncio.create_task(second())
    await started.wait()
    writes: list[str] = []
    own = pictures._write

    def write(folder, picture, **how) -> None:
        writes.append(picture.digest)
        own(folder, picture, **how)

    monkeypatch.setattr(pictures, "_write", write)
    disk.go_on.set()
    await task
    await swept(ledger)
    assert (pictures.folder_of(tmp_path / "l.db") / ONE.digest).read_bytes() == ONE.data
    assert await ledger.audit(is_deep=True) == []
    await ledger.aclose()


async def test_a_begin_that_fails_leaves_no_file(tmp_path, opened, disk, monkeypatch) -> None:
    ledger = await opened()
    # Its client left while the disk wrote the first of two pictures.
    task = asyncio.create_task(ledger.begin(shown("a", ONE, TWO)))
    await disk.begins()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    disk.go_on.set()
    await asyncio.get_running_loop().run_in_executor(ledger._staged._thread, lambda: None)
    await swept(ledger)
    assert files(tmp_path) == set()
    # Its row was refused.
    await serve_turn(ledger, shown("b", TWO), make_turn("b"))
    with pytest.raises(LedgerError):
        await ledger.begin(shown("b", ONE, TWO))
    await swept(ledger)
    assert files(tmp_path) == {TWO.digest}
    assert await ledger.audit(is_deep=True) == []
    await ledger.aclose()


async def test_a_picture_that_is_forgotten_while_a_failing_request_holds_it_goes(tmp_path, opened) -> None:
    ledger = await opened()
    await serve_turn(ledger, shown("a", ONE, session="gone"), make_turn("a"))

    async def begin() -> None:
        async with ledger._staged.hold([ONE], ledger._known_pictures, timeout_s=9):
            await ledger.forget("gone")
            assert files(tmp_path) == {ONE.digest}
            raise ValueError("the client left")

    with pytest.raises(ValueError, match="the client left"):
        await begin()
    await swept(ledger)
    assert files(tmp_path) == set()
    await ledger.aclose()


async def test_a_disk_that_hangs_costs_the_record_and_not_the_chat(opened, disk, monkeypatch) -> None:
    monkeypatch.setattr(turns, "CHAT_TIMEOUT_S", 0.01)
    ledger = await opened()
    with pytest.raises(LedgerError, match="not written within"):
        await ledger.begin(shown("a", ONE))
    disk.go_on.set()
    assert await ledger.audit() == []
    await ledger.aclose()


async def test_the_row_has_the_time_that_the_files_left(opened, monkeypatch) -> None:
    ledger, loop, late_s = await opened(), asyncio.get_running_loop(), 0.0
    now, known, write = loop.time, ledger._known_pictures, ledger._writer.write
    given: list[float] = []

    async def slow(digests):
        nonlocal late_s
        found = await known(digests)
        late_s = 400.0
        return found

    async def timed(work, *, timeout_s, is_synced):
        given.append(timeout_s)
        return await write(work, timeout_s=timeout_s, is_synced=is_synced)

    monkeypatch.setattr(turns, "CHAT_TIMEOUT_S", 1000.0)
    monkeypatch.setattr(loop, "time", lambda: now() + late_s)
    monkeypatch.setattr(ledger, "_known_pictures", slow)
    monkeypatch.setattr(ledger._writer, "write", timed)
    await ledger.begin(shown("a", ONE))
    assert given[0] <= 600
    late_s = 0.0
    await ledger.begin(shown("b", ONE))
    assert given[1] <= 600
    await ledger.begin(make_request("c", session="y"))
    assert given[2] == 1000, "a text has no file"
    await ledger.aclose()


async def test_a_refused_step_leaves_no_picture(tmp_path, opened) -> None:
    ledger = await opened()
    await serve_turn(ledger, shown("a", TWO), make_turn("a"))
    with pytest.raises(EpisodeRefused):
        await ledger.begin(shown("b", ONE, TWO, in_episode=7))
    await swept(ledger)
    assert files(tmp_path) == {TWO.digest}
    assert await ledger.audit(is_deep=True) == []
    await ledger.aclose()
