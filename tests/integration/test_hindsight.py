"""Turns with hint and reward, hint only, reward only, neither; a teacher that fails; a hint that overflows.

The real server over the stub engine and a judge on real HTTP makes the exact sample of each turn, and counts it.
"""

import asyncio
import gc
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from openclaw_rl.engines.dialect import GenerateReply, GenerateRequest
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.server import app as app_module
from openclaw_rl.settings import ModelSettings, Settings
from openclaw_rl.testing import FakeEngine, ToyPolicy
from openclaw_rl.testing.stub_engine import stub_app

TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
CONTEXT = 1600
SHORT, LONG = "Answer in one sentence.", "Mind this. " * 50


class ScriptedEngine(FakeEngine):
    """The fake engine; its scoring hangs on command."""

    hangs = False

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if self.hangs and request.logprob_start_len >= 0:
            await asyncio.Event().wait()
        return await super().generate(request)


def make_frontend(folder: Path) -> FrontEnd:
    """One token a byte."""
    alphabet = {character: k for k, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": CONTEXT}))
    return FrontEnd(ModelSettings(), folder)


def judge_app() -> FastAPI:
    """An OpenAI-compatible judge that obeys the user's next message: `grade 1, hint short`."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def answer(request: Request) -> dict[str, Any]:
        system, user = (message["content"] for message in (await request.json())["messages"])
        said = user.rpartition("The user says:")[2]
        if "write the hint" not in system:
            grade = next((grade for grade in ("-1", "0", "1") if f"grade {grade}" in said), "")
            text = f"So it is. \\boxed{{{grade}}}"
        elif "hint none" in said:
            text = "Nothing. \\boxed{-1}"
        else:
            hint = LONG if "hint long" in said else SHORT
            text = f"\\boxed{{1}}\n[HINT_START]{hint}[HINT_END]"
        return {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}

    return app


@asynccontextmanager
async def http(app: Any) -> AsyncIterator[str]:
    """Serve `app` on a free port; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        task = asyncio.create_task(server._serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await task


@dataclass
class Loop:
    """A running server, with the calls of a test."""

    url: str
    data_dir: Path
    engine: ScriptedEngine
    client: httpx.AsyncClient
    count: int = 0
    answers: dict[str, str] = field(default_factory=dict)

    async def turn(self, following: str | None, *, question: str = "Tell me of the sea.") -> str:
        """Chat: one reply and, unless None, the user's next message; return the first turn's id."""
        self.count += 1
        headers = {"X-Session-Id": f"s{self.count}"}
        messages = [{"role": "user", "content": question}]
        body = {"model": "policy", "messages": messages, "max_tokens": 12}
        reply = (await self.client.post("/v1/chat/completions", json=body, headers=headers)).json()
        if following is not None:
            message = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
            body = body | {"messages": [*messages, message, {"role": "user", "content": following}]}
            (await self.client.post("/v1/chat/completions", json=body, headers=headers)).raise_for_status()
        return str(reply["id"])

    async def admin(self, path: str) -> httpx.Response:
        key = (self.data_dir / "keys" / "admin.key").read_text().strip()
        return await self.client.get(path, headers={"Authorization": f"Bearer {key}"})

    async def ended(self, turn_id: str, *states: str) -> dict[str, Any]:
        """Wait until the turn is in one of these states; return its record."""
        async with asyncio.timeout(120):
            while True:
                record: dict[str, Any] = (await self.admin(f"/v1/turns/{turn_id}")).json()
                if record["state"] in states:
                    return record
                await asyncio.sleep(0.02)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Any]:
    """`await start(method, **{setting: value})` starts the server in this process."""
    async with AsyncExitStack() as stack:

        async def make(method: str, **more: Any) -> Loop:
            folder = tmp_path / "model"
            folder.mkdir()
            frontend = make_frontend(folder)
            (end_id,) = frontend.end_ids
            policy = ToyPolicy(low_id=65, high_id=90, end_id=end_id, mean_tokens=0)
            engine = ScriptedEngine(policy=policy, context_length=CONTEXT)
            tree: dict[str, Any] = {
                "data_dir": tmp_path / "data",
                "server": {"port": 0},
                "engine": {"kind": "url", "url": await stack.enter_async_context(http(stub_app(engine)))},
                "judge": {
                    "kind": "llm",
                    "url": await stack.enter_async_context(http(judge_app())) + "/v1",
                    "model": "judge",
                    "retries": 0,
                },
                "method": {"name": method, "hint_source": "judge"} | more,
                "trainer": {"kind": "external"},
            }
            task = asyncio.create_task(app_module.run(Settings.model_validate(tree), frontend=frontend))
            stack.push_async_callback(_stop, task)
            where = tmp_path / "data" / "run" / "server.json"
            async with asyncio.timeout(120):
                while not where.exists():
                    assert not task.done(), task.result()
                    await asyncio.sleep(0.02)
            url = json.loads(where.read_text())["url"]
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=120))
            return Loop(url, tmp_path / "data", engine, client)

        yield make


async def _stop(task: asyncio.Task[None]) -> None:
    if not task.done():
        os.kill(os.getpid(), signal.SIGTERM)
    await task
    gc.unfreeze()


def terms(record: dict[str, Any]) -> tuple[object, bool, bool]:
    """Return the reward, and True if both sides of the distillation term have one value for each token."""
    sample, tokens = record["sample"], len(record["turn"]["response_ids"])
    sides = (sample["teacher_log_probs"], sample["student_log_probs"])
    assert all(side is None or len(side) == tokens for side in sides)
    return sample["reward"], sides[0] is not None, sides[1] is not None


SCORE_S = 3.0
"""Long for a stub that answers, on a busy machine too; the tests wait so long for one that hangs."""


