"""Rows of the ledger as JSON values: what an operator is shown of them."""

import math
from typing import Any

from pydantic import BaseModel

from openclaw_rl.types import Version, VersionState


def version_row(version: Version) -> dict[str, Any]:
    """A version as operators see it."""
    return {**plain(version), "state": VersionState(version.state).value}


def plain(row: object) -> Any:
    """Dataclasses, enums and messages as JSON values."""
    if isinstance(row, BaseModel):
        return row.model_dump(mode="json", exclude_none=True)
    if hasattr(row, "__dataclass_fields__"):
        return {name: plain(getattr(row, name)) for name in row.__dataclass_fields__}
    if isinstance(row, dict):
        return {key: plain(value) for key, value in row.items()}
    if isinstance(row, list | tuple):
        return [plain(value) for value in row]
    if isinstance(row, float) and not math.isfinite(row):
        return None  # JSON has no word for it: the log-prob an engine did not give, a KL that overflowed
    return row
