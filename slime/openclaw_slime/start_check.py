"""Checks of this host's folders and interpreters, before a launch starts its first process.

The processes would find the same faults, after minutes of loading models. `doctor` checks slime's own environment.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from openclaw_rl.engines.sglang.launch import look
from openclaw_rl.errors import SettingsError

IMPORT_S = 180.0
"""Longest import of the server, from a cold disk too."""


def check_folders(named: Mapping[str, str | None]) -> None:
    """Check that Megatron's models, by variable, are folders: it does not download, and a missing one has no shape."""
    for variable, place in named.items():
        if place is not None and not Path(place).is_dir():
            raise SettingsError(f"{variable} {place}: it is no folder here; slime needs the model's files on this disk")


def check_interpreters(server: str, engine: str | None) -> None:
    """Check that the server's environment can import the server, and that the PRM's, if one starts, holds SGLang."""
    try:
        done = subprocess.run(
            [server, "-P", "-c", "import openclaw_rl.server.app"],
            capture_output=True,
            text=True,
            timeout=IMPORT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SettingsError(f"SERVER_PYTHON {server}: cannot be run: {error}") from error
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2]
        raise SettingsError(f"SERVER_PYTHON {server}: {said} (pip install -e '.[gpu]' in that environment)")
    if engine is not None:
        look(engine)
