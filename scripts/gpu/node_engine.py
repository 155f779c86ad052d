"""The policy's SGLang, with the flags that our server would start it with. It outlives the call."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_process import EngineProcess, sglang_command

from openclaw_rl.engines.sglang import launch
from openclaw_rl.server.child_commands import free_port
from openclaw_rl.settings import EngineSettings

if TYPE_CHECKING:
    from node_check import Host

ARGS = ("--cuda-graph-max-bs-decode", "64", "--sampling-backend", "pytorch")


@dataclass(slots=True)
class Engine:
    host: "Host"
    running: EngineProcess

    @classmethod
    def of(cls, host: "Host") -> "Engine":
        """The one that runs; a new one when none does."""
        running = EngineProcess.known(host.work)
        if running is None or not running.is_healthy():
            running = _start(host, free_port())
        return cls(host, running)

    @property
    def url(self) -> str:
        return self.running.url

    def kill(self) -> None:
        self.running.kill()

    def start_again(self) -> None:
        """After it was killed, where it was."""
        self.running = _start(self.host, self.running.port)


def _start(host: "Host", port: int) -> EngineProcess:
    return EngineProcess.start(host.work, _command(host, port), _environ(host), log=host.out / "engine.log", port=port)


def _command(host: "Host", port: int) -> list[str]:
    settings = EngineSettings(kind="sglang", args=ARGS, memory_fraction=host.engine_share)
    return sglang_command(
        host.engine_python,
        settings,
        folder=host.checkpoint,
        name="node",
        port=port,
        context_length=4096,
        adapters=None,
    )


def _environ(host: "Host") -> dict[str, str]:
    return host.environ | launch.ENVIRON | {"CUDA_VISIBLE_DEVICES": host.layout.gpus("rollout")}
