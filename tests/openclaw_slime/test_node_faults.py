"""The table of the node's faults names tests that exist, for every fault."""

from pathlib import Path

import fault_table


def test_every_fault_has_tests_that_exist() -> None:
    counts = {"E": 14, "G": 6, "c": 10}
    faults = [f"{kind}{number}" for kind, count in counts.items() for number in range(1, count + 1)]
    fault_table.check(Path(__file__).with_name("README.md"), faults)
