"""Asking: an OpenAI-compatible URL, and the policy's engine with its adapter off."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace

import httpx
import pytest

from openclaw_rl.engines.base import PRIORITY_BACKGROUND
from openclaw_rl.engines.dialect import FinishReason, GenerateReply, GenerateRequest, MetaInfo
from openclaw_rl.errors import EngineGone, EngineRefused, JudgeError, RequestError
from openclaw_rl.judge import client as ask_module
from openclaw_rl.judge.client import EngineJudgeClient, HttpJudgeClient
from openclaw_rl.judge.llm import Answer
from openclaw_rl.messages import Message
from openclaw_rl.settings import JudgeSettings

PROMPT = [Message(role="system", content="Grade."), Message(role="user", content="| x")]


def completion(text: str | None = r"\boxed{1}", finish: str = "stop") -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"content": text}, "finish_reason": finish}]})


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the client would have slept between its tries."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    # The module's own name: a server that another test left in a thread of this process sleeps by the real one.
    monkeypatch.setattr(ask_module, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
    return slept


@pytest.fixture
async def url() -> AsyncIterator[Callable[..., HttpJudgeClient]]:
    """`url(handler, model=…)`: an HttpJudgeClient against a handler."""
    clients: list[httpx.AsyncClient] = []

    def make(handler: Callable[[httpx.Request], httpx.Response], **settings: object) -> HttpJudgeClient:
        clients.append(httpx.AsyncClient(transport=httpx.MockTransport(handler)))
        values = {"kind": "llm", "url": "http://judge/v1/", "model": "judge-1", "timeout_s": 120.0} | settings
        return HttpJudgeClient(clients[-1], JudgeSettings.model_validate(values))

    yield make
    for client in clients:
        await client.aclose()


async def test_it_speaks_openai(url) -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return completion("fine", "length")

    ask = url(handler, api_key="secret", temperature=0.6)
    assert await ask(PROMPT, max_new_tokens=32) == Answer("fine", is_cut=True)
    assert str(seen[0].url) == "http://judge/v1/chat/completions"
    assert seen[0].headers["authorization"] == "Bearer secret"
    assert seen[0].headers["x-turn-type"] == "side"
    body = json.loads(seen[0].content)
    assert body == {
        "model": "judge-1",
        "temperature": 0.6,
        "max_tokens": 32,
        "messages": [{"role": "system", "content": "Grade."}, {"role": "user", "content": "| x"}],
    }


async def test_without_a_name_it_asks_for_the_first_model_once(url) -> None:
    paths: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return httpx.Response(200, json={"data": [{"id": "only"}]}) if request.method == "GET" else completion()

    ask = url(handler, model=None)
    await ask(PROMPT, max_new_tokens=8)
    await ask(PROMPT, max_new_tokens=8)
    assert paths == ["/v1/models", "/v1/chat/completions", "/v1/chat/completions"]


async def test_busy_judges_are_tried_again(url, pauses) -> None:
    replies = [httpx.Response(503), httpx.Response(429, headers={"Retry-After": "7"}), completion()]
    ask = url(lambda request: replies.pop(0))
    assert (await ask(PROMPT, max_new_tokens=8)).text == r"\boxed{1}"
    assert len(pauses) == 2
    assert pauses[1] == 7.0
    assert 0 < pauses[0] < 1


async def test_in_the_end_it_fails(url, pauses) -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(JudgeError, match="refused"):
        await url(gone)(PROMPT, max_new_tokens=8)
    assert len(pauses) == 3


@pytest.mark.parametrize(
    "reply",
    [
        httpx.Response(400, json={"error": {"message": "too long"}}),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json={"choices": []}),
        httpx.Response(200, json=["no object"]),
    ],
)
async def test_what_cannot_be_used_fails_at_once(url, pauses, reply) -> None:
    with pytest.raises(JudgeError):
        await url(lambda request: reply)(PROMPT, max_new_tokens=8)
    assert pauses == []


RENAMED = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
DEFAULT_ONLY = "Unsupported value: 'temperature' does not support 0.6 with this model."
NO_LIMIT = "max_completion_tokens: unknown field"


@pytest.mark.parametrize(
    "refusals",
    [
        {"max_tokens": RENAMED},
        {"temperature": DEFAULT_ONLY},
        {"max_tokens": RENAMED, "temperature": DEFAULT_ONLY},
        {"max_tokens": RENAMED, "max_completion_tokens": NO_LIMIT},
    ],
    ids=lambda refusals: "+".join(refusals),
)
async def test_a_parameter_that_the_judge_refuses_by_name_is_not_sent_again(url, pauses, refusals) -> None:
    bodies: list[dict[str, object]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        for name, words in refusals.items():
            if name in bodies[-1]:
                return httpx.Response(400, json={"error": {"message": words}})
        return completion()

    ask = url(handler)
    for _ in range(2):
        assert (await ask(PROMPT, max_new_tokens=8)).text == r"\boxed{1}"
    assert len(bodies) == 2 + len(refusals)
    assert not set(refusals) & bodies[-1].keys()
    is_renamed = "max_tokens" in refusals and "max_completion_tokens" not in refusals
    assert ("max_completion_tokens" in bodies[-1]) is is_renamed
    assert pauses == []


async def test_a_refusal_that_no_renaming_mends_is_shown_with_its_address(url, pauses) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404, json={"error": {"message": "The model 'grader' does not exist here."}})

    with pytest.raises(JudgeError, match="404 at http://judge/v1/chat/completions: The model 'grader' does not exist"):
        await url(handler)(PROMPT, max_new_tokens=8)


@pytest.mark.parametrize("status", [200, 401, 403, 404, 405, 500])
async def test_any_answer_reaches_a_judge_with_a_name(url, pauses, status: int) -> None:
    """Not every judge has a list of models, and not every key opens it."""
    await url(lambda request: httpx.Response(status)).reach()
    assert pauses == []


async def test_a_judge_without_a_name_is_reached_with_its_list(url) -> None:
    paths: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return httpx.Response(200, json={"data": [{"id": "only"}]}) if request.method == "GET" else completion()

    judge = url(handler, model=None)
    await judge.reach()
    await judge(PROMPT, max_new_tokens=8)
    assert paths == ["/v1/models", "/v1/chat/completions"]


@pytest.mark.parametrize("reply", [httpx.Response(401), httpx.Response(404), httpx.Response(200, json={"data": []})])
async def test_a_judge_without_a_name_or_a_list_cannot_be_asked(url, pauses, reply: httpx.Response) -> None:
    with pytest.raises(JudgeError):
        await url(lambda request: reply, model=None).reach()


@pytest.mark.parametrize("fault", [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), TimeoutError()])
@pytest.mark.parametrize("model", ["judge-1", None])
async def test_a_judge_that_is_away_is_named_by_its_address(url, pauses, fault: Exception, model: str | None) -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise fault

    with pytest.raises(JudgeError, match="judge did not answer at http://judge/v1/models"):
        await url(gone, model=model).reach()


@pytest.mark.parametrize("end", ["", "/", "/chat/completions", "/chat/completions/"])
async def test_the_address_may_go_down_to_the_route(url, end: str) -> None:
    seen: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(str(request.url))
        return completion()

    await url(handler, url=f"http://judge/v1{end}")(PROMPT, max_new_tokens=8)
    assert seen == ["http://judge/v1/chat/completions"]


async def test_reasoning_sent_apart_is_no_answer(url) -> None:
    assert (await url(lambda request: completion(None))(PROMPT, max_new_tokens=8)).text == ""


async def test_a_silent_judge_is_given_up(url) -> None:
    async def silence(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(JudgeError, match="within"):
        await url(silence, timeout_s=0.01)(PROMPT, max_new_tokens=8)


class StubEngine:
    """Only `generate`, from a list."""

    def __init__(self, *replies: GenerateReply | Exception | None) -> None:
        self.replies = list(replies)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.requests.append(request)
        reply = self.replies.pop(0)
        if reply is None:
            await asyncio.Event().wait()
        if isinstance(reply, Exception):
            raise reply
        return reply


def generated(*ids: int, finish: str = "stop") -> GenerateReply:
    return GenerateReply(output_ids=list(ids), meta_info=MetaInfo(finish_reason=FinishReason(type=finish)))


def engine_ask(engine: StubEngine, *, tail: str = "assistant\n", timeout_s: float = 120.0) -> EngineJudgeClient:
    words = {1: "Fine. ", 2: r"\boxed{1}", 9: tail}
    return EngineJudgeClient(
        engine,
        JudgeSettings(kind="llm", timeout_s=timeout_s),
        render=lambda messages: (7, 8, 9),
        decode=lambda ids: "".join(words.get(token, "") for token in ids),
        slots=asyncio.Semaphore(2),
    )


async def test_the_policys_engine_is_asked_without_adapter_and_behind_chats() -> None:
    engine = StubEngine(generated(1, 2), generated(1, finish="length"))
    ask = engine_ask(engine)
    assert await ask(PROMPT, max_new_tokens=32) == Answer(r"Fine. \boxed{1}", is_cut=False)
    assert await ask(PROMPT, max_new_tokens=32) == Answer("Fine. ", is_cut=True)
    request = engine.requests[0]
    assert (request.input_ids, request.lora_path, request.priority) == ([7, 8, 9], None, PRIORITY_BACKGROUND)
    assert request.sampling_params.max_new_tokens == 32


@pytest.mark.parametrize("has_user_role", [True, False])
async def test_a_template_without_a_system_role_gets_the_instructions_from_the_user(has_user_role: bool) -> None:
    rendered: list[list[Message]] = []

    def render(messages: Sequence[Message]) -> tuple[int, ...]:
        if messages[0].role == "system" or not has_user_role:
            raise RequestError("the messages cannot be rendered: System role not supported")
        rendered.append(list(messages))
        return (7, 8, 9)

    ask = EngineJudgeClient(
        StubEngine(generated(2)),
        JudgeSettings(kind="llm"),
        render=render,
        decode=lambda ids: r"\boxed{1}",
        slots=asyncio.Semaphore(2),
    )
    prompt = [Message(role="system", content="Grade it."), Message(role="user", content="| Hi")]
    if has_user_role:
        assert (await ask(prompt, max_new_tokens=32)).text == r"\boxed{1}"
        assert rendered == [[Message(role="user", content="Grade it.\n\n| Hi")]]
    else:
        with pytest.raises(JudgeError, match="cannot be its own judge: the messages"):
            await ask(prompt, max_new_tokens=32)


async def test_a_thought_that_the_template_opens_must_be_closed() -> None:
    ask = engine_ask(StubEngine(generated(2)), tail="assistant\n<think>\n")
    assert (await ask(PROMPT, max_new_tokens=32)).text == r"<think>\boxed{1}"


@pytest.mark.parametrize(
    "reply", [EngineGone("down"), EngineRefused("too long", status=400), generated(1, finish="abort"), None]
)
async def test_an_engine_that_fails_is_a_judge_that_failed(reply) -> None:
    with pytest.raises(JudgeError):
        await engine_ask(StubEngine(reply), timeout_s=0.01)(PROMPT, max_new_tokens=8)


GRADED = "It failed. \\boxed{-1}"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": GRADED, "reasoning_content": "maybe \\boxed{1}"}, GRADED),  # DeepSeek, vLLM, SGLang
        (
            {"content": GRADED, "reasoning": "\\boxed{1}", "reasoning_details": [{"text": "\\boxed{1}"}]},
            GRADED,
        ),  # OpenRouter
        ({"content": None, "reasoning_content": "maybe \\boxed{1}"}, ""),  # all of it was thought
        ({"content": "", "reasoning": "\\boxed{1}"}, ""),
        ({"content": None, "refusal": "I cannot grade this: \\boxed{1}"}, ""),
        ({"refusal": None}, ""),
        # Mistral: thoughts and text as parts
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "\\boxed{1}"}]},
                    {"type": "text", "text": GRADED},
                ]
            },
            GRADED,
        ),
        ({"content": [{"type": "output_text", "text": GRADED}]}, GRADED),
        ({"content": [{"type": "text", "text": "It failed. "}, {"type": "text", "text": "\\boxed{-1}"}]}, GRADED),
        ({"content": [{"type": "reasoning", "text": "\\boxed{1}"}, GRADED]}, GRADED),
        ({"content": {"type": "text", "text": GRADED}}, GRADED),
        ({"content": [{"type": "refusal", "refusal": "\\boxed{1}"}]}, ""),
        ({"content": [{"type": "text", "text": None}, {"type": "image_url"}]}, ""),
        ({"content": []}, ""),
    ],
)
async def test_only_the_final_words_of_an_answer_are_its_text(url, message: dict[str, object], text: str) -> None:
    body = {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": "stop"}]}
    ask = url(lambda _: httpx.Response(200, json=body))
    assert await ask(PROMPT, max_new_tokens=8) == Answer(text, is_cut=False)


@pytest.mark.parametrize("content", [5, True, [5], [None], [["\\boxed{1}"]]])
async def test_content_of_another_type_is_no_answer(url, content: object) -> None:
    ask = url(lambda _: httpx.Response(200, json={"choices": [{"message": {"content": content}}]}))
    with pytest.raises(JudgeError, match="another form"):
        await ask(PROMPT, max_new_tokens=8)


@pytest.mark.parametrize("finish", ["length", "max_tokens", "MAX_TOKENS", "model_length"])
async def test_each_word_for_the_limit_means_a_cut_answer(url, finish: str) -> None:
    assert (await url(lambda _: completion("\\boxed{1}", finish))(PROMPT, max_new_tokens=8)).is_cut
