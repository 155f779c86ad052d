"""The kind `embedded`: the server starts our own torch engine with one private JSON file."""

from collections.abc import Iterator

from openclaw_rl.data_dir import DataDir, write_json
from openclaw_rl.engines.kind import EngineKind, Finding, GpuNeed, OnExit
from openclaw_rl.processes.command import ChildCommand
from openclaw_rl.processes.supervisor import Child
from openclaw_rl.settings import Settings


class EmbeddedKind(EngineKind):
    loses_adapter_count = False
    has_grammars = False
    takes_pictures = False

    def child(self, settings: Settings, data: DataDir, port: int, on_exit: OnExit) -> Child:
        config = data.run / "engine.json"
        write_json(
            config,
            {
                "host": "127.0.0.1",
                "port": port,
                "model": settings.model.model_dump(mode="json"),
                "engine": settings.engine.model_dump(mode="json"),
                "cache_dir": str(data.cache),
                "port_file": str(data.run / "engine.port.json"),
                "log_level": settings.log_level,
            },
        )
        return Child(
            "engine",
            ChildCommand("openclaw_rl.engines.embedded", ("--config", str(config)), settings.engine.python),
            log_file=data.logs / "engine.log",
            on_exit=on_exit,
        )

    def gpus(self, settings: Settings) -> tuple[GpuNeed, ...]:
        return GpuNeed.of_device("engine.device", settings.engine.device)

    def findings(self, settings: Settings) -> Iterator[Finding]:
        yield Finding("engine", "ok", "embedded: torch and transformers of this environment")


KIND = EmbeddedKind()
