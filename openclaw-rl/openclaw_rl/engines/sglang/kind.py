"""The kind `sglang`: the server starts SGLang from the environment of `engine.python`."""

import math
import os
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise, takewhile
from pathlib import Path

from openclaw_rl.data_dir import DataDir
from openclaw_rl.engines.kind import VISIBLE, EngineKind, Finding, GpuNeed, OnExit
from openclaw_rl.engines.sglang import launch
from openclaw_rl.errors import SettingsError
from openclaw_rl.models.resolve import model_display_name, tokenizer_folder
from openclaw_rl.processes.command import ChildCommand, ModuleSearch
from openclaw_rl.processes.supervisor import Child
from openclaw_rl.settings import EngineSettings, Settings

TESTED = "0.5.15.post1"
"""The version that our checks ran with."""
_STOP_GRACE_S = 30.0
"""SGLang looks for SIGTERM every 5 s and gives its workers 15 s more."""
_GPU_FLAGS = {
    "--tp": "tensor",
    "--tp-size": "tensor",
    "--tensor-parallel-size": "tensor",
    "--pp": "pipeline",
    "--pp-size": "pipeline",
    "--pipeline-parallel-size": "pipeline",
    "--dp": "data",
    "--dp-size": "data",
    "--data-parallel-size": "data",
}
"""SGLang's flags that multiply its GPUs, and the dimension that each one sets."""
_ONE_ENGINES = frozenset(
    ("--port", "--nccl-port", "--dist-init-addr", "--nnodes", "--node-rank", "--base-gpu-id", "--gpu-id-step")
)
"""Flags that several engines of one host cannot share: ports, and GPUs, of which each engine sees its own alone."""


class SGLangKind(EngineKind):
    loses_adapter_count = True
    has_replicas = True

    def child(self, settings: Settings, data: DataDir, port: int, on_exit: OnExit) -> Child:
        return self._child(settings, data, port, on_exit, "engine", {})

    def replica(self, settings: Settings, data: DataDir, port: int, on_exit: OnExit, number: int) -> Child:
        own = _gpus_of_replica(settings.engine, number)
        return self._child(settings, data, port, on_exit, f"engine {number}", {VISIBLE: ",".join(own)})

    def _child(
        self, settings: Settings, data: DataDir, port: int, on_exit: OnExit, name: str, environ: Mapping[str, str]
    ) -> Child:
        engine = settings.engine
        has_adapters = settings.training.weights == "lora"
        folder = tokenizer_folder(settings.model, data.cache)
        if settings.training.enabled:
            launch.refuse_window(folder, settings.model.context_length)
        installed = launch.look(engine.python)
        arguments = launch.argv(
            installed,
            engine,
            folder=folder,
            name=settings.server.served_model_name or model_display_name(settings.model),
            port=port,
            context_length=settings.model.context_length,
            adapters=launch.Adapters.of(settings.trainer, settings.publisher, settings.policies)
            if has_adapters
            else None,
            dtype=launch.dtype_of(engine, settings.model),
        )
        if settings.method.scores_given_ids:
            launch.check_takes_ids(installed)
            arguments += launch.TAKES_IDS  # after engine.args, which must not change it
        environ = {**launch.ENVIRON, **environ}
        return Child(
            name,
            ChildCommand(launch.MODULE, tuple(arguments), engine.python, environ, ModuleSearch.ISOLATED),
            log_file=data.logs / f"{name.replace(' ', '-')}.log",
            stop_grace_s=_STOP_GRACE_S,
            on_exit=on_exit,
        )

    def gpus(self, settings: Settings) -> tuple[GpuNeed, ...]:
        engine = settings.engine
        replicas = f"engine.replicas {engine.replicas}, " if engine.replicas > 1 else ""
        setting = f"{replicas}engine.args {' '.join(engine.args)!r}"
        return (GpuNeed(setting, engine.replicas * _gpus_of(engine), engine.replicas),)

    def problems(self, settings: Settings) -> Iterator[str]:
        if settings.engine.replicas > 1:
            yield from _replica_problems(settings.engine)
        folder = Path(settings.model.path).expanduser()
        if settings.training.enabled and (folder / "config.json").is_file():  # of other models `child` tells it
            try:
                launch.refuse_window(folder, settings.model.context_length)
            except SettingsError as error:
                yield str(error)

    def findings(self, settings: Settings) -> Iterator[Finding]:
        try:
            found = launch.look(settings.engine.python)
        except SettingsError as error:
            yield Finding("sglang", "missing", str(error))
            return
        is_tested = found.version == TESTED
        version = found.version if is_tested else f"{found.version}, not {TESTED}"
        yield Finding("sglang", "ok" if is_tested else "differs", version)
        if not found.has_flash_attention:
            yield Finding("sglang", "differs", "no flash attention kernels: attention by triton")
        if not found.has_flashinfer:
            yield Finding("sglang", "differs", "no flashinfer: sampling by PyTorch")
        yield from _replica_findings(settings.engine, version)


