"""Core of a server: the data folder and its keys, the engine, the front end and the ledger, opened in that order.

The engine starts first of the slow parts: it loads its model while the front end is made. Whether the engine serves the
right version is the publisher's matter.
"""

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog

from openclaw_rl.data_dir import DataDir
from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.dialect import ModelInfo
from openclaw_rl.engines.kind import load_kind
from openclaw_rl.engines.pictures import Album
from openclaw_rl.engines.pool import PooledEngine
from openclaw_rl.engines.pool_drains import EngineDrains
from openclaw_rl.errors import EngineError, EngineGone, SettingsError
from openclaw_rl.ledger import Identity, Ledger, LedgerLimits
from openclaw_rl.ledger.open import InstanceLock
from openclaw_rl.ledger.pictures import folder_of
from openclaw_rl.models.picture_memory import PictureMemory
from openclaw_rl.models.resolve import base_hash, model_display_name, resolve, tokenizer_folder
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.publishing import version_folders
from openclaw_rl.server.api.app import Door
from openclaw_rl.server.engine_processes import drains_of, open_engine
from openclaw_rl.server.lifecycle import Lifetime
from openclaw_rl.settings import ModelSettings, Settings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.types import TurnState, WeightKind
from openclaw_rl.web.auth import Keys

log = structlog.get_logger()

START_POLL_S = 0.2
_TELL_EVERY_S = 30.0
"""Time between two log lines about an engine that is not up."""
_TEMPLATE = "chat template"
"""Part of the server in `Health`. Only another start, with other files, mends it."""


def _steady() -> float:
    """Return the seconds since the machine started, with its sleep if the system counts it."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class SteadyClock:
    """Unix seconds for the ledger: the wall clock as this process started, and a steady clock from then on.

    Ages, leases and waiting times are differences of recorded times. A wall clock that is set while the server runs (by
    NTP, by the user, by a virtual machine that woke) must neither end a lease or a conversation nor keep one for ever.
    The sleep of a machine counts: it is time that passed. The next start reads the wall clock anew.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = _steady) -> None:
        self._steady = steady
        self._ahead = wall() - steady()

    def __call__(self) -> float:
        return self._ahead + self._steady()


@dataclass(frozen=True, slots=True)
class Core:
    """The parts that every other part of the server is built on."""

    data: DataDir
    keys: Keys
    admin_key: str
    trainer_token: str
    proof_key: str
    """Secret of this run, by which the command line knows the server (`data_dir.Announcement`)."""
    serving: VersionAdmission
    engine: HttpEngine | PooledEngine
    drains: EngineDrains | None
    """None: there is one engine."""
    frontend: FrontEnd
    folder: Path | None
    """The model's folder; None if the caller made the front end."""
    context_length: int
    ledger: Ledger
    album: Album | None
    """Pictures of recorded prompts; None: this model or its engine takes none."""
    model_name: str
    base_hash: str
    health: Health
    clock: SteadyClock
    started_at: float


async def open_core(
    settings: Settings,
    frontend: FrontEnd | None,
    *,
    life: Lifetime,
    stack: AsyncExitStack,
    engine_exited: asyncio.Event,
    door: Door,
    keys: Keys,
) -> Core | None:
    """Open the core; return None if the server is stopped before the engine is up.

    `life` owns the engines' child processes. The exit of an engine that is alone sets `engine_exited`. `stack` closes
    the rest. `door` answers requests meanwhile, and tells the operator why.
    """
    clock = SteadyClock()
    started_at = clock()
    data = DataDir.prepare(settings.data_dir)
    # Before the engine's file in `run/` is written: another server's engine may read that file at its next restart.
    lock = InstanceLock.beside(data.ledger)
    stack.callback(lock.release)
    admin_key = data.secret("admin.key", settings.server.admin_key)
    door.admin_key, door.waits_for = admin_key, "the engine starts"
    token = data.secret("trainer.token", settings.server.trainer_token)
    serving = VersionAdmission(settings.engine.hold_s)
    engine = await open_engine(settings, data, serving, life=life, engine_exited=engine_exited)
    drains = drains_of(engine, settings, data)
    stack.push_async_callback(engine.aclose)

    folder = None
    if frontend is None:
        folder = await asyncio.to_thread(tokenizer_folder, settings.model, data.cache)
        frontend = await asyncio.to_thread(FrontEnd, settings.model, folder, memory=settings.memory)
    health = Health()
    tell_of_template(frontend, health)
    info = await _first_answer(engine, life, settings.engine.start_timeout_s, door)
    if info is None:
        return None
    model_name = settings.server.served_model_name or model_display_name(settings.model)
    base_hash = await asyncio.to_thread(
        served_base_hash, info, settings.model, cache=data.cache, ours=(data.versions, data.push)
    )
    ledger = await Ledger.open(
        data.ledger,
        identity=Identity(base_hash, frontend.tokenizer_hash, model_name, WeightKind(settings.training.weights)),
        training=settings.training,
        redaction=settings.redaction,
        memory=settings.memory,
        clock=clock,
        lock=lock,
        limits=LedgerLimits(
            {
                TurnState.PAIRED: settings.judge.max_waiting,
                TurnState.JUDGED: settings.judge.max_waiting,
                TurnState.SAMPLED: settings.training.max_waiting,
            },
            settings.episodes,
            shows_pictures=_shows_pictures(settings, frontend),
        ),
    )
    stack.push_async_callback(ledger.aclose)
    await version_folders.tidy(ledger, data.versions)
    trains_here = settings.training.enabled and settings.trainer.kind == "local"
    # SGLang makes room for adapters of the settings' rank and modules alone.
    if settings.training.weights == "lora" and (trains_here or settings.engine.kind == "sglang"):
        await version_folders.refuse_other_form(ledger, data.root, settings.trainer)
    return Core(
        data=data,
        keys=keys,
        admin_key=admin_key,
        trainer_token=token,
        proof_key=secrets.token_urlsafe(32),
        serving=serving,
        engine=engine,
        drains=drains,
        frontend=frontend,
        folder=folder,
        context_length=info.context_length or frontend.context_length,
        ledger=ledger,
        album=_album(settings, frontend, data, engine),
        model_name=model_name,
        base_hash=base_hash,
        health=health,
        clock=clock,
        started_at=started_at,
    )


