"""The table of `README.md`: case, test. `python -m harness.table` (in `tests/cases`) writes it."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

HEAD = """\
# Public cases

The cases are in `tests/data/open_cases.jsonl`: faults that users of comparable servers reported, each with a small
input and the right behaviour.

- *Server* cases run on the real server over stubs of engine, judge and teacher (`harness/`). Their checks are evaluated
  as in the file, with two exceptions. In AS-1 `/v1/models` answers without a key, because OpenClaw sends none there.
  Bounds of a time (ST-1, ST-6, JV-3, CO-2) are counts, orders or shares (`COUNTED` in `test_cases.py`), because a
  stopwatch fails on a busy machine. ST-1 and CO-2 run in a fraction of their time.
- *Parser* cases call their parser.
- The other cases need a trainer, a swap, a kill or a failing start. The test named *as the case has it* plays each one
  with the checks of the file, and its clauses have their own tests. One of those checks is not evaluated: in CL-2 an
  engine cannot have another template, because it gets ids. CL-1's ten seconds are the process's own time on a CPU.

`python -m harness.table` writes this page; `test_cases.py` checks it.

| case | about | where |
| --- | --- | --- |
"""


def table(cases: Mapping[str, Any], parsed: Collection[str], elsewhere: Mapping[str, Mapping[str, str]]) -> str:
    lines = []
    for case_id, case in cases.items():
        if case_id in elsewhere:
            where = "<br>".join(f"{clause}: `{test}`" for clause, test in elsewhere[case_id].items())
        else:
            name = "test_case_of_a_parser" if case_id in parsed else "test_case"
            where = f"{'parser' if case_id in parsed else 'server'}: `test_cases.py::{name}[{case_id}]`"
        lines.append(f"| {case_id} | {case['title'].replace('|', '/')} | {where} |\n")
    return HEAD + "".join(lines)


if __name__ == "__main__":
    from test_cases import ELSEWHERE, PARSED

    from harness.cases import CASES

    (Path(__file__).parent.parent / "README.md").write_text(table(CASES, PARSED, ELSEWHERE))
