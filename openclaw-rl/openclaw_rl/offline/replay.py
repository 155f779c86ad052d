"""Training from the ledger, offline: another method, model or setting learns from the same chats.

    snapshot → method.score → batches → the local learner → a PEFT adapter and its metrics in a new folder

The method scores every turn again that has a next state or feedback, even a turn that the server dropped or trained on.
Demonstrations are taken as they are. Turns that can never be trained on (greedy sampling, opted out, …) are left out
and counted.

Any model fits whose tokenizer and chat template are the ledger's: the tokens are kept, and no text is tokenised again.
For another model, or after many steps, the replies are off-policy; the objective's truncated importance weights are the
only correction.

Promises: the ledger is only read, also while a server writes to it. Equal snapshots, settings and seeds give equal
adapters, bit for bit, on one machine, for methods with reproducible scores (`binary_rl`; hints are sampled). All turns
that are trained on are in memory.

The method scores with an engine that runs already, or with the embedded one, as a child of this process that ends with
it. That engine holds the model that the replay trains, without an adapter. Its weights are version 0, the policy that
the first step starts from.
"""

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from openclaw_rl.data_dir import DataDir
from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.dialect import ModelInfo
from openclaw_rl.engines.kind import load_kind
from openclaw_rl.engines.pictures import Album
from openclaw_rl.errors import AlignmentError, EngineError, SettingsError, TeacherError, TrainerError
from openclaw_rl.ledger.pictures import folder_of
from openclaw_rl.ledger.snapshot import Snapshot
from openclaw_rl.methods.base import Dropped, Method, ScoringTools, load_method
from openclaw_rl.models import resolve
from openclaw_rl.processes.supervisor import Child
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.scoring.workers import judge_model, renderer
from openclaw_rl.server.child_commands import engine_child
from openclaw_rl.settings import Settings
from openclaw_rl.types import DropReason, JudgedTurn, Sample, Scope, WeightKind

Tell = Callable[[str], None]

METRICS_FILE, REPORT_FILE = "metrics.jsonl", "replay.json"
_TELL_EVERY = 100
_POLL_S = 0.2

_ENDED_FOR_ITS_TIME = frozenset(
    {
        DropReason.NO_NEXT_STATE,
        DropReason.SUPERSEDED,
        DropReason.BRANCH,
        DropReason.NEUTRAL,
        DropReason.UNJUDGED,
        DropReason.METHOD,
        DropReason.STALE,
        DropReason.ROLLED_BACK,
        DropReason.GATE_REJECTED,
        DropReason.TOO_LONG,
    }
)
"""Reasons that do not forbid a replay: such a turn was only late, unjudged or abandoned."""


@dataclass(frozen=True, slots=True)
class Plan:
    out: Path
    """New folder for the adapter and its metrics."""
    epochs: int = 1
    max_steps: int | None = None
    is_shuffled: bool = False
    """False: in the order of time, as a server would train."""
    user: str | None = None
    session_id: str | None = None

    def wants(self, scope: Scope) -> bool:
        return self.user in (None, scope.user) and self.session_id in (None, scope.session_id)


@dataclass(frozen=True, slots=True)
class Report:
    turns: int
    samples: int
    demonstrations: int
    left_out: dict[str, int]
    """Number of turns by reason."""
    steps: int
    skipped_steps: int
    """Batches that gave no step."""


@dataclass(slots=True)
class _Material:
    """Turns and demonstrations of the snapshot that the plan asks for."""

    turns: list[JudgedTurn] = field(default_factory=list)
    demonstrations: list[tuple[float, Sample]] = field(default_factory=list)


@asynccontextmanager
async def scoring_tools(settings: Settings, frontend: FrontEnd, cache: Path) -> AsyncIterator[ScoringTools]:
    """Yield the tools of `method.score`. Raises EngineError when the engine does not come up."""
    hints, scores = (asyncio.Semaphore(settings.method.score_workers) for _ in range(2))
    async with (
        _url(settings, cache) as (url, child),
        httpx.AsyncClient(trust_env=False) as client,
        asyncio.TaskGroup() as tasks,
    ):
        running = None if child is None else tasks.create_task(child.run(), name="engine")
        engine = HttpEngine(url, settings=settings.engine)
        if frontend.vision is not None and load_kind(settings.engine.kind).takes_pictures:
            pictures = folder_of(DataDir.of(settings.data_dir).ledger)
            engine.show(Album(pictures, frontend.vision.placeholder))
        try:
            info = await _up(engine, child, settings.engine.start_timeout_s)
            serving = VersionAdmission(settings.engine.hold_s)
            serving.switch(0, None)
            yield ScoringTools(
                settings=settings.method,
                teacher=engine,
                serving=serving,
                render=renderer(frontend),
                ask=judge_model(settings.judge, engine, frontend, client=client, slots=hints),
                context_length=info.context_length or frontend.context_length,
                slots=scores,
            )
        finally:
            await engine.aclose()
            if child is not None and running is not None:
                await child.stop()
                await running


