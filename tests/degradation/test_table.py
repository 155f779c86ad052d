"""The table of faults names tests that exist, and every test of this folder."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_fault_has_tests_that_exist_and_every_test_its_fault() -> None:
    table = (HERE / "README.md").read_text()
    rows = [row for row in table.splitlines() if row.startswith("| ") and not row.startswith("| ---")]
    for row in rows:
        if row.startswith(("| part |", "| what |")):
            continue
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)
        assert named, row
        for file, test in named:
            path = HERE.parent / file if "/" in file else HERE / file
            assert re.search(rf"^(?:async )?def {test}\(", path.read_text(), re.MULTILINE), f"{file}::{test}"
    # Limits are no faults: `instructions/limits-and-faults.md`.
    elsewhere = {"test_limits.py", "test_user_limits.py", "test_table.py"}
    for file in sorted(HERE.glob("test_*.py")):
        if file.name not in elsewhere:
            assert f"`{file.name}::" in table, file.name
