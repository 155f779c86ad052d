"""A sandbox of bubblewrap holds a model that wants out."""

import asyncio
import fcntl
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from openclaw_rl.agents.sandbox import Finished, Limits, Profile, Sandbox, Sandboxes, bubblewrap, kinds
from openclaw_rl.errors import SandboxFault

SLEEP = f"sleep 30.{os.getpid()}"
"""The words of this run's own sleepers. Another run of these tests may be on the machine."""


@pytest.fixture
async def sandbox(sandboxes: Sandboxes) -> AsyncIterator[Sandbox]:
    async with sandboxes.sandbox(Profile(folders=("/logs",))) as opened:
        yield opened


def commands() -> Iterator[str]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue


def until_no_process(words: str) -> None:
    end = time.monotonic() + 120
    while any(words in command for command in commands()):
        assert time.monotonic() < end, f"{words} still runs"
        time.sleep(0.05)


async def test_a_command_runs_in_the_work_folder_as_its_own_user(sandbox: Sandbox) -> None:
    done = await sandbox.run("pwd; id -u; echo wrong >&2; exit 3")
    assert done == Finished(3, b"/work\n1000\n", b"wrong\n")


async def test_files_and_processes_stay_between_commands(sandbox: Sandbox) -> None:
    begin = "echo one > a; nohup sleep 100 >/dev/null 2>&1 & disown"
    is_there = 'until read name < /proc/$!/comm && [ "$name" = sleep ]; do :; done'  # else it is a shell yet
    await sandbox.run(f"{begin}; {is_there}")
    assert (await sandbox.run("cat a; pgrep -c -x sleep")).output == b"one\n1\n"


