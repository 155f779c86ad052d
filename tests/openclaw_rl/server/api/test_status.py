"""The problems that `/healthz` and `/metrics` show the operator."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from openclaw_rl.errors import LedgerUnavailable
from openclaw_rl.processes.supervisor import ChildStatus
from openclaw_rl.server.api.control import Controls, build_admin_router
from openclaw_rl.server.api.status import Condition, ServerInfo
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.telemetry.health import Health


def condition(
    *children: ChildStatus,
    is_open: bool = True,
    failure: str | None = None,
    is_full: bool = False,
    standing: str | None = None,
) -> Condition:
    parts: dict[str, Any] = {
        "ledger": SimpleNamespace(failure=failure, standing_secrets=standing),
        "retention": SimpleNamespace(is_full=is_full),
        "serving": SimpleNamespace(is_open=is_open),
    }
    return Condition(**parts, children=lambda: list(children), health=Health())


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
    assert condition(child).problems() == told


def test_all_that_is_wrong_is_said_at_once() -> None:
    told = condition(is_open=False, failure="disk is full", is_full=True).problems()
    assert [problem.partition(":")[0] for problem in told] == ["ledger", "ledger", "engine"]


def test_what_a_secret_in_a_system_prompt_costs_is_said() -> None:
    assert condition(standing="3 of the last 9 chats").problems() == ["redaction: 3 of the last 9 chats"]


class BrokenLedger:
    failure = "disk I/O error"
    standing_secrets = None

    async def counts(self) -> dict[str, int]:
        raise LedgerUnavailable(self.failure)


async def test_a_scrape_is_answered_while_the_ledger_cannot_be_read() -> None:
    ledger: Any = BrokenLedger()
    serving: Any = SimpleNamespace(is_open=True, current=7)
    condition = Condition(ledger, serving, Health(), retention=SimpleNamespace(is_full=False), children=lambda: [])  # type: ignore[arg-type]
    info = ServerInfo("tiny", "binary_rl", 0.0, TrainingSettings())
    unused: Any = None
    controls = Controls(ledger, unused, unused, train_now=lambda: None, training=info.training)
    app = FastAPI()
    app.include_router(build_admin_router("key", condition, info, controls))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        reply = await client.get("/metrics", headers={"authorization": "Bearer key"})
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'openclaw_rl_out_of_order{part="ledger"} 1.0\n' in reply.text
    assert "openclaw_rl_weight_version 7.0\n" in reply.text
    assert "openclaw_rl_ledger{" not in reply.text