def _words(engine: EngineSettings) -> list[str]:
    return [word for flag in engine.args for word in flag.split("=", 1)]


def _gpus_of(engine: EngineSettings) -> int:
    """Return the GPUs that one engine needs on this host."""
    words = _words(engine)
    sizes = {"tensor": 1, "pipeline": 1, "data": 1}
    for flag, value in pairwise(words):
        if flag in _GPU_FLAGS and value.isdigit():
            sizes[_GPU_FLAGS[flag]] = int(value)
    if "--enable-dp-attention" in words:
        sizes["data"] = 1  # its data parallelism divides the tensor-parallel GPUs
    hosts = next((int(value) for flag, value in pairwise(words) if flag == "--nnodes" and value.isdigit()), 1)
    return max(1, math.prod(sizes.values()) // max(1, hosts))


def _visible(wanted: int) -> list[str]:
    """Return the names of the GPUs that this process sees; without a list of them, the first ones by number."""
    named = os.environ.get(VISIBLE)
    if named is None:
        return [str(number) for number in range(wanted)]
    names = [name.strip() for name in named.split(",") if name.strip()]
    return list(takewhile(lambda name: not name.startswith("-"), names))  # CUDA stops at -1


def _gpus_of_replica(engine: EngineSettings, number: int) -> list[str]:
    """Return the names of one engine's GPUs; fewer than it wants if the list ends. number: its place, from 1."""
    each = _gpus_of(engine)
    return _visible(each * engine.replicas)[each * (number - 1) : each * number]


def _replica_findings(engine: EngineSettings, version: str) -> Iterator[Finding]:
    """Yield one line for each of several engines: its GPUs, its port and its SGLang."""
    for number in range(1, engine.replicas + 1) if engine.replicas > 1 else ():
        own, wanted = _gpus_of_replica(engine, number), _gpus_of(engine)
        has = f"GPU {', '.join(own)}" if own else "no GPU"
        if len(own) < wanted:
            yield Finding(f"engine {number}", "missing", f"{has} of {VISIBLE}, and it wants {wanted}")
        else:
            where = f"SGLang {version} of {engine.python or sys.executable}"
            yield Finding(f"engine {number}", "ok", f"{has}; a free port at each start; {where}")


def _replica_problems(engine: EngineSettings) -> Iterator[str]:
    """Yield the settings under which several engines cannot run on one host."""
    for flag in sorted(_ONE_ENGINES.intersection(_words(engine))):
        yield f"engine.args {flag}: with engine.replicas the server gives each engine its own port and GPUs"
    wanted = engine.replicas * _gpus_of(engine)
    names = _visible(wanted)
    if len(names) < wanted:
        yield f"engine.replicas {engine.replicas}: wants {wanted} GPUs, and {VISIBLE} names {len(names)}"


KIND = SGLangKind()
