"""Engine kinds: the knowledge that the server has of one kind of engine, as one object per name in `engine.kind`.

A kind states the engine's child process, the GPUs that it needs and its checks. `load_kind` finds it by the entry-point
group `openclaw_rl.engines`: our kinds are `embedded`, `sglang` and `url`, and an installed package may add one. The
server's process imports a kind's module, so the module imports neither torch nor the engine.
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from openclaw_rl.data_dir import DataDir
from openclaw_rl.errors import SettingsError
from openclaw_rl.processes.supervisor import Child
from openclaw_rl.settings import Settings
from openclaw_rl.settings.base import engine_kinds

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable with the GPUs that a process sees. The server's own may name a part of the host's."""
SLICE = "MIG-"
"""Begin of a name there that means a slice of a card, which is divided by MIG."""
Level = Literal["ok", "differs", "missing"]
OnExit = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check: a line of `openclaw-rl doctor`."""

    what: str
    level: Level
    says: str

    def line(self) -> str:
        mark = {"ok": "  ", "differs": "? ", "missing": "! "}[self.level]
        return f"{mark}{self.what:<18} {self.says}"


@dataclass(frozen=True, slots=True)
class GpuNeed:
    """A setting that needs GPUs on this host."""

    setting: str
    """The setting's key and value, for the message when the host has fewer."""
    gpus: int
    processes: int = 1
    """Processes that share them evenly, none of which sees a GPU of another one."""

    @property
    def of_one_process(self) -> int:
        return self.gpus // self.processes

    @classmethod
    def of_device(cls, key: str, device: str) -> "tuple[GpuNeed, ...]":
        """Return the need of a torch device: `cuda:1` needs two GPUs, `cpu` needs no GPU."""
        family, _, index = device.partition(":")
        return (cls(f"{key} {device!r}", int(index or 0) + 1),) if family == "cuda" else ()


class EngineKind:
    """Base class of every kind. Its defaults describe an engine that already runs at `engine.url`."""

    loses_adapter_count: bool = True
    """True: the engine may miscount the requests of an adapter, and an unload of that adapter could then wait forever
    (`engines.client`). False: the engine promises that every unload ends."""

    has_grammars: bool = True
    """True: the engine can hold a reply to a JSON schema, or refuses that it cannot."""

    takes_pictures: bool = True
    """True: the engine takes `image_data` beside the ids, as SGLang does (`engines.pictures`)."""
    has_replicas: bool = False
    """True: `replica` starts several engines of one host (`engine.replicas`)."""

    def child(self, settings: Settings, data: DataDir, port: int, on_exit: OnExit) -> Child | None:
        """Return the process that serves the dialect at 127.0.0.1:`port`; None: the server starts no engine.

        The caller awaits `on_exit` whenever that process ends. Blocks: a model may be converted first. Raises
        SettingsError.
        """
        return None

    def replica(self, settings: Settings, data: DataDir, port: int, on_exit: OnExit, number: int) -> Child:
        """Return the process of one of several engines, on GPUs of its own. number: its place, from 1.

        Else as `child`. Only where `has_replicas`.
        """
        raise NotImplementedError

    def gpus(self, settings: Settings) -> tuple[GpuNeed, ...]:
        """Return the GPUs that the engine needs on this host; of `engine.replicas`, all together."""
        return ()

    def problems(self, settings: Settings) -> Iterator[str]:
        """Yield one line for each fault that would stop the engine's start. Quick: every start of the server asks."""
        yield from ()

    def findings(self, settings: Settings) -> Iterator[Finding]:
        """Yield the lines of `openclaw-rl doctor` on this engine. May take seconds."""
        yield from ()


def load_kind(name: str) -> EngineKind:
    """Return the kind that is registered under `name`. Raises SettingsError that lists the registered names."""
    points = engine_kinds()
    if name not in points:
        raise SettingsError(f"engine.kind: no kind {name!r}; installed: {', '.join(sorted(points))}")
    try:
        kind = points[name].load()
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"engine.kind {name!r}: {points[name].value} cannot be loaded: {error!r}") from error
    if not isinstance(kind, EngineKind):
        raise SettingsError(f"engine.kind {name!r}: {points[name].value} is no EngineKind")
    return kind
