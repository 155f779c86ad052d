"""Configuration of the embedded engine's process: one JSON file, which the server writes."""

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import field_validator

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

    @field_validator("host")
    @classmethod
    def _is_loopback(cls, host: str) -> str:
        """Refuse other hosts: the engine asks for no key, and any client could load weights into it."""
        if not ipaddress.ip_address("127.0.0.1" if host == "localhost" else host).is_loopback:
            raise ValueError("the engine has no keys, so it listens on loopback alone")
        return host
