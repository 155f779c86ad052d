"""Entry point of a supervised child process: runs a module on a lifeline.

    python -m openclaw_rl.processes.child_main [--env NAME=VALUE …] MODULE [ARGS …]

The lifeline is the child's standard input, a pipe from the parent. The pipe closes when the parent dies, by any cause:
the child then gets SIGTERM, and exits after `GRACE_S` at the latest. So a killed server leaves no orphan engine behind.

Standard library only: an interpreter of another environment, where our packages are not installed, runs this file by
its path.
"""

import os
import runpy
import signal
import sys
import threading
import time

GRACE_S = 20.0


def _hold_lifeline() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(70)


if __name__ == "__main__":
    threading.Thread(target=_hold_lifeline, name="lifeline", daemon=True).start()
    while sys.argv[1] == "--env":
        name, _, value = sys.argv[2].partition("=")
        os.environ[name] = value
        del sys.argv[1:3]
    module, sys.argv = sys.argv[1], sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
