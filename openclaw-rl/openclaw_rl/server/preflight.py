"""Checks of the settings before a start: paths, interpreters, models, GPUs, names of engine kinds.

Each problem is one line that names the setting and its value. The checks read files and device nodes, and run the
driver's own tool if no node tells the count. They load no model, download no file and start no server. (`lifecycle`
tries the port, and then listens on it.)
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from openclaw_rl.engines.kind import SLICE, VISIBLE, EngineKind, GpuNeed, load_kind
from openclaw_rl.errors import SettingsError
from openclaw_rl.models import resolve
from openclaw_rl.settings import ModelSettings, Settings
from openclaw_rl.telemetry.trackers.base import problems as tracker_problems

_SMI_S = 20.0
_READING_S = 5.0
"""Shortest time in which a user reads a reply and answers."""
_SHORT_SHARE = 8
"""A trainer's limit of tokens below this part of a reply's limit drops nearly all turns with their prompts."""


def problems(settings: Settings) -> list[str]:
    """Return one line for each fault that would stop the start."""
    found = [*_model(settings.model), *_programs(settings)]
    kind = None
    try:
        kind = load_kind(settings.engine.kind)
        found += kind.problems(settings)
        if settings.engine.replicas > 1 and not kind.has_replicas:
            count, name = settings.engine.replicas, settings.engine.kind
            found.append(f"engine.replicas {count}: engine.kind {name!r} starts one engine alone")
    except SettingsError as error:
        found.append(str(error))
    found += _gpus(settings, kind)
    found += tracker_problems(settings.tracking)
    folder = settings.data_dir.expanduser().absolute()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        found.append(f"data_dir {str(settings.data_dir)!r}: {parent} is not a folder that can be written to")
    return found


def hardly_trains(settings: Settings) -> list[str]:
    """Return one line for each setting under which the usual chat is never trained on, though training is on.

    Contradictions that leave no chat at all are refused with the settings (`Settings`). These leave chats that say
    otherwise in their requests.
    """
    if not settings.training.enabled:
        return []
    found, sampling = [], settings.sampling
    if sampling.temperature == 0 or sampling.top_k == 1:
        key = "temperature = 0" if sampling.temperature == 0 else "top_k = 1"
        found.append(f"sampling.{key}: replies to requests that set no other value are greedy, and never trained on")
    if (sampling.top_p < 1 or sampling.top_k > 1) and sampling.truncated_sampling == "drop":
        found.append('sampling.truncated_sampling = "drop" with sampling.top_p or top_k: the usual turn is dropped')
    if settings.sessions.pair_ttl_s < _READING_S:
        found.append(f"sessions.pair_ttl_s = {settings.sessions.pair_ttl_s:g}: a turn ends before a user can answer it")
    if getattr(settings.method, "binary_weight", 1) == 0 and getattr(settings.method, "opd_weight", 1) == 0:
        found.append("method.binary_weight and method.opd_weight are 0: only replies that users wrote are trained on")
    if settings.trainer.kind == "local" and settings.trainer.max_tokens <= sampling.max_new_tokens / _SHORT_SHARE:
        found.append(
            f"trainer.max_tokens = {settings.trainer.max_tokens}: longer samples are dropped, and a reply may have "
            f"{sampling.max_new_tokens} (sampling.max_new_tokens)"
        )
    return found


def gpus_here(dev: Path = Path("/dev")) -> int | None:
    """Count the NVIDIA cards by their device nodes or by `nvidia-smi`; None if a GPU exists that neither counts.

    Windows' Linux has /dev/dxg, an AMD card /dev/kfd.
    """
    if nodes := sum(path.name.removeprefix("nvidia").isdigit() for path in dev.glob("nvidia*")):
        return nodes
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        listed = 0
    else:
        listed = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    return listed or (None if any((dev / name).exists() for name in ("dxg", "kfd", "nvidiactl")) else 0)


def _model(model: ModelSettings) -> Iterator[str]:
    try:
        resolve.look(model)
    except SettingsError as error:
        yield str(error)
    if model.chat_template is not None and not Path(model.chat_template).expanduser().is_file():
        yield f"model.chat_template {model.chat_template!r}: no such file"


def _programs(settings: Settings) -> Iterator[str]:
    for key, python in (("engine.python", settings.engine.python), ("trainer.python", settings.trainer.python)):
        if python is not None and shutil.which(os.path.expanduser(python)) is None:
            yield f"{key} {python!r}: no such program"


def _slices() -> int:
    """Return the number of MIG slices that this process was given; one card may be cut into seven."""
    return sum(name.strip().startswith(SLICE) for name in os.environ.get(VISIBLE, "").split(","))


def _gpus(settings: Settings, kind: EngineKind | None) -> Iterator[str]:
    needs: list[GpuNeed] = []
    if settings.training.enabled and settings.trainer.kind == "local":
        needs += GpuNeed.of_device("trainer.device", settings.trainer.device)
    if kind is not None:
        needs += kind.gpus(settings)
    if not needs or (here := (slices := _slices()) or gpus_here()) is None:
        return
    for need in needs:
        if need.gpus > here:
            yield f"{need.setting}: wants {need.gpus} GPUs, {here} are here"
        elif slices and (own := need.of_one_process) > 1:
            yield f"{need.setting}: wants {own} GPUs, and a process sees one MIG slice of {VISIBLE} alone"
