"""`openclaw-rl doctor`: findings on the installed programs, the machine, the settings and the client, before a start.

Each check is a function of the settings that yields findings. It changes no state, and never raises for a fault that it
finds. The interpreter of another environment (SGLang's, slime's) answers for that environment: this process imports
neither. Other modules know the memory of a model (`models.memory`), the checks of an engine (`engines.kind`) and the
requirements of the node (`openclaw_slime.contracts`).
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
from packaging.requirements import Requirement

from openclaw_rl.cli.connect.openclaw import TESTED, OpenClaw
from openclaw_rl.data_dir import Announcement, DataDir
from openclaw_rl.engines.kind import Finding, Level, load_kind
from openclaw_rl.errors import ClientError, SettingsError
from openclaw_rl.models import memory
from openclaw_rl.models.resolve import BUNDLED_PACKAGE, plain_folder
from openclaw_rl.processes import malloc
from openclaw_rl.server import preflight
from openclaw_rl.settings import Settings, tuned
from openclaw_rl.telemetry.trackers.base import problems as tracker_problems

NODE_MODULE = "openclaw_slime"
_NEEDED_GB = 4.0
"""Free space in the data directory for the bundled model, its conversion and a few checkpoints."""
_ASK_S = 120.0
_PROCESSES = 1.5e9
"""Bytes of the server, the engine and the trainer without their weights."""
_BUNDLED_PARAMETERS, _BUNDLED_CACHE = 135e6, 46e3
"""Parameters of the bundled model, and bytes of a cached token."""


@dataclass(frozen=True, slots=True)
class Question:
    """Subject of the checks."""

    settings: Settings
    model: str | None = None
    """A model in place of the settings' own."""
    gpu_memory_gb: float | None = None
    """Memory of the card to plan for; None: no plan is printed."""
    slime_python: str | None = None
    """Interpreter of the environment that holds slime and Megatron; None: the node is not checked."""


Check = Callable[[Question], Iterator[Finding]]


def examine(question: Question, checks: Sequence[Check] | None = None) -> list[Finding]:
    return [finding for check in checks or CHECKS for finding in check(question)]


def interpreter(question: Question) -> Iterator[Finding]:
    version = platform.python_version()
    is_old = sys.version_info < (3, 11)
    yield Finding("python", "missing" if is_old else "ok", f"{version}; 3.11 or newer is needed" if is_old else version)
    for name in ("torch", "transformers", "peft", "llm-router-utils"):
        found = _version(name)
        yield Finding(name, "ok" if found else "missing", found or "is not installed here")


def packages(question: Question) -> Iterator[Finding]:
    """Hold the installed packages against this project's own metadata; extras are not looked at."""
    try:
        wanted = [Requirement(line) for line in importlib.metadata.requires("openclaw-rl") or ()]
    except importlib.metadata.PackageNotFoundError:
        return  # a checkout on the path
    needed = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    faults = 0
    for one in needed:
        found = _version(one.name)
        if found is None or not one.specifier.contains(found, prereleases=True):
            faults += 1
            has = "it is not installed" if found is None else f"{found} is installed"
            level: Level = "missing" if found is None else "differs"
            yield Finding("packages", level, f"{one.name}{one.specifier} is needed; {has}")
    if not faults:
        yield Finding("packages", "ok", f"{len(needed)} of them, at the versions that are needed")


def host_memory(question: Question) -> Iterator[Finding]:
    """Compare the machine's free memory with the need of the embedded engine and its trainer."""
    settings = question.settings
    free = malloc.free_memory()
    if free is None:
        return
    need = None
    if settings.engine.kind == "embedded" and settings.engine.device == "cpu":
        with contextlib.suppress(SettingsError, OSError):
            need = _embedded_need(question.model or settings.model.path, settings.engine.cache_tokens)
    if need is None:
        yield Finding("host memory", "ok", f"{free / 1e9:.1f} GB free")
        return
    level: Level = "ok" if free >= need else "differs"
    yield Finding("host memory", level, f"{free / 1e9:.1f} GB free, about {need / 1e9:.1f} GB needed")


def _embedded_need(path: str, cache_tokens: int) -> float | None:
    """Return bytes: weights of the engine and of the trainer in 32 bits, its step, the cache, three processes."""
    if path == "bundled":
        return _PROCESSES + 3 * 4 * _BUNDLED_PARAMETERS + cache_tokens * _BUNDLED_CACHE
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return None
    shape = memory.ModelShape.of_folder(folder)
    return _PROCESSES + 3 * 4 * shape.parameters + cache_tokens * shape.kv_token


