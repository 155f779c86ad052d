"""The cases, by id."""

import json
from pathlib import Path
from typing import Any

CASES: dict[str, Any] = {
    case["id"]: case
    for line in (Path(__file__).parents[2] / "data" / "open_cases.jsonl").read_text().splitlines()
    for case in [json.loads(line)]
}
