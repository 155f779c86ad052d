"""What the embedded engine's process is told: one JSON file, written by the server that starts it."""

from pathlib import Path
from typing import Literal

from openclaw_rl.settings import Branch, EngineSettings, ModelSettings


class EngineConfig(Branch):
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free port."""
    cache_dir: Path
    """Converted models and their hashes."""
    port_file: Path | None = None
    """Gets `{"url", "pid"}` once the engine can serve."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
