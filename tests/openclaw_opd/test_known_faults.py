"""The table of known faults names tests that exist, for every fault."""

import re
from pathlib import Path

TABLE = Path(__file__).with_name("README.md")
TESTS = TABLE.parent.parent


def test_every_fault_has_tests_that_exist() -> None:
    rows = re.findall(r"^\| D(\d+) \|[^|]*\|([^|]*)\|$", TABLE.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 33))
    for number, caught_by in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", caught_by)
        assert named or caught_by.strip().startswith("not a test:"), f"D{number}"
        for file, test in named:
            assert re.search(rf"^(?:async )?def {test}\(", (TESTS / file).read_text(), re.MULTILINE), f"{file}::{test}"