def _shows_pictures(settings: Settings, frontend: FrontEnd) -> bool:
    return frontend.vision is not None and load_kind(settings.engine.kind).takes_pictures


def _album(settings: Settings, frontend: FrontEnd, data: DataDir, engine: HttpEngine | PooledEngine) -> Album | None:
    """Return the pictures of recorded prompts; the engine is shown them from now on with the prompts that it scores."""
    if frontend.vision is None or not _shows_pictures(settings, frontend):
        return None
    memory = PictureMemory(settings.pictures)
    album = Album(folder_of(data.ledger), frontend.vision.placeholder, memory)
    engine.show(album)
    return album


def tell_of_template(frontend: FrontEnd, health: Health) -> None:
    """Log what the front end found in the model's files, and report what spoils chats."""
    for says in frontend.remarks:
        log.warning("chat_template", says=says)
    if frontend.problems:
        health.failed(_TEMPLATE, "; ".join(frontend.problems), at_once=True)


async def _first_answer(
    engine: HttpEngine | PooledEngine, life: Lifetime, timeout_s: float, door: Door
) -> ModelInfo | None:
    """Wait for the engine; return None if the server is stopped before. Raises EngineError.

    The error comes after `timeout_s`, or when the child process cannot start.
    """
    began, told_at = time.monotonic(), -math.inf
    while not life.stop.is_set():
        fault = await engine.fault()
        if isinstance(engine, PooledEngine) and (strangers := engine.strangers()):
            raise SettingsError(f"engine.urls: {'; '.join(strangers)}")
        if fault is None:
            with contextlib.suppress(EngineGone):  # gone again
                return await engine.model_info()
        drained = [one.name for one in engine.every if one.is_drained] if isinstance(engine, PooledEngine) else []
        kept_out = f"; drained engines are kept out ({', '.join(drained)}; run/drained.json)" if drained else ""
        awaited = [child for child in life.children if child.name not in drained]
        if awaited and all(child.status().restarts > 2 for child in awaited):  # one is enough
            raise EngineError(f"the {awaited[0].name} does not start: {awaited[0].last_error()}{kept_out}")
        for child in life.children:
            state = "ended" if child.status().pid is None else "runs: it loads its model"
            whose = "its process" if len(life.children) == 1 else f"the process of {child.name}"
            fault = f"{fault}; {whose} {state}"
        waited_s = time.monotonic() - began
        door.waits_for = f"not up yet: {fault}"
        if waited_s > timeout_s:
            raise EngineError(f"the engine did not come up within {timeout_s:g} s: {fault}{kept_out}")
        if waited_s - told_at >= _TELL_EVERY_S:
            told_at = waited_s
            log.info("waiting_for_engine", waited_s=round(waited_s), because=fault)
        await asyncio.sleep(START_POLL_S)
    return None


def served_base_hash(info: ModelInfo, model: ModelSettings, *, cache: Path, ours: Sequence[Path]) -> str:
    """Return the hash of the base that the engine serves: ledger, trainer and every adapter depend on it. Blocks.

    ours: the folders of published full weights. An engine that loaded some names a folder there, not its base.
    """
    # The embedded engine gives the hash. SGLang gives only the path that it loaded, so its tensors are hashed here.
    # A folder that is not on this host has only its path for an identity, and the local trainer refuses to train on it.
    if info.base_hash is not None:
        return info.base_hash
    named = Path(info.model_path)
    base = tokenizer_folder(model, cache)
    is_sent = any(named.is_relative_to(folder) for folder in ours)
    if is_sent or info.model_path == model.path or named.resolve() == base.resolve():
        return base_hash(resolve(model, cache))
    if any(named.glob("*.safetensors")):
        return base_hash(resolve(ModelSettings(path=str(named)), cache))
    return f"path:{info.model_path}"
