"""The kind `url`: an engine that another program started, at `engine.url`."""

from collections.abc import Iterator

from openclaw_rl.engines.kind import EngineKind, Finding
from openclaw_rl.settings import Settings


class UrlKind(EngineKind):
    def findings(self, settings: Settings) -> Iterator[Finding]:
        yield Finding("engine", "ok", f"at {settings.engine.url}; it is asked when the server starts")


KIND = UrlKind()