def gpus(question: Question) -> Iterator[Finding]:
    cards = gpu_lines()
    for n, card in enumerate(cards):
        yield Finding(f"gpu {n}", "ok", card)
    if not cards:
        name = question.settings.engine.kind
        wants = question.slime_python is not None
        with contextlib.suppress(SettingsError):  # `engine` reports it
            wants = wants or bool(load_kind(name).gpus(question.settings))
        says = "none found" if wants else f"none; engine.kind {name!r} needs none"
        yield Finding("gpu", "missing" if wants else "ok", says)


def gpu_lines() -> list[str]:
    """Return one line for each card that nvidia-smi lists."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def port(question: Question) -> Iterator[Finding]:
    server = question.settings.server
    with socket.socket(socket.AF_INET6 if ":" in server.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((server.host, server.port))
        except OSError as error:
            if _runs_here(question.settings):
                yield Finding("port", "ok", f"{server.host}:{server.port}: the server of this data directory runs")
            else:
                yield Finding("port", "missing", f"{server.host}:{server.port} cannot be taken: {error.strerror}")
            return
    yield Finding("port", "ok", f"{server.host}:{server.port} is free")


def _runs_here(settings: Settings) -> bool:
    """Return True if the server of this data directory has the port, and proves it."""
    try:
        announced = Announcement.read(DataDir.of(settings.data_dir))
        if httpx.URL(announced.url).port != settings.server.port:
            return False
        headers = {"X-OpenClaw-Challenge": (challenge := secrets.token_urlsafe(16))}
        with httpx.stream("GET", f"{announced.url}/healthz", headers=headers, timeout=5, trust_env=False) as answer:
            return announced.proves(challenge, answer.headers.get("x-openclaw-proof"))
    except (OSError, SettingsError, httpx.HTTPError, httpx.InvalidURL):
        return False


def data_dir(question: Question) -> Iterator[Finding]:
    root = DataDir.of(question.settings.data_dir).root
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    free_gb = shutil.disk_usage(there).free / 1e9
    if not os.access(there, os.W_OK):
        yield Finding("data directory", "missing", f"{root}: {there} cannot be written")
        return
    has_room = free_gb >= _NEEDED_GB
    yield Finding("data directory", "ok" if has_room else "differs", f"{root}, {free_gb:.1f} GB free")


def model(question: Question) -> Iterator[Finding]:
    path = question.model or question.settings.model.path
    if path == "bundled":
        found = find_spec(BUNDLED_PACKAGE) is not None
        yield Finding("model", "ok" if found else "missing", f"bundled, from the package {BUNDLED_PACKAGE}")
        return
    folder = Path(path).expanduser()
    if not folder.is_dir():
        yield Finding("model", "differs", f"{path} is no folder here: it would be looked for on the Hugging Face hub")
        return
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.gguf")):
        missing.append("*.safetensors")
    if missing:
        yield Finding("model", "missing", f"{folder} lacks {', '.join(missing)}")
        return
    yield Finding("model", "ok", str(folder))
    yield from _memory(folder, question.gpu_memory_gb)


def chat_template(question: Question) -> Iterator[Finding]:
    """Render small chats, as every start does. A model that is not here yet, or must be converted, is not tried."""
    from openclaw_rl.proxy.frontend import FrontEnd  # transformers take a second to import

    settings = question.settings.model
    if question.model is not None:
        settings = settings.model_copy(update={"path": question.model})
    folder = plain_folder(settings, DataDir.of(question.settings.data_dir).cache)
    if folder is None or not (folder / "config.json").is_file():
        return
    try:
        frontend = FrontEnd(settings, folder)
    except SettingsError as error:
        yield Finding("chat template", "missing", str(error))
        return
    for says in (*frontend.problems, *frontend.remarks):
        yield Finding("chat template", "differs", says)
    if not frontend.problems and not frontend.remarks:
        yield Finding("chat template", "ok", f"renders chats{' and tools' if frontend.renders_tools else ''}")


def _memory(folder: Path, gpu_memory_gb: float | None) -> Iterator[Finding]:
    if gpu_memory_gb is None:
        return
    try:
        lines = memory.report(memory.ModelShape.of_folder(folder), gpu_memory_gb)
    except SettingsError as error:
        yield Finding("memory", "differs", str(error))
        return
    for line in lines:
        yield Finding("memory", "ok", line)


def engine(question: Question) -> Iterator[Finding]:
    try:
        kind = load_kind(question.settings.engine.kind)
    except SettingsError as error:
        yield Finding("engine", "missing", str(error))
        return
    yield from kind.findings(question.settings)
    yield from (Finding("engine", "missing", problem) for problem in kind.problems(question.settings))


def learning(question: Question) -> Iterator[Finding]:
    settings = question.settings
    if question.model not in (None, settings.model.path):
        return
    name = settings.method.name
    if taught := tuned.in_force(settings):
        values = ", ".join(f"{key} {value}" for key, value in taught.items())
        says = f"{name}, with the defaults that taught this model: {values}"
    elif tuned.defaults(settings) is not None:
        says = f"{name}, with the settings' own defaults where you set none"
    else:
        says = f"{name}, with cautious defaults: what teaches this model, trained so, was not measured"
    yield Finding("learning", "ok", says)
    yield from (Finding("learning", "differs", reason) for reason in preflight.hardly_trains(settings))


def client(question: Question) -> Iterator[Finding]:
    """Ask the installed OpenClaw for its version and its default model. A machine without one is fine."""
    if shutil.which("openclaw") is None:
        yield Finding("client", "ok", "no OpenClaw on the PATH (other clients: `openclaw-rl connect`)")
        return
    try:
        program = OpenClaw()
        version = program.version()
        found = program.values(("models.providers", "agents.defaults.model"))
    except ClientError as error:
        yield Finding("client", "differs", str(error))
        return
    is_tested = version.startswith(TESTED)
    tested = "" if is_tested else f" (tested: {TESTED})"
    model = found.get("agents.defaults.model")
    primary = model.get("primary") if isinstance(model, dict) else model
    server = question.settings.server
    ours = [
        name
        for name, provider in (found.get("models.providers") or {}).items()
        if isinstance(provider, dict) and f":{server.port}/" in f"{provider.get('baseUrl')}/"
    ]
    if not ours:
        says = f"knows no server on port {server.port}: `openclaw-rl connect openclaw`"
    elif str(primary).split("/")[0] in ours:
        says = f"its default model is {primary}, on port {server.port}"
    else:
        says = f"has the provider {ours[0]}, and its default model is {primary}"
    yield Finding("client", "ok" if is_tested else "differs", f"OpenClaw {version}{tested} {says}")


def node(question: Question) -> Iterator[Finding]:
    """Run the node's own doctor in slime's environment, where this project need not be installed."""
    python = question.slime_python
    if python is None:
        return
    ours = [find_spec(name) for name in ("openclaw_rl", NODE_MODULE)]
    folders = [Path(spec.origin).parent for spec in ours if spec is not None and spec.origin is not None]
    if len(folders) < len(ours):
        yield Finding("node", "missing", f"{NODE_MODULE} is not installed here")
        return
    said = ""
    try:
        with tempfile.TemporaryDirectory(prefix="openclaw-rl-doctor-") as place:
            # Our packages alone: other packages of this environment would count as installed in that one.
            for folder in folders:
                (Path(place) / folder.name).symlink_to(folder)
            path = os.pathsep.join(filter(None, (place, os.environ.get("PYTHONPATH"))))
            answer = subprocess.run(
                [python, "-m", f"{NODE_MODULE}.doctor", "--json"],
                capture_output=True,
                text=True,
                timeout=_ASK_S,
                check=False,  # it exits with 1 if a part is missing, and prints which
                env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            )
        said = answer.stderr.strip().rpartition("\n")[2]
        rows = json.loads(answer.stdout.splitlines()[-1])
        findings = [Finding(row["what"], row["level"], row["says"]) for row in rows]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError) as error:
        yield Finding("node", "missing", f"{python} cannot say what it holds: {said or repr(error)}")
        return
    yield from findings


def trackers(question: Question) -> Iterator[Finding]:
    """Tell whether each named tracker can be loaded. JSON lines need no check: they need no package."""
    settings = question.settings.tracking
    faults = list(tracker_problems(settings))
    for fault in faults:
        yield Finding("tracker", "missing", fault)
    if settings.trackers and not faults:
        sends = "wandb" in settings.trackers and settings.wandb_mode == "online"
        says = ", ".join(settings.trackers) + ("; wandb sends every figure to its host" if sends else "; files alone")
        yield Finding("tracker", "ok", says)


CHECKS: tuple[Check, ...] = (
    interpreter,
    packages,
    gpus,
    host_memory,
    port,
    data_dir,
    model,
    chat_template,
    engine,
    learning,
    trackers,
    client,
    node,
)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
