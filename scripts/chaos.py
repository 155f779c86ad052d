"""Half an hour of chaos: people chat while processes are killed and answers are broken; then the ledgers are audited.

    python scripts/chaos.py FOLDER [--minutes 30] [--sessions 1000] [--streams 64] [--embedded 16] [--seed N]

Progress on standard error, the summary as JSON on standard output and in FOLDER/summary.json. Exit 1 when a turn was
lost or trained twice, a pair was wrong, a chat was not answered while its server was there, or what the stub side's
server holds of memory climbs (by `chaos/memory.py`, in a life of eleven minutes and more). CI runs three minutes of it
(`tests/integration/test_chaos.py`); the code is in `tests/integration/chaos/`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integration"))

from chaos.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
