"""The kind `sglang`: the server starts SGLang from the environment of `engine.python`."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from openclaw_rl.data_dir import DataDir
from openclaw_rl.engines.kind import EngineKind, Finding, GpuNeed, OnExit
from openclaw_rl.engines.sglang import launch
from openclaw_rl.errors import SettingsError
from openclaw_rl.models.resolve import model_display_name, tokenizer_folder
from openclaw_rl.processes.command import ChildCommand, ModuleSearch
from openclaw_rl.processes.supervisor import Child
from openclaw_rl.settings import Settings

TESTED = "0.5.15.post1"
"""The version that our checks ran with."""
_STOP_GRACE_S = 30.0
"""SGLang looks for SIGTERM every 5 s and gives its workers 15 s more."""
_GPU_FLAGS = {
    "--tp": "tensor",
    "--tp-size": "tensor",
    "--tensor-parallel-size": "tensor",
    "--dp": "data",
    "--dp-size": "data",
    "--data-parallel-size": "data",
}
"""SGLang's flags that multiply its GPUs, and the dimension that each one sets."""


class SGLangKind(EngineKind):
    loses_adapter_count = True

    def child(self, settings: Settings, data: DataDir, port: int, on_exit: OnExit) -> Child:
        engine = settings.engine
        has_adapters = settings.training.weights == "lora"
        folder = tokenizer_folder(settings.model, data.cache)
        if settings.training.enabled:
            launch.refuse_window(folder, settings.model.context_length)
        arguments = launch.argv(
            launch.look(engine.python),
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
        return Child(
            "engine",
            ChildCommand(launch.MODULE, tuple(arguments), engine.python, launch.ENVIRON, ModuleSearch.ISOLATED),
            log_file=data.logs / "engine.log",
            stop_grace_s=_STOP_GRACE_S,
            on_exit=on_exit,
        )

    def gpus(self, settings: Settings) -> tuple[GpuNeed, ...]:
        words = [word for flag in settings.engine.args for word in flag.split("=", 1)]
        sizes = {"tensor": 1, "data": 1}
        for flag, value in pairwise(words):
            if flag in _GPU_FLAGS and value.isdigit():
                sizes[_GPU_FLAGS[flag]] = int(value)
        return (GpuNeed(f"engine.args {' '.join(settings.engine.args)!r}", sizes["tensor"] * sizes["data"]),)

    def problems(self, settings: Settings) -> Iterator[str]:
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


KIND = SGLangKind()