@asynccontextmanager
async def _url(settings: Settings, cache: Path) -> AsyncIterator[tuple[str, Child | None]]:
    """Yield the engine's URL, and the child process that the caller has to run; None: the engine runs already."""
    if (url := settings.engine.first_url) is not None:
        yield url, None
        return

    async def on_exit() -> None:
        """Ignore the end: `_up` and the scoring calls notice an engine that ended."""

    # A folder of its own: a server of this data directory may run an engine too.
    with tempfile.TemporaryDirectory(prefix="openclaw-rl-replay-") as folder:
        (Path(folder) / "cache").symlink_to(cache)  # a model is converted once
        kind, data = load_kind(settings.engine.kind), DataDir.prepare(Path(folder))
        yield await asyncio.to_thread(engine_child, kind, settings, data, on_exit)


async def _up(engine: HttpEngine, child: Child | None, timeout_s: float) -> ModelInfo:
    end = time.monotonic() + timeout_s
    while not await engine.is_healthy():
        if child is not None and child.status().restarts > 2:
            raise EngineError(f"the engine does not start: {child.last_error()}")
        if time.monotonic() > end:
            raise EngineError(f"the engine did not come up within {timeout_s:g} s")
        await asyncio.sleep(_POLL_S)
    return await engine.model_info()


def replay(settings: Settings, plan: Plan, tell: Tell) -> Report:
    """Train from the ledger as `plan` says, and report it. `settings.trainer.seed` is the seed.

    Raises SettingsError, LedgerError, EngineError or TrainerError.
    """
    method = load_method(settings.method.name)
    if plan.out.exists():
        raise SettingsError(f"{plan.out} exists already")
    data = DataDir.of(settings.data_dir)
    with Snapshot.of(data.ledger) as snapshot:
        frontend = _frontend(settings, data.cache, snapshot)
        material = _read(snapshot, plan)
    tell(f"{len(material.turns)} turns and {len(material.demonstrations)} demonstrations are read")
    samples, left_out = asyncio.run(_score(settings, method, material, frontend, data.cache, tell))
    timed = [*samples, *material.demonstrations]
    ready = [sample for _, sample in sorted(timed, key=lambda pair: pair[0]) if method.can_train(sample)]
    left_out["not_for_the_method"] += len(timed) - len(ready)
    if not ready:
        raise SettingsError(f"there is nothing to train on: {_counts(left_out) or 'the ledger has no judged turn'}")
    steps, skipped = _train(settings, plan, method, ready, data.cache, tell)
    report = Report(
        turns=len(material.turns),
        samples=len(ready),
        demonstrations=len(material.demonstrations),
        left_out={reason: n for reason, n in sorted(left_out.items()) if n},
        steps=steps,
        skipped_steps=skipped,
    )
    _write_report(settings, plan, report)
    return report


def _frontend(settings: Settings, cache: Path, snapshot: Snapshot) -> FrontEnd:
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    frontend = FrontEnd(settings.model, resolve.tokenizer_folder(settings.model, cache))
    if frontend.tokenizer_hash != snapshot.identity.tokenizer_hash:
        raise SettingsError(
            f"model.path {settings.model.path!r}: its tokenizer or chat template is not that of the ledger, whose turns"
            f" are tokens of {snapshot.identity.model_name!r}"
        )
    return frontend


def _read(snapshot: Snapshot, plan: Plan) -> _Material:
    material = _Material()
    for judged in snapshot.judged():
        if plan.wants(judged.request.scope):
            is_free = judged.turn.drop in _ENDED_FOR_ITS_TIME
            turn = replace(judged.turn, drop=None) if is_free else judged.turn
            material.turns.append(replace(judged, turn=turn))
    material.demonstrations = [(at, sample) for at, scope, sample in snapshot.demonstrations() if plan.wants(scope)]
    return material


async def _score(
    settings: Settings, method: Method, material: _Material, frontend: FrontEnd, cache: Path, tell: Tell
) -> tuple[list[tuple[float, Sample]], Counter[str]]:
    """Return samples with their times, in the turns' order, and the number of turns without a sample, by reason."""
    if not settings.method.needs_engine:
        return await _score_with(ScoringTools(settings=settings.method), method, material.turns, 1, tell)
    url = settings.engine.first_url
    tell("the engine starts" if url is None else f"scoring with {url}")
    async with scoring_tools(settings, frontend, cache) as tools:
        return await _score_with(tools, method, material.turns, settings.method.score_workers, tell)


