"""The kind `url`: an engine that another program started, at `engine.url`."""

from collections.abc import Iterator

from openclaw_rl.engines.kind import EngineKind, Finding
from openclaw_rl.engines.sglang.launch import TAKES_IDS
from openclaw_rl.settings import Settings


class UrlKind(EngineKind):
    def findings(self, settings: Settings) -> Iterator[Finding]:
        for url in settings.engine.urls or (settings.engine.url,):
            yield Finding("engine", "ok", f"at {url}; it is asked when the server starts")
        if settings.method.scores_given_ids:
            yield Finding(
                "engine",
                "differs",
                f"a guided top-k scores given ids: SGLang must be started with {' '.join(TAKES_IDS)}",
            )
        # The server cannot see who else asks the engine, so the line names what others would meet there.
        if settings.training.enabled and settings.training.weights == "full":
            yield Finding(
                "engine", "differs", "full weights: each new version cuts the requests of other programs on this engine"
            )


KIND = UrlKind()
