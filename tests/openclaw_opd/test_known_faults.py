"""The table of known faults names tests that exist, for every fault."""

from pathlib import Path

import fault_table


def test_every_fault_has_tests_that_exist() -> None:
    fault_table.check(Path(__file__).with_name("README.md"), [f"D{number}" for number in range(1, 33)])
