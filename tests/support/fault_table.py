"""Tables of faults in Markdown, each row with the tests that fail when the fault comes back."""

import re
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parent.parent


def check(table: Path, faults: Sequence[str]) -> None:
    """Check that each fault has a row, and that each row names tests that exist or the reason for none."""
    rows = re.findall(r"^\| ([A-Za-z]\d+) \|[^|]*\|([^|]*)\|$", table.read_text(), re.MULTILINE)
    assert [fault for fault, _ in rows] == list(faults)
    for fault, caught_by in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", caught_by)
        assert named or caught_by.strip().startswith("not a test:"), fault
        for file, test in named:
            assert re.search(rf"^(?:async )?def {test}\(", (TESTS / file).read_text(), re.MULTILINE), f"{file}::{test}"
