"""The steps of a version in the ledger that more than one part takes: on its way to serving, rejected, passed over."""

from collections.abc import Sequence

import structlog

from openclaw_rl.alerts import Alert
from openclaw_rl.ledger import Ledger
from openclaw_rl.types import Version, VersionState

log = structlog.get_logger()

REJECTIONS_IN_A_ROW = 3
"""So many, and learning is paused."""


async def to_loading(ledger: Ledger, version: Version) -> None:
    """For one that the gate let pass, wherever a crash left it; one that served before has been there."""
    if version.state is VersionState.CANDIDATE:
        await ledger.set_version_state(version.weight_version, VersionState.GATED)
    if version.state in (VersionState.CANDIDATE, VersionState.GATED):
        await ledger.set_version_state(version.weight_version, VersionState.LOADING)


async def reject(ledger: Ledger, number: int, reason: str, *, alert: Alert) -> None:
    rejected = await ledger.reject(number, reason)
    in_a_row = await ledger.rejections_in_a_row()
    log.warning("version_rejected", weight_version=number, reason=reason, with_it=rejected, in_a_row=in_a_row)
    if in_a_row >= REJECTIONS_IN_A_ROW:
        await ledger.set_learning(False)
        reason = f"{in_a_row} versions rejected in a row"
        alert("learning_paused", reason=reason, resume="openclaw-rl learning resume")


async def supersede(ledger: Ledger, numbers: Sequence[int]) -> None:
    """A newer version contains them and serves."""
    for number in numbers:
        if (await ledger.version(number)).state is VersionState.CANDIDATE:
            await ledger.set_version_state(number, VersionState.GATED)
        await ledger.set_version_state(number, VersionState.SUPERSEDED, "a newer version was ready first")