async def test_a_planted_secret_is_nowhere(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_SECRET", "hidden-4711")
    async with sandboxes.sandbox(Profile()) as sandbox:
        done = await sandbox.run("env; cat /proc/*/environ; cat /proc/*/cmdline; cat /etc/*")
    assert b"4711" not in done.output + done.errors
    assert b"PLANTED" not in done.output + done.errors


async def test_process_one_tells_and_takes_nothing(sandbox: Sandbox) -> None:
    done = await sandbox.run(
        "cat /proc/1/environ || echo no; ls /proc/1/fd/ || echo no; echo x > /proc/1/fd/1 || echo no"
    )
    assert done.output == b"no\nno\nno\n"
    await sandbox.run("kill -9 1; kill -STOP 1; kill -9 -1")
    assert (await sandbox.run("echo alive")).output == b"alive\n"


async def test_no_network_nor_the_servers_own_port(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = await sandbox.run(f"(: < /dev/tcp/127.0.0.1/{port}) && echo in; (: < /dev/tcp/1.1.1.1/53) && echo out")
        assert done.output == b""
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


async def test_the_hosts_files_are_not_there(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    done = await sandbox.run(f"cat {tmp_path}/mine; ls /root /home/*/.ssh /var /srv; cat /etc/shadow /etc/hostname")
    assert done.output == b""
    assert sorted((await sandbox.run("ls /etc")).output.split()) == [b"alternatives", b"group", b"hosts", b"passwd"]
    done = await sandbox.run(
        "touch /x /usr/x /etc/x /dev/x; mkdir /new; mount -t tmpfs x /tmp; unshare -r true && echo made"
    )
    assert done.output == b""


async def test_links_out_of_the_work_folder_lead_nowhere(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the host's")
    await sandbox.run(f"ln -s {secret} link; ln -s {tmp_path} folder; ln -s /etc/passwd passwd")
    assert await sandbox.take() == {
        "link": f"-> {secret}".encode(),
        "folder": f"-> {tmp_path}".encode(),
        "passwd": b"-> /etc/passwd",
    }
    await sandbox.put({"link": b"written"})  # tar replaces the link and does not follow it
    with pytest.raises(SandboxFault, match="cannot be written"):
        await sandbox.put({"folder/new": b"written"})
    assert secret.read_text() == "the host's"
    assert [file.name for file in tmp_path.iterdir()] == ["secret"]


async def test_of_sixty_sleepers_the_limit_lets_some_live(sandbox: Sandbox) -> None:
    """Never a fork bomb: outside of the limit it takes the machine down."""
    script = (
        "import subprocess\nmade = []\nfor _ in range(60):\n    try: made.append(subprocess.Popen(['sleep', '100']))\n"
        "    except BlockingIOError: pass\nprint(len(made))\nfor one in made: one.kill()\n"
    )
    done = await sandbox.run(("python3", "-c", script))
    assert 20 < int(done.output) < sandbox.limits.processes
    assert (await sandbox.run("echo alive")).output == b"alive\n"


async def test_a_large_file_and_large_memory_are_refused(sandbox: Sandbox) -> None:
    done = await sandbox.run("head -c 200M /dev/zero > big; echo $?; stat -c %s big; rm big")
    assert done.output == b"153\n%d\n" % (50 << 20)
    done = await sandbox.run(("python3", "-c", "bytearray(4 << 30)"))
    assert b"MemoryError" in done.errors


async def test_many_files_pass_the_limit_of_the_disk_and_end_the_command(sandbox: Sandbox) -> None:
    done = await sandbox.run("for n in $(seq 8); do head -c 45M /dev/zero > f$n; done; sleep 100", timeout_s=100)
    assert (done.exit_code, done.ended_by) == (137, "disk")
    await sandbox.run("rm f*; mkdir hidden; head -c 1000 /dev/zero > hidden/f; chmod 000 hidden")
    assert (await sandbox.run("echo alive")).output == b"alive\n"


async def test_endless_output_is_cut_and_ended(sandbox: Sandbox) -> None:
    done = await sandbox.run("yes")
    assert (done.exit_code, done.ended_by) == (137, "output")
    assert len(done.output) < 20 << 10
    done = await sandbox.run("seq 100000; echo end")
    assert done.output.startswith(b"1\n2\n")
    assert done.output.endswith(b"\nend\n")
    assert b"bytes left out" in done.output


async def test_a_command_that_hangs_ends_at_its_limit(sandbox: Sandbox) -> None:
    for timeout_s in (0.5, 5, 50):  # the word must come before the limit: a busy machine gets more time for it
        done = await sandbox.run("echo before; sleep 100 & sleep 100", timeout_s=timeout_s)
        assert (done.exit_code, done.ended_by) == (137, "time")
        if done.output:
            break
    assert done.output == b"before\n"


async def test_commands_run_beside_each_other_and_read_their_input(sandbox: Sandbox) -> None:
    first, second = await asyncio.gather(
        sandbox.run("while [ ! -e done ]; do sleep 0.05; done; echo seen"),
        sandbox.run("cat; touch done", stdin=b"x" * 300_000),
    )
    assert first.output == b"seen\n"
    assert second.output.startswith(b"xxx")


@pytest.mark.parametrize("command", ["", "\0", "echo \ud800", "(", "exec 1>&-; echo", "'"])
async def test_any_text_is_a_command(sandbox: Sandbox, command: str) -> None:
    await sandbox.run(command)
    assert (await sandbox.run("echo alive")).output == b"alive\n"


async def test_a_renewed_sandbox_has_the_work_and_no_process(sandbox: Sandbox) -> None:
    await sandbox.run(f"echo kept > work; touch /tmp/t ~/.bashrc /logs/l; (setsid {SLEEP}1 >/dev/null 2>&1 &)")
    await sandbox.renew()
    done = await sandbox.run("cat work; ls -A /tmp ~ /logs; pgrep -x sleep || echo none")
    assert done.output == b"kept\n/home/agent:\n\n/logs:\nl\n\n/tmp:\nnone\n"
    until_no_process(f"{SLEEP}1")


async def test_a_daemon_ends_and_the_files_go_with_the_sandbox(sandboxes: Sandboxes) -> None:
    async with sandboxes.sandbox(Profile()) as sandbox:
        await sandbox.run(f"(setsid {SLEEP}2 >/dev/null 2>&1 &)")
        deep = "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')\n"
        await sandbox.run(("python3", "-c", deep))
        await sandbox.run("mkdir -p a/b; chmod 000 a")
    until_no_process(f"{SLEEP}2")
    assert [file.name for file in sandboxes.folder.iterdir()] == [".lock"]


RUNNER = f"""
import asyncio, sys
from pathlib import Path
from openclaw_rl.agents.sandbox import Limits, Profile, Sandboxes
async def main():
    sandboxes = await Sandboxes.choose("bubblewrap", Limits(), Path(sys.argv[1]))
    async with sandboxes.sandbox(Profile()) as sandbox:
        await sandbox.run("(setsid {SLEEP}3 >/dev/null 2>&1 &)")
        print("ready", sandboxes.folder, flush=True)
        await sandbox.run("{SLEEP}4")
asyncio.run(main())
"""


def test_a_sandbox_is_as_nice_as_its_runner_and_has_no_terminal() -> None:
    """Linux may group processes by session: then niceness counts within a group only, and the group needs its own.

    The runner has a terminal here, as one that a person started.
    """
    code = """
import asyncio, fcntl, os, termios, time
from openclaw_rl.agents.sandbox import Limits, Profile, Sandboxes
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
open("/dev/tty").close()
os.nice(3)
async def main():
    opened = await Sandboxes.choose("bubblewrap", Limits())
    try:
        async with opened.sandbox(Profile()) as sandbox:
            assert b"no tty" in (await sandbox.run("(: < /dev/tty) || echo no tty")).output
            end = time.monotonic() + 30  # the kernel accepts ten changes a second from all users together
            while True:
                done = await sandbox.run("nice; cat /proc/self/autogroup")
                mine, group, *_ = done.output.decode().split("\\n")
                if not group or group.endswith(f" nice {mine}") or time.monotonic() > end:
                    break
            print(os.nice(0), mine, group.rpartition(" ")[2] or mine)
    finally:
        await opened.close()
asyncio.run(main())
"""
    ours, terminal = pty.openpty()
    try:
        said = subprocess.run(
            [sys.executable, "-c", code],
            stdin=terminal,
            capture_output=True,
            text=True,
            timeout=120,
            start_new_session=True,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(terminal)
    nice = str(min(os.nice(0) + 3, 19))
    assert said.stdout.split() == [nice, nice, nice], said.stderr


async def test_a_killed_runner_leaves_no_process_and_the_next_one_removes_its_files(open_folder: Path) -> None:
    alive = await Sandboxes.choose("bubblewrap", Limits(), open_folder)
    argv = [sys.executable, "-c", RUNNER, str(open_folder)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        folder = Path(runner.stdout.readline().split()[1])
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    for words in (f"{SLEEP}3", f"{SLEEP}4", str(folder)):
        until_no_process(words)
    assert folder.is_dir()
    next_one = await Sandboxes.choose("bubblewrap", Limits(), open_folder)
    assert not folder.exists()
    assert alive.folder.is_dir()
    await next_one.close()
    assert not next_one.folder.exists()
    await alive.close()


async def test_a_folder_that_is_being_made_is_cleared_by_no_other_run(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def while_another_starts(file: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            kinds._clear(open_folder)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", while_another_starts)
    made = await Sandboxes.choose("bubblewrap", Limits(), open_folder)
    assert made.folder.is_dir()
    await made.close()
    assert not list(open_folder.iterdir())


async def test_without_bubblewrap_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openclaw_rl.agents.sandbox.kinds.shutil.which", lambda *_, **__: None)
    with pytest.raises(SandboxFault, match="apt-get install bubblewrap"):
        await Sandboxes.choose("bubblewrap", Limits())


async def test_an_image_needs_docker_or_podman(sandboxes: Sandboxes) -> None:
    with pytest.raises(SandboxFault, match="the image debian:12 needs docker or podman"):
        sandboxes.sandbox(Profile(image="debian:12"))


async def test_a_full_disk_is_the_environments_fault(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bubblewrap.Path, "mkdir", full)
    with pytest.raises(SandboxFault, match="No space left on device"):
        async with sandboxes.sandbox(Profile()):
            pass


async def test_a_folder_that_bubblewrap_cannot_make_is_said_in_its_words(sandboxes: Sandboxes) -> None:
    with pytest.raises(SandboxFault, match="bubblewrap did not start a sandbox: bwrap: "):
        async with sandboxes.sandbox(Profile(workdir="/usr/no/such/place")):
            pass


def test_a_wrong_folder_is_refused() -> None:
    for folder in ("relative", "/", "/a/../b"):
        with pytest.raises(ValueError, match="absolute path"):
            Profile(workdir=folder)


async def test_a_folder_closed_to_other_users_is_named(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(SandboxFault, match=r"none is no folder; sandbox\.folder names another"):
        await Sandboxes.choose("bubblewrap", Limits(), closed / "none")
    if os.geteuid() == 0:
        first = next(here for here in (*reversed(closed.parents), closed) if not here.stat().st_mode & 0o001)
        with pytest.raises(SandboxFault, match=f"cannot pass through {first}( to .*)?; sandbox.folder names another"):
            await Sandboxes.choose("bubblewrap", Limits(), closed)
    else:
        await (await Sandboxes.choose("bubblewrap", Limits(), closed)).close()
