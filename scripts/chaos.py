"""Run chaos for half an hour: clients chat while processes are killed and answers are broken; then audit the ledgers.

    python scripts/chaos.py FOLDER [--minutes 30] [--sessions 1000] [--streams 64] [--embedded 16] [--seed N]

Progress goes to standard error; the summary, as JSON, to standard output and FOLDER/summary.json. The exit code is 1 if
a turn was lost or trained twice, if a pair was wrong, if a chat was not answered while its server ran, or if the memory
of the stub side's server climbs (`chaos/memory.py`, in a server's life of eleven minutes or more). CI runs three
minutes of it (`tests/integration/test_chaos.py`). The code is in `tests/integration/chaos/`.
"""

import os
import sys
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[1] / "tests" / "integration"


def main() -> None:
    """Replace this process by `python -m chaos`, with the test packages on the path."""
    path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    os.execve(sys.executable, [sys.executable, "-m", "chaos", *sys.argv[1:]], os.environ | {"PYTHONPATH": path})


if __name__ == "__main__":
    main()
