"""Program of process 1 of a bubblewrap sandbox: runs commands for the runner outside, within limits.

It speaks frames (4 bytes of length, JSON) over its standard input and output. The sandbox's own interpreter runs this
file alone: it imports the standard library, and runs on Python 3.8. When its input ends, because
the runner closed it or died, the program ends, and the kernel ends every process of the sandbox.

A command cannot kill it (process 1 of a namespace takes no signal from within), trace it or read its pipes (it is not
dumpable).
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from typing import Any

_PR_SET_DUMPABLE = 4
_DRAIN_S = 0.2
"""Patience with the output of a command that ended and left a process with its pipes."""


class _Kept:
    """Head and tail of one stream."""

    def __init__(self, keep: int) -> None:
        self._half = keep // 2
        self._head, self._tail, self.total = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    def content(self) -> bytes:
        lost = self.total - len(self._head) - self._half
        if lost <= 0:
            return bytes(self._head + self._tail)
        return bytes(self._head) + b"\n[... %d bytes left out ...]\n" % lost + bytes(self._tail[-self._half :])


class _Job:
    """One command: its process, its pipes, its deadline."""

    def __init__(self, asked: dict[str, Any], limits: dict[str, int]) -> None:
        self.id = asked["id"]
        self.deadline = time.monotonic() + asked["timeout_s"]
        self.stdin = memoryview(base64.b64decode(asked["stdin"]))
        self.flood = max(limits["flood"], asked["keep"])
        self.streams: dict[int, _Kept] = {}
        self.exit_code: int | None = None
        self.ended_by: str | None = None
        self.drained_at = 0.0
        read_in, self.input = os.pipe()
        out, write_out = os.pipe()
        errors, write_errors = os.pipe()
        self.out, self.errors = out, errors
        self.pid = os.fork()
        if self.pid == 0:
            _become(asked, limits, (read_in, write_out, write_errors))
        for end in (read_in, write_out, write_errors):
            os.close(end)
        for end in (self.input, out, errors):
            os.set_blocking(end, False)
        self.streams = {out: _Kept(asked["keep"]), errors: _Kept(asked["keep"])}
        self.open_ends = {out, errors}

    def end(self, reason: str) -> None:
        """Kill its process group; a process that left the group lives until the sandbox ends."""
        if self.exit_code is None:
            self.ended_by = self.ended_by or reason
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def _become(asked: dict[str, Any], limits: dict[str, int], ends: tuple[int, int, int]) -> None:
    """Turn this forked process into the command; never returns."""
    try:
        os.setpgid(0, 0)  # no session: the kernel would give each its own share of the cores
        for number, end in enumerate(ends):
            os.dup2(end, number)
        os.closerange(3, 4096)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for name, value in (
            (resource.RLIMIT_AS, limits["memory"]),
            (resource.RLIMIT_CPU, limits["cpu"]),
            (resource.RLIMIT_FSIZE, limits["file"]),
            (resource.RLIMIT_NPROC, limits["processes"]),
            (resource.RLIMIT_NOFILE, 1024),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(name, (value, value))
        os.chdir(asked["cwd"])
        os.execvpe(asked["argv"][0], asked["argv"], asked["env"])
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(2, f"{asked['argv'][0]}: {error}\n".encode("utf-8", "replace"))
    os._exit(127)


class _Server:
    """The loop: frames from the runner, output of commands, children that ended."""

    def __init__(self, limits: dict[str, int]) -> None:
        self._limits = limits
        self._jobs: list[_Job] = []
        self._frame = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ, self._read_frames)
        wake, told = os.pipe()
        for end in (wake, told):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(told)
        self._selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))

    def run(self) -> None:
        _send({"ready": True})
        while True:
            now = time.monotonic()
            ends = [job.deadline if job.exit_code is None else job.drained_at for job in self._jobs]
            timeout = max(0.0, min(ends) - now) if ends else None
            for key, _ in self._selector.select(timeout):
                key.data()
            self._reap()
            now = time.monotonic()
            for job in [*self._jobs]:
                if job.exit_code is None and now >= job.deadline:
                    job.end("time")
                    job.deadline = now + 1.0
                if job.exit_code is not None and (not job.open_ends or now >= job.drained_at):
                    self._finish(job)

    def _read_frames(self) -> None:
        data = os.read(0, 1 << 20)
        if not data:
            os._exit(0)  # the runner is gone: everything here ends with this process
        self._frame += data
        while len(self._frame) >= 4:
            (length,) = struct.unpack_from(">I", self._frame)
            if len(self._frame) < 4 + length:
                return
            asked = json.loads(bytes(self._frame[4 : 4 + length]))
            del self._frame[: 4 + length]
            self._take(asked)

    def _take(self, asked: dict[str, Any]) -> None:
        if "end" in asked:
            for job in self._jobs:
                if job.id == asked["end"]:
                    job.end(asked["reason"])
            return
        try:
            job = _Job(asked, self._limits)
        except OSError as error:  # commands before it left no room for a process
            _send({"id": asked["id"], "exit_code": 126, "out": "", "errors": _b64(f"{error}\n".encode())})
            return
        self._jobs.append(job)
        for end in job.streams:
            self._selector.register(end, selectors.EVENT_READ, lambda end=end, job=job: self._read(job, end))
        self._selector.register(job.input, selectors.EVENT_WRITE, lambda job=job: self._write(job))

    def _read(self, job: _Job, end: int) -> None:
        try:
            data = os.read(end, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._close(end)
            job.open_ends.discard(end)
            return
        job.streams[end].add(data)
        if job.streams[end].total > job.flood:
            job.end("output")

    def _write(self, job: _Job) -> None:
        try:
            job.stdin = job.stdin[os.write(job.input, job.stdin[: 1 << 16]) :] if job.stdin else job.stdin
        except BlockingIOError:
            return
        except OSError:
            job.stdin = memoryview(b"")
        if not job.stdin:
            self._close(job.input)
            job.input = -1

    def _close(self, end: int) -> None:
        self._selector.unregister(end)
        os.close(end)

    def _reap(self) -> None:
        """Take every child that ended: commands, and the processes that they left to process 1."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for job in self._jobs:
                if job.pid == pid and job.exit_code is None:
                    signalled = os.WIFSIGNALED(status)
                    job.exit_code = 128 + os.WTERMSIG(status) if signalled else os.WEXITSTATUS(status)
                    job.drained_at = time.monotonic() + _DRAIN_S

    def _finish(self, job: _Job) -> None:
        for end in job.open_ends:
            self._close(end)
        if job.input >= 0:
            self._close(job.input)
        self._jobs.remove(job)
        _send(
            {
                "id": job.id,
                "exit_code": job.exit_code,
                "out": _b64(job.streams[job.out].content()),
                "errors": _b64(job.streams[job.errors].content()),
                "ended_by": job.ended_by,
            }
        )


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _send(answer: dict[str, Any]) -> None:
    text = json.dumps(answer).encode()
    data = memoryview(struct.pack(">I", len(text)) + text)
    while data:
        data = data[os.write(1, data) :]


def _forward(listener: socket.socket, path: str) -> None:
    """Lead each connection to the listener to the Unix socket; never returns."""
    while True:
        near, _ = listener.accept()
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(path)
        except OSError:
            near.close()
            continue
        for one, other in ((near, far), (far, near)):
            threading.Thread(target=_pipe, args=(one, other), daemon=True).start()


def _pipe(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    told = json.loads(sys.argv[1])
    if told["forward"]:
        port, path = told["forward"]
        listener = socket.create_server(("127.0.0.1", port))  # before `ready`: the first command may connect at once
        if told["limits"] is None:  # in a container: the forwarder alone
            _forward(listener, path)
        if os.fork() == 0:
            os.close(0)
            os.close(1)
            _forward(listener, path)
        listener.close()
    _Server(told["limits"]).run()


if __name__ == "__main__":
    main()
