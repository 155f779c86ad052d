"""Forgetting a session everywhere: in the ledger, in the folders of versions, and, when asked, in the weights.

The ledger's part is `Ledger.forget`. A version's folder holds the commit that published it, and in it prompts and
replies of its batch: they are taken out. With `rebuild` the policy goes back to the newest version from before the
session; what was learned behind it is abandoned, the samples of others wait to be learned again, and the folders of the
abandoned versions are deleted. Backups and exports are their owner's to delete.
"""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import structlog

from openclaw_rl.data_dir import write_private
from openclaw_rl.ledger import Forgotten, Ledger
from openclaw_rl.publisher import Publisher
from openclaw_rl.trainers import checkpoint

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Rebuilt:
    serving: int
    """The version that the policy went back to."""
    waiting: int
    """Samples that wait to be learned (again)."""
    folders: int
    """Of abandoned versions, deleted."""


@dataclass(frozen=True, slots=True)
class Forgetting:
    ledger: Ledger
    publisher: Publisher
    root: Path
    """The data directory."""

    async def forget(self, session_id: str, user: str | None) -> Forgotten:
        """Raises LedgerError."""
        forgotten = await self.ledger.forget(session_id, user)
        for number in forgotten.trained_in:
            folder = (await self.ledger.version(number)).folder
            if folder is not None:
                await asyncio.to_thread(without_probes, self.root / folder)
        log.info("session_forgotten", turns=forgotten.turns, trained_in=forgotten.trained_in)
        return forgotten

    async def rebuild(self, forgotten: Forgotten) -> Rebuilt | None:
        """None: nothing that is alive was trained on it."""
        to = await self.ledger.rollback_from(forgotten.trained_in)
        if to is not None:
            await self.publisher.follow()
        folders = await self.ledger.drop_weights(min(forgotten.trained_in) - 1) if forgotten.trained_in else []
        for folder in folders:
            await asyncio.to_thread(checkpoint.discard, self.root / folder)
        if to is None:
            return None
        return Rebuilt(to, (await self.ledger.counts())["sampled"], len(folders))


def without_probes(folder: Path) -> None:
    """Take prompts and replies out of a checkpoint's commit. The folder is whole at every moment: the manifest stops
    naming the file before it changes."""
    file, manifest_file = folder / checkpoint.COMMIT_FILE, folder / checkpoint.MANIFEST_FILE
    try:
        commit, manifest = json.loads(file.read_text()), json.loads(manifest_file.read_text())
    except FileNotFoundError:
        return
    if not commit["report"].get("probes"):
        return
    if manifest["files"].pop(file.name, None) is not None:
        write_private(manifest_file, json.dumps(manifest, indent=1, sort_keys=True).encode())
    commit["report"]["probes"] = []
    write_private(file, json.dumps(commit).encode())