def hint_of(record: dict[str, Any]) -> dict[str, Any]:
    hint: dict[str, Any] = json.loads(record["sample"]["extra_json"])["hint"]
    return hint


async def test_combined_makes_of_a_turn_what_there_is(start: Any) -> None:
    loop: Loop = await start("combine", score_timeout_s=SCORE_S)
    both = await loop.ended(await loop.turn("grade -1, hint short"), "sampled")
    assert terms(both) == (-1.0, True, True)
    assert (hint_of(both)["text"], hint_of(both)["source"], both["sample"]["scored_version"]) == (SHORT, "judge", 0)
    hint_only = await loop.ended(await loop.turn("grade 0, hint short"), "sampled")
    assert terms(hint_only) == (None, True, True)
    reward_only = await loop.ended(await loop.turn("grade 1, hint none"), "sampled")
    assert terms(reward_only) == (1.0, False, False)
    assert hint_of(reward_only)["absent"] == "no_hint"
    neither = await loop.ended(await loop.turn("grade 0, hint none"), "dropped")
    assert (neither["sample"], neither["reason"]) == (None, "neutral")
    unjudged = await loop.ended(await loop.turn("grade none, hint none"), "dropped")
    assert (unjudged["sample"], unjudged["reason"]) == (None, "unjudged")
    unjudged_hint = await loop.ended(await loop.turn("grade none, hint short"), "sampled")
    assert (terms(unjudged_hint), unjudged_hint["verdict"]) == ((None, True, True), None)
    overflow = await loop.ended(await loop.turn("grade -1, hint long", question="q" * 1400), "sampled")
    assert terms(overflow) == (-1.0, False, False)
    assert hint_of(overflow)["absent"] == "hint_overflows"
    lost = await loop.ended(await loop.turn("grade 0, hint long", question="q" * 1400), "dropped")
    assert (lost["sample"], lost["reason"]) == (None, "neutral")
    assert "hint_overflows" in lost["events"][-1]["detail"]
    loop.engine.hangs = True
    gone = await loop.ended(await loop.turn("grade 0, hint short"), "dropped")
    assert (gone["sample"], gone["reason"]) == (None, "method")
    assert "teacher_failed" in gone["events"][-1]["detail"]
    dead = await loop.ended(await loop.turn("grade -1, hint short"), "sampled")
    assert terms(dead) == (-1.0, False, False)
    assert hint_of(dead)["absent"] == "teacher_failed"

    text = (await loop.admin("/metrics")).text
    for reason, count in {"scored": 3, "no_hint": 3, "hint_overflows": 2, "teacher_failed": 2}.items():
        assert f'openclaw_rl_scoring{{what="hindsight_{reason}"}} {count}.0\n' in text
    status = (await loop.admin("/v1/admin/status")).json()
    assert status["counts"]["sampled"] == 6
    assert status["counts"]["dropped"] == 4
    assert status["scoring"]["means"]["gap_abs"] > 0
    assert (await loop.client.get("/healthz")).json()["status"] == "ok"
    await loop.ended(await loop.turn("grade -1, hint short"), "sampled")
    assert (await loop.client.get("/healthz")).json()["status"] == "degraded"
    assert "teacher" in (await loop.admin("/v1/admin/status")).json()["problems"][0]


async def test_a_guided_sample_says_so(start: Any) -> None:
    loop: Loop = await start("opd", guidance=1.0)
    record = await loop.ended(await loop.turn("grade -1, hint short"), "sampled")
    assert terms(record)[1:] == (True, True)
    assert hint_of(record)["guidance"] == 1.0
    assert hint_of(record).keys() >= {"gain", "hinted_gap"}
    means = (await loop.admin("/v1/admin/status")).json()["scoring"]["means"]
    # At version 0 the base is the policy: the gap of w = 1 is twice that of the hint.
    assert means["guided_gap_abs"] == pytest.approx(2 * means["gap_abs"])
    assert 'openclaw_rl_scoring_mean{what="guided_gap_abs"}' in (await loop.admin("/metrics")).text


async def test_opd_makes_samples_of_hints_alone(start: Any) -> None:
    loop: Loop = await start("opd", score_timeout_s=SCORE_S)
    for following in ("grade -1, hint short", "grade 0, hint short", "grade 1, hint short"):
        record = await loop.ended(await loop.turn(following), "sampled")
        assert terms(record)[1:] == (True, True)
    no_hint = await loop.ended(await loop.turn("grade -1, hint none"), "dropped")
    assert (no_hint["sample"], no_hint["reason"]) == (None, "method")
    assert "no_hint" in no_hint["events"][-1]["detail"]
    loop.engine.hangs = True
    dead = await loop.ended(await loop.turn("grade -1, hint short"), "dropped")
    assert (dead["sample"], dead["reason"]) == (None, "method")
    assert "teacher_failed" in dead["events"][-1]["detail"]


async def test_the_users_comment_is_the_hint_and_their_word_the_reward(start: Any) -> None:
    loop: Loop = await start("combine", score_timeout_s=120.0)
    turn_id = await loop.turn("grade -1, hint none")
    before = await loop.ended(turn_id, "sampled")
    assert terms(before) == (-1.0, False, False)
    said = {"turn_id": turn_id, "value": True, "comment": "I like it short."}
    (await loop.client.post("/v1/feedback", json=said)).raise_for_status()
    async with asyncio.timeout(120):
        while terms(after := await loop.ended(turn_id, "sampled")) != (1.0, True, True):
            await asyncio.sleep(0.02)
    assert (hint_of(after)["text"], hint_of(after)["source"]) == ("I like it short.", "feedback")
    assert after["verdict"]["source"] == "feedback"
