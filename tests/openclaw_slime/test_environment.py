"""Our part of slime's environment imports with what that environment has: the server's own packages are not there."""

import subprocess
import sys

CHILD = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"structlog", "typer", "llm_router_utils", "peft", "gguf", "prometheus_client"}:
            raise ImportError(f"{name} is not in slime's environment")

sys.meta_path.insert(0, Blocked())
import openclaw_slime.driver, openclaw_slime.rollout, openclaw_slime.rollout, openclaw_slime.losses
import openclaw_slime.slime_node, openclaw_slime.doctor, openclaw_slime.launch
from openclaw_rl.methods.base import load_method
for name in ("binary_rl", "opd", "combine", "agent"):
    load_method(name)
"""


def test_it_imports_without_the_servers_packages():
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
