"""The table of `README.md` names tests that exist, and every file of this folder's tests."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_each_door_of_the_table_has_its_test():
    file, named = "", {}
    for where in re.findall(r"`([\w.]*::\w+)`", (HERE / "README.md").read_text()):
        path, _, name = where.partition("::")
        file = path or file
        named.setdefault(file, set()).add(name)
    for path, names in named.items():
        defined = set(re.findall(r"^(?:async )?def (test_\w+)", (HERE / path).read_text(), re.MULTILINE))
        assert names <= defined, path
    assert {path.name for path in HERE.glob("test_*.py")} - {Path(__file__).name} == set(named)
