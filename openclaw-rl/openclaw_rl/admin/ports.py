"""What the operator's routes work on, and what of it is out of order."""

from collections.abc import Callable
from dataclasses import dataclass

from openclaw_rl.engines.serving import ServingVersions
from openclaw_rl.errors import LedgerError, RequestError
from openclaw_rl.forgetting import Forgetting
from openclaw_rl.ledger import Ledger
from openclaw_rl.meters import OUT_AFTER, Meters
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.retaining import Retention
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.supervisor import ChildStatus
from openclaw_rl.types import Version


@dataclass(frozen=True, slots=True)
class AdminDeps:
    admin_key: str
    ledger: Ledger
    serving: ServingVersions
    publisher: Publisher
    meters: Meters
    """How judging and scoring go."""
    children: Callable[[], list[ChildStatus]]
    forgetting: Forgetting
    retention: Retention
    train_now: Callable[[], None]
    training: TrainingSettings
    model_name: str
    method: str
    started_at: float


def problems(deps: AdminDeps) -> list[str]:
    """Each part that is down, in words; empty when all is well."""
    found = []
    if deps.ledger.failure:
        found.append(f"ledger: {deps.ledger.failure}; replies are served, not recorded")
    if deps.retention.is_full:
        found.append("ledger: over retention.max_gb, and all that is left in it still waits")
    if not deps.serving.is_open:
        found.append("engine: not ready; chats are held")
    for child in deps.children():
        if child.quick_exits >= OUT_AFTER:
            found.append(f"{child.name}: ended {child.quick_exits} times soon after its start, exit {child.last_exit}")
        elif child.pid is None:
            found.append(f"{child.name}: not running, last exit {child.last_exit}")
    return found + deps.meters.problems()


async def known_version(ledger: Ledger, weight_version: int) -> Version:
    try:
        return await ledger.version(weight_version)
    except LedgerError as error:
        raise RequestError(str(error), status=404, code="version_not_found") from error
