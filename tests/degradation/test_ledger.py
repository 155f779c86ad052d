"""A disk that is full, and a file that another program locks, truncates or tears.

Chats go on, unrecorded and marked so. One log line reports it. It ends when its cause ends.
"""

import resource
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.settings import TrainingSettings


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 2 MB, where the test may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(argv, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here: ENOSPC is shown by the file-size limit alone")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as opened:
        while True:
            opened.write(bytes(4096))


async def goes_on_unrecorded(here: Any) -> None:
    """Check that chats are answered and marked, that one line reports all of them, and that `/healthz` lists the
    ledger.
    """
    for _ in range(20):  # a checkpoint of SQLite may have made room in its log for a few more turns
        replies = [await here.chat(session=f"full-{n}", max_tokens=60) for n in range(4)]
        assert {reply.status_code for reply in replies} == {200}
        if replies[-1].headers.get("x-openclaw-recorded") == "false":
            break
    else:
        pytest.fail("all turns are recorded")
    assert await here.health() == "degraded"
    assert any(problem.startswith("ledger:") for problem in await here.problems())
    assert 'openclaw_rl_out_of_order{part="ledger"} 1' in await here.admin("/metrics")
    failures = here.lines["ledger_cannot_write"] + here.lines["ledger_cannot_sync"]
    assert failures == 1 + here.lines["ledger_writes_again"]
    assert not {"request_not_recorded", "turn.not_recorded", "not an event"} & set(here.lines)


async def records_again(here: Any) -> None:
    await here.until_well()
    reply = await here.chat(session="again")
    assert "x-openclaw-recorded" not in reply.headers
    assert await here.state(reply.json()["id"]) == ("served", None)
    assert here.lines["ledger_writes_again"] == here.lines["ledger_cannot_write"] + here.lines["ledger_cannot_sync"]


async def test_a_disk_that_is_full_costs_records_and_no_chat(place: Any, small_disk: Path) -> None:
    async with place(small_disk) as here:
        before = (await here.chat()).json()["id"]
        ballast = small_disk / "ballast"
        with pytest.raises(OSError, match="No space left"):
            fill(ballast)
        lost = 0
        for n in range(200):  # what the log already has of the disk is used up first
            lost += (await here.chat(session=f"fill-{n}", max_tokens=60)).headers.get("x-openclaw-recorded") == "false"
            if lost == 4:  # after the first a small part of one may still fit
                break
        await goes_on_unrecorded(here)
        ballast.unlink()
        await records_again(here)
        assert await here.state(before) == ("served", None)


async def test_a_file_that_may_not_grow_is_a_full_disk_too(place: Any, tmp_path: Path) -> None:
    async with place() as here:
        assert (await here.chat()).status_code == 200
        data = here.server.data_dir
        largest = max(file.stat().st_size for file in data.glob("ledger.sqlite3*"))
        pid = int((data / "ledger.sqlite3.lock").read_text())
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest, hard))
        for n in range(200):
            if (await here.chat(session=f"fill-{n}", max_tokens=60)).headers.get("x-openclaw-recorded"):
                break
        for _ in range(2):  # the second time it is well, and the line that says otherwise is lost: its file is full too
            # A smaller turn may still fit, or the log be emptied into the other file, under the limit: now none is.
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, hard))
            reply = await here.chat()
            assert (reply.status_code, reply.headers["x-openclaw-recorded"]) == (200, "false")
            assert any(problem.startswith("ledger:") for problem in await here.problems())
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
            await here.until_well()
        reply = await here.chat(session="again")
        assert await here.state(reply.json()["id"]) == ("served", None)


async def test_another_program_that_holds_the_file_costs_records_and_no_chat(place: Any) -> None:
    async with place() as here:
        assert (await here.chat()).status_code == 200
        with closing(sqlite3.connect(here.server.data_dir / "ledger.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            await goes_on_unrecorded(here)
            other.execute("ROLLBACK")
        await records_again(here)


async def test_a_ledger_cut_short_while_it_is_used_ends_no_chat(place: Any, tmp_path: Path) -> None:
    async with place() as here:
        for n in range(5):
            await here.chat(session=f"s{n}")
        ledger = here.server.data_dir / "ledger.sqlite3"
        with closing(sqlite3.connect(ledger)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with ledger.open("r+b") as file:
            file.truncate(8192)
        await goes_on_unrecorded(here)


@pytest.mark.parametrize("keep", [0.5, 0.0, -1.0])
async def test_a_torn_ledger_is_refused_at_start_in_one_line(place: Any, tmp_path: Path, keep: float) -> None:
    """Half a file, and a file with another head; an empty file is a new ledger."""
    async with place() as here:
        for n in range(8):
            await here.chat(session=f"s{n}", max_tokens=60)
    ledger = tmp_path / "data" / "ledger.sqlite3"
    content = ledger.read_bytes()
    ledger.write_bytes(b"not a database at all" + content[21:] if keep < 0 else content[: int(len(content) * keep)])
    for name in ("-wal", "-shm"):
        ledger.with_name(ledger.name + name).unlink(missing_ok=True)
    if keep == 0.0:
        async with place(tmp_path) as here:
            assert (await here.chat()).status_code == 200
        return
    with pytest.raises(RuntimeError, match="did not come up"):
        async with place(tmp_path):
            pass
    with pytest.raises(LedgerError, match="cannot open the ledger"):
        await Ledger.open(ledger, identity=Identity("stub", "t", "m"), training=TrainingSettings())


async def test_without_its_log_a_ledger_is_as_it_was_when_the_log_was_last_moved(place: Any, tmp_path: Path) -> None:
    """A user deleted `-wal` after a crash: the ledger is older and whole, and the server starts."""
    async with place() as here:
        await here.chat()
        shutil.copytree(here.server.data_dir, tmp_path / "copy" / "data")
    for name in ("-wal", "-shm"):
        (tmp_path / "copy" / "data" / f"ledger.sqlite3{name}").unlink(missing_ok=True)
    (tmp_path / "copy" / "data" / "run" / "server.json").unlink()
    async with place(tmp_path / "copy") as here:
        assert (await here.chat()).status_code == 200
        assert await here.health() == "ok"
