"""The side of `child` that runs in the process: limits, then one answer for each line. Standard library alone.

python -I child_main.py PROGRAM MEMORY_MB FILE_MB
"""

import ctypes
import json
import os
import resource
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    program, memory_mb, file_mb = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    out = os.dup(1)
    # A package's own prints must not come between the answers. What it says on standard error nobody reads.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 1024 * 1024,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_mb * 1024 * 1024,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer = runpy.run_path(program)["answer"]
    os.write(out, b"\n")
    os.dup2(null, 2)
    for line in sys.stdin.buffer:
        found = json.dumps(answer(json.loads(line))).encode() + b"\n"
        while found:
            found = found[os.write(out, found) :]


if __name__ == "__main__":
    main()