async def _score_with(
    tools: ScoringTools, method: Method, turns: Sequence[JudgedTurn], workers: int, tell: Tell
) -> tuple[list[tuple[float, Sample]], Counter[str]]:
    made: list[Sample | Dropped | None] = [None] * len(turns)
    waiting = iter(range(len(turns)))
    done = 0

    async def work() -> None:
        nonlocal done
        for index in waiting:
            try:
                made[index] = await method.score(turns[index], tools)
            except TeacherError as error:
                made[index] = Dropped(DropReason.METHOD, f"teacher: {error}")
            except AlignmentError as error:
                made[index] = Dropped(DropReason.MISALIGNED, str(error))
            done += 1
            if done % _TELL_EVERY == 0:
                tell(f"{done} of {len(turns)} turns are scored")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(workers):
            tasks.create_task(work())
    samples = [(judged.turn.finished_at, s) for judged, s in zip(turns, made, strict=True) if isinstance(s, Sample)]
    return samples, Counter(str(dropped.reason) for dropped in made if isinstance(dropped, Dropped))


def batches(samples: Sequence[Sample], size: int, plan: Plan, seed: int) -> Iterator[list[Sample]]:
    """Yield all samples `plan.epochs` times, `size` at a time; the last batch of an epoch may be smaller."""
    dice, left = random.Random(seed), plan.max_steps
    for _ in range(plan.epochs):
        order = list(samples)
        if plan.is_shuffled:
            dice.shuffle(order)
        for start in range(0, len(order), size):
            if left is not None and left <= 0:
                return
            left = None if left is None else left - 1
            yield order[start : start + size]


def _train(
    settings: Settings, plan: Plan, method: Method, samples: Sequence[Sample], cache: Path, tell: Tell
) -> tuple[int, int]:
    """Step through the batches, and write adapter and metrics to `plan.out`. Return the steps made and skipped."""
    import torch

    from openclaw_rl.trainers import base_model
    from openclaw_rl.trainers.base import Step
    from openclaw_rl.trainers.learner import LocalLearner

    torch.set_num_threads(settings.trainer.threads)
    resolved = resolve.resolve(settings.model, cache)
    pictures = folder_of(DataDir.of(settings.data_dir).ledger)
    policy = base_model.make_policy(WeightKind.LORA, resolved, settings.trainer, pictures)
    learner = LocalLearner(policy, method, settings.trainer, settings.method, base_hash=resolve.base_hash(resolved))
    learner.load(None, fresh_moments=True)
    size, seed = settings.training.batch_size, settings.trainer.seed
    planned = sum(1 for _ in batches(samples, size, plan, seed))
    steps = skipped = 0
    kept = plan.out / ".kept"
    plan.out.mkdir(mode=0o700, parents=True)
    kept.mkdir()
    with (plan.out / METRICS_FILE).open("w") as metrics:
        for number, batch in enumerate(batches(samples, size, plan, seed), start=1):
            stepped = learner.step(batch, lambda: None)
            if not isinstance(stepped, Step):  # the learner has to load its weights again
                tell(f"step {number} of {planned} is left out: {stepped.reason}")
                learner.load(kept if steps else None, fresh_moments=False)
                skipped += 1
                continue
            learner.write(kept)
            steps += 1
            metrics.write(json.dumps({"step": number, **stepped.metrics}, sort_keys=True) + "\n")
            metrics.flush()
            tell(f"step {number} of {planned}: " + _summary(stepped.metrics))
    if steps == 0:
        raise TrainerError("no step could be made of these samples")
    policy.save(plan.out)
    for file in kept.iterdir():
        file.unlink()
    kept.rmdir()
    return steps, skipped


def _summary(metrics: Mapping[str, float]) -> str:
    names = [name for name in ("loss", "reward_mean", "grad_norm", "abs_log_ratio") if name in metrics]
    return "  ".join(f"{name} {metrics[name]:.4g}" for name in names)


def _counts(left_out: Counter[str]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in sorted(left_out.items()) if n)


def _write_report(settings: Settings, plan: Plan, report: Report) -> None:
    """Write the settings and figures of this replay, with which it can be repeated."""
    content = {
        "method": settings.method.model_dump(mode="json"),
        "model": settings.model.model_dump(mode="json"),
        "trainer": settings.trainer.model_dump(mode="json"),
        "batch_size": settings.training.batch_size,
        "epochs": plan.epochs,
        "max_steps": plan.max_steps,
        "shuffled": plan.is_shuffled,
        "user": plan.user,
        "session_id": plan.session_id,
        "turns": report.turns,
        "samples": report.samples,
        "demonstrations": report.demonstrations,
        "left_out": report.left_out,
        "steps": report.steps,
        "skipped_steps": report.skipped_steps,
    }
    (plan.out / REPORT_FILE).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
