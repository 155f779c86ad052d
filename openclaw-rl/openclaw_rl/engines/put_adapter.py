"""Load an adapter on one engine, whatever that engine still holds under its name."""

from collections.abc import Mapping
from pathlib import Path

import structlog

from openclaw_rl.engines.base import Engine
from openclaw_rl.errors import EngineRefused

log = structlog.get_logger()


async def put_adapter(engine: Engine, name: str, folder: Path, ours: Mapping[str, Path]) -> None:
    """Load the adapter, and replace another one of its name. Raises EngineError.

    ours: folders of the adapters that this engine took from us.
    """
    try:
        await engine.load_adapter(name, folder)
    except EngineRefused as error:
        if "already loaded" not in str(error):
            raise
        if not await _has_loaded(engine, name, folder, ours):
            log.warning("adapter_of_another_run", adapter=name)
            await engine.unload_adapter(name)
            await engine.load_adapter(name, folder)


async def _has_loaded(engine: Engine, name: str, folder: Path, ours: Mapping[str, Path]) -> bool:
    """Return True if the adapter that the engine has under this name is ours."""
    # An attached engine outlives us, and may have served another data directory. A folder is never rewritten.
    folders = await engine.adapter_folders()
    if folders is None:  # this engine does not list folders: what it took from us is ours
        return ours.get(name) == folder
    return folders.get(name) == str(folder)
