"""Sandboxes: the only place where a command that a model wrote is run.

`kinds.Sandboxes` chooses the kind for this machine and opens sandboxes of it. A sandbox runs commands
(`Sandbox.run`), takes files in and gives them out, and starts afresh for the tests (`Sandbox.renew`).

It holds: no network, no capabilities, none of the host's files but a read-only `/usr`, its own work folder and `/tmp`,
an empty environment, and limits on memory, CPU, size of files, processes, output and disk. When it ends, every process
in it ends.
"""

from openclaw_rl.agents.sandbox.base import Finished, Limits, Profile, Sandbox
from openclaw_rl.agents.sandbox.kinds import Sandboxes

__all__ = ["Finished", "Limits", "Profile", "Sandbox", "Sandboxes"]
