"""What an operator is told of each part, in words."""

from types import SimpleNamespace
from typing import Any

import pytest

from openclaw_rl.processes.supervisor import ChildStatus
from openclaw_rl.server.api.status import problems
from openclaw_rl.telemetry.health import Health


def deps(*children: ChildStatus, is_open: bool = True, failure: str | None = None, is_full: bool = False) -> Any:
    return SimpleNamespace(
        ledger=SimpleNamespace(failure=failure),
        retention=SimpleNamespace(is_full=is_full),
        serving=SimpleNamespace(is_open=is_open),
        children=lambda: children,
        health=Health(),
    )


@pytest.mark.parametrize(
    ("child", "told"),
    [
        (ChildStatus("trainer", pid=7, restarts=0, last_exit=None), []),
        (ChildStatus("trainer", pid=7, restarts=2, last_exit=-9, quick_exits=2), []),
        (ChildStatus("trainer", None, restarts=1, last_exit=-9, quick_exits=1), ["trainer: not running, last exit -9"]),
        (
            ChildStatus("trainer", pid=7, restarts=4, last_exit=3, quick_exits=4),
            ["trainer: ended 4 times soon after its start, exit 3"],
        ),
    ],
)
def test_a_process_that_is_gone_or_cannot_live_is_said(child: ChildStatus, told: list[str]) -> None:
    assert problems(deps(child)) == told


def test_all_that_is_wrong_is_said_at_once() -> None:
    told = problems(deps(is_open=False, failure="disk is full", is_full=True))
    assert [problem.partition(":")[0] for problem in told] == ["ledger", "ledger", "engine"]
