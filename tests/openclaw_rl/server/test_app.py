"""The workers as the server starts them, over a real ledger: no kind of background work holds up another."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from turns import make_request, make_turn, serve_turn

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.dialect import FinishReason, GenerateReply, GenerateRequest, MetaInfo
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import load_method
from openclaw_rl.scoring.workers import BACKGROUND_SHARE, ConcurrencyLimits
from openclaw_rl.server.app import start_judging
from openclaw_rl.server.events import ServerEvents
from openclaw_rl.settings import Settings, TrainingSettings, load
from openclaw_rl.telemetry.health import Health
from openclaw_rl.testing import FakeEngine
from openclaw_rl.types import Feedback, Ids, NextState, TurnState

OWN_JUDGE = {"judge.kind": "llm", "method.name": "opd", "method.hint_source": "judge"}
SLOW, QUICK = "the slow one", "the quick one"


def ids_of(text: str) -> Ids:
    return tuple(map(ord, text))


class CharacterFrontEnd:
    """A tokenizer of characters."""

    vision = None

    def render(self, messages: Sequence[Message], *_: object, **_options: object) -> Any:
        return SimpleNamespace(ids=ids_of("".join(f"<{m.role}>{m.text()}" for m in messages) + "<assistant>"))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class JudgingEngine(FakeEngine):
    """Votes −1, finds no hint, and never answers a call of the kind `hangs` about the slow turn."""

    def __init__(self, hangs: str) -> None:
        super().__init__()
        self.hangs, self.hanging = hangs, asyncio.Event()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        text = "".join(map(chr, request.input_ids))
        kind = "hint" if "[HINT_START]" in text else "verdict"
        if kind == self.hangs and SLOW in text:
            self.hanging.set()
            await asyncio.Event().wait()
        return GenerateReply(
            output_ids=list(ids_of(r"\boxed{-1}")), meta_info=MetaInfo(finish_reason=FinishReason(type="stop"))
        )


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    opened = await Ledger.open(
        tmp_path / "ledger.sqlite3", identity=Identity("base", "tokenizer", "tiny"), training=TrainingSettings()
    )
    yield opened
    await opened.aclose()


@asynccontextmanager
async def workers(ledger: Ledger, engine: FakeEngine, settings: Settings) -> AsyncIterator[ServerEvents]:
    """Run the workers that `app` starts, until the block ends."""
    events, serving = ServerEvents(), VersionAdmission(hold_s=1.0)
    serving.switch(0, None)
    core: Any = SimpleNamespace(
        engine=engine, frontend=CharacterFrontEnd(), serving=serving, ledger=ledger, health=Health(),
        context_length=100_000, album=None,
    )  # fmt: skip
    async with AsyncExitStack() as stack, httpx.AsyncClient() as client, asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []
        life: Any = SimpleNamespace(own=lambda work, name: tasks.append(group.create_task(work, name=name)))
        method = load_method(settings.method.name)
        start_judging(settings, core, method, events, client=client, life=life, stack=stack)
        yield events
        for task in tasks:
            task.cancel()


async def paired(ledger: Ledger, name: str) -> None:
    message = Message(role="user", content=name)
    request = make_request(name, message, prompt=CharacterFrontEnd().render([message]).ids)
    await serve_turn(ledger, request, make_turn(name))
    await ledger.pair(name, NextState((Message(role="user", content="No, shorter."),)), by_request_id=f"after {name}")


async def sampled(ledger: Ledger, name: str) -> None:
    while (record := await ledger.turn(name)) is None or record.state is not TurnState.SAMPLED:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("max_running", [1, 2])
@pytest.mark.parametrize("hangs", ["hint", "verdict"])
async def test_a_judge_that_writes_for_ever_holds_up_no_other_kind(
    ledger: Ledger, hangs: str, max_running: int
) -> None:
    """A generation never holds a slot of the teacher, and hints never hold a slot of the verdicts."""
    engine = JudgingEngine(hangs)
    settings = load(None, OWN_JUDGE | {"engine.max_running": max_running}, {})
    async with asyncio.timeout(120), workers(ledger, engine, settings) as events:
        await paired(ledger, SLOW)
        events.paired.set()
        await engine.hanging.wait()
        await paired(ledger, QUICK)
        # Its hint needs no judge; where the verdicts hang its user says that too.
        said = Feedback("f", QUICK, 3.0, -1.0 if hangs == "verdict" else None, "Answer in one short sentence.")
        await ledger.record_feedback(said, user="ann")
        events.paired.set(), events.judged.set()
        await sampled(ledger, QUICK)
        record = await ledger.turn(SLOW)
        assert record is not None
        assert record.state is {"hint": TurnState.JUDGED, "verdict": TurnState.PAIRED}[hangs]
    record = await ledger.turn(QUICK)
    assert record is not None
    assert record.sample is not None
    assert record.sample.teacher_log_probs is not None


@pytest.mark.parametrize("max_running", [1, 2, 4, 7, 16, 64])
def test_the_places_are_shared_among_the_kinds_that_come_to_this_engine(max_running: int) -> None:
    choices = itertools.product(("rules", "llm"), ("binary_rl", "opd"), ("judge", "verbatim"), (None, "http://j/v1"))
    for kind, name, source, url in choices:
        settings = load(
            None,
            {"judge.kind": kind, "judge.url": url, "method.name": name, "engine.max_running": max_running}
            | ({"method.hint_source": source} if name == "opd" else {}),
            {},
        )
        limits = ConcurrencyLimits.of(settings)
        counts = [limits.verdicts._value, limits.hints._value, limits.scores._value]
        here = url is None
        comes = [here and kind == "llm", here and name == "opd" and source == "judge", name == "opd"]
        shared = [count for count, is_coming in zip(counts, comes, strict=True) if is_coming]
        assert all(count == 1 for count, is_coming in zip(counts, comes, strict=True) if not is_coming)
        assert not shared or sum(shared) == max(max_running // BACKGROUND_SHARE, len(shared))
        assert not shared or max(shared) - min(shared) <= 1
